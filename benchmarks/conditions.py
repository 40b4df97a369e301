"""Whether boards train only when they may: 100 boards, 30 simulated days, the agent's gate, traces of three kinds.

    python benchmarks/conditions.py [--days 30] [--boards 100] [--iteration-s 400] [--seed 7] [--json]

Boards of offices (hours, load of their users), of a farm (solar power, a battery, heat, budgets of processor seconds)
and in cars (charging, a metered link, budgets of traffic). Each gate is that of the agent, its clocks and its facts
are the trace's. Work is iterations of 24 to 65 s; agents are killed, boards reboot, clocks are set by up to 30 days
(after a reboot a clock is right or behind).

`outside` is counted by another piece of code than the gate's, from the traces alone: seconds of iterations that began
outside the conditions, seconds after the end of hours, bytes, processor seconds beyond a budget of a true day. A
condition that nobody can foresee, such as a cable that is pulled, ends work after the iteration under way: those
seconds are `overrun`.

Then FedAvg trains digits on the simulator for as long, ten iterations a round, on boards with these traces and
conditions, and on boards that are always free; mean over the seeds. What the simulated boards did is judged by the
same other piece of code from the run's history.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from harness import options

import edgefl
from edgefl.core.conditions import BoardFacts, ConditionsEndedError, RunConditions, parse_conditions
from edgefl.core.types import derive_rng
from edgefl.device.conditions.budgets import Clocks
from edgefl.device.conditions.facts import FactReader
from edgefl.device.conditions.gate import ConditionGate, save_conditions
from edgefl.engine.run_summary import RunResult
from edgefl.simulation.history_recorder import SIMULATION_EPOCH

START_S = datetime(2026, 10, 12, tzinfo=UTC).timestamp()  # a Monday; the clocks of Oslo change on the 25th
DAY_S, HOUR_S, MINUTE_S = 86_400.0, 3600.0, 60.0
TRACE_STEP_S = 900.0
POLL_S = 300.0
BODY_BYTES = 1_000_000
OFFICE, FARM, CAR = "office", "farm", "car"
FILES = {
    OFFICE: """[conditions]
zone = "UTC"
hours = ["19:00-07:00", "12:00-12:45"]
weekdays = ["mon", "tue", "wed", "thu", "fri"]
max_other_load = 0.3
[conditions.month]
processor_s = 200000
""",
    FARM: """[conditions]
zone = "UTC"
min_battery = 0.6
max_temperature_c = 55
[conditions.day]
processor_s = 7200
""",
    CAR: """[conditions]
zone = "UTC"
charging = true
unmetered = true
[conditions.day]
traffic_mb = 60
""",
}


@dataclass(slots=True)
class Board(FactReader):
    """A board's trace: its true time, what its sensors show then, and its clocks."""

    kind: str
    seed: int
    true_s: float = START_S
    skew_s: float = 0.0
    up_s: float = 60.0
    boots: int = 0
    processor_s: float = 0.0
    used: dict[tuple[str, int], float] = field(default_factory=dict)
    trained: list[tuple[float, float]] = field(default_factory=list)
    outside_s: float = 0.0
    overrun_s: float = 0.0
    numbers: dict[str, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        FactReader.__init__(self)

    @property
    def clocks(self) -> Clocks:
        return Clocks(boot_id=str(self.boots), wall=lambda: self.true_s + self.skew_s, boot_time=lambda: self.up_s)

    def noise(self, name: str, step: float) -> float:
        """Returns a number in 0-1 that stays for `step` seconds."""
        bucket = int(self.true_s // step)
        if self.numbers.get(name, (-1, 0.0))[0] != bucket:
            self.numbers[name] = bucket, float(derive_rng(name, self.seed, bucket).random())
        return self.numbers[name][1]

    def wait(self, seconds: float) -> None:
        self.true_s, self.up_s = self.true_s + seconds, self.up_s + seconds

    def sense(self) -> BoardFacts:
        """Returns what the sensors show at the true time."""
        moment = datetime.fromtimestamp(self.true_s, UTC)
        hour, is_workday = moment.hour + moment.minute / 60, moment.weekday() < 5
        if self.kind == OFFICE:
            busy = is_workday and 8 <= hour < 20 and self.noise("user", 900) < 0.6
            return BoardFacts(other_load=0.7 if busy else 0.1)
        if self.kind == FARM:
            sun = max(0.0, np.sin(np.pi * (hour - 6) / 12)) * (0.4 + 0.6 * self.noise("cloud", 4 * HOUR_S))
            battery = 0.35 + 0.6 * sun + 0.1 * self.noise("load", HOUR_S)
            heat = 30 + 28 * sun + 4 * self.noise("heat", 600)
            return BoardFacts(
                on_mains=False, battery_fraction=min(1.0, battery), battery_status="Discharging", temperature_c=heat
            )
        is_driving = is_workday and (7 <= hour < 8 or 17 <= hour < 18)
        is_home = not is_driving and (hour >= 18 or hour < 7)
        is_plugged = is_home and self.noise("plug", DAY_S) < 0.7 and self.noise("cable", HOUR_S) < 0.95
        return BoardFacts(battery_status="Charging" if is_plugged else "Discharging", is_metered=not is_home)

    def read(self, conditions: RunConditions) -> BoardFacts:
        del conditions
        return self.sense()

    def read_processor_s(self) -> float:
        return self.processor_s

    def read_power_w(self) -> float | None:
        return None

    def sense_at(self, at_s: float) -> BoardFacts:
        """Returns what the sensors show at a step of a trace, `at_s` after its start."""
        self.true_s, self.skew_s = START_S + at_s // TRACE_STEP_S * TRACE_STEP_S, 0.0
        return self.sense()

    def may_train_at(self, at_s: float) -> bool:
        """Returns `may_train` of a trace in steps."""
        facts = self.sense_at(at_s)
        self.true_s = START_S + at_s
        return self.may_train(facts)

    def may_train(self, facts: BoardFacts | None = None) -> bool:
        """Returns whether the trace allows training now; plain arithmetic, apart from the gate's own."""
        facts, moment = facts or self.sense(), datetime.fromtimestamp(self.true_s + self.skew_s, UTC)
        minute, weekday = moment.hour * 60 + moment.minute, moment.weekday()
        match self.kind:
            case "office":
                night = (minute >= 19 * 60 and weekday <= 4) or (minute < 7 * 60 and 1 <= weekday <= 5)
                noon = 12 * 60 <= minute < 12 * 60 + 45 and weekday <= 4
                return (night or noon) and (facts.other_load or 0) <= 0.3
            case "farm":
                return (facts.battery_fraction or 0) >= 0.6 and (facts.temperature_c or 99) <= 55
            case _:
                return facts.battery_status == "Charging" and facts.is_metered is False

    def iterate(self, seconds: float) -> None:
        """Trains one iteration of `seconds` on one core, and judges it."""
        began_s, may_begin = self.true_s, self.may_train()
        day = int((self.true_s - START_S) // DAY_S)
        self.wait(seconds)
        missing_s = 0.0
        if not may_begin or not self.may_train():  # traces change at most once in a minute
            missing_s = seconds - self._find_allowed_s(began_s, seconds) if may_begin else seconds
        self.processor_s += seconds
        self.used["processor", day] = self.used.get(("processor", day), 0.0) + seconds
        self.trained.append((began_s - START_S, self.true_s - START_S))
        if not may_begin or (missing_s and self.kind == OFFICE and not self.is_busy_end()):
            self.outside_s += missing_s
        else:
            self.overrun_s += missing_s

    def _find_allowed_s(self, began_s: float, seconds: float) -> float:
        """Returns how many of the last seconds, from their first on, were allowed."""
        end_s, allowed_s = self.true_s, 0.0
        self.true_s = began_s
        while allowed_s < seconds and self.may_train():
            allowed_s, self.true_s = allowed_s + 1.0, self.true_s + 1.0
        self.true_s = end_s
        return min(allowed_s, seconds)

    def is_busy_end(self) -> bool:
        """Returns whether an office's user, not the clock, ended the work."""
        return (self.sense().other_load or 0) > 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    kind: str
    boards: int
    trained_h: float
    allowed_h: float
    outside_s: float
    overrun_s: float
    budgets_passed: int
    kills: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=30.0, help="of simulated time [%(default)s]")
    parser.add_argument("--boards", type=int, default=100, help="a third of each kind [%(default)s]")
    parser.add_argument("--iteration-s", type=float, default=400.0, help="seconds of one of FedAvg [%(default)s]")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=2, help="how many runs of each kind [%(default)s]")
    parser.add_argument("--json", action="store_true")
    args = options.parse(parser, days=1.0, boards=3, iteration_s=2000.0, seeds=1)
    boards = [Board(kind=(OFFICE, FARM, CAR)[number % 3], seed=args.seed + number) for number in range(args.boards)]
    kills: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for number, board in enumerate(boards):
            place = Path(folder) / str(number)
            place.mkdir()
            kills[board.kind] = kills.get(board.kind, 0) + live(board, place, args.days)
        rows = [make_row(kind, boards, args.days, kills) for kind in (OFFICE, FARM, CAR)]
        seeds = range(args.seed, args.seed + args.seeds)
        accuracies, simulated = compare(boards, Path(folder), args.days, args.iteration_s, seeds)
    has_fault = any(row.outside_s or row.budgets_passed for row in rows)
    has_fault |= bool(simulated["outside_s"] or simulated["budgets_passed"])
    if args.json:
        costs = {"v": 1, "boards": [asdict(row) for row in rows], "simulated": simulated, "accuracy": accuracies}
        sys.stdout.write(json.dumps(costs) + "\n")
        return int(has_fault)
    names = ("kind", "boards", "trained_h", "allowed_h", "outside_s", "overrun_s", "budgets_passed", "kills")
    sys.stdout.write("".join(f"{name:>15}" for name in names) + "\n")
    for row in rows:
        sys.stdout.write("".join(f"{_format(getattr(row, name)):>15}" for name in names) + "\n")
    for name, accuracy in accuracies.items():
        sys.stdout.write(f"accuracy, {name}: {accuracy:.4f}\n")
    sys.stdout.write("simulated: " + ", ".join(f"{name} {value:.1f}" for name, value in simulated.items()) + "\n")
    return int(has_fault)


def live(board: Board, folder: Path, days: float) -> int:
    """Lets a board live for so many days; returns how often its agent was killed, rebooted or set another clock."""
    save_conditions(folder, FILES[board.kind].encode())
    rng, num_kills = derive_rng("life", board.seed), 0
    gate = ConditionGate(folder, clocks=board.clocks, facts=board)
    while board.true_s < START_S + days * DAY_S:
        if gate.check() is not None:
            board.wait(POLL_S)
        elif not _work(board, gate, rng):
            num_kills += 1
            if rng.random() < 0.3:  # a reboot
                board.boots, board.up_s, board.skew_s = board.boots + 1, 20.0, min(0.0, board.skew_s)
            gate = ConditionGate(folder, clocks=board.clocks, facts=board)
            gate.check()  # it reads the clock before anybody sets it
        if board.kind != OFFICE and rng.random() < 0.02:  # the clock is set; only hours go by it
            board.skew_s = float(rng.uniform(-30, 30)) * DAY_S if rng.random() < 0.5 else 0.0
            num_kills += 1
    return num_kills


def _work(board: Board, gate: ConditionGate, rng: np.random.Generator) -> bool:
    """Does one assignment; returns whether its agent lived through it."""
    base_s, num_iterations = 30.0 + board.seed * 7 % 25, int(rng.integers(1, 60))
    day = int((board.true_s - START_S) // DAY_S)
    try:
        _transfer(board, gate, day)
        with gate.work():
            for _ in range(num_iterations):
                if rng.random() < 0.002:
                    return False
                gate.require()
                board.iterate(base_s * float(rng.uniform(0.8, 1.2)))
            gate.require()
        _transfer(board, gate, day)
    except ConditionsEndedError:
        board.wait(5.0)
    return True


def _transfer(board: Board, gate: ConditionGate, day: int) -> None:
    gate.charge_traffic(BODY_BYTES)
    board.used["traffic", day] = board.used.get(("traffic", day), 0.0) + BODY_BYTES
    board.wait(1.0)


def make_row(kind: str, boards: list[Board], days: float, kills: dict[str, int]) -> Row:
    ours = [board for board in boards if board.kind == kind]
    conditions = parse_conditions(FILES[kind])
    passed = 0
    for board in ours:
        limits = conditions.day.limits
        passed += sum(used > limits.get(name, np.inf) for (name, _), used in board.used.items())
        month = sum(used for (name, _), used in board.used.items() if name == "processor")
        passed += month > 2 * conditions.month.limits.get("processor", np.inf)  # 30 days lie in two months
    allowed_s = sum(_count_allowed(board, days) for board in ours)
    return Row(
        kind=kind,
        boards=len(ours),
        trained_h=sum(end - start for board in ours for start, end in board.trained) / HOUR_S,
        allowed_h=allowed_s / HOUR_S,
        outside_s=sum(board.outside_s for board in ours),
        overrun_s=sum(board.overrun_s for board in ours),
        budgets_passed=passed,
        kills=kills.get(kind, 0),
    )


def _count_allowed(board: Board, days: float) -> float:
    board.true_s, board.skew_s, allowed_s = START_S, 0.0, 0.0
    while board.true_s < START_S + days * DAY_S:
        allowed_s += 60.0 * board.may_train()
        board.true_s += 60.0
    return allowed_s


def compare(
    boards: list[Board], folder: Path, days: float, iteration_s: float, seeds: range
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns accuracies of FedAvg in the simulator, with conditions and always, and what was outside of them."""
    accuracies, faults = {}, {"outside_s": 0.0, "overrun_s": 0.0, "budgets_passed": 0.0, "trained_h": 0.0}
    for kind, is_always in (("when they may", False), ("always", True)):
        profiles = folder / f"{kind}.toml"
        profiles.write_text("".join(_list_profiles(boards, days, is_always=is_always)))
        results = [_train(profiles, len(boards), days, iteration_s, seed) for seed in seeds]
        accuracies[kind] = fmean(result.metrics["accuracy"] or 0.0 for result in results)
        for result in [] if is_always else results:
            for number, board in enumerate(boards, 1):
                name = f"device-{number:0{max(2, len(str(len(boards))))}}"
                _judge(board, result, name, days=days, iteration_s=iteration_s, faults=faults)
    return accuracies, faults


def _list_profiles(boards: list[Board], days: float, *, is_always: bool) -> Iterator[str]:
    """Yields a profile for each board: its trace in steps of `TRACE_STEP_S`, and its owner's file."""
    for number, board in enumerate(boards):
        yield f"[profile.board-{number:03}]\njitter = 0.0\nup_bytes_per_s = 1e12\ndown_bytes_per_s = 1e12\n"
        if is_always:
            continue
        traces: dict[str, list[list[float]]] = {}
        for step in range(int(days * DAY_S / TRACE_STEP_S) + 1):
            facts = board.sense_at(step * TRACE_STEP_S)
            values = {
                "other_load": facts.other_load, "battery": facts.battery_fraction,
                "temperature_c": facts.temperature_c,
                "charging": None if facts.battery_status is None else float(facts.battery_status == "Charging"),
                "metered": None if facts.is_metered is None else float(facts.is_metered),
            }  # fmt: skip
            for name, value in values.items():
                trace = traces.setdefault(name, [])
                if value is not None and (not trace or trace[-1][1] != value):
                    trace.append([step * TRACE_STEP_S, float(value)])
        yield "".join(f"{name} = {trace}\n" for name, trace in traces.items() if trace)
        yield FILES[board.kind].replace("[conditions", f"[profile.board-{number:03}.conditions")


def _train(profiles: Path, num_boards: int, days: float, iteration_s: float, seed: int) -> RunResult:
    config: dict[str, Any] = {
        "run": {"task": "digits", "seconds": days * DAY_S, "seed": seed, "evaluate_every": 1_000_000},
        "strategy": {"iterations": 10},
        "devices": {"min": 1},
        "simulation": {"profiles": [f"board-{number:03}" for number in range(num_boards)],
                       "profile_file": str(profiles), "iteration_s": iteration_s,
                       "starts_at": datetime.fromtimestamp(START_S, UTC).isoformat()},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        return edgefl.simulate(config, devices=num_boards, scheme="dirichlet:0.5", root=root)


def _judge(
    board: Board, result: RunResult, name: str, *, days: float, iteration_s: float, faults: dict[str, float]
) -> None:
    """Adds what a board did outside, by its history alone: links take no time, so that all of a work is training.

    How long its very first iteration takes, no board can foresee.
    """
    used: dict[tuple[str, str], float] = {}
    is_first = True
    for row in (row for row in result.updates if row["device_id"] == name):
        ended_at = SIMULATION_EPOCH + days * DAY_S if row["ended_at"] is None else row["ended_at"]
        at_s, end_s = (round(moment - SIMULATION_EPOCH, 3) for moment in (row["dispatched_at"], ended_at))
        faults["trained_h"] += (end_s - at_s) / HOUR_S
        num_bytes = (row["bytes_down"] or 0) + (row["bytes_up"] or 0)
        for period in _list_periods(at_s):
            used["traffic", period] = used.get(("traffic", period), 0.0) + num_bytes
        while at_s < end_s:
            stop_s = min(end_s, at_s + iteration_s)
            for period in _list_periods(at_s):  # a day's end is counted to the day of the iteration's start
                used["processor", period] = used.get(("processor", period), 0.0) + stop_s - at_s
            _judge_iteration(board, at_s, stop_s, faults, is_first=is_first)
            at_s, is_first = stop_s, False
    conditions = parse_conditions(FILES[board.kind])
    for (kind, period), amount in used.items():
        limits = (conditions.day if len(period) == len("2026-10-12") else conditions.month).limits
        faults["budgets_passed"] += amount > limits.get(kind, np.inf) + iteration_s * (kind == "processor") * 0.001


def _judge_iteration(board: Board, at_s: float, stop_s: float, faults: dict[str, float], *, is_first: bool) -> None:
    edges = [at_s, *np.arange((at_s // MINUTE_S + 1) * MINUTE_S, stop_s, MINUTE_S)]
    first = next((edge for edge in edges if not board.may_train_at(edge)), None)
    if first is None:
        return
    is_by_clock = board.kind == OFFICE and (board.sense_at(first).other_load or 0) <= 0.3
    is_foreseeable = first == at_s or (is_by_clock and not is_first)
    faults["outside_s" if is_foreseeable else "overrun_s"] += stop_s - first


def _list_periods(at_s: float) -> tuple[str, str]:
    day = datetime.fromtimestamp(START_S + at_s, UTC)
    return f"{day:%Y-%m-%d}", f"{day:%Y-%m}"


def _format(value: float | str) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
