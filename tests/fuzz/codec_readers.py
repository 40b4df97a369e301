"""Bodies of tensors: of every codec, deltas, what travels along edges, and what devices keep of them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from codec_examples import EXAMPLES, SHAPES, rng, small_tensors
from damaged_bodies import Surface, all_surfaces, decode_damaged, opened, surfaces_of
from fuzz.reader import MIB, Reader, Seed

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.delta import apply_delta, encode_delta
from edgefl.compression.error_feedback import ErrorFeedback
from edgefl.compression.peer_codec import PeerCodec
from edgefl.compression.stages import select_shared_tensors
from edgefl.compression.wire import PeerModelFrame, read_peer_frame, write_peer_frame
from edgefl.core.types import TensorSpec
from edgefl.device.training.client_state import load_arrays
from edgefl.tasks.local_algorithms.scaffold import ClientControlVariate, restore_variate

EDGE_SHAPES = (TensorSpec(name="w", shape=(40,)), TensorSpec(name="b", shape=(3,)))


def codec_bodies(_folder: Path) -> Reader:
    """Every stage of the registry; the first two bytes say which surface the rest lies in."""
    surfaces = all_surfaces()

    def feed(data: bytes) -> None:
        if len(data) > 1:
            decode_damaged(surfaces[int.from_bytes(data[:2], "little") % len(surfaces)], data[2:])

    return Reader(feed=feed, seeds=tuple(_numbered(surfaces)), most_bytes=MIB, refuses=())


def one_codec(spec: str, _folder: Path) -> Reader:
    """One line of codecs, when the time should go to it alone."""
    surfaces = surfaces_of(spec)

    def feed(data: bytes) -> None:
        if len(data) > 1:
            decode_damaged(surfaces[int.from_bytes(data[:2], "little") % len(surfaces)], data[2:])

    return Reader(feed=feed, seeds=tuple(_numbered(surfaces)), most_bytes=MIB, refuses=())


def deltas(_folder: Path) -> Reader:
    """What changed in a model, for a device that holds the one before."""
    model = small_tensors()
    changed = {"weight": np.array([0, 3]), "kernel": np.array([1]), "count": np.array([0])}
    seeds = []
    for spec in ("dense", "dense|fp16", "dense|bf16|zstd"):
        body = encode_delta(model, changed, SHAPES, spec, rng())
        assert body is not None
        seeds += [
            Seed(content=content, close=close) for content, close in opened(body, select_shared_tensors(SHAPES))
        ]

    def feed(data: bytes) -> None:
        found = apply_delta(model, data, SHAPES)
        assert all(found[name].shape == model[name].shape for name in found)

    return Reader(feed=feed, seeds=tuple(seeds), most_bytes=MIB)


def edge_bodies(_folder: Path) -> Reader:
    """What a neighbour in a graph sends: whole, or as the difference to what is held."""
    draw = np.random.default_rng(1)

    def parts() -> dict[str, dict[str, np.ndarray]]:
        return {"y": {one.name: draw.normal(size=one.shape).astype(np.float32) for one in EDGE_SHAPES}}

    one, other = (PeerCodec("int8", EDGE_SHAPES, epoch=1) for _ in range(2))
    bodies = []
    for _ in range(3):
        bodies.append(one.encode("b", parts(), rng()))
        other.decode("a", bodies[-1])
        one.decode("b", other.encode("a", parts(), rng()))
    exact = PeerCodec("", EDGE_SHAPES, epoch=1).encode("b", parts(), rng())

    def feed(data: bytes) -> None:
        held = PeerCodec("int8", EDGE_SHAPES, epoch=1)
        held.decode("a", bodies[0])
        decoded = held.decode("a", data)
        assert all(array.dtype == np.float32 for part in decoded.values() for array in part.values())

    seeds = [Seed(content=body) for body in (*bodies[:2], exact)]
    for body in (bodies[1], exact):
        frame = read_peer_frame(body)
        seeds += [Seed(content=bytes(part), close=_in_edge(frame, name)) for name, part in frame.parts.items()]
        seeds += [
            Seed(content=content, close=lambda found, f=frame, n=name, c=close: _in_edge(f, n)(c(found)))
            for name, part in frame.parts.items()
            for content, close in opened(bytes(part), select_shared_tensors(EDGE_SHAPES))
        ]
    return Reader(feed=feed, seeds=tuple(seeds), most_bytes=MIB)


def kept_residuals(folder: Path) -> Reader:
    """The arrays that a device keeps of a run, and the wrapper that goes on from them."""
    codec = ErrorFeedback(make_codec("topk:0.2|int8", SHAPES))
    codec.encode("a1", small_tensors(), rng())
    codec.encode("a2", small_tensors(), rng())
    packed = io.BytesIO()
    np.savez(packed, **codec.state())
    place = folder / "residuals"
    place.mkdir()

    def feed(data: bytes) -> None:
        (place / "run.npz").write_bytes(data)
        arrays = load_arrays(place, "run")
        if arrays is not None:
            fresh = ErrorFeedback(make_codec("topk:0.2|int8", SHAPES))
            fresh.restore(arrays)
            decode_body(fresh.encode("a3", small_tensors(), rng()), SHAPES)

    return Reader(feed=feed, seeds=(Seed(content=packed.getvalue()), *npz_seeds(codec.state())))


def kept_variates(folder: Path) -> Reader:
    """The control variate that a device keeps of a run, and an assignment that goes on from it."""
    after = {name: array for name, array in small_tensors().items() if array.dtype.kind == "f"}
    kept = ClientControlVariate().apply_used(0, ()).add_move("a1", after).apply_used(0, ["a1"]).add_move("a2", after)
    packed = io.BytesIO()
    np.savez(packed, **kept.to_arrays())
    place = folder / "variates"
    place.mkdir()

    def feed(data: bytes) -> None:
        (place / "run.npz").write_bytes(data)
        arrays = load_arrays(place, "run")
        if arrays is not None:
            found = restore_variate(arrays).apply_used(0, ["a1", "a2"]).add_move("a3", after)
            assert restore_variate(found.to_arrays()).pending_moves.keys() == found.pending_moves.keys()

    return Reader(
        feed=feed, seeds=(Seed(content=packed.getvalue()), *npz_seeds(kept.to_arrays())), refuses=(ValueError,)
    )


def npz_seeds(arrays: dict[str, np.ndarray]) -> Iterator[Seed]:
    """The same archive, each of its members once as what is changed: checksums of the zip file hold then."""
    members = {}
    for name, array in arrays.items():
        out = io.BytesIO()
        np.save(out, array)
        members[name] = out.getvalue()
    for name, member in members.items():
        yield Seed(content=member, close=lambda content, name=name: zipped({**members, name: content}))


def zipped(members: dict[str, bytes]) -> bytes:
    """An `.npz` archive of arrays that are bytes already."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, member in members.items():
            archive.writestr(f"{name}.npy", member)
    return out.getvalue()


def _numbered(surfaces: tuple[Surface, ...]) -> Iterator[Seed]:
    for number, surface in enumerate(surfaces):
        mark = number.to_bytes(2, "little")
        yield Seed(content=surface.content, close=lambda content, mark=mark: mark + content)


def _in_edge(frame: PeerModelFrame, name: str):
    def close(content: bytes) -> bytes:
        return write_peer_frame(
            PeerModelFrame(
                epoch=frame.epoch, number=frame.number, base_number=frame.base_number, ack_epoch=frame.ack_epoch,
                ack_number=frame.ack_number, parts={**frame.parts, name: memoryview(content)},
            )
        )  # fmt: skip

    return close


CODEC_LINES = EXAMPLES
