"""`edgefl task compile`: a task of torch as a file that boards train from without torch."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.output import SHORT_HASH_DIGITS, echo, print_json, print_rows, text_format_option
from edgefl.cli.sources import EXISTING_FILE_TYPE, FOLDER_TYPE, allow_module_option
from edgefl.core.errors import DataError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Dataset, Json, Scalar, Task
    from edgefl.tasks.compiler.cache import CacheEntry

COLUMNS = ("output", "worst_error", "median_error", "error_of_torch")


@click.command("compile")
@click.argument("name")
@click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help="Option of the task; repeat.")
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Fixed in the file.")
@click.option("--adapt", type=EXISTING_FILE_TYPE, help="Run file whose [adapt] says which tensors stay as they are.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="A shard, to check gradients on as well.")
@click.option("--out", type=FOLDER_TYPE, required=True, help="Folder to write the file into.")
@click.option("--no-cache", is_flag=True, help="Compile although the same was compiled before.")
@allow_module_option
@text_format_option
def command(  # noqa: PLR0913 one argument an option
    *,
    name: str,
    options: tuple[str, ...],
    batch_size: int,
    adapt: Path | None,
    data: Path | None,
    out: Path,
    no_cache: bool,
    style: str,
) -> None:
    """Compile a torch task into a file that boards train from without torch.

    NAME is a built-in task, or MODULE:CLASS of an allowed module. Gradients are checked against torch in double
    precision first; where they differ, nothing is written. What was compiled before is taken from a cache, unless
    --data is given. Needs the extras train and export.
    """
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 fast start

    settings, since_s = _parse_options(options), time.time()
    task = make_task(name, settings)
    asked: Json = {"name": name, "options": settings, "batch_size": batch_size}
    if adapt is not None:
        asked["constant"] = _list_constant(task, adapt)
    if data is None and not no_cache:
        entry, is_cached = _find_or_compile(task, since_s, asked)
    else:
        entry, is_cached = _compile(task, asked, None if data is None else _read(task, data)), False
    path = _write(entry.content, name, out)
    report = _make_json(path, entry, is_cached=is_cached)
    if style == "json":
        print_json(report)
    else:
        _print_report(path, report)


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


def _list_constant(task: Task, path: Path) -> frozenset[str]:
    from edgefl.core.config import load_run  # noqa: PLC0415 fast start
    from edgefl.tasks.adaptation.parts import select_parts  # noqa: PLC0415 likewise

    section = load_run(path).adapt
    return select_parts(section, task.shapes()).constant_names if section.is_used else frozenset()


def _read(task: Task, path: Path) -> Dataset:
    from edgefl.tasks.losses.registry import check_data  # noqa: PLC0415 fast start

    data = task.read(str(path))
    check_data(task, data)
    return data


def _find_or_compile(task: Task, since_s: float, asked: Json) -> tuple[CacheEntry, bool]:
    from edgefl.tasks.compiler.cache import CompileCache, find_or_compile  # noqa: PLC0415 fast start

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgefl" / "compiled"
    return find_or_compile(CompileCache(folder), task, since_s=since_s, **asked)


def _compile(task: Task, asked: Json, data: Dataset | None) -> CacheEntry:
    from edgefl.tasks.compiled.artefact import encode_artefact  # noqa: PLC0415 fast start
    from edgefl.tasks.compiler.cache import CacheEntry, import_packages  # noqa: PLC0415 likewise

    import_packages()
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 it imports these

    compiled, report = compile_task(task, data=data, **asked)
    return CacheEntry(content=encode_artefact(compiled), report=asdict(report))


def _write(content: bytes, name: str, folder: Path) -> Path:
    from edgefl.system.atomic_files import open_atomic  # noqa: PLC0415 fast start
    from edgefl.tasks.compiled.artefact import SUFFIX, compute_sha256  # noqa: PLC0415 likewise

    stem = name.rpartition(":")[2].lower()
    path = folder / f"{stem}-{compute_sha256(content)[:SHORT_HASH_DIGITS]}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_atomic(path, mode=0o644) as file:
            file.write(content)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _make_json(path: Path, entry: CacheEntry, *, is_cached: bool) -> Json:
    from edgefl.tasks.compiled.artefact import parse_artefact  # noqa: PLC0415 fast start

    check = entry.report["check"]
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "cached": is_cached,
        "manifest": parse_artefact(entry.content).manifest.to_json(),
        "nodes": entry.report["num_nodes"],
        "parameters": entry.report["parameters"],
        "check": {
            "steps": check["num_steps"],
            "real_steps": check["num_real"],
            "outputs": [
                {"name": name, "worst": worst, "median": check["median"][name], "torch": check["torch"].get(name)}
                for name, worst in check["worst"].items()
            ],
            "final_loss": {"graph": check["losses"][0], "torch": check["losses"][1]},
        },
    }


def _print_report(path: Path, report: Json) -> None:
    check, manifest = report["check"], report["manifest"]
    rows = [
        {
            "output": row["name"],
            "worst_error": f"{row['worst']:.1e}",
            "median_error": f"{row['median']:.1e}",
            "error_of_torch": "-" if row["torch"] is None else f"{row['torch']:.1e}",
        }
        for row in check["outputs"]
    ]
    print_rows(rows, COLUMNS)
    click.echo(
        f"Relative to torch in float64, over {check['steps']} steps, {check['real_steps']} of them on real examples. "
        f"Trained by itself the graph ends at a loss of {check['final_loss']['graph']:.6g}, torch at "
        f"{check['final_loss']['torch']:.6g}."
    )
    click.echo(
        f"{report['nodes']} operators, {report['parameters']} parameters, batch {manifest['batch_size']}: about "
        f"{manifest['flops'] / 1e6:.0f} MFLOP and {manifest['peak_bytes'] / 1e6:.1f} MB of tensors a step."
    )
    if report["cached"]:
        click.echo("It was compiled before; --no-cache compiles it again.")
    echo(str(path))
