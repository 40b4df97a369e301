"""A site whose uplink is away for ten minutes: what rounds of its own are worth when the uplink is back.

    python benchmarks/site_outage.py [--seeds 7 8 9] [--cut-rounds 120] [--skew apart|mixed] [--json]

Two sites with two boards each train the digits with `fedavg`; a round upstream takes five seconds, so that ten
minutes are 120 rounds. The second site is a gateway's real code (`SiteRounds`) over boards of this process; its
uplink goes after round 10. Three ways are compared on the same seeds: the uplink stays; the site waits; the site
goes on with rounds of its own, after the 30 s that a gateway waits. Accuracy is that of
the model upstream on the test pictures, at rounds after the uplink is back. `apart`: each site has
five of the classes. `mixed`: all boards have all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import options

from edgefl.compression.codec import decode_body, make_codec
from edgefl.coordinator.execution.site_outage import OutageLimits
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.config import parse_run
from edgefl.core.metrics import NO_METRICS
from edgefl.core.sites import SiteLimits, SiteTask
from edgefl.core.types import Array, Dataset, Json, derive_rng
from edgefl.device.training.site_trainer import OUTAGE_AFTER_S
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.engine.assembly.build import build_run
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.datasets.partitioning import partition_by_holders
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard
from edgefl.tasks.registry import make_task

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from site_boards import SomeBoards  # a site's registry and messages without a network

SITES = (("pi-1", "pi-2"), ("pi-3", "pi-4"))
ROUND_S, BEFORE = 5.0, 10
WAIT_ROUNDS = round(OUTAGE_AFTER_S / ROUND_S)
AFTER = (0, 1, 3, 10, 30)
WAYS = ("uplink stays", "site waits", "site goes on")
STRATEGY = {"iterations": 5, "learning_rate": 0.5, "batch_size": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Accuracy of one way, by rounds since the uplink is back; 0 is the moment before the site's first answer."""

    way: str
    seed: int
    accuracy: Mapping[int, float]


class TrainingBoards(SomeBoards):
    """Boards of a site that train what they are asked."""

    def __init__(self, folder: Path, trainers: Mapping[str, DeviceTrainer], outage: OutageLimits) -> None:
        self.trainers = trainers
        super().__init__(folder, *trainers, outage=outage)

    def answer(self, name: str, header: Json, message: str = "", **_: Any) -> None:
        reply, body = self.trainers[name].train(header, self.asked[-1][3])
        node = 101 + self.names.index(name)
        self.rounds.post(
            Reply(node_id=node, instruction_id=message, header=reply, body=body, bytes_up=1, bytes_down=1)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[7, 8, 9])
    parser.add_argument("--cut-rounds", type=int, default=120, help="rounds upstream while the uplink is away")
    parser.add_argument("--skew", choices=["apart", "mixed"], default="apart")
    parser.add_argument("--json", action="store_true")
    arguments = options.parse(parser, seeds=[7], cut_rounds=WAIT_ROUNDS + 2)
    rows = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="edgefl-outage-") as folder:
            rows += [measure(Path(folder) / way, way, seed, arguments) for way in WAYS]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"uplink away for {arguments.cut_rounds} rounds, {arguments.cut_rounds * ROUND_S / 60:.0f} min; "
          f"classes {arguments.skew}; accuracy, mean and range of {len(arguments.seeds)} seeds")  # fmt: skip
    print("way            " + "".join(f"{f'after {number}':>22}" for number in AFTER))
    for way in WAYS:
        print(f"{way:15}" + "".join(f"{_describe(rows, way, number):>22}" for number in AFTER))
    return 0


def _describe(rows: Sequence[Row], way: str, number: int) -> str:
    found = [row.accuracy[number] for row in rows if row.way == way]
    return f"{statistics.fmean(found):.3f} ({min(found):.3f}-{max(found):.3f})"


def measure(folder: Path, way: str, seed: int, arguments: argparse.Namespace) -> Row:
    """Trains one fleet through an outage."""
    data = load_central_data("digits")
    trainers = _make_trainers(folder, data.train, seed, arguments.skew)
    config = parse_run({"run": {"task": "digits", "rounds": 10_000, "seed": seed}, "strategy": STRATEGY})
    run = build_run(config, f"run-{seed}")
    boards = [{name: trainers[name] for name in names} for names in SITES]
    goes_on = OutageLimits(max_rounds=arguments.cut_rounds, max_staleness=2 * arguments.cut_rounds)
    site = TrainingBoards(folder / "site", boards[1], goes_on if way == WAYS[2] else OutageLimits())
    task = SiteTask(spec=make_task("digits").shapes(), metrics=NO_METRICS)
    model = {name: np.array(tensor) for name, tensor in run.model.items()}
    accuracy, used, back = {}, [], BEFORE + arguments.cut_rounds
    for version in range(back + max(AFTER)):
        is_cut = way != WAYS[0] and BEFORE <= version < back
        if version - back in AFTER:
            accuracy[version - back] = _evaluate(model, data.test)
        body = make_codec("dense", task.spec).encode(model, derive_rng(0))
        header = {
            **run.header, "assignment": f"run-{seed}/v{version}-site", "version": version, "codec": "dense",
            "plan": run.strategy.plan.to_json(), "used_assignments": used[-2:], "lineage": "line-1",
            "model_sha256": f"{version}", "partial_sums": True,
            "site_limits": SiteLimits(has_plain_step=True).to_json(),
        }  # fmt: skip
        answers = [trainer.train(dict(header, assignment=f"{name}-{version}"), body)
                   for name, trainer in boards[0].items()]  # fmt: skip
        if is_cut:
            if way == WAYS[2] and version >= BEFORE + WAIT_ROUNDS:
                site.rounds.run_offline_round(lambda: None)
        else:
            answers.append(site.rounds.run_round(header, body, task, lambda: None))
            used.append(header["assignment"])
        _add_mean(model, answers, task)
    accuracy[max(AFTER)] = _evaluate(model, data.test)
    return Row(way=way, seed=seed, accuracy=accuracy)


def _add_mean(model: dict[str, Array], answers: Sequence[tuple[Json, bytes]], task: SiteTask) -> None:
    weights = [reply["metrics"]["num_examples"] for reply, _ in answers]
    for weight, (_, body) in zip(weights, answers, strict=True):
        for name, tensor in decode_body(body, task.spec).items():
            model[name] = (model[name] + weight / sum(weights) * np.asarray(tensor)).astype(model[name].dtype)


def _make_trainers(folder: Path, data: Dataset, seed: int, skew: str) -> dict[str, DeviceTrainer]:
    classes = [set(range(10))] * 4 if skew == "mixed" else [set(range(5))] * 2 + [set(range(5, 10))] * 2
    trainers, names = {}, [name for site in SITES for name in site]
    parts = partition_by_holders(data.targets, classes, np.random.default_rng(seed))
    for name, rows in zip(names, parts, strict=True):
        path = folder / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shard(path, data.take(np.sort(rows)), ShardMetadata(task="digits"))
        trainers[name] = DeviceTrainer(
            device_id=name, role="trainer", shards={"digits": str(path)}.copy, accelerator="cpu", threads=1,
            state_dir=folder / name, on_progress=lambda *_: True,
        )  # fmt: skip
    return trainers


def _evaluate(model: Mapping[str, Array], test: Dataset) -> float:
    learner = make_task("digits").learner()
    learner.load(model)
    return float(learner.evaluate(test)[1])


if __name__ == "__main__":
    raise SystemExit(main())
