"""Where this agent is installed, and what the coordinator is told of it: can it be updated, which packs has it?"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from edgefl.bundles.keys import SIGNERS, Signers
from edgefl.device.slots.layout import Slots, own_slots
from edgefl.errors import EdgeflError
from edgefl.types import Json

NO_ANSWER_S = 120.0
"""An updater that does not begin within so long is not there."""
BY_HAND = "this edgefl is not installed in slots (ROOT/a, ROOT/b, ROOT/current); update it by hand on the board"
GROUP_PREFIX = "edgefl."


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an agent runs: its slots, None when there are none, and the keys that its board trusts."""

    slots: Slots | None
    signers: Path = SIGNERS
    no_answer_s: float = NO_ANSWER_S


def own_site(signers: Path = SIGNERS) -> Site:
    """Returns the site of this process."""
    return Site(slots=own_slots(), signers=signers)


def install_facts(site: Site) -> Json:
    """Returns what capabilities say: whether this board can be updated from afar, and which packs it has."""
    if site.slots is None:
        return {"installs": {"able": False, "reason": BY_HAND}}
    try:
        signers, slot = Signers.load(site.signers), site.slots.in_use()
        packs = {
            name: {"version": pack.version, **_points(pack.projects)}
            for name, pack in sorted(site.slots.record(slot).packs.items())
        }
    except (EdgeflError, importlib.metadata.PackageNotFoundError) as error:
        return {"installs": {"able": False, "reason": str(error)}}
    told: Json = {"able": bool(signers.keys), "slot": slot, "signers": sorted(signers.keys), "packs": packs}
    if not signers.keys:
        told["reason"] = (
            f"it trusts no signer: {site.signers} holds no key; on the board: edgefl device trust KEY.pem"
        )
    return {"installs": told}


def _points(projects: tuple[str, ...]) -> dict[str, list[str]]:
    """Returns what a pack offers, by kind: its tasks, codecs and local steps."""
    found: dict[str, list[str]] = {}
    for project in projects:
        for point in importlib.metadata.distribution(project).entry_points:
            if point.group.startswith(GROUP_PREFIX):
                found.setdefault(point.group.removeprefix(GROUP_PREFIX), []).append(point.name)
    return found
