"""Flotilla's scalability setting in virtual time: CIFAR-10, a tenth of the clients a round, 30 rounds, clients die.

    python benchmarks/flotilla_scale.py --data DIR [--clients 100] [--lives 4 1] [--seeds 3] [--json]
    python benchmarks/flotilla_scale.py --times-only --clients 1000 [--seeds 3]

Network, optimiser, rate, batch and epochs are those of the example in dream-lab/flotilla: `FedAT_CNN`, Adam at
0.00005, batches of 4, 3 epochs. A client is killed for good as in its `docker/mttf.py`: its life is exponential, with
a mean of so many runs in which none dies (`--lives`). A round goes on without those that died in it once that is
noticed, 15 s later, so that a run with deaths takes longer. Each client takes 0.1 s for a step. DIR holds
`cifar-10/`.

The table has medians over the seeds, the least and the most. The exit code is 2 when an aim is missed: all rounds of
all runs end without help. Whoever knows the accuracy of a run of theirs gives it with `--their-accuracy`: ours is to
be at least that after as many rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from harness import options
from harness.published_runs import Curve, run_of, spread, write_profiles

from edgefl.simulation.simulated_run import make_device_names

NETWORK = "harness.published_networks:FlotillaNetwork"
FRACTION, STEP_S, EXAMPLES = 0.1, 0.1, 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run.

    `lives` is the mean life of a client in whole runs, None for ever, `accuracy` the last, None where there is none.
    `seconds` are virtual; `dead` are the clients that died within them.
    """

    lives: float | None
    seed: int
    accuracy: float | None
    rounds: int
    seconds: float
    dead: int
    used: int
    lost: int
    wall_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds cifar-10/")
    parser.add_argument("--times-only", action="store_true", help="train nothing: rounds and updates, no accuracies")
    parser.add_argument("--clients", type=int, default=100, help="a tenth of which work in a round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--epochs", type=float, default=3.0, help="of an assignment [%(default)s]")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.00005, help="of Adam [%(default)s]")
    parser.add_argument("--lives", nargs="*", type=float, default=[4.0, 1.0], help="mean of a client, in runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row [%(default)s]")
    parser.add_argument("--their-accuracy", type=float, help="a fraction, after as many rounds")
    parser.add_argument("--json", action="store_true")
    args = options.parse(parser, clients=20, rounds=2, epochs=0.02, seeds=1, lives=[40.0])
    if args.data is None and not args.times_only:
        parser.error("say where the data is: --data DIR, or EDGEFL_DATA")
    if args.times_only and args.their_accuracy is not None:
        parser.error("--their-accuracy needs training: leave out --times-only")
    if min([1.0, *args.lives]) <= 0 or args.clients < 1 / FRACTION:
        parser.error(f"--lives must be above 0 and --clients at least {1 / FRACTION:g}, a tenth of which is asked")
    outcomes = [outcome for seed in range(7, 7 + args.seeds) for outcome in run_seed(seed, args)]
    missed = list_missed(outcomes, args)
    if args.json:
        print(json.dumps({"v": 1, "rows": [asdict(outcome) for outcome in outcomes], "missed": missed}))
    else:
        print("\n".join([as_table(outcomes), *(f"MISSED: {text}" for text in missed)]))
    return 0 if args.quick or not missed else 2


def run_seed(seed: int, args: argparse.Namespace) -> list[Outcome]:
    """Returns an undisturbed run, and one for each mean life."""
    calm = run_one(None, seed, {}, args)
    rng, names = np.random.default_rng(seed), make_device_names(args.clients)
    # The same draws for each mean: who dies at a long mean dies sooner at a short one.
    lives = rng.exponential(calm.seconds, size=len(names)).tolist()
    return [
        calm,
        *(
            run_one(mean, seed, {name: mean * life for name, life in zip(names, lives, strict=True)}, args)
            for mean in args.lives
        ),
    ]


def run_one(lives: float | None, seed: int, deaths: Mapping[str, float], args: argparse.Namespace) -> Outcome:
    """Returns one run in which clients are killed for good at the given virtual seconds."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        profiles, faults = Path(folder) / "profiles.toml", Path(folder) / "faults.toml"
        write_profiles(profiles, NETWORK, {"client": STEP_S}, jitter=0.05, latency_s=0.0)
        faults.write_text(
            "".join(f'[[fault]]\ndevice = "{name}"\nat_s = {at_s}\nkind = "kill"\n' for name, at_s in deaths.items())
        )
        config = {
            "run": {
                "task": "cifar-10", "rounds": args.rounds, "seed": seed, "local_test_fraction": 0.0,
                "evaluate_on": "none" if args.times_only else "coordinator",
                "evaluate_every": max(1, args.rounds // 3),
            },
            "task": {"model": NETWORK},
            "strategy": {
                "name": "fedavg", "optimizer": "adam", "learning_rate": args.learning_rate, "epochs": args.epochs,
                "batch_size": args.batch_size,
            },
            "devices": {"count": round(FRACTION * args.clients)},
            "simulation": {
                "devices": args.clients, "profiles": ["client"], "profile_file": str(profiles), "scheme": "iid",
                "data": None if args.times_only else str(Path(args.data).resolve() / "cifar-10"),
                "examples": EXAMPLES // args.clients, "workers": 0,
                "faults": str(faults) if deaths else None,
            },
        }  # fmt: skip
        curve = run_of(config, folder, is_trained=not args.times_only)
    outcome = _summarise(curve, lives, seed, deaths, time.perf_counter() - began_s)
    print(json.dumps(asdict(outcome)), file=sys.stderr, flush=True)
    return outcome


def _summarise(curve: Curve, lives: float | None, seed: int, deaths: Mapping[str, float], wall_s: float) -> Outcome:
    counts = Counter(row["outcome"] for row in curve.updates)
    accuracy, seconds = curve.points[-1][1] if curve.points else None, curve.seconds
    return Outcome(
        lives=lives, seed=seed, accuracy=accuracy, rounds=curve.num_rounds, seconds=seconds,
        dead=sum(at_s < seconds for at_s in deaths.values()), used=counts["used"],
        lost=counts.total() - counts["used"], wall_s=wall_s,
    )  # fmt: skip


def list_missed(outcomes: Sequence[Outcome], args: argparse.Namespace) -> list[str]:
    """Returns the aims that were missed, in words."""
    missed = [
        f"seed {outcome.seed}, lives of {outcome.lives}: {outcome.rounds} of {args.rounds} rounds"
        for outcome in outcomes
        if outcome.rounds < args.rounds
    ]
    calm = statistics.median(outcome.accuracy or 0.0 for outcome in outcomes if outcome.lives is None)
    if args.their_accuracy is not None and calm < args.their_accuracy:
        missed.append(f"accuracy {calm:.4f} after {args.rounds} rounds, theirs {args.their_accuracy:g}")
    return missed


def as_table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| mean life, runs | died | accuracy | rounds | virtual s | updates used | lost |", "|---" * 7 + "|"]
    for lives in dict.fromkeys(outcome.lives for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.lives == lives]
        cells = [
            "none dies" if lives is None else f"{lives:g}", spread([outcome.dead for outcome in own], 0),
            spread(scores) if (scores := [100 * one.accuracy for one in own if one.accuracy is not None]) else "",
            spread([outcome.rounds for outcome in own], 0),
            spread([outcome.seconds for outcome in own]), spread([outcome.used for outcome in own], 0),
            spread([outcome.lost for outcome in own], 0),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
