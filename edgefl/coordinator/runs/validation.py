"""Validation of a run at submission, and its plan."""

from __future__ import annotations

from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.planning import plan_run
from edgefl.coordinator.runs.scheduler import AssembledRun, BuildRun
from edgefl.coordinator.runs.strategy_memory import check_message_size, check_strategy_memory
from edgefl.coordinator.runs.trainer_check import check_trainers
from edgefl.core.config import RunConfig
from edgefl.core.types import Json
from edgefl.storage.store import Store


class RunValidator:
    """Validates run files; `build_run` builds the run of one."""

    def __init__(self, build_run: BuildRun, roster: DeviceRegistry, store: Store) -> None:
        self._build_run, self._roster, self._store = build_run, roster, store

    def check(self, config: RunConfig) -> Json:
        """Returns notes on a valid run file.

        Raises:
            EdgeflError: the run cannot work with this fleet.
        """
        return self._check_run(self._build_run(config, "check"))

    def plan(self, config: RunConfig) -> Json:
        """Returns the plan of a valid run.

        Raises:
            EdgeflError: as `check`.
        """
        run = self._build_run(config, "plan")
        return {**self._check_run(run), **plan_run(run, self._roster, self._store)}

    def _check_run(self, run: AssembledRun) -> Json:
        check_message_size(run.strategy, run.model)
        check_trainers(run.config, self._roster, needs_torch=run.needs_torch)
        return check_strategy_memory(run.config, run.strategy, run.model, self._roster)
