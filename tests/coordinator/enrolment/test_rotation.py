from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from joining_members import AT, Members

from edgefl.coordinator.enrolment.rotation import POLL_INTERVAL_S, CertificateRotation, get_own_serial
from edgefl.coordinator.fleet.presence import DevicePresence, PresenceChanged
from edgefl.coordinator.fleet.registry import RegistryEvent
from edgefl.core.protocol import Command, CommandKind
from edgefl.device.enrolment.keys import create_key, export_public_key
from edgefl.storage.repositories.certificates import list_revoked_serials, renew_certificate


class Present:
    """A roster: who is known, and who of them is there."""

    def __init__(self, *names: str) -> None:
        self.names, self.there = set(names), set(names)
        self.tell: Callable[[RegistryEvent], None] = lambda _: None

    def list_devices(self) -> list[Any]:
        return [type("Info", (), {"device_id": name}) for name in sorted(self.names)]

    def get_device(self, name: str) -> Any:
        return name if name in self.names else None

    def get_schedulable(self, name: str) -> Any:
        return name if name in self.there else None

    def subscribe(self, listener: Callable[[RegistryEvent], None]) -> Callable[[], None]:
        self.tell = listener
        return lambda: None


class Site(Members):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for name in ("pi-1", "pi-2"):
            self.join(name)
        self.roster, self.asked, self.taken_up = Present("pi-1", "pi-2"), list[str](), 0
        self.second, self.now = 0.0, AT
        self.rotation = self.start()

    def start(self) -> CertificateRotation:
        rotation = CertificateRotation(
            directory=self.directory, store=self.store, registry=self.roster,  # type: ignore[arg-type]
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
            serial=f"{hash(name) % 2**60:x}",
            expires_at=AT,
            at=AT,
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
    site.roster.names.discard("pi-2")
    assert site.look() == [], "it was removed"
    site.roster.names.add("pi-2")
    site.renew("pi-2")
    assert site.look() == []


def test_a_device_that_was_away_is_asked_when_it_comes(site: Site) -> None:
    site.roster.there.discard("pi-2")
    site.rotation.rotate()
    assert site.look() == ["pi-1"]
    site.asked.clear()
    site.roster.there.add("pi-2")
    change = PresenceChanged(device_id="pi-2", before=DevicePresence.GONE, after=DevicePresence.ONLINE, reason="back")
    site.roster.tell(change)
    assert site.asked == ["pi-2"]
    site.renew("pi-2")
    site.roster.tell(change)
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
