"""What one update of AdaComp's CNN (421,642 parameters) takes on the wire, and what coding it costs.

    python benchmarks/codec_bytes.py [--data DIR] [--repeats 15] [--json]

The update is the displacement of a CNN that has learnt for a while, after one more batch of 10 MNIST images; the
images lie in DIR, or in $EDGEFL_DATA/mnist. Without them the numbers are drawn from a heavy-tailed distribution, and
the table says so; places are then spread evenly and cost more. Bytes are those of whole bodies, header included.
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

from edgefl.compression.codec_benchmark import CodecBenchmark, make_random_update, measure_codec
from edgefl.core.errors import EdgeflError
from edgefl.tasks.datasets.sample_updates import SampleUpdate, compute_sample_update, get_network_shapes

NETWORK = "mnist-cnn"
# How many times smaller than float32: sparse ones with evenly spread places at their entropy and no header, others as
# the codes of their papers have it.
SPECS: Mapping[str, float | None] = {
    "dense": 1.0,
    "dense|fp16": 2.0,
    "dense|bf16": 2.0,
    "dense|fp16|zstd": None,
    "dense|fp16|shuffle": None,
    "dense|int8": 4.0,
    "sign": 32.0,
    "terngrad": None,
    "qsgd:1": 10.3,
    "qsgd:2": 7.9,
    "qsgd:4": 4.95,
    "qsgd:8": 2.98,
    "topk:0.01": 79.7,
    "topk:0.01|fp16": 132.9,
    "topk:0.01|int8": 199.0,
    "topk:0.01|int8|zstd": 199.0,
    "topk:0.005|fp16": 255.0,
    "topk:0.005|int8": 375.0,
    "topk:0.005|int8|zstd": 375.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One codec; `reference` is the ratio that its paper's encoding or the entropy of its indices allows."""

    measured: CodecBenchmark
    reference: float | None
    encode_ms: float
    decode_ms: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = options.parse(parser, repeats=1)
    gradient = real_or_drawn(arguments.data)
    rows = [row(spec, gradient, arguments.repeats) for spec in SPECS]
    print(as_json(rows, gradient.source) if arguments.json else as_table(rows, gradient.source))
    return 0


def real_or_drawn(folder: Path | None) -> SampleUpdate:
    try:
        return compute_sample_update(NETWORK, folder)
    except EdgeflError as error:
        print(f"no real update ({error}); drawing one", file=sys.stderr)
    shapes = get_network_shapes(NETWORK)
    update = make_random_update(shapes, np.random.default_rng(7))
    return SampleUpdate(tensors=update, shapes=shapes, source="drawn, Student's t with 3 degrees of freedom")


def row(spec: str, gradient: SampleUpdate, repeats: int) -> Row:
    found = measure_codec(spec, gradient.tensors, gradient.shapes, clock=time.perf_counter, repeats=repeats)
    num_mb = sum(tensor.nbytes for tensor in gradient.shapes) / 1e6
    return Row(
        measured=found,
        reference=SPECS.get(spec),
        encode_ms=1000 * num_mb / found.encode_mb_per_s,
        decode_ms=1000 * num_mb / found.decode_mb_per_s,
    )


def as_json(rows: Sequence[Row], source: str) -> str:
    codecs = [
        {
            **asdict(each.measured),
            "reference": each.reference,
            "encode_ms": each.encode_ms,
            "decode_ms": each.decode_ms,
        }
        for each in rows
    ]
    return json.dumps({"v": 1, "update": source, "codecs": codecs})


def as_table(rows: Sequence[Row], source: str) -> str:
    lines = [
        f"update: {source}",
        f"{'codec':24}{'bytes':>10}{'ratio':>9}{'reference':>11}{'encode ms':>11}{'decode ms':>11}{'error':>9}",
    ]
    for each in rows:
        found, reference = each.measured, "" if each.reference is None else f"{each.reference:g}"
        lines.append(
            f"{found.spec:24}{found.num_bytes:>10,}{found.ratio:>8.1f}x{reference:>11}"
            f"{each.encode_ms:>11.2f}{each.decode_ms:>11.2f}{found.relative_error:>9.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
