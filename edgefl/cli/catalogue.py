"""What a run file may name (`edgefl strategies`, `codecs`), `quickstart`, which writes one, and `completion`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.experiments import THREAD_VARIABLES
from edgefl.cli.output import FullHelpGroup, format_option, print_rows
from edgefl.cli.sources import FOLDER_TYPE
from edgefl.cli.starters.files import check_module_name, make_class_name, render_template, write_files
from edgefl.core.errors import DataError, EdgeflError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json
    from edgefl.tasks.datasets.sample_updates import SampleUpdate

STRATEGY_COLUMNS = ("name", "kind", "summary", "settings")
FLOWER_NAME = "flwr:NAME"
TEMPLATES = {"{}.py": "strategy.py.txt", "test_{}.py": "test_strategy.py.txt"}
CODEC_COLUMNS = ("name", "kind", "argument", "biased", "contraction", "summary")
BENCH_COLUMNS = (
    "codec", "bytes_body", "ratio", "encode_mb_per_s", "decode_mb_per_s", "relative_error", "index_bits",
    "entropy_bits",
)  # fmt: skip

SHELLS = ("bash", "zsh", "fish")

DEFAULT_GOAL = "20"
MAX_ROUNDS_TO_ACCURACY = 500


@click.group("strategies", cls=FullHelpGroup)
def strategies() -> None:
    """List the strategies, begin one of your own."""


@strategies.command("list")
@format_option
def list_strategies(*, fmt: str) -> None:
    """List what `[strategy] name` may be, with the settings and their defaults.

    The table shows a strategy's own settings, and below it those that most share; JSON and CSV have all with each.
    """
    from edgefl.strategies.registry import list_strategy_names  # noqa: PLC0415 fast start

    rows = [_make_row(name) for name in list_strategy_names()] + [_make_flower_row()]
    if fmt != "table":
        print_rows(rows, STRATEGY_COLUMNS, fmt, kind="strategies")
        return
    shared = _list_shared_settings()
    print_rows(
        [{**row, "settings": _format_own_settings(row["settings"], shared)} for row in rows], STRATEGY_COLUMNS, fmt
    )
    click.echo("\nShared by most: " + " ".join(f"{name}={_format_value(value)}" for name, value in shared.items()))
    click.echo("Your own: module:Class with --allow-module, see `edgefl strategies new`.")


@strategies.command()
@click.argument("name")
@click.option(
    "--out",
    type=FOLDER_TYPE,
    default=".",
    help="Folder to write into [default: this one].",
)
def new(*, name: str, out: Path) -> None:
    """Write NAME.py, a working strategy to change, and its test."""
    check_module_name(name, "strategy")
    class_name = make_class_name(name)
    values = {"NAME": name, "TITLE": name.replace("_", " ").capitalize(), "CLASS": class_name}
    texts = {
        out / pattern.format(name): render_template("edgefl.strategies", f"template/{template}", values)
        for pattern, template in TEMPLATES.items()
    }
    for path in texts:
        if path.exists():
            raise UsageError(f"{path} exists; choose another name, or another folder with --out")
    write_files(texts)
    for path in texts:
        click.echo(path)
    click.echo(
        f"Try it with `pytest {out / f'test_{name}.py'}`, "
        f'then in a run file: name = "{name}:{class_name}", '
        f"and edgefl simulate FILE --allow-module {name}"
    )


def _make_row(name: str) -> Json:
    from edgefl.strategies.registry import find_strategy, get_settings  # noqa: PLC0415 fast start

    try:
        strategy, settings = find_strategy(name), get_settings(name)
    except EdgeflError as error:  # a broken package must not hide the others
        return {"name": name, "kind": None, "summary": str(error), "settings": {}}
    text = getattr(strategy, "summary", "") or sys.modules[strategy.__module__].__doc__ or strategy.__doc__ or ""
    summary = " ".join(text.strip().partition("\n\n")[0].split())
    return {
        "name": name,
        "kind": _find_kind(name, settings),
        "summary": summary,
        "settings": _format_settings(settings),
    }


def _make_flower_row() -> Json:
    from edgefl.flower.strategy_options import list_flower_strategies  # noqa: PLC0415 slow: Flower

    names = ", ".join(name.removeprefix("flwr:") for name in list_flower_strategies())
    return {"name": FLOWER_NAME, "kind": "synchronous", "summary": f"Flower's strategies: {names}", "settings": {}}


def _find_kind(name: str, settings: Mapping[str, Any]) -> str | None:
    """Returns synchronous, asynchronous or decentralised: declared by the class, or its template's."""
    from edgefl.core.settings import REQUIRED  # noqa: PLC0415 likewise
    from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy  # noqa: PLC0415 fast start
    from edgefl.strategies.registry import find_strategy, make_strategy  # noqa: PLC0415 likewise
    from edgefl.strategies.strategy_config import RoundRules  # noqa: PLC0415 likewise
    from edgefl.strategies.synchronous.strategy import SynchronousStrategy  # noqa: PLC0415 likewise

    kind: str | None = getattr(find_strategy(name), "kind", None)
    if kind is not None or REQUIRED in settings.values():
        return kind
    try:
        strategy = make_strategy(name, {}, RoundRules())
    except EdgeflError:
        return None
    if isinstance(strategy, SynchronousStrategy | AsynchronousStrategy):
        return "synchronous" if isinstance(strategy, SynchronousStrategy) else "asynchronous"
    return "synchronous" if getattr(strategy, "versions_per_round", 1) == 1 else "asynchronous"


def _format_settings(settings: Mapping[str, Any]) -> Json:
    from edgefl.core.settings import REQUIRED  # noqa: PLC0415 fast start

    return {
        name: "required" if default is REQUIRED else _format_default(default) for name, default in settings.items()
    }


def _format_default(default: Any) -> Any:
    is_scalar = default is None or isinstance(default, bool | int | float | str)
    return (str(default) if isinstance(default, str) else default) if is_scalar else repr(default)


def _list_shared_settings() -> Json:
    from dataclasses import fields  # noqa: PLC0415 fast start

    from edgefl.strategies.strategy_config import StrategyConfig  # noqa: PLC0415 likewise

    return {item.name: _format_default(item.default) for item in fields(StrategyConfig)}


def _format_own_settings(settings: Json, shared: Json) -> str:
    """Returns the settings that are not shared, or that differ in their default."""
    own_settings = {name: value for name, value in settings.items() if name not in shared or shared[name] != value}
    return " ".join(f"{name}={_format_value(value)}" for name, value in own_settings.items()) or "-"


def _format_value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@click.group("codecs", cls=FullHelpGroup)
def codecs() -> None:
    """List the codecs, measure them on a gradient."""


@codecs.command("list")
@format_option
def list_codecs(*, fmt: str) -> None:
    """List the stages that a codec is made of, those of installed packages too.

    A line is a tensor stage, then a value stage, then a lossless one, joined by bars; each may be left out.
    `contraction` says whether the stage works behind `ef`.
    """
    from edgefl.compression.registry import list_stages  # noqa: PLC0415 fast start

    rows = [
        {
            "name": row.name,
            "kind": row.kind,
            "argument": row.argument,
            "biased": row.is_biased,
            "contraction": row.is_contraction,
            "summary": row.summary,
        }
        for row in list_stages()
    ]
    print_rows(rows, CODEC_COLUMNS, fmt, kind="codecs")
    if fmt == "table":
        click.echo('\nAs in up = "ef|topk:0.01|int8" of a run file; "auto" chooses for each device.')


@codecs.command()
@click.option("--codec", "specs", multiple=True, help="A codec to measure; may be repeated [default: all stages].")
@click.option(
    "--gradient",
    "name",
    default="mnist-cnn",
    show_default=True,
    help="mnist-cnn, resnet-18, or a file (.npz, .safetensors) with arrays by name.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder of the MNIST images that the networks learn; otherwise mnist in $EDGEFL_DATA.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1, max=1000), default=5, show_default=True, help="The best counts."
)
@format_option
def bench(*, specs: Sequence[str], name: str, data: Path | None, repeats: int, fmt: str) -> None:
    """Measure bytes, speed and error of codecs on one update of a network, on one thread.

    Speeds are megabytes of dense float32 a second. index_bits are what the place of an entry takes, entropy_bits what
    it would take at its entropy if places were spread evenly. Without torch or images, numbers are drawn instead.
    """
    for variable in THREAD_VARIABLES:  # before NumPy is loaded
        os.environ.setdefault(variable, "1")
    from edgefl.compression.codec_benchmark import make_example_specs  # noqa: PLC0415 after the line above, and slow

    gradient = _load_gradient(name, data)
    rows = (
        _measure_codecs(gradient, specs, repeats)
        if specs
        else _measure_codecs(gradient, make_example_specs(gradient.tensors), repeats)
    )
    if fmt == "table":
        print_rows(rows, BENCH_COLUMNS, fmt, title=f"gradient: {gradient.source}")
    else:
        labelled_rows = [{"gradient": gradient.source, **row} for row in rows]
        print_rows(labelled_rows, ("gradient", *BENCH_COLUMNS), fmt, kind="codec-bench")


def _measure_codecs(gradient: SampleUpdate, specs: Sequence[str], repeats: int) -> list[Json]:
    import time  # noqa: PLC0415 only measuring needs a clock

    from edgefl.compression.codec_benchmark import measure_codec  # noqa: PLC0415 fast start

    rows: list[Json] = []
    is_terminal = sys.stderr.isatty()
    with click.progressbar(specs, file=sys.stderr) if is_terminal else nullcontext(specs) as pending:
        for spec in pending:
            result = measure_codec(spec, gradient.tensors, gradient.shapes, clock=time.perf_counter, repeats=repeats)
            rows.append(
                {
                    "codec": result.spec,
                    "bytes_body": result.num_bytes,
                    "ratio": result.ratio,
                    "encode_mb_per_s": result.encode_mb_per_s,
                    "decode_mb_per_s": result.decode_mb_per_s,
                    "relative_error": result.relative_error,
                    "index_bits": result.index_bits,
                    "entropy_bits": result.entropy_bits,
                }
            )
    return rows


def _load_gradient(name: str, data: Path | None) -> SampleUpdate:
    """Returns a real update, or a random one where none is available.

    Raises:
        EdgeflError: the gradient is unknown or its file is invalid, or the named folder has no images.
    """
    from edgefl.tasks.datasets.sample_updates import SAMPLE_SETTINGS, compute_sample_update, read_sample_update  # noqa: PLC0415 fast start

    if name not in SAMPLE_SETTINGS:
        if "." not in name:
            raise UsageError(
                f"--gradient is {', '.join(SAMPLE_SETTINGS)}, or a file .npz or .safetensors, got {name!r}"
            )
        return read_sample_update(Path(name))
    try:
        return compute_sample_update(name, data)
    except EdgeflError as error:
        if data is not None:
            raise
        click.echo(f"edgefl: no real gradient, one is drawn: {error}", err=True)
        return _draw_gradient(name)


def _draw_gradient(name: str) -> SampleUpdate:
    from edgefl.compression.codec_benchmark import make_random_update  # noqa: PLC0415 fast start
    from edgefl.core.types import derive_rng  # noqa: PLC0415 NumPy
    from edgefl.tasks.datasets.sample_updates import SEED, SampleUpdate, get_network_shapes  # noqa: PLC0415 likewise

    shapes = get_network_shapes(name)
    return SampleUpdate(
        tensors=make_random_update(shapes, derive_rng(SEED, "drawn")),
        shapes=shapes,
        source=f"drawn from Student's t with 3 degrees of freedom, in the shapes of {name}",
    )


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands and options: add it to the shell's start-up file."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415 only this needs it

    from edgefl.cli.main import edgefl  # noqa: PLC0415 it imports this module

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(edgefl, {}, "edgefl", "_EDGEFL_COMPLETE").source())


def _parse_goal(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Returns the goal as it was given, if it is one."""
    if value is None or (value.isascii() and value.isdecimal() and 0 < len(value) < 8 and int(value) > 0):
        return value
    try:
        accuracy = float(value)
    except ValueError:
        accuracy = float("nan")
    if not 0 < accuracy < 1:
        raise click.BadParameter(f"must be rounds such as 20, or an accuracy such as 0.95, got {value!r}")
    return value


@click.command()
@click.option(
    "--data",
    metavar="TASK|PATH",
    help="What is learned: digits, mnist, ... or module:Class; or the path of a CSV or Parquet file, or of a folder "
    "with a folder for each class [default: digits].",
)
@click.option("--target", metavar="COLUMN", help="Of a table: the column to predict [default: the last].")
@click.option("--boards", type=click.IntRange(1, 100_000), help="How many boards train [default: 3].")
@click.option(
    "--goal", metavar="ROUNDS|ACCURACY", callback=_parse_goal, help="When it ends: 20, or 0.95 [default: 20 rounds]."
)
@click.option("--speeds", type=click.Choice(["alike", "mixed"]), help="Are they equally fast? [default: alike].")
@click.option("--network", type=click.Choice(["fast", "slow"]), help="How they are connected [default: fast].")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default="run.toml",
    show_default=True,
    help="A new file.",
)
def quickstart(  # noqa: PLR0913 one per question
    *,
    data: str | None,
    target: str | None,
    boards: int | None,
    goal: str | None,
    speeds: str | None,
    network: str | None,
    out: Path,
) -> None:
    """Write a run file from five answers, and print the commands that come next.

    What no option says is asked on a terminal; elsewhere the defaults count. Of a file or folder of your own, columns
    and classes are read; nothing of it leaves this machine but what stands in the run file.
    """
    from edgefl.core.config import parse_run_text  # noqa: PLC0415 fast start
    from edgefl.tasks.registry import CONFIGURED, list_task_names  # noqa: PLC0415 likewise

    if out.exists():
        raise UsageError(f"{out} exists already; name a new file with --out")
    can_ask = sys.stdin.isatty()

    def ask(question: str, value: Any, default: Any, kind: Any = str) -> Any:
        if value is not None or not can_ask:
            return default if value is None else value
        return click.prompt(question, default=default, type=kind)

    names = ", ".join(name for name in list_task_names() if name not in CONFIGURED)
    data = ask(f"What is learned ({names}, module:Class, or the path of a CSV file or a folder)", data, "digits")
    if data in CONFIGURED:
        raise UsageError(f"{data} says nothing of your data; give its path, such as --data readings.csv")
    task, options, path = _find_task(data, target)
    boards = ask("How many boards train", boards, 3, click.IntRange(1, 100_000))
    goal = ask("When does it end: rounds such as 20, or an accuracy such as 0.95", goal, DEFAULT_GOAL)
    if "metrics" in options and _parse_goal_value(goal) < 1:
        raise UsageError(
            f"{options['target']} of {data} has values, no classes, and so no accuracy; give rounds, such as 20"
        )
    speeds = ask("Are the boards equally fast", speeds, "alike", click.Choice(["alike", "mixed"]))
    network = ask("How are they connected", network, "fast", click.Choice(["fast", "slow"]))
    text = _format_run_file(task, options, boards, _parse_goal_value(goal), speeds=speeds, network=network)
    config = parse_run_text(text)
    out.write_text(text, encoding="utf-8")
    click.echo(f"{out}: {config.strategy.name} on {task} with {boards} boards. Next:")
    module, separator, _ = task.partition(":")
    trial = f"--shards DIR --allow-module {module}" if separator else f"--devices {boards}"
    trial, file = trial if path is None else f"--data {quote(str(path))} {trial}", quote(str(out))
    shard = f"edgefl device shard add {task} PATH"
    for command, meaning in (
        (f"edgefl simulate {file} {trial}", "try it here, without boards"),
        ("edgefl coordinator init", "make a fleet; then: edgefl coordinator start"),
        (f"edgefl coordinator token --uses {boards}", "prints the line to type on each board"),
        *([] if path is None else [(shard, "on each board: its own data")]),
        (f"edgefl run submit {file} --dry-run", "who would take part"),
        (f"edgefl run submit {file} --watch", "train"),
    ):
        click.echo(f"  {command:<43} # {meaning}")


def _find_task(data: str, target: str | None) -> tuple[str, dict[str, Any], Path | None]:
    """Returns a task, its options, and the path of data of one's own."""
    from edgefl.core.settings import suggest_name  # noqa: PLC0415 fast start
    from edgefl.tasks.configured.suggestion import suggest_task  # noqa: PLC0415 NumPy
    from edgefl.tasks.registry import list_task_names  # noqa: PLC0415 likewise

    path, names = Path(data), list_task_names()
    if data in names or (":" in data and not path.exists()):
        if target is not None:
            raise UsageError(f"--target names a column of a file; {data} is a task")
        return data, {}, None
    if not path.exists():
        raise DataError(f"{data} is neither a task nor a file or folder here; {suggest_name(data, names)}")
    return *suggest_task(path, target), path


def _parse_goal_value(goal: str) -> float:
    checked = _parse_goal(click.get_current_context(), click.Option(["--goal"]), goal)
    return float(checked or DEFAULT_GOAL)


def _format_run_file(
    task: str, options: dict[str, Any], boards: int, goal: float, *, speeds: str, network: str
) -> str:
    """Returns a run file; a goal below 1 is an accuracy."""
    strategy, why = ("fedavg", "a round waits for all of them")
    if speeds == "mixed":
        strategy, why = ("fedbuff", "nobody waits for the slow ones")
    rules = f"rounds = {goal:.0f}"
    if goal < 1:
        rules = f"accuracy = {goal:g}\nrounds = {MAX_ROUNDS_TO_ACCURACY}           # at the latest"
    up, codec = ("dense|fp16", "half of the bytes, hardly any error")
    if network == "slow":
        up, codec = ("ef|topk:0.05|int8", "the largest twentieth of an update; the rest comes later")
    settings = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in options.items())
    table = f"\n[task]\n{settings}" if settings else ""
    return f"""[run]
task = {json.dumps(task)}
{rules}
{table}
[strategy]
name = "{strategy}"          # {why}

[compression]
up = "{up}"     # {codec}

[devices]
min = {boards}                # the first round waits for so many
wait_s = 3600          # and not longer than an hour
"""
