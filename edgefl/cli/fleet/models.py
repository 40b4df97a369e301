"""`edgefl model`: the retained models of runs; export and evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.fleet.devices import deploy, deployments
from edgefl.cli.output import (
    SHORT_HASH_DIGITS,
    FullHelpGroup,
    echo,
    format_bytes,
    format_heading,
    format_option,
    format_value,
    print_rows,
)
from edgefl.cli.sources import (
    FILE_TYPE,
    allow_module_option,
    find_coordinator_shard,
    load_model,
    send_files,
    source_options,
    to_option,
)
from edgefl.core.errors import DataError, NotFoundError, UsageError
from edgefl.core.protocol import finite_or_none

if TYPE_CHECKING:
    from edgefl.client.sources import Source
    from edgefl.core.metrics import MetricSet
    from edgefl.core.types import Array, Dataset, Json, Scalar, Task
    from edgefl.system.object_storage import ObjectAddress

TEST_SCHEME = "test"
COLUMNS = ("sha256", "run_id", "name", "task", "round", "version", "accuracy", "bytes_file", "at", "latest", "best")
SCORE_COLUMNS = (
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
FORMAT_SUFFIXES = {"onnx": (".onnx",), "torch": (".pt", ".pth"), "safetensors": (".safetensors",)}
EXPORT_FILE_MODE = 0o644


def _drop_task(_context: click.Context, _option: click.Parameter, value: Path | None) -> Path | None:
    """Returns the path in TASK=PATH, as other commands take it: the models say their task."""
    text = "" if value is None else str(value)
    return value if value is None or value.exists() or "=" not in text else Path(text.partition("=")[2])


run_option = click.option("--run", metavar="RUN", help="A run's id or the beginning of it, its name, or `latest`.")
local_option = click.option(
    "--local",
    type=FILE_TYPE,
    help="Tensors that stayed on a board: the file runs/RUN.npz in its state directory.",
)
cluster_option = click.option(
    "--cluster", type=click.IntRange(min=0), help="Of a run with ifca: which of its models, from 0."
)
part_option = click.option(
    "--part",
    type=click.Choice(["test", "all"]),
    help="Which examples of the shard [default: all of one that was cut for tests, else those that devices test on].",
)


@click.group("model", cls=FullHelpGroup)
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
def list_(*, run: str | None, source: Source, fmt: str) -> None:
    """List the kept models, oldest run first."""
    rows = source.list_models(run)
    print_rows(_shorten_hashes(rows, fmt), COLUMNS, fmt, kind="models")


@command.command()
@click.argument("model")
@run_option
@source_options
@format_option
def show(*, model: str, run: str | None, source: Source, fmt: str) -> None:
    """Show one model: whose it is, how good, and how large."""
    row = source.find_model(model, run)
    columns = (*COLUMNS, "task_options", "test_fraction")
    if fmt == "table":
        print_rows(
            [{"fact": format_heading(name), "value": format_value(name, row.get(name))} for name in columns],
            ("fact", "value"),
        )
    else:
        print_rows([row], columns, fmt, kind="models")


@command.command()
@click.argument("model", required=False)
@run_option
@click.option(
    "--format", "kind", type=click.Choice(list(FORMAT_SUFFIXES)), help="[default: what the suffix of --out says]"
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The new file.")
@click.option("--quantise", is_flag=True, help="Only for onnx: weights of 8 bits; says what it costs in accuracy.")
@click.option("--shard", type=click.Path(path_type=Path), help="Real data to check an onnx file with.")
@part_option
@local_option
@cluster_option
@to_option
@allow_module_option
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
    local: Path | None,
    cluster: int | None,
    address: ObjectAddress | None,
    source: Source,
) -> None:
    """Write MODEL (default: the last one of --run) as a file for other programs.

    An onnx file takes what a shard of the task holds, as float32, and is checked against the task before it is there.
    """
    if model is None and run is None:
        raise UsageError("say which model: a MODEL, or --run RUN for the last one of a run")
    kind = _resolve_format(kind, out)
    if kind != "onnx" and (quantise or shard or part):
        raise UsageError(f"--quantise, --shard and --part are for onnx, not for {kind}")
    row = source.find_model(model or "latest", run)
    echo(_format_title(row))
    model_of = load_model(source, row, local, cluster)
    if kind == "onnx":
        shard = shard or find_coordinator_shard(source.directory, row["task"])
        _export_onnx(row, model_of, out, quantise=quantise, shard=shard, part=part)
    elif kind == "torch":
        from edgefl.tasks.export.model_export import export_torch  # noqa: PLC0415 torch is slow to load

        num_bytes = export_torch(model_of, out)
        click.echo(f"{out}: {format_bytes(num_bytes)}, a state dict for torch.load(weights_only=True)")
    elif local is None and cluster is None:
        _export_safetensors(source, row, out)
    else:
        _export_merged(model_of, out, "with a board's own tensors" if cluster is None else f"of cluster {cluster}")
    if address is not None:
        send_files(out, address, replace=True)


@command.command()
@click.argument("model")
@run_option
@click.option("--mlflow", required=True, metavar="URL", help="A server, such as http://127.0.0.1:5000.")
@click.option("--name", required=True, help="The registered model, which is made where it is missing.")
@click.option("--alias", help="Name that the version takes over, such as champion.")
@click.option("--experiment", default="edgefl", show_default=True, help="Where the model's run is tracked.")
@click.option("--shard", type=click.Path(path_type=Path), help="Real data to check the onnx file with.")
@part_option
@local_option
@cluster_option
@allow_module_option
@source_options
def register(  # noqa: PLR0913 one per option
    *,
    model: str,
    run: str | None,
    mlflow: str,
    name: str,
    alias: str | None,
    experiment: str,
    shard: Path | None,
    part: str | None,
    local: Path | None,
    cluster: int | None,
    source: Source,
) -> None:
    """Make MODEL, as an onnx file, a version of a registered model of MLflow.

    Its run is tracked there first, as `edgefl history track --run RUN --mlflow URL` does. A MODEL is registered once,
    however often this is said.
    """
    from edgefl.history.tracking import (  # noqa: PLC0415 fast start
        SHA256_TAG,
        HistoryTracking,
        MlflowTracker,
        check_registered_name,
    )

    check_registered_name("--name", name)
    if alias is not None:
        check_registered_name("--alias", alias)
    tracker, row = MlflowTracker(mlflow, experiment), source.find_model(model, run)
    echo(_format_title(row))
    facts = {SHA256_TAG: row["sha256"], "edgefl.task": row["task"], "edgefl.round": str(row["round"])}
    if cluster is not None:
        facts["edgefl.cluster"] = str(cluster)
    if local is not None:
        facts["edgefl.local_sha256"] = sha256(local.read_bytes()).hexdigest()
    with TemporaryDirectory() as folder:
        file, shard = Path(folder) / "model.onnx", shard or find_coordinator_shard(source.directory, row["task"])
        tensors = load_model(source, row, local, cluster)
        _export_onnx(row, tensors, file, quantise=False, shard=shard, part=part, title=name)
        HistoryTracking(source, [tracker], row["run_id"]).update()
        version = tracker.register_model(row["run_id"], file, name, facts, alias)
    click.echo(f"version {version} of {name}{f', {alias}' if alias else ''}: {mlflow}")


@command.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@run_option
@click.option(
    "--shard",
    type=click.Path(path_type=Path),
    callback=_drop_task,
    help="A shard of the models' task, on this machine.",
)
@click.option("--on", "place", type=click.Choice(["coordinator"]), help="Take the coordinator's own test shard.")
@part_option
@local_option
@cluster_option
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Add a metric, such as f1-macro; repeatable."
)
@allow_module_option
@source_options
@format_option
def evaluate(  # noqa: PLR0913 one per option
    *,
    models: tuple[str, ...],
    run: str | None,
    shard: Path | None,
    place: str | None,
    part: str | None,
    local: Path | None,
    cluster: int | None,
    metrics: tuple[str, ...],
    source: Source,
    fmt: str,
) -> None:
    """Run the kept models of a run (default: the newest), or the MODELs that are named, over a shard.

    The task's own metrics are among the columns, and those of --metric.
    """
    if (shard is None) == (place is None):
        raise UsageError("say what to evaluate on: --shard PATH, or --on coordinator for its own test shard")
    rows = [source.find_model(text, run) for text in models] if models else source.list_models(run or "latest")
    if not rows:
        raise NotFoundError(f"run {run or 'latest'} has no kept model yet; `edgefl model list` shows what is kept")
    scored = _evaluate_models(source, rows, shard, part, metrics, local=local, cluster=cluster)
    names = dict.fromkeys(name for row in scored for name in row["metric_names"])
    columns = [*SCORE_COLUMNS, *(name for name in names if name not in SCORE_COLUMNS)]
    print_rows(_shorten_hashes(scored, fmt), columns, fmt, kind="evaluations")


def _load_examples(path: Path, part: str | None, task: Task, row: Json) -> Dataset:
    """Returns the examples of a shard but for weak ones; raises `DataError` where there are none."""
    from edgefl.tasks.datasets.shards import drop_weak, load_task_data, split_train_test  # noqa: PLC0415 fast start
    from edgefl.tasks.registry import find_split_period_s  # noqa: PLC0415 likewise

    data = drop_weak(load_task_data(task, path))
    if not len(data):
        raise DataError(f"shard {path} holds no examples but those of weak labels, which are for training alone")
    if (part or ("all" if _is_test_shard(path) else "test")) == "test":
        data = split_train_test(data, row["test_fraction"], period_s=find_split_period_s(task))[1]
        if not len(data):
            raise DataError(f"the test part of shard {path} is empty; --part all takes every example of it")
    return data


def _is_test_shard(path: Path) -> bool:
    from edgefl.tasks.datasets.shards import get_metadata_path, read_metadata  # noqa: PLC0415 fast start

    return path.is_file() and get_metadata_path(path).exists() and read_metadata(path).scheme == TEST_SCHEME


def _export_onnx(  # noqa: PLR0913 all but three by name
    row: Json,
    tensors: dict[str, Array],
    out: Path,
    *,
    quantise: bool,
    shard: Path | None,
    part: str | None,
    title: str = "",
) -> None:
    from edgefl.tasks.export.model_export import export_onnx  # noqa: PLC0415 onnx and torch are slow to load

    task = _make_task(row)
    samples = None if shard is None else _load_examples(shard, part, task, row)
    report = export_onnx(
        task,
        tensors,
        out,
        quantise=quantise,
        samples=samples,
        options=row["task_options"],
        model_sha256=row["sha256"],
    )
    click.echo(
        f"{title or out}: {format_bytes(report.bytes_file)}, ONNX opset {report.opset}, {report.inputs} "
        f"-> {report.output_name} [n, {report.num_classes}]"
    )
    origin = "made-up inputs, since no --shard was given" if shard is None else f"inputs of {shard}"
    click.echo(
        f"checked against the task on {report.num_checked} {origin}: largest difference {report.max_difference:.1e} "
        f"({report.tolerance:.1e} allowed)"
    )
    if report.preprocess:
        click.echo("its inputs are what the task's own prepare function makes of a shard, which ONNX cannot hold")
    if report.is_quantised:
        click.echo(f"8-bit weights: {format_bytes(report.bytes_float32)} became {format_bytes(report.bytes_file)}")
    if report.accuracy is not None:
        click.echo(_format_accuracy(report.accuracy, report.accuracy_quantised))
    elif report.is_quantised:
        click.echo("how much accuracy that costs is not known without labelled data; give --shard")


def _format_accuracy(accuracy: float, quantised: float | None) -> str:
    if quantised is None:
        return f"accuracy {accuracy:.4f}"
    return f"accuracy {accuracy:.4f} with float32, {quantised:.4f} with 8-bit weights: {quantised - accuracy:+.4f}"


def _export_safetensors(source: Source, row: Json, out: Path) -> None:
    from edgefl.system.atomic_files import make_store_error, open_atomic  # noqa: PLC0415 fast start

    with source.open_model_file(row["sha256"]) as path:
        try:
            with open_atomic(out, mode=EXPORT_FILE_MODE) as file:
                file.write(path.read_bytes())
        except OSError as error:
            raise make_store_error(out, error) from None
    click.echo(f"{out}: {format_bytes(row['bytes_file'])}, safetensors, SHA-256 {row['sha256']}")


def _export_merged(model: dict[str, Array], out: Path, suffix: str) -> None:
    from edgefl.storage.state_serialisation import encode_model  # noqa: PLC0415 likewise
    from edgefl.system.atomic_files import make_store_error, open_atomic  # noqa: PLC0415 fast start

    content = encode_model(model)
    try:
        with open_atomic(out, mode=EXPORT_FILE_MODE) as file:
            file.write(content)
    except OSError as error:
        raise make_store_error(out, error) from None
    click.echo(f"{out}: {format_bytes(len(content))}, safetensors, {suffix}")


def _evaluate_models(  # noqa: PLR0913 the last two by name
    source: Source,
    rows: list[Json],
    shard: Path | None,
    part: str | None,
    metric_names: Sequence[str],
    *,
    local: Path | None = None,
    cluster: int | None = None,
) -> list[Json]:
    """Returns one row per model; a task and its examples are loaded once."""
    from edgefl.tasks.export.model_export import check_whole  # noqa: PLC0415 onnx is slow to load
    from edgefl.tasks.export.result_model import find_result_model  # noqa: PLC0415 likewise

    loaded: dict[str, tuple[Task, Any, Dataset, MetricSet]] = {}
    scored = []
    for row in rows:
        key = repr((row["task"], sorted(row["task_options"].items()), row["test_fraction"]))
        if key not in loaded:
            task = _make_task(row)
            path = shard or find_coordinator_shard(source.directory, row["task"])
            if path is None:
                raise DataError(
                    f"no test shard of task {row['task']} in a coordinator's directory on this machine; name it with "
                    "--dir, or give --shard PATH"
                )
            metrics = _make_metrics(metric_names, task)
            loaded[key] = task, task.learner(), _load_examples(path, part, task, row), metrics
        task, learner, examples, metrics = loaded[key]
        tensors = load_model(source, row, local, cluster)
        model = find_result_model(task, tensors)
        if model is None:
            check_whole(task, tensors)
            learner.load(tensors)
        loss, accuracy = (model or learner).evaluate(examples)
        figures = {"loss": loss, "accuracy": finite_or_none(accuracy), "num_examples": len(examples)}
        values = {"metric_names": [*metrics.metrics], **_compute_metrics(model or learner, examples, metrics)}
        scored.append({**row, "recorded_accuracy": row["accuracy"], **values, **figures})
    return scored


def _make_metrics(names: Sequence[str], task: Task) -> MetricSet:
    from edgefl.core.metrics import MetricSet  # noqa: PLC0415 fast start
    from edgefl.tasks.losses.registry import is_reconstruction  # noqa: PLC0415 fast start
    from edgefl.tasks.metrics.evaluation import make_metric_of  # noqa: PLC0415 likewise

    own = getattr(task, "metrics", None) or ()
    metrics = {name: make_metric_of(task, name) for name in dict.fromkeys((*own, *names))}
    return MetricSet(metrics, is_of_inputs=is_reconstruction(task))


def _compute_metrics(learner: Any, data: Dataset, metrics: MetricSet) -> dict[str, float | None]:
    """Returns metrics of a loaded model; None where one has no value, such as the F1 of a class that is absent."""
    from edgefl.tasks.metrics.evaluation import measure  # noqa: PLC0415 fast start

    if not metrics:
        return {}
    sums = measure(learner, data, metrics)
    values = {name: metric.combine(sums[name]) for name, metric in metrics.metrics.items() if name in sums}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _make_task(row: Json) -> Task:
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 fast start

    return make_task(row["task"], row["task_options"])


def _resolve_format(file_format: str | None, out: Path) -> str:
    """Returns the file format, which must match the file's suffix.

    Raises:
        UsageError: it does not, or the file cannot be made there.
    """
    by_suffix = {suffix: name for name, suffixes in FORMAT_SUFFIXES.items() for suffix in suffixes}
    chosen = file_format or by_suffix.get(out.suffix.lower())
    if chosen is None:
        raise UsageError(f"--out must end in {', '.join(by_suffix)}, or --format say what to write; got {out.name}")
    if out.suffix.lower() not in FORMAT_SUFFIXES[chosen]:
        raise UsageError(
            f"a file of format {chosen} must end in {' or '.join(FORMAT_SUFFIXES[chosen])}, got {out.name}"
        )
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out} must be a new file in a folder that exists")
    return chosen


def _format_title(row: Json) -> str:
    accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.4f} when it was trained"
    sha256 = row["sha256"][:SHORT_HASH_DIGITS]
    return f"model {sha256} of run {row['run_id']} ({row['task']}), round {row['round']}{accuracy}"


def _shorten_hashes(rows: list[Json], fmt: str) -> list[Json]:
    return [{**row, "sha256": row["sha256"][:SHORT_HASH_DIGITS]} for row in rows] if fmt == "table" else rows


def export_for_devices(task: str, options: Mapping[str, Scalar], model: Path, out: Path) -> None:
    """Writes the ONNX file of a task's safetensors file.

    A coordinator runs for months: torch's hundreds of megabytes are freed with the child process.

    Raises:
        EdgeflError: the task cannot be exported here, or the model is not of this task.
    """
    from edgefl.system.processes import call_in_subprocess  # noqa: PLC0415 fast start

    request = {"task": task, "options": dict(options), "model": str(model), "out": str(out)}
    call_in_subprocess(__name__, request, description="exporting the model")


def _run_export(request: Json) -> Json:
    from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 only in the child process
    from edgefl.tasks.export.model_export import export_onnx  # noqa: PLC0415 only in the child process
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    model, options = Path(request["model"]), request["options"]
    tensors = load_model_file(model)
    task = make_task(request["task"], options)
    export_onnx(task, tensors, Path(request["out"]), options=options, model_sha256=model.stem)
    return {}


if __name__ == "__main__":
    from edgefl.system.processes import serve_call

    serve_call(_run_export)
