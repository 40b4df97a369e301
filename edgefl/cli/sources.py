"""Where commands read: a running coordinator, the directory of a stopped one, a device's state; shared options."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.core.errors import (
    ConfigError,
    DataError,
    NotFoundError,
    NotJoinedError,
    UsageError,
)

if TYPE_CHECKING:
    from edgefl.client.sources import Source
    from edgefl.core.types import Array, Json
    from edgefl.device.inference.deployments import DeployedModel, ModelStore
    from edgefl.device.state_dir import DeviceStateDir
    from edgefl.storage.store import Store
    from edgefl.system.api_client import CoordinatorClient
    from edgefl.system.object_storage import ObjectAddress

log = logging.getLogger(__name__)

EVALUATOR_FOLDER = "evaluator"

FILE_TYPE = click.Path(path_type=Path, dir_okay=False)
EXISTING_FILE_TYPE = click.Path(path_type=Path, exists=True, dir_okay=False)
PATH_TYPE = click.Path(path_type=Path)
FOLDER_TYPE = click.Path(path_type=Path, file_okay=False)


class FileOrObjectType(click.ParamType):
    """A file, as a `Path`, or an object of an S3 storage, as an `ObjectAddress`."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from edgefl.system.object_storage import SCHEME, parse_address  # noqa: PLC0415 fast start

        if isinstance(value, str) and value.startswith(SCHEME):
            return parse_address(value, allow_folder=False)
        return FILE_TYPE.convert(value, param, ctx)


def _parse_address(_context: click.Context, _option: click.Parameter, value: str | None) -> ObjectAddress | None:
    from edgefl.system.object_storage import parse_address  # noqa: PLC0415 fast start

    return None if value is None else parse_address(value)


to_option = click.option(
    "--to",
    "address",
    metavar="s3://BUCKET/KEY",
    callback=_parse_address,
    help="Send it to an S3 storage too, on from where an earlier try broke off; a KEY/ is a folder.",
)


def send_files(path: Path, address: ObjectAddress, *, replace: bool = False) -> None:
    """Sends a file, or those of a folder, to an S3 storage, and says so; see `upload_file`."""
    from edgefl.system.object_storage import upload_file  # noqa: PLC0415 fast start

    if not path.is_dir():
        click.echo(f"sent to {upload_file(path, address, replace=replace)}")
        return
    if address.name:
        raise UsageError(f"--to of a folder must end with a slash, got {address}")
    files = sorted(file for file in path.rglob("[!.]*") if file.is_file())
    for file in files:
        upload_file(file, address.join(file.relative_to(path).as_posix()), replace=replace)
    click.echo(f"sent {len(files)} files to {address}")


@contextlib.contextmanager
def fetched_file(
    file: Path | ObjectAddress, folder: Path, name: str, *, max_bytes: int | None = None, sha256: str | None = None
) -> Iterator[Path]:
    """Yields a file; an object is fetched into a folder under this name first, and removed afterwards.

    Raises:
        EdgeflError: as `download_file`, which checks this SHA-256; that of a file here is not looked at.
    """
    if isinstance(file, Path):
        yield file
        return
    from edgefl.system.atomic_files import make_private_directory  # noqa: PLC0415 fast start
    from edgefl.system.object_storage import download_file  # noqa: PLC0415 likewise

    if not folder.is_dir():
        make_private_directory(folder)
    path = folder / name
    download_file(file, path, max_bytes=max_bytes, sha256=sha256)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


class NumberRange(click.FloatRange):
    """Range without NaN, which is below and above no bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            bound = "" if self.min is None else f" {'above' if self.min_open else 'of at least'} {self.min:g}"
            raise UsageError(f"{param.opts[0] if param else 'it'} must be a number{bound}, got {value}")
        return number


window_option = click.option(
    "--window", type=NumberRange(1, 86_400), default=60, show_default=True, help="Seconds of rows at a time."
)

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


def format_dir_argument(root: Path) -> str:
    """Returns the `--dir` argument of a command for this directory; empty for the default one."""
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

    return "" if root == default_directory() else f" --dir {root}"


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
        from edgefl.client.sources import resolve_source  # noqa: PLC0415 fast start

        return function(*args, source=resolve_source(directory, url), **options)

    url_choice = click.option(
        "--url", metavar="URL", help="Ask this coordinator [default: the one in operator.toml]."
    )
    directory_choice = click.option(
        "--dir", "directory", type=FOLDER_TYPE, help="Read the directory of one that does not run."
    )
    return directory_choice(url_choice(fleet_option(command)))


def load_model(source: Source, row: Json, local: Path | None = None, cluster: int | None = None) -> dict[str, Array]:
    """Returns a model's tensors, checked against its SHA-256, with those of a board's file that stayed there.

    Of a model that is several it is that of `cluster`.

    A personal copy takes the place of the model's own tensors, or is mixed with them.

    Raises:
        DataError: it is of several clusters and nothing says which; or the board's file cannot be read, has a tensor
            that the model has too, or a copy of another model.
    """
    from edgefl.client.fleet import Fleet, SavedModel  # noqa: PLC0415 fast start
    from edgefl.tasks.datasets.array_files import read_npz  # noqa: PLC0415 likewise
    from edgefl.tasks.local_algorithms.personal_training import (  # noqa: PLC0415 likewise
        MIXTURE,
        make_personal_model,
        remove_prefix,
    )

    model = SavedModel(Fleet(source), row).load(cluster=cluster)
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
