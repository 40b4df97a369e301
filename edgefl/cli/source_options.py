"""Source of a command's data: a running coordinator, or the directory of a stopped one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgefl.core.errors import NetworkError, UsageError
from edgefl.core.types import Json

if TYPE_CHECKING:
    from edgefl.storage.store import Store

Function = TypeVar("Function", bound=Callable[..., Any])


def source_options(function: Function) -> Function:
    """Adds `--dir` and `--url`; the command gets them as `directory` and `url`, for `resolve_directory`."""
    url = click.option("--url", metavar="URL", help="Ask this coordinator [default: the one in operator.toml].")
    path = click.Path(path_type=Path, file_okay=False)
    directory = click.option("--dir", "directory", type=path, help="Read the directory of one that does not run.")
    return directory(url(function))


def resolve_directory(directory: Path | None, url: str | None) -> Path | None:
    """Returns the directory to read; None to query a coordinator.

    The named one goes first, then this user's coordinator, then the default directory if it exists.

    Raises:
        UsageError: both are named.
    """
    from edgefl.system.api_client import is_coordinator_configured  # noqa: PLC0415 fast start

    if directory is not None and url is not None:
        raise UsageError("--dir reads a coordinator's directory and --url asks a coordinator; give one of them")
    if directory is None and (url or is_coordinator_configured()):
        return None
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

    usual = default_directory()
    if directory is None and not usual.exists():
        return None  # fails with the error of every other command: this user has no coordinator
    return (directory or usual).expanduser()


def open_store(directory: Path) -> Store:
    """Returns the read-only store of the coordinator or the simulation in a directory."""
    from edgefl.coordinator.directory import find_store  # noqa: PLC0415 fast start
    from edgefl.storage.store import Store  # noqa: PLC0415 SQLAlchemy is slow to load

    return Store.open(find_store(directory), read_only=True)


def get_from_coordinator(
    url: str | None, path: str, params: Mapping[str, Any] | None = None, *, directory_content: str
) -> Json:
    """Returns a coordinator's reply; `directory_content` names the offline alternative in errors.

    Raises:
        NetworkError: it does not answer.
    """
    from edgefl.system.api_client import CoordinatorClient  # noqa: PLC0415 only commands that use the API need it

    try:
        answer: Json = CoordinatorClient.from_options(url).get(path, params or {})
    except NetworkError as error:
        raise NetworkError(
            f"{error}; --dir DIR reads the {directory_content} of a coordinator that does not run"
        ) from error
    return answer
