"""The search for the best learning rate: cells of the ISVR benchmark on disk and in worker processes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

from edgefl.strategies.peer_algorithms.gossip_node import ALGORITHMS
from harness.isvr_cell import SCORES, Cell, Outcome, of_nodes
from harness.isvr_run import run_cell

LADDER = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
FIRST = (0.3, 0.1)
"""The learning rates that a search begins with."""
ALGORITHM_SETTINGS = {name: algorithm.settings for name, algorithm in ALGORITHMS.items()}

Row = tuple[str, str, float | None]
"""Name, decay and k_eta."""


class Results:
    """Outcomes on disk, one JSON line each; a cell is never run twice.

    Args:
        folder: where the file lies.
        data: folder of the images.
        jobs: cells at a time.
        is_closed: nothing is run, only what is known is given.
    """

    def __init__(self, folder: Path, data: Path, *, jobs: int, is_closed: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._data, self._jobs, self._is_closed = folder / "cells.jsonl", data, jobs, is_closed
        self._known: dict[str, Outcome] = {}
        if self._file.exists():
            for line in self._file.read_text().splitlines():
                outcome = Outcome(**json.loads(line))
                self._known[Cell(**outcome.cell).key] = outcome

    def get(self, cell: Cell) -> Outcome | None:
        return self._known.get(cell.key)

    def known(self, cells: Iterable[Cell]) -> list[Outcome]:
        return [outcome for cell in cells if (outcome := self.get(cell)) is not None]

    def like(self, cell: Cell) -> list[Outcome]:
        """Returns what is known of a cell at any learning rate and decay."""
        outcomes = [outcome for outcome in self._known.values() if not outcome.failure]
        return [each for each in outcomes if _at_rate_of(cell, Cell(**each.cell)) == Cell(**each.cell)]

    def run(self, cells: Iterable[Cell]) -> None:
        """Runs those that are not known yet."""
        missing = [cell for cell in dict.fromkeys(cells) if self.get(cell) is None]
        if not missing or self._is_closed:
            return
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn")) as pool:
            running = [pool.submit(run_cell, cell, self._data) for cell in missing]
            for number, future in enumerate(as_completed(running), 1):
                outcome = future.result()
                self._add(outcome)
                print(f"[{number}/{len(missing)}] {_line(outcome)}", file=sys.stderr, flush=True)

    def _add(self, outcome: Outcome) -> None:
        self._known[Cell(**outcome.cell).key] = outcome
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def _at_rate_of(cell: Cell, other: Cell) -> Cell:
    return replace(cell, rate=other.rate, decay=other.decay, k_eta=other.k_eta)


def _line(outcome: Outcome) -> str:
    cell = Cell(**outcome.cell)
    named = (
        f"{cell.method} K={cell.period} {cell.exchange}, {cell.iterations} iterations, {cell.graph}, "
        f"{cell.task} {cell.cut}, {cell.model}"
    )
    extra = (
        f" K_eta {cell.k_eta}" * (cell.k_eta is not None)
        + f" {cell.codec}" * bool(cell.codec)
        + f" {cell.lost:.0%} lost" * bool(cell.lost)
    )
    gave = outcome.failure or f"{outcome.average:.4f}, nodes {of_nodes(outcome):.4f}"
    return f"{named}{extra}, lr {cell.rate:g} {cell.decay}, seed {cell.seed}: {gave} ({outcome.wall_s:.0f} s)"


def tune(
    cells: dict[str, Cell],
    decays: Sequence[str],
    results: Results,
    args: argparse.Namespace,
    *,
    starts_there: bool = False,
) -> dict[str, Cell]:
    """Returns each cell at the learning rate, the decay and, of ISVR, the k_eta with which it does best.

    For every decay and k_eta rates are tried up and down the ladder until the best lies between two worse ones.

    Args:
        cells: by a name of their own; the decay that they have means nothing.
        decays: to try.
        results: where runs are kept.
        args: `rates`, `decays` and `k_etas` narrow the search, `by` says what is best.
        starts_there: the search begins at each cell's own rate.
    """
    rows = [
        (name, decay, k_eta)
        for name, cell in cells.items()
        for decay in decays
        if args.decays is None or decay in args.decays
        for k_eta in (args.k_etas if "k_eta" in ALGORITHM_SETTINGS.get(cell.method, ()) else (None,))
    ]
    tried = {row: list(args.rates or ([cells[row[0]].rate] if starts_there else FIRST)) for row in rows}
    growing = dict(tried)
    while growing:
        results.run(_at(cells, row, rate) for row, rates in growing.items() for rate in rates)
        growing = {}
        for row, rates in tried.items():
            new = [] if args.rates else _next_rates(cells, row, rates, results, args.by)
            if new:
                growing[row] = new
                tried[row] = [*rates, *new]
    best = {}
    for name in cells:
        points = [_at(cells, row, rate) for row, rates in tried.items() if row[0] == name for rate in rates]
        known = [cell for cell in points if results.get(cell) is not None]
        if known:
            best[name] = max(known, key=lambda cell: _score(cell, results, args.by))
    return best


def _at(cells: dict[str, Cell], row: Row, rate: float) -> Cell:
    return replace(cells[row[0]], rate=rate, decay=row[1], k_eta=row[2])


def _score(cell: Cell, results: Results, by: str) -> float:
    outcome = results.get(cell)
    return -1.0 if outcome is None or outcome.failure else SCORES[by](outcome)


def _next_rates(cells: dict[str, Cell], row: Row, rates: Sequence[float], results: Results, by: str) -> list[float]:
    """Returns the neighbours on the ladder of the best rate so far that are still to be tried."""
    # Of rates that all diverge the lowest is the best.
    best = max(rates, key=lambda rate: (_score(_at(cells, row, rate), results, by), -rate))
    place = LADDER.index(best)
    around = LADDER[max(0, place - 1) : place + 2]
    return [rate for rate in around if rate not in rates]
