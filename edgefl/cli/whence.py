"""Where a command reads: from a coordinator that runs, or from the directory of one that does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgefl.errors import NetworkError, UsageError
from edgefl.types import Json

if TYPE_CHECKING:
    from edgefl.storage.store import Store

Function = TypeVar("Function", bound=Callable[..., Any])


def source_options(function: Function) -> Function:
    """Adds `--dir` and `--url`; the command gets them as `directory` and `url`, for `directory_of`."""
    url = click.option("--url", metavar="URL", help="Ask this coordinator [default: the one in operator.toml].")
    path = click.Path(path_type=Path, file_okay=False)
    directory = click.option("--dir", "directory", type=path, help="Read the directory of one that does not run.")
    return directory(url(function))


def directory_of(directory: Path | None, url: str | None) -> Path | None:
    """Returns the directory to read, None for asking a coordinator.

    That is what is named, else the coordinator that this user knows, else the usual directory if it is there.

    Raises:
        UsageError: both are named.
    """
    from edgefl.client import knows_coordinator  # noqa: PLC0415 fast start

    if directory is not None and url is not None:
        raise UsageError("--dir reads a coordinator's directory and --url asks a coordinator; give one of them")
    if directory is None and (url or knows_coordinator()):
        return None
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

    usual = default_directory()
    if directory is None and not usual.exists():
        return None  # to be told that this user knows no coordinator, as by every other command
    return (directory or usual).expanduser()


def open_store(directory: Path) -> Store:
    """Returns the store of the coordinator or the simulation in a directory, open for reading."""
    from edgefl.coordinator.directory import store_of  # noqa: PLC0415 fast start
    from edgefl.storage.store import Store  # noqa: PLC0415 SQLAlchemy is slow to load

    return Store.open(store_of(directory), read_only=True)


def ask(url: str | None, path: str, params: Mapping[str, Any] | None = None, *, what: str) -> Json:
    """Returns what a coordinator answers; `what` is what the directory of one that does not run could tell.

    Raises:
        NetworkError: it does not answer.
    """
    from edgefl.client import Operator  # noqa: PLC0415 only commands that talk need it

    try:
        answer: Json = Operator.from_options(url).get(path, params or {})
    except NetworkError as error:
        raise NetworkError(f"{error}; --dir DIR reads the {what} of a coordinator that does not run") from error
    return answer
