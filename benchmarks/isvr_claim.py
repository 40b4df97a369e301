"""What ECL-ISVR is worth where nodes hold different classes: against its rivals, each at its own best learning rate.

    python benchmarks/isvr_claim.py --data DIR [--seeds 5] [--jobs 2] [--out isvr-claim] [--known]

DIR holds `fashion-mnist/`, and `cifar-10/` for `--task`. Eight nodes share the 60,000 images, three of the ten
classes each; a logistic regression, batches of 100, L2 0.001, 4,800 local iterations of every node, all equally fast,
in virtual time. ISVR and AD-PSGD exchange at random, once in K = 8 iterations on average, the other methods in step.
Those that work with one iteration an exchange are there twice: with as many iterations (8 times the exchanges, 16
times with gradient tracking, which mixes models and trackers in turn) and with as many exchanges. `one node` holds
all images and does as many iterations with the same batch, so it sees an eighth of the examples that the eight nodes
see together.

Every method, ISVR too, and one node as well, takes the learning rate and the decay (over the run, by exchange rounds)
with which the first seed's nodes do best: a search up and down a ladder of rates for each decay, on the test images,
so that all are equally flattered. ISVR's second step size is tuned likewise: the same search for each of `--k-etas`.
Accuracies are on all 10,000 test images: of the mean of the nodes' models, of the nodes themselves on average, and of
the worst. Intervals are of 95 %, margins are paired by seed. Where runs are dear, `cnn`, `pairs` and `causes` search
with `--tune-seed` 0, which no row of a table has, and on the first `--tune-tests` of the test images.

Parts: `logistic` as above; `codecs` along the edges of ADMM-ISVR; `loss` of messages, each method tuned for it;
`cnn`, the small one of the image tasks, over `--cnn-rounds` and with `--cnn-batch`; `pairs`, in which both ends of an
edge exchange at once, DSGD's too, of `--models`, `--cuts` and `--pair-graphs`, over as many rounds; `causes`, what
PDMM and DSGD gain by each difference of the published runs from `cnn`, alone and together, at one rate; `paper`, the
published logistic rows (8 of 10 classes, learning rate 0.002, L2 0.01), where **plain local DSGD shows no drift**, so
that they say nothing for ISVR.

Cells in the `--out` folder are not run again, so a run that was stopped goes on where it was; `--known` runs nothing
and prints what is there, of what `--rates`, `--decays`, `--graphs`, `--parts` and `--variants` leave.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import options
from harness.class_shards import CUTS
from harness.isvr_cell import ONE_NODE, SCORES, Cell, Outcome, interval, of_average, of_nodes, of_worst
from harness.isvr_search import Results, tune

ROUNDS, PERIOD = 600, 8
GRAPHS = {"ring": "ring", "N1": "multiplex:2", "N2": "paper-random"}
DECAYS = ("constant", "linear", "inverse-sqrt")
CODECS = ("", "fp16", "int8", "qsgd:4:64", "qsgd:2:8", "lss:2")
LOSSES = (0.1, 0.3)
PAPER = {"N1": 8800, "N2": 5600}
"""Rounds of K local iterations by graph: with so many the one node is where the published one is."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of a table: a method, when it exchanges, and by what its iterations are fewer than the others'."""

    method: str
    period: int = PERIOD
    exchange: str = "sync"
    fewer: int = 1


VARIANTS = {
    "PDMM-ISVR": Variant(method="pdmm-isvr", exchange="poisson"),
    "ADMM-ISVR": Variant(method="admm-isvr", exchange="poisson"),
    "PDMM-ISVR in step": Variant(method="pdmm-isvr"),
    "PDMM-ISVR in pairs": Variant(method="pdmm-isvr", exchange="pair"),
    "ADMM-ISVR in pairs": Variant(method="admm-isvr", exchange="pair"),
    "DSGD": Variant(method="dsgd"),
    "DSGD in pairs": Variant(method="dsgd", exchange="pair"),
    "AD-PSGD": Variant(method="ad-psgd", exchange="poisson"),
    "K-GT": Variant(method="k-gt"),
    "K-GT, K = 16": Variant(method="k-gt", period=2 * PERIOD),
    "D-PSGD, as many exchanges": Variant(method="dsgd", period=1, fewer=8),
    "D2, as many exchanges": Variant(method="d2", period=1, fewer=8),
    "gradient tracking, as many": Variant(method="gradient-tracking", period=1, fewer=16),
    "D-PSGD": Variant(method="dsgd", period=1),
    "D2": Variant(method="d2", period=1),
    "gradient tracking": Variant(method="gradient-tracking", period=1),
    "one node": Variant(method=ONE_NODE),
}
SAME_RATE = {"PDMM-ISVR in step": "PDMM-ISVR"}
"""Tuned once for both."""
ISVR = ("PDMM-ISVR", "ADMM-ISVR")
AS_MANY = ("DSGD", "AD-PSGD", "K-GT", "K-GT, K = 16", "D-PSGD, as many exchanges", "D2, as many exchanges",
           "gradient tracking, as many")  # fmt: skip
MORE = ("D-PSGD", "D2", "gradient tracking")
UNTUNED = ("PDMM-ISVR", "ADMM-ISVR", "DSGD", "one node")
LOSSY = ("PDMM-ISVR", "ADMM-ISVR", "DSGD", "AD-PSGD", "K-GT", "D-PSGD", "D2", "gradient tracking")
CNN = ("PDMM-ISVR", "ADMM-ISVR", "DSGD", "K-GT", "gradient tracking", "one node")
PAIRS = ("PDMM-ISVR in pairs", "ADMM-ISVR in pairs", "DSGD in pairs", "PDMM-ISVR", "DSGD", "one node")
PUBLISHED = ("PDMM-ISVR", "ADMM-ISVR", "DSGD", "one node")


CAUSES: dict[str, dict[str, Any]] = {
    "in pairs": {"exchange": "pair"},
    "K_eta of 2": {"k_eta": 2.0},
    "8 of 10 classes": {"cut": "8 of 10"},
    "a constant rate": {"decay": "constant"},
}
"""What the published runs have, and those of `cnn` have not; by K_eta = 2 stands the one that does best here."""


def cell_of(name: str, graph: str, *, rounds: int = ROUNDS, seed: int = 1) -> Cell:
    """Returns a variant's cell at the untuned learning rate; what one node does has nothing to do with the graph."""
    variant = VARIANTS[name]
    return Cell(
        method=variant.method,
        graph="ring" if variant.method == ONE_NODE else graph,
        exchange=variant.exchange,
        period=variant.period,
        iterations=rounds * PERIOD // variant.fewer,
        rounds=rounds,
        rate=0.1,
        decay="constant",
        seed=seed,
    )


def of_seeds(cell: Cell, num_seeds: int) -> list[Cell]:
    return [replace(cell, seed=seed) for seed in range(1, num_seeds + 1)]


def logistic(results: Results, args: argparse.Namespace) -> None:
    """Tunes, runs all seeds, and prints a table and the margins for each graph."""
    for title, graph in args.graphs.items():
        tuned = tuned_cells(args.variants, graph, results, args)
        columns = {name: of_seeds(cell, args.seeds) for name, cell in tuned.items()}
        results.run(by_seed(columns.values()))
        heading = f"logistic regression on {title}, {args.rounds} rounds; best by the first seed's {args.by}"
        print_table(heading, columns, results)
        print_margins(columns, results, args.by)
        plain = {
            name: of_seeds(cell_of(name, graph, rounds=args.rounds), args.seeds)
            for name in UNTUNED
            if name in args.variants
        }
        results.run(by_seed(plain.values()))
        others = {name: [cell_of(name, graph, rounds=args.rounds)] for name in args.variants if name not in UNTUNED}
        every = {name: (plain | others)[name] for name in args.variants}
        print_table(f"the same on {title}, untuned: learning rate 0.1, constant", every, results)
        searched = {name: cell_of(name, graph, rounds=args.rounds) for name in args.variants if name not in SAME_RATE}
        _draw(title, columns, plain, searched, results, args.out)


def tuned_cells(names: Sequence[str], graph: str, results: Results, args: argparse.Namespace) -> dict[str, Cell]:
    wanted = list(dict.fromkeys(SAME_RATE.get(name, name) for name in names))
    best = tune({name: cell_of(name, graph, rounds=args.rounds) for name in wanted}, DECAYS, results, args)
    found = {}
    for name in names:
        source = best.get(SAME_RATE.get(name, name))
        if source is not None:
            tuned = {"rate": source.rate, "decay": source.decay, "k_eta": source.k_eta}
            found[name] = replace(cell_of(name, graph, rounds=args.rounds), **tuned)
    return found


def codecs(results: Results, args: argparse.Namespace) -> None:
    """ADMM-ISVR at its best learning rate on the ring, with every codec."""
    best = tuned_cells(["ADMM-ISVR"], "ring", results, args)
    if not best:
        return
    columns = {
        codec or "none (dense)": of_seeds(replace(best["ADMM-ISVR"], codec=codec), args.seeds) for codec in CODECS
    }
    results.run(by_seed(columns.values()))
    print_table("ADMM-ISVR on ring, codecs along the edges", columns, results)
    known = {name: found for name, cells in columns.items() if (found := results.known(cells))}
    if known:
        from harness.isvr_figures import draw_codecs  # noqa: PLC0415 matplotlib is slow to import

        _told(draw_codecs(known, args.out / "codecs.png"))


def losses(results: Results, args: argparse.Namespace) -> None:
    """The ring, some of the messages lost; learning rates are searched anew, from the best without losses."""
    tuned = tuned_cells([name for name in LOSSY if name in args.variants], "ring", results, args)
    best = {(name, 0.0): cell for name, cell in tuned.items()}
    for lost in LOSSES:
        cells = {name: replace(cell, lost=lost) for name, cell in tuned.items()}
        found = tune(cells, ("linear",), results, args, starts_there=True)
        best |= {(name, lost): cell for name, cell in found.items()}
    columns = {row: of_seeds(best[row], args.seeds) for row in sorted(best, key=lambda row: LOSSY.index(row[0]))}
    results.run(by_seed(columns.values()))
    named = {f"{name}, {lost:.0%} lost": cells for (name, lost), cells in columns.items()}
    print_table("ring, messages lost", named, results)
    known = {row: found for row, cells in columns.items() if (found := results.known(cells))}
    if known:
        from harness.isvr_figures import draw_losses  # noqa: PLC0415 matplotlib is slow to import

        _told(draw_losses(known, args.out / "losses.png"))


def run_tuned(
    names: Sequence[str], results: Results, args: argparse.Namespace, *, graph: str = "ring", **changes: Any
) -> tuple[dict[str, list[Cell]], dict[str, Cell]]:
    """Runs variants for `--cnn-rounds`; returns the best cells by seed, and those that were searched."""
    cells = {
        name: replace(long_cell(name, args, graph=graph), seed=args.tune_seed, num_tests=args.tune_tests, **changes)
        for name in names
        if name in args.variants
    }
    best = tune(cells, ("constant", "linear"), results, args)
    columns = {name: of_seeds(replace(cell, num_tests=None), args.long_seeds) for name, cell in best.items()}
    results.run(by_seed(columns.values()))
    return columns, cells


def long_cell(name: str, args: argparse.Namespace, *, graph: str = "ring") -> Cell:
    cell = cell_of(name, graph, rounds=args.cnn_rounds)
    return replace(cell, task=args.task, batch_size=args.cnn_batch, points=args.cnn_points)


def cnn(results: Results, args: argparse.Namespace) -> None:
    """The small CNN, of which an iteration takes ten to thirty times as long as the logistic regression's."""
    columns, cells = run_tuned(CNN, results, args, model="cnn-small")
    print_table(f"small CNN on ring, {args.cnn_rounds} rounds, batches of {args.cnn_batch}", columns, results)
    print_margins(columns, results, args.by)
    _draw("ring, small CNN", columns, {}, cells, results, args.out)


def pairs(results: Results, args: argparse.Namespace) -> None:
    for model in args.models:
        for cut in args.cuts:
            for title in args.pair_graphs:
                columns, cells = run_tuned(PAIRS, results, args, graph=GRAPHS[title], model=model, cut=cut)
                heading = f"{model} on {title}, {cut} classes of {args.task}"
                print_table(f"{heading}, {args.cnn_rounds} rounds, batches of {args.cnn_batch}", columns, results)
                for by, score in SCORES.items():
                    gaps = _gaps(columns, "PDMM-ISVR in pairs", "DSGD in pairs", results, score)
                    if gaps:
                        print(f"PDMM-ISVR in pairs, {by}, points above DSGD in pairs: {_percent(gaps)}")
                _draw(heading, columns, {}, cells, results, args.out)


def causes(results: Results, args: argparse.Namespace) -> None:
    for model in args.models:
        columns: dict[str, list[Cell]] = {}
        for name in ("PDMM-ISVR", "DSGD"):
            plain = replace(long_cell(name, args), model=model, decay="linear", rate=(args.rates or [0.1])[0])
            own = {title: change for title, change in CAUSES.items() if name in ISVR or "k_eta" not in change}
            rows = {"": {}, **own, "all of them": {key: value for one in own.values() for key, value in one.items()}}
            for title, change in rows.items():
                columns[f"{name} {title}".strip()] = of_seeds(replace(plain, **change), args.long_seeds)
        results.run(by_seed(columns.values()))
        print_table(
            f"{model} on ring, 3 of 10 classes of {args.task}, {args.cnn_rounds} rounds, each cause", columns, results
        )


def paper(results: Results, args: argparse.Namespace) -> None:
    for title, rounds in PAPER.items():
        columns = {}
        for name in PUBLISHED:
            if name in args.variants:
                cell = cell_of(name, GRAPHS[title], rounds=rounds)
                cell = replace(cell, cut="8 of 10", rate=0.002, weight_decay=0.01, points=10)
                columns[name] = of_seeds(cell, args.long_seeds)
        results.run(by_seed(columns.values()))
        print_table(
            f"the published logistic rows, {title}, {rounds} rounds (DSGD does not drift here)", columns, results
        )


PARTS = {
    "logistic": logistic,
    "codecs": codecs,
    "loss": losses,
    "cnn": cnn,
    "pairs": pairs,
    "causes": causes,
    "paper": paper,
}


def by_seed(columns: Sequence[Sequence[Cell]]) -> list[Cell]:
    """Returns the cells seed by seed, so that a run that is stopped has all variants of the seeds it has."""
    return sorted((cell for column in columns for cell in column), key=lambda cell: cell.seed)


def print_table(heading: str, columns: dict[str, list[Cell]], results: Results) -> None:
    form = "{:29} {:>6} {:>6} {:>12} {:>5} {:>15} {:>15} {:>15} {:>7} {:>9} {:>8}"
    print(
        f"\n{heading}\naccuracies in %, of the mean model, of the nodes, of the worst; on each edge exchanges and MB"
    )
    print(
        form.format(
            "variant", "lr", "K_eta", "decay", "seeds", "mean model", "nodes", "worst", "loss", "exchanges", "MB"
        )
    )
    for name, cells in columns.items():
        outcomes = results.known(cells)
        if not outcomes:
            continue
        lost = [outcome.loss for outcome in outcomes if outcome.loss is not None]
        print(
            form.format(
                name,
                f"{cells[0].rate:g}",
                "-" if cells[0].k_eta is None else f"{cells[0].k_eta:g}",
                cells[0].decay,
                len(outcomes),
                _percent([of_average(outcome) for outcome in outcomes]),
                _percent([of_nodes(outcome) for outcome in outcomes]),
                _percent([of_worst(outcome) for outcome in outcomes]),
                f"{statistics.fmean(lost):.4f}" if lost else "-",
                f"{statistics.fmean(outcome.exchanges_per_edge for outcome in outcomes):.0f}",
                f"{statistics.fmean(outcome.bytes_per_edge for outcome in outcomes) / 1e6:.4g}",
            )
        )
        num_diverged = sum(bool(outcome.failure) for outcome in outcomes)
        if 0 < num_diverged < len(outcomes):
            ended = [outcome for outcome in outcomes if not outcome.failure]
            print(
                f"    {num_diverged} of {len(outcomes)} seeds diverged; the others: "
                f"mean model {_percent([of_average(outcome) for outcome in ended])}, "
                f"nodes {_percent([of_nodes(outcome) for outcome in ended])}, "
                f"worst {_percent([of_worst(outcome) for outcome in ended])}"
            )


def print_margins(columns: dict[str, list[Cell]], results: Results, by: str) -> None:
    """Prints by how much ISVR is better than each rival, and which rival is the best."""
    score = SCORES[by]
    for own in ISVR:
        for title, rivals in (("as many exchanges", AS_MANY), ("more exchanges", MORE)):
            gaps = {name: _gaps(columns, own, name, results, score) for name in rivals}
            known = {name: gap for name, gap in gaps.items() if gap}
            if known:
                print(f"{own}, {by}, points above rivals with {title}, the best of them first:")
            for name, gap in sorted(known.items(), key=lambda pair: statistics.fmean(pair[1])):
                print(f"    {name:29} {_percent(gap)}")


def _gaps(
    columns: dict[str, list[Cell]], own: str, rival: str, results: Results, score: Callable[[Outcome], float]
) -> list[float]:
    pairs = [
        (results.get(ours), results.get(theirs))
        for ours, theirs in zip(columns.get(own, []), columns.get(rival, []), strict=False)
    ]
    return [score(ours) - score(theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


def _percent(values: Sequence[float]) -> str:
    margin = interval(values)
    return f"{100 * statistics.fmean(values):.2f}" + (f" ± {100 * margin:.2f}" if margin is not None else "")


def _draw(
    title: str,
    columns: dict[str, list[Cell]],
    plain: dict[str, list[Cell]],
    searched: dict[str, Cell],
    results: Results,
    folder: Path,
) -> None:
    from harness.isvr_figures import draw_accuracies, draw_curves, draw_rates  # noqa: PLC0415 matplotlib is slow

    tuned = {name: found for name, cells in columns.items() if (found := results.known(cells))}
    untuned = {name: found for name, cells in plain.items() if (found := results.known(cells))}
    if not tuned:
        return
    ending = f"{title.replace(', ', '-').replace(' ', '-')}.png"
    _told(draw_curves({name: found[0] for name, found in tuned.items()}, title, folder / f"curves-{ending}"))
    _told(draw_accuracies(tuned, untuned, title, folder / f"accuracies-{ending}"))
    rates = {name: results.like(cell) for name, cell in searched.items() if name in tuned}
    _told(draw_rates(rates, title, folder / f"rates-{ending}"))


def _told(path: Path) -> None:
    print(f"figure: {path}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds fashion-mnist/")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--long-seeds", type=int, default=1, help="likewise, of cnn, pairs, causes and paper")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the logistic regression [%(default)s]")
    parser.add_argument("--cnn-rounds", type=int, default=200)
    parser.add_argument("--cnn-batch", type=int, default=32)
    parser.add_argument("--cnn-points", type=int, default=10, help="of a curve of cnn, pairs, causes [%(default)s]")
    parser.add_argument("--task", choices=("fashion-mnist", "cifar-10"), default="fashion-mnist", help="of the same")
    parser.add_argument("--tune-seed", type=int, default=1, help="that cnn and pairs search with [%(default)s]")
    parser.add_argument("--tune-tests", type=int, help="test images that cnn and pairs search with [all]")
    parser.add_argument("--by", choices=list(SCORES), default="nodes", help="whose accuracy rates are tuned for")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=["ring", "N2"], help="of logistic")
    parser.add_argument("--pair-graphs", nargs="+", choices=list(GRAPHS), default=["ring"], help="of pairs")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rates", type=float, nargs="+", help="try these learning rates alone")
    parser.add_argument("--decays", choices=DECAYS, nargs="+", help="try these decays alone")
    parser.add_argument("--k-etas", type=float, nargs="+", default=[8.0, 4.0, 2.0], help="of ISVR [%(default)s]")
    parser.add_argument("--models", nargs="+", default=["logistic", "2nn"], help="of pairs, causes [%(default)s]")
    parser.add_argument("--cuts", choices=list(CUTS), nargs="+", default=list(CUTS), help="of pairs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("isvr-claim"))
    parser.add_argument("--known", action="store_true", help="run nothing, print what is known")
    args = options.parse(
        parser,
        seeds=1,
        parts=["logistic", "pairs", "causes"],
        graphs=["ring"],
        models=["logistic"],
        cuts=["8 of 10"],
        cnn_rounds=4,
        tune_seed=0,
        tune_tests=500,
        variants=["PDMM-ISVR", "PDMM-ISVR in pairs", "DSGD in pairs", "one node"],
        rates=[0.1],
        k_etas=[8.0],
        decays=["constant"],
        rounds=8,
    )
    if args.data is None:
        parser.error("say where the data is: --data DIR, or EDGEFL_DATA")
    os.environ["OMP_NUM_THREADS"] = "1"
    args.graphs = {name: GRAPHS[name] for name in args.graphs}
    results = Results(args.out, Path(args.data).resolve(), jobs=args.jobs, is_closed=args.known)
    for part in args.parts:
        PARTS[part](results, args)


if __name__ == "__main__":
    main()
