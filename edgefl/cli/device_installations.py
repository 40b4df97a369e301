"""`edgefl devices update`, `install`, `uninstall` and `updates`: deploys releases and task packs to devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgefl.cli.render import format_option, print_rows
from edgefl.cli.rollouts import (
    canary_option,
    make_client,
    make_rollout_path,
    print_rollout,
    url_option,
    wait_for_rollout,
)
from edgefl.core.errors import RunFailedError, UsageError

COLUMNS = ("installation_id", "kind", "name", "version", "status", "counts", "created_at", "reason")
DEVICE_COLUMNS = ("device_id", "part", "state", "reported_at", "reason")
INSTALL_COMMANDS = {
    "release": "update --to VERSION --bundle FILE",
    "pack": "install FILE",
    "removal": "uninstall FILE",
}
FILE_TYPE = click.Path(path_type=Path, exists=True, dir_okay=False)

canary_time_option = click.option(
    "--within", "canary_s", type=float, metavar="SECONDS", help="Time of the canaries [default: 1800]."
)
wait_option = click.option(
    "--wait", "waits", is_flag=True, help="Stay until it is over; exit code 41 when a device could not take it."
)


@click.command()
@click.argument("devices", nargs=-1, metavar="[DEVICE]...")
@click.option("--to", "version", required=True, metavar="VERSION", help="The release.")
@click.option("--bundle", type=FILE_TYPE, help="Its signed bundle, if the coordinator does not have it yet.")
@canary_option
@canary_time_option
@wait_option
@url_option
@format_option
def update(  # noqa: PLR0913 one argument per option
    *,
    devices: tuple[str, ...],
    version: str,
    bundle: Path | None,
    canary: int,
    canary_s: float | None,
    waits: bool,
    url: str | None,
    fmt: str,
) -> None:
    """Bring release VERSION of edgefl to the boards, or to DEVICEs alone; a board on which it fails goes back."""
    request: dict[str, Any] = {"version": version}
    if bundle is not None:
        uploaded = _upload_bundle(bundle, url, kind="release")
        if uploaded["version"] != version:
            raise UsageError(f"{bundle} is release {uploaded['version']}, not {version}")
        request = {"bundle": uploaded["sha256"]}
    _request_installation(
        {**request, "devices": list(devices) or None, "canary": canary, "canary_s": canary_s}, waits, url, fmt
    )


def _make_bundle_command(name: str, *, kind: str, text: str) -> click.Command:
    """Returns the command that deploys signed bundles of one kind to devices."""

    @click.command(name, help=text)
    @click.argument("pack", type=FILE_TYPE)
    @click.argument("devices", nargs=-1, metavar="[DEVICE]...")
    @canary_option
    @canary_time_option
    @wait_option
    @url_option
    @format_option
    def command(  # noqa: PLR0913 one argument per option
        *,
        pack: Path,
        devices: tuple[str, ...],
        canary: int,
        canary_s: float | None,
        waits: bool,
        url: str | None,
        fmt: str,
    ) -> None:
        sha256 = _upload_bundle(pack, url, kind=kind)["sha256"]
        request = {"bundle": sha256, "devices": list(devices) or None, "canary": canary, "canary_s": canary_s}
        _request_installation(request, waits, url, fmt)

    return command


install = _make_bundle_command(
    "install",
    kind="pack",
    text="Bring the task pack in the signed bundle PACK to the boards, or to the DEVICEs alone.",
)
uninstall = _make_bundle_command(
    "uninstall",
    kind="removal",
    text="Take a task pack off the boards again, or off the DEVICEs alone, as the signed removal in PACK says.",
)


@click.command()
@click.argument("installation", required=False)
@url_option
@format_option
def updates(*, installation: str | None, url: str | None, fmt: str) -> None:
    """List what was brought to the boards, oldest first, or the devices of one with what they report."""
    if installation is None:
        rows = make_client(url).get("/edgefl/v1/installations")["rows"]
        print_rows(rows, COLUMNS, fmt, kind="installations")
        return
    _print_installation(make_client(url).get(make_rollout_path("installations", installation)), fmt)


def _upload_bundle(bundle: Path, url: str | None, *, kind: str) -> Any:
    """Uploads a bundle of the command's kind; returns the coordinator's answer."""
    from edgefl.bundles.archive import read_bundle  # noqa: PLC0415 fast start
    from edgefl.core.protocol import BUNDLES_PATH  # noqa: PLC0415 likewise

    with bundle.open("rb") as file:
        manifest = read_bundle(file).manifest
        if manifest.kind != kind:
            raise UsageError(
                f"{bundle} is {manifest.kind} {manifest.name} {manifest.version}; bring it with: edgefl devices "
                + INSTALL_COMMANDS[manifest.kind]
            )
        file.seek(0)
        return make_client(url).upload(BUNDLES_PATH, file)


def _request_installation(request: dict[str, Any], should_wait: bool, url: str | None, fmt: str) -> None:
    fields = {name: value for name, value in request.items() if value is not None}
    installation = make_client(url).post("/edgefl/v1/installations", fields)
    for name, reason in sorted(installation["left_out"].items()):
        click.echo(f"{name} is left out: {reason}", err=True)
    if should_wait:
        path = make_rollout_path("installations", installation["installation_id"])
        reader = make_client(url)
        installation = wait_for_rollout(installation, lambda: reader.get(path))
    if fmt == "table":
        click.echo(installation["installation_id"])
    if should_wait or fmt != "table":
        _print_installation(installation, fmt)
    failed_rows = [row for row in installation["each"] if row["state"] in {"refused", "failed", "rolled-back"}]
    if should_wait and (failed_rows or installation["status"] == "failed"):
        reasons = (
            "; ".join(f"{row['device_id']} {row['state']}: {row['reason']}" for row in failed_rows)
            or installation["reason"]
        )
        scope = "off everywhere" if installation["kind"] == "removal" else "everywhere"
        raise RunFailedError(f"{installation['name']} {installation['version']} is not {scope}: {reasons}")


def _print_installation(installation: Any, fmt: str) -> None:
    print_rollout(installation, fmt, kind="installations", columns=COLUMNS, device_columns=DEVICE_COLUMNS)
