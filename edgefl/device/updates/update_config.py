"""Update configuration of this installation, and its facts for the coordinator."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from edgefl.bundles.keys import TRUSTED_KEYS_FOLDER, TrustedKeys
from edgefl.core.errors import EdgeflError
from edgefl.core.types import Json
from edgefl.device.updates.slots import Slots, find_own_slots

UPDATER_TIMEOUT_S = 120.0
"""Time within which the updater must start, else it counts as missing."""
NO_SLOTS_REASON = (
    "this edgefl is not installed in slots (ROOT/a, ROOT/b, ROOT/current); update it by hand on the board"
)
ENTRY_POINT_PREFIX = "edgefl."


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareUpdateConfig:
    """Slots of this installation (None without slots) and the folder of trusted keys."""

    slots: Slots | None
    signers: Path = TRUSTED_KEYS_FOLDER
    updater_timeout_s: float = UPDATER_TIMEOUT_S


def load_update_config(signers: Path = TRUSTED_KEYS_FOLDER) -> SoftwareUpdateConfig:
    """Returns the configuration of this process."""
    return SoftwareUpdateConfig(slots=find_own_slots(), signers=signers)


def get_install_facts(config: SoftwareUpdateConfig) -> Json:
    """Returns installation facts for capabilities: remote updatability and installed packs."""
    if config.slots is None:
        return {"installs": {"able": False, "reason": NO_SLOTS_REASON}}
    try:
        signers, slot = TrustedKeys.load(config.signers), config.slots.get_active_slot()
        packs = {
            name: {"version": pack.version, **_list_entry_points(pack.projects)}
            for name, pack in sorted(config.slots.load_record(slot).packs.items())
        }
    except (EdgeflError, importlib.metadata.PackageNotFoundError) as error:
        return {"installs": {"able": False, "reason": str(error)}}
    facts: Json = {"able": bool(signers.keys), "slot": slot, "signers": sorted(signers.keys), "packs": packs}
    if not signers.keys:
        facts["reason"] = (
            f"it trusts no signer: {config.signers} holds no key; on the board: edgefl device trust KEY.pem"
        )
    return {"installs": facts}


def _list_entry_points(projects: tuple[str, ...]) -> dict[str, list[str]]:
    """Returns the entry points of a pack by kind: tasks, codecs and local steps."""
    names_by_kind: dict[str, list[str]] = {}
    for project in projects:
        for point in importlib.metadata.distribution(project).entry_points:
            if point.group.startswith(ENTRY_POINT_PREFIX):
                names_by_kind.setdefault(point.group.removeprefix(ENTRY_POINT_PREFIX), []).append(point.name)
    return names_by_kind
