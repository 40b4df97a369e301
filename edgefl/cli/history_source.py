"""Where the history is read: from a coordinator over HTTPS, or from the store of one in a directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.cli.whence import ask, directory_of, open_store
from edgefl.errors import NetworkError
from edgefl.types import Json

_PATH = "/edgefl/v1/history"


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

        with open_store(self.directory) as store:
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

        with open_store(self.directory) as store:
            yield from history_pages(store, kind, **filters)

    def why(self, run: str, number: int | None) -> Json:
        """Returns why a round took as long as it did, the one that took longest without a number."""
        if self.directory is None:
            return self._get("why", {"run": run, "round": number})
        from edgefl.history.why import explain  # noqa: PLC0415 SQLAlchemy is slow to load
        from edgefl.storage.round_facts import round_facts  # noqa: PLC0415 likewise

        with open_store(self.directory) as store:
            return {"v": 1, **explain(round_facts(store, run, number))}

    def _get(self, kind: str, params: Mapping[str, Any]) -> Json:
        return ask(self.url, f"{_PATH}/{kind}", params, what="store")


def source_of(directory: Path | None, url: str | None) -> Source:
    """Returns where to read: what is named, else the coordinator of the operator file, else the usual directory.

    Raises:
        UsageError: both are named.
    """
    return Source(directory=directory_of(directory, url), url=url)


def rows_of(answer: Json) -> list[Json]:
    """Returns the rows of a coordinator's answer.

    Raises:
        NetworkError: there are none in it.
    """
    rows = answer.get("rows")
    if not isinstance(rows, list):
        raise NetworkError("the coordinator answered without rows; update edgefl on the older side")
    return rows
