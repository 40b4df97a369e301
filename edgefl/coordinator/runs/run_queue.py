"""Order of queued runs: the first whose boards are there; a run that lacks boards gives way to it."""

from __future__ import annotations

from collections.abc import Collection

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.fleet_view import is_selected
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.recovery import is_started
from edgefl.coordinator.runs.scales import find_scales_run
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError, NotFoundError, StoreTooNewError
from edgefl.core.types import Role
from edgefl.engine.assembly.normalisation import should_find_scales
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.store import Store

MAX_CONSIDERED = 100
"""Queued runs that are looked at, so that a long queue costs no more than this."""


class RunQueue:
    """Chooses the run that is executed next. Not thread-safe: used by the thread of runs alone.

    A run can begin where as many trainers as it needs could be given work now; whether each of them can train it is
    found out by the run itself. One that gave way is passed over until a board comes that was not there then, and
    taken nevertheless where no other can begin.
    """

    def __init__(self, store: Store, registry: DeviceRegistry, directory: CoordinatorDirectory) -> None:
        self._store, self._registry, self._directory = store, registry, directory
        self._gave_way: dict[str, frozenset[str]] = {}

    def get_next(self, recovered_ids: Collection[str] = ()) -> RunRecord | None:
        """Returns the queued run that starts next, if any: the first that can begin, else the first.

        A recovered run goes before all others, as its devices may be at work.
        """
        queued = self._store.list_queued_runs()
        queued_ids = {record.run_id for record in queued}
        self._gave_way = {run_id: boards for run_id, boards in self._gave_way.items() if run_id in queued_ids}
        recovered = next((record for record in queued if record.run_id in recovered_ids), None)
        return recovered or self._find_able(queued) or (queued[0] if queued else None)

    def find_successor(self) -> RunRecord | None:
        """Returns the queued run that would begin if the active one gave way, if any."""
        return self._find_able(self._store.list_queued_runs())

    def pass_over(self, run_id: str, config: RunConfig) -> None:
        """Passes a run that gives way over until other boards are there."""
        self._gave_way[run_id] = self._find_boards(run_id, config)

    def _find_able(self, queued: list[RunRecord]) -> RunRecord | None:
        return next((record for record in queued[:MAX_CONSIDERED] if self._can_begin(record)), None)

    def _can_begin(self, record: RunRecord) -> bool:
        try:
            config = RunConfig.from_json(record.config)
            scales_run = find_scales_run(config, self._store) if should_find_scales(config) else None
            if scales_run is not None and not self._store.get_run(scales_run).status.is_final:
                return False  # it begins with what that run finds
            has_started = is_started(record.run_id, self._directory)
        except (ConfigError, NotFoundError, StoreTooNewError):
            return True  # it ends with its reason
        boards, devices = self._find_boards(record.run_id, config), config.devices
        if boards <= self._gave_way.get(record.run_id, frozenset()):
            return False
        required = devices.require if isinstance(devices.require, int) else 1
        return len(boards) >= (1 if has_started else max(devices.min, required))

    def _find_boards(self, run_id: str, config: RunConfig) -> frozenset[str]:
        """Returns the ids of the trainers that a run selects and that could be given work now."""
        devices, task = config.devices, config.run.task
        return frozenset(
            info.device_id
            for info in self._registry.list_schedulable(run_id)
            if info.role == Role.TRAINER and is_selected(info, task=task, groups=devices.groups, names=devices.names)
        )
