"""How soon a lost device is out of its round, and how often one is given up that was only out of reach for a while.

    python benchmarks/lost_devices.py [--only losses|gaps] [--trials 6] [--gaps 40] [--json]

Device processes are in network namespaces of their own (root, iproute2 and nftables are needed), coordinator and
Mosquitto outside. They train the digits in rounds of some seconds.

Losses: in the middle of a round one device is killed (SIGKILL), one is frozen (SIGSTOP) and one has its cable pulled,
at the same time. What is told is when the history says that the assignment was dropped, and that the device is gone.

Gaps: devices have their cables pulled for 10 to 20 s, at random moments of a synchronous run and of an asynchronous
one. What is told, by the length of the gap, is how often the device was called gone, which assignments were dropped,
how much longer the rounds took than those without a gap, and when the device was back after the cable was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import options
from harness.board_fleet import NAME, BoardFleet, board_fleet, why_not
from harness.process_trees import children_by_parent, tree

from edgefl.core.config import parse_run

LENGTHS_S = (10.0, 12.0, 15.0, 18.0, 20.0)
MODES = {"synchronous": "fedavg", "asynchronous": "asgd"}
REST_S = (5.0, 15.0)
"""A device that is back has so long until its next gap; drawn evenly."""
SETTLED_AFTER_S = 10.0
"""What follows from a gap has happened by then after it."""
KILLED, FROZEN, CUT = "killed", "frozen", "cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One device that was lost in the middle of a round: seconds until the history said so."""

    how: str
    dropped_s: float
    gone_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One gap: Unix times, and how many seconds after its end the device was heard of again."""

    mode: str
    device: str
    length_s: float
    begun_at: float
    ended_at: float
    is_called_gone: bool
    back_after_s: float
    num_dropped: int


def main() -> int:
    arguments = _parse()
    if reason := why_not():
        print(f"not measured: {reason}", file=sys.stderr)
        return 1
    root = Path(tempfile.mkdtemp(prefix="edgefl-lost-"))
    found: dict[str, Any] = {}
    try:
        if arguments.only in {None, "losses"}:
            with board_fleet(root / "losses", 6, delay_s=arguments.iteration_s) as boards:
                found["losses"] = [asdict(loss) for loss in measure_losses(boards, arguments.trials)]
        if arguments.only in {None, "gaps"}:
            gaps, found["rounds"] = [], {}
            for mode in MODES:
                with board_fleet(root / mode, arguments.devices, delay_s=arguments.iteration_s) as boards:
                    of_mode, rounds = measure_gaps(boards, mode, arguments)
                gaps += of_mode
                found["rounds"][mode] = rounds
            found["gaps"] = [asdict(gap) for gap in gaps]
    finally:
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))
    return 0


def _submit(boards: BoardFleet, strategy: str) -> str:
    """Begins a run that only its operator ends; returns it when it trains."""
    config = {
        "run": {"task": NAME, "rounds": 1_000_000, "evaluate_on": "none"},
        "strategy": {"name": strategy, "iterations": 4},
        "devices": {"min": len(boards.names)},
    }
    run_id = boards.fleet.submit(parse_run(config))
    boards.wait("the first round", lambda: boards.rows("SELECT 1 FROM rounds WHERE closed_at IS NOT NULL"))
    return run_id


def measure_losses(boards: BoardFleet, num_trials: int) -> list[Loss]:
    """Loses three devices at a time, and brings them back."""
    run_id, found = _submit(boards, "fedavg"), list[Loss]()
    rng = random.Random(7)
    with ThreadPoolExecutor(3) as pool:
        for trial in range(num_trials):
            turn = rng.sample(list(boards.names), 3)
            acts = [_killing(boards, turn[0]), _freezing(boards, turn[1]), _cutting(boards, turn[2])]
            losses = [pool.submit(_lose, boards, run_id, act) for act in acts]
            found += [loss.result() for loss in losses]
            print(f"trial {trial + 1}: {[round(loss.dropped_s, 1) for loss in found[-3:]]}", file=sys.stderr)
    boards.fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/stop")
    return found


@dataclass(frozen=True, slots=True)
class Act:
    """What is done to a device, and what undoes it."""

    device: str
    how: str
    do: Callable[[], None]
    undo: Callable[[], None]


def _lose(boards: BoardFleet, run_id: str, act: Act) -> Loss:
    assignment = boards.wait("work in progress", lambda: boards.out(run_id, act.device))
    at = time.time()
    act.do()
    query = "SELECT outcome, reason, ended_at FROM updates WHERE run_id = ? AND assignment_id = ? AND ended_at > 0"
    (row,) = boards.wait("the end of the assignment", lambda: boards.rows(query, run_id, assignment))
    gone = boards.wait("the device to be called gone", lambda: boards.events(act.device, "device-gone", at))
    act.undo()
    boards.wait("the device to be back", lambda: boards.fleet.get_presence()[act.device] == "online")
    if row["outcome"] != "lost" or row["ended_at"] < at:  # it had answered in that instant
        return _lose(boards, run_id, act)
    return Loss(how=act.how, dropped_s=row["ended_at"] - at, gone_s=gone[0] - at, reason=row["reason"])


def _killing(boards: BoardFleet, device: str) -> Act:
    def kill() -> None:
        boards.fleet.kill(device)

    return Act(device, KILLED, kill, lambda: boards.fleet.start_device(device))


def _freezing(boards: BoardFleet, device: str) -> Act:
    return Act(
        device,
        FROZEN,
        lambda: _signal(boards, device, signal.SIGSTOP),
        lambda: _signal(boards, device, signal.SIGCONT),
    )


def _signal(boards: BoardFleet, device: str, number: signal.Signals) -> None:
    for pid in tree(boards.fleet.processes[device].pid, children_by_parent()):
        os.kill(pid, number)


def _cutting(boards: BoardFleet, device: str) -> Act:
    return Act(device, CUT, lambda: boards.network.cut(device), lambda: boards.network.mend(device))


def measure_gaps(boards: BoardFleet, mode: str, arguments: argparse.Namespace) -> tuple[list[Gap], dict[str, Any]]:
    """Returns the gaps, and what the rounds of the run took with and without one."""
    run_id = _submit(boards, MODES[mode])
    rng = random.Random(f"{mode} {arguments.seed}")
    lengths = [LENGTHS_S[number % len(LENGTHS_S)] for number in range(arguments.gaps)]
    rng.shuffle(lengths)
    free, lock = list(boards.names), threading.Lock()
    rests = [rng.uniform(*REST_S) for _ in lengths]

    def one(length_s: float, rest_s: float) -> Gap:
        time.sleep(rest_s)
        with lock:
            device = free.pop(rng.randrange(len(free)))
        try:
            return _gap(boards, run_id, mode, device, length_s)
        finally:
            with lock:
                free.append(device)

    began_at = time.time()
    with ThreadPoolExecutor(arguments.at_a_time) as pool:
        gaps = list(pool.map(one, lengths, rests))
    time.sleep(SETTLED_AFTER_S)
    boards.fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/stop")
    return gaps, _rounds(boards, run_id, gaps, began_at)


def _gap(boards: BoardFleet, run_id: str, mode: str, device: str, length_s: float) -> Gap:
    begun_at = time.time()
    boards.network.cut(device)
    time.sleep(max(0.0, begun_at + length_s - time.time()))
    boards.network.mend(device)
    ended_at = time.time()
    query = "SELECT max(at) AS at FROM heartbeats WHERE device_id = ? AND at > ?"
    back = boards.wait("a heartbeat after the gap", lambda: boards.rows(query, device, ended_at)[0]["at"])
    time.sleep(SETTLED_AFTER_S)
    dropped = boards.rows(
        "SELECT 1 FROM updates WHERE run_id = ? AND device_id = ? AND outcome != 'used' AND ended_at BETWEEN ? AND ?",
        run_id, device, begun_at, time.time(),
    )  # fmt: skip
    first = boards.rows("SELECT min(at) AS at FROM heartbeats WHERE device_id = ? AND at > ?", device, ended_at)
    gap = Gap(
        mode=mode, device=device, length_s=length_s, begun_at=begun_at, ended_at=ended_at,
        is_called_gone=bool(boards.events(device, "device-gone", begun_at)),
        back_after_s=(first[0]["at"] or back) - ended_at, num_dropped=len(dropped),
    )  # fmt: skip
    print(f"{mode}: {length_s:g} s, gone {gap.is_called_gone}, back after {gap.back_after_s:.1f} s", file=sys.stderr)
    return gap


def _rounds(boards: BoardFleet, run_id: str, gaps: Sequence[Gap], began_at: float) -> dict[str, Any]:
    """Returns the median round without a gap, and how much longer the round lasted in which each gap began."""
    query = "SELECT started_at, closed_at FROM rounds WHERE run_id = ? AND closed_at IS NOT NULL AND started_at > ?"
    rounds = [(row["started_at"], row["closed_at"]) for row in boards.rows(query, run_id, began_at)]
    calm = [end - begin for begin, end in rounds if not any(_touches(gap, begin, end) for gap in gaps)]
    median_s = statistics.median(calm) if calm else float("nan")
    extra: dict[str, list[float]] = {f"{length_s:g}": [] for length_s in LENGTHS_S}
    for gap in gaps:
        struck = [end - begin for begin, end in rounds if begin <= gap.begun_at < end]
        extra[f"{gap.length_s:g}"] += [max(0.0, seconds - median_s) for seconds in struck]
    return {"num": len(rounds), "num_without_gap": len(calm), "median_s": median_s, "extra_s": extra}


def _touches(gap: Gap, begin: float, end: float) -> bool:
    return gap.begun_at < end and gap.ended_at + SETTLED_AFTER_S > begin


def as_text(found: dict[str, Any]) -> str:
    lines = []
    for how in (KILLED, FROZEN, CUT) if "losses" in found else ():
        losses = [loss for loss in found["losses"] if loss["how"] == how]
        dropped, gone = ([loss[name] for loss in losses] for name in ("dropped_s", "gone_s"))
        lines.append(
            f"{how} {len(losses)} times: out of the round after {statistics.median(dropped):.1f} s, "
            f"{max(dropped):.1f} at worst; gone after {statistics.median(gone):.1f} s, {max(gone):.1f} at worst"
        )
    for mode in MODES if "gaps" in found else ():
        rounds = found["rounds"][mode]
        lines += [
            (
                f"{mode}: {rounds['num']} rounds, {rounds['median_s']:.1f} s without a gap "
                f"(median of {rounds['num_without_gap']})"
            ),
            "  gap s  gaps  called gone  dropped  round longer by s, worst  back after s, worst",
        ]
        for length_s in LENGTHS_S:
            gaps = [gap for gap in found["gaps"] if (gap["mode"], gap["length_s"]) == (mode, length_s)]
            if not gaps:
                continue
            extra = rounds["extra_s"][f"{length_s:g}"] or [float("nan")]
            back = [gap["back_after_s"] for gap in gaps]
            lines.append(
                f"  {length_s:5g}  {len(gaps):4}  {sum(gap['is_called_gone'] for gap in gaps):11}  "
                f"{sum(gap['num_dropped'] for gap in gaps):7}  {statistics.median(extra):17.1f}, {max(extra):5.1f}  "
                f"{statistics.median(back):12.1f}, {max(back):5.1f}"
            )
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["losses", "gaps"])
    parser.add_argument("--trials", type=int, default=6, help="in each of which three devices are lost [%(default)s]")
    parser.add_argument("--gaps", type=int, default=40, help="of each kind of run [%(default)s]")
    parser.add_argument("--devices", type=int, default=8, help="of the runs with gaps [%(default)s]")
    parser.add_argument("--at-a-time", type=int, default=3, help="gaps [%(default)s]")
    parser.add_argument(
        "--iteration-s", type=float, default=0.5, help="of which an assignment has four [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the folder with all state and logs")
    parser.add_argument("--json", action="store_true")
    return options.parse(parser, only="losses", trials=1)


if __name__ == "__main__":
    raise SystemExit(main())
