"""Any body for the tensors of a task, whoever chose its codec: the header says which stages wrote it."""

from __future__ import annotations

from edgefl.compression.registry import LAYERS, STAGES, arrange, stage_by_id
from edgefl.compression.specs import DELTA
from edgefl.compression.stages import shared_shapes
from edgefl.compression.wire import MAX_PAYLOAD_BYTES, Frame, Reader, read_frame
from edgefl.errors import CodecError
from edgefl.types import Shapes, Tensor


def decode_body(body: bytes | memoryview, shapes: Shapes, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns the shared tensors of `shapes`; the header says which codec reads them.

    Arrays are read-only views of `body` where possible: copy what is to be written to.

    Raises:
        CodecError: the body is damaged, of an unknown codec, of another epoch or of another task; or it is a delta,
            which `delta.apply_delta` reads.
    """
    frame = read_frame(body)
    if is_delta_frame(frame):
        raise CodecError("body is a delta of a model, expected whole tensors")
    return decode_frame(frame, shapes, epoch=epoch)


def decode_frame(frame: Frame, shapes: Shapes, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns what `decode_body` does, of a body whose header was read."""
    shared = shared_shapes(shapes)
    if frame.num_tensors != len(shared):
        raise CodecError(f"body holds {frame.num_tensors} tensors, the task shares {len(shared)}")
    if frame.epoch != epoch:
        raise CodecError(f"body is of epoch {frame.epoch}, expected {epoch}")
    stages = arrange([stage_by_id(stage) for stage in frame.stages], "body")
    payload = frame.payload
    if stages.lossless is not None:
        payload = stages.lossless.decode(payload, most_bytes(shared))
    reader = Reader(payload)
    decoded = stages.tensors.decode(reader, shared, stages.values)
    reader.finish()
    return decoded


def decode_group(body: memoryview, shapes: Shapes) -> dict[str, Tensor]:
    """Returns the tensors of one group of `Layers`, whose body may hold no more layers.

    Raises:
        CodecError: as `decode_body`.
    """
    frame = read_frame(body)
    if is_delta_frame(frame) or STAGES[LAYERS][0] in frame.stages:
        raise CodecError("payload holds layers or a delta within a layer, expected whole tensors")
    return decode_frame(frame, shapes)


def is_delta_frame(frame: Frame) -> bool:
    """Says whether a body tells only what changed in a model."""
    return frame.stages[0] == STAGES[DELTA][0]


def most_bytes(shared: Shapes) -> int:
    """Returns how long an unpacked payload may be: none of our stages takes a third of it."""
    return min(MAX_PAYLOAD_BYTES, 4 * sum(spec.nbytes for spec in shared) + 256 * len(shared) + 4096)
