"""Advice against live fleets: are its seconds and bytes right, and is what it recommends the best of those tried?

    python benchmarks/advise.py [--fleets slow-board,slow-link,slow-links] [--accuracy 0.85] [--tried 3] [--json]

Each fleet is device processes on this machine: iterations slowed by their own seconds, and each device behind a
proxy with a rate and a delay. Two short runs, one without a codec and one with `int8`, measure the boards. An advice
is asked for by what the history says of them; then the run file as it is and the best options of different
strategies are trained live until the accuracy is reached. Times and bytes are those of the closed rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import options
from harness.links import Link, LinkedFleet, device_host, linked
from harness.round_report import machine
from harness.throttled_task import NAME

from edgefl.client.advice import read_errors, read_measured_boards
from edgefl.client.sources import DirectorySource
from edgefl.core import extensions
from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import EdgeflError
from edgefl.simulation.advice.advice import Advice, Option, Request, advise, describe_fleet
from edgefl.simulation.local_fleet import LOOPBACK, LocalDeviceSpec, partition_devices

HARNESS = Path(__file__).parent / "harness"
sys.path.insert(0, str(HARNESS))  # the task of the devices is a module there
FAST_LINK = Link(delay_s=0.005, bits_per_s=20e6)
PROBE_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Seconds that an iteration takes longer, and the link."""

    delay_s: float
    link: Link = FAST_LINK


FLEETS: Mapping[str, Sequence[Board]] = {
    "slow-board": [Board(delay_s=seconds) for seconds in (0.02, 0.02, 0.03, 0.15)],
    "slow-link": [
        *(Board(delay_s=seconds) for seconds in (0.02, 0.03, 0.04)),
        Board(delay_s=0.03, link=Link(delay_s=0.03, bits_per_s=0.15e6)),
    ],
    "slow-links": [
        Board(delay_s=seconds, link=Link(delay_s=0.02, bits_per_s=rate))
        for seconds, rate in ((0.02, 0.3e6), (0.02, 0.2e6), (0.05, 0.3e6), (0.1, 1e6))
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One option live: predicted and measured seconds and bytes; `is_reached` says whether the accuracy was."""

    option: str
    predicted_s: float
    seconds: float
    predicted_bytes: float
    bytes: float
    is_reached: bool

    @property
    def errors(self) -> tuple[float, float]:
        return self.seconds / self.predicted_s - 1, self.bytes / self.predicted_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fleet: the seconds of its advice, and what was tried, the recommended first."""

    fleet: str
    advice_s: float
    num_simulated: int
    tried: Sequence[Tried]


def main() -> int:
    arguments = _parse()
    root = Path(arguments.out or tempfile.mkdtemp(prefix="edgefl-advise-"))
    try:
        outcomes = [_measure(name, root / name, arguments) for name in arguments.fleets.split(",")]
    except EdgeflError as error:
        _say(f"not measured: {error}")
        return 1
    if arguments.json:
        print(json.dumps({"v": 1, "facts": machine(), "fleets": [asdict(outcome) for outcome in outcomes]}))
    else:
        print(_table(outcomes, arguments.accuracy))
    return 0


def _measure(name: str, root: Path, arguments: argparse.Namespace) -> Outcome:
    with _open_fleet(FLEETS[name], root, arguments.seed) as fleet:
        source = DirectorySource(fleet.directory)
        _say(f"{name}: two short runs measure the boards")
        for codec in ("dense", "int8"):
            config = _make_config(NAME, arguments, codec=codec, rounds=PROBE_ROUNDS)
            fleet.wait_for_run(fleet.submit(config))
        with extensions.allow_modules([NAME.partition(":")[0]]):
            boards = read_measured_boards(source, NAME)
        _say(f"{name}: advice for {', '.join(board.name for board in boards)}")
        started_s = time.perf_counter()
        config = _make_config("digits", arguments, rounds=arguments.rounds)
        described = describe_fleet(config, root / "simulations", measured=boards, scheme="iid")
        request = Request(
            goal=f"accuracy >= {arguments.accuracy:g}", seconds=arguments.seconds, num_jobs=os.cpu_count() or 1
        )
        advice = advise(described, request, root / "simulations", clock=time.perf_counter)
        advice_s = time.perf_counter() - started_s
        run_ids = [_submit(fleet, advice, option, arguments) for option in _select(advice, arguments.tried)]
        statuses = [fleet.make_client().get(f"/edgefl/v1/runs/{run_id}") for run_id in run_ids]
        rows = {row["run_id"]: row for row in read_errors(source)}
        tried = [
            Tried(
                option=run["name"],
                predicted_s=row["predicted_s"],
                seconds=row["seconds"],
                predicted_bytes=row["predicted_bytes"],
                bytes=row["bytes"],
                is_reached=run["reason"].startswith("accuracy reached"),
            )
            for run in statuses
            if (row := rows.get(run["run_id"])) is not None
        ]
    return Outcome(fleet=name, advice_s=advice_s, num_simulated=len(advice.options), tried=tried)


def _select(advice: Advice, count: int) -> list[Option]:
    """Returns the recommended option, the run file as it is, and the best of other strategies."""
    chosen: dict[str, Option] = {}
    for option in advice.options:
        if option.is_reached:
            chosen.setdefault(option.candidate.strategy, option)
    written = [advice.written] if advice.written is not None and advice.written.is_reached else []
    best = [*chosen.values()][: max(1, count - len(written))]
    return [*best, *(option for option in written if option not in best)]


def _submit(fleet: LinkedFleet, advice: Advice, option: Option, arguments: argparse.Namespace) -> str:
    """Runs an option live, with its prediction in the run file, and returns the run's id."""
    alone = replace(advice, options=[replace(option, is_reached=True, is_within=True)])
    config = alone.make_run(_make_config(NAME, arguments, rounds=arguments.rounds))
    name = str(option.candidate) + (" (as it is)" if option.candidate.is_written else "")
    allowed = "".join(character if character.isalnum() or character in " .:+#=()-" else " " for character in name)
    _say(f"{allowed}, live; predicted {option.seconds:.1f} s")
    run_id = fleet.submit(replace(config, run=replace(config.run, name=allowed)))
    fleet.wait_for_run(run_id)
    return run_id


def _make_config(task: str, arguments: argparse.Namespace, *, rounds: int, codec: str = "dense") -> RunConfig:
    return parse_run(
        {
            "run": {"task": task, "rounds": rounds, "seed": arguments.seed, "evaluate_on": "coordinator"},
            "strategy": {"name": "fedavg", "learning_rate": 0.1, "batch_size": 32, "epochs": 1.0},
            "compression": {"up": codec},
            "devices": {"min": len(FLEETS["slow-board"])},
            "simulation": {"jitter": 0.0},
        }
    )


@contextmanager
def _open_fleet(boards: Sequence[Board], root: Path, seed: int) -> Iterator[LinkedFleet]:
    """Yields a started fleet of slowed devices, each behind its link."""
    partitions, test_shards = partition_devices("digits", "iid", len(boards), root / "shards", None, seed)
    devices = []
    for number, (part, board) in enumerate(zip(partitions, boards, strict=True), 1):
        shard = part.shards["digits"]
        Path(shard).with_suffix(".delay").write_text(str(board.delay_s))
        devices.append(LocalDeviceSpec(name=part.name, shards={NAME: shard}, host=device_host(number)))
    paths = [str(HARNESS), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    fleet = LinkedFleet(
        root=root / "fleet",
        devices=devices,
        hosts=[device.host for device in devices],
        test_shards={NAME: test_shards["digits"]},
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "EDGEFL_ALLOW_MODULES": NAME.partition(":")[0],
        },
    )
    with ExitStack() as stack:
        for device, board in zip(devices, boards, strict=True):
            ends = [((device.host, port), (LOOPBACK, port)) for port in (fleet.port, fleet.broker_port)]
            stack.enter_context(linked(board.link, ends))
        yield stack.enter_context(fleet)


def _table(outcomes: Sequence[Outcome], accuracy: float) -> str:
    lines = [f"digits until accuracy {accuracy:g}; an error of 10 % is a run that took a tenth more than predicted"]
    head = f"{'':52}{'predicted':>11}{'live':>9}{'error':>9}{'predicted':>12}{'live':>10}{'error':>9}"
    for outcome in outcomes:
        lines += [f"{outcome.fleet}: advice in {outcome.advice_s:.0f} s, {outcome.num_simulated} simulated", head]
        for one in outcome.tried:
            late, more = one.errors
            lines.append(
                f"  {one.option:50.50}{one.predicted_s:10.1f}s{one.seconds:8.1f}s{late:+9.1%}"
                f"{one.predicted_bytes / 1e6:9.3f} MB{one.bytes / 1e6:7.3f} MB{more:+9.1%}"
                + ("" if one.is_reached else "  not reached")
            )
    errors = [one.errors for outcome in outcomes for one in outcome.tried]
    if errors:
        seconds, sizes = ([abs(error) for error in column] for column in zip(*errors, strict=True))
        lines.append(
            f"errors: seconds {statistics.median(seconds):.1%} (median), {max(seconds):.1%} (worst); bytes "
            f"{statistics.median(sizes):.1%}, {max(sizes):.1%}"
        )
        within = sum(
            outcome.tried[0].seconds <= 1.1 * min(one.seconds for one in outcome.tried if one.is_reached)
            for outcome in outcomes
            if any(one.is_reached for one in outcome.tried)
        )
        lines.append(f"recommended within 10 % of the best tried: {within} of {len(outcomes)} fleets")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fleets", default=",".join(FLEETS), help="of " + ", ".join(FLEETS) + " [all]")
    parser.add_argument("--accuracy", type=float, default=0.85, help="when a run is good [%(default)s]")
    parser.add_argument("--tried", type=int, default=3, help="options that run live, at most [%(default)s]")
    parser.add_argument("--rounds", type=int, default=60, help="of the run file as it is, at most [%(default)s]")
    parser.add_argument("--seconds", type=float, default=60.0, help="that an advice may take [%(default)s]")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", help="folder for all of it [a temporary one]")
    parser.add_argument("--json", action="store_true")
    return options.parse(parser, fleets="slow-board", accuracy=0.3, tried=1, rounds=2, seconds=60.0)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
