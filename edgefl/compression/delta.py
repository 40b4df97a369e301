"""The sparse downlink: a model as those entries that changed since the version that a device holds.

The entries carry their new values and not differences, so rounding never adds up: with the same value stage a device
that was sent deltas holds bit for bit the model of one that was sent everything. Only stages that round each number
for itself and always alike (fp32, fp16, bf16) keep that promise, so no other is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec, build_codec, check_memory
from edgefl.compression.decoding import decode_frame, is_delta_frame
from edgefl.compression.registry import STAGES
from edgefl.compression.specs import DELTA, FEEDBACK, split_spec
from edgefl.compression.stages import is_lossy, shared_shapes
from edgefl.compression.tensors.changes import Changes, changed_entries
from edgefl.compression.tensors.dense import Dense
from edgefl.compression.values.floats import BFloat16, Float16, Float32
from edgefl.compression.values.natural import Natural
from edgefl.compression.values.onebit import OneBit
from edgefl.compression.values.qsgd import Qsgd
from edgefl.compression.values.sign import Sign
from edgefl.compression.values.terngrad import TernGrad
from edgefl.compression.wire import read_frame
from edgefl.errors import CodecError
from edgefl.types import Array, Indices, Shapes, SparseTensor, Tensor, Tensors

_FOR_UPDATES = (Natural, OneBit, Qsgd, Sign, TernGrad)
DENSE_FROM = 0.5
"""From this fraction of changed entries on, the whole model is sent."""


def parse_down(spec: str) -> tuple[bool, str]:
    """Returns whether a line for `[compression] down` asks for deltas, and the codec of whole models.

    Raises:
        CodecError: an unknown stage, stages in a wrong order, one that would spoil a model, error feedback or codecs
            for layers (which are for updates), or deltas with values that are not rounded one by one.
    """
    split = split_spec(spec)
    if split.prefix == FEEDBACK:
        raise CodecError(f"codec {spec!r}: ef is for [compression] up, where what is left out can be sent later")
    if split.layers:
        raise CodecError(f"codec {spec!r}: a codec for some layers is for [compression] up; a model goes down by one")
    codec = build_codec(split, ())
    check_memory(split, codec)
    if split.prefix == DELTA:
        _delta_codec(codec, ())
        return True, split.codec
    if not isinstance(codec.tensors, Dense):
        raise CodecError(
            f"codec {spec!r}: what does not travel of a model would be zero; {codec.spec.partition('|')[0]} is for "
            "[compression] up, take dense, fp16, bf16 or int8, or delta in front for what changed"
        )
    if isinstance(codec.values, _FOR_UPDATES):
        raise CodecError(
            f"codec {spec!r}: such values come right in the mean of many updates, and a model is sent once; "
            "take dense, fp16, bf16 or int8"
        )
    return False, split.codec


def encode_delta(
    model: Tensors, changed: Indices | None, shapes: Shapes, spec: str, rng: Generator, *, epoch: int = 0
) -> bytes | None:
    """Returns a body with the changed entries; None when the whole model is to be sent, as it is hardly larger.

    Args:
        model: the model as it is now.
        changed: flat indices by tensor, at least those that differ from what the device holds; a tensor that is not
            named has none. None means that all may have changed.
        shapes: the task's tensors.
        spec: the codec of whole models that `parse_down` returned, such as `dense|fp16`.
        rng: not used by the codecs that are allowed.
        epoch: generation of the wrapper's state, checked by `apply_delta`.

    Raises:
        CodecError: an index or a tensor that the task does not have, or a codec that no delta can be made with.
    """
    if changed is None:
        return None
    shared = shared_shapes(shapes)
    unknown = set(changed) - {tensor.name for tensor in shared}
    if unknown:
        raise CodecError(
            f"changed indices name {', '.join(map(repr, sorted(unknown)))}, which the task does not share"
        )
    codec = build_codec(split_spec(spec), shapes)
    entries = {
        tensor.name: changed_entries(tensor, _dense(model[tensor.name]), changed.get(tensor.name, np.arange(0)))
        for tensor in shared
    }
    num_changed = sum(found.indices.size for found in entries.values())
    if num_changed > DENSE_FROM * sum(tensor.size for tensor in shared):
        return None
    body = _delta_codec(codec, shapes).encode(entries, rng, epoch=epoch)
    return body if len(body) < _dense_bytes(codec, shared) else None


def apply_delta(
    model: Mapping[str, Array], body: bytes | memoryview, shapes: Shapes, *, epoch: int = 0
) -> dict[str, Array]:
    """Returns the model that the coordinator has, given the model it made the delta for.

    Tensors in which nothing changed are the given ones; the others are new, and no array is written to.

    Raises:
        CodecError: the body is damaged or no delta, or `model` is not one of the task's.
    """
    frame = read_frame(body)
    if not is_delta_frame(frame):
        raise CodecError("body holds whole tensors, expected a delta")
    return {name: _changed(model, name, found) for name, found in decode_frame(frame, shapes, epoch=epoch).items()}


def _changed(model: Mapping[str, Array], name: str, found: Tensor) -> Array:
    held = model.get(name)
    if not isinstance(found, SparseTensor) or held is None or held.shape != found.shape:
        raise CodecError(f"tensor {name!r} must have the shape {found.shape} in the model that a delta is for")
    if not found.indices.size:
        return held
    new = held.copy()
    new.reshape(-1)[found.indices] = found.values
    return new


def _delta_codec(codec: Codec, shapes: Shapes) -> Codec:
    """Returns the codec that writes changed entries as `codec` writes all.

    Raises:
        CodecError: its values depend on one another, or not all entries travel.
    """
    if not isinstance(codec.tensors, Dense) or not isinstance(codec.values, Float32 | Float16 | BFloat16):
        raise CodecError(
            f"codec {codec.spec!r}: a delta carries dense, fp16 or bf16 values, as each is rounded alone"
        )
    ids = (STAGES[DELTA][0], *codec.ids[1:])
    return Codec(
        spec=f"{DELTA}|{codec.spec}",
        shapes=shapes,
        ids=ids,
        tensors=Changes(),
        values=codec.values,
        lossless=codec.lossless,
    )


def _dense_bytes(codec: Codec, shared: Shapes) -> int:
    """Returns the length of the whole model's payload before it is packed."""
    width = 4 if isinstance(codec.values, Float32) else 2
    return sum(spec.size * width if is_lossy(spec) else spec.nbytes for spec in shared)


def _dense(tensor: Tensor) -> Array:
    return tensor.dense() if isinstance(tensor, SparseTensor) else np.asarray(tensor)
