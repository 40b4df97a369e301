"""What a round costs besides training: edgefl and stock Flower in turn, the same no-op app, the same machine.

    python benchmarks/round_overhead.py [--devices 2 ...] [--awake] [--links] [--train-s S] [--turns 3] [--json]
    python benchmarks/round_overhead.py --all

Both send a float32 model to every device, get it (edgefl: a displacement of the same size) back, and average. A
round counts from one closing to the next. edgefl runs as it is delivered: TLS, node authentication, MQTT, journal
with fsync, SQLite. Stock Flower runs without TLS and authentication and keeps its state in memory.

`--awake` measures stock Flower also with its two polls of 3 s shortened to 10 ms: what remains is its work.
`--links` measures both with two devices, each behind a link of 20, 50 and 100 ms (one way) and 5 and 20 Mbit/s.
`--train-s` runs a round in which two devices train so long, on either side, and tells which share is overhead.
`--all` is all of it, with 1, 2 and 10 devices, and 60 s of training: one turn takes some 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness import options
from harness.links import Link
from harness.process_trees import adopt_orphans, end_descendants
from harness.round_report import AWAKE, EDGEFL, STOCK, Turn, as_json, as_summary, as_table, heading, machine, notes
from harness.round_shares import Floor, links_table, over_link, training_table
from harness.round_sides import Plan, measure_edgefl, measure_stock
from harness.stock_flower import StockFlowerError

from edgefl.core.errors import EdgeflError

MODEL_BYTES = 1_000_000
ROUNDS, STOCK_ROUNDS = 100, 4
LINK_ROUNDS, STOCK_LINK_ROUNDS = 8, 3
ALL_DEVICES = (1, 2, 10)
TRAIN_S = 60.0
NUM_LINKED = 2
"""Devices behind links, and in the round with training."""
LINKS = tuple(
    Link(delay_s=delay_ms / 1e3, bits_per_s=megabits * 1e6) for megabits in (5, 20) for delay_ms in (20, 50, 100)
)
Compared = dict[int, dict[str, list[Turn]]]


def main() -> int:
    arguments = _parse()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    facts = {
        **machine(),
        "size_bytes": arguments.model_bytes,
        "num_rounds": arguments.rounds,
        "num_stock_rounds": arguments.stock_rounds,
        "num_turns": arguments.turns,
    }
    try:
        compared = _compare(arguments)
        floors = [_over_link(arguments, link) for link in LINKS] if arguments.links else []
        training = _training(arguments) if arguments.train_s else None
    except (EdgeflError, StockFlowerError, ValueError) as error:
        _say(f"not measured: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    finally:
        end_descendants()
    print(_json(facts, compared, floors, training) if arguments.json else _tables(facts, compared, floors, training))
    return 0


def _compare(arguments: argparse.Namespace) -> Compared:
    """Measures all sides in turn, so that what else the machine does is spread over them."""
    sides = [EDGEFL, STOCK, *([AWAKE] if arguments.awake else [])]
    compared: Compared = {num_devices: {side: [] for side in sides} for num_devices in arguments.devices}
    for number in range(1, arguments.turns + 1):
        for num_devices, turns in compared.items():
            for side in sides:
                rounds = arguments.rounds if side == EDGEFL else arguments.stock_rounds
                _say(f"turn {number} of {arguments.turns}, {num_devices} devices: {side}, {rounds} rounds")
                plan = _plan(arguments, num_devices, rounds, is_awake=side == AWAKE)
                turns[side].append(measure_edgefl(plan) if side == EDGEFL else measure_stock(plan))
    return compared


def _over_link(arguments: argparse.Namespace, link: Link) -> Floor:
    _say(f"over a link of {link.title}")
    plan = replace(_plan(arguments, NUM_LINKED, LINK_ROUNDS), link=link)
    turns = {EDGEFL: measure_edgefl(plan), STOCK: measure_stock(replace(plan, num_rounds=STOCK_LINK_ROUNDS))}
    return over_link(link, arguments.model_bytes, turns)


def _training(arguments: argparse.Namespace) -> Floor:
    _say(f"rounds with {arguments.train_s:g} s of training, two on either side")
    plan = replace(_plan(arguments, NUM_LINKED, 2), train_s=arguments.train_s)
    turns = {EDGEFL: measure_edgefl(plan), STOCK: measure_stock(plan)}
    return Floor(title=f"{arguments.train_s:g} s of training", least_s=arguments.train_s, turns=turns)


def _plan(arguments: argparse.Namespace, num_devices: int, num_rounds: int, *, is_awake: bool = False) -> Plan:
    return Plan(
        num_devices=num_devices,
        num_rounds=num_rounds,
        size_bytes=arguments.model_bytes,
        broker=arguments.broker,
        is_awake=is_awake,
    )


def _json(facts: dict[str, Any], compared: Compared, floors: Sequence[Floor], training: Floor | None) -> str:
    shown = {
        "v": 2,
        "facts": facts,
        "devices": {
            str(num_devices): as_json(turns, {"num_devices": num_devices}) for num_devices, turns in compared.items()
        },
        "links": [floor.as_json() for floor in floors],
        "training": None if training is None else training.as_json(),
    }
    return json.dumps(shown)


def _tables(facts: dict[str, Any], compared: Compared, floors: Sequence[Floor], training: Floor | None) -> str:
    parts = [heading(facts), as_summary(compared)]
    parts += [as_table(turns, num_devices) for num_devices, turns in compared.items()]
    if floors:
        parts.append(links_table(floors, NUM_LINKED))
    if training is not None:
        parts.append(training_table(training, NUM_LINKED))
    return "\n\n".join([*parts, notes(is_awake=any(AWAKE in turns for turns in compared.values()))])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rounds", type=_at_least(3), default=ROUNDS, help="rounds of edgefl in a turn [%(default)s]")
    add("--stock-rounds", type=_at_least(3), default=STOCK_ROUNDS, help="of stock Flower [%(default)s]")
    add("--devices", type=_at_least(1), nargs="+", default=[2], help="device processes, one table for each [2]")
    add("--turns", type=_at_least(1), default=3, help="how often all sides are measured [%(default)s]")
    add("--awake", action="store_true", help="stock Flower also with its two polls at 10 ms")
    add("--links", action="store_true", help=f"both also over {len(LINKS)} links, {NUM_LINKED} devices")
    add("--train-s", type=_positive, help="both also with so many seconds of training in a round")
    add("--all", action="store_true", help=f"1, 2 and 10 devices, --awake, --links and --train-s {TRAIN_S:g}")
    add("--model-bytes", type=_at_least(4), default=MODEL_BYTES, help="float32 model [%(default)s]")
    add("--broker", choices=("auto", "mosquitto", "embedded"), default="auto", help="of edgefl")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = options.parse(parser, rounds=40, stock_rounds=3, devices=[1], turns=1)
    if arguments.all:
        arguments.devices, arguments.awake, arguments.links = list(ALL_DEVICES), True, True
        arguments.train_s = arguments.train_s or TRAIN_S
    return arguments


class _at_least:  # noqa: N801 reads as a type of argparse, and its repr names the rule
    def __init__(self, least: int) -> None:
        self._least = least

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or int(text) < self._least:
            raise argparse.ArgumentTypeError(f"must be a whole number of {self._least} or more, got {text!r}")
        return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return number


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
