"""How soon a fleet with fast and slow uplinks learns with `auto`, beside every codec that it chooses from.

    python benchmarks/auto_codec.py [--seeds 3] [--devices 8] [--target 0.95] [--metered] [--json]

`fedavg` on the digits (no download), simulated; half of the boards upload 50 MB/s, the others 20 kB/s. Printed are
the virtual seconds and the bytes up until an evaluation is at the target, means over the seeds. One
codec for all is what `auto` competes with; which of them is best one has to find out first, by such a table.
With `--metered` all are fast and half of them are metered: what they send is shown apart.
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
FAST = PROFILES.partition("[profile.slow]")[0]
METERED_PROFILES = f"{FAST}{FAST.replace('fast', 'slow')}metered = [[0, 1]]\n"
METERED = ({"up": "ef|int8", "metered": "ef|topk:0.01|int8"}, {"up": "ef|int8"}, {"up": "ef|topk:0.01|int8"})
"""Beside `auto`: a codec for boards on metered connections, and either of both for all."""
MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One codec: seconds and bytes until the target, None where a seed did not get there.

    `slow_megabytes` are those of the boards with the slow or metered connection.
    """

    codec: str
    seconds: float | None
    megabytes: float | None
    slow_megabytes: float | None
    rounds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--metered", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = options.parse(parser, seeds=1, devices=2, target=0.3)
    others = METERED if arguments.metered else [{"up": codec} for codec in ("dense", *CANDIDATES)]
    rows = [measure(compression, arguments) for compression in ({"up": "auto"}, *others)]
    if arguments.json:
        print(json.dumps({"v": 1, "target": arguments.target, "codecs": [asdict(row) for row in rows]}))
    else:
        half = "metered" if arguments.metered else "at 20 kB/s up"
        print(f"digits, fedavg, {arguments.devices} boards, half of them {half}, to {arguments.target:g}")
        print(f"{'codec':36}{'seconds':>10}{'MB up':>10}{'of that half':>14}{'rounds':>9}")
        for row in rows:
            found = (row.seconds, row.megabytes, row.slow_megabytes)
            seconds, megabytes, slow = ("-" if each is None else f"{each:.3g}" for each in found)
            print(f"{row.codec:36}{seconds:>10}{megabytes:>10}{slow:>14}{row.rounds:>9.1f}")
    return 0


def measure(compression: dict[str, str], arguments: argparse.Namespace) -> Row:
    seconds, sent, slow_sent, rounds = [], [], [], []
    for seed in range(1, arguments.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            profiles = Path(folder) / "profiles.toml"
            profiles.write_text(METERED_PROFILES if arguments.metered else PROFILES)
            run = edgefl.simulate(
                {
                    "run": {"task": "digits", "rounds": MOST_ROUNDS, "accuracy": arguments.target, "seed": seed},
                    "strategy": {"name": "fedavg", "learning_rate": 0.2},
                    "compression": compression,
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
            # Profiles go round: the second of each two boards is slow, or metered.
            slow = [row for row in run.updates if int(row["device_id"].rpartition("-")[2]) % 2 == 0]
            slow_sent.append(sum(row["bytes_up"] or 0 for row in slow) / 1e6)
    got_there = len(seconds) == arguments.seeds
    return Row(
        codec=" + ".join(compression.values()),
        seconds=statistics.fmean(seconds) if got_there else None,
        megabytes=statistics.fmean(sent) if got_there else None,
        slow_megabytes=statistics.fmean(slow_sent) if got_there else None,
        rounds=statistics.fmean(rounds),
    )


if __name__ == "__main__":
    sys.exit(main())
