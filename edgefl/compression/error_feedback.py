"""Error feedback: the residual of one encoded update is added to the next one.

Source: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019,
algorithm 2. Differs from the paper: an update can be lost, and then all of it goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec
from edgefl.compression.registry import FEEDBACK_PREFIX, parse_spec
from edgefl.compression.stages import (
    add_tensor_name_to_errors,
    compute_max_magnitude,
    is_lossy,
    select_shared_tensors,
    to_spec_array,
)
from edgefl.core.errors import CodecError, ConfigError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, Tensors, TensorSpec, TrainConfig

MAX_PENDING = 2
_MAX_USED_IDS = 8
_RESIDUAL_PREFIX, _PENDING_PREFIX, _USED_PREFIX, _MEMORY_PREFIX = "residual/", "pending/", "used/", "memory/"


def has_error_feedback(spec: str) -> bool:
    """Returns whether a codec's line keeps the residual on the device."""
    return parse_spec(spec).prefix == FEEDBACK_PREFIX


class ErrorFeedback:
    """Residual of one device in one run.

    An update counts as used until it is known to be lost: the residual is the codec's error, and the body is kept
    beside it, so that the whole update can be restored. That takes one model of memory, and the bodies of at most two
    updates. Buffers, integers and float64 travel exactly and have no residual.

    The memory of the codec's stages (the warm start of `powersgd`) is kept with it. It only improves the next update,
    so it stays unchanged when an update is lost.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lossy = tuple(spec for spec in select_shared_tensors(codec.shapes) if is_lossy(spec))
        self._residual: dict[str, Array] = {}
        self._pending: dict[str, bytes] = {}
        self._used_ids: tuple[str, ...] = ()
        self._is_restored = False
        self._memory: dict[str, Array] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """The assignments whose outcome is unknown, oldest first."""
        return tuple(self._pending)

    def encode(self, assignment_id: str, displacement: Tensors, rng: Generator) -> bytes:
        """Returns the body for displacement plus residual.

        An assignment whose update is pending was trained before, from the same model and with the same random
        numbers, and its reply was lost with the process: it gets that update, and the displacement does not count
        again. When more than two are pending the oldest is taken as lost. After an error nothing has changed.

        Raises:
            CodecError: as the codec's `encode`, or a displacement that is not finite, which would stay for ever.
        """
        if assignment_id in self._pending:
            return self._pending[assignment_id]
        expired_ids = list(self._pending)[: len(self._pending) + 1 - MAX_PENDING]
        residual = self._compute_residual_without(expired_ids)
        inputs = {spec.name: _compute_total(spec, displacement, residual) for spec in self._lossy}
        memory = dict(self._memory)
        body = self._codec.encode({**displacement, **inputs}, rng, memory=memory)
        decoded = self._codec.decode(body)
        for spec in self._lossy:
            _add_in_place(inputs[spec.name], decoded[spec.name], -1)
        for expired_id in expired_ids:
            del self._pending[expired_id]
        self._residual, self._memory = inputs, memory
        self._pending[assignment_id] = body
        return body

    def record_used(self, used_ids: Collection[str]) -> None:
        """Records updates that the coordinator used; ids that are not pending are ignored.

        Devices answer in the order of their instructions, so an unused update older than a used one never will be
        used: it is restored whole. `used_ids` must therefore name the device's newest used updates, at least the last
        two, however long ago they were used. If one of them is unknown, the state from disk is older than the
        coordinator: its pending updates were used meanwhile and are not restored; their residual went out with later
        updates and is not sent again.
        """
        is_old = self._is_restored and not set(used_ids) <= {*self._pending, *self._used_ids}
        self._is_restored = self._is_restored and not used_ids
        self._used_ids = tuple(dict.fromkeys((*self._used_ids, *used_ids)))[-_MAX_USED_IDS:]
        if is_old:
            self._residual, self._pending = {}, {}
            return
        ids = list(self._pending)
        newest = max((index for index, pending in enumerate(ids) if pending in used_ids), default=-1)
        completed = ids[: newest + 1]
        self._residual = self._compute_residual_without([pending for pending in completed if pending not in used_ids])
        for pending in completed:
            del self._pending[pending]

    def state(self) -> dict[str, Array]:
        """Returns the state to keep on disk; the arrays are read-only."""
        pending = {
            f"{_PENDING_PREFIX}{index}/{assignment_id}": np.frombuffer(body, dtype=np.uint8)
            for index, (assignment_id, body) in enumerate(self._pending.items())
        }
        residual = {f"{_RESIDUAL_PREFIX}{name}": array for name, array in self._residual.items()}
        pending |= {
            f"{_USED_PREFIX}{index}/{name}": np.zeros(0, np.uint8) for index, name in enumerate(self._used_ids)
        }
        return residual | pending | {f"{_MEMORY_PREFIX}{name}": array for name, array in self._memory.items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restores the state that `state` returned.

        Raises:
            CodecError: it is of another task or damaged; nothing has changed then.
        """
        residual = _restore_residual(self._lossy, state)
        pending = {name: _restore_body(array) for name, array in _list_in_order(state, _PENDING_PREFIX, MAX_PENDING)}
        for body in pending.values():
            self._codec.decode(body)
        self._residual, self._pending, self._memory = residual, pending, _restore_memory(state)
        self._used_ids = tuple(name for name, _ in _list_in_order(state, _USED_PREFIX, _MAX_USED_IDS))
        self._is_restored = True

    def _compute_residual_without(self, lost_ids: Collection[str]) -> dict[str, Array]:
        """Returns the residual as if the updates had not been encoded; the same arrays for no updates."""
        if not lost_ids:
            return self._residual
        residual = {name: array.copy() for name, array in self._residual.items()}
        for assignment_id in lost_ids:
            decoded = self._codec.decode(self._pending[assignment_id])
            for name, array in residual.items():
                _add_in_place(array, decoded[name], 1)
        return residual


def _compute_total(spec: TensorSpec, displacement: Tensors, residual: Mapping[str, Array]) -> Array:
    """Returns displacement plus residual in a new array."""
    if spec.name not in displacement:
        raise CodecError(f"tensors to encode lack {spec.name!r}")
    array = to_spec_array(spec, displacement[spec.name])
    with add_tensor_name_to_errors(spec):
        compute_max_magnitude("error feedback", array)
    return np.array(array) if spec.name not in residual else np.asarray(array + residual[spec.name])


def _add_in_place(array: Array, decoded: Tensor, sign: int) -> None:
    """Adds or subtracts a decoded update in place."""
    if isinstance(decoded, SparseTensor):
        array.reshape(-1)[decoded.indices] += sign * decoded.values
    else:
        array += sign * decoded


def _restore_residual(lossy: tuple[TensorSpec, ...], state: Mapping[str, Array]) -> dict[str, Array]:
    saved = _select_arrays(state, _RESIDUAL_PREFIX)
    expected = {spec.name: spec for spec in lossy}
    if saved and set(saved) != set(expected):
        raise CodecError(f"kept residual must be of {', '.join(expected)}, got {', '.join(sorted(saved))}")
    residual = {name: np.array(to_spec_array(expected[name], array)) for name, array in saved.items()}
    for name, array in residual.items():
        with add_tensor_name_to_errors(expected[name]):
            compute_max_magnitude("error feedback", array)
    return residual


def _select_arrays(state: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}


def _restore_body(array: Array) -> bytes:
    if array.dtype != np.uint8:
        raise CodecError(f"kept update must be of uint8, got {array.dtype}")
    return array.tobytes()


def _list_in_order(state: Mapping[str, Array], prefix: str, limit: int) -> list[tuple[str, Array]]:
    """Returns the assignments of a kind with their arrays, ordered by the index in their names."""
    entries: dict[int, tuple[str, Array]] = {}
    for name, array in state.items():
        index, _, assignment_id = name.removeprefix(prefix).partition("/")
        if name.startswith(prefix) and index.isascii() and index.isdecimal() and len(entries) < limit:
            entries[int(index)] = assignment_id, array
    return [entries[index] for index in sorted(entries)]


def _restore_memory(state: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the stages' memory; non-finite arrays are dropped, as a NaN would stay for ever."""
    saved = {name: np.array(array) for name, array in _select_arrays(state, _MEMORY_PREFIX).items()}
    return {name: array for name, array in saved.items() if array.dtype.kind in "fiub" and np.all(np.isfinite(array))}


def is_stateful_training(plan: TrainConfig, codec: str, shapes: ModelSpec) -> bool:
    """Whether an instruction leaves state: node, optimiser, residual, local tensors, personal copy or account.

    Args:
        plan: of the instruction.
        codec: the codec line of its update.
        shapes: the model's tensors.
    """
    has_state = plan.node is not None or plan.keeps_state or has_error_feedback(codec)
    has_state = has_state or plan.has_personal or plan.privacy is not None
    return has_state or not all(spec.shared for spec in shapes)


def require_stateless_training(plan: TrainConfig, codec: str, shapes: ModelSpec) -> None:
    """Checks an instruction on a block of a redundant shard.

    Raises:
        ConfigError: the instruction leaves client state, so that other holders of the block get another result.
    """
    if is_stateful_training(plan, codec, shapes):
        raise ConfigError(
            "work on a block of a redundant shard must give the same result on all who hold it, so nothing may "
            "stay on the device: no kept optimiser state, no codec with ef, no tensors or copy of its own, no "
            "account of privacy"
        )
