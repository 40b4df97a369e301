"""A coordinator that was restored from a backup, and devices whose certificates are newer than that."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from joining_members import AT, Members

from edgefl.coordinator import pki
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.enrolment.reenrolment import ReenrolmentService
from edgefl.coordinator.enrolment.renewal import RenewalService
from edgefl.coordinator.enrolment.request_handling import MAX_PEM_CHARS
from edgefl.core.errors import EdgeflError, JoinError, NetworkError, NotAllowedError, NotFoundError
from edgefl.device.enrolment.keys import create_key, create_signing_request, export_public_key
from edgefl.storage.repositories.certificates import (
    DEVICE_REMOVED,
    ROTATION_REQUESTED,
    get_certificate_serials,
    list_devices_due_for_rotation,
    list_revoked_serials,
)


class Desk(Members):
    """A directory from a backup; `issued` are certificates that its lost successor has signed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.now, self.readmitted = AT, list[tuple[str, bytes]]()
        self.first = {name: self.join(name) for name in ("pi-1", "pi-2")}
        self.service = ReenrolmentService(
            directory=self.directory,
            store=self.store,
            on_reenrolled=lambda name, key: self.readmitted.append((name, key)),
            clock=lambda: self.now,
        )

    def issued(self, name: str, key: bytes, *, days: float = 90.0) -> bytes:
        return pki.sign_request(self.directory.load_authority(), create_signing_request(key, name), name, days=days)

    def show(self, certificate: bytes, key: bytes) -> None:
        body = {"csr": create_signing_request(key, "x").decode(), "certificate": certificate.decode()}
        self.service.reenroll(json.dumps({"v": 1, **body}).encode())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "c")


def test_a_certificate_that_was_issued_after_the_backup_counts_again_and_the_one_of_the_backup_no_more(
    desk: Desk,
) -> None:
    key = create_key()
    certificate = desk.issued("pi-1", key, days=91)
    desk.store.record_event(ROTATION_REQUESTED, "", at=AT)
    desk.show(certificate, key)
    assert list_devices_due_for_rotation(desk.store) == {"pi-1", "pi-2"}, (
        "a rotation that was asked for before still waits"
    )
    assert desk.readmitted == [("pi-1", export_public_key(key))]
    assert get_certificate_serials(desk.store)["pi-1"] == pki.get_serial(certificate)
    assert desk.store.get_device("pi-1").public_key == export_public_key(key)
    assert desk.first["pi-1"] in list_revoked_serials(desk.store, now=0.0)
    with pytest.raises(NotAllowedError, match="counts no more, or its key is known"):
        desk.show(certificate, key)


def test_of_two_certificates_the_later_one_counts_whichever_comes_first(desk: Desk) -> None:
    for name, order in (("pi-1", (91, 92)), ("pi-2", (92, 91))):
        keys = {days: create_key() for days in order}
        first, second = ((desk.issued(name, keys[days], days=days), keys[days]) for days in order)
        desk.show(*first)
        with contextlib.nullcontext() if name == "pi-1" else pytest.raises(NotAllowedError):
            desk.show(*second)
        assert desk.store.get_device(name).public_key == export_public_key(keys[92])


def test_a_certificate_that_was_replaced_before_the_backup_is_not_taken(desk: Desk) -> None:
    old_key, old = desk.keys["pi-1"], desk.issued("pi-1", desk.keys["pi-1"], days=365)
    renewal = RenewalService(
        directory=desk.directory, store=desk.store, on_renewed=lambda _name, _key: None, clock=lambda: AT
    )
    desk.show(old, old_key)  # so it is known, and ends later than what comes
    renewal.renew("pi-1", json.dumps({"v": 1, "csr": create_signing_request(create_key(), "pi-1").decode()}).encode())
    with pytest.raises(NotAllowedError):
        desk.show(old, old_key)


def test_a_device_that_was_removed_or_never_there_stays_out(desk: Desk) -> None:
    key = create_key()
    desk.store.remove_device("pi-1", at=AT)
    for name in ("pi-1", "pi-9"):
        with pytest.raises(NotFoundError):
            desk.show(desk.issued(name, key, days=91), key)
    assert desk.readmitted == []


def test_a_certificate_of_who_had_the_name_before_is_not_taken(desk: Desk) -> None:
    key = create_key()
    certificate = desk.issued("pi-1", key, days=365)
    desk.store.remove_device("pi-1", at=AT)
    desk.store.record_event(DEVICE_REMOVED, "", at=AT, device_id="pi-1")
    desk.join("pi-1")
    with pytest.raises(NotAllowedError):
        desk.show(certificate, key)


def test_only_who_has_the_key_of_a_device_s_certificate_of_this_fleet_is_let_in(desk: Desk, tmp_path: Path) -> None:
    key, stranger = create_key(), init_directory(tmp_path / "other", fleet="lab").load_authority()
    mine = desk.issued("pi-1", key, days=91)
    server = desk.directory.server_cert.read_bytes()
    for certificate, shown_by in (
        (mine, create_key()),
        (pki.sign_request(stranger, create_signing_request(key, "pi-1"), "pi-1", days=91), key),
        (desk.directory.ca_cert.read_bytes(), key),
        (server, desk.directory.server_key.read_bytes()),
        (mine[:200], key),
    ):
        with pytest.raises(JoinError):
            desk.show(certificate, shown_by)
    desk.now = pki.get_expiry(mine)
    with pytest.raises(NotAllowedError, match="has ended"):
        desk.show(mine, key)
    assert desk.readmitted == []


def test_what_is_no_certificate_is_refused(desk: Desk) -> None:
    csr = create_signing_request(create_key(), "pi-1").decode()
    for text in (None, 7, "x" * (MAX_PEM_CHARS + 1), "\u00fc"):
        for body in ({"csr": csr, "certificate": text}, {"csr": text, "certificate": csr}):
            with pytest.raises(NetworkError, match="must be a text"):
                desk.service.reenroll(json.dumps({"v": 1, **body}).encode())
    with pytest.raises(EdgeflError):
        desk.service.reenroll(json.dumps({"v": 1, "csr": csr, "certificate": csr}).encode())
