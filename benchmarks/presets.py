"""The first points of each preset's curve, beside what its paper or program publishes.

    python benchmarks/presets.py --data DIR [--presets adacomp pdmm-isvr ...] [--budgets 1]

DIR holds `mnist/`, `fashion-mnist/` and `cifar-10/`. A run is a preset by its name, simulated, with a budget of a few
points and, where the published network takes hours on two cores, a small one in its place: the table names what
differs. `--budgets` has so many times the points. Accuracies are on the test images; of decentralised runs the mean
of the nodes', which is what their paper has.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import options

import edgefl
from edgefl.core.errors import RunFailedError
from edgefl.core.presets import PRESETS
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store
from edgefl.system.atomic_files import DATABASE_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The beginning of a preset's run.

    Attributes:
        strategy: name of the strategy.
        preset: name of the preset.
        points: number of evaluations.
        point: of one: what it takes, and how many of it.
        changes: tables of the run file that differ from the preset.
        published: what is known of the published curve.
    """

    strategy: str
    preset: str
    points: int
    point: tuple[str, int]
    published: str
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


SMALL = {"task": {"model": "lenet"}}
ALONE = {**SMALL, "compression": {"up": "dense"}, "simulation": {"devices": 1}}
"""The whole batch on one worker, and nothing compressed."""
ISVR = {"points": 8, "point": ("rounds", 1), "preset": "paper"}
UNREADABLE = "no figure could be read"
ATOMO = {
    "strategy": "ssgd",
    "preset": "atomo",
    "points": 5,
    "point": ("rounds", 100),
    "published": UNREADABLE,
}
STARTS = {
    "adacomp": Start(strategy="adacomp", preset="paper", points=8, point=("updates", 500), published=UNREADABLE),
    "adacomp, first weights of torch": Start(
        strategy="adacomp",
        preset="paper",
        points=8,
        point=("updates", 500),
        published=UNREADABLE,
        changes={"task": {"init": "torch"}},
    ),
    "pdmm-isvr": Start(strategy="pdmm-isvr", published="80.8 after 88 rounds", **ISVR),
    "admm-isvr": Start(strategy="admm-isvr", published="80.9 after 88 rounds", **ISVR),
    "dsgd": Start(strategy="dsgd", published="65.5 after 88 rounds", **ISVR),
    "esync": Start(
        strategy="esync",
        preset="paper",
        points=5,
        point=("rounds", 20),
        published="of ResNet-18, 80 after 8 to 9 minutes",
        changes=SMALL,
    ),
    "atomo": Start(**ATOMO, changes=SMALL),
    "atomo, ten times the rate": Start(**ATOMO, changes={**SMALL, "strategy": {"learning_rate": 0.1}}),
    "atomo, one worker": Start(**ATOMO, changes={**ALONE, "strategy": {"batch_size": 128}}),
    "atomo, one worker, ten times the rate": Start(
        **ATOMO, changes={**ALONE, "strategy": {"batch_size": 128, "learning_rate": 0.1}}
    ),
    "parallel-sgd": Start(
        strategy="ssgd",
        preset="parallel-sgd",
        points=4,
        point=("rounds", 469),
        published="95.4, 95.8 after two epochs, one worker",
        changes={"simulation": {"devices": 1}},
    ),
}
"""By the name of a table's row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds the data sets")
    parser.add_argument("--presets", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument("--budgets", type=float, default=1.0, help="so many times the points of a run [%(default)s]")
    args = options.parse(parser, presets=["parallel-sgd"], budgets=0.25)
    if args.data is None:
        parser.error("say where the data is: --data DIR, or EDGEFL_DATA")
    print("| preset | changed | a point | accuracy at each point, % | published |\n|---|---|---|---|---|")
    for name in args.presets:
        start = STARTS[name]
        points = run(start, max(1, round(start.points * args.budgets)), Path(args.data))
        unit, number = start.point
        changed = ", ".join(
            f"`{key} = {value!r}`" for table in start.changes.values() for key, value in table.items()
        )
        cells = (f"`{start.preset}` of `{start.strategy}`", changed, f"{number} {unit}", " ".join(points))
        print(f"| {' | '.join((*cells, start.published))} |", flush=True)


def run(start: Start, points: int, data: Path) -> list[str]:
    """Returns the accuracy at each point in percent; less where the run diverged, which the last entry says."""
    unit, number = start.point
    schedule = {
        "rounds": {"rounds": points * number, "evaluate_every": number},
        "updates": {"updates": points * number, "updates_per_round": number},
    }
    task = PRESETS[start.preset][start.strategy]["run"]["task"]
    tables = {
        **start.changes,
        "run": {**schedule[unit], "evaluate_on": "coordinator"},
        "strategy": {"name": start.strategy, "preset": start.preset, **start.changes.get("strategy", {})},
        "simulation": {"workers": 0, **start.changes.get("simulation", {})},
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            rounds, ending = edgefl.simulate(tables, data=data / task, root=folder).rounds, []
        except RunFailedError:
            with Store.open(Path(folder) / DATABASE_NAME) as store:
                rounds, ending = read_history(store, "rounds"), ["diverged"]
    scores = [row["node_accuracy"] if row["node_accuracy"] is not None else row["accuracy"] for row in rounds]
    return [*(f"{100 * score:.1f}" for score in scores if score is not None), *ending]


if __name__ == "__main__":
    main()
