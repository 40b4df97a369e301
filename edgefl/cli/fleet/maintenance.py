"""Maintenance commands of a coordinator: `edgefl coordinator backup`, `restore`, `rotate` and the like."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgefl.cli.sources import FILE_TYPE, FOLDER_TYPE, make_client, url_option, warn_visible_secret
from edgefl.core.errors import UsageError

if TYPE_CHECKING:
    from edgefl.coordinator.directory import CoordinatorDirectory
    from edgefl.core.config import AlertSettings

Function = TypeVar("Function", bound=Callable[..., Any])


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


@click.command()
@dir_option
@click.argument("file", type=FILE_TYPE)
@click.option("--without-models", is_flag=True, help="Leave the models of finished runs out.")
def backup(root: Path, file: Path, *, without_models: bool) -> None:
    """Write the whole coordinator, its keys included, to FILE (.tar.gz); it may be running."""
    from edgefl.cli.output import format_bytes  # noqa: PLC0415 fast start
    from edgefl.coordinator.backup import SECRETS_NOTICE, create_backup  # noqa: PLC0415 likewise
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 likewise
    from edgefl.storage.database import get_sqlite_path  # noqa: PLC0415 likewise

    directory = load_directory(root)
    store = get_sqlite_path(directory.store_url)
    manifest = create_backup(directory, file, store=store, with_models=not without_models)
    size = format_bytes(file.stat().st_size)
    click.echo(f"fleet {manifest.fleet} in {file}: {len(manifest.files)} files, {size}")
    click.echo(SECRETS_NOTICE)
    if store is None:
        click.echo("The store is not in it: dump that database with its own tools (pg_dump) now.")


@click.command()
@dir_option
@click.argument("file", type=FILE_TYPE)
def restore(root: Path, file: Path) -> None:
    """Make a coordinator's directory anew out of a backup; the boards need not join again."""
    from edgefl.coordinator.backup import restore_backup as put_back  # noqa: PLC0415 likewise

    directory, manifest = put_back(file, root)
    created_at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(manifest.created_at))
    click.echo(f"fleet {directory.fleet} as of {created_at} UTC in {root}: {len(manifest.files)} files")
    if manifest.revision is None:
        click.echo("the store was not in the backup: put its database back with its own tools")
    if not manifest.has_models:
        click.echo("the models of finished runs were left out of the backup")
    click.echo("never run it beside the coordinator that the backup was made of: the boards would know two")
    click.echo(f"addresses for boards: {', '.join(directory.addresses)}; others: edgefl coordinator readdress")
    click.echo(f"next: edgefl coordinator init{format_dir_argument(root)}, for an operator file; then start")


@click.command("alert-test")
@dir_option
@alert_options
def alert_test(root: Path, webhook: str | None, secret: str | None) -> None:
    """Send one alert to the webhook, to see that it arrives."""
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 likewise
    from edgefl.coordinator.monitoring.alerts import TEST_ALERT, Alert, AlertCondition  # noqa: PLC0415 fast start
    from edgefl.coordinator.monitoring.webhook import WebhookConfig, send_alert  # noqa: PLC0415 likewise

    directory = load_directory(root)
    settings = resolve_alert_settings(directory, webhook, secret)
    if settings.webhook is None:
        raise UsageError(f"no webhook is set: give --alert-webhook URL, or [alerts] in {directory.settings}")
    hook = WebhookConfig(url=settings.webhook, secret=settings.secret)
    condition = AlertCondition(kind=TEST_ALERT, subject="coordinator", message="this is a test, nothing is wrong")
    send_alert(
        hook, Alert(alert_id=uuid.uuid4().hex, condition=condition, started_at=time.time()).to_json(directory.fleet)
    )
    click.echo(f"{hook.host} took the test alert")


@click.command()
@url_option
def rotate(*, url: str | None) -> None:
    """Have every certificate and key of the fleet renewed now, the coordinator's own included; nobody joins again."""
    device_ids = make_client(url).post("/edgefl/v1/certificates/rotate")["devices"]
    click.echo(f"the coordinator's certificates are new; devices asked to renew theirs: {len(device_ids)}")
    click.echo("those that are away now do so when they are back; the fleet's CA stays")


@click.command()
def grafana() -> None:
    """Print a Grafana dashboard for the coordinator's metrics: edgefl coordinator grafana > edgefl.json."""
    from edgefl.coordinator.monitoring.metrics import load_grafana_dashboard  # noqa: PLC0415 fast start

    click.echo(json.dumps(load_grafana_dashboard(), indent=2))


def resolve_alert_settings(directory: CoordinatorDirectory, webhook: str | None, secret: str | None) -> AlertSettings:
    """Returns the alert settings: the options', else the directory's."""
    options: dict[str, Any] = {"webhook": webhook, "secret": secret}
    options = {name: value for name, value in options.items() if value is not None}
    return replace(directory.alerts, **options)


def format_dir_argument(root: Path) -> str:
    """Returns the `--dir` argument of a command for this directory; empty for the default one."""
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

    return "" if root == default_directory() else f" --dir {root}"
