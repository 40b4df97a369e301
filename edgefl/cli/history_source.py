"""Source of the history: a coordinator over HTTPS, or the store in a coordinator's directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.cli.source_options import get_from_coordinator, open_store, resolve_directory
from edgefl.core.errors import NetworkError
from edgefl.core.types import Json

_HISTORY_PATH = "/edgefl/v1/history"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySource:
    """A store if `directory` is set, else a coordinator; made by `find_history_source`."""

    directory: Path | None
    url: str | None

    def read_newest(self, kind: str, filters: Mapping[str, Any]) -> list[Json]:
        """Returns the newest rows of a kind; the filters must contain a limit."""
        if self.directory is None:
            return get_rows(self._get(kind, filters))
        from edgefl.storage.queries.history import read_history  # noqa: PLC0415 SQLAlchemy is slow to load

        with open_store(self.directory) as store:
            return read_history(store, kind, **filters)

    def read_pages(self, kind: str, filters: Mapping[str, Any]) -> Iterator[list[Json]]:
        """Yields all rows of a kind, page by page, so that neither side holds a million of them."""
        if self.directory is None:
            cursor: str | None = ""
            while cursor is not None:
                page = self._get(kind, {**filters, "after": cursor})
                yield get_rows(page)
                cursor = page.get("next")
            return
        from edgefl.storage.queries.history import read_history_pages  # noqa: PLC0415 SQLAlchemy is slow to load

        with open_store(self.directory) as store:
            yield from read_history_pages(store, kind, **filters)

    def explain_round(self, run: str, round_number: int | None) -> Json:
        """Returns the diagnosis of a round's duration; of the longest round without a number."""
        if self.directory is None:
            return self._get("why", {"run": run, "round": round_number})
        from edgefl.history.diagnosis import diagnose_round  # noqa: PLC0415 SQLAlchemy is slow to load
        from edgefl.storage.queries.round_details import get_round_details  # noqa: PLC0415 likewise

        with open_store(self.directory) as store:
            return {"v": 1, **diagnose_round(get_round_details(store, run, round_number))}

    def _get(self, kind: str, params: Mapping[str, Any]) -> Json:
        return get_from_coordinator(self.url, f"{_HISTORY_PATH}/{kind}", params, directory_content="store")


def find_history_source(directory: Path | None, url: str | None) -> HistorySource:
    """Returns the source: the named one, else the operator file's coordinator, else the default directory.

    Raises:
        UsageError: both are named.
    """
    return HistorySource(directory=resolve_directory(directory, url), url=url)


def get_rows(response: Json) -> list[Json]:
    """Returns the rows of a coordinator's reply.

    Raises:
        NetworkError: it has none.
    """
    rows = response.get("rows")
    if not isinstance(rows, list):
        raise NetworkError("the coordinator answered without rows; update edgefl on the older side")
    return rows
