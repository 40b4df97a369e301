"""Order of queued runs: the first whose boards are there."""

from __future__ import annotations

from collections.abc import Collection

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.planning import is_selected_trainer
from edgefl.coordinator.runs.recovery import has_only_waited
from edgefl.coordinator.runs.scales import find_scales_run
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError, NotFoundError, StoreTooNewError
from edgefl.core.types import DeviceInfo
from edgefl.engine.assembly.normalisation import should_find_scales
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.store import Store

MAX_CONSIDERED = 100
"""Queued runs that are looked at, so that a long queue costs no more than this."""
MAX_NAMES = 5


class RunQueue:
    """Chooses the run that is executed next.

    A run can begin where as many trainers that it selects as it needs could be given work now. Whether each of them
    can train it, it finds out by itself. Boards of active runs of lower priority are among them.
    """

    def __init__(self, store: Store, registry: DeviceRegistry, directory: CoordinatorDirectory) -> None:
        self._store, self._registry, self._directory = store, registry, directory

    def get_next(self, recovered_ids: Collection[str] = (), *, is_alone: bool = True) -> RunRecord | None:
        """Returns the queued run that starts next, if any: the first that can begin, else the first.

        A recovered run goes before all others, as its devices may be at work. Unless it `is_alone`, beside other
        active runs, one that cannot begin stays in the queue.
        """
        queued = self._store.list_queued_runs()
        recovered = next((record for record in queued if record.run_id in recovered_ids), None)
        return recovered or self._find_able(queued) or (queued[0] if queued and is_alone else None)

    def find_successor(self, run_id: str, *, above: int | None = None) -> RunRecord | None:
        """Returns the queued run that would begin if this run were not active; None if none can.

        `above` excludes those of this priority and lower ones.
        """
        queued = self._store.list_queued_runs()
        return self._find_able([run for run in queued if above is None or run.priority > above], without=run_id)

    def has_boards(
        self, run_id: str, config: RunConfig, *, has_started: bool, priority: int = 0, without: str | None = None
    ) -> bool:
        """Returns whether as many boards could be given work of a run now as it needs to begin, or to go on."""
        boards = self._registry.list_obtainable(run_id, priority, without=without)
        num_boards = sum(is_selected_trainer(info, config) for info in boards)
        return num_boards >= (1 if has_started else self._count_needed(config))

    def explain_wait(self, record: RunRecord) -> str:
        """Returns why a queued run does not begin beside the active ones, in words."""
        try:
            config = RunConfig.from_json(record.config)
            scales_run = self._find_unfinished_scales_run(config)
        except (ConfigError, NotFoundError, StoreTooNewError):
            return "it begins next"  # and ends with its reason
        if scales_run is not None:
            return f"it comes after run {scales_run}, which finds means and scales of its data"
        boards = [info for info in self._registry.list_devices() if is_selected_trainer(info, config)]
        taken = [info for info in boards if self._get_holder(info, record) is not None]
        if not taken:
            return "fewer of its boards are there than it needs"
        names = ", ".join(f"{info.device_id} for {self._get_holder(info, record)}" for info in taken[:MAX_NAMES])
        more = ", …" if len(taken) > MAX_NAMES else ""
        return f"its boards work for other runs: {names}{more}"

    def _get_holder(self, info: DeviceInfo, record: RunRecord) -> str | None:
        run_id = self._registry.get_allotted_run(info.device_id)
        return None if run_id == record.run_id else run_id

    def _find_unfinished_scales_run(self, config: RunConfig) -> str | None:
        run_id = find_scales_run(config, self._store) if should_find_scales(config) else None
        return None if run_id is None or self._store.get_run(run_id).status.is_final else run_id

    def _count_needed(self, config: RunConfig) -> int:
        devices, needed = config.devices, 1
        if devices.require == "all":
            trainers = [info for info in self._registry.list_devices() if is_selected_trainer(info, config)]
            needed = max(len(trainers), len(devices.names))
        elif isinstance(devices.require, int):
            needed = devices.require
        return max(devices.min, needed)

    def _find_able(self, queued: list[RunRecord], without: str | None = None) -> RunRecord | None:
        return next((record for record in queued[:MAX_CONSIDERED] if self._can_begin(record, without)), None)

    def _can_begin(self, record: RunRecord, without: str | None) -> bool:
        try:
            config = RunConfig.from_json(record.config)
            if self._find_unfinished_scales_run(config) is not None:
                return False  # it begins with what that run finds
            has_started = not has_only_waited(self._directory.runs / record.run_id)
        except (ConfigError, NotFoundError, StoreTooNewError):
            return True  # it ends with its reason
        return self.has_boards(
            record.run_id, config, has_started=has_started, priority=record.priority, without=without
        )
