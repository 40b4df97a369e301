"""The certificates that the coordinator keeps for itself: when they end, and when they are made anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from joining_members import AT, Members

from edgefl.coordinator import pki
from edgefl.coordinator.directory import CoordinatorDirectory, init_directory
from edgefl.coordinator.enrolment.certificates import (
    CA_RENEWAL_MARGIN_S,
    DAY_S,
    POLL_INTERVAL_S,
    CertificateRotation,
    compute_renewal_window,
    get_own_serial,
    list_own_expiries,
    renew_ca,
    renew_own_certificates,
)
from edgefl.coordinator.fleet.presence import DevicePresence, PresenceChanged
from edgefl.coordinator.fleet.registry import RegistryEvent
from edgefl.core.config import CertificateSettings
from edgefl.core.errors import NotFoundError
from edgefl.core.protocol import Command, CommandKind
from edgefl.device.enrolment.certificates import create_key, export_public_key
from edgefl.storage.repositories.certificates import list_revoked_serials, renew_certificate

NOW = time.time()
FAR = NOW + 20 * 365 * DAY_S


@pytest.fixture
def directory(tmp_path: Path) -> CoordinatorDirectory:
    return init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab")


def shown(directory: CoordinatorDirectory) -> tuple[bytes, bytes]:
    return directory.server_cert.read_bytes(), directory.client_cert.read_bytes()


def ca_end(directory: CoordinatorDirectory) -> float:
    return pki.get_expiry(directory.ca_cert.read_bytes())


@pytest.mark.parametrize(
    ("left_days", "ca_left_days", "is_due"),
    [(29, 9999, True), (31, 9999, False), (90, 9999, False), (92, 9999, True), (5, 5, False), (4, 5, True)],
)
def test_a_certificate_of_90_days_is_renewed_in_its_last_30_or_when_it_is_good_for_longer_if_the_ca_lets_it(
    left_days: float, ca_left_days: float, is_due: bool
) -> None:
    earliest, latest = compute_renewal_window(90 * DAY_S, NOW, ca_ends_at=NOW + ca_left_days * DAY_S)
    assert (not earliest <= NOW + left_days * DAY_S <= latest) is is_due


def test_a_clock_that_stands_in_1970_is_not_believed() -> None:
    assert compute_renewal_window(90 * DAY_S, 0.0, ca_ends_at=FAR)[0] > pki.EARLIEST_NOW.timestamp()


def test_the_coordinator_s_own_are_renewed_at_two_thirds_of_their_life(directory: CoordinatorDirectory) -> None:
    before, days = shown(directory), directory.certificates.server_days
    assert not renew_own_certificates(directory, now=NOW + 0.6 * days * DAY_S)
    assert shown(directory) == before
    assert renew_own_certificates(directory, now=NOW + 0.7 * days * DAY_S)
    assert all(new != old for new, old in zip(shown(directory), before, strict=True))
    assert not renew_own_certificates(directory, now=NOW)
    shorter = replace(directory, certificates=CertificateSettings(server_days=30.0))
    assert renew_own_certificates(shorter, now=NOW), "a shorter life is taken up at once"
    assert pki.get_expiry(directory.server_cert.read_bytes()) < NOW + 31 * DAY_S


@pytest.mark.parametrize("damaged", ["server_key", "client_cert"])
def test_a_pair_that_a_power_cut_parted_is_made_anew(directory: CoordinatorDirectory, damaged: str) -> None:
    path: Path = getattr(directory, damaged)
    path.write_bytes(directory.ca_key.read_bytes() if damaged.endswith("key") else b"")
    assert renew_own_certificates(directory, now=NOW)
    assert pki.is_key_pair(directory.server_cert.read_bytes(), directory.server_key.read_bytes())
    assert not renew_own_certificates(directory, now=NOW)


def test_the_ca_gets_a_new_end_with_the_same_key_in_its_last_years(directory: CoordinatorDirectory) -> None:
    former, end, key = directory.load_authority(), ca_end(directory), directory.ca_key.read_bytes()
    leaf = pki.issue_client_certificate(former, "pi-1")
    assert not renew_ca(directory, now=end - CA_RENEWAL_MARGIN_S - DAY_S)
    assert directory.ca_cert.read_bytes() == former.cert_pem
    assert renew_ca(directory, now=end - CA_RENEWAL_MARGIN_S + DAY_S)
    new = directory.load_authority()
    assert new.cert_pem != former.cert_pem
    assert directory.ca_key.read_bytes() == key
    assert pki.compute_fingerprint(new.cert_pem) == pki.compute_fingerprint(former.cert_pem), (
        "tokens and boards know it by this"
    )
    assert pki.is_key_pair(new.cert_pem, key)
    assert pki.get_expiry(leaf.cert_pem) < ca_end(directory)


def test_the_ends_of_all_three_certificates_are_told_in_unix_seconds(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab", port=8000)
    ends = list_own_expiries(directory)
    assert ends["ca"] == pki.get_expiry(directory.ca_cert.read_bytes())
    life_s = directory.certificates.server_days * DAY_S
    assert {name: end - time.time() for name, end in ends.items() if name != "ca"} == {
        "server": pytest.approx(life_s, abs=2 * DAY_S),
        "coordinator": pytest.approx(life_s, abs=2 * DAY_S),
    }


class Present:
    """A registry: who is known, and who of them is there."""

    def __init__(self, *names: str) -> None:
        self.names, self.there = set(names), set(names)
        self.tell: Callable[[RegistryEvent], None] = lambda _: None

    def list_devices(self) -> list[Any]:
        return [type("Info", (), {"device_id": name}) for name in sorted(self.names)]

    def get_device(self, name: str) -> Any:
        return name if name in self.names else None

    def is_reachable(self, name: str) -> bool:
        return name in self.there

    def subscribe(self, listener: Callable[[RegistryEvent], None]) -> Callable[[], None]:
        self.tell = listener
        return lambda: None


class Site(Members):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for name in ("pi-1", "pi-2"):
            self.join(name)
        self.registry, self.asked, self.taken_up = Present("pi-1", "pi-2"), list[str](), 0
        self.second, self.now = 0.0, AT
        self.rotation = self.start()

    def start(self) -> CertificateRotation:
        rotation = CertificateRotation(
            directory=self.directory, store=self.store, registry=self.registry,  # type: ignore[arg-type]
            send_command=self._send, on_own_renewed=self._own, clock=lambda: self.now, monotonic=lambda: self.second,
        )  # fmt: skip
        rotation.subscribe()
        return rotation

    def _send(self, name: str, command: Command) -> None:
        assert command.kind is CommandKind.RENEW
        self.asked.append(name)

    def _own(self) -> None:
        self.taken_up += 1

    def look(self) -> list[str]:
        """Who is asked at the next look."""
        self.asked.clear()
        self.second += POLL_INTERVAL_S
        self.rotation.poll()
        return sorted(self.asked)

    def renew(self, name: str) -> None:
        renew_certificate(
            self.store,
            name,
            public_key=export_public_key(create_key()),
            serial=f"{hash((name, self.now)) % 2**60:x}",
            expires_at=AT,
            at=self.now,
        )
        self.rotation.mark_renewed(name)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "c")


def test_a_rotation_asks_all_and_makes_the_coordinator_s_own_anew(site: Site) -> None:
    former, before = get_own_serial(site.directory), site.directory.server_cert.read_bytes()
    assert site.rotation.rotate() == ["pi-1", "pi-2"] == site.asked
    assert site.directory.server_cert.read_bytes() != before
    assert former in list_revoked_serials(site.store, now=0.0, own_serial=get_own_serial(site.directory))
    assert site.taken_up == 1


def test_who_has_not_renewed_is_asked_again_and_nobody_else(site: Site) -> None:
    site.rotation.rotate()
    assert site.look() == ["pi-1", "pi-2"]
    site.renew("pi-1")
    assert site.look() == ["pi-2"]
    site.rotation = site.start()
    assert site.look() == ["pi-2"], "a restart forgets nobody"
    site.registry.names.discard("pi-2")
    assert site.look() == [], "it was removed"
    site.registry.names.add("pi-2")
    site.renew("pi-2")
    assert site.look() == []


def test_a_supernode_has_no_certificate_to_renew(site: Site) -> None:
    site.store.add_supernode("node", b"key", groups=(), examples={}, at=AT)
    site.registry.names.add("node")
    assert site.rotation.rotate() == ["pi-1", "pi-2"]
    site.rotation = site.start()
    assert site.look() == ["pi-1", "pi-2"]
    with pytest.raises(NotFoundError):
        site.renew("node")


def test_two_rotations_in_a_row_ask_those_again_who_renewed_between_and_revoke_both_former_certificates(
    site: Site,
) -> None:
    former = [get_own_serial(site.directory)]
    site.rotation.rotate()
    former.append(get_own_serial(site.directory))
    site.now += 1.0
    site.renew("pi-1")
    site.now += 1.0
    site.asked.clear()
    assert site.rotation.rotate() == ["pi-1", "pi-2"] == site.asked
    assert site.look() == ["pi-1", "pi-2"]
    site.now += 1.0
    for name in ("pi-1", "pi-2"):
        site.renew(name)
    assert site.look() == []
    present = get_own_serial(site.directory)
    assert len({*former, present}) == 3
    assert set(former) <= set(list_revoked_serials(site.store, now=0.0, own_serial=present))
    assert site.taken_up == 2


def test_a_device_that_was_away_is_asked_when_it_comes(site: Site) -> None:
    site.registry.there.discard("pi-2")
    site.rotation.rotate()
    assert site.look() == ["pi-1"]
    site.asked.clear()
    site.registry.there.add("pi-2")
    change = PresenceChanged(device_id="pi-2", before=DevicePresence.GONE, after=DevicePresence.ONLINE, reason="back")
    site.registry.tell(change)
    assert site.asked == ["pi-2"]
    site.renew("pi-2")
    site.registry.tell(change)
    assert site.asked == ["pi-2"]


def test_without_a_rotation_nobody_is_asked_and_the_own_ones_are_renewed_in_time(site: Site) -> None:
    former = get_own_serial(site.directory)
    assert (site.look(), get_own_serial(site.directory)) == ([], former)
    site.now = AT + 500 * 365 * 86400.0
    site.rotation.poll()
    assert get_own_serial(site.directory) == former, "it looks once a minute"
    site.look()
    assert get_own_serial(site.directory) != former
    assert former in list_revoked_serials(site.store, now=0.0, own_serial=get_own_serial(site.directory))
    assert site.taken_up == 1
