"""`edgefl flower`: what of a Flower app runs on the boards of a fleet."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from edgefl.cli.output import FullHelpGroup, echo, format_option, print_rows
from edgefl.cli.sources import EXISTING_FILE_TYPE, FOLDER_TYPE, PATH_TYPE, make_client, make_path, url_option
from edgefl.core.errors import UnsoundError, UsageError

MAX_KEY_BYTES = 10_000
FINDING_COLUMNS = ("verdict", "where", "what")


@click.group("flower", cls=FullHelpGroup)
def command() -> None:
    """Bring a Flower app to the boards as it is."""


@command.command()
@click.argument("app", type=PATH_TYPE)
@format_option
def check(*, app: Path, fmt: str) -> None:
    """Say what of a Flower app works, a folder or a .fab, and run none of it; exit code 50 where it would not."""
    from edgefl.flower.app_bundle import open_app  # noqa: PLC0415 fast start
    from edgefl.flower.app_check import check_app  # noqa: PLC0415 likewise

    with open_app(app) as opened:
        findings = check_app(opened)
    print_rows([asdict(finding) for finding in findings], FINDING_COLUMNS, fmt, kind="findings")
    if faults := [finding for finding in findings if finding.verdict == "fails"]:
        raise UnsoundError(f"{app} would not run: {faults[0].where}: {faults[0].what}")


@command.command()
@click.argument("app", type=PATH_TYPE)
@click.option("--out", type=FOLDER_TYPE, default=Path("dist"), show_default=True, help="Folder for the wheel.")
def pack(*, app: Path, out: Path) -> None:
    """Make a wheel of a Flower app, a folder or a .fab, to sign as a pack and to install beside the coordinator."""
    from edgefl.flower.app_bundle import open_app  # noqa: PLC0415 likewise
    from edgefl.flower.app_job import get_job_name  # noqa: PLC0415 likewise
    from edgefl.flower.app_pack import write_app_wheel  # noqa: PLC0415 likewise

    with open_app(app) as opened:
        path = write_app_wheel(opened, out)
    echo(str(path))
    name, job = opened.name, get_job_name(opened.name)
    echo(
        f"sign it: edgefl signing sign {path} --kind pack --version {opened.version} --out {name}.bundle; "
        f"boards install it (edgefl devices install), and join in: edgefl device shard add {job} PATH",
        err=True,
    )


@command.command("add-node")
@click.argument("name")
@click.argument("key", type=EXISTING_FILE_TYPE)
@click.option("--app", "apps", multiple=True, required=True, help="A Flower app that it takes part in; repeatable.")
@click.option("--group", "groups", multiple=True, help="A group of the device; repeatable.")
@url_option
def add_node(*, name: str, key: Path, apps: tuple[str, ...], groups: tuple[str, ...], url: str | None) -> None:
    """Let a stock flower-supernode with the public KEY take part as device NAME."""
    from edgefl.coordinator.fleet.supernode_keys import parse_supernode_key  # noqa: PLC0415 fast start
    from edgefl.flower.app_job import get_job_name  # noqa: PLC0415 likewise

    try:
        with key.open("rb") as file:
            content = file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise UsageError(f"{key} cannot be read: {error.strerror}") from None
    try:
        public_key = parse_supernode_key(content.decode(errors="replace")).decode()
    except UsageError as error:
        raise UsageError(f"{key}: {error}") from None
    jobs = [get_job_name(app) for app in apps]
    make_client(url).post(make_path("supernodes", name), {"key": public_key, "jobs": jobs, "groups": list(groups)})
    echo(name)
    echo(
        "start it: flower-supernode --superlink HOST:PORT --root-certificates ca.pem "
        f"--auth-supernode-private-key {key.with_suffix('')}; ca.pem lies in the coordinator's directory",
        err=True,
    )
