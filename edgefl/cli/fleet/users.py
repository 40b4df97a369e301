"""`edgefl coordinator user`: who may use a coordinator, on its own machine; `edgefl user`: the same over HTTPS."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.output import FullHelpGroup, format_option, print_rows
from edgefl.cli.sources import FILE_TYPE, dir_option, make_client, make_path, record_command, url_option
from edgefl.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgefl.coordinator.directory import CoordinatorDirectory
    from edgefl.system.api_client import OperatorFile

COLUMNS = ("name", "role", "state", "created_at", "expires_at", "revoked_at")
USERS_PATH = "/edgefl/v1/users"
role_option = click.option(
    "--role",
    type=click.Choice(["viewer", "operator", "admin"]),
    default="viewer",
    show_default=True,
    help="A viewer reads, an operator also runs and deploys, an admin also manages devices, tokens and users.",
)
expires_option = click.option(
    "--expires", metavar="TIME", help="How long it is good for: 12h, 30d, 26w [default: until revoked]."
)
file_option = click.option(
    "--file",
    type=FILE_TYPE,
    callback=lambda _context, _option, file: _check_new(file),
    help="Write a new operator file (mode 0600) in place of printing the token.",
)


@click.group("user", cls=FullHelpGroup)
def command() -> None:
    """Name people who may use the coordinator, on its machine: add, list, revoke."""


@command.command()
@dir_option
@click.argument("name")
@role_option
@expires_option
@file_option
def add(root: Path, name: str, role: str, expires: str | None, file: Path | None) -> None:
    """Add a user, NAME or an e-mail address, and print the access token once; only its hash is kept."""
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start
    from edgefl.coordinator.enrolment.tokens import make_user, parse_ttl  # noqa: PLC0415 likewise
    from edgefl.storage.store import Store  # noqa: PLC0415 likewise

    ttl_s, directory = None if expires is None else parse_ttl(expires), load_directory(root)
    # One transaction: where the file cannot be written nobody has the token, and there is no user.
    with Store.open(directory.store_url) as store, store.batch(durable=True):
        token = make_user(store, name, role, ttl_s=ttl_s, now=time.time())
        record_command(store, f"coordinator user add {name} --role {role}")
        _write_operator_file(file, role, token, lambda: _make_operator_file(directory))
    _print_token(file, name, token)


@command.command("list")
@dir_option
@format_option
def list_(root: Path, fmt: str) -> None:
    """List all users, with role and state."""
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start
    from edgefl.storage.store import Store  # noqa: PLC0415 likewise

    now = time.time()
    with Store.open(load_directory(root).store_url) as store:
        users = store.list_users()
    rows = [{**asdict(user), "state": user.get_state(now)} for user in users]
    print_rows(rows, COLUMNS, fmt, kind="users")


@command.command()
@dir_option
@click.argument("name")
def revoke(root: Path, name: str) -> None:
    """End what a user may do, at once: token, sessions of the page, sign-in at the OpenID provider."""
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start
    from edgefl.coordinator.enrolment.tokens import check_user_name  # noqa: PLC0415 likewise
    from edgefl.storage.store import Store  # noqa: PLC0415 likewise

    name = check_user_name(name)
    with Store.open(load_directory(root).store_url) as store:
        store.revoke_user(name, at=time.time())
        record_command(store, f"coordinator user revoke {name}")
    click.echo(f"{name} may do nothing any more")


@click.group("user", cls=FullHelpGroup)
def remote_command() -> None:
    """Name people who may use a coordinator, from any machine, as an admin: add, list, revoke."""


@remote_command.command("add")
@click.argument("name")
@role_option
@expires_option
@file_option
@url_option
def add_remotely(name: str, role: str, expires: str | None, file: Path | None, url: str | None) -> None:
    """Add a user, NAME or an e-mail address, and print the access token once; only its hash is kept."""
    from edgefl.system.api_client import find_operator_file  # noqa: PLC0415 fast start

    client = make_client(url)
    token = client.post(make_path("users", name), {"role": role, "expires": expires})["token"]
    try:
        _write_operator_file(file, role, token, lambda: replace(find_operator_file(client.url), url=client.url))
    except BaseException:  # nobody has the token
        client.post(f"{make_path('users', name)}/revoke")
        raise
    _print_token(file, name, token)


@remote_command.command("list")
@url_option
@format_option
def list_remotely(url: str | None, fmt: str) -> None:
    """List all users, with role and state."""
    print_rows(make_client(url).get(USERS_PATH)["rows"], COLUMNS, fmt, kind="users")


@remote_command.command("revoke")
@click.argument("name")
@url_option
def revoke_remotely(name: str, url: str | None) -> None:
    """End what a user may do, at once: token, sessions of the page, sign-in at the OpenID provider."""
    name = make_client(url).post(f"{make_path('users', name)}/revoke")["name"]
    click.echo(f"{name} may do nothing any more")


def _check_new(file: Path | None) -> Path | None:
    if file is not None and file.exists():
        raise UsageError(f"{file} exists already; name a new file")
    return file


def _write_operator_file(file: Path | None, role: str, token: str, make_file: Callable[[], OperatorFile]) -> None:
    from edgefl.system.atomic_files import write_atomic  # noqa: PLC0415 fast start

    if file is not None:
        viewer, operator = (token, "") if role == "viewer" else ("", token)
        content = replace(make_file(), operator_token=operator, viewer_token=viewer)
        write_atomic(file, content.to_toml().encode())


def _print_token(file: Path | None, name: str, token: str) -> None:
    click.echo(token if file is None else f"{file}: give it to {name}, as ~/.config/edgefl/operator.toml")


def _make_operator_file(directory: CoordinatorDirectory) -> OperatorFile:
    from edgefl.system.api_client import OperatorFile  # noqa: PLC0415 fast start

    return OperatorFile(
        url=f"https://{directory.addresses[0]}",
        fleet=directory.fleet,
        ca_fingerprint=directory.compute_ca_fingerprint(),
        ca_pem=directory.ca_cert.read_text(),
        operator_token="",
    )
