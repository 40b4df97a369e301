"""What comes as a compiled task: files that a board fetches."""

from __future__ import annotations

from pathlib import Path

from fuzz.reader import Reader
from fuzz.storage_readers import safetensors_seeds

from edgefl.core.types import TensorKind, TensorSpec
from edgefl.tasks.compiled.artefact import CompiledManifest, CompiledTask, encode_artefact, parse_artefact


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
