"""Renewing all certificates of a fleet now: each device is asked until it has done so, over restarts too."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.directory import CoordinatorDirectory, issue_own
from edgefl.coordinator.fleet.presence import Transition
from edgefl.coordinator.fleet.roster import Roster, RosterEvent
from edgefl.coordinator.joining.own_certificates import renew_own
from edgefl.protocol import Command, CommandKind
from edgefl.storage.certificate_rows import ROTATION_ASKED, due_for_rotation, note_issued
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
Send = Callable[[str, Command], None]


class Rotation:
    """Keeps who has still to renew its certificate, and renews the coordinator's own; safe from any thread.

    Args:
        directory: where the coordinator's own ones lie.
        store: where it is written that all were asked.
        roster: says who is there to be asked.
        send: sends a command to a device; it may get lost.
        on_own: called after the coordinator's own ones are new: whoever has them open takes them up.
        clock: Unix seconds.
        monotonic: seconds, for how often is looked.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        directory: CoordinatorDirectory,
        store: Store,
        roster: Roster,
        send: Send,
        on_own: Callable[[], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._store, self._roster = directory, store, roster
        self._send, self._on_own, self._clock = send, on_own, clock
        self._due = set(due_for_rotation(store))
        self._lock, self._monotonic = threading.Lock(), monotonic
        self._next_look_s = monotonic() + LOOK_EVERY_S

    def listen(self) -> Callable[[], None]:
        """Asks devices when they come; returns what ends that."""
        return self._roster.listen(self._heard)

    def rotate(self) -> list[str]:
        """Makes the coordinator's own certificates anew and returns the devices that were asked to renew theirs."""
        now = self._clock()
        former = own_serial(self._directory)
        issue_own(self._directory)
        note_own(self._directory, self._store, former=former, now=self._clock())
        with self._store.batch(durable=True):
            self._store.record_event(ROTATION_ASKED, "all certificates are renewed", at=now)
        with self._lock:
            self._due = {info.device_id for info in self._roster.known()}
            asked = sorted(self._due)
        self._on_own()
        for device_id in asked:
            self._ask(device_id)
        return asked

    def renewed(self, device_id: str) -> None:
        """Takes note that a device has a new certificate."""
        with self._lock:
            self._due.discard(device_id)

    def look(self) -> None:
        """Renews the coordinator's own certificates when it is time, and asks again who has not; call it often."""
        if self._monotonic() < self._next_look_s:
            return
        self._next_look_s = self._monotonic() + LOOK_EVERY_S
        former = own_serial(self._directory)
        if renew_own(self._directory, now=self._clock()):
            log.info("the coordinator's certificates are renewed")
            note_own(self._directory, self._store, former=former, now=self._clock())
            self._on_own()
        with self._lock:
            due = [name for name in self._due if self._roster.info(name) is not None]
        for device_id in due:
            if self._roster.worker(device_id) is not None:
                self._ask(device_id)

    def _heard(self, event: RosterEvent) -> None:
        if isinstance(event, Transition) and event.device_id in self._due and self._roster.worker(event.device_id):
            self._ask(event.device_id)

    def _ask(self, device_id: str) -> None:
        self._send(device_id, Command(id=f"renew-{uuid.uuid4().hex}", kind=CommandKind.RENEW))


def note_own(directory: CoordinatorDirectory, store: Store, *, former: str | None, now: float) -> None:
    """Remembers what the coordinator shows to the broker now; the former certificate counts no more."""
    cert_pem = directory.client_cert.read_bytes()
    note_issued(store, serial=pki.serial(cert_pem), ends_at=pki.expires_at(cert_pem), at=now, former=former)


def own_serial(directory: CoordinatorDirectory) -> str | None:
    """Returns the serial of the certificate that the coordinator shows to the broker, None where there is none."""
    path: Path = directory.client_cert
    return pki.serial(path.read_bytes()) if path.exists() else None
