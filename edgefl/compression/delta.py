"""Sparse downlink: a model as its entries that changed since the device's version.

The entries carry their new values and not differences, so rounding never adds up: with the same value stage a device
that was sent deltas holds bit for bit the model of one that was sent everything. Only stages that round each number
independently and deterministically (fp32, fp16, bf16) guarantee it, so no other is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec, build_codec, check_stateful_stages, decode_frame, is_delta_frame
from edgefl.compression.quantisation.alternating import Alternating
from edgefl.compression.quantisation.rounding import BFloat16, Float16, Float32, OneBitSgd, ScaledSign
from edgefl.compression.quantisation.stochastic_rounding import NaturalCompression, Qsgd, TernGrad
from edgefl.compression.registry import DELTA_PREFIX, FEEDBACK_PREFIX, STAGES, parse_spec
from edgefl.compression.sparsification.sparsifiers import Dense, SparseDelta, select_changed_entries
from edgefl.compression.stages import is_lossy, select_shared_tensors, to_dense
from edgefl.compression.wire import read_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, Indices, ModelSpec, SparseTensor, Tensor, Tensors

_UPDATE_ONLY_STAGES = (NaturalCompression, OneBitSgd, Qsgd, ScaledSign, TernGrad)
MAX_CHANGED_FRACTION = 0.5
"""From this fraction of changed entries on, the whole model is sent."""


def parse_downlink_codec(spec: str) -> tuple[bool, str]:
    """Returns whether a `[compression] down` line uses deltas, and the codec of whole models.

    Raises:
        CodecError: an unknown stage, stages in a wrong order, one that would spoil a model, error feedback or codecs
            for layers (which are for updates), or deltas with values that are not rounded one by one.
    """
    split = parse_spec(spec)
    if split.prefix == FEEDBACK_PREFIX:
        raise CodecError(f"codec {spec!r}: ef is for [compression] up, where what is left out can be sent later")
    if split.layers:
        raise CodecError(f"codec {spec!r}: a codec for some layers is for [compression] up; a model goes down by one")
    codec = build_codec(split, ())
    check_stateful_stages(split, codec)
    if split.prefix == DELTA_PREFIX:
        _make_delta_codec(codec, ())
        return True, split.line
    if not isinstance(codec.tensor_stage, Dense):
        raise CodecError(
            f"codec {spec!r}: what does not travel of a model would be zero; {codec.spec.partition('|')[0]} is for "
            "[compression] up, take dense, fp16, bf16 or int8, or delta in front for what changed"
        )
    stage = codec.value_stage
    if isinstance(stage, _UPDATE_ONLY_STAGES) or (isinstance(stage, Alternating) and stage.is_random):
        raise CodecError(
            f"codec {spec!r}: such values come right in the mean of many updates, and a model is sent once; "
            "take dense, fp16, bf16 or int8"
        )
    return False, split.line


def encode_delta(
    model: Tensors, changed_indices: Indices | None, shapes: ModelSpec, spec: str, rng: Generator, *, epoch: int = 0
) -> bytes | None:
    """Returns a body with the changed entries; None when the whole model is hardly larger.

    Args:
        model: the model as it is now.
        changed_indices: flat indices by tensor, at least those that differ from the device's model; a tensor
            without an entry has none. None means that all may have changed.
        shapes: the task's tensors.
        spec: the codec of whole models that `parse_downlink_codec` returned, such as `dense|fp16`.
        rng: not used by the codecs that are allowed.
        epoch: generation of the wrapper's state, checked by `apply_delta`.

    Raises:
        CodecError: an index or a tensor that the task does not have, or a codec that no delta can be made with.
    """
    if changed_indices is None:
        return None
    shared = select_shared_tensors(shapes)
    unknown = set(changed_indices) - {tensor.name for tensor in shared}
    if unknown:
        raise CodecError(
            f"changed indices name {', '.join(map(repr, sorted(unknown)))}, which the task does not share"
        )
    codec = build_codec(parse_spec(spec), shapes)
    entries = {
        tensor.name: select_changed_entries(
            tensor, to_dense(model[tensor.name]), changed_indices.get(tensor.name, np.arange(0))
        )
        for tensor in shared
    }
    num_changed = sum(entry.indices.size for entry in entries.values())
    if num_changed > MAX_CHANGED_FRACTION * sum(tensor.size for tensor in shared):
        return None
    body = _make_delta_codec(codec, shapes).encode(entries, rng, epoch=epoch)
    return body if len(body) < _count_dense_bytes(codec, shared) else None


def apply_delta(
    model: Mapping[str, Array], body: bytes | memoryview, shapes: ModelSpec, *, epoch: int = 0
) -> dict[str, Array]:
    """Returns the coordinator's model, given the base model of the delta.

    Tensors in which nothing changed are the given ones; the others are new, and no array is written to.

    Raises:
        CodecError: the body is damaged or no delta, or `model` is not one of the task's.
    """
    frame = read_frame(body)
    if not is_delta_frame(frame):
        raise CodecError("body holds whole tensors, expected a delta")
    return {
        name: _apply_entries(model, name, entry) for name, entry in decode_frame(frame, shapes, epoch=epoch).items()
    }


def _apply_entries(model: Mapping[str, Array], name: str, entries: Tensor) -> Array:
    base = model.get(name)
    if not isinstance(entries, SparseTensor) or base is None or base.shape != entries.shape:
        raise CodecError(f"tensor {name!r} must have the shape {entries.shape} in the model that a delta is for")
    if not entries.indices.size:
        return base
    new = base.copy()
    new.reshape(-1)[entries.indices] = entries.values
    return new


def _make_delta_codec(codec: Codec, shapes: ModelSpec) -> Codec:
    """Returns the codec that writes changed entries as `codec` writes all.

    Raises:
        CodecError: its values depend on one another, or not all entries travel.
    """
    if not isinstance(codec.tensor_stage, Dense) or not isinstance(codec.value_stage, Float32 | Float16 | BFloat16):
        raise CodecError(
            f"codec {codec.spec!r}: a delta carries dense, fp16 or bf16 values, as each is rounded alone"
        )
    ids = (STAGES[DELTA_PREFIX][0], *codec.stage_ids[1:])
    return Codec(
        spec=f"{DELTA_PREFIX}|{codec.spec}",
        shapes=shapes,
        stage_ids=ids,
        tensor_stage=SparseDelta(),
        value_stage=codec.value_stage,
        lossless_stage=codec.lossless_stage,
    )


def _count_dense_bytes(codec: Codec, shared: ModelSpec) -> int:
    """Returns the unpacked size of the whole model's payload."""
    width = 4 if isinstance(codec.value_stage, Float32) else 2
    return sum(spec.size * width if is_lossy(spec) else spec.nbytes for spec in shared)
