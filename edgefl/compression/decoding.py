"""Decoding of any body for a task's tensors: the header names the stages that wrote it."""

from __future__ import annotations

from edgefl.compression.registry import LAYERS, STAGES, find_stage_by_id, make_pipeline
from edgefl.compression.specs import DELTA_PREFIX
from edgefl.compression.stages import select_shared_tensors
from edgefl.compression.wire import MAX_PAYLOAD_BYTES, CodecFrame, PayloadReader, read_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import ModelSpec, Tensor


def decode_body(body: bytes | memoryview, shapes: ModelSpec, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns the shared tensors of `shapes`; the header determines the codec.

    Arrays are read-only views of `body` where possible: copy before writing.

    Raises:
        CodecError: the body is damaged, of an unknown codec, of another epoch or of another task; or it is a delta,
            which `delta.apply_delta` reads.
    """
    frame = read_frame(body)
    if is_delta_frame(frame):
        raise CodecError("body is a delta of a model, expected whole tensors")
    return decode_frame(frame, shapes, epoch=epoch)


def decode_frame(frame: CodecFrame, shapes: ModelSpec, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns the shared tensors, as `decode_body`, of a body whose header was read."""
    shared = select_shared_tensors(shapes)
    if frame.num_tensors != len(shared):
        raise CodecError(f"body holds {frame.num_tensors} tensors, the task shares {len(shared)}")
    if frame.epoch != epoch:
        raise CodecError(f"body is of epoch {frame.epoch}, expected {epoch}")
    stages = make_pipeline([find_stage_by_id(stage) for stage in frame.stages], "body")
    payload = frame.payload
    if stages.lossless_stage is not None:
        payload = stages.lossless_stage.decode(payload, compute_max_payload_bytes(shared))
    reader = PayloadReader(payload)
    decoded = stages.tensor_stage.decode(reader, shared, stages.value_stage)
    reader.require_end()
    return decoded


def decode_layer_group(body: memoryview, shapes: ModelSpec) -> dict[str, Tensor]:
    """Returns the tensors of one group of `PerLayerStage`; its body must not contain layers.

    Raises:
        CodecError: as `decode_body`.
    """
    frame = read_frame(body)
    if is_delta_frame(frame) or STAGES[LAYERS][0] in frame.stages:
        raise CodecError("payload holds layers or a delta within a layer, expected whole tensors")
    return decode_frame(frame, shapes)


def is_delta_frame(frame: CodecFrame) -> bool:
    """Returns whether a body contains only a model's changed entries."""
    return frame.stages[0] == STAGES[DELTA_PREFIX][0]


def compute_max_payload_bytes(shared: ModelSpec) -> int:
    """Returns the maximum length of an unpacked payload: edgefl's stages need less than a third of it."""
    return min(MAX_PAYLOAD_BYTES, 4 * sum(spec.nbytes for spec in shared) + 256 * len(shared) + 4096)
