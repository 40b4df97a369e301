"""What a fleet learns by compiled tasks, without torch on its boards, beside the same fleet with torch.

    python benchmarks/compiled_accuracy.py [--data DIR] [--tasks mnist motionsense series audio shapes]
        [--seeds 1 2 3] [--rounds 10] [--json]

Five tasks that train a network of torch: the CNNs of `mnist` and `motionsense`, a GRU (`examples/forecasting`), a CNN
on spectrograms (`examples/keyword_spotting`), and a network of one's own (`examples/torch_images`). A real fleet of
three device processes (TLS, Mosquitto) trains each for so many rounds of `fedavg`, with `backend = "torch"` and with
`backend = "onnx"` on boards where torch cannot be imported, with the same seeds, shards and first weights. The
coordinator tests the models on data that no board has. What differs is noise of rounding, where both train the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import options
from harness.process_trees import adopt_orphans, end_descendants
from harness.round_report import machine

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import EDGEFL_COMMAND, LocalDeviceSpec, LocalFleet, partition_devices

EXAMPLES = Path(__file__).parents[1] / "examples"
BACKENDS = ("torch", "onnx")
NUM_DEVICES = 3
SHARD_SEED = 7
NO_TORCH = 'raise ImportError("there is no torch on this board")\n'


@dataclass(frozen=True, kw_only=True)
class TaskSetup:
    """A task, its data and its training; of `num_shards` parts of the data the devices have the first three.

    Attributes:
        example: a folder whose `make_data.py` makes the data; None for those of the data directory.
        data: within that folder, or that directory; already cut where there is no scheme.
        test: likewise, where the test data are not a part of the data set.
        task_options: over those of the example's run file; None leaves one out.
    """

    task: str
    data: str
    scheme: str | None = "iid"
    num_shards: int = NUM_DEVICES
    example: str | None = None
    test: str | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)


SETUPS = {
    "mnist": TaskSetup(task="mnist", data="mnist", num_shards=30, strategy={"epochs": 1.0, "learning_rate": 0.05}),
    "motionsense": TaskSetup(
        task="motionsense", data="motionsense", num_shards=10, strategy={"epochs": 1.0, "learning_rate": 0.05}
    ),
    "series": TaskSetup(
        task="series", data="data/train", scheme="natural", example="forecasting", test="data/test",
        task_options={"model": "gru", "hidden": 48}, strategy={"epochs": 1.0},
    ),
    "audio": TaskSetup(
        task="audio", data="data/words", scheme="natural", example="keyword_spotting",
        task_options={"model": "cnn-small", "hidden": None},
    ),
    "shapes": TaskSetup(
        task="shapes:Shapes", data="data", scheme=None, example="torch_images", test="data/test.npz"
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The last round of a run; `accuracy` is None where values are trained."""

    task: str
    backend: str
    seed: int
    accuracy: float | None
    loss: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds mnist/, motionsense/")
    parser.add_argument("--tasks", nargs="+", choices=tuple(SETUPS), default=tuple(SETUPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=(1, 2, 3))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = options.parse(parser, tasks=("shapes",), seeds=(1,), rounds=1)
    adopt_orphans()
    try:
        outcomes = [one for name in args.tasks for one in run_task(name, args)]
    finally:
        end_descendants()
    if args.json:
        print(json.dumps({"v": 1, **machine(), "outcomes": [asdict(one) for one in outcomes]}))
    else:
        print(format_table(outcomes))
    return 0


def run_task(name: str, args: argparse.Namespace) -> list[Outcome]:
    setup = SETUPS[name]
    with tempfile.TemporaryDirectory(prefix="edgefl-compiled-accuracy-") as folder:
        here = Path(folder)
        tables, data = prepare(setup, here, args.data)
        devices, test_shards = make_devices(setup, here, data, tables["task"])
        (here / "blocked" / "torch").mkdir(parents=True)
        (here / "blocked" / "torch" / "__init__.py").write_text(NO_TORCH)
        outcomes = []
        for backend in BACKENDS:
            path = [here, *([here / "blocked"] if backend == "onnx" else [])]
            specs = [add_path(device, path) for device in devices[:NUM_DEVICES]]
            with LocalFleet(
                root=here / backend,
                devices=specs,
                test_shards=test_shards,
                environment=make_environment([here], setup.task),
            ) as fleet:
                for seed in args.seeds:
                    run = {
                        "task": setup.task, "rounds": args.rounds, "seed": seed, "backend": backend,
                        "evaluate_on": "coordinator", "evaluate_every": args.rounds,
                    }  # fmt: skip
                    run_id = fleet.submit(parse_run({**tables, "run": run, "devices": {"min": NUM_DEVICES}}))
                    fleet.wait_for_run(run_id)
                    last = [row for row in fleet.list_history("rounds", run=run_id) if row["loss"] is not None][-1]
                    one = Outcome(task=name, backend=backend, seed=seed, accuracy=last["accuracy"], loss=last["loss"])
                    print(one, file=sys.stderr, flush=True)
                    outcomes.append(one)
        return outcomes


def prepare(setup: TaskSetup, here: Path, data: Path | None) -> tuple[dict[str, Any], Path]:
    """Returns tables of the run file, and the path of the data, which an example makes in `here`."""
    if setup.example is None:
        if data is None:
            raise SystemExit(f"{setup.task} needs --data DIR or EDGEFL_DATA, with {setup.data}/")
        return {"task": dict(setup.task_options), "strategy": {"name": "fedavg", **setup.strategy}}, data / setup.data
    shutil.copytree(EXAMPLES / setup.example, here, dirs_exist_ok=True)
    environment = {
        **os.environ,
        **make_environment([here], setup.task),
        **({} if data is None else {"EDGEFL_DATA": str(data)}),
    }
    subprocess.run([sys.executable, "make_data.py"], cwd=here, env=environment, check=True, stdout=subprocess.DEVNULL)
    tables = tomllib.loads((here / "run.toml").read_text())
    tables = {key: dict(table) for key, table in tables.items() if key not in {"run", "simulation", "compression"}}
    task_options = {**tables.get("task", {}), **setup.task_options}
    tables["task"] = {name: value for name, value in task_options.items() if value is not None}
    tables["strategy"] = {**tables["strategy"], **setup.strategy}
    return tables, here / setup.data


def make_devices(
    setup: TaskSetup, here: Path, data: Path, task_options: Mapping[str, Any]
) -> tuple[Sequence[LocalDeviceSpec], Mapping[str, str]]:
    """Returns devices with their shards, and the test shard."""
    test = None if setup.test is None else here / setup.test
    if setup.scheme is not None:
        return partition_devices(
            setup.task, setup.scheme, setup.num_shards, here / "shards", data, SHARD_SEED, options=task_options,
            test=test,
        )  # fmt: skip
    shards = [path for path in sorted(data.glob("*.npz")) if path != test]
    return [LocalDeviceSpec(name=path.stem, shards={setup.task: str(path)}) for path in shards], {
        setup.task: str(test)
    }


def make_path(folders: Sequence[Path]) -> str:
    inherited = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    return os.pathsep.join([*map(str, folders), *inherited])


def make_environment(folders: Sequence[Path], task: str) -> dict[str, str]:
    """Returns the variables of processes that import from these folders, the module of an own task too."""
    module, colon, _ = task.partition(":")
    return {"PYTHONPATH": make_path(folders), **({"EDGEFL_ALLOW_MODULES": module} if colon else {})}


def add_path(device: LocalDeviceSpec, folders: Sequence[Path]) -> LocalDeviceSpec:
    """Returns the device with these folders before the other ones that its process imports from."""
    return replace(device, program=("env", f"PYTHONPATH={make_path(folders)}", *EDGEFL_COMMAND))


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Returns a Markdown table: mean and range over the seeds with either backend."""
    lines = ["| task | measure | torch | compiled | largest difference, same seed |", "|---|---|---|---|---|"]
    for task in dict.fromkeys(one.task for one in outcomes):
        by_backend = {
            backend: {one.seed: one for one in outcomes if (one.task, one.backend) == (task, backend)}
            for backend in BACKENDS
        }
        measure = "loss" if any(one.accuracy is None for one in by_backend["torch"].values()) else "accuracy"
        values = {
            backend: {seed: float(getattr(one, measure)) for seed, one in found.items()}
            for backend, found in by_backend.items()
        }
        difference = max(abs(values["torch"][seed] - values["onnx"][seed]) for seed in values["torch"])
        cells = [format_spread(list(values[backend].values())) for backend in BACKENDS]
        lines.append(f"| {task} | {measure} | {cells[0]} | {cells[1]} | {difference:.4f} |")
    return "\n".join(lines)


def format_spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


if __name__ == "__main__":
    raise SystemExit(main())
