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
from joining_members import AT, Members

from edgefl import __version__
from edgefl.coordinator import pki
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.enrolment.enrolment_service import (
    MAX_PEM_CHARS,
    MAX_RENEWALS,
    REISSUE_WINDOW_S,
    EnrolmentService,
    RenewalService,
    _is_bad_attempt,
    _is_bad_reenrolment,
)
from edgefl.coordinator.enrolment.tokens import make_token
from edgefl.core.errors import (
    EdgeflError,
    JoinError,
    NameTakenError,
    NetworkError,
    NotAllowedError,
    NotFoundError,
    TokenExpiredError,
    TokenInvalidError,
    TokenUsedError,
    TooManyTriesError,
    UsageError,
    VersionError,
)
from edgefl.core.protocol import EVALUATOR_NAME, MAX_JSON_BYTES, JoinToken
from edgefl.device.enrolment.certificates import create_key, create_signing_request, export_public_key
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.certificates import (
    DEVICE_REMOVED,
    ROTATION_REQUESTED,
    get_certificate_serials,
    list_devices_due_for_rotation,
    list_revoked_serials,
)
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


class Renewals(Members):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.now, self.renewed = AT, list[tuple[str, bytes]]()
        self.service = RenewalService(
            directory=self.directory,
            store=self.store,
            on_renewed=lambda name, key: self.renewed.append((name, key)),
            on_reenrolled=lambda *_: None,
            clock=lambda: self.now,
        )

    def renew(self, name: str, key: bytes, subject: str = "whatever") -> bytes:
        body = json.dumps({"v": 1, "csr": create_signing_request(key, subject).decode()}).encode()
        return str(self.service.renew(name, body)["certificate"]).encode()


@pytest.fixture
def renewals(tmp_path: Path) -> Renewals:
    renewals = Renewals(tmp_path / "c")
    renewals.join("pi-1")
    renewals.join("pi-2")
    return renewals


def test_a_new_key_takes_the_place_of_the_old_one_and_the_old_certificate_counts_no_more(
    renewals: Renewals,
) -> None:
    former, key = get_certificate_serials(renewals.store)["pi-1"], create_key()
    cert = renewals.renew("pi-1", key, subject="pi-2")
    assert x509.load_pem_x509_certificate(cert).subject.rfc4514_string() == "CN=pi-1", "whatever its request says"
    assert renewals.renewed == [("pi-1", export_public_key(key))]
    assert get_certificate_serials(renewals.store)["pi-1"] == pki.get_serial(cert)
    assert former in list_revoked_serials(renewals.store, now=0.0)
    assert renewals.store.get_device("pi-1").public_key == export_public_key(key)


def test_the_same_request_again_gets_the_same_answer_and_uses_nothing_up(renewals: Renewals) -> None:
    key = create_key()
    certs = {renewals.renew("pi-1", key) for _ in range(2 * MAX_RENEWALS)}
    assert (len(certs), len(renewals.renewed)) == (1, 1)


def test_a_device_cannot_fill_the_list_of_certificates_and_may_go_on_later(renewals: Renewals) -> None:
    for _ in range(MAX_RENEWALS):
        renewals.renew("pi-1", create_key())
    with pytest.raises(TooManyTriesError, match="pi-1 has renewed its certificate 5 times"):
        renewals.renew("pi-1", create_key())
    assert renewals.renew("pi-2", create_key()), "another one pays nothing for it"
    renewals.now += REISSUE_WINDOW_S + 1
    assert renewals.renew("pi-1", create_key())


def test_another_device_s_key_and_a_device_that_was_removed_meanwhile_are_refused(renewals: Renewals) -> None:
    with pytest.raises(NameTakenError):
        renewals.renew("pi-1", renewals.keys["pi-2"])
    renewals.store.remove_device("pi-1", at=AT)
    with pytest.raises(NotFoundError):
        renewals.renew("pi-1", create_key())
    assert renewals.renewed == []


def test_what_is_no_request_or_does_not_prove_its_key_is_refused(renewals: Renewals) -> None:
    for csr in (None, 7, "x" * (MAX_PEM_CHARS + 1), "\u00fc"):
        with pytest.raises(NetworkError, match="csr must be a text"):
            renewals.service.renew("pi-1", json.dumps({"v": 1, "csr": csr}).encode())
    text = create_signing_request(create_key(), "pi-1").decode()
    with pytest.raises(JoinError):
        renewals.service.renew("pi-1", json.dumps({"v": 1, "csr": text.replace("A", "B")}).encode())


class ReenrolmentDesk(Members):
    """A directory from a backup; `issued` are certificates that its lost successor has signed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.now, self.reenrolled = AT, list[tuple[str, bytes]]()
        self.first = {name: self.join(name) for name in ("pi-1", "pi-2")}
        self.service = RenewalService(
            directory=self.directory,
            store=self.store,
            on_renewed=lambda *_: None,
            on_reenrolled=lambda name, key: self.reenrolled.append((name, key)),
            clock=lambda: self.now,
        )

    def issued(self, name: str, key: bytes, *, days: float = 90.0) -> bytes:
        return pki.sign_request(self.directory.load_authority(), create_signing_request(key, name), name, days=days)

    def show(self, certificate: bytes, key: bytes) -> None:
        body = {"csr": create_signing_request(key, "x").decode(), "certificate": certificate.decode()}
        self.service.reenroll(json.dumps({"v": 1, **body}).encode())


@pytest.fixture
def reenrolment_desk(tmp_path: Path) -> ReenrolmentDesk:
    return ReenrolmentDesk(tmp_path / "c")


def test_a_certificate_that_was_issued_after_the_backup_counts_again_and_the_one_of_the_backup_no_more(
    reenrolment_desk: ReenrolmentDesk,
) -> None:
    key = create_key()
    certificate = reenrolment_desk.issued("pi-1", key, days=91)
    reenrolment_desk.store.record_event(ROTATION_REQUESTED, "", at=AT)
    reenrolment_desk.show(certificate, key)
    assert list_devices_due_for_rotation(reenrolment_desk.store) == {"pi-1", "pi-2"}, (
        "a rotation that was asked for before still waits"
    )
    assert reenrolment_desk.reenrolled == [("pi-1", export_public_key(key))]
    assert get_certificate_serials(reenrolment_desk.store)["pi-1"] == pki.get_serial(certificate)
    assert reenrolment_desk.store.get_device("pi-1").public_key == export_public_key(key)
    assert reenrolment_desk.first["pi-1"] in list_revoked_serials(reenrolment_desk.store, now=0.0)
    with pytest.raises(NotAllowedError, match="counts no more, or its key is known"):
        reenrolment_desk.show(certificate, key)


def test_of_two_certificates_the_later_one_counts_whichever_comes_first(reenrolment_desk: ReenrolmentDesk) -> None:
    for name, order in (("pi-1", (91, 92)), ("pi-2", (92, 91))):
        keys = {days: create_key() for days in order}
        first, second = ((reenrolment_desk.issued(name, keys[days], days=days), keys[days]) for days in order)
        reenrolment_desk.show(*first)
        with contextlib.nullcontext() if name == "pi-1" else pytest.raises(NotAllowedError):
            reenrolment_desk.show(*second)
        assert reenrolment_desk.store.get_device(name).public_key == export_public_key(keys[92])


def test_a_certificate_that_was_replaced_before_the_backup_is_not_taken(reenrolment_desk: ReenrolmentDesk) -> None:
    old_key, old = (
        reenrolment_desk.keys["pi-1"],
        reenrolment_desk.issued("pi-1", reenrolment_desk.keys["pi-1"], days=365),
    )
    renewal = RenewalService(
        directory=reenrolment_desk.directory,
        store=reenrolment_desk.store,
        on_renewed=lambda *_: None,
        on_reenrolled=lambda *_: None,
        clock=lambda: AT,
    )
    reenrolment_desk.show(old, old_key)  # so it is known, and ends later than what comes
    renewal.renew("pi-1", json.dumps({"v": 1, "csr": create_signing_request(create_key(), "pi-1").decode()}).encode())
    with pytest.raises(NotAllowedError):
        reenrolment_desk.show(old, old_key)


def test_a_device_that_was_removed_or_never_there_stays_out(reenrolment_desk: ReenrolmentDesk) -> None:
    key = create_key()
    reenrolment_desk.store.remove_device("pi-1", at=AT)
    for name in ("pi-1", "pi-9"):
        with pytest.raises(NotFoundError):
            reenrolment_desk.show(reenrolment_desk.issued(name, key, days=91), key)
    assert reenrolment_desk.reenrolled == []


def test_a_certificate_of_who_had_the_name_before_is_not_taken(reenrolment_desk: ReenrolmentDesk) -> None:
    key = create_key()
    certificate = reenrolment_desk.issued("pi-1", key, days=365)
    reenrolment_desk.store.remove_device("pi-1", at=AT)
    reenrolment_desk.store.record_event(DEVICE_REMOVED, "", at=AT, device_id="pi-1")
    reenrolment_desk.join("pi-1")
    with pytest.raises(NotAllowedError):
        reenrolment_desk.show(certificate, key)


def test_only_who_has_the_key_of_a_device_s_certificate_of_this_fleet_is_let_in(
    reenrolment_desk: ReenrolmentDesk, tmp_path: Path
) -> None:
    key, stranger = create_key(), init_directory(tmp_path / "other", fleet="lab").load_authority()
    mine = reenrolment_desk.issued("pi-1", key, days=91)
    server = reenrolment_desk.directory.server_cert.read_bytes()
    for certificate, shown_by in (
        (mine, create_key()),
        (pki.sign_request(stranger, create_signing_request(key, "pi-1"), "pi-1", days=91), key),
        (reenrolment_desk.directory.ca_cert.read_bytes(), key),
        (server, reenrolment_desk.directory.server_key.read_bytes()),
        (mine[:200], key),
    ):
        with pytest.raises(JoinError):
            reenrolment_desk.show(certificate, shown_by)
    reenrolment_desk.now = pki.get_expiry(mine)
    with pytest.raises(NotAllowedError, match="has ended"):
        reenrolment_desk.show(mine, key)
    assert reenrolment_desk.reenrolled == []


def test_what_is_no_certificate_is_refused(reenrolment_desk: ReenrolmentDesk) -> None:
    csr = create_signing_request(create_key(), "pi-1").decode()
    for text in (None, 7, "x" * (MAX_PEM_CHARS + 1), "\u00fc"):
        for body in ({"csr": csr, "certificate": text}, {"csr": text, "certificate": csr}):
            with pytest.raises(NetworkError, match="must be a text"):
                reenrolment_desk.service.reenroll(json.dumps({"v": 1, **body}).encode())
    with pytest.raises(EdgeflError):
        reenrolment_desk.service.reenroll(json.dumps({"v": 1, "csr": csr, "certificate": csr}).encode())


def test_what_is_no_guess_at_a_token_costs_no_try() -> None:
    guesses = (TokenInvalidError, NetworkError, UsageError, JoinError)
    others = (TokenExpiredError, TokenUsedError, NameTakenError, TooManyTriesError)
    assert [_is_bad_attempt(kind("x")) for kind in (*guesses, *others)] == [True] * 4 + [False] * 4
    bad = (JoinError, TokenExpiredError, NetworkError, NotAllowedError)
    assert [_is_bad_reenrolment(kind("x")) for kind in (*bad, UsageError)] == [True] * 4 + [False]
