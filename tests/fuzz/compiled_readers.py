"""What comes as a compiled task: files that a board fetches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from fuzz.reader import Form, Reader, Seed
from fuzz.storage_readers import safetensors_seeds

from edgefl.core.types import TensorKind, TensorSpec
from edgefl.tasks.compiled.artefact import (
    CompiledManifest,
    CompiledTask,
    compute_sha256,
    encode_artefact,
    parse_artefact,
)
from edgefl.tasks.compiled.board.graph_reader import read_graph
from edgefl.tasks.compiled.board.pruned_graph import remove_outputs
from edgefl.tasks.compiler.cache import parse_entry


def make_example() -> CompiledTask:
    """Returns an artefact whose graphs are none."""
    manifest = CompiledManifest(
        task="mnist",
        options={"model": "cnn"},
        model=(
            TensorSpec(name="fc.weight", shape=(2, 3)),
            TensorSpec(name="steps", shape=(), dtype="int64", kind=TensorKind.BUFFER),
        ),
        batch_size=4,
        input_shape=(3,),
        output_shape=(2,),
        target_shape=(),
        target_dtype="int64",
        loss="cross-entropy",
        noise=((4, 2),),
        versions={"torch": "2.13.0", "onnx": "1.22.0", "edgefl": "1.0.0"},
        operators=("Gemm", "LogSoftmax"),
        source="ab" * 32,
        check={"loss": 1e-7, "grad:fc.weight": 2e-7},
        flops=100,
        peak_bytes=200,
    )
    return CompiledTask(train=b"train", evaluate=b"evaluate", manifest=manifest)


def artefacts(_folder: Path) -> Reader:
    content = encode_artefact(make_example())
    return Reader(feed=parse_artefact, seeds=tuple(safetensors_seeds(content, "manifest")))


def cache_entries(_folder: Path) -> Reader:
    content = b"artefact"
    line = {"v": 1, "sha256": compute_sha256(content), "modules": {"a.b": "ab" * 32}, "packages": {}, "report": {}}
    text = json.dumps(line).encode()
    seeds = (
        Seed(content=text + b"\n" + content),
        Seed(content=text, form=Form.JSON, close=lambda found: found + b"\n" + content),
    )
    return Reader(feed=parse_entry, seeds=seeds)


def _encode(number: int, content: bytes | str | int) -> bytes:
    """Returns one field of a protobuf message: a number below 128, or content shorter than 16 kB."""
    if isinstance(content, int):
        return bytes(
            [number << 3 & 127 | (128 if number > 15 else 0), *([number >> 4] if number > 15 else []), content]
        )
    content = content.encode() if isinstance(content, str) else content
    head = number << 3 | 2
    tag = [head] if head < 128 else [head & 127 | 128, head >> 7]
    return bytes([*tag, len(content) & 127 | 128, len(content) >> 7]) + content


def _tensor(name: str, kind: int, dims: tuple[int, ...], *values: bytes) -> bytes:
    return b"".join([*(_encode(1, size) for size in dims), _encode(2, kind), *values, _encode(8, name)])


def _value(number: int, name: str, kind: int, *sizes: int) -> bytes:
    shape = b"".join(_encode(1, _encode(1, size)) for size in sizes)
    return _encode(number, _encode(1, name) + _encode(2, _encode(1, _encode(1, kind) + _encode(2, shape))))


def _node(operator: str, inputs: tuple[str, ...], output: str, *attributes: bytes) -> bytes:
    names = b"".join(_encode(1, name) for name in inputs) + _encode(2, output)
    return _encode(1, names + _encode(4, operator) + b"".join(_encode(5, attribute) for attribute in attributes))


def graphs(_folder: Path) -> Reader:
    """ONNX files; what one is made of is written here by hand, so that this needs no onnx."""
    steps = _node("Neg", ("a",), "b") + _encode(2, "steps") + _value(11, "a", 1) + _value(12, "b", 1)
    floats = np.array([0.5, -1.0], "<f4").tobytes()
    nodes = (
        _node("Gemm", ("x", "w"), "y", _encode(1, "transB") + _encode(3, 1) + _encode(20, 2)),
        _node("Constant", (), "c", _encode(1, "value") + _encode(5, _tensor("", 7, (2,), _encode(7, b"\x02\x03")))),
        _node("Constant", (), "d", _encode(1, "value_ints") + _encode(8, b"\x02\x03")),
        _node("Constant", (), "e", _encode(1, "value_float") + b"\x15" + floats[:4]),
        _node("ConstantOfShape", ("c",), "z"),
        _node("Range", ("e", "e", "e"), "r"),
        _node("Scan", ("y",), "s", _encode(1, "body") + _encode(6, steps)),
    )
    constants = (
        _encode(5, _tensor("w", 1, (1, 2), _encode(9, floats))),
        _encode(5, _tensor("v", 1, (2,), _encode(4, floats))),
        _encode(5, _tensor("u", 11, (1,), _encode(10, floats))),
    )
    ends = _value(11, "x", 1, 4, 2) + _value(12, "y", 1, 4, 1)
    graph = b"".join([*nodes, _encode(2, "graph"), *constants, ends])
    model = _encode(1, 8) + _encode(2, "edgefl") + _encode(7, graph) + _encode(8, _encode(1, "") + _encode(2, 18))

    def feed(content: bytes) -> None:
        permitted = {"Gemm", "Constant", "ConstantOfShape", "Range", "Scan", "Neg"}
        facts = read_graph(content, permitted, 18)
        smaller = read_graph(remove_outputs(content, {"y"}), permitted, 18)
        assert smaller.num_nodes <= facts.num_nodes

    return Reader(feed=feed, seeds=(Seed(content=model),), words=(b"\xff\xff\xff\xff\x0f", b"\x80" * 9, b"Loop"))
