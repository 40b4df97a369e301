"""Error feedback: what a codec leaves out of one update is added to the next one.

Source: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019,
algorithm 2. Differs from the paper: an update can be lost, and then all of it goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec
from edgefl.compression.specs import FEEDBACK, split_spec
from edgefl.compression.stages import exact_array, is_lossy, largest_magnitude, naming, shared_shapes
from edgefl.errors import CodecError
from edgefl.types import Array, SparseTensor, Tensor, Tensors, TensorSpec

MAX_PENDING = 2
_MAX_SETTLED = 8
_RESIDUAL, _PENDING, _SETTLED, _MEMORY = "residual/", "pending/", "settled/", "memory/"


def uses_feedback(spec: str) -> bool:
    """Says whether a codec's line asks the device to keep what is left out."""
    return split_spec(spec).prefix == FEEDBACK


class ErrorFeedback:
    """What one device has left out of the updates of one run.

    An update counts as used until it is known to be lost: the residual is what its codec left out, and the body is
    kept beside it, so that all of the update can go back. That takes one model of memory, and the bodies of at most
    two updates. Buffers, integers and float64 travel exactly and leave nothing out.

    What the codec's stages remember (the warm start of `powersgd`) is kept with it. It only makes the next update
    better, so it stays as it is when an update is lost.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lossy = tuple(spec for spec in shared_shapes(codec.shapes) if is_lossy(spec))
        self._residual: dict[str, Array] = {}
        self._pending: dict[str, bytes] = {}
        self._settled: tuple[str, ...] = ()
        self._is_restored = False
        self._memory: dict[str, Array] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """Returns the assignments whose fate is not known, oldest first."""
        return tuple(self._pending)

    def encode(self, assignment_id: str, displacement: Tensors, rng: Generator) -> bytes:
        """Returns the body for displacement plus residual.

        An assignment whose update is pending has been worked on before, from the same model and by the same random
        numbers, and its answer was lost with the process: it gets that update, and the displacement does not count
        again. When more than two are pending the oldest is taken as lost. After an error nothing has changed.

        Raises:
            CodecError: as the codec's `encode`, or a displacement that is not finite, which would stay for ever.
        """
        if assignment_id in self._pending:
            return self._pending[assignment_id]
        overdue = list(self._pending)[: len(self._pending) + 1 - MAX_PENDING]
        before = self._without(overdue)
        inputs = {spec.name: _total(spec, displacement, before) for spec in self._lossy}
        memory = dict(self._memory)
        body = self._codec.encode({**displacement, **inputs}, rng, memory=memory)
        decoded = self._codec.decode(body)
        for spec in self._lossy:
            _add(inputs[spec.name], decoded[spec.name], -1)
        for gone in overdue:
            del self._pending[gone]
        self._residual, self._memory = inputs, memory
        self._pending[assignment_id] = body
        return body

    def settle(self, used: Collection[str]) -> None:
        """Takes note of updates that the coordinator used; ids that are not pending are ignored.

        Devices answer in the order in which they are asked, so an update that is older than a used one and is not
        used itself never will be: it goes back whole. `used` must therefore name the device's newest used updates, at
        least the last two, however long ago they were used. By these a state from disk is seen to be older than the
        coordinator, when one of them is not known: what is pending in it was used meanwhile, and does not go back;
        what it left out has gone out with later updates, and does not go out again.
        """
        is_old = self._is_restored and not set(used) <= {*self._pending, *self._settled}
        self._is_restored = self._is_restored and not used
        self._settled = tuple(dict.fromkeys((*self._settled, *used)))[-_MAX_SETTLED:]
        if is_old:
            self._residual, self._pending = {}, {}
            return
        ids = list(self._pending)
        newest = max((place for place, pending in enumerate(ids) if pending in used), default=-1)
        decided = ids[: newest + 1]
        self._residual = self._without([pending for pending in decided if pending not in used])
        for pending in decided:
            del self._pending[pending]

    def state(self) -> dict[str, Array]:
        """Returns all there is to keep on disk; the arrays are not to be written to."""
        pending = {
            f"{_PENDING}{place}/{assignment_id}": np.frombuffer(body, dtype=np.uint8)
            for place, (assignment_id, body) in enumerate(self._pending.items())
        }
        residual = {f"{_RESIDUAL}{name}": array for name, array in self._residual.items()}
        pending |= {f"{_SETTLED}{place}/{name}": np.zeros(0, np.uint8) for place, name in enumerate(self._settled)}
        return residual | pending | {f"{_MEMORY}{name}": array for name, array in self._memory.items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Goes on from what `state` returned.

        Raises:
            CodecError: it is of another task or damaged; nothing has changed then.
        """
        residual = _restored_residual(self._lossy, state)
        pending = {name: _restored_body(array) for name, array in _in_order(state, _PENDING, MAX_PENDING)}
        for body in pending.values():
            self._codec.decode(body)
        self._residual, self._pending, self._memory = residual, pending, _restored_memory(state)
        self._settled = tuple(name for name, _ in _in_order(state, _SETTLED, _MAX_SETTLED))
        self._is_restored = True

    def _without(self, lost: Collection[str]) -> dict[str, Array]:
        """Returns the residual as if the updates had not been encoded; the same arrays when there are none."""
        if not lost:
            return self._residual
        residual = {name: array.copy() for name, array in self._residual.items()}
        for assignment_id in lost:
            decoded = self._codec.decode(self._pending[assignment_id])
            for name, array in residual.items():
                _add(array, decoded[name], 1)
        return residual


def _total(spec: TensorSpec, displacement: Tensors, residual: Mapping[str, Array]) -> Array:
    """Returns displacement plus residual in a new array."""
    if spec.name not in displacement:
        raise CodecError(f"tensors to encode lack {spec.name!r}")
    array = exact_array(spec, displacement[spec.name])
    with naming(spec):
        largest_magnitude("error feedback", array)
    return np.array(array) if spec.name not in residual else np.asarray(array + residual[spec.name])


def _add(array: Array, decoded: Tensor, sign: int) -> None:
    """Adds (or takes away) in place what travelled."""
    if isinstance(decoded, SparseTensor):
        array.reshape(-1)[decoded.indices] += sign * decoded.values
    else:
        array += sign * decoded


def _restored_residual(lossy: tuple[TensorSpec, ...], state: Mapping[str, Array]) -> dict[str, Array]:
    kept = {name.removeprefix(_RESIDUAL): array for name, array in state.items() if name.startswith(_RESIDUAL)}
    expected = {spec.name: spec for spec in lossy}
    if kept and set(kept) != set(expected):
        raise CodecError(f"kept residual must be of {', '.join(expected)}, got {', '.join(sorted(kept))}")
    residual = {name: np.array(exact_array(expected[name], array)) for name, array in kept.items()}
    for name, array in residual.items():
        with naming(expected[name]):
            largest_magnitude("error feedback", array)
    return residual


def _restored_body(array: Array) -> bytes:
    if array.dtype != np.uint8:
        raise CodecError(f"kept update must be of uint8, got {array.dtype}")
    return array.tobytes()


def _in_order(state: Mapping[str, Array], kind: str, most: int) -> list[tuple[str, Array]]:
    """Returns the assignments of a kind and what is kept of each, by the places in their names."""
    found: dict[int, tuple[str, Array]] = {}
    for name, array in state.items():
        place, _, assignment_id = name.removeprefix(kind).partition("/")
        if name.startswith(kind) and place.isascii() and place.isdecimal() and len(found) < most:
            found[int(place)] = assignment_id, array
    return [found[place] for place in sorted(found)]


def _restored_memory(state: Mapping[str, Array]) -> dict[str, Array]:
    """Returns what stages remembered; a NaN would stay in it for ever, so what is not finite is forgotten."""
    kept = {name.removeprefix(_MEMORY): np.array(array) for name, array in state.items() if name.startswith(_MEMORY)}
    return {name: array for name, array in kept.items() if array.dtype.kind in "fiub" and np.all(np.isfinite(array))}
