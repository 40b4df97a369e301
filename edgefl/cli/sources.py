"""Where commands read: a running coordinator, the directory of a stopped one, a device's state; shared options."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import click

from edgefl.core.errors import (
    ConfigError,
    DataError,
    EdgeflError,
    NetworkError,
    NotFoundError,
    NotJoinedError,
    UsageError,
)

if TYPE_CHECKING:
    from edgefl.core.types import Array, Json
    from edgefl.device.inference.deployments import DeployedModel, ModelStore
    from edgefl.device.state_dir import DeviceStateDir
    from edgefl.history.series import RunInfo
    from edgefl.storage.queries.columns import HistoryFilters
    from edgefl.storage.store import Store
    from edgefl.system.api_client import CoordinatorClient

log = logging.getLogger(__name__)

EVALUATOR_FOLDER = "evaluator"
_HISTORY_PATH = "/edgefl/v1/history"

FILE_TYPE = click.Path(path_type=Path, dir_okay=False)
EXISTING_FILE_TYPE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER_TYPE = click.Path(path_type=Path, file_okay=False)

state_option = click.option(
    "--state", "root", type=FOLDER_TYPE, help="State directory [default: ~/.local/share/edgefl/device]."
)


def _allow_modules(context: click.Context, _option: click.Parameter, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Allows the modules until the command ends."""
    from edgefl.core.extensions import allow_modules  # noqa: PLC0415 fast start

    context.with_resource(allow_modules(modules))
    return modules


allow_module_option = click.option(
    "--allow-module",
    "allowed_modules",
    multiple=True,
    metavar="MODULE",
    expose_value=False,
    callback=_allow_modules,
    help="Let tasks and strategies be classes of this module; may be repeated.",
)


def _resolve_root(_context: click.Context, _option: click.Parameter, value: Path | None) -> Path:
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

    return value or default_directory()


dir_option = click.option(
    "--dir",
    "root",
    type=FOLDER_TYPE,
    callback=_resolve_root,
    help="State directory [default: ~/.local/share/edgefl/coordinator].",
)


def record_command(store: Store, action: str) -> None:
    """Adds a command of this machine's user to the audit trail."""
    import getpass  # noqa: PLC0415 fast start
    from contextlib import suppress  # noqa: PLC0415 likewise

    user = "?"
    with suppress(KeyError, OSError):  # a user without an entry in the list of users
        user = getpass.getuser()
    store.record_audit(actor=f"user {user}", source="local", action=action, outcome="done", at=time.time())


def warn_visible_secret(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Callback of options that take a secret: warns when it stood on the command line."""
    from click.core import ParameterSource  # noqa: PLC0415 fast start

    if value is not None and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
        log.warning(
            "every user of this machine sees %s in the list of processes; better: %s",
            option.opts[0],
            "a file or standard input, or the variable " + str(option.envvar),
        )
    return value


@contextlib.contextmanager
def _set_variable(name: str, value: str) -> Iterator[None]:
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = previous


def _choose_fleet(context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    """Lets the command's clients go to this fleet until it ends."""
    if name is not None:
        context.with_resource(_set_variable("EDGEFL_FLEET", name))
    return name


fleet_option = click.option(
    "--fleet",
    "fleet_name",
    metavar="NAME",
    expose_value=False,
    callback=_choose_fleet,
    help="A fleet of `edgefl fleet list` [default: EDGEFL_FLEET, else the one in use].",
)


def url_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--url` and `--fleet`, which say where the command goes."""
    url = click.option("--url", metavar="URL", help="The coordinator [default: the one in operator.toml].")
    return url(fleet_option(function))


def make_client(url: str | None) -> CoordinatorClient:
    """Returns the client of the coordinator at `--url`, else of this user's."""
    from edgefl.system.api_client import CoordinatorClient  # noqa: PLC0415 fast start

    return CoordinatorClient.from_options(url)


def make_path(kind: str, name: str) -> str:
    """Returns the API's path of one run, device, model or rollout."""
    from edgefl.system.api_client import format_resource_path  # noqa: PLC0415 fast start

    return format_resource_path(kind, name)


def load_device_state(root: Path | None) -> DeviceStateDir | None:
    """Returns the state of this machine's device; None where it has joined no fleet and none is named.

    Raises:
        NotJoinedError: the named directory holds none.
    """
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    try:
        return DeviceStateDir.load(root)
    except NotJoinedError:
        if root is not None:
            raise
        return None


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--dir` and `--url`; the command gets what they name as `source`, see `resolve_source`."""

    @functools.wraps(function)
    def command(*args: Any, directory: Path | None, url: str | None, **options: Any) -> Any:
        return function(*args, source=resolve_source(directory, url), **options)

    url_choice = click.option(
        "--url", metavar="URL", help="Ask this coordinator [default: the one in operator.toml]."
    )
    directory_choice = click.option(
        "--dir", "directory", type=FOLDER_TYPE, help="Read the directory of one that does not run."
    )
    return directory_choice(url_choice(fleet_option(command)))


def resolve_source(directory: Path | None, url: str | None) -> Source:
    """Returns the named source, else this user's coordinator, else the default directory if it exists.

    Raises:
        UsageError: both are named.
    """
    from edgefl.system.api_client import is_coordinator_configured  # noqa: PLC0415 fast start

    if directory is not None and url is not None:
        raise UsageError("--dir reads a coordinator's directory and --url asks a coordinator; give one of them")
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

    def find_run(self, text: str) -> RunInfo:
        """Returns a run for figures; its batch size by this installation's defaults."""
        from edgefl.history.series import RunInfo  # noqa: PLC0415 numpy is slow to load

        record = self._get(make_path("runs", text), {}, "store")
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

    def list_models(self, run: str | None) -> list[Json]:
        """Returns the rows of the retained models of a run, or of all."""
        return _get_rows(self._get("/edgefl/v1/models", {"run": run}, "models"))

    def find_model(self, text: str, run: str | None) -> Json:
        """Returns the row of a retained model."""
        return self._get(make_path("models", text), {"run": run}, "models")

    @contextlib.contextmanager
    def open_model_file(self, sha256: str) -> Iterator[Path]:
        """Opens a model's safetensors file, named by its SHA-256, for the block."""
        with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
            path = Path(folder) / f"{sha256}.safetensors"
            with path.open("wb") as out:
                make_client(self.url).download(f"{make_path('models', sha256)}/file", out)
            yield path

    def _get_history(self, kind: str, params: Mapping[str, Any]) -> Json:
        return self._get(f"{_HISTORY_PATH}/{kind}", params, "store")

    def _get(self, path: str, params: Mapping[str, Any], directory_content: str) -> Json:
        """Returns a coordinator's reply; `directory_content` names the offline alternative in errors."""
        try:
            return make_client(self.url).get(path, params)
        except NetworkError as error:
            raise NetworkError(
                f"{error}; --dir DIR reads the {directory_content} of a coordinator that does not run"
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


def load_model(source: Source, row: Json, local: Path | None = None, cluster: int | None = None) -> dict[str, Array]:
    """Returns a model's tensors, checked against its SHA-256, with those of a board's file that stayed there.

    Of a model that is several it is that of `cluster`.

    A personal copy takes the place of the model's own tensors, or is mixed with them.

    Raises:
        DataError: it is of several clusters and nothing says which; or the board's file cannot be read, has a tensor
            that the model has too, or a copy of another model.
    """
    from edgefl.core.clusters import select_cluster  # noqa: PLC0415 fast start
    from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.array_files import read_npz  # noqa: PLC0415 likewise
    from edgefl.tasks.local_algorithms.personal_training import (  # noqa: PLC0415 likewise
        MIXTURE,
        make_personal_model,
        remove_prefix,
    )

    with source.open_model_file(row["sha256"]) as path:
        model = dict(select_cluster(load_model_file(path), cluster))
    if local is None:
        return model
    try:
        with local.open("rb") as file:
            found = read_npz(file)
    except (OSError, ValueError) as error:
        raise DataError(f"--local {local}: cannot be read: {error}") from None
    if copy := remove_prefix(found):
        for name, tensor in copy.items():
            if name != MIXTURE and (name not in model or model[name].shape != tensor.shape):
                raise DataError(
                    f"--local {local}: has a personal copy of {name!r} {tensor.shape}, which the model has not; "
                    "it is of another run"
                )
        return {**model, **make_personal_model(copy, model)}
    if both := sorted(model.keys() & found.keys()):
        raise DataError(f"--local {local}: has tensor {both[0]!r}, which the model has too; it is of another run")
    return {**model, **found}


def find_coordinator_shard(directory: Path | None, task: str) -> Path | None:
    """Returns a task's test shard of a coordinator on this machine; None where there is none."""
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise

    root = (directory or default_directory()).expanduser() / EVALUATOR_FOLDER
    try:
        shard = DeviceStateDir.load(root).settings.shards.get(task)
    except (ConfigError, NotJoinedError, OSError):
        return None
    return Path(shard) if shard and Path(shard).exists() else None


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


def get_policy(state_dir: Path, confine: str | None) -> str:
    """Returns what is confined: as the command says, else the board's settings."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    if confine is None and (state_dir / "device.json").is_file():
        confine = DeviceStateDir.load(state_dir).settings.confine
    return confine or "auto"


def open_store(root: Path | None, signers: Path) -> ModelStore:
    from edgefl.device.inference.deployments import ModelStore  # noqa: PLC0415 fast start
    from edgefl.device.state_dir import get_default_state_dir  # noqa: PLC0415 likewise
    from edgefl.device.updates.slots import load_update_config  # noqa: PLC0415 likewise

    return ModelStore(root or get_default_state_dir(), load_update_config(signers))


def find_deployed_file(root: Path | None, signers: Path) -> Path:
    store: Any = open_store(root, signers)
    current: DeployedModel | None = store.load().current
    if current is None:
        raise NotFoundError(
            f"no model is deployed in {store.folder.parent}; on the coordinator: edgefl model deploy MODEL, "
            "or name a file: --model FILE.onnx"
        )
    path: Path = store.get_permitted_path(current)
    return path
