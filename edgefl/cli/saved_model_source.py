"""Sources of retained models: a running coordinator, or the directory of a stopped one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgefl.cli.source_options import get_from_coordinator, open_store, resolve_directory
from edgefl.core.errors import NotFoundError

if TYPE_CHECKING:
    from edgefl.core.types import Array, Json

EVALUATOR_FOLDER = "evaluator"


class SavedModelSource(Protocol):
    """Source of models; its rows are those of `storage.model_rows.kept_models`."""

    def list_models(self, run: str | None) -> list[Json]: ...
    def find(self, text: str, run: str | None) -> Json: ...
    def open_file(self, sha256: str) -> contextlib.AbstractContextManager[Path]:
        """Opens the model's safetensors file, named by its SHA-256, for the block."""


def make_model_source(directory: Path | None, url: str | None) -> SavedModelSource:
    """Returns the source: a directory, else a coordinator; by default this user's coordinator.

    Raises:
        UsageError: both are given.
    """
    resolved = resolve_directory(directory, url)
    return _ApiModelSource(url=url) if resolved is None else _DirectoryModelSource(directory=resolved)


def load_model(source: SavedModelSource, row: Json) -> dict[str, Array]:
    """Returns a model's tensors, checked against its SHA-256."""
    from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 fast start

    with source.open_file(row["sha256"]) as path:
        return load_model_file(path)


def find_coordinator_shard(directory: Path | None, task: str) -> Path | None:
    """Returns a task's test shard of a coordinator on this machine; None where there is none."""
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start
    from edgefl.core.errors import ConfigError, NotJoinedError  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise

    root = (directory or default_directory()).expanduser() / EVALUATOR_FOLDER
    try:
        shard = DeviceStateDir.load(root).settings.shards.get(task)
    except (ConfigError, NotJoinedError, OSError):
        return None
    return Path(shard) if shard and Path(shard).exists() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ApiModelSource:
    url: str | None

    def list_models(self, run: str | None) -> list[Json]:
        rows: list[Json] = self._get("/edgefl/v1/models", run)["rows"]
        return rows

    def find(self, text: str, run: str | None) -> Json:
        return self._get(_make_path(text), run)

    @contextlib.contextmanager
    def open_file(self, sha256: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
            path = Path(folder) / f"{sha256}.safetensors"
            from edgefl.system.api_client import CoordinatorClient  # noqa: PLC0415 fast start

            with path.open("wb") as out:
                CoordinatorClient.from_options(self.url).download(f"{_make_path(sha256)}/file", out)
            yield path

    def _get(self, path: str, run: str | None) -> Json:
        return get_from_coordinator(self.url, path, {"run": run}, directory_content="models")


@dataclass(frozen=True, slots=True, kw_only=True)
class _DirectoryModelSource:
    directory: Path

    def list_models(self, run: str | None) -> list[Json]:
        from edgefl.storage.repositories.saved_models import list_models  # noqa: PLC0415 SQLAlchemy is slow to load

        with self._open_store() as store:
            return list_models(store, run)

    def find(self, text: str, run: str | None) -> Json:
        from edgefl.storage.repositories.saved_models import find_model  # noqa: PLC0415 as above

        with self._open_store() as store:
            return find_model(store, text, run)

    @contextlib.contextmanager
    def open_file(self, sha256: str) -> Iterator[Path]:
        path = self.directory / "models" / f"{sha256}.safetensors"
        if not path.is_file():
            raise NotFoundError(f"the file of model {sha256[:12]} is missing: {path}")
        yield path

    def _open_store(self) -> Any:
        return open_store(self.directory)


def _make_path(model: str) -> str:
    from edgefl.system.api_client import format_resource_path  # noqa: PLC0415 fast start

    return format_resource_path("models", model)
