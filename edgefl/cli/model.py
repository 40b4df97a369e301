"""`edgefl model`: the models that runs have kept; take them elsewhere, try them on data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.listing import ListedGroup
from edgefl.cli.model_data import ModelData, part_option
from edgefl.cli.model_deploy import deploy, deployments
from edgefl.cli.model_source import load_model, model_source
from edgefl.cli.render import format_option, human, human_bytes, print_rows
from edgefl.cli.whence import source_options
from edgefl.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from edgefl.cli.model_source import ModelSource
    from edgefl.types import Array, Dataset, Json, Task

COLUMNS = ("sha256", "run_id", "name", "task", "round", "version", "accuracy", "bytes_file", "at", "latest", "best")
SCORES = (
    "sha256",
    "run_id",
    "round",
    "version",
    "accuracy",
    "loss",
    "num_examples",
    "recorded_accuracy",
    "bytes_file",
)
SUFFIXES = {"onnx": (".onnx",), "torch": (".pt", ".pth"), "safetensors": (".safetensors",)}
SHORT = 12
FILE_MODE = 0o644

run_option = click.option("--run", metavar="RUN", help="A run's id or the beginning of it, its name, or `latest`.")


@click.group("model", cls=ListedGroup)
def command() -> None:
    """List, export and evaluate the models that runs have kept; deploy them to devices.

    MODEL is the beginning of a SHA-256, RUN:ROUND, RUN:best or RUN:latest; best, latest or a round alone are of
    --run, or of the newest run.
    """


command.add_command(deploy)
command.add_command(deployments)


@command.command("list")
@run_option
@source_options
@format_option
def list_(*, run: str | None, directory: Path | None, url: str | None, fmt: str) -> None:
    """List the kept models, oldest run first."""
    rows = model_source(directory, url).rows(run)
    print_rows(_shortened(rows, fmt), COLUMNS, fmt, kind="models")


@command.command()
@click.argument("model")
@run_option
@source_options
@format_option
def show(*, model: str, run: str | None, directory: Path | None, url: str | None, fmt: str) -> None:
    """Show one model: whose it is, how good, and how large."""
    row = model_source(directory, url).find(model, run)
    columns = (*COLUMNS, "task_options", "test_fraction")
    if fmt == "table":
        print_rows(
            [{"fact": _heading(name), "value": human(name, row.get(name))} for name in columns], ("fact", "value")
        )
    else:
        print_rows([row], columns, fmt, kind="models")


@command.command()
@click.argument("model", required=False)
@run_option
@click.option("--format", "kind", type=click.Choice(list(SUFFIXES)), help="[default: what the suffix of --out says]")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The new file.")
@click.option("--quantise", is_flag=True, help="Only for onnx: weights of 8 bits; says what it costs in accuracy.")
@click.option("--shard", type=click.Path(path_type=Path), help="Real data to check an onnx file with.")
@part_option
@source_options
def export(  # noqa: PLR0913 one per option
    *,
    model: str | None,
    run: str | None,
    kind: str | None,
    out: Path,
    quantise: bool,
    shard: Path | None,
    part: str | None,
    directory: Path | None,
    url: str | None,
) -> None:
    """Write MODEL (default: the last one of --run) as a file for other programs.

    An onnx file takes what a shard of the task holds, as float32, and is checked against the task before it is there.
    """
    if model is None and run is None:
        raise UsageError("say which model: a MODEL, or --run RUN for the last one of a run")
    kind = _checked_kind(kind, out)
    if kind != "onnx" and (quantise or shard or part):
        raise UsageError(f"--quantise, --shard and --part are for onnx, not for {kind}")
    source = model_source(directory, url)
    row = source.find(model or "latest", run)
    click.echo(_title(row))
    if kind == "onnx":
        data = ModelData(shard=shard, part=part, directory=directory)
        _export_onnx(row, load_model(source, row), out, quantise=quantise, data=data)
    elif kind == "torch":
        from edgefl.tasks.torch_file import export_torch  # noqa: PLC0415 torch is slow to load

        num_bytes = export_torch(load_model(source, row), out)
        click.echo(f"{out}: {human_bytes(num_bytes)}, a state dict for torch.load(weights_only=True)")
    else:
        _export_safetensors(source, row, out)


@command.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@run_option
@click.option("--shard", type=click.Path(path_type=Path), help="A shard of the models' task, on this machine.")
@click.option("--on", "place", type=click.Choice(["coordinator"]), help="Take the coordinator's own test shard.")
@part_option
@source_options
@format_option
def evaluate(  # noqa: PLR0913 one per option
    *,
    models: tuple[str, ...],
    run: str | None,
    shard: Path | None,
    place: str | None,
    part: str | None,
    directory: Path | None,
    url: str | None,
    fmt: str,
) -> None:
    """Run the kept models of a run (default: the newest), or the MODELs that are named, over a shard."""
    if (shard is None) == (place is None):
        raise UsageError("say what to evaluate on: --shard PATH, or --on coordinator for its own test shard")
    source = model_source(directory, url)
    rows = [source.find(text, run) for text in models] if models else source.rows(run or "latest")
    if not rows:
        raise NotFoundError(f"run {run or 'latest'} has no kept model yet; `edgefl model list` shows what is kept")
    data = ModelData(shard=shard, part=part, directory=directory)
    scored = _scores(source, rows, data)
    print_rows(_shortened(scored, fmt), SCORES, fmt, kind="evaluations")


def _export_onnx(row: Json, tensors: dict[str, Array], out: Path, *, quantise: bool, data: ModelData) -> None:
    from edgefl.tasks.onnx_export import export_onnx  # noqa: PLC0415 onnx and torch are slow to load

    task = _task(row)
    shard, samples = data.read(task, row) if data.has_shard(row["task"]) else (None, None)
    report = export_onnx(
        task,
        tensors,
        out,
        quantise=quantise,
        samples=samples,
        options=row["task_options"],
        model_sha256=row["sha256"],
    )
    dims = ", ".join(["n", *map(str, report.input_shape[1:])])
    click.echo(
        f"{out}: {human_bytes(report.bytes_file)}, ONNX opset {report.opset}, float32 {report.input_name} [{dims}] "
        f"-> {report.output_name} [n, {report.num_classes}]"
    )
    where = "made-up inputs, since no --shard was given" if shard is None else f"inputs of {shard}"
    click.echo(
        f"checked against the task on {report.num_checked} {where}: largest difference {report.max_difference:.1e} "
        f"({report.tolerance:.1e} allowed)"
    )
    if report.preprocess:
        click.echo("its inputs are what the task's own prepare function makes of a shard, which ONNX cannot hold")
    if report.is_quantised:
        click.echo(f"8-bit weights: {human_bytes(report.bytes_float32)} became {human_bytes(report.bytes_file)}")
    if report.accuracy is not None:
        click.echo(_accuracy_line(report.accuracy, report.accuracy_quantised))
    elif report.is_quantised:
        click.echo("how much accuracy that costs is not known without labelled data; give --shard")


def _accuracy_line(accuracy: float, quantised: float | None) -> str:
    if quantised is None:
        return f"accuracy {accuracy:.4f}"
    return f"accuracy {accuracy:.4f} with float32, {quantised:.4f} with 8-bit weights: {quantised - accuracy:+.4f}"


def _export_safetensors(source: ModelSource, row: Json, out: Path) -> None:
    from edgefl.files import open_whole, store_error  # noqa: PLC0415 fast start
    from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 likewise

    with source.file(row["sha256"]) as path:
        load_model_file(path)  # a damaged file is noticed here
        try:
            with open_whole(out, mode=FILE_MODE) as file:
                file.write(path.read_bytes())
        except OSError as error:
            raise store_error(out, error) from None
    click.echo(f"{out}: {human_bytes(row['bytes_file'])}, safetensors, SHA-256 {row['sha256']}")


def _scores(source: ModelSource, rows: list[Json], data: ModelData) -> list[Json]:
    """Returns one row a model; a task and its examples are read once."""
    known: dict[str, tuple[Any, Dataset]] = {}
    scored = []
    for row in rows:
        key = repr((row["task"], sorted(row["task_options"].items()), row["test_fraction"]))
        if key not in known:
            task = _task(row)
            known[key] = task.learner(), data.read(task, row)[1]
        learner, examples = known[key]
        learner.load(load_model(source, row))
        loss, accuracy = learner.evaluate(examples)
        figures = {"loss": loss, "accuracy": accuracy, "num_examples": len(examples)}
        scored.append({**row, "recorded_accuracy": row["accuracy"], **figures})
    return scored


def _task(row: Json) -> Task:
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 fast start

    return make_task(row["task"], row["task_options"])


def _checked_kind(kind: str | None, out: Path) -> str:
    """Returns the format, which has to go with the file's name.

    Raises:
        UsageError: it does not, or the file cannot be made there.
    """
    by_suffix = {suffix: name for name, suffixes in SUFFIXES.items() for suffix in suffixes}
    found = kind or by_suffix.get(out.suffix.lower())
    if found is None:
        raise UsageError(f"--out must end in {', '.join(by_suffix)}, or --format say what to write; got {out.name}")
    if out.suffix.lower() not in SUFFIXES[found]:
        raise UsageError(f"a file of format {found} must end in {' or '.join(SUFFIXES[found])}, got {out.name}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out} must be a new file in a folder that exists")
    return found


def _title(row: Json) -> str:
    accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.4f} when it was trained"
    return f"model {row['sha256'][:SHORT]} of run {row['run_id']} ({row['task']}), round {row['round']}{accuracy}"


def _shortened(rows: list[Json], fmt: str) -> list[Json]:
    return [{**row, "sha256": row["sha256"][:SHORT]} for row in rows] if fmt == "table" else rows


def _heading(name: str) -> str:
    return name.replace("_", " ")
