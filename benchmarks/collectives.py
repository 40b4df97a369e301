"""What a collective saves: time of a round, and bytes through the coordinator, beside `coordinator`.

    python benchmarks/collectives.py [--parts simulated live kills] [--devices 4 8] [--megabytes 1 20]
        [--reductions 1 16] [--mbit-per-s 20] [--kills 50]

simulated: every device and the coordinator have a link of that rate, and 5 ms of latency; nothing is trained. The
first round, in which every device gets the model, is left out. Seconds and bytes are for one all-reduce, beside one
round by the coordinator.

live: real device processes, each and the coordinator in a network namespace, whose wire the kernel holds to that rate
in either direction (as root, with iproute2; else nothing is held to a rate, and no seconds are told). Each run has as
many trainings; of the coordinator's, the first rounds are timed and the others run on free wires, for the model. The
largest of `--reductions` counts. "Simulated" is for links without latency, which these wires do not have.

kills: a ring of the first number of devices, on such wires. Coordinator, single devices, two and all of them are
killed and started again; the model's tally then has to hold each training that counts once, and no other.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from harness import options
from harness.collective_kills import disturb
from harness.collective_live import Found, measure_live

import edgefl
from edgefl.engine.run_summary import RunResult
from edgefl.simulation.local_fleet import COORDINATOR

ROUNDS, LATENCY_S = 3, 0.005
COLLECTIVES = ("ring", "butterfly", "binary-blocks", "auto")
PARTS = ("simulated", "live", "kills")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 20.0])
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=["ring", "butterfly"], help="live")
    parser.add_argument("--reductions", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--mbit-per-s", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    args = options.parse(parser, devices=[3], megabytes=[0.1], reductions=[2], kills=2, collectives=["ring"])
    if "simulated" in args.parts:
        print_simulated(args)
    if "live" in args.parts:
        print_live(args)
    if "kills" in args.parts:
        faults = disturb(args.devices[0], args.megabytes[0], args.mbit_per_s, args.kills, args.seed)
        print(f"{args.kills} kills: " + ("; ".join(faults) or "0 lost, 0 doubled"))
        return 1 if faults else 0
    return 0


def print_simulated(args: argparse.Namespace) -> None:
    print(
        "| devices | model | collective | reductions | seconds | sooner | through the coordinator | a device sends |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for devices in args.devices:
        for megabytes in args.megabytes:
            usual = run(COORDINATOR, 1, devices, megabytes, args.mbit_per_s)
            print_row(devices, megabytes, COORDINATOR, 1, usual, usual)
            for collective in COLLECTIVES:
                for reductions in args.reductions:
                    result = run(collective, reductions, devices, megabytes, args.mbit_per_s)
                    print_row(devices, megabytes, collective, reductions, result, usual)


def print_live(args: argparse.Namespace) -> None:
    heads = (
        *("devices", "model", "collective", "reductions", "seconds", "sooner", "simulated", "sooner"),
        *("through the coordinator: rows", "wire", "a device sends: rows", "wire", "model differs by", "tally"),
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for devices in args.devices:
        usual: Found | None = None
        for found in measure_live(devices, args.megabytes, args.collectives, max(args.reductions), args.mbit_per_s):
            usual = found if found.collective == COORDINATOR or usual is None else usual
            print_found(found, usual, args.mbit_per_s)


def print_found(found: Found, usual: Found, mbit_per_s: float) -> None:
    """Prints a row beside the coordinator's."""
    size = found.megabytes * 1e6
    expected, usual_expected = (
        measure(
            run(each.collective, each.reductions, each.devices, each.megabytes, mbit_per_s, 1e-4), each.reductions
        )[0]
        for each in (found, usual)
    )
    cells = (
        found.devices,
        f"{found.megabytes:g} MB",
        found.collective,
        found.reductions,
        f"{found.seconds:.3g}" if found.seconds else "-",
        f"{usual.seconds / found.seconds:.1f} times" if found.seconds else "-",
        f"{expected:.3g}",
        f"{usual_expected / expected:.1f} times",
        f"{100 * found.through / usual.through:.2f} %",
        f"{100 * found.through_wire / usual.through_wire:.2f} %"
        if found.through_wire and usual.through_wire
        else "-",
        f"{found.sent / size:.3f} models",
        f"{found.sent_wire / size:.3f}" if found.sent_wire else "-",
        f"{found.distance:.1e}",
        "; ".join(found.faults) or "right",
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def run(
    collective: str,
    reductions: int,
    devices: int,
    megabytes: float,
    mbit_per_s: float,
    latency_s: float = LATENCY_S,
) -> RunResult:
    bytes_per_s = mbit_per_s * 1e6 / 8
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "boards.toml"
        rates = f"up_bytes_per_s = {bytes_per_s}\ndown_bytes_per_s = {bytes_per_s}\nlatency_s = {latency_s}\n"
        profile.write_text(f"[profile.board]\n{rates}")
        tables: dict[str, Any] = {
            "run": {"task": "noop", "rounds": ROUNDS, "evaluate_on": "none"},
            "task": {"size_bytes": int(megabytes * 1e6)},
            "aggregation": {"collective": collective, "reductions": reductions},
            "guard": {"enabled": False, "max_weight_ratio": 0},
            "simulation": {
                "profiles": ["board"],
                "profile_file": str(profile),
                "jitter": 0.0,
                "iteration_s": 1e-6,
                "server_up_bytes_per_s": bytes_per_s,
                "server_down_bytes_per_s": bytes_per_s,
            },
        }
        return edgefl.simulate(tables, devices=devices, root=Path(folder) / "runs", bookkeeping_only=True)


def print_row(
    devices: int, megabytes: float, collective: str, reductions: int, result: RunResult, usual: RunResult
) -> None:
    seconds, through, sent = measure(result, reductions)
    usual_seconds, usual_through, _ = measure(usual, 1)
    cells = (
        devices,
        f"{megabytes:g} MB",
        collective,
        reductions,
        f"{seconds:.3g}",
        f"{usual_seconds / seconds:.1f} times",
        f"{100 * through / usual_through:.2f} %",
        f"{sent / (megabytes * 1e6):.3g} models",
    )
    print(f"| {' | '.join(map(str, cells))} |")


def measure(result: RunResult, reductions: int) -> tuple[float, float, float]:
    """Returns seconds, bytes through the coordinator, and most bytes that a device sends, of the last round."""
    last = result.rounds[-1]
    rows = [row for row in result.updates if row["round"] == last["round"]]
    through = sum(row["bytes_up"] + row["bytes_down"] for row in rows)
    sent = max((row["metrics"] or {}).get("peer_bytes_up", row["bytes_up"]) for row in rows)
    return (last["closed_at"] - last["started_at"]) / reductions, through / reductions, sent / reductions


if __name__ == "__main__":
    raise SystemExit(main())
