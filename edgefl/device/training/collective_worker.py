"""A member's trainings and all-reduces in a round, and what it sends the coordinator when its group breaks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast, get_args

import numpy as np

from edgefl.core.errors import DataError, NetworkError
from edgefl.core.types import NOT_FINITE, Array, CollectiveConfig
from edgefl.device.peers.collective_link import CollectiveBrokenError, CollectiveLink
from edgefl.device.peers.peer_connection import MakePeerTransport
from edgefl.strategies.peer_algorithms.collectives import (
    CHUNK_BYTES,
    MAX_MEMBERS,
    AllReduce,
    Collective,
    Schedule,
    make_schedule,
)
from edgefl.strategies.peer_algorithms.model_vectors import pack_update, unpack_mean
from edgefl.tasks.local_algorithms.local_training import LocalTrainingResult

log = logging.getLogger(__name__)

MAX_REDUCTIONS = 10_000

Model = Mapping[str, Array]


@dataclass(slots=True)
class CollectiveResult:
    """What a member did in a round: the displacement by so many all-reduces, and its own training after them."""

    displacement: dict[str, Array] = field(default_factory=dict)
    num_reduced: int = 0
    iterations: int = 0
    num_examples: int = 0
    loss_sum: float = 0.0
    compute_s: float = 0.0
    peer_bytes: int = 0

    def add_training(self, result: LocalTrainingResult) -> None:
        self.iterations += result.iterations
        self.num_examples = result.num_examples
        self.loss_sum += (result.loss or 0.0) * result.iterations
        self.compute_s += result.compute_s


class CollectiveWorker:
    """Runs the rounds of one run at a time; used by the training thread.

    Args:
        device_id: of this member.
        make_transport: makes direct connections; None where there are none.
    """

    def __init__(self, device_id: str, make_transport: MakePeerTransport | None) -> None:
        self._device_id = device_id
        self._link = None if make_transport is None else CollectiveLink(device_id, make_transport)
        self._run = ""

    def close(self, run: str | None = None) -> None:
        """Ends the connections of a run, of any if None."""
        if self._link is not None and run in {None, self._run}:
            self._link.close()
            self._run = ""

    def run_round(
        self,
        run: str,
        config: CollectiveConfig,
        model: Model,
        *,
        train: Callable[[Model, int], LocalTrainingResult],
        should_finish: Callable[[], bool],
    ) -> CollectiveResult:
        """Returns the result of a round: of all its all-reduces, or of those before the group broke.

        Args:
            run: its id.
            config: of the group.
            model: that all members begin with.
            train: (model, number of the all-reduce) -> training from that model.
            should_finish: called while waiting; returns whether to wait no longer.

        Raises:
            NetworkError: the config makes no sense.
            DataError: the mean of the updates is not finite.
        """
        check_config(config, self._device_id)
        self._run = run
        try:
            return self._run_reductions(config, model, train=train, should_finish=should_finish)
        except BaseException:  # the others must not wait for this member
            if self._link is not None:
                self._link.abort()
            raise

    def _run_reductions(
        self,
        config: CollectiveConfig,
        model: Model,
        *,
        train: Callable[[Model, int], LocalTrainingResult],
        should_finish: Callable[[], bool],
    ) -> CollectiveResult:
        size = 1 + sum(tensor.size for tensor in model.values())
        schedule = make_schedule(cast("Collective", config.collective), len(config.members), size)
        is_open = self._open(config, schedule, vector_bytes=8 * size)
        moved, result = dict(model), CollectiveResult()
        for reduction in range(config.reductions):
            trained = train(moved, reduction)
            result.add_training(trained)
            own = {name: trained.displacement[name] for name in model}
            mean = self._reduce(config, schedule, own, result, should_finish) if is_open else None
            if mean is None:
                result.displacement = {name: moved[name] - start + own[name] for name, start in model.items()}
                return result
            moved = {name: moved[name] + step for name, step in mean.items()}
            result.num_reduced += 1
        result.displacement = {name: moved[name] - start for name, start in model.items()}
        return result

    def _open(self, config: CollectiveConfig, schedule: Schedule, *, vector_bytes: int) -> bool:
        if len(config.members) == 1:
            return True
        if self._link is None:
            log.warning("no collective with others: this device has no direct connections")
            return False
        try:
            self._link.open(self._run, config, schedule, vector_bytes=vector_bytes)
        except NetworkError as error:
            log.warning("no collective with %d others, the coordinator adds up: %s", len(config.members) - 1, error)
            return False
        return True

    def _reduce(
        self,
        config: CollectiveConfig,
        schedule: Schedule,
        own: dict[str, Array],
        result: CollectiveResult,
        should_finish: Callable[[], bool],
    ) -> dict[str, Array] | None:
        """Returns the mean of all members' updates; None where the group broke."""
        place = config.members.index(self._device_id)
        weight = 1.0 if config.weighting == "uniform" else float(max(1, result.num_examples))
        vector = pack_update(own, weight=weight, is_first=place == 0)
        member = AllReduce(schedule, place, vector, chunk_size=CHUNK_BYTES // vector.itemsize)
        if self._link is not None and len(config.members) > 1:
            try:
                result.peer_bytes += self._link.run(member, result.num_reduced, should_finish, vector.dtype)
            except CollectiveBrokenError as error:
                log.warning("the collective is broken, the coordinator adds up: %s", error)
                self._link.abort()
                return None
        mean = unpack_mean(vector, own)
        if not all(np.isfinite(tensor).all() for tensor in mean.values()):
            raise DataError(f"{NOT_FINITE}, or another member's does")
        return mean


def check_config(config: CollectiveConfig, device_id: str) -> None:
    """Checks what a coordinator says of a group.

    Raises:
        NetworkError: this device is no member, or a number or name makes no sense.
    """
    members, known = config.members, get_args(Collective)
    if config.collective not in known:
        raise NetworkError(f"a collective must be one of {', '.join(known)}, got {config.collective!r:.40}")
    if device_id not in members or len(set(members)) != len(members) or len(members) > MAX_MEMBERS:
        raise NetworkError(f"a collective has at most {MAX_MEMBERS} members, this device among them, each once")
    if len(config.addresses) != len(members):
        raise NetworkError(f"a collective of {len(members)} has as many addresses, got {len(config.addresses)}")
    if isinstance(config.reductions, bool) or not isinstance(config.reductions, int):
        raise NetworkError(f"the number of all-reduces must be whole, got {config.reductions!r:.40}")
    if not 1 <= config.reductions <= MAX_REDUCTIONS:
        raise NetworkError(f"a round has 1 to {MAX_REDUCTIONS} all-reduces, got {config.reductions}")
