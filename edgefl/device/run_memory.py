"""What a device remembers of a run from one assignment to the next.

That is the state of its local algorithm, what its codec has left out of its updates, and the last global model where
the coordinator sends only changes. One run is remembered at a time, since a coordinator runs one at a time. All but
the model survive a restart: they are written every five minutes and at a stop, or at once where a run wants that or
has control variates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.compression.feedback import ErrorFeedback
from edgefl.device.run_files import load_arrays, save_arrays
from edgefl.errors import CodecError, StoreError
from edgefl.tasks.variates import OwnVariate, kept_variate
from edgefl.types import Array, Shapes

log = logging.getLogger(__name__)

SAVE_EVERY_S = 300.0
STEPS, RESIDUALS, VARIATES = "steps", "residuals", "variates"
ALGORITHM = "algorithm"
Model = dict[str, Array]


@dataclass(slots=True)
class _Remembered:
    """One run; `algorithm` and `spec` say what the state and the feedback are of, empty for none yet."""

    run: str = ""
    algorithm: str = ""
    step_state: Mapping[str, Array] = field(default_factory=dict)
    variate: OwnVariate | None = None
    spec: str = ""
    feedback: ErrorFeedback | None = None
    model_version: int | None = None
    model: Model = field(default_factory=dict)
    unsaved: set[str] = field(default_factory=set)


class RunMemory:
    """The memory of one device, used by the thread that trains.

    Args:
        state_dir: the device's state directory.
        clock: seconds, monotone.
    """

    def __init__(self, state_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._state_dir, self._clock = state_dir, clock
        self._now = _Remembered()
        self._saved_s = clock()

    def step_state(self, run: str, algorithm: str) -> Mapping[str, Array] | None:
        """Returns what the run's last assignment with this algorithm left, None for nothing."""
        now = self._enter(run)
        if not now.algorithm:
            stored = load_arrays(self._state_dir / STEPS, run) or {}
            now.algorithm = str(stored.pop(ALGORITHM, ""))
            now.step_state = stored
        return now.step_state if now.algorithm == algorithm else None

    def keep_step_state(self, run: str, algorithm: str, state: Mapping[str, Array]) -> None:
        now = self._enter(run)
        now.algorithm, now.step_state = algorithm, state
        now.unsaved.add(STEPS)

    def variate(self, run: str) -> OwnVariate:
        """Returns the device's own control variate of the run; that of a device which is new to it is blank."""
        now = self._enter(run)
        if now.variate is None:
            stored = load_arrays(self._state_dir / VARIATES, run)
            try:
                now.variate = kept_variate(stored) if stored is not None else OwnVariate()
            except ValueError as error:
                log.warning("the control variate of run %s is lost: %s", run, error)
                now.variate = OwnVariate()
        return now.variate

    def keep_variate(self, run: str, variate: OwnVariate) -> None:
        """Remembers it, and writes it at once: the coordinator may use the update as soon as it has been sent."""
        now = self._enter(run)
        now.variate = variate
        now.unsaved.add(VARIATES)
        self._write(VARIATES)

    def feedback(self, run: str, spec: str, shapes: Shapes) -> ErrorFeedback:
        """Returns what was left out of the run's updates so far, to be encoded as `spec` says.

        Raises:
            CodecError: the codec's line makes no sense.
        """
        now = self._enter(run)
        if now.feedback is None or now.spec != spec:
            made = ErrorFeedback(make_codec(spec, shapes))
            stored = load_arrays(self._state_dir / RESIDUALS, run) if now.feedback is None else now.feedback.state()
            if stored:
                _restore(made, stored, run)
            now.feedback, now.spec = made, spec
        now.unsaved.add(RESIDUALS)
        return now.feedback

    def keep_model(self, run: str, version: int, model: Model) -> None:
        """Remembers the global model of a version, in memory alone."""
        now = self._enter(run)
        now.model_version, now.model = version, model

    def model_version(self, run: str) -> int | None:
        """Returns the version of the model that is remembered."""
        return self._now.model_version if self._now.run == run else None

    def model(self, run: str) -> Model:
        """Returns the global model that is remembered, which is empty where there is none."""
        return self._enter(run).model

    def save(self, *, only_when_due: bool = False) -> None:
        """Writes what has changed; a card without room does not stop the work.

        Args:
            only_when_due: writes nothing within five minutes of the last time, since cards wear out.
        """
        if only_when_due and self._clock() - self._saved_s < SAVE_EVERY_S:
            return
        self._saved_s = self._clock()
        for folder in sorted(self._now.unsaved):
            self._write(folder)

    def _write(self, folder: str) -> None:
        run = self._now.run
        try:
            save_arrays(self._state_dir / folder, run, self._arrays(folder))
        except (OSError, StoreError) as error:
            log.warning("cannot keep the %s of run %s: %s", folder, run, error)
            return
        self._now.unsaved.discard(folder)

    def _arrays(self, folder: str) -> dict[str, Array]:
        now = self._now
        if folder == STEPS:
            return {**now.step_state, ALGORITHM: np.array(now.algorithm)}
        if folder == VARIATES:
            return now.variate.arrays() if now.variate is not None else {}
        return now.feedback.state() if now.feedback is not None else {}

    def _enter(self, run: str) -> _Remembered:
        """Returns the memory of a run; that of the run before goes to disk."""
        if self._now.run != run:
            self.save()
            self._now = _Remembered(run=run)
        return self._now


def _restore(feedback: ErrorFeedback, stored: Mapping[str, Array], run: str) -> None:
    try:
        feedback.restore(stored)
    except CodecError as error:
        log.warning("what was left out of the updates of run %s is lost: %s", run, error)
