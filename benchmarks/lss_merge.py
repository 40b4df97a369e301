"""What it costs to add up the `lss` sketches of many workers, and what it takes to add them without decoding each.

    python benchmarks/lss_merge.py [--data DIR] [--model resnet-18] [--workers 8] [--json]

Each worker trains 20 iterations on MNIST images (DIR, or $EDGEFL_DATA/mnist) from one model, the sum of their updates
is what a coordinator needs. Three ways to it, in CPU seconds of one core, best of `--repeats`:

- `decode`: each body is decoded and added, with its weight, as the coordinator does;
- `add`: the additions alone, so what a sum without dense tensors in between could save at most;
- `merge`: all workers have the labels of one reference, so that tables of bucket means are added, and one is decoded;
  each body's checksum and labels are compared first.

LSS clusters the values of each update, so that two workers have other labels, and no table can be added to another.
The errors (Euclidean, of the sum) say what it costs to share them: labels of each update's own, of the last round's
mean update, and of the first worker's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from harness import options

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.entropy.levels import count_labels, read_labels, write_labels
from edgefl.compression.registry import STAGES
from edgefl.compression.sparsification.bucket_means import compute_sketch, count_members, estimate_values
from edgefl.compression.sparsification.lss import (
    DEFAULT_FRACTION,
    assign_buckets,
    compute_bucket_weights,
    train_clusters,
)
from edgefl.compression.wire import PayloadReader, encode_varint, read_frame, write_frame
from edgefl.core.errors import EdgeflError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, TrainConfig, derive_rng
from edgefl.strategies.aggregation import add_weighted
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.datasets.sample_updates import SAMPLE_SETTINGS
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

BITS, SEED = 2, 7
LSS, _ = STAGES["lss"]
MAX_DIFFERENCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """One label for each value of an update, and the number of buckets of each label."""

    labels: Array
    sizes: Array

    @classmethod
    def train(cls, flat: Array) -> Labelling:
        clusters = train_clusters(flat, 2 ** (BITS - 1))
        labels = clusters.assign_labels(flat)
        weights = compute_bucket_weights(flat, labels, clusters)
        members = count_labels(labels, clusters.num_labels)
        return cls(labels=labels, sizes=assign_buckets(int(DEFAULT_FRACTION * flat.size), weights, members))

    def encode(self, flat: Array, shapes: ModelSpec) -> bytes:
        """Returns an update's body with these labels."""
        tables = compute_sketch(flat, self.labels, self.sizes)
        parts = [part for means in tables for part in (encode_varint(means.size), means)]
        return write_frame([LSS], len(shapes), [*write_labels(self.labels), *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Seconds of each way, the difference of both sums, and the error of the sum by whose labels there are."""

    num_values: int
    workers: int
    decode_s: float
    add_s: float
    merge_s: float
    difference: float
    own_error: float
    last_round_error: float
    first_worker_error: float

    @property
    def merge_ratio(self) -> float:
        return self.decode_s / self.merge_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", choices=list(SAMPLE_SETTINGS), default="mnist-cnn")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = options.parse(parser, workers=2, iterations=1, repeats=1)
    try:
        shapes, last, updates = train_updates(arguments)
    except EdgeflError as error:
        print(f"no updates: {error}", file=sys.stderr)
        return 1
    result = measure(shapes, last, updates, arguments.repeats)
    print(json.dumps({"v": 1, **asdict(result)}) if arguments.json else as_table(result))
    return 0 if result.difference <= MAX_DIFFERENCE else 2


def train_updates(arguments: argparse.Namespace) -> tuple[ModelSpec, Array, list[Array]]:
    """Returns the task's shapes, the mean update of one round, and the updates of the next, flat."""
    setting = SAMPLE_SETTINGS[arguments.model]
    task = make_task("mnist", setting.options)
    data, learner = load_central_data("mnist", arguments.data).train, task.learner(threads=1)
    shapes = task.shapes()

    def train_round(model: Mapping[str, Tensor], number: int) -> list[Array]:
        plan = TrainConfig(iterations=arguments.iterations, batch_size=setting.batch_size, learning_rate=0.02)
        flats = []
        for worker in range(arguments.workers):
            learner.load(model)
            rng = derive_rng(SEED, number, worker)
            trained = train(learner, data, plan, rng, clock=lambda: 0.0, on_iteration=lambda _number, _seconds: False)
            flats.append(np.concatenate([dense(trained.displacement[spec.name]).reshape(-1) for spec in shapes]))
        return flats

    model = task.init(SEED)
    last = np.mean(train_round(model, 1), axis=0, dtype=np.float32)
    moved = {name: dense(model[name]) + step for name, step in split(last, shapes).items()}
    return shapes, last, train_round(moved, 2)


def measure(shapes: ModelSpec, last: Array, updates: Sequence[Array], repeats: int) -> Result:
    codec = make_codec(f"lss:{BITS}", shapes)
    weights = [1.0 + worker % 3 for worker in range(len(updates))]
    bodies = [codec.encode(split(flat, shapes), np.random.default_rng(SEED)) for flat in updates]
    decoded = [decode_body(body, shapes) for body in bodies]
    shared, first = (
        [one.encode(flat, shapes) for flat in updates] for one in map(Labelling.train, (last, updates[0]))
    )

    def merge(bodies: Sequence[bytes]) -> Array:
        return merge_bodies(bodies, weights, last.size)

    each = sum_weighted([flatten(decode_body(body, shapes), shapes) for body in shared], weights)
    total = sum_weighted(updates, weights)
    own = sum_weighted([flatten(one, shapes) for one in decoded], weights)
    return Result(
        num_values=last.size,
        workers=len(updates),
        decode_s=time_best(lambda: add_all((decode_body(body, shapes) for body in bodies), weights), repeats),
        add_s=time_best(lambda: add_all(decoded, weights), repeats),
        merge_s=time_best(lambda: merge(shared), repeats),
        difference=compute_error(merge(shared), each),
        own_error=compute_error(own, total),
        last_round_error=compute_error(merge(shared), total),
        first_worker_error=compute_error(merge(first), total),
    )


def add_all(decoded: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Array]:
    """Returns the weighted sum of tensors, as the coordinator adds them."""
    total: dict[str, Array] = {}
    for tensors, weight in zip(decoded, weights, strict=True):
        for name, tensor in tensors.items():
            add_weighted(total, name, tensor, weight, np.dtype(np.float32))
    return total


def merge_bodies(bodies: Sequence[bytes], weights: Sequence[float], num_values: int) -> Array:
    """Returns the weighted sum of updates with the same labels, of which only the last is decoded."""
    first = read_frame(bodies[0]).payload
    counts = count_members(labels := read_labels(PayloadReader(first), num_values, 2**BITS))
    start = measure_labels(first)
    known = bytes(first[:start])
    used = (np.flatnonzero(counts.sum(axis=0)[1:]) + 1).tolist()
    total: dict[int, Array] = {}
    for body, weight in zip(bodies, weights, strict=True):
        payload = read_frame(body).payload
        if bytes(payload[:start]) != known:
            raise ValueError("labels differ")
        reader = PayloadReader(payload[start:])
        for label in used:
            means = weight * reader.read_array(np.dtype("<f4"), reader.read_varint(num_values)).astype(np.float64)
            total[label] = total[label] + means if label in total else means
    return estimate_values(labels, counts, total)


def measure_labels(payload: memoryview) -> int:
    """Returns the length of a sketch's labels: the highest one, the length of a frame, and the frame."""
    reader = PayloadReader(payload)
    highest, length = (reader.read_varint(len(payload)) for _ in range(2))
    return encode_varint(highest).size + encode_varint(length).size + length


def sum_weighted(flats: Sequence[Array], weights: Sequence[float]) -> Array:
    return np.sum([weight * flat.astype(np.float64) for flat, weight in zip(flats, weights, strict=True)], axis=0)


def compute_error(found: Array, right: Array) -> float:
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def time_best(run: Callable[[], object], repeats: int) -> float:
    """Returns the least CPU seconds of some calls."""
    seconds = []
    for _ in range(repeats):
        begun_s = time.process_time()
        run()
        seconds.append(time.process_time() - begun_s)
    return min(seconds)


def split(flat: Array, shapes: ModelSpec) -> dict[str, Array]:
    bounds = np.cumsum([spec.size for spec in shapes])[:-1]
    return {spec.name: part.reshape(spec.shape) for spec, part in zip(shapes, np.split(flat, bounds), strict=True)}


def flatten(tensors: Mapping[str, Tensor], shapes: ModelSpec) -> Array:
    return np.concatenate([dense(tensors[spec.name]).reshape(-1) for spec in shapes])


def dense(tensor: Tensor) -> Array:
    return tensor.dense() if isinstance(tensor, SparseTensor) else np.asarray(tensor)


def as_table(result: Result) -> str:
    return "\n".join(
        [
            f"{result.workers} updates of {result.num_values:,} values, lss:{BITS}",
            f"decode each and add     {result.decode_s:8.3f} s",
            f"of that, the additions  {result.add_s:8.3f} s ({result.add_s / result.decode_s:.0%})",
            f"tables of equal labels  {result.merge_s:8.3f} s, {result.merge_ratio:.1f} times less",
            f"difference of the sums  {result.difference:8.1e}",
            f"error of the sum        {result.own_error:8.3f} with labels of each update's own",
            f"                        {result.last_round_error:8.3f} with those of the last round's mean update",
            f"                        {result.first_worker_error:8.3f} with those of the first worker",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
