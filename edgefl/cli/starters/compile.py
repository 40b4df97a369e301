"""`edgefl task compile`: a task of torch as a file that boards train from without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.output import SHORT_HASH_DIGITS, echo, print_json, print_rows, text_format_option
from edgefl.cli.sources import FOLDER_TYPE, allow_module_option
from edgefl.core.errors import DataError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Dataset, Scalar, Task
    from edgefl.tasks.compiled.artefact import CompiledTask
    from edgefl.tasks.compiler.compilation import CompileReport

COLUMNS = ("output", "worst_error", "median_error", "error_of_torch")


@click.command("compile")
@click.argument("name")
@click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help="Option of the task; repeat.")
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Fixed in the file.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="A shard, to check gradients on as well.")
@click.option("--out", type=FOLDER_TYPE, required=True, help="Folder to write the file into.")
@allow_module_option
@text_format_option
def command(
    *, name: str, options: tuple[str, ...], batch_size: int, data: Path | None, out: Path, style: str
) -> None:
    """Compile a torch task into a file that boards train from without torch.

    NAME is a built-in task, or MODULE:CLASS of an allowed module. Gradients are checked against torch in double
    precision first; where they differ, nothing is written. Needs the extras train and export.
    """
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 fast start

    settings = _parse_options(options)
    task = make_task(name, settings)
    compiled, report = _compile(task, name, settings, batch_size, None if data is None else _read(task, data))
    path = _write(compiled, name, out)
    if style == "json":
        print_json(_make_json(path, compiled, report))
    else:
        _print_report(path, compiled, report)


def _parse_options(texts: tuple[str, ...]) -> dict[str, Scalar]:
    """Returns options; a value that is a number, true or false in TOML is one, any other a text."""
    from edgefl.core.safe_parsing import parse_toml  # noqa: PLC0415 fast start

    options: dict[str, Scalar] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise UsageError(f"--option must be KEY=VALUE, got {text!r:.100}")
        try:
            found = parse_toml(f"value = {value}")["value"]
        except ValueError:
            found = value
        options[key] = found if isinstance(found, str | int | float | bool) else value
    return options


def _read(task: Task, path: Path) -> Dataset:
    from edgefl.tasks.losses.registry import check_data  # noqa: PLC0415 fast start

    data = task.read(str(path))
    check_data(task, data)
    return data


def _compile(
    task: Task, name: str, options: dict[str, Scalar], batch_size: int, data: Dataset | None
) -> tuple[CompiledTask, CompileReport]:
    from edgefl.tasks.export.onnx_graph import import_onnx  # noqa: PLC0415 fast start
    from edgefl.tasks.registry import import_extra  # noqa: PLC0415 likewise

    import_extra("torch", "a task is compiled with torch")
    import_onnx()
    import_extra("onnxscript", "a task is compiled with onnxscript")
    import_extra("onnxruntime", "a compiled task is checked with onnxruntime")
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 it imports these

    return compile_task(task, name=name, options=options, batch_size=batch_size, data=data)


def _write(compiled: CompiledTask, name: str, folder: Path) -> Path:
    from edgefl.system.atomic_files import open_atomic  # noqa: PLC0415 fast start
    from edgefl.tasks.compiled.artefact import SUFFIX, compute_sha256, encode_artefact  # noqa: PLC0415 likewise

    content = encode_artefact(compiled)
    stem = name.rpartition(":")[2].lower()
    path = folder / f"{stem}-{compute_sha256(content)[:SHORT_HASH_DIGITS]}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_atomic(path, mode=0o644) as file:
            file.write(content)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _make_json(path: Path, compiled: CompiledTask, report: CompileReport) -> dict[str, Any]:
    check = report.check
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "manifest": compiled.manifest.to_json(),
        "nodes": report.num_nodes,
        "parameters": report.parameters,
        "check": {
            "steps": check.num_steps,
            "real_steps": check.num_real,
            "outputs": [
                {"name": name, "worst": worst, "median": check.median[name], "torch": check.torch.get(name)}
                for name, worst in check.worst.items()
            ],
            "final_loss": {"graph": check.losses[0], "torch": check.losses[1]},
        },
    }


def _print_report(path: Path, compiled: CompiledTask, report: CompileReport) -> None:
    check, manifest = report.check, compiled.manifest
    rows = [
        {
            "output": name,
            "worst_error": f"{worst:.1e}",
            "median_error": f"{check.median[name]:.1e}",
            "error_of_torch": f"{check.torch[name]:.1e}" if name in check.torch else "-",
        }
        for name, worst in check.worst.items()
    ]
    print_rows(rows, COLUMNS)
    click.echo(
        f"Relative to torch in float64, over {check.num_steps} steps, {check.num_real} of them on real examples. "
        f"Trained by itself the graph ends at a loss of {check.losses[0]:.6g}, torch at {check.losses[1]:.6g}."
    )
    click.echo(
        f"{report.num_nodes} operators, {report.parameters} parameters, batch {manifest.batch_size}: about "
        f"{manifest.flops / 1e6:.0f} MFLOP and {manifest.peak_bytes / 1e6:.1f} MB of tensors a step."
    )
    echo(str(path))
