"""Which of Flower's own examples run on the boards of a fleet, their code unchanged.

    git clone --depth 1 https://github.com/adap/flower
    python benchmarks/flower_examples.py --flower flower --data DIR [--only quickstart-pytorch ...] [--json]

Each is packed and run as `edgefl run flower-app` does it, on its own fleet of three confined board processes that
stay warm. What an example downloads is read from local files instead (`harness/flower_datasets.py`), by a
`datasets.load_dataset` that reads them; its packages must be installed beside edgefl. `--data` holds `cifar-10/`,
`mnist/` and `fashion-mnist/`. An example runs if it finished and no board failed a message.

Without `--flower` the no-op app of `round_overhead.py` is run alone. With `--compare` it is run on stock Flower, too,
and both are measured as there: a round, and the memory of a board with all of its processes. With `--flower` that is
done with the first example of `--only` (`quickstart-pytorch`), once with each of `--seeds`: the whole run from its
submission, the seconds of its strategy and the accuracy of each round, as its ServerApp logs them; the first is that
of the weights that both begin with. torch is seeded with the run's seed in all processes of both. `--run-config`
gives the example other values, the same on both sides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import options
from harness.process_trees import Meter, adopt_orphans, end_descendants
from harness.stock_flower import APP, StockFleet, StockFlowerError, scripts

from edgefl.core.config import RunConfig, RunSection
from edgefl.core.errors import EdgeflError
from edgefl.flower.app_folder import AppFolder, read_app
from edgefl.flower.app_job import get_job_name, make_app_run
from edgefl.flower.app_pack import write_app_wheel
from edgefl.simulation.local_fleet import COORDINATOR, LocalDeviceSpec, LocalFleet

HARNESS = Path(__file__).parent / "harness"
NUM_IMAGES = 900
ROUNDS, STOCK_ROUNDS, MODEL_BYTES, STOCK_TIMEOUT_S = 40, 4, 1_000_000, 300.0
ROUND_KEYS = ("num-server-rounds", "num-rounds")
MAX_REASON_CHARS = 200
STOCK_EXAMPLE_S = 1800.0
STRATEGY_S = re.compile(r"Strategy execution finished in ([\d.]+)s")
CENTRAL_ACCURACY = re.compile(r"MetricRecord: \{'accuracy': ([\d.e+-]+)")
FAILURE = re.compile(r"\w*(Error|Exception|Exit)\b.*")
FAILURE_KINDS = frozenset({"lost", "failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One of Flower's examples.

    Attributes:
        tells: what of Flower it is about.
        run_config: other values than its own, where it asks for more boards than there are, or for hours.
        num_boards: that it asks for.
        files: the data set in each board's folder, where it reads one from its node's configuration.
        obstacle: why it cannot run here, where it was not tried.
    """

    name: str
    tells: str
    run_config: str = ""
    num_boards: int = 3
    files: str = ""
    obstacle: str = ""


EXAMPLES = (
    Example(name="quickstart-pytorch", tells="PyTorch, FedAvg"),
    Example(name="quickstart-sklearn", tells="scikit-learn", run_config="num-server-rounds=5"),
    Example(name="quickstart-numpy", tells="NumPy alone"),
    Example(name="quickstart-pandas", tells="queries, pandas"),
    Example(
        name="quickstart-xgboost",
        tells="XGBoost, bagging",
        run_config="fraction-train=1.0 fraction-evaluate=1.0 params.nthread=1",
    ),
    Example(name="xgboost-comprehensive", tells="XGBoost, bagging or cyclic", run_config="params.nthread=1"),
    Example(name="quickstart-catboost", tells="CatBoost, custom strategy"),
    Example(name="quickstart-pytorch-lightning", tells="PyTorch Lightning"),
    Example(name="quickstart-jax", tells="JAX"),
    Example(
        name="advanced-pytorch",
        tells="custom strategy, custom metrics",
        obstacle="its ServerApp logs to Weights & Biases over the network",
    ),
    Example(name="custom-mods", tells="custom mods"),
    Example(name="flower-secure-aggregation", tells="SecAgg+, older interface", num_boards=5),
    Example(
        name="fl-dp-sa",
        tells="SecAgg+, fixed clipping, central differential privacy, older interface",
        run_config="num-sampled-clients=15 num-shares=3 reconstruction-threshold=2",
    ),
    Example(name="opacus", tells="local differential privacy"),
    Example(name="fl-tabular", tells="tables"),
    Example(name="federated-vae", tells="autoencoder"),
    Example(name="federated-kaplan-meier-fitter", tells="queries, survival data", num_boards=2),
    Example(name="vertical-fl", tells="vertical, state of the ClientApp", run_config="num-server-rounds=25"),
    Example(name="embedded-devices", tells="boards with files", files="zalando-datasets/fashion_mnist"),
    Example(name="supernode-authentication", tells="boards with files", files="uoft-cs/cifar10"),
    Example(name="federated-analytics", tells="database", obstacle="each board's ClientApp opens a database's port"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an example: `reason` is empty where it ran."""

    name: str
    tells: str
    num_boards: int
    num_rounds: int | None
    num_messages: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRun:
    """An example on one side: seconds from submission to end and of the strategy, bytes of a board, accuracies."""

    run_s: float
    strategy_s: float
    board_bytes: float
    accuracies: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCosts:
    """What one side took: seconds of a round, bytes of a board with all of its processes."""

    round_s: float
    board_bytes: float


def main() -> int:
    arguments = _parse()
    adopt_orphans()
    root = Path(tempfile.mkdtemp(prefix="edgefl-flower-examples-"))
    try:
        if arguments.compare and arguments.flower is not None:
            print(_compare_example(arguments, root))
            return 0
        if arguments.compare:
            print(_format_comparison(_measure_edgefl(root / "edgefl"), _measure_stock(root / "stock")))
            return 0
        outcomes = _run_all(arguments, root)
    except (EdgeflError, StockFlowerError) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        end_descendants()
        if arguments.keep:
            print(f"logs are in {root}", file=sys.stderr)
        else:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps([asdict(outcome) for outcome in outcomes]) if arguments.json else _format_table(outcomes))
    return 0


def _run_all(arguments: argparse.Namespace, root: Path) -> list[Outcome]:
    if arguments.flower is None:
        noop = Example(name="noop-app", tells="nothing", run_config='result="result.json" num-devices=3')
        return [_try_example(noop, APP, root / "noop-app", None)]
    data = _write_data(arguments, root)
    outcomes = []
    for example in EXAMPLES:
        if arguments.only and example.name not in arguments.only:
            continue
        print(example.name, file=sys.stderr, flush=True)
        folder = arguments.flower / "examples" / example.name
        outcomes.append(_try_example(example, folder, root / example.name, data))
        print(outcomes[-1].reason or f"ran in {outcomes[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    return outcomes


def _write_data(arguments: argparse.Namespace, root: Path) -> Path:
    from harness.flower_datasets import write_data_sets  # noqa: PLC0415 needs packages of the examples

    write_data_sets(root / "data", arguments.data, num_images=arguments.images)
    return root / "data"


def _try_example(example: Example, folder: Path, root: Path, data: Path | None) -> Outcome:
    app, begin_s, num_messages, reason = read_app(folder), time.monotonic(), 0, example.obstacle
    if not reason:
        with _start_fleet(example, app, root, data) as fleet:
            begin_s = time.monotonic()
            run_id = fleet.submit(_make_run(example, app))
            try:
                fleet.wait_for_run(run_id)
            except EdgeflError as error:
                reason = str(error).partition("; logs are in")[0]
            seconds = time.monotonic() - begin_s
            num_messages = len(fleet.list_history("updates", run=run_id))
            reason = reason or _find_failure(fleet, run_id)
    else:
        seconds = 0.0
    rounds = [value for key, value in {**app.config, **_parse_rounds(example)}.items() if key in ROUND_KEYS]
    return Outcome(
        name=example.name,
        tells=example.tells,
        num_boards=example.num_boards,
        num_rounds=int(rounds[0]) if rounds else None,
        num_messages=num_messages,
        seconds=seconds,
        reason=reason[:MAX_REASON_CHARS],
    )


def _measure_edgefl(root: Path) -> SideCosts:
    """Returns the seconds of each round of the no-op app but the first, and the bytes of a board."""
    example = Example(name="noop-app", tells="", run_config=f'result="result.json" num-rounds={ROUNDS} num-devices=3')
    app = read_app(APP)
    with _start_fleet(example, app, root, None) as fleet:
        config = _make_run(example, app)
        with Meter({name: process.pid for name, process in fleet.processes.items()}) as meter:
            run_id = fleet.submit(config)
            fleet.wait_for_run(run_id)
        fleet.run_command("run", "result", run_id, "--out", str(root / "result.zip"))
    with zipfile.ZipFile(root / "result.zip") as result:
        return _summarise(json.loads(result.read("result.json")), meter, [*fleet.processes])


def _measure_stock(root: Path) -> SideCosts:
    superlink = [str(scripts() / "flower-superlink")]
    with StockFleet(root=root, num_devices=3, superlink=superlink) as fleet:
        with Meter({name: process.pid for name, process in fleet.processes.items()}) as meter:
            measured = fleet.run(
                num_rounds=STOCK_ROUNDS, size_bytes=MODEL_BYTES, train_s=0.0, timeout_s=STOCK_TIMEOUT_S
            )
        return _summarise(measured, meter, [*fleet.processes])


def _summarise(measured: dict[str, Any], meter: Meter, names: Sequence[str]) -> SideCosts:
    closed_at = measured["closed_at"]
    spans = [later - earlier for earlier, later in itertools.pairwise(closed_at)]
    boards = [meter.cost(name, closed_at[0], closed_at[-1]).peak_bytes for name in names if name != COORDINATOR]
    return SideCosts(round_s=statistics.median(spans), board_bytes=statistics.mean(boards))


def _format_comparison(ours: SideCosts, stock: SideCosts) -> str:
    lines = ["| no-op app, 3 boards | edgefl | stock Flower | ratio |", "|---|---|---|---|"]
    ratios = stock.round_s / ours.round_s, stock.board_bytes / ours.board_bytes
    lines.append(f"| round (median) | {ours.round_s * 1e3:.0f} ms | {stock.round_s * 1e3:.0f} ms | {ratios[0]:.0f} |")
    megabytes = [side.board_bytes / 1e6 for side in (ours, stock)]
    lines.append(
        f"| memory of a board (PSS, peak) | {megabytes[0]:.0f} MB | {megabytes[1]:.0f} MB | {ratios[1]:.1f} |"
    )
    return "\n".join(lines)


def _compare_example(arguments: argparse.Namespace, root: Path) -> str:
    """Runs an example on both sides in turn, once with each seed; returns a table with a line of each run."""
    names = arguments.only or ["quickstart-pytorch"]
    example = next(one for one in EXAMPLES if one.name == names[0])
    example = replace(example, run_config=f"{example.run_config} {arguments.run_config}".strip())
    folder, data = arguments.flower / "examples" / example.name, _write_data(arguments, root)
    sides = {"edgefl": _run_edgefl, "stock Flower": _run_stock}
    head = example.name, "seed", "run", "its strategy", "board (PSS, peak)", "accuracy by round", "load"
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|---|---|"]
    for seed in arguments.seeds:
        for side, run in sides.items():
            load = os.getloadavg()[0]
            done = run(example, folder, root / f"{seed}-{side.split()[0]}", data, seed=seed)
            accuracies = " ".join(f"{value:.4f}" for value in done.accuracies)
            seconds = f"{done.run_s:.1f} s", f"{done.strategy_s:.1f} s"
            cells = seed, *seconds, f"{done.board_bytes / 1e6:.0f} MB", accuracies, f"{load:.0f}"
            lines.append(f"| {side} | {' | '.join(map(str, cells))} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def _run_edgefl(example: Example, folder: Path, root: Path, data: Path, *, seed: int) -> SideRun:
    app = read_app(folder)
    with _start_fleet(example, app, root, data, seed=seed) as fleet:
        config = _make_run(example, app, seed)
        with Meter({name: process.pid for name, process in fleet.processes.items()}) as meter:
            begin_s = time.time()
            run_id = fleet.submit(config)
            fleet.wait_for_run(run_id)
            end_s = time.time()
        fleet.run_command("run", "result", run_id, "--out", str(root / "result.zip"))
        names = [name for name in fleet.processes if name != COORDINATOR]
    with zipfile.ZipFile(root / "result.zip") as result:
        return _summarise_run(meter, names, begin_s, end_s, result.read("server-app.log").decode(errors="replace"))


def _run_stock(example: Example, folder: Path, root: Path, data: Path, *, seed: int) -> SideRun:
    site = root.with_name(f"{root.name}-site")
    site.mkdir(parents=True)
    _add_data(site, data, seed)
    superlink = [str(scripts() / "flower-superlink")]
    with StockFleet(root=root, num_devices=example.num_boards, superlink=superlink, site=site) as fleet:
        options = ["--stream", *(["--run-config", example.run_config] if example.run_config else [])]
        with Meter({name: process.pid for name, process in fleet.processes.items()}) as meter:
            begin_s = time.time()
            log = fleet.submit(folder, options, timeout_s=STOCK_EXAMPLE_S)
            end_s = time.time()
        names = [name for name in fleet.processes if name != COORDINATOR]
        return _summarise_run(meter, names, begin_s, end_s, log)


def _summarise_run(meter: Meter, names: Sequence[str], begin_s: float, end_s: float, log: str) -> SideRun:
    peaks = [meter.cost(name, begin_s, end_s).peak_bytes for name in names]
    accuracies = tuple(float(value) for value in CENTRAL_ACCURACY.findall(log))
    if not accuracies or (strategy := STRATEGY_S.search(log)) is None:
        raise StockFlowerError(f"the app said nothing of its accuracy: {log[-500:]}")
    return SideRun(
        run_s=end_s - begin_s,
        strategy_s=float(strategy[1]),
        board_bytes=statistics.mean(peaks),
        accuracies=accuracies,
    )


def _parse_rounds(example: Example) -> dict[str, str]:
    return dict(pair.partition("=")[::2] for pair in example.run_config.split() if pair.startswith(ROUND_KEYS))


def _make_run(example: Example, app: AppFolder, seed: int = RunSection(task="").seed) -> RunConfig:
    config = make_app_run(app, example.run_config, name=None, num_boards=example.num_boards, groups=())
    return replace(config, run=replace(config.run, seed=seed))


def _start_fleet(
    example: Example, app: AppFolder, root: Path, data: Path | None, *, seed: int | None = None
) -> LocalFleet:
    """Returns a fleet whose coordinator and boards have the example's pack; its processes are confined."""
    site = root / "site"
    with zipfile.ZipFile(write_app_wheel(app, root / "dist")) as wheel:
        wheel.extractall(site)
    if data is not None:
        _add_data(site, data, seed)
    devices = []
    for number in range(1, example.num_boards + 1):
        files = root / f"files-{number}"
        if example.files and data is not None:
            shutil.copytree(data / example.files, files, copy_function=os.link)
        else:
            files.mkdir()
        devices.append(LocalDeviceSpec(name=f"board-{number}", shards={get_job_name(app.name): str(files)}))
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "EDGEFL_CONFINE": "auto"}
    return LocalFleet(root=root / "fleet", devices=devices, environment=environment)


def _add_data(site: Path, data: Path, seed: int | None) -> None:
    """Puts the data sets into a folder of modules, what reads them in the place of the network, and torch's seed."""
    shutil.copyfile(HARNESS / "flower_data" / "sitecustomize.py", site / "sitecustomize.py")
    shutil.copytree(data, site / "data", copy_function=os.link)
    if seed is not None:
        (site / "data" / "seed").write_text(str(seed))


def _find_failure(fleet: LocalFleet, run_id: str) -> str:
    """Returns why a board failed a message of a run that finished; empty where none did."""
    for row in fleet.list_history("events", run=run_id):
        if row["kind"] == "job-log" and (found := FAILURE.search(row["message"])):
            return f"{row['device_id']}: {found[0]}"
        if row["kind"] in FAILURE_KINDS:
            return f"{row['device_id']}: {row['message']}"
    return ""


def _format_table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| example | about | boards | rounds | replies | seconds | runs |", "|---|---|---|---|---|---|---|"]
    for one in outcomes:
        rounds = "" if one.num_rounds is None else one.num_rounds
        says = f"no: {one.reason}".replace("|", "/") if one.reason else "yes"
        cells = one.name, one.tells, one.num_boards, rounds, one.num_messages, f"{one.seconds:.1f}", says
        lines.append(f"| {' | '.join(map(str, cells))} |")
    num_run = sum(not one.reason for one in outcomes)
    return "\n".join([*lines, "", f"{num_run} of {len(outcomes)} run"])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--flower", type=Path, help="folder of Flower's repository; without it the no-op app alone")
    add("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="folder of the pictures [$EDGEFL_DATA]")
    add("--only", nargs="+", choices=[example.name for example in EXAMPLES], help="these examples [all]")
    add("--images", type=int, default=NUM_IMAGES, help="training images of all boards [%(default)s]")
    add("--compare", action="store_true", help="one app on edgefl and on stock Flower: the no-op app, or an example")
    add("--seeds", nargs="+", type=int, default=[RunSection(task="").seed], help="of an example's comparison")
    add("--run-config", default="", help="other values of an example that is compared, as `flwr run` takes them")
    add("--keep", action="store_true", help="leave logs and results where they are, and say where")
    add("--json", action="store_true", help="print one JSON array instead of a table")
    arguments = options.parse(parser, images=90)
    if arguments.flower is not None and arguments.data is None:
        parser.error("--flower needs --data DIR")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
