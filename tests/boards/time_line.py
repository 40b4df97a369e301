"""When a board did what, in seconds since its power was switched on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from boards.console import Console

# What a first boot says on the console, in this order.
FIRST_BOOT = {
    "kernel": r"Booting Linux|Linux version",
    "systemd": r"Welcome to ",
    "cloud-init has read the card": r"Cloud-init v.* running 'init'",
    "payload kept": r"edgefl: kept;",
    "installing": r"edgefl: installing",
    "installed": r"edgefl-install: ready",
    "card scrubbed": r"edgefl: ready;",
    "joined": r"joined fleet",
}


@dataclass(slots=True)
class TimeLine:
    """Named moments, the first of which is 0."""

    title: str
    started_s: float = field(default_factory=time.time)
    moments: list[tuple[str, float]] = field(default_factory=list)

    def note(self, what: str, at_s: float | None = None) -> None:
        """Notes a moment; now, when none is given."""
        self.moments.append((what, (time.time() if at_s is None else at_s) - self.started_s))

    def note_first_boot(self, console: Console) -> None:
        """Notes what the console told of a first boot."""
        for what, pattern in FIRST_BOOT.items():
            if (at_s := console.first(pattern)) is not None:
                self.note(what, at_s)

    def text(self) -> str:
        """Returns a table, in the order of time."""
        rows = [f"  {seconds:8.1f} s  {what}" for what, seconds in sorted(self.moments, key=lambda each: each[1])]
        return "\n".join([self.title, *rows])
