"""Rounds whose devices add up their updates among themselves: their instructions, and what of their replies counts.

A member that has done all of the round's all-reduces holds the same displacement as all others that have; one of them
sends it. A group that lost a member falls back to the coordinator: each member sends its own displacement since the
round began, with the number of all-reduces that it is the result of. Those with the largest number count, and hold
all that the others had sent before; so no update is lost with a member that sent it, and none counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.core.config import AggregationSection
from edgefl.core.errors import StrategyError
from edgefl.core.types import NUM_REDUCTIONS, Array, CollectiveConfig, DeviceInfo, FleetView, Update
from edgefl.strategies.aggregation import StreamingMean, dense_tensor
from edgefl.strategies.peer_algorithms.collectives import MAX_MEMBERS, Collective, choose_collective, list_blocks
from edgefl.strategies.peer_algorithms.topology import read_hosts
from edgefl.strategies.strategy_config import CollectiveRules
from edgefl.strategies.synchronous.round_state import OpenRound


def make_rules(section: AggregationSection) -> CollectiveRules | None:
    """Returns the rules of a run file; None where the coordinator adds up the updates.

    Raises:
        ConfigError: the file of hosts is missing or malformed.
    """
    if not section.is_collective:
        return None
    hosts = {} if section.hosts is None else read_hosts(section.hosts)
    return CollectiveRules(collective=section.collective, reductions=section.reductions, hosts=hosts)


def make_group(
    rules: CollectiveRules, members: Sequence[str], view: FleetView, *, version: int, group: str, model_bytes: int
) -> CollectiveConfig:
    """Returns the config of a group of devices that begin with this version; they upload in turns.

    Raises:
        StrategyError: there are more than `MAX_MEMBERS`.
    """
    if len(members) > MAX_MEMBERS:
        raise StrategyError(
            f"aggregation.collective = {rules.collective!r} takes at most {MAX_MEMBERS} devices in a round, got "
            f"{len(members)}: set devices.count"
        )
    return CollectiveConfig(
        collective=_choose(rules.collective, len(members), model_bytes),
        members=tuple(members),
        group=group,
        reductions=rules.reductions,
        uploader=members[version % len(members)],
        addresses=tuple(find_address(rules, view.devices[name]) for name in members),
    )


def _choose(name: str, num_members: int, model_bytes: int) -> Collective:
    if name == "auto":
        return choose_collective(num_members, model_bytes)
    if name == "ring":
        return "ring"
    # A power of two has one block, which is a butterfly; other numbers have none.
    return "butterfly" if len(list_blocks(num_members)) == 1 else "binary-blocks"


def find_address(rules: CollectiveRules, info: DeviceInfo) -> str:
    """Returns where a device listens, by the file or its own report; empty if unknown."""
    return rules.hosts.get(info.device_id) or str(info.capabilities.get("peer_address", ""))


def record_reductions(current_round: OpenRound, slot: str, update: Update, total: int) -> None:
    """Records of an update that fills a slot how many all-reduces it is the result of, and whether it has tensors."""
    count = min(max(0, int(update.metrics.extra.get(NUM_REDUCTIONS, 0))), total)
    current_round.reduced[slot] = count, bool(update.tensors)


def has_displacement(current_round: OpenRound) -> bool:
    """Returns whether the updates that count say how the model moves."""
    return any(current_round.reduced[slot][1] for slot in _list_newest(current_round))


def find_holder(current_round: OpenRound, view: FleetView) -> tuple[str, str] | None:
    """Returns an idle device whose update counts, and its assignment, where none has sent the displacement."""
    for slot in _list_newest(current_round):
        update = current_round.fold.waiting[slot]
        if update.device_id in view.idle and update.assignment_id not in current_round.resent.values():
            return update.device_id, update.assignment_id
    return None


def discard_updates(current_round: OpenRound) -> None:
    """Empties a round whose displacement went with the devices that held it."""
    current_round.fold = StreamingMean()
    current_round.cursor = 0
    for entries in (
        current_round.assigned,
        current_round.order,
        current_round.cancelled,
        current_round.copies,
        current_round.reduced,
        current_round.resent,
    ):
        entries.clear()


def compute_reduced(
    current_round: OpenRound, model: Mapping[str, Array], buffers: frozenset[str], total: int
) -> Mapping[str, Array]:
    """Returns the displacement that all members hold, or the mean of those that count where a group fell back."""
    fold, newest = current_round.fold, _list_newest(current_round)
    fold.waiting = {slot: fold.waiting[slot] for slot in newest}
    source = next((slot for slot in newest if current_round.reduced[slot] == (total, True)), None)
    if source is None:
        return fold.compute_mean(model, buffers)
    displacement = {name: dense_tensor(fold.waiting[source], name, like) for name, like in model.items()}
    repeated = {current_round.resent.get(update.assignment_id) for update in fold.waiting.values()}
    fold.used = {
        slot: update.assignment_id for slot, update in fold.waiting.items() if update.assignment_id not in repeated
    }
    fold.waiting.clear()
    return displacement


def _list_newest(current_round: OpenRound) -> list[str]:
    """Returns the slots of the updates of most all-reduces, in the order of assignment."""
    reduced = current_round.reduced
    most = max((count for count, _ in reduced.values()), default=0)
    return [slot for slot in current_round.fold.expected if slot in reduced and reduced[slot][0] == most]
