"""`edgefl strategies`: lists strategies, and creates one from a template."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.command_group import FullHelpGroup
from edgefl.cli.render import format_option, print_rows
from edgefl.core.errors import DataError, EdgeflError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json

COLUMNS = ("name", "kind", "summary", "settings")
FLOWER_NAME = "flwr:NAME"
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*\Z")
TEMPLATES = {"{}.py": "strategy.py.txt", "test_{}.py": "test_strategy.py.txt"}


@click.group("strategies", cls=FullHelpGroup)
def command() -> None:
    """List the strategies, begin one of your own."""


@command.command("list")
@format_option
def list_(*, fmt: str) -> None:
    """List what `[strategy] name` may be, with the settings and their defaults.

    The table shows a strategy's own settings, and below it those that most share; JSON and CSV have all with each.
    """
    from edgefl.strategies.registry import list_strategy_names  # noqa: PLC0415 fast start

    rows = [_make_row(name) for name in list_strategy_names()] + [_make_flower_row()]
    if fmt != "table":
        print_rows(rows, COLUMNS, fmt, kind="strategies")
        return
    shared = _list_shared_settings()
    print_rows([{**row, "settings": _format_own_settings(row["settings"], shared)} for row in rows], COLUMNS, fmt)
    click.echo("\nShared by most: " + " ".join(f"{name}={_format_value(value)}" for name, value in shared.items()))
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
    values = {"NAME": name, "TITLE": name.replace("_", " ").capitalize(), "CLASS": _make_class_name(name)}
    texts = {}
    for pattern, template in TEMPLATES.items():
        text = files("edgefl.strategies").joinpath("template", template).read_text(encoding="utf-8")
        texts[out / pattern.format(name)] = re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)
    for path in texts:
        if path.exists():
            raise UsageError(f"{path} exists; choose another name, or another folder with --out")
    for path, text in texts.items():
        _write_file(path, text)
        click.echo(path)
    click.echo(
        f"Try it with `pytest {out / f'test_{name}.py'}`, "
        f'then in a run file: name = "{name}:{_make_class_name(name)}"'
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
    from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy  # noqa: PLC0415 fast start
    from edgefl.strategies.registry import REQUIRED, find_strategy, make_strategy  # noqa: PLC0415 likewise
    from edgefl.strategies.synchronous.strategy import RoundRules, SynchronousStrategy  # noqa: PLC0415 likewise

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
    from edgefl.strategies.registry import REQUIRED  # noqa: PLC0415 fast start

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


def _make_class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _check_name(name: str) -> None:
    """Rejects a name that is invalid for a module of the user's own.

    Raises:
        UsageError: with the reason.
    """
    if not NAME_PATTERN.match(name) or keyword.iskeyword(name) or name.endswith("_"):
        raise UsageError(
            f"a strategy's name is a module's: small letters, digits and _, as trimmed_mean; got {name!r}"
        )
    if name in sys.stdlib_module_names or name in {"edgefl", "numpy", "torch", "flwr"}:
        raise UsageError(f"there is a module {name!r} that everybody imports; choose another name")


def _write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
