"""Collectives of simulated devices: trainings in step, all-reduces over the devices' own links, and lost members.

All members begin an all-reduce when the last one has trained, and end it together. Their transfers use their own
links, not the coordinator's; sums are added up as real devices do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edgefl.core.types import NUM_REDUCTIONS, PEER_BYTES, Array, CollectiveConfig, Tensors, TrainInstruction
from edgefl.simulation.backends.trainer import EncodedModel, TrainingJob, TrainingResult
from edgefl.simulation.device import InFlightWork, SimulatedDevice
from edgefl.simulation.network import SimulatedDownlink, SimulationEventQueue
from edgefl.strategies.peer_algorithms.collectives import (
    LinkSpeed,
    compute_end_times,
    count_sent,
    make_schedule,
    reduce_vectors,
)
from edgefl.strategies.peer_algorithms.model_vectors import pack_update, unpack_mean

PEER_TIMEOUT_S = 6.0
"""How long it takes until the others notice that a member is gone."""
REPORT_BYTES = 32
"""The hash that a member sends in place of what all of them hold."""

Deliver = Callable[[InFlightWork, TrainingResult], None]


@dataclass(slots=True, eq=False)
class _Member:
    """A device in a group: its work, its training for the present all-reduce, and its sums over the former."""

    work: InFlightWork
    trained: TrainingResult | None = None
    is_delivered: bool = False
    loss_sum: float = 0.0
    num_iterations: int = 0
    peer_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Group:
    config: CollectiveConfig
    model: EncodedModel
    members: dict[str, _Member] = field(default_factory=dict)
    start: dict[str, Array] = field(default_factory=dict)
    moved: dict[str, Array] = field(default_factory=dict)
    num_reduced: int = 0
    is_broken: bool = False


class CollectiveGroups:
    """Groups of one run's devices.

    Args:
        event_queue: virtual time.
        downlink: encodes the models between two all-reduces.
        restart: called with a member's work that has another training to do.
        deliver: called with a member's work, and what it sends to the coordinator.
    """

    def __init__(
        self,
        event_queue: SimulationEventQueue,
        downlink: SimulatedDownlink,
        *,
        restart: Callable[[InFlightWork], None],
        deliver: Deliver,
    ) -> None:
        self._event_queue, self._downlink = event_queue, downlink
        self._restart, self._deliver = restart, deliver
        self._groups: dict[str, _Group] = {}
        self._held: dict[str, tuple[str, int, TrainingResult]] = {}

    def join(self, work: InFlightWork, config: CollectiveConfig) -> None:
        """Adds a member's work to its group, with the job of its first training."""
        group = self._get_group(config, work.job.model)
        group.members[work.instruction.device_id] = _Member(work)
        work.job = self._make_job(group, work.instruction)

    def resend(self, work: InFlightWork, config: CollectiveConfig) -> bool:
        """Delivers the displacement that a device holds of an earlier assignment; returns whether it still does."""
        device = work.device
        assignment_id, boot_count, result = self._held.get(device.device_id, ("", -1, None))
        if result is None or (assignment_id, boot_count) != (config.resend, device.boot_count):
            return False
        work.extra = {NUM_REDUCTIONS: float(config.reductions)}
        self._deliver(work, result)
        return True

    def break_later(self, instruction: TrainInstruction) -> None:
        """Breaks the group of a member that is gone, once the others notice it."""
        if (config := instruction.plan.collective) is not None and not config.resend:
            self._event_queue.schedule(self._event_queue.now_s + PEER_TIMEOUT_S, self.break_group, config.group)

    def break_group(self, group_id: str) -> None:
        """Lets the members of a group send their own displacements to the coordinator, now or when they have them."""
        group = self._groups.get(group_id)
        if group is None or group.is_broken:
            return
        group.is_broken = True
        for member in group.members.values():
            self._fall_back(group, member)

    def on_trained(self, work: InFlightWork, result: TrainingResult) -> None:
        """Notes that a member has trained; the last one starts the all-reduce."""
        config = work.instruction.plan.collective
        assert config is not None
        group = self._groups[config.group]
        member = group.members[work.instruction.device_id]
        member.trained = result
        member.loss_sum += work.job.iterations * (0.0 if result.loss is None else result.loss)
        member.num_iterations += work.job.iterations
        if group.is_broken:
            self._fall_back(group, member)
        elif len(group.members) == len(config.members) and all(each.trained for each in group.members.values()):
            self._start_reduction(group, result.num_bytes)

    def _get_group(self, config: CollectiveConfig, model: EncodedModel) -> _Group:
        if config.group not in self._groups:
            # One group at a time is at work; those before it are over.
            self._groups = {name: group for name, group in self._groups.items() if not _is_over(group)}
            self._groups[config.group] = _Group(config, model)
        return self._groups[config.group]

    def _make_job(self, group: _Group, instruction: TrainInstruction) -> TrainingJob:
        """Returns the job of a member's next training, with random numbers as if each all-reduce were a round."""
        version = instruction.base_version * group.config.reductions + group.num_reduced
        return TrainingJob(instruction=replace(instruction, base_version=version), model=group.model)

    def _start_reduction(self, group: _Group, num_bytes: int) -> None:
        works = [group.members[name].work for name in group.config.members]
        now_s = self._event_queue.now_s
        speeds = [_get_speed(work.device, now_s) for work in works]
        if any(speed.up_bytes_per_s <= 0 for speed in speeds):  # its cable is cut
            self._event_queue.schedule(now_s + PEER_TIMEOUT_S, self.break_group, group.config.group)
            return
        schedule = make_schedule(group.config.collective, len(works), num_bytes)  # type: ignore[arg-type] # a text
        for name, count in zip(group.config.members, count_sent(schedule, len(works)), strict=True):
            group.members[name].peer_bytes += count
        ends_s = compute_end_times(schedule, speeds)
        self._event_queue.schedule(now_s + max(ends_s, default=0.0), self._on_reduced, (group, num_bytes))

    def _on_reduced(self, argument: tuple[_Group, int]) -> None:
        group, num_bytes = argument
        if group.is_broken:
            return
        self._move(group)
        group.num_reduced += 1
        if group.num_reduced == group.config.reductions:
            self._finish(group, num_bytes)
            return
        version = group.model.version + 1
        group.model = EncodedModel(
            version=version, body=self._downlink.encode(group.moved, version), owner=group.config.group
        )
        for member in group.members.values():
            work, member.trained = member.work, None
            work.earlier_iterations += work.job.iterations
            work.earlier_compute_s += work.due_s - work.started_s
            work.job, work.result = self._make_job(group, work.instruction), None
            self._restart(work)

    def _move(self, group: _Group) -> None:
        """Moves the group's model by the mean of its members' updates."""
        vectors, like = [], dict[str, Array]()
        for index, name in enumerate(group.config.members):
            trained = group.members[name].trained
            assert trained is not None
            like = {key: np.asarray(tensor) for key, tensor in trained.tensors.items()}
            weight = 1.0 if group.config.weighting == "uniform" else float(max(1, trained.num_examples))
            vectors.append(pack_update(like, weight=weight, is_first=index == 0))
        mean = unpack_mean(reduce_vectors(group.config.collective, vectors), like)  # type: ignore[arg-type] # a text
        if not group.start:
            group.start = self._decode_start(group, mean)
            group.moved = dict(group.start)
        group.moved = {name: group.moved[name] + mean[name] for name in mean}

    def _decode_start(self, group: _Group, like: Mapping[str, Array]) -> dict[str, Array]:
        if self._downlink.decode is None:
            return {name: np.zeros_like(tensor) for name, tensor in like.items()}
        return {name: np.asarray(tensor) for name, tensor in self._downlink.decode(group.model.body).items()}

    def _finish(self, group: _Group, num_bytes: int) -> None:
        displacement = {name: group.moved[name] - group.start[name] for name in group.start}
        for name, member in group.members.items():
            result = self._make_result(member, displacement, num_bytes)
            self._held[name] = member.work.instruction.assignment_id, member.work.boot_count, result
            member.work.device.model_version = member.work.instruction.base_version + 1
            is_uploader = name == group.config.uploader
            self._send(group, member, result if is_uploader else replace(result, tensors={}, num_bytes=REPORT_BYTES))

    def _fall_back(self, group: _Group, member: _Member) -> None:
        work, trained = member.work, member.trained
        if trained is None or member.is_delivered or work.is_completed or work.is_orphaned:
            return
        tensors: Tensors = trained.tensors
        if group.start:
            tensors = {
                name: group.moved[name] - start + np.asarray(trained.tensors[name])
                for name, start in group.start.items()
            }
        self._send(group, member, self._make_result(member, tensors, trained.num_bytes))

    def _send(self, group: _Group, member: _Member, result: TrainingResult) -> None:
        member.is_delivered = True
        work = member.work
        if work.is_completed or work.is_orphaned:
            return
        work.extra = {NUM_REDUCTIONS: float(group.num_reduced), PEER_BYTES: float(member.peer_bytes)}
        self._deliver(work, result)

    @staticmethod
    def _make_result(member: _Member, tensors: Tensors, num_bytes: int) -> TrainingResult:
        assert member.trained is not None
        has_loss = member.trained.loss is not None and member.num_iterations > 0
        loss = member.loss_sum / member.num_iterations if has_loss else member.trained.loss
        return replace(member.trained, tensors=tensors, num_bytes=num_bytes, loss=loss)


def _is_over(group: _Group) -> bool:
    return all(member.is_delivered or member.work.is_completed for member in group.members.values())


def _get_speed(device: SimulatedDevice, now_s: float) -> LinkSpeed:
    factor = 1.0 if device.link_slowdown is None else device.link_slowdown.factor_at(now_s)
    share = 1.0 / factor if math.isfinite(factor) else 0.0
    profile = device.profile
    return LinkSpeed(
        profile.up_bytes_per_s * share, profile.down_bytes_per_s * share, device.compute_latency_s(now_s)
    )
