"""`edgefl coordinator user`: who may use a coordinator; the commands work on its store, whether it runs or not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.output import FullHelpGroup, format_option, print_rows
from edgefl.cli.sources import FILE_TYPE, dir_option, record_command
from edgefl.core.errors import UsageError

if TYPE_CHECKING:
    from edgefl.coordinator.directory import CoordinatorDirectory
    from edgefl.system.api_client import OperatorFile

COLUMNS = ("name", "role", "state", "created_at", "expires_at", "revoked_at")


@click.group("user", cls=FullHelpGroup)
def command() -> None:
    """Name people who may use the coordinator: add, list, revoke."""


@command.command()
@dir_option
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["viewer", "operator", "admin"]),
    default="viewer",
    show_default=True,
    help="A viewer reads, an operator also runs and deploys, an admin also manages devices and tokens.",
)
@click.option("--expires", metavar="TIME", help="How long it is good for: 12h, 30d, 26w [default: until revoked].")
@click.option("--file", type=FILE_TYPE, help="Write a new operator file (mode 0600) in place of printing the token.")
def add(root: Path, name: str, role: str, expires: str | None, file: Path | None) -> None:
    """Add a user, NAME or an e-mail address, and print the access token once; only its hash is kept."""
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start
    from edgefl.coordinator.enrolment.tokens import make_user, parse_ttl  # noqa: PLC0415 likewise
    from edgefl.storage.store import Store  # noqa: PLC0415 likewise
    from edgefl.system.atomic_files import write_atomic  # noqa: PLC0415 likewise

    ttl_s, directory = None if expires is None else parse_ttl(expires), load_directory(root)
    if file is not None and file.exists():
        raise UsageError(f"{file} exists already; name a new file")
    # One transaction: where the file cannot be written nobody has the token, and there is no user.
    with Store.open(directory.store_url) as store, store.batch(durable=True):
        token = make_user(store, name, role, ttl_s=ttl_s, now=time.time())
        record_command(store, f"coordinator user add {name} --role {role}")
        if file is not None:
            write_atomic(file, _make_operator_file(directory, role, token).to_toml().encode())
    click.echo(token if file is None else f"{file}: give it to {name}, as ~/.config/edgefl/operator.toml")


def _make_operator_file(directory: CoordinatorDirectory, role: str, token: str) -> OperatorFile:
    from edgefl.system.api_client import OperatorFile  # noqa: PLC0415 fast start

    return OperatorFile(
        url=f"https://{directory.addresses[0]}",
        fleet=directory.fleet,
        ca_fingerprint=directory.compute_ca_fingerprint(),
        ca_pem=directory.ca_cert.read_text(),
        operator_token="" if role == "viewer" else token,
        viewer_token=token if role == "viewer" else "",
    )


@command.command("list")
@dir_option
@format_option
def list_(root: Path, fmt: str) -> None:
    """List all users, with role and state."""
    from dataclasses import asdict  # noqa: PLC0415 fast start

    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 likewise
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
