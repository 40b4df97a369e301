"""`edgefl coordinator`: set-up, operation, maintenance and join tokens of a coordinator, and its operator's file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgefl.cli.fleet import users
from edgefl.cli.output import FullHelpGroup, make_broker_option, text_format_option
from edgefl.cli.signing import sign
from edgefl.cli.sources import (
    FILE_TYPE,
    FileOrObjectType,
    NumberRange,
    dir_option,
    fetched_file,
    format_dir_argument,
    make_client,
    record_command,
    send_files,
    to_option,
    url_option,
    warn_visible_secret,
)
from edgefl.core.errors import DataError, UsageError
from edgefl.system.api_client import OperatorFile, get_operator_path, list_operator_files, load_operator_file

if TYPE_CHECKING:
    from edgefl.coordinator.directory import CoordinatorDirectory
    from edgefl.core.config import AlertSettings
    from edgefl.system.object_storage import ObjectAddress

Function = TypeVar("Function", bound=Callable[..., Any])
DEFAULT_HOST = "0.0.0.0"  # noqa: S104 devices are on other machines; every connection is TLS with authentication
MAX_PARALLEL_RUNS = 64

modules_option = click.option(
    "--allow-module",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Let run files name classes of this module; may be repeated, remembered.",
)


def save_operator_file(content: OperatorFile, path: Path) -> Path:
    """Writes the file and returns its path: beside `path`, where that is another fleet's."""
    from edgefl.system.atomic_files import write_atomic  # noqa: PLC0415 only `coordinator` commands write

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and load_operator_file(path).ca_fingerprint != content.ca_fingerprint:
        path = path.with_name(f"operator.{content.label}.toml")
    write_atomic(path, content.to_toml().encode())
    return path


def grant_access(directory: CoordinatorDirectory) -> tuple[CoordinatorDirectory, Path]:
    """Gives this machine's user an operator file for a coordinator, unless a valid one exists.

    The fleet in use stays in use.

    Returns:
        The directory with the hashes of the new tokens, and the path of the file.
    """
    from edgefl.coordinator.directory import add_access_tokens, hash_token  # noqa: PLC0415 as above

    url = f"https://127.0.0.1:{directory.port}"
    for path, existing in list_operator_files().items():
        if hash_token(existing.operator_token) in directory.operator_sha256:
            if existing.url != url and existing.url.startswith("https://127.0.0.1:"):
                save_operator_file(replace(existing, url=url), path)
            return directory, path
    directory, operator, viewer = add_access_tokens(directory)
    content = OperatorFile(
        url=url,
        fleet=directory.fleet,
        ca_fingerprint=directory.compute_ca_fingerprint(),
        ca_pem=directory.ca_cert.read_text(),
        operator_token=operator,
        viewer_token=viewer,
    )
    return directory, save_operator_file(content, get_operator_path())


def _parse_store_option(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Returns the store's URL; a file's path is made absolute, since the settings store it."""
    from click.core import ParameterSource  # noqa: PLC0415 fast start

    from edgefl.storage.database import has_password  # noqa: PLC0415 likewise

    if value is None:
        return None
    if value == "-":
        return click.get_text_stream("stdin").readline().strip()
    is_visible = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    if is_visible and has_password(value):
        raise UsageError(
            "--store got a URL with a password, which every user of this machine sees in the list of processes; "
            "put the URL into EDGEFL_STORE, or on standard input with --store -, or its password into ~/.pgpass"
        )
    return value if "://" in value else str(Path(value).absolute())


store_option = click.option(
    "--store",
    metavar="URL",
    envvar="EDGEFL_STORE",
    callback=_parse_store_option,
    help="postgresql://USER@HOST/DATABASE, remembered; - reads it from standard input "
    "[default: SQLite in the state directory].",
)


models_option = click.option(
    "--models",
    metavar="URL",
    envvar="EDGEFL_MODELS",
    help="s3://BUCKET/PREFIX or file:///FOLDER that the fleet's hosts share, remembered: with --store, another host "
    "can take over [default: the state directory, of this host alone].",
)


def alert_options(function: Function) -> Function:
    """Adds the options of alerts; omitted ones are taken from `settings.toml`."""
    key = click.option(
        "--alert-secret",
        "secret",
        envvar="EDGEFL_ALERT_SECRET",
        callback=warn_visible_secret,
        help="Key that signs them; better in the variable.",
    )
    url = click.option(
        "--alert-webhook", "webhook", metavar="URL", envvar="EDGEFL_ALERT_WEBHOOK", help="Told of alerts."
    )
    return url(key(function))


@click.group(cls=FullHelpGroup)
def command() -> None:
    """Set up and run the coordinator, make join tokens, name its users."""


command.add_command(users.command)
command.add_command(sign)


@command.command()
@dir_option
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="A name or address under which boards find it.")
@click.option("--port", type=click.IntRange(1, 65535), help="HTTPS port [default: 8000].")
@click.option("--fleet", metavar="NAME", help="The fleet's name [default: fleet].")
@store_option
@models_option
@modules_option
def init(  # noqa: PLR0913, PLR0917 one argument per option
    root: Path,
    hosts: tuple[str, ...],
    port: int | None,
    fleet: str | None,
    store: str | None,
    models: str | None,
    modules: tuple[str, ...],
) -> None:
    """Make the state directory: CA, server certificate, settings, and this user's operator file.

    Doing it again loses nothing: the CA and the devices stay, new hosts are added.
    """
    from edgefl.coordinator.directory import (  # noqa: PLC0415 likewise
        add_allowed_modules,
        init_directory,
        set_shared_models,
        set_store,
    )

    directory = set_store(init_directory(root, hosts=hosts, fleet=fleet, port=port), store)
    directory = set_shared_models(directory, models)
    directory = add_allowed_modules(directory, modules)
    directory, operator_path = grant_access(directory)
    click.echo(f"fleet {directory.fleet} in {root}")
    click.echo(f"addresses for boards: {', '.join(directory.addresses)}")
    click.echo(f"operator file: {operator_path}")
    if operator_path != get_operator_path():
        in_use, label = load_operator_file(get_operator_path()).fleet, load_operator_file(operator_path).label
        click.echo(
            f"commands still go to fleet {in_use}; to this one with --fleet {label}, or for good: edgefl fleet use"
        )
    click.echo(f"next: edgefl coordinator start{format_dir_argument(root)}")


@command.command()
@dir_option
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), help="HTTPS port; remembered [default: what init said].")
@click.option("--broker", default="auto", show_default=True, help="auto, mosquitto, embedded or mqtts://HOST:PORT.")
@click.option("--broker-port", type=click.IntRange(1, 65535), default=8883, show_default=True, help="MQTT over TLS.")
@store_option
@models_option
@modules_option
@click.option("--test-shard", "test_shards", multiple=True, metavar="TASK=PATH", help="Shard to evaluate models on.")
@click.option(
    "--device-metrics",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="A fleet of more devices than this has no series of its own for each in /metrics; 0 for none ever.",
)
@alert_options
@click.option(
    "--keep-history",
    "keep_history_days",
    type=NumberRange(min=1),
    metavar="DAYS",
    help="Forget earlier heartbeats, comings, goings, refusals, and updates of runs that ended [default: keep all].",
)
@click.option(
    "--parallel-runs",
    type=click.IntRange(1, MAX_PARALLEL_RUNS),
    default=1,
    show_default=True,
    help="Runs that are active at a time, each with boards of its own; each needs memory for its models.",
)
def start(  # noqa: PLR0913, PLR0917 one argument per option
    root: Path,
    host: str,
    port: int | None,
    broker: str,
    broker_port: int,
    store: str | None,
    models: str | None,
    modules: tuple[str, ...],
    test_shards: tuple[str, ...],
    device_metrics: int,
    webhook: str | None,
    secret: str | None,
    keep_history_days: float | None,
    parallel_runs: int,
) -> None:
    """Run the coordinator until SIGTERM or Ctrl-C.

    Where hosts share --store and --models, this one stands by while another is active, and takes over from it.
    """
    from edgefl.cli.fleet.models import export_for_devices  # noqa: PLC0415 likewise
    from edgefl.coordinator.directory import (  # noqa: PLC0415 likewise
        StartOptions,
        add_allowed_modules,
        load_directory,
        set_shared_models,
        set_store,
    )
    from edgefl.coordinator.service import Coordinator, serve  # noqa: PLC0415 likewise
    from edgefl.core.extensions import allow_modules  # noqa: PLC0415 likewise
    from edgefl.engine.assembly.build import build_run  # noqa: PLC0415 fast start

    shards = dict(_parse_test_shard(text) for text in test_shards)
    directory = load_directory(root)
    if models is not None or directory.shared_models is not None:  # at once: it may have to stand by
        directory = set_shared_models(set_store(directory, store), models)
    port = port or directory.port
    with allow_modules([*directory.allow_modules, *modules]):
        options = StartOptions(
            host=host,
            port=port,
            broker=broker,
            broker_port=broker_port,
            test_shards=shards,
            device_metrics=device_metrics,
            alerts=resolve_alert_settings(directory, webhook, secret),
            keep_history_days=keep_history_days,
            parallel_runs=parallel_runs,
        )
        serve(
            Coordinator(
                directory,
                options,
                partial(build_run, bases=directory.bases),
                lambda current: add_allowed_modules(set_store(_save_port(current, port), store), modules),
                export_for_devices,
            )
        )


@command.command()
@dir_option
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8883, show_default=True, help="MQTT over TLS.")
@make_broker_option("--kind")
def broker(root: Path, host: str, port: int, kind: str) -> None:
    """Run the fleet's broker alone until SIGTERM or Ctrl-C; it outlives a coordinator that uses it.

    The coordinator is started beside it with the --broker that this prints.
    """
    from edgefl.coordinator.brokers.mqtt_service import run_broker  # noqa: PLC0415 fast start
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 likewise
    from edgefl.core.protocol import validate_address  # noqa: PLC0415 likewise

    run_broker(
        load_directory(root),
        host=host,
        port=port,
        kind=kind,
        on_ready=lambda address: click.echo(
            f"next: edgefl coordinator start --broker mqtts://{validate_address(address.host, address.port)}"
            + format_dir_argument(root)
        ),
    )


@command.command()
@dir_option
@click.option("--ttl", default="24h", show_default=True, help="How long it lets in: 30m, 24h, 7d.")
@click.option("--uses", type=int, default=1, show_default=True, help="How many boards it lets in.")
@click.option("--group", "groups", multiple=True, help="Put the boards into this group; may be repeated.")
@click.option(
    "--role",
    type=click.Choice(["trainer", "evaluator"]),
    default="trainer",
    show_default=True,
    help="What they become.",
)
@text_format_option
def token(root: Path, ttl: str, uses: int, groups: tuple[str, ...], role: str, style: str) -> None:
    """Print a token that lets boards join; the coordinator may be running or not."""
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start
    from edgefl.coordinator.enrolment.tokens import (  # noqa: PLC0415 likewise
        format_join_command,
        format_setup_command,
        make_token,
        parse_ttl,
    )
    from edgefl.storage.store import Store  # noqa: PLC0415 likewise

    directory, now, ttl_s = load_directory(root), time.time(), parse_ttl(ttl)
    with Store.open(directory.store_url) as store:
        join_token = make_token(store, directory, now=now, ttl_s=ttl_s, uses=uses, groups=groups, role=role)
        record_command(store, f"coordinator token {join_token.token_id}")
    setup_command = format_setup_command(join_token, directory)
    if style == "json":
        value = {
            "v": 1,
            "token": join_token.text(),
            "setup": setup_command,
            "token_id": join_token.token_id,
            "fleet": join_token.fleet,
        }
        value |= {"expires_at": now + ttl_s, "uses": uses, "groups": list(groups), "role": role}
        click.echo(
            json.dumps({**value, "addresses": list(join_token.addresses), "join": format_join_command(join_token)})
        )
        return
    click.echo(join_token.text())
    click.echo(format_join_command(join_token))
    if setup_command is not None:
        click.echo("a board without edgefl, in one line; TASK=PATH is its data, or nothing:")
        click.echo(setup_command)


@command.command()
@dir_option
@click.option("--port", type=click.IntRange(1, 65535), help="HTTPS port [default: as before].")
@click.argument("hosts", nargs=-1, metavar="[HOST]...")
def readdress(root: Path, port: int | None, hosts: tuple[str, ...]) -> None:
    """Give the coordinator other names and addresses; without any, those that this machine has now.

    The CA stays, so boards that have joined keep trusting it. Restart a running coordinator afterwards.
    """
    directory = _change_addresses(root, hosts, port)
    click.echo(f"addresses for boards: {', '.join(directory.addresses)}")
    click.echo("a running coordinator uses the new certificate after a restart")


@command.command()
@dir_option
@click.argument("file", type=FILE_TYPE)
@click.option("--without-models", is_flag=True, help="Leave the models of finished runs out.")
@to_option
def backup(root: Path, file: Path, *, without_models: bool, address: ObjectAddress | None) -> None:
    """Write the whole coordinator, its keys included, to FILE (.tar.gz); it may be running.

    With --to, a FILE that an earlier try wrote and did not send to its end is sent on, and not written anew.
    """
    from edgefl.cli.output import format_bytes  # noqa: PLC0415 fast start
    from edgefl.coordinator.backup import SECRETS_NOTICE, create_backup  # noqa: PLC0415 likewise
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 likewise
    from edgefl.storage.database import get_sqlite_path  # noqa: PLC0415 likewise
    from edgefl.system.object_storage import has_open_upload  # noqa: PLC0415 likewise

    directory = load_directory(root)
    if address is not None and file.is_file() and has_open_upload(file, address):
        click.echo(f"{file} is there, and goes on to be sent")
        send_files(file, address)
        return
    store = get_sqlite_path(directory.store_url)
    manifest = create_backup(directory, file, store=store, with_models=not without_models)
    size = format_bytes(file.stat().st_size)
    click.echo(f"fleet {manifest.fleet} in {file}: {len(manifest.files)} files, {size}")
    click.echo(SECRETS_NOTICE)
    if store is None:
        click.echo("The store is not in it: dump that database with its own tools (pg_dump) now.")
    if address is not None:
        send_files(file, address)


@command.command()
@dir_option
@click.argument("file", type=FileOrObjectType())
def restore(root: Path, file: Path | ObjectAddress) -> None:
    """Make a coordinator's directory anew out of a backup; the boards need not join again.

    FILE may be s3://BUCKET/KEY: it is fetched beside the directory, on from where an earlier try broke off.
    """
    from edgefl.coordinator.backup import restore_backup as put_back  # noqa: PLC0415 likewise

    with fetched_file(file, root.absolute().parent, f".{root.name}.backup") as path:
        directory, manifest = put_back(path, root)
    created_at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(manifest.created_at))
    click.echo(f"fleet {directory.fleet} as of {created_at} UTC in {root}: {len(manifest.files)} files")
    if manifest.revision is None:
        click.echo("the store was not in the backup: put its database back with its own tools")
    if not manifest.has_models:
        click.echo("the models of finished runs were left out of the backup")
    click.echo("never run it beside the coordinator that the backup was made of: the boards would know two")
    click.echo(f"addresses for boards: {', '.join(directory.addresses)}; others: edgefl coordinator readdress")
    click.echo(f"next: edgefl coordinator init{format_dir_argument(root)}, for an operator file; then start")


@command.command()
@url_option
def rotate(*, url: str | None) -> None:
    """Have every certificate and key of the fleet renewed now, the coordinator's own included; nobody joins again."""
    device_ids = make_client(url).post("/edgefl/v1/certificates/rotate")["devices"]
    click.echo(f"the coordinator's certificates are new; devices asked to renew theirs: {len(device_ids)}")
    click.echo("those that are away now do so when they are back; the fleet's CA stays")


@command.command()
def grafana() -> None:
    """Print a Grafana dashboard for the coordinator's metrics: edgefl coordinator grafana > edgefl.json."""
    from edgefl.coordinator.monitoring.metrics import load_grafana_dashboard  # noqa: PLC0415 fast start

    click.echo(json.dumps(load_grafana_dashboard(), indent=2))


def resolve_alert_settings(directory: CoordinatorDirectory, webhook: str | None, secret: str | None) -> AlertSettings:
    """Returns the alert settings: the options', else the directory's."""
    options: dict[str, Any] = {"webhook": webhook, "secret": secret}
    options = {name: value for name, value in options.items() if value is not None}
    return replace(directory.alerts, **options)


def _save_port(directory: CoordinatorDirectory, port: int) -> CoordinatorDirectory:
    """Returns the directory with this port; called once the port is bound."""
    return directory if port == directory.port else _change_addresses(directory.root, directory.hosts, port)


def _change_addresses(root: Path, hosts: Sequence[str], port: int | None) -> CoordinatorDirectory:
    """Returns the directory with these hosts and this port, saved to the operator file too."""
    from edgefl.coordinator.directory import change_addresses  # noqa: PLC0415 fast start

    directory = change_addresses(root, hosts, port=port)
    if get_operator_path().exists():
        directory, _ = grant_access(directory)
    return directory


def _parse_test_shard(text: str) -> tuple[str, Path]:
    task, separator, path = text.partition("=")
    if not separator or not task or not path:
        raise UsageError(f"--test-shard must be TASK=PATH, got {text!r}")
    if not Path(path).exists():
        raise DataError(f"test shard {path!r} of task {task} does not exist; give a .npz file or a folder of them")
    return task, Path(path).absolute()
