"""Client state of a run, kept from one assignment to the next.

That is the state of its local algorithm, the codec's residuals, and the last global model where the coordinator sends
deltas. One run is kept at a time, since a coordinator runs one at a time. All but the model survive a restart: they
are written every five minutes and at a stop, or at once where a run requires it or has control variates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.compression.error_feedback import ErrorFeedback
from edgefl.core.errors import CodecError, StoreError
from edgefl.core.types import Array, ModelSpec
from edgefl.device.training.run_arrays import load_arrays, save_arrays
from edgefl.tasks.local_algorithms.control_variates import ClientControlVariate, restore_variate

log = logging.getLogger(__name__)

SAVE_INTERVAL_S = 300.0
STEPS, RESIDUALS, VARIATES = "steps", "residuals", "variates"
ALGORITHM_KEY = "algorithm"
Model = dict[str, Array]


@dataclass(slots=True)
class _RunState:
    """State of one run; `algorithm` and `codec_spec` own `step_state` and `feedback`, empty for none yet."""

    run: str = ""
    algorithm: str = ""
    step_state: Mapping[str, Array] = field(default_factory=dict)
    variate: ClientControlVariate | None = None
    codec_spec: str = ""
    feedback: ErrorFeedback | None = None
    model_version: int | None = None
    model: Model = field(default_factory=dict)
    unsaved_folders: set[str] = field(default_factory=set)


class ClientState:
    """Client state of one device, used by the training thread.

    Args:
        state_dir: the device's state directory.
        clock: seconds, monotone.
    """

    def __init__(self, state_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._state_dir, self._clock = state_dir, clock
        self._current = _RunState()
        self._saved_s = clock()

    def get_step_state(self, run: str, algorithm: str) -> Mapping[str, Array] | None:
        """Returns the state of the run's last assignment with this algorithm, or None."""
        state = self._select_run(run)
        if not state.algorithm:
            stored = load_arrays(self._state_dir / STEPS, run) or {}
            state.algorithm = str(stored.pop(ALGORITHM_KEY, ""))
            state.step_state = stored
        return state.step_state if state.algorithm == algorithm else None

    def update_step_state(self, run: str, algorithm: str, state: Mapping[str, Array]) -> None:
        run_state = self._select_run(run)
        run_state.algorithm, run_state.step_state = algorithm, state
        run_state.unsaved_folders.add(STEPS)

    def get_variate(self, run: str) -> ClientControlVariate:
        """Returns the device's control variate of the run; blank for a new device."""
        state = self._select_run(run)
        if state.variate is None:
            stored = load_arrays(self._state_dir / VARIATES, run)
            try:
                state.variate = restore_variate(stored) if stored is not None else ClientControlVariate()
            except ValueError as error:
                log.warning("the control variate of run %s is lost: %s", run, error)
                state.variate = ClientControlVariate()
        return state.variate

    def update_variate(self, run: str, variate: ClientControlVariate) -> None:
        """Stores a control variate on disk at once: the coordinator may use the update as soon as it is sent."""
        state = self._select_run(run)
        state.variate = variate
        state.unsaved_folders.add(VARIATES)
        self._save_folder(VARIATES)

    def get_feedback(self, run: str, codec_spec: str, model_spec: ModelSpec) -> ErrorFeedback:
        """Returns the run's error feedback for updates encoded by `codec_spec`.

        Raises:
            CodecError: the codec's spec is malformed.
        """
        state = self._select_run(run)
        if state.feedback is None or state.codec_spec != codec_spec:
            feedback = ErrorFeedback(make_codec(codec_spec, model_spec))
            stored = (
                load_arrays(self._state_dir / RESIDUALS, run) if state.feedback is None else state.feedback.state()
            )
            if stored:
                _restore_feedback(feedback, stored, run)
            state.feedback, state.codec_spec = feedback, codec_spec
        state.unsaved_folders.add(RESIDUALS)
        return state.feedback

    def update_model(self, run: str, version: int, model: Model) -> None:
        """Stores the global model of a version, in memory only."""
        state = self._select_run(run)
        state.model_version, state.model = version, model

    def get_model_version(self, run: str) -> int | None:
        """Returns the version of the stored model, None without one."""
        return self._current.model_version if self._current.run == run else None

    def get_model(self, run: str) -> Model:
        """Returns the stored global model, empty without one."""
        return self._select_run(run).model

    def save(self, *, only_when_due: bool = False) -> None:
        """Writes changed state; a full card does not stop the work.

        Args:
            only_when_due: writes nothing within five minutes of the last write, to limit card wear.
        """
        if only_when_due and self._clock() - self._saved_s < SAVE_INTERVAL_S:
            return
        self._saved_s = self._clock()
        for folder in sorted(self._current.unsaved_folders):
            self._save_folder(folder)

    def _save_folder(self, folder: str) -> None:
        run = self._current.run
        try:
            save_arrays(self._state_dir / folder, run, self._get_arrays(folder))
        except (OSError, StoreError) as error:
            log.warning("cannot keep the %s of run %s: %s", folder, run, error)
            return
        self._current.unsaved_folders.discard(folder)

    def _get_arrays(self, folder: str) -> dict[str, Array]:
        state = self._current
        if folder == STEPS:
            return {**state.step_state, ALGORITHM_KEY: np.array(state.algorithm)}
        if folder == VARIATES:
            return state.variate.to_arrays() if state.variate is not None else {}
        return state.feedback.state() if state.feedback is not None else {}

    def _select_run(self, run: str) -> _RunState:
        """Returns the state of a run; saves that of the former run."""
        if self._current.run != run:
            self.save()
            self._current = _RunState(run=run)
        return self._current


def _restore_feedback(feedback: ErrorFeedback, stored: Mapping[str, Array], run: str) -> None:
    try:
        feedback.restore(stored)
    except CodecError as error:
        log.warning("what was left out of the updates of run %s is lost: %s", run, error)
