"""How the updater learns whether a new version works: the agent says so in `STATE/health.json`.

It is written when the agent starts, again when it has reached its coordinator, whose version it has then checked, and
when it is connected to the broker.
No clocks are compared, boards have none that can be trusted: the agent repeats the token of the trial that it found
when it started, which is made anew for every trial after `current` leads to the new slot.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edgefl import __version__
from edgefl.device.slots.layout import Slots
from edgefl.device.slots.status import read_status
from edgefl.files import write_whole
from edgefl.untrusted import parse_json

NAME = "health.json"
MAX_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One life of an agent: what runs, in which slot, for which trial, and whether it has reached its coordinator.

    `linked` says whether it has reached the broker; None of releases that do not tell.
    """

    boot_id: str
    version: str
    slot: str = ""
    token: str = ""
    connected: bool = False
    linked: bool | None = None
    packs: Mapping[str, str] = field(default_factory=dict)


def begin_health(slots: Slots, boot_id: str) -> Health:
    """Returns what an agent that starts now has to say."""
    trial, slot = read_status(slots).trial, slots.in_use()
    packs = {name: pack.version for name, pack in slots.record(slot).packs.items()}
    token = trial.token if trial is not None else ""
    return Health(boot_id=boot_id, version=__version__, slot=slot, token=token, linked=False, packs=packs)


def write_health(state_dir: Path, health: Health) -> None:
    write_whole(state_dir / NAME, json.dumps({"v": 1, **asdict(health)}).encode())


def read_health(state_dir: Path) -> Health | None:
    """Returns what the agent has written last; None when that is nothing of use. Its folder is another user's."""
    try:
        handle = os.open(state_dir / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        value = parse_json(os.read(handle, MAX_BYTES))
        return Health(
            boot_id=str(value["boot_id"]),
            version=str(value["version"]),
            slot=str(value["slot"]),
            token=str(value["token"]),
            connected=value["connected"] is True,
            linked=value["linked"] is True if "linked" in value else None,
            packs={str(name): str(version) for name, version in value["packs"].items()},
        )
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    finally:
        os.close(handle)
