from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from edgefl import __version__
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.joining.enrolment import REMEMBER_S, BrokerSite, EnrolmentService
from edgefl.coordinator.joining.tokens import TokenTerms, make_token
from edgefl.device.trust import pinned_context
from edgefl.errors import JoinError, NameTakenError, NetworkError, UsageError, VersionError
from edgefl.protocol import EVALUATOR_NAME, MAX_JSON_BYTES, JoinToken
from edgefl.storage.queries import history
from edgefl.storage.store import Store


class Desk:
    def __init__(self, root: Path) -> None:
        self.directory = init_directory(root, hosts=["pi.local"], fleet="lab")
        self.store = Store.open(self.directory.database)
        self.enrolled: list[str] = []
        self.evaluator_token: str | None = None
        self.now = 5000.0
        self.service = EnrolmentService(
            directory=self.directory,
            store=self.store,
            on_enrolled=lambda device_id, _key: self.enrolled.append(device_id),
            broker=BrokerSite(port=8883, host="broker.lan"),
            evaluator_token=lambda: self.evaluator_token,
            clock=lambda: self.now,
        )
        self.token: JoinToken = make_token(self.store, self.directory, TokenTerms(uses=2), now=5000.0)

    def request(self, **changes: Any) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "whatever")])
        csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
        value = {
            "v": 1,
            "token_id": self.token.token_id,
            "secret": self.token.secret,
            "name": "pi-1",
            "role": "trainer",
            "csr": csr.public_bytes(Encoding.PEM).decode(),
            "public_key": _public(key),
            "capabilities": {"facts": {"cores": 4}, "shards": {}},
            "version": __version__,
        }
        return json.dumps(value | changes).encode()


def _public(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "c")
    yield made
    made.store.close()


def test_the_answer_says_where_everything_is(desk: Desk) -> None:
    answer = desk.service.enroll(desk.request(a_field_of_the_future=1))
    assert (answer["device_id"], answer["fleet"], answer["addresses"]) == ("pi-1", "lab", ["pi.local:8000"])
    assert answer["broker"] == {"port": 8883, "host": "broker.lan"}
    assert desk.service.hello()["time"] == 5000.0


def test_who_asks_again_and_again_gets_one_certificate_in_ten_minutes(desk: Desk) -> None:
    request = desk.request()
    given = desk.service.enroll(request)["certificate"]
    assert {desk.service.enroll(request)["certificate"] for _ in range(5)} == {given}
    desk.now += REMEMBER_S
    later = desk.service.enroll(request)["certificate"]
    assert later != given
    assert desk.service.enroll(request)["certificate"] == later
    assert len(history(desk.store, "events", where=["kind=certificate-issued"])) == 2


def test_a_board_that_was_removed_gets_another_certificate_when_it_joins_again(desk: Desk) -> None:
    request = desk.request()
    given = desk.service.enroll(request)["certificate"]
    desk.store.remove_device("pi-1", at=desk.now)
    assert desk.service.enroll(request)["certificate"] != given


def test_a_key_that_is_not_the_request_s_is_refused(desk: Desk) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(JoinError, match="not the one of the certificate request"):
        desk.service.enroll(desk.request(public_key=_public(other)))


@pytest.mark.parametrize("evaluator_token", [None, "another"])
def test_a_board_with_an_ordinary_token_cannot_take_the_evaluator_s_name(
    desk: Desk, evaluator_token: str | None
) -> None:
    desk.evaluator_token = evaluator_token
    with pytest.raises(NameTakenError, match="is reserved"):
        desk.service.enroll(desk.request(name=EVALUATOR_NAME, role="evaluator"))
    assert (desk.enrolled, desk.store.devices()) == ([], [])


def test_the_coordinator_s_own_token_lets_the_evaluator_in(desk: Desk) -> None:
    desk.evaluator_token = desk.token.token_id
    assert desk.service.enroll(desk.request(name=EVALUATOR_NAME))["device_id"] == EVALUATOR_NAME


def test_another_version_is_told_who_must_update(desk: Desk) -> None:
    with pytest.raises(VersionError, match="update the coordinator"):
        desk.service.enroll(desk.request(version="99.0.0"))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 3},
        {"name": ""},
        {"secret": None},
        {"csr": "x" * 10_000},
        {"capabilities": []},
        {"capabilities": {"facts": 3}},
        {"capabilities": {"facts": {"a": [[[[[[[[]]]]]]]]}}},
        {"capabilities": {"shards": {"digits": "9" * 20_000}}},
        {"token_id": "ä"},
        {"v": 2},
    ],
)
def test_a_malformed_request_is_a_network_error(desk: Desk, changes: dict[str, Any]) -> None:
    with pytest.raises(NetworkError):
        desk.service.enroll(desk.request(**changes))


@pytest.mark.parametrize("changes", [{"name": "Pi 1"}, {"role": "boss"}, {"csr": "none"}, {"public_key": "none"}])
def test_a_request_that_makes_no_sense_is_refused(desk: Desk, changes: dict[str, Any]) -> None:
    with pytest.raises((JoinError, UsageError)):
        desk.service.enroll(desk.request(**changes))


def test_refused_requests_use_nothing_up_and_register_nobody(desk: Desk) -> None:
    for changes in ({"name": "coordinator"}, {"role": "boss"}, {"csr": "none"}, {"version": "9.9.9"}):
        with pytest.raises((JoinError, VersionError)):
            desk.service.enroll(desk.request(**changes))
    assert desk.store.tokens()[0].uses_left == 2
    assert desk.store.devices() == []
    assert desk.enrolled == []


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"{", b'{"v":1}'])
def test_bytes_that_are_no_request_are_refused(desk: Desk, body: bytes) -> None:
    with pytest.raises(NetworkError):
        desk.service.enroll(body)


def _post(door: Any, body: Any, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    context = pinned_context(door.directory.ca_cert.read_bytes())
    connection = http.client.HTTPSConnection("127.0.0.1", door.port, context=context, timeout=10)
    try:
        connection.request("POST", "/edgefl/v1/enroll", body=body, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_a_body_above_the_limit_is_not_read(front_door: Any) -> None:
    status, answer = _post(front_door, b"x" * (MAX_JSON_BYTES + 1), {})
    assert (status, answer["v"], answer["error"]) == (400, 1, "network")
    assert "larger than" in answer["message"]
