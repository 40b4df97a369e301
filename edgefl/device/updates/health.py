"""Agent health file `STATE/health.json`, by which the updater verifies a new version.

It is written when the agent starts, again when it has reached its coordinator, whose version it has then checked, and
when it is connected to the broker.
No clocks are compared, since those of boards are unreliable: the agent repeats the token of the trial that it found
when it started, which is new for every trial after `current` points to the new slot.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edgefl import __version__
from edgefl.core.safe_parsing import parse_json
from edgefl.device.updates.slots import Slots
from edgefl.device.updates.status import read_status
from edgefl.system.atomic_files import write_atomic

HEALTH_FILE = "health.json"
MAX_HEALTH_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHealth:
    """Health of one agent process: version, slot, trial token, and whether it reached the coordinator.

    `linked` is whether it has reached the broker; None for releases without this field.
    """

    boot_id: str
    version: str
    slot: str = ""
    token: str = ""
    connected: bool = False
    linked: bool | None = None
    packs: Mapping[str, str] = field(default_factory=dict)


def create_health(slots: Slots, boot_id: str) -> AgentHealth:
    """Returns the initial health of a starting agent."""
    trial, slot = read_status(slots).trial, slots.get_active_slot()
    packs = {name: pack.version for name, pack in slots.load_record(slot).packs.items()}
    token = trial.token if trial is not None else ""
    return AgentHealth(boot_id=boot_id, version=__version__, slot=slot, token=token, linked=False, packs=packs)


def write_health(state_dir: Path, health: AgentHealth) -> None:
    write_atomic(state_dir / HEALTH_FILE, json.dumps({"v": 1, **asdict(health)}).encode())


def read_health(state_dir: Path) -> AgentHealth | None:
    """Returns the agent's last health, None when unusable; its folder is another user's."""
    try:
        descriptor = os.open(state_dir / HEALTH_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        value = parse_json(os.read(descriptor, MAX_HEALTH_BYTES))
        return AgentHealth(
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
        os.close(descriptor)
