"""Where a fleet's history and models are read: a running coordinator, or the directory of one that does not run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from edgefl.core.errors import EdgeflError, NetworkError, NotFoundError, UsageError
from edgefl.system.api_client import CoordinatorClient, format_resource_path, is_coordinator_configured

if TYPE_CHECKING:
    from edgefl.core.types import Json
    from edgefl.history.series import RunInfo
    from edgefl.storage.queries.columns import HistoryFilters
    from edgefl.storage.store import Store

_HISTORY_PATH = "/edgefl/v1/history"


def resolve_source(directory: Path | None, url: str | None) -> Source:
    """Returns the named source, else this user's coordinator, else the default directory if it exists.

    Raises:
        UsageError: both are named.
    """
    if directory is not None and url is not None:
        raise UsageError("a directory (--dir) is read and a URL (--url) is asked; give one of them")
    if directory is None and (url or is_coordinator_configured()):
        return ApiSource(url)
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

    usual = default_directory()
    if directory is None and not usual.exists():
        return ApiSource(url)  # fails with the error of every other command: this user has no coordinator
    return DirectorySource((directory or usual).expanduser())


@dataclass(frozen=True, slots=True)
class ApiSource:
    """A running coordinator, over HTTPS."""

    url: str | None
    directory: ClassVar[Path | None] = None

    def read_newest(self, kind: str, filters: Mapping[str, Any]) -> list[Json]:
        """Returns the newest history rows of a kind; the filters must contain a limit."""
        return _get_rows(self._get_history(kind, filters))

    def read_pages(self, kind: str, filters: Mapping[str, Any]) -> Iterator[list[Json]]:
        """Yields all history rows of a kind, page by page, so that neither side holds a million of them."""
        cursor: str | None = ""
        while cursor is not None:
            page = self._get_history(kind, {**filters, "after": cursor})
            yield _get_rows(page)
            cursor = page.get("next")

    def explain_round(self, run: str, round_number: int | None) -> Json:
        """Returns the diagnosis of a round's duration; of the longest round without a number."""
        return self._get_history("why", {"run": run, "round": round_number})

    def list_device_uses(self, device_id: str, since: float | None, until: float | None) -> list[Json]:
        """Returns the runs that had data of a device, each a `RunUse` as JSON."""
        return _get_rows(self._get_history("uses", {"device": device_id, "since": since, "until": until}))

    def find_run(self, text: str) -> RunInfo:
        """Returns a run for figures; its batch size by this installation's defaults."""
        from edgefl.history.series import RunInfo  # noqa: PLC0415 numpy is slow to load

        record = self._get(format_resource_path("runs", text), {}, "store")
        return RunInfo(
            run_id=record["run_id"],
            name=record["name"],
            strategy=record["strategy"],
            batch_size=find_batch_size(record["task"], record["strategy"], record.get("config") or {}),
            config=record.get("config") or {},
        )

    def read_rows(self, kind: str, **filters: Unpack[HistoryFilters]) -> list[Json]:
        """Returns history rows of one run, oldest first."""
        if filters.get("limit") is not None:
            return self.read_newest(kind, filters)
        return [row for page in self.read_pages(kind, filters) for row in page]

    def read_capabilities(self, device_ids: Iterable[str]) -> dict[str, Json]:
        """Returns the newest capabilities that devices reported, by device; empty of one without a report."""
        paths = {name: format_resource_path("devices", name) for name in device_ids}
        return {name: self._get(path, {}, "store").get("capabilities") or {} for name, path in paths.items()}

    def list_models(self, run: str | None) -> list[Json]:
        """Returns the rows of the retained models of a run, or of all."""
        return _get_rows(self._get("/edgefl/v1/models", {"run": run}, "models"))

    def find_model(self, text: str, run: str | None) -> Json:
        """Returns the row of a retained model."""
        return self._get(format_resource_path("models", text), {"run": run}, "models")

    @contextlib.contextmanager
    def open_model_file(self, sha256: str) -> Iterator[Path]:
        """Opens a model's safetensors file, named by its SHA-256, for the block."""
        with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
            path = Path(folder) / f"{sha256}.safetensors"
            with path.open("wb") as out:
                CoordinatorClient.from_options(self.url).download(
                    f"{format_resource_path('models', sha256)}/file", out
                )
            yield path

    def _get_history(self, kind: str, params: Mapping[str, Any]) -> Json:
        return self._get(f"{_HISTORY_PATH}/{kind}", params, "store")

    def _get(self, path: str, params: Mapping[str, Any], directory_content: str) -> Json:
        """Returns a coordinator's reply; `directory_content` names the offline alternative in errors."""
        try:
            return CoordinatorClient.from_options(self.url).get(path, params)
        except NetworkError as error:
            raise NetworkError(
                f"{error}; its directory (--dir DIR) has the {directory_content} of a coordinator that does not run"
            ) from error


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """The directory of a coordinator or a simulation; its methods are those of `ApiSource`."""

    directory: Path

    def read_newest(self, kind: str, filters: Mapping[str, Any]) -> list[Json]:
        from edgefl.storage.queries.history import read_history  # noqa: PLC0415 SQLAlchemy is slow to load

        with self._open_store() as store:
            return read_history(store, kind, **filters)

    def read_pages(self, kind: str, filters: Mapping[str, Any]) -> Iterator[list[Json]]:
        from edgefl.storage.queries.history import read_history_pages  # noqa: PLC0415 SQLAlchemy is slow to load

        with self._open_store() as store:
            yield from read_history_pages(store, kind, **filters)

    def explain_round(self, run: str, round_number: int | None) -> Json:
        from edgefl.history.diagnosis import diagnose_round  # noqa: PLC0415 SQLAlchemy is slow to load
        from edgefl.storage.queries.history import get_round_details  # noqa: PLC0415 likewise

        with self._open_store() as store:
            return {"v": 1, **diagnose_round(get_round_details(store, run, round_number))}

    def list_device_uses(self, device_id: str, since: float | None, until: float | None) -> list[Json]:
        from edgefl.storage.queries.uses import list_device_uses  # noqa: PLC0415 SQLAlchemy is slow to load

        with self._open_store() as store:
            return [asdict(use) for use in list_device_uses(store, device_id, since=since, until=until)]

    def find_run(self, text: str) -> RunInfo:
        from edgefl.history.series import RunInfo  # noqa: PLC0415 numpy is slow to load
        from edgefl.storage.queries.history import find_run_id  # noqa: PLC0415 SQLAlchemy is slow to load

        with self._open_store() as store:
            run = store.get_run(find_run_id(store, text))
        return RunInfo(
            run_id=run.run_id,
            name=run.name,
            strategy=run.strategy,
            batch_size=find_batch_size(run.task, run.strategy, run.config),
            config=run.config,
        )

    def read_rows(self, kind: str, **filters: Unpack[HistoryFilters]) -> list[Json]:
        return self.read_newest(kind, filters)

    def read_capabilities(self, device_ids: Iterable[str]) -> dict[str, Json]:
        with self._open_store() as store:
            found = store.get_all_capabilities()
        return {name: dict(found[name].facts) if name in found else {} for name in device_ids}

    def list_models(self, run: str | None) -> list[Json]:
        from edgefl.storage.repositories.saved_models import list_models  # noqa: PLC0415 SQLAlchemy is slow to load

        with self._open_store() as store:
            return list_models(store, run)

    def find_model(self, text: str, run: str | None) -> Json:
        from edgefl.storage.repositories.saved_models import find_model  # noqa: PLC0415 SQLAlchemy is slow to load

        with self._open_store() as store:
            return find_model(store, text, run)

    @contextlib.contextmanager
    def open_model_file(self, sha256: str) -> Iterator[Path]:
        path = self.directory / "models" / f"{sha256}.safetensors"
        if not path.is_file():
            raise NotFoundError(f"the file of model {sha256[:12]} is missing: {path}")
        yield path

    def _open_store(self) -> Store:
        from edgefl.coordinator.directory import find_store  # noqa: PLC0415 fast start
        from edgefl.storage.store import Store  # noqa: PLC0415 SQLAlchemy is slow to load

        return Store.open(find_store(self.directory), read_only=True)


Source = ApiSource | DirectorySource


def find_batch_size(task: str, strategy: str, config: Mapping[str, Any]) -> int | None:
    """Returns a run's examples per iteration; None where its task or strategy is not of edgefl.

    Defaults are the task's, else the strategy's. Tasks of other packages are not imported here: a name given by the
    coordinator would run code on the client's machine.
    """
    from edgefl.strategies.registry import BUILT_IN_STRATEGIES as STRATEGIES  # noqa: PLC0415 fast start
    from edgefl.strategies.registry import get_settings  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import BUILT_IN as TASKS  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    if (setting := (config.get("strategy") or {}).get("batch_size")) is not None:
        return int(setting)
    if task not in TASKS or strategy not in STRATEGIES:
        return None
    settings = get_settings(strategy)
    if "batch_size" not in settings:
        return None
    try:
        recommended = getattr(make_task(task, config.get("task") or {}), "defaults", {})
    except EdgeflError:
        return None
    return int(recommended.get("batch_size", settings["batch_size"]))


def _get_rows(response: Json) -> list[Json]:
    """Returns the rows of a coordinator's reply.

    Raises:
        NetworkError: it has none.
    """
    rows = response.get("rows")
    if not isinstance(rows, list):
        raise NetworkError("the coordinator answered without rows; update edgefl on the older side")
    return rows
