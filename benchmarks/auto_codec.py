"""How soon a fleet with fast and slow uplinks learns with `auto`, beside every codec that it chooses from.

    python benchmarks/auto_codec.py [--seeds 3] [--devices 8] [--target 0.95] [--json]

`fedavg` on the digits (no download), simulated; half of the boards upload 50 MB/s, the others 20 kB/s. Printed are
the virtual seconds and the bytes up until an evaluation is at the target, means over the seeds. One
codec for all is what `auto` competes with; which of them is best one has to find out first, by such a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import options

import edgefl
from edgefl.compression.codec_selection import CANDIDATES

PROFILES = """
[profile.fast]
speed = 0.05
up_bytes_per_s = 50_000_000
down_bytes_per_s = 50_000_000
[profile.slow]
speed = 0.05
up_bytes_per_s = 20_000
down_bytes_per_s = 2_000_000
"""
MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One codec: seconds and bytes until the target, None where a seed did not get there."""

    codec: str
    seconds: float | None
    megabytes: float | None
    rounds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--json", action="store_true")
    arguments = options.parse(parser, seeds=1, devices=2, target=0.3)
    rows = [measure(codec, arguments) for codec in ("auto", "dense", *CANDIDATES)]
    if arguments.json:
        print(json.dumps({"v": 1, "target": arguments.target, "codecs": [asdict(row) for row in rows]}))
    else:
        print(f"digits, fedavg, {arguments.devices} boards, half of them at 20 kB/s up, to {arguments.target:g}")
        print(f"{'codec':24}{'seconds':>10}{'MB up':>10}{'rounds':>9}")
        for row in rows:
            seconds, megabytes = ("-" if each is None else f"{each:.3g}" for each in (row.seconds, row.megabytes))
            print(f"{row.codec:24}{seconds:>10}{megabytes:>10}{row.rounds:>9.1f}")
    return 0


def measure(codec: str, arguments: argparse.Namespace) -> Row:
    seconds, sent, rounds = [], [], []
    for seed in range(1, arguments.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            profiles = Path(folder) / "profiles.toml"
            profiles.write_text(PROFILES)
            run = edgefl.simulate(
                {
                    "run": {"task": "digits", "rounds": MOST_ROUNDS, "accuracy": arguments.target, "seed": seed},
                    "strategy": {"name": "fedavg", "learning_rate": 0.2},
                    "compression": {"up": codec},
                    "simulation": {
                        "profiles": ["fast", "slow"],
                        "profile_file": str(profiles),
                        "jitter": 0.0,
                        "workers": 0,
                    },
                },
                devices=arguments.devices,
                scheme="iid",
                root=folder,
            )
        closed = [row for row in run.rounds if row["closed_at"] is not None]
        rounds.append(len(closed))
        if any((row["accuracy"] or 0.0) >= arguments.target for row in closed):
            seconds.append(float(run.metrics["seconds"] or 0.0))
            sent.append(sum(row["bytes_up"] for row in closed) / 1e6)
    got_there = len(seconds) == arguments.seeds
    return Row(
        codec=codec,
        seconds=statistics.fmean(seconds) if got_there else None,
        megabytes=statistics.fmean(sent) if got_there else None,
        rounds=statistics.fmean(rounds),
    )


if __name__ == "__main__":
    sys.exit(main())
