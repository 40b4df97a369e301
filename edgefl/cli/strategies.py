"""`edgefl strategies`: what a run file may name, and how to begin one of your own."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.listing import ListedGroup
from edgefl.cli.render import format_option, print_rows
from edgefl.errors import DataError, EdgeflError, UsageError

if TYPE_CHECKING:
    from edgefl.types import Json

COLUMNS = ("name", "kind", "summary", "settings")
FLOWER = "flwr:NAME"
NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
TEMPLATE = {"{}.py": "strategy.py.txt", "test_{}.py": "test_strategy.py.txt"}


@click.group("strategies", cls=ListedGroup)
def command() -> None:
    """List the strategies, begin one of your own."""


@command.command("list")
@format_option
def list_(*, fmt: str) -> None:
    """List what `[strategy] name` may be, with the settings and their defaults.

    The table shows a strategy's own settings, and below it those that most share; JSON and CSV have all with each.
    """
    from edgefl.strategies.registry import strategy_names  # noqa: PLC0415 fast start

    rows = [_row(name) for name in strategy_names()] + [_flower_row()]
    if fmt != "table":
        print_rows(rows, COLUMNS, fmt, kind="strategies")
        return
    shared = _shared()
    print_rows([{**row, "settings": _own(row["settings"], shared)} for row in rows], COLUMNS, fmt)
    click.echo("\nShared by most: " + " ".join(f"{name}={_shown(value)}" for name, value in shared.items()))
    click.echo("Your own: module:Class, see `edgefl strategies new`.")


@command.command()
@click.argument("name")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    help="Folder to write into [default: this one].",
)
def new(*, name: str, out: Path) -> None:
    """Write NAME.py, a working strategy to change, and its test."""
    from importlib.resources import files  # noqa: PLC0415 fast start

    _check_name(name)
    values = {"NAME": name, "TITLE": name.replace("_", " ").capitalize(), "CLASS": _class_of(name)}
    texts = {}
    for pattern, template in TEMPLATE.items():
        text = files("edgefl.strategies").joinpath("template", template).read_text(encoding="utf-8")
        texts[out / pattern.format(name)] = re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], text)
    for path in texts:
        if path.exists():
            raise UsageError(f"{path} exists; choose another name, or another folder with --out")
    for path, text in texts.items():
        _write(path, text)
        click.echo(path)
    click.echo(
        f'Try it with `pytest {out / f"test_{name}.py"}`, then in a run file: name = "{name}:{_class_of(name)}"'
    )


def _row(name: str) -> Json:
    from edgefl.strategies.registry import find_strategy, settings_of  # noqa: PLC0415 fast start

    try:
        found, settings = find_strategy(name), settings_of(name)
    except EdgeflError as error:  # a package that is broken must not hide the others
        return {"name": name, "kind": None, "summary": str(error), "settings": {}}
    text = getattr(found, "summary", "") or sys.modules[found.__module__].__doc__ or found.__doc__ or ""
    summary = " ".join(text.strip().partition("\n\n")[0].split())
    return {"name": name, "kind": _kind(name, settings), "summary": summary, "settings": _plain(settings)}


def _flower_row() -> Json:
    from edgefl.adapters.flower_options import flower_names  # noqa: PLC0415 slow: Flower

    names = ", ".join(name.removeprefix("flwr:") for name in flower_names())
    return {"name": FLOWER, "kind": "synchronous", "summary": f"Flower's strategies: {names}", "settings": {}}


def _kind(name: str, settings: Mapping[str, Any]) -> str | None:
    """Returns synchronous, asynchronous or decentralised: what the class says, or what its template is."""
    from edgefl.strategies.asynchronous import Asynchronous  # noqa: PLC0415 fast start
    from edgefl.strategies.registry import REQUIRED, find_strategy, make_strategy  # noqa: PLC0415 likewise
    from edgefl.strategies.rounds import RoundRules, Synchronous  # noqa: PLC0415 likewise

    declared: str | None = getattr(find_strategy(name), "kind", None)
    if declared is not None or REQUIRED in settings.values():
        return declared
    try:
        strategy = make_strategy(name, {}, RoundRules())
    except EdgeflError:
        return None
    if isinstance(strategy, Synchronous | Asynchronous):
        return "synchronous" if isinstance(strategy, Synchronous) else "asynchronous"
    return "synchronous" if getattr(strategy, "versions_per_round", 1) == 1 else "asynchronous"


def _plain(settings: Mapping[str, Any]) -> Json:
    from edgefl.strategies.registry import REQUIRED  # noqa: PLC0415 fast start

    return {name: "required" if default is REQUIRED else _value(default) for name, default in settings.items()}


def _value(default: Any) -> Any:
    plain = default is None or isinstance(default, bool | int | float | str)
    return (str(default) if isinstance(default, str) else default) if plain else repr(default)


def _shared() -> Json:
    from dataclasses import fields  # noqa: PLC0415 fast start

    from edgefl.strategies.settings import TrainingSettings  # noqa: PLC0415 likewise

    return {item.name: _value(item.default) for item in fields(TrainingSettings)}


def _own(settings: Json, shared: Json) -> str:
    """Returns the settings that are not shared, or that differ in their default."""
    own = {name: value for name, value in settings.items() if name not in shared or shared[name] != value}
    return " ".join(f"{name}={_shown(value)}" for name, value in own.items()) or "-"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _class_of(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _check_name(name: str) -> None:
    """Refuses what cannot be a module of the user's own.

    Raises:
        UsageError: say why.
    """
    if not NAME.match(name) or keyword.iskeyword(name) or name.endswith("_"):
        raise UsageError(
            f"a strategy's name is a module's: small letters, digits and _, as trimmed_mean; got {name!r}"
        )
    if name in sys.stdlib_module_names or name in {"edgefl", "numpy", "torch", "flwr"}:
        raise UsageError(f"there is a module {name!r} that everybody imports; choose another name")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
