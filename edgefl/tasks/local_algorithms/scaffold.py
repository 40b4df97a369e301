"""SCAFFOLD on a device: its local step, and its control variate, moved only by updates that were used.

The coordinator's c is the mean of the devices' c_i only while both move by the same updates; after a divergence they
never meet again, and the optimum would be another one. So a move stays pending until its update is known to be used.
Source: Karimireddy et al., SCAFFOLD, ICML 2020, section 3; lost updates are not in the paper.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Learner, TrainConfig
from edgefl.tasks.local_algorithms.optimizers import Sgd, copy_into, to_numpy, zeros_like

MAX_PENDING_MOVES = 2
"""At most two instructions are in flight per device."""
NUM_REPORTED_IDS = 2
"""Number of last used assignments reported to a device each time."""
_MAX_USED_IDS = 8
_INDEX_KEY, _VALUE_PREFIX, _MOVE_PREFIX = "index", "own/", "move"


class ScaffoldSgd(Sgd):
    """y ← y - η(g - c_i + c), and at the end c_i ← c_i - c + (x - y)/(Kη), which is kept.

    c comes in the plan's messages, tensor after tensor in the order of the parameters; no message means zero.
    Source: Karimireddy et al., SCAFFOLD, ICML 2020, algorithm 1, option II.
    """

    def __init__(self, plan: TrainConfig) -> None:
        super().__init__(plan)
        self._start_weights: dict[str, Array] = {}
        self._client_variate: dict[str, Array] = {}
        self._server_variate: dict[str, Array] = {}
        self._correction: dict[str, Any] = {}
        self._num_steps = 0

    def start(self, learner: Learner) -> None:
        super().start(learner)
        self._start_weights = {name: to_numpy(weight) for name, weight in learner.parameters.items()}
        self._client_variate = {name: np.zeros_like(array) for name, array in self._start_weights.items()}
        self._server_variate = _decode_server_variate(self._plan, self._start_weights)
        self._correction = zeros_like(learner.parameters)
        self._update_correction()

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Restores the control variate of the instruction before; one of another model is ignored."""
        if {name: array.shape for name, array in saved.items()} == {
            n: a.shape for n, a in self._client_variate.items()
        }:
            self._client_variate = {name: np.array(array) for name, array in saved.items()}
            self._update_correction()

    def step(self, learner: Learner, batch: Dataset) -> None:
        super().step(learner, batch)
        self._num_steps += 1
        for name, weight in learner.parameters.items():
            weight += self._plan.learning_rate * self._correction[name]  # noqa: PLW2901 in place: the learner's own

    def finish(self, learner: Learner) -> None:
        scale = self._plan.learning_rate * max(1, self._num_steps)
        for name, weight in learner.parameters.items():
            mean_gradient = (self._start_weights[name] - to_numpy(weight)) / self._start_weights[name].dtype.type(
                scale or 1.0
            )
            self._client_variate[name] = self._client_variate[name] - self._server_variate[name] + mean_gradient

    def state(self) -> dict[str, Array]:
        return dict(self._client_variate)

    def _update_correction(self) -> None:
        for name, array in self._correction.items():
            copy_into(array, self._client_variate[name] - self._server_variate[name])


def _decode_server_variate(plan: TrainConfig, like: Mapping[str, Array]) -> dict[str, Array]:
    """Returns c by tensor.

    Raises:
        ConfigError: it is of another model.
    """
    if not plan.messages:
        return {name: np.zeros_like(array) for name, array in like.items()}
    body = plan.messages[0].body
    expected_bytes = sum(array.nbytes for array in like.values())
    if len(body) != expected_bytes:
        raise ConfigError(f"the control variate that came has {len(body)} bytes, expected {expected_bytes}")
    variate, start = {}, 0
    for name, array in like.items():
        kind = array.dtype.newbyteorder("<")
        variate[name] = np.frombuffer(body, kind, array.size, start).reshape(array.shape).astype(array.dtype)
        start += array.nbytes
    return variate


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientControlVariate:
    """c_i of one device.

    Attributes:
        start_version: the version of the model at which all variates of the run were zero; -1 for none yet.
        value: c_i by tensor, of all moves that counted; empty for zero, when none has.
        pending_moves: assignment -> the move of c_i if its update is used, oldest first.
        used_ids: the newest assignments reported as used.
    """

    start_version: int = -1
    value: Mapping[str, Array] = field(default_factory=dict)
    pending_moves: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    used_ids: tuple[str, ...] = ()

    @property
    def is_zero(self) -> bool:
        """Whether no move has counted: new to the run, or the state is lost."""
        return not self.value

    def apply_used(self, start_version: int, used_ids: Collection[str]) -> ClientControlVariate:
        """Returns the variate at the start of an assignment, with the moves that counted meanwhile.

        Devices answer in the order of their instructions, so a move older than a used one never will count. A used
        update that is unknown here means that a newer state than this one is lost, and one no longer reported that
        the run went back behind it: the variate restarts at zero.

        Args:
            start_version: from the coordinator.
            used_ids: the device's newest used assignments, oldest first, at least the last `NUM_REPORTED_IDS`.
        """
        used_ids = tuple(used_ids)
        is_older = not {*used_ids} <= {*self.pending_moves, *self.used_ids}
        is_newer = (
            self.used_ids
            and self.used_ids[-1] not in used_ids
            and len({*used_ids} & {*self.pending_moves}) < NUM_REPORTED_IDS
        )
        if start_version != self.start_version or is_older or is_newer:
            return ClientControlVariate(start_version=start_version, used_ids=used_ids[-_MAX_USED_IDS:])
        value, pending = self.value, dict(self.pending_moves)
        newest = max((index for index, pending_id in enumerate(pending) if pending_id in used_ids), default=-1)
        for pending_id in list(pending)[: newest + 1]:
            move = pending.pop(pending_id)
            value = (
                {name: value[name] + array if value else array for name, array in move.items()}
                if pending_id in used_ids
                else value
            )
        recent_ids = tuple(dict.fromkeys((*self.used_ids, *used_ids)))[-_MAX_USED_IDS:]
        return replace(self, value=value, pending_moves=pending, used_ids=recent_ids)

    def add_move(self, assignment_id: str, new_value: Mapping[str, Array]) -> ClientControlVariate:
        """Returns the variate with an assignment's move, in place of an earlier one of the same assignment.

        Args:
            assignment_id: of the move.
            new_value: c_i at the end of the assignment, by tensor; empty when the training diverged.
        """
        if new_value and any(
            _get_shapes(other) != _get_shapes(new_value)
            for other in (self.value, *self.pending_moves.values())
            if other
        ):
            # The task has another model now.
            return replace(self, value={}, pending_moves={}).add_move(assignment_id, new_value)
        moves = {other: move for other, move in self.pending_moves.items() if other != assignment_id}
        if new_value:
            moves[assignment_id] = {
                name: array - self.value[name] if self.value else np.array(array) for name, array in new_value.items()
            }
        return replace(self, pending_moves=dict(list(moves.items())[-MAX_PENDING_MOVES:]))

    def to_arrays(self) -> dict[str, Array]:
        """Returns the state to keep on disk; the arrays are read-only."""
        index = json.dumps({"began": self.start_version, "moves": [*self.pending_moves], "used": [*self.used_ids]})
        moves = {
            f"{_MOVE_PREFIX}{move_index}/{name}": array
            for move_index, move in enumerate(self.pending_moves.values())
            for name, array in move.items()
        }
        values = {f"{_VALUE_PREFIX}{name}": array for name, array in self.value.items()}
        return {_INDEX_KEY: np.frombuffer(index.encode(), np.uint8), **values, **moves}


def get_start_version(plan: TrainConfig) -> int:
    """Returns the version with all-zero variates: the number of the message that carries c."""
    return plan.messages[0].step if plan.messages else 0


def restore_variate(arrays: Mapping[str, Array]) -> ClientControlVariate:
    """Returns the variate that `to_arrays` saved.

    Raises:
        ValueError: it is damaged, or of another program.
    """
    try:
        index = json.loads(arrays[_INDEX_KEY].tobytes())
        start_version, pending_ids, used = (
            int(index["began"]),
            [str(pending_id) for pending_id in index["moves"]],
            index["used"],
        )
        value = _select_arrays(arrays, _VALUE_PREFIX)
        moves = {
            pending_id: _select_arrays(arrays, f"{_MOVE_PREFIX}{move_index}/")
            for move_index, pending_id in enumerate(pending_ids[:MAX_PENDING_MOVES])
        }
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a control variate that was kept is damaged: {error!r}") from error
    shapes = [_get_shapes(pending_id) for pending_id in (value, *moves.values()) if pending_id]
    if any(pending_id != shapes[0] for pending_id in shapes) or not all(moves.values()):
        raise ValueError("a control variate that was kept is damaged: its parts are of different models")
    return ClientControlVariate(
        start_version=start_version,
        value=value,
        pending_moves=moves,
        used_ids=tuple(str(pending_id) for pending_id in used)[-_MAX_USED_IDS:],
    )


def _get_shapes(arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _select_arrays(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    selected = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    if not all(array.dtype.kind == "f" and np.isfinite(array).all() for array in selected.values()):
        raise ValueError("a control variate that was kept is damaged: it must be of finite numbers")
    return selected
