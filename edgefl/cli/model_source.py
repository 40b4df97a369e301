"""Where kept models come from: a coordinator that runs, or the directory of one that does not."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgefl.cli.whence import ask, directory_of, open_store
from edgefl.errors import NotFoundError

if TYPE_CHECKING:
    from edgefl.types import Array, Json

EVALUATOR = "evaluator"


class ModelSource(Protocol):
    """Rows are those of `storage.model_rows.kept_models`."""

    def rows(self, run: str | None) -> list[Json]: ...
    def find(self, text: str, run: str | None) -> Json: ...
    def file(self, sha256: str) -> contextlib.AbstractContextManager[Path]:
        """Gives the model's safetensors file, named by its SHA-256, while the block lasts."""


def model_source(directory: Path | None, url: str | None) -> ModelSource:
    """Returns where to look: in a directory, else at a coordinator; without either the one that this user knows.

    Raises:
        UsageError: both are given.
    """
    found = directory_of(directory, url)
    return _Running(url=url) if found is None else _Stopped(directory=found)


def load_model(source: ModelSource, row: Json) -> dict[str, Array]:
    """Returns a model's tensors, checked against its SHA-256."""
    from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 fast start

    with source.file(row["sha256"]) as path:
        return load_model_file(path)


def coordinator_shard(directory: Path | None, task: str) -> Path | None:
    """Returns the coordinator's own test shard of a task, where its directory is on this machine and has one."""
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start
    from edgefl.device.state import DeviceState  # noqa: PLC0415 likewise
    from edgefl.errors import ConfigError, NotJoinedError  # noqa: PLC0415 likewise

    root = (directory or default_directory()).expanduser() / EVALUATOR
    try:
        shard = DeviceState.load(root).device.shards.get(task)
    except (ConfigError, NotJoinedError, OSError):
        return None
    return Path(shard) if shard and Path(shard).exists() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    url: str | None

    def rows(self, run: str | None) -> list[Json]:
        rows: list[Json] = self._get("/edgefl/v1/models", run)["rows"]
        return rows

    def find(self, text: str, run: str | None) -> Json:
        return self._get(_path(text), run)

    @contextlib.contextmanager
    def file(self, sha256: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
            path = Path(folder) / f"{sha256}.safetensors"
            from edgefl.client import Operator  # noqa: PLC0415 fast start

            with path.open("wb") as into:
                Operator.from_options(self.url).download(f"{_path(sha256)}/file", into)
            yield path

    def _get(self, path: str, run: str | None) -> Json:
        return ask(self.url, path, {"run": run}, what="models")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stopped:
    directory: Path

    def rows(self, run: str | None) -> list[Json]:
        from edgefl.storage.model_rows import kept_models  # noqa: PLC0415 SQLAlchemy is slow to load

        with self._store() as store:
            return kept_models(store, run)

    def find(self, text: str, run: str | None) -> Json:
        from edgefl.storage.model_rows import find_model  # noqa: PLC0415 as above

        with self._store() as store:
            return find_model(store, text, run)

    @contextlib.contextmanager
    def file(self, sha256: str) -> Iterator[Path]:
        path = self.directory / "models" / f"{sha256}.safetensors"
        if not path.is_file():
            raise NotFoundError(f"the file of model {sha256[:12]} is missing: {path}")
        yield path

    def _store(self) -> Any:
        return open_store(self.directory)


def _path(model: str) -> str:
    from edgefl.client import named_path  # noqa: PLC0415 fast start

    return named_path("models", model)
