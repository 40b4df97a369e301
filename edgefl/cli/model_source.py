"""Where kept models come from: a coordinator that runs, or the directory of one that does not."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from edgefl.errors import NetworkError, NotFoundError, UsageError
from edgefl.files import DATABASE_NAME

if TYPE_CHECKING:
    from edgefl.types import Array, Json

EVALUATOR = "evaluator"

Function = TypeVar("Function", bound=Callable[..., Any])


class ModelSource(Protocol):
    """Rows are those of `storage.model_rows.kept_models`."""

    def rows(self, run: str | None) -> list[Json]: ...
    def find(self, text: str, run: str | None) -> Json: ...
    def file(self, sha256: str) -> contextlib.AbstractContextManager[Path]:
        """Gives the model's safetensors file, named by its SHA-256, while the block lasts."""


def source_options(function: Function) -> Function:
    """Adds `--dir` and `--url`; the command gets `directory` and `url`, which `model_source` takes."""
    directory = click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path, file_okay=False),
        help="Read the models in this coordinator's directory.",
    )
    url = click.option("--url", metavar="URL", help="Ask this coordinator [default: the one in operator.toml].")
    return directory(url(function))


def model_source(directory: Path | None, url: str | None) -> ModelSource:
    """Returns where to look: in a directory, else at a coordinator; without either the one that this user knows.

    Raises:
        UsageError: both are given.
    """
    from edgefl.client import Operator, knows_coordinator  # noqa: PLC0415 fast start
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 likewise

    if directory is not None and url is not None:
        raise UsageError("--dir reads a coordinator's directory and --url asks a coordinator; give one of them")
    if directory is None and (url or knows_coordinator()):
        return _Running(operator=Operator.from_options(url))
    return _Stopped(directory=(directory or default_directory()).expanduser())


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
    operator: Any

    def rows(self, run: str | None) -> list[Json]:
        rows: list[Json] = self._get("/edgefl/v1/models", run)["rows"]
        return rows

    def find(self, text: str, run: str | None) -> Json:
        return self._get(_path(text), run)

    @contextlib.contextmanager
    def file(self, sha256: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
            path = Path(folder) / f"{sha256}.safetensors"
            with path.open("wb") as into:
                self.operator.download(f"{_path(sha256)}/file", into)
            yield path

    def _get(self, path: str, run: str | None) -> Json:
        try:
            answer: Json = self.operator.get(path, {"run": run})
        except NetworkError as error:
            raise NetworkError(f"{error}; --dir DIR reads the models of a coordinator that does not run") from error
        return answer


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
        from edgefl.storage.store import Store  # noqa: PLC0415 as above

        return Store.open(self.directory / DATABASE_NAME, read_only=True)


def _path(model: str) -> str:
    from edgefl.client import named_path  # noqa: PLC0415 fast start

    return named_path("models", model)
