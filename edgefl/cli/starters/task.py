"""`edgefl task`: begins a task of one's own as a folder of a few short files that work as they are; compiles one."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from edgefl.cli.output import FullHelpGroup
from edgefl.cli.sources import FOLDER_TYPE
from edgefl.cli.starters.compile import command as compile_command
from edgefl.core.errors import DataError, UsageError, format_install_command

BACKENDS = ("numpy", "torch")
OWN_FILES = frozenset({"conftest", "make_data"})
IMPORTED_CLASSES = frozenset({"Dataset", "DenseModel", "Path", "Task", "TorchModel"})
"""Names that the module itself has already."""


@dataclass(frozen=True)
class TaskKind:
    """A kind of task.

    Attributes:
        metric: that its test looks at.
        bar: the least that the metric has to reach.
        reason: why it is that.
        packages: optional modules that its files import, by the name that people know.
    """

    metric: str
    bar: str
    reason: str
    packages: Mapping[str, str] = field(default_factory=dict)


KINDS = {
    "tabular": TaskKind(metric="r2", bar="0.5", reason="a constant answer has 0"),
    "series": TaskKind(metric="f1-macro", bar="0.7", reason="a constant answer has 0.17"),
    "image": TaskKind(metric="f1-macro", bar="0.7", reason="a constant answer has 0.17", packages={"Pillow": "PIL"}),
    "text": TaskKind(metric="f1-macro", bar="0.7", reason="a constant answer has 0.17"),
}


@click.group("task", cls=FullHelpGroup)
def command() -> None:
    """Begin a task of your own, or compile one."""


command.add_command(compile_command)


@command.command()
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    required=True,
    help="Rows of values, one of which is predicted; or windows of sensors, pictures or texts, which are classified.",
)
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="numpy", show_default=True, help="What the model is made of."
)
@click.option("--out", type=FOLDER_TYPE, help="Folder to write into, new or empty [default: NAME].")
def new(*, name: str, kind: str, backend: str, out: Path | None) -> None:
    """Write a folder with a working task to change: NAME.py, its run file, made-up data and its test."""
    from edgefl.cli.starters.files import check_module_name, make_class_name, write_files  # noqa: PLC0415 fast start

    folder = out or Path(name)
    check_module_name(name, "task", out=folder)
    if name in OWN_FILES or make_class_name(name) in IMPORTED_CLASSES:
        raise UsageError(f"the files use the name {name!r} themselves; choose another name, such as my_{name}")
    _check_empty(folder)
    texts = _render_files(name, kind, backend)
    write_files({folder / file: text for file, text in texts.items()})
    for file in texts:
        click.echo(folder / file)
    _print_next(name, folder)
    for package, module in {**KINDS[kind].packages, **({"torch": "torch"} if backend == "torch" else {})}.items():
        if importlib.util.find_spec(module) is None:
            click.echo(f"{package} is not installed here; this installs it: {format_install_command(module)}")


def _check_empty(folder: Path) -> None:
    """Rejects a folder that has files, or that cannot be read.

    Raises:
        UsageError: it is not empty, or it is a file.
        DataError: it cannot be read.
    """
    try:
        is_empty = not folder.exists() or not any(folder.iterdir())
    except NotADirectoryError:
        raise UsageError(f"{folder} is a file; name a new or an empty folder with --out") from None
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from None
    if not is_empty:
        raise UsageError(f"{folder} is not empty; choose another name, or name a new folder with --out")


def _render_files(name: str, kind: str, backend: str) -> dict[str, str]:
    """Returns the texts of the task's files by file name."""
    from edgefl.cli.starters.files import make_class_name, render_template  # noqa: PLC0415 fast start

    facts = KINDS[kind]
    values = {
        "NAME": name, "CLASS": make_class_name(name), "METRIC": facts.metric, "BAR": facts.bar, "REASON": facts.reason
    }  # fmt: skip
    templates = {
        f"{name}.py": f"{kind}/{backend}.py.txt",
        "run.toml": "run.toml.txt",
        "make_data.py": f"{kind}/data.py.txt",
        f"test_{name}.py": "test_task.py.txt",
    }
    return {
        file: render_template("edgefl.cli.starters", f"task_template/{template}", values)
        for file, template in templates.items()
    }


def _print_next(name: str, folder: Path) -> None:
    click.echo("Next:")
    steps = (
        (f"cd {shlex.quote(str(folder))}", ""),
        ("python make_data.py", "three boards' data, made up; then put your own in its place"),
        (f"pytest test_{name}.py", "trains the task, and looks whether it has learned (pip install pytest)"),
        (f"PYTHONPATH=. edgefl simulate run.toml --data data --devices 3 --allow-module {name}", ""),
        (f"PYTHONPATH=. edgefl demo --run-file run.toml --data data --devices 3 --allow-module {name}", ""),
    )
    width = max(len(line) for line, meaning in steps if meaning)
    for line, meaning in steps:
        click.echo(f"  {line:<{width}}  # {meaning}" if meaning else f"  {line}")
