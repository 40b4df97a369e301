"""What is looked at before a run is let in: whether it can work with this fleet, and what it would do."""

from __future__ import annotations

from edgefl.config import RunConfig
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.runs.device_state import check_device_state, check_messages
from edgefl.coordinator.runs.planning import plan_run
from edgefl.coordinator.runs.trainers import check_trainers
from edgefl.coordinator.runs.worker import Assemble, Assembled
from edgefl.storage.store import Store
from edgefl.types import Json


class Vetting:
    """Looks at run files; `assemble` makes the parts of the run that one asks for."""

    def __init__(self, assemble: Assemble, roster: Roster, store: Store) -> None:
        self._assemble, self._roster, self._store = assemble, roster, store

    def check(self, config: RunConfig) -> Json:
        """Returns what is to be said of a run file that can work.

        Raises:
            EdgeflError: it cannot.
        """
        return self._checked(self._assemble(config, "check"))

    def plan(self, config: RunConfig) -> Json:
        """Returns what a run would do, once it is sure that it would be let in.

        Raises:
            EdgeflError: it would not.
        """
        run = self._assemble(config, "plan")
        return {**self._checked(run), **plan_run(run, self._roster, self._store)}

    def _checked(self, run: Assembled) -> Json:
        check_messages(run.strategy, run.model)
        check_trainers(run.config, self._roster, needs_torch=run.needs_torch)
        return check_device_state(run.config, run.strategy, run.model, self._roster)
