"""What one update of AdaComp's CNN (421,642 parameters) takes on the wire, and what coding it costs.

    python benchmarks/codec_bytes.py [--data DIR] [--repeats 15] [--json]

The update is the displacement of a CNN that has learnt for a while, after one more batch of 10 MNIST images; the
images lie in DIR, or in $EDGEFL_DATA/mnist. Without them the numbers are drawn from a heavy-tailed distribution, and
the table says so; places are then spread evenly and cost more. Bytes are those of whole bodies, header included.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgefl.compression.registry import decode_body, make_codec
from edgefl.errors import EdgeflError
from edgefl.tasks.local_training import train
from edgefl.tasks.registry import make_task
from edgefl.tasks.sources import central_data
from edgefl.types import Array, LocalPlan, Shapes, SparseTensor, Tensor

WARM_UP_ITERATIONS = 300
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

    spec: str
    num_bytes: int
    ratio: float
    reference: float | None
    encode_ms: float
    decode_ms: float
    relative_error: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shapes = make_task("mnist").shapes()
    try:
        update, source = measured_update(arguments.data), "one batch of 10 MNIST images"
    except EdgeflError as error:
        print(f"no real update ({error}); drawing one", file=sys.stderr)
        update, source = drawn_update(shapes), "drawn, Student's t with 3 degrees of freedom"
    rows = [measure(spec, update, shapes, arguments.repeats) for spec in SPECS]
    print(as_json(rows, source) if arguments.json else as_table(rows, source))
    return 0


def measured_update(folder: Path | None) -> dict[str, Array]:
    """Returns the displacement of one iteration after a warm-up.

    Raises:
        EdgeflError: the images or torch are missing.
    """
    task = make_task("mnist")
    data = central_data("mnist", folder).train
    learner = task.learner(threads=1)
    learner.load(task.init(7))
    for iterations in (WARM_UP_ITERATIONS, 1):
        plan = LocalPlan(iterations=iterations, batch_size=10, learning_rate=0.02)
        result = train(
            learner,
            data,
            plan,
            np.random.default_rng(iterations),
            clock=time.monotonic,
            on_iteration=lambda _iteration, _seconds: False,
        )
    return {name: dense(tensor) for name, tensor in result.displacement.items()}


def drawn_update(shapes: Shapes) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {spec.name: (1e-3 * rng.standard_t(3, size=spec.shape)).astype(np.float32) for spec in shapes}


def measure(spec: str, update: Mapping[str, Array], shapes: Shapes, repeats: int) -> Row:
    codec = make_codec(spec, shapes)
    body = codec.encode(update, np.random.default_rng(1))
    decoded = decode_body(body, shapes)
    num_dense = sum(tensor.nbytes for tensor in shapes)
    return Row(
        spec=spec,
        num_bytes=len(body),
        ratio=num_dense / len(body),
        reference=SPECS.get(spec),
        encode_ms=median_ms(lambda: codec.encode(update, np.random.default_rng(1)), repeats),
        decode_ms=median_ms(lambda: decode_body(body, shapes), repeats),
        relative_error=relative_error(update, decoded),
    )


def relative_error(update: Mapping[str, Array], decoded: Mapping[str, Tensor]) -> float:
    squared = sum(float(np.square(dense(decoded[name]) - update[name], dtype=np.float64).sum()) for name in update)
    return math.sqrt(squared / sum(float(np.square(array, dtype=np.float64).sum()) for array in update.values()))


def median_ms(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds) * 1000


def dense(tensor: Tensor) -> Array:
    return tensor.dense() if isinstance(tensor, SparseTensor) else tensor


def as_json(rows: Sequence[Row], source: str) -> str:
    return json.dumps({"v": 1, "update": source, "codecs": [asdict(row) for row in rows]})


def as_table(rows: Sequence[Row], source: str) -> str:
    lines = [
        f"update: {source}",
        f"{'codec':24}{'bytes':>10}{'ratio':>9}{'reference':>11}{'encode ms':>11}{'decode ms':>11}{'error':>9}",
    ]
    for row in rows:
        reference = "" if row.reference is None else f"{row.reference:g}"
        lines.append(
            f"{row.spec:24}{row.num_bytes:>10,}{row.ratio:>8.1f}x{reference:>11}"
            f"{row.encode_ms:>11.2f}{row.decode_ms:>11.2f}{row.relative_error:>9.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
