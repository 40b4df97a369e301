"""A pretrained base: bytes of a round, and the seconds of a head's epoch on cached features and through the base.

    python benchmarks/frozen_base.py [--examples 256] [--rank 2] [--json]

The network is MobileNetV2 of width 1 with 1,000 classes, 3.5 million parameters, without pretrained weights: bytes
and seconds do not depend on them. Images are noise of 32x32.

bytes: what a device is sent in a round, and sends, as `dense`: the whole model, and what `[adapt]` leaves of it.

epoch: one epoch of SGD on the last layer, batch 32, one thread: each batch through the frozen base, then on features
that were computed once. The ratio is of turns one after the other in the same process; the first pass stands by
itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from harness import options
from harness.round_report import machine

from edgefl.compression.codec import make_codec
from edgefl.core.config import AdaptSection
from edgefl.core.types import Dataset, Task, TrainConfig, derive_rng
from edgefl.tasks.adaptation.adapted_task import AdaptedTask
from edgefl.tasks.learners import networks
from edgefl.tasks.learners.image_layers import NORMS, ImageFormat
from edgefl.tasks.learners.image_networks import make_mobilenet_v2
from edgefl.tasks.learners.torch_learner import TorchModel
from edgefl.tasks.local_algorithms.local_training import train

NUM_CLASSES, NUM_FEATURES, SIDE = 1000, 1280, 32
BATCH_SIZE = 32


class MobileNet(Task):
    """MobileNetV2 with the last layer of ImageNet's classes."""

    name = "mobilenet"

    def __init__(self) -> None:
        chain = dict(make_mobilenet_v2(ImageFormat(3, SIDE), NORMS["batch"]))
        last = [name for name, layer in chain.items() if layer[0] == "Linear"][-1]
        chain[last] = ("Linear", NUM_FEATURES, NUM_CLASSES)
        self.last = last
        self.model = TorchModel(
            tensors=networks.list_chain_specs(chain),
            build=partial(networks.build_chain, chain),
            first_weights=networks.make_uniform_weights,
        )

    def read(self, path: str) -> Dataset:
        raise NotImplementedError(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=256, help="of a board [%(default)s]")
    parser.add_argument("--rank", type=int, default=2, help="of the adapters [%(default)s]")
    parser.add_argument("--turns", type=int, default=3, help="epochs each way, of which the median [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = options.parse(parser, examples=16, turns=1)
    task = MobileNet()
    found: dict[str, Any] = {"v": 1, **machine(), "bytes": measure_bytes(task, args.rank)}
    found["epoch"] = measure_epochs(task, args.examples, args.turns)
    print(json.dumps(found) if args.json else render(found))
    return 0


def measure_bytes(task: MobileNet, rank: int) -> list[dict[str, Any]]:
    """Returns a row for the whole model, and for each way to train a part of it."""
    whole = task.init(7)
    num_parameters = sum(value.size for name, value in whole.items() if "running" not in name)
    all_bytes = len(make_codec("dense", task.shapes()).encode(whole, derive_rng(1)))
    rows = [{"trained": "all", "numbers": num_parameters, "bytes": all_bytes, "share": 1.0}]
    sections = {
        f"lora, rank {rank}": AdaptSection(method="lora", rank=rank),
        f"lora, rank {rank}, last layer only": AdaptSection(method="lora", rank=rank, targets=(f"{task.last}.*",)),
        "bitfit": AdaptSection(method="bitfit"),
        "head of 10 classes": None,
    }
    for name, section in sections.items():
        if section is None:  # as another task of 10 classes would have it
            numbers = (NUM_FEATURES + 1) * 10
            num_bytes = 4 * numbers
        else:
            adapted = AdaptedTask(task, section, whole)
            model = adapted.init(7)
            numbers = sum(value.size for value in model.values())
            num_bytes = len(make_codec("dense", adapted.shapes()).encode(model, derive_rng(1)))
        rows.append({"trained": name, "numbers": numbers, "bytes": num_bytes, "share": num_bytes / all_bytes})
    return rows


def measure_epochs(task: MobileNet, num_examples: int, num_turns: int) -> dict[str, float]:
    """Returns the seconds of an epoch both ways, of the first pass, and the ratio."""
    rng = np.random.default_rng(7)
    data = Dataset(
        inputs=rng.standard_normal((num_examples, 3, SIDE, SIDE)).astype(np.float32),
        targets=rng.integers(0, NUM_CLASSES, num_examples),
    )
    adapted = AdaptedTask(task, AdaptSection(method="head"), task.init(7))
    learner = adapted.learner(threads=1)
    learner.load(adapted.init(7))
    started_s = time.perf_counter()
    features = learner.make_features(data)
    first_pass_s = time.perf_counter() - started_s
    plan = TrainConfig(epochs=1, batch_size=BATCH_SIZE, learning_rate=0.01)
    seconds: dict[str, list[float]] = {"base": [], "features": []}
    for turn in range(num_turns):
        for name, source in (("base", data), ("features", features)):
            result = train(
                learner, source, plan, derive_rng(turn), clock=time.perf_counter, on_iteration=lambda *_: False
            )
            seconds[name].append(result.compute_s)
    base_s, features_s = (statistics.median(seconds[name]) for name in ("base", "features"))
    return {"base_s": base_s, "features_s": features_s, "first_pass_s": first_pass_s, "ratio": base_s / features_s}


def render(found: dict[str, Any]) -> str:
    rows = [
        f"{row['trained']:<28} {row['numbers']:>10,} numbers {row['bytes']:>12,} bytes  1/{1 / row['share']:.0f}"
        for row in found["bytes"]
    ]
    epoch = found["epoch"]
    summary = (
        f"an epoch of the head: {epoch['base_s']:.2f} s through the base, {epoch['features_s']:.4f} s on features, "
        f"{epoch['ratio']:.0f} times faster; the features took {epoch['first_pass_s']:.2f} s once"
    )
    return "\n".join([*rows, summary])


if __name__ == "__main__":
    sys.exit(main())
