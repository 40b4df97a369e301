"""Bytes and errors of `lss` on the gradient of a ResNet-18, beside those in the log of the LSS authors' code.

    python benchmarks/lss_sizes.py [--data DIR] [--gradient FILE] [--json]

The authors' log (README of GeKeShi/LSS_SGD) has a gradient of 44.7 MB (ResNet-18 for CIFAR-10) in 3.99 MB, its
largest values off by 0.47 of themselves. The gradient here is one batch of MNIST images (DIR, or $EDGEFL_DATA/mnist)
through a ResNet-18 of the same size after some steps, or the arrays of FILE (.npz, .safetensors). Errors: `large` is
the mean of |error| / |value| over the largest twentieth of the values, `large L2` and `L2` the norm of the error to
that of the values, of those and of all. `lss:2:hash` has the same clusters and as many buckets, but filled
by a hash of the position as in the paper. Times are CPU seconds of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from harness import options

from edgefl.compression.codec import decode_body, make_codec
from edgefl.core.errors import EdgeflError
from edgefl.core.types import Array, SparseTensor, Tensor
from edgefl.tasks.datasets.sample_updates import (
    SAMPLE_SETTINGS,
    SampleUpdate,
    compute_sample_update,
    read_sample_update,
)

SPECS = ("lss:2", "lss:2:hash", "lss:2|fp16", "lss:2:0.02|fp16", "lss:2|int8", "lss:3|fp16", "lss:1|fp16",
         "natural", "onebit:512", "sign", "terngrad", "qsgd:2", "qsgd:4", "topk:0.05|fp16")  # fmt: skip
LARGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    codec: str
    num_bytes: int
    large: float
    large_l2: float | None = None
    l2: float | None = None
    encode_s: float | None = None
    decode_s: float | None = None


AUTHORS = (
    Row(codec="authors: none", num_bytes=44_695_944, large=0.0),
    Row(codec="authors: LSS", num_bytes=3_990_709, large=0.47),
    Row(codec="authors: SVD", num_bytes=22_300_000, large=0.31),
)
"""Their QSGD rounds the wrong way round, so that its error says nothing and is left out."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--model", choices=list(SAMPLE_SETTINGS), default="resnet-18", help="whose gradient [%(default)s]"
    )
    parser.add_argument("--gradient", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = options.parse(parser, model="mnist-cnn")
    try:
        found = (
            read_sample_update(arguments.gradient)
            if arguments.gradient
            else compute_sample_update(arguments.model, arguments.data)
        )
    except EdgeflError as error:
        print(f"no gradient: {error}", file=sys.stderr)
        return 1
    values = flat(found.tensors)
    rows = [*AUTHORS, *(measure(spec, found, values) for spec in SPECS)]
    ours = next(row for row in rows if row.codec == "lss:2")
    print(as_json(rows, found) if arguments.json else as_table(rows, found))
    return 0 if arguments.quick or (ours.num_bytes <= AUTHORS[1].num_bytes and ours.large <= AUTHORS[1].large) else 2


def measure(spec: str, gradient: SampleUpdate, values: Array) -> Row:
    codec = make_codec(spec, gradient.shapes)
    begun_s = time.process_time()
    body = codec.encode(gradient.tensors, np.random.default_rng(1))
    encoded_s = time.process_time()
    decoded = decode_body(body, gradient.shapes)
    ended_s = time.process_time()
    return row_of(spec, len(body), values, flat(decoded), encode_s=encoded_s - begun_s, decode_s=ended_s - encoded_s)


def row_of(codec: str, num_bytes: int, values: Array, decoded: Array, **seconds: float) -> Row:
    count = int(LARGE * values.size)
    large = np.argpartition(np.abs(values), values.size - count)[values.size - count :]
    error = np.abs(decoded - values)
    return Row(
        codec=codec,
        num_bytes=num_bytes,
        large=float(np.mean(error[large] / np.abs(values[large]))),
        large_l2=float(np.linalg.norm(error[large]) / np.linalg.norm(values[large])),
        l2=float(np.linalg.norm(error) / np.linalg.norm(values)),
        **seconds,
    )


def flat(tensors: Mapping[str, Tensor]) -> Array:
    dense = [tensor.dense() if isinstance(tensor, SparseTensor) else tensor for tensor in tensors.values()]
    return np.concatenate([array.reshape(-1) for array in dense])


def as_json(rows: Sequence[Row], gradient: SampleUpdate) -> str:
    return json.dumps({"v": 1, "gradient": gradient.source, "rows": [asdict(row) for row in rows]})


def as_table(rows: Sequence[Row], gradient: SampleUpdate) -> str:
    lines = [
        f"gradient: {gradient.source}",
        f"{'codec':20}{'bytes':>12}{'large':>9}{'large L2':>10}{'L2':>9}{'encode s':>10}{'decode s':>10}",
    ]
    for row in rows:
        numbers = (row.large_l2, row.l2, row.encode_s, row.decode_s)
        texts = ["" if number is None else f"{number:.3f}" for number in numbers]
        lines.append(
            f"{row.codec:20}{row.num_bytes:>12,}{row.large:>9.3f}{texts[0]:>10}{texts[1]:>9}{texts[2]:>10}{texts[3]:>10}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
