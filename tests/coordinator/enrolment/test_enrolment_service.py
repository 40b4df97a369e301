from __future__ import annotations

import contextlib
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
from edgefl.coordinator.enrolment.enrolment_service import REISSUE_WINDOW_S, EnrolmentService
from edgefl.coordinator.enrolment.tokens import make_token
from edgefl.core.errors import JoinError, NameTakenError, NetworkError, UsageError, VersionError
from edgefl.core.protocol import EVALUATOR_NAME, MAX_JSON_BYTES, JoinToken
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store
from edgefl.system.https_client import create_pinned_context


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
            broker_port=8883,
            broker_host="broker.lan",
            evaluator_token=lambda: self.evaluator_token,
            clock=lambda: self.now,
        )
        self.token: JoinToken = make_token(self.store, self.directory, now=5000.0, uses=2)

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
    desk.now += REISSUE_WINDOW_S
    later = desk.service.enroll(request)["certificate"]
    assert later != given
    assert desk.service.enroll(request)["certificate"] == later
    assert len(read_history(desk.store, "events", where=["kind=certificate-issued"])) == 2
    desk.store.remove_device("pi-1", at=desk.now)
    assert desk.service.enroll(request)["certificate"] != later, "it joins again"


OTHER_KEY = _public(ec.generate_private_key(ec.SECP256R1()))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"public_key": OTHER_KEY}, JoinError),
        ({"version": "99.0.0"}, VersionError),
        ({"name": EVALUATOR_NAME, "role": "evaluator"}, NameTakenError),
        *(({"name": name}, (JoinError, UsageError)) for name in ("Pi 1", "coordinator")),
        *((changes, JoinError) for changes in ({"role": "boss"}, {"csr": "none"}, {"public_key": "none"})),
        *(
            (changes, NetworkError)
            for changes in (
                {"name": 3}, {"name": ""}, {"secret": None}, {"csr": "x" * 10_000}, {"capabilities": []},
                {"capabilities": {"facts": 3}}, {"capabilities": {"facts": {"a": [[[[[[[[]]]]]]]]}}},
                {"capabilities": {"shards": {"digits": "9" * 20_000}}}, {"token_id": "ä"}, {"v": 2},
            )
        ),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
@pytest.mark.parametrize("evaluator_token", [None, "another"])
def test_what_is_refused_uses_nothing_up_and_registers_nobody(
    desk: Desk, changes: dict[str, Any], error: type[Exception], evaluator_token: str | None
) -> None:
    desk.evaluator_token = evaluator_token
    with pytest.raises(error):
        desk.service.enroll(desk.request(**changes))
    assert desk.store.list_tokens()[0].uses_left == 2
    assert (desk.enrolled, desk.store.list_devices()) == ([], [])


def test_the_coordinator_s_own_token_lets_the_evaluator_in(desk: Desk) -> None:
    desk.evaluator_token = desk.token.token_id
    assert desk.service.enroll(desk.request(name=EVALUATOR_NAME))["device_id"] == EVALUATOR_NAME


def test_bytes_that_are_no_request_are_refused(desk: Desk) -> None:
    for body in (b"", b"[]", b"\xff", b"{", b'{"v":1}'):
        with pytest.raises(NetworkError):
            desk.service.enroll(body)


def test_a_body_above_the_limit_is_not_read(front_door: Any) -> None:
    context = create_pinned_context(front_door.directory.ca_cert.read_bytes())
    connection = http.client.HTTPSConnection("127.0.0.1", front_door.port, context=context, timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", "/edgefl/v1/enroll", body=b"x" * (MAX_JSON_BYTES + 1))
        response = connection.getresponse()
        answer = json.loads(response.read())
    assert (response.status, answer["v"], answer["error"]) == (400, 1, "network")
    assert "larger than" in answer["message"]
