"""Client state of a run, kept from one assignment to the next: algorithm, residuals, variates, tensors, model, node.

One run is kept at a time, since a coordinator runs one at a time. All but the global model survive a restart: they
are written every five minutes and at a stop, or at once where a run requires it or has control variates.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.compression.error_feedback import ErrorFeedback
from edgefl.compression.peer_codec import PeerCodec, select_peer_tensors
from edgefl.core.errors import CodecError, ConfigError, StoreError
from edgefl.core.types import Array, GossipConfig, Learner, ModelSpec, derive_rng
from edgefl.strategies.peer_algorithms.gossip_node import GossipNode, make_configured_algorithm
from edgefl.system.atomic_files import open_atomic
from edgefl.system.retries import RateLimitedLog
from edgefl.tasks.datasets.array_files import read_npz
from edgefl.tasks.local_algorithms.local_training import is_finite, start_node
from edgefl.tasks.local_algorithms.personal_training import add_prefix, list_kept_specs, remove_prefix
from edgefl.tasks.local_algorithms.scaffold import ClientControlVariate, restore_variate

log = logging.getLogger(__name__)

MAX_RUNS = 4

SAVE_INTERVAL_S = 300.0
STEPS, RESIDUALS, VARIATES, LOCAL_TENSORS, NODES = "steps", "residuals", "variates", "runs", "nodes"
"""Folders in the state directory."""
ALGORITHM_KEY = "algorithm"
Model = dict[str, Array]


def load_arrays(folder: Path, run: str) -> dict[str, Array] | None:
    """Returns the saved arrays of a run, None when missing or unreadable."""
    try:
        with _path(folder, run).open("rb") as file:
            return read_npz(file)
    except (OSError, ValueError):
        return None


def save_arrays(folder: Path, run: str, arrays: Mapping[str, Array]) -> None:
    """Writes a run's arrays atomically; `OSError` propagates."""
    path = _path(folder, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
    _delete_older(path)


def _delete_older(newest: Path) -> None:
    # The newest by name, not by time: a board's clock may have gone back since the others were written.
    with contextlib.suppress(OSError):
        others = sorted((path for path in newest.parent.glob("*.npz") if path != newest), key=_get_mtime_ns)
        for path in others[: max(0, len(others) + 1 - MAX_RUNS)]:
            path.unlink(missing_ok=True)


def _get_mtime_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def _path(folder: Path, run: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run)}.npz"


@dataclass(slots=True)
class _RunState:
    """State of one run; `algorithm` and `codec_spec` own `step_state` and `feedback`, empty for none yet.

    `local_tensors` are those that are not on disk, since the card is full.
    """

    run: str = ""
    algorithm: str = ""
    step_state: Mapping[str, Array] = field(default_factory=dict)
    variate: ClientControlVariate | None = None
    codec_spec: str = ""
    feedback: ErrorFeedback | None = None
    model_version: int | None = None
    model: Model = field(default_factory=dict)
    local_tensors: Model = field(default_factory=dict)
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
        self._rate_limited_log = RateLimitedLog(log)

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

    def drop_feedback(self, run: str) -> None:
        """Drops what error feedback keeps of a run, on disk too; `OSError` propagates."""
        state = self._select_run(run)
        state.feedback, state.codec_spec = None, ""
        state.unsaved_folders.discard(RESIDUALS)
        _path(self._state_dir / RESIDUALS, run).unlink(missing_ok=True)

    def get_local_tensors(self, run: str, model_spec: ModelSpec) -> Model | None:
        """Returns the run's local tensors (`shared=False`), or None when missing or of other shapes."""
        unsaved = self._current.local_tensors if self._current.run == run else {}
        tensors = unsaved or load_arrays(self._state_dir / LOCAL_TENSORS, run)
        local_specs = [spec for spec in model_spec if not spec.shared]
        if tensors is None or any(
            spec.name not in tensors or tensors[spec.name].shape != spec.shape for spec in local_specs
        ):
            return None
        return {spec.name: tensors[spec.name] for spec in local_specs}

    def update_local_tensors(self, run: str, model_spec: ModelSpec, learner: Learner) -> None:
        """Stores the tensors that are not shared on disk at once; a no-op when all are shared.

        Those of a diverged training are not stored: the board continues with the former ones.
        """
        names = [spec.name for spec in model_spec if not spec.shared]
        if not names:
            return
        values = learner.read()
        self._store_local_tensors(run, {name: values[name] for name in names})

    def get_personal_copy(self, run: str, model_spec: ModelSpec) -> Model | None:
        """Returns the run's personal copy of the model, or None when missing or of other shapes."""
        for has_mixture in (True, False):
            kept = self.get_local_tensors(run, list_kept_specs(model_spec, has_mixture=has_mixture))
            if kept is not None:
                return remove_prefix(kept)
        return None

    def update_personal_copy(self, run: str, copy: Model) -> None:
        """Stores the personal copy on disk at once, as local tensors; not that of a diverged training."""
        self._store_local_tensors(run, add_prefix(copy))

    def _store_local_tensors(self, run: str, local_tensors: Model) -> None:
        if not is_finite(local_tensors):
            return
        state = self._select_run(run)
        state.local_tensors = local_tensors
        state.unsaved_folders.add(LOCAL_TENSORS)
        self._save_folder(LOCAL_TENSORS)

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
            kept = (
                f"tensors of run {run} that stay on this board"
                if folder == LOCAL_TENSORS
                else f"{folder} of run {run}"
            )
            self._rate_limited_log.warning(folder, "cannot keep the %s: %s", kept, error)
            return
        self._current.unsaved_folders.discard(folder)
        if folder == LOCAL_TENSORS:
            self._current.local_tensors = {}

    def _get_arrays(self, folder: str) -> dict[str, Array]:
        state = self._current
        if folder == STEPS:
            return {**state.step_state, ALGORITHM_KEY: np.array(state.algorithm)}
        if folder == LOCAL_TENSORS:
            return state.local_tensors
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


class GossipStateStore:
    """Store of one run's gossip node; used by the training thread.

    Args:
        device_id: of the node.
        state_dir: the device's state directory.
        incarnation: grows with every start of the device, 1 or more.
        clock: seconds, monotone.
    """

    def __init__(
        self, device_id: str, state_dir: Path, *, incarnation: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device_id, self._incarnation, self._clock = device_id, incarnation, clock
        self._folder = state_dir / NODES
        self._run_id = ""
        self._node: GossipNode | None = None
        self._last_saved_s = clock()

    def load(self, run: str, plan: GossipConfig, learner: Learner, shapes: ModelSpec) -> GossipNode | None:
        """Returns the node of a run from memory or disk, or None, when a model is needed."""
        if self.has_diverged(run):
            log.warning("the node of run %s has diverged; it begins anew", run)
            return None
        if self._run_id == run and self._node is not None:
            return self._node
        saved = load_arrays(self._folder, run)
        if saved is None:
            return None
        node = self._make_node(plan, shapes)
        try:
            start_node(node, learner, shapes)
            node.restore(saved)
        except (ConfigError, KeyError, ValueError) as error:
            log.warning("what was kept of the node in run %s is of no use: %s", run, error)
            return None
        log.info("goes on as node of run %s after %d iterations", run, node.algorithm.iterations)
        return self._set_current(run, node)

    def has_diverged(self, run: str) -> bool:
        """Returns whether the node of a run has diverged and must restart."""
        return self._run_id == run and self._node is not None and not is_finite(self._node.algorithm.weights)

    def create(self, run: str, plan: GossipConfig, learner: Learner, shapes: ModelSpec) -> GossipNode:
        """Returns the node of a run, started from the learner's model; keeps step numbers of an existing one."""
        former_node = self._node if self._run_id == run else None
        node = former_node or self._make_node(plan, shapes)
        start_node(node, learner, shapes)
        return self._set_current(run, node)

    def save(self, *, only_when_due: bool = False) -> None:
        """Writes the node unless it has diverged; a full card does not stop the work.

        Args:
            only_when_due: writes nothing within five minutes of the last write, to limit card wear.
        """
        if self._node is None or (only_when_due and self._clock() - self._last_saved_s < SAVE_INTERVAL_S):
            return
        self._last_saved_s, state = self._clock(), self._node.state()
        if not is_finite(state):
            return
        try:
            save_arrays(self._folder, self._run_id, state)
        except (OSError, StoreError) as error:
            log.warning("cannot keep the node of run %s: %s", self._run_id, error)

    def _make_node(self, plan: GossipConfig, shapes: ModelSpec) -> GossipNode:
        node = make_configured_algorithm(plan, self._device_id, incarnation=self._incarnation)
        codec = PeerCodec(plan.codec, select_peer_tensors(shapes), epoch=self._incarnation)
        return GossipNode(node, codec, derive_rng("edges", self._device_id, self._incarnation))

    def _set_current(self, run: str, node: GossipNode) -> GossipNode:
        if node is not self._node:
            self.save()
        self._run_id, self._node = run, node
        # At once: after another reboot, the restored node must not be older than messages seen by neighbours.
        self.save()
        return node
