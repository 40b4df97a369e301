"""Where the history is read: from a coordinator over HTTPS, or from the store of one in a directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from edgefl.errors import NetworkError, UsageError
from edgefl.files import DATABASE_NAME
from edgefl.types import Json

_PATH = "/edgefl/v1/history"

Function = TypeVar("Function", bound=Callable[..., Any])


def source_options(function: Function) -> Function:
    """Adds `--dir` and `--url`; the command gets them as `directory` and `url`."""
    function = click.option("--url", metavar="URL", help="Ask this coordinator [default: the one in operator.toml].")(
        function
    )
    path = click.Path(path_type=Path)
    return click.option("--dir", "directory", type=path, help="Read the store in this coordinator's directory.")(
        function
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A store if `directory` is there, else a coordinator; one of `source_of`."""

    directory: Path | None
    url: str | None

    def newest(self, kind: str, filters: Mapping[str, Any]) -> list[Json]:
        """Returns the newest rows of a kind; there must be a limit among the filters."""
        if self.directory is None:
            return rows_of(self._get(kind, filters))
        from edgefl.storage.queries import history  # noqa: PLC0415 SQLAlchemy is slow to load
        from edgefl.storage.store import Store  # noqa: PLC0415 likewise

        with Store.open(self._database(), read_only=True) as store:
            return history(store, kind, **filters)

    def pages(self, kind: str, filters: Mapping[str, Any]) -> Iterator[list[Json]]:
        """Yields all rows of a kind, page by page, so that no side ever holds a million of them."""
        if self.directory is None:
            after: str | None = ""
            while after is not None:
                answer = self._get(kind, {**filters, "after": after})
                yield rows_of(answer)
                after = answer.get("next")
            return
        from edgefl.storage.queries import history_pages  # noqa: PLC0415 SQLAlchemy is slow to load
        from edgefl.storage.store import Store  # noqa: PLC0415 likewise

        with Store.open(self._database(), read_only=True) as store:
            yield from history_pages(store, kind, **filters)

    def why(self, run: str, number: int) -> Json:
        """Returns why a round took as long as it did."""
        if self.directory is None:
            return self._get("why", {"run": run, "round": number})
        from edgefl.history.why import explain  # noqa: PLC0415 SQLAlchemy is slow to load
        from edgefl.storage.round_facts import round_facts  # noqa: PLC0415 likewise
        from edgefl.storage.store import Store  # noqa: PLC0415 likewise

        with Store.open(self._database(), read_only=True) as store:
            return {"v": 1, **explain(round_facts(store, run, number))}

    def _database(self) -> Path:
        assert self.directory is not None
        return self.directory.expanduser() / DATABASE_NAME

    def _get(self, kind: str, params: Mapping[str, Any]) -> Json:
        from edgefl.client import Operator  # noqa: PLC0415 only commands that talk need it

        try:
            return Operator.from_options(self.url).get(f"{_PATH}/{kind}", params)
        except NetworkError as error:
            raise NetworkError(f"{error}; --dir DIR reads the store of a coordinator that does not run") from error


def source_of(directory: Path | None, url: str | None) -> Source:
    """Returns where to read: what is named, else the coordinator of the operator file, else the usual directory.

    Raises:
        UsageError: both are named.
    """
    if directory is not None and url is not None:
        raise UsageError("--dir reads a store and --url asks a coordinator; give one of them")
    if directory is None and not url and not _has_operator_file():
        from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

        directory = default_directory()
    return Source(directory=directory, url=url)


def _has_operator_file() -> bool:
    from edgefl.client import operator_path  # noqa: PLC0415 only when no directory was named

    path = operator_path()
    return "EDGEFL_URL" in os.environ or path.exists() or any(path.parent.glob("operator.*.toml"))


def rows_of(answer: Json) -> list[Json]:
    """Returns the rows of a coordinator's answer.

    Raises:
        NetworkError: there are none in it.
    """
    rows = answer.get("rows")
    if not isinstance(rows, list):
        raise NetworkError("the coordinator answered without rows; update edgefl on the older side")
    return rows
