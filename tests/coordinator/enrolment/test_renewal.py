"""Renewing at the coordinator; the device's side and both together are tested beside the device."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from cryptography import x509
from joining_members import AT, Members

from edgefl.coordinator import pki
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.enrolment.enrolment_service import MAX_PEM_CHARS
from edgefl.coordinator.enrolment.renewal import MAX_RENEWALS, REISSUE_WINDOW_S, RenewalService
from edgefl.core.errors import (
    EdgeflError,
    JoinError,
    NameTakenError,
    NetworkError,
    NotAllowedError,
    NotFoundError,
    TooManyTriesError,
)
from edgefl.device.enrolment.certificates import create_key, create_signing_request, export_public_key
from edgefl.storage.repositories.certificates import (
    DEVICE_REMOVED,
    ROTATION_REQUESTED,
    get_certificate_serials,
    list_devices_due_for_rotation,
    list_revoked_serials,
)


class Desk(Members):
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
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path / "c")
    desk.join("pi-1")
    desk.join("pi-2")
    return desk


def test_a_new_key_takes_the_place_of_the_old_one_and_the_old_certificate_counts_no_more(desk: Desk) -> None:
    former, key = get_certificate_serials(desk.store)["pi-1"], create_key()
    cert = desk.renew("pi-1", key, subject="pi-2")
    assert x509.load_pem_x509_certificate(cert).subject.rfc4514_string() == "CN=pi-1", "whatever its request says"
    assert desk.renewed == [("pi-1", export_public_key(key))]
    assert get_certificate_serials(desk.store)["pi-1"] == pki.get_serial(cert)
    assert former in list_revoked_serials(desk.store, now=0.0)
    assert desk.store.get_device("pi-1").public_key == export_public_key(key)


def test_the_same_request_again_gets_the_same_answer_and_uses_nothing_up(desk: Desk) -> None:
    key = create_key()
    certs = {desk.renew("pi-1", key) for _ in range(2 * MAX_RENEWALS)}
    assert (len(certs), len(desk.renewed)) == (1, 1)


def test_a_device_cannot_fill_the_list_of_certificates_and_may_go_on_later(desk: Desk) -> None:
    for _ in range(MAX_RENEWALS):
        desk.renew("pi-1", create_key())
    with pytest.raises(TooManyTriesError, match="pi-1 has renewed its certificate 5 times"):
        desk.renew("pi-1", create_key())
    assert desk.renew("pi-2", create_key()), "another one pays nothing for it"
    desk.now += REISSUE_WINDOW_S + 1
    assert desk.renew("pi-1", create_key())


def test_another_device_s_key_and_a_device_that_was_removed_meanwhile_are_refused(desk: Desk) -> None:
    with pytest.raises(NameTakenError):
        desk.renew("pi-1", desk.keys["pi-2"])
    desk.store.remove_device("pi-1", at=AT)
    with pytest.raises(NotFoundError):
        desk.renew("pi-1", create_key())
    assert desk.renewed == []


def test_what_is_no_request_or_does_not_prove_its_key_is_refused(desk: Desk) -> None:
    for csr in (None, 7, "x" * (MAX_PEM_CHARS + 1), "\u00fc"):
        with pytest.raises(NetworkError, match="csr must be a text"):
            desk.service.renew("pi-1", json.dumps({"v": 1, "csr": csr}).encode())
    text = create_signing_request(create_key(), "pi-1").decode()
    with pytest.raises(JoinError):
        desk.service.renew("pi-1", json.dumps({"v": 1, "csr": text.replace("A", "B")}).encode())


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
