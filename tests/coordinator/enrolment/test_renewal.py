"""Renewing at the coordinator; the device's side and both together are tested beside the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography import x509
from joining_members import AT, Members

from edgefl.coordinator import pki
from edgefl.coordinator.enrolment.renewal import MAX_RENEWALS, REISSUE_WINDOW_S, RenewalService
from edgefl.coordinator.enrolment.request_handling import MAX_PEM_CHARS
from edgefl.core.errors import JoinError, NameTakenError, NetworkError, NotFoundError, TooManyTriesError
from edgefl.device.enrolment.keys import create_key, create_signing_request, export_public_key
from edgefl.storage.repositories.certificates import get_certificate_serials, list_revoked_serials


class Desk(Members):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.now, self.renewed = AT, list[tuple[str, bytes]]()
        self.service = RenewalService(
            directory=self.directory,
            store=self.store,
            on_renewed=lambda name, key: self.renewed.append((name, key)),
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
