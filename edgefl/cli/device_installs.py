"""`edgefl devices update`, `install`, `uninstall` and `updates`: bring releases and task packs to the boards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgefl.cli.render import format_option, print_rows
from edgefl.cli.rollouts import canary_option, operator, path_of, print_rollout, url_option, watched
from edgefl.errors import RunFailedError, UsageError

COLUMNS = ("installation_id", "kind", "name", "version", "status", "counts", "created_at", "reason")
DEVICE_COLUMNS = ("device_id", "part", "state", "reported_at", "reason")
BRINGS = {"release": "update --to VERSION --bundle FILE", "pack": "install FILE", "removal": "uninstall FILE"}
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)

within_option = click.option(
    "--within", "canary_s", type=float, metavar="SECONDS", help="Time of the canaries [default: 1800]."
)
wait_option = click.option(
    "--wait", "waits", is_flag=True, help="Stay until it is over; exit code 41 when a device could not take it."
)


@click.command()
@click.argument("devices", nargs=-1, metavar="[DEVICE]...")
@click.option("--to", "version", required=True, metavar="VERSION", help="The release.")
@click.option("--bundle", type=FILE, help="Its signed bundle, if the coordinator does not have it yet.")
@canary_option
@within_option
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
    wish: dict[str, Any] = {"version": version}
    if bundle is not None:
        brought = _bring(bundle, url, kind="release")
        if brought["version"] != version:
            raise UsageError(f"{bundle} is release {brought['version']}, not {version}")
        wish = {"bundle": brought["sha256"]}
    _order({**wish, "devices": list(devices) or None, "canary": canary, "canary_s": canary_s}, waits, url, fmt)


def _carrying(name: str, *, kind: str, text: str) -> click.Command:
    """Returns the command that brings signed bundles of one kind to the boards."""

    @click.command(name, help=text)
    @click.argument("pack", type=FILE)
    @click.argument("devices", nargs=-1, metavar="[DEVICE]...")
    @canary_option
    @within_option
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
        sha256 = _bring(pack, url, kind=kind)["sha256"]
        wish = {"bundle": sha256, "devices": list(devices) or None, "canary": canary, "canary_s": canary_s}
        _order(wish, waits, url, fmt)

    return command


install = _carrying(
    "install",
    kind="pack",
    text="Bring the task pack in the signed bundle PACK to the boards, or to the DEVICEs alone.",
)
uninstall = _carrying(
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
        rows = operator(url).get("/edgefl/v1/installations")["rows"]
        print_rows(rows, COLUMNS, fmt, kind="installations")
        return
    _print(operator(url).get(path_of("installations", installation)), fmt)


def _bring(bundle: Path, url: str | None, *, kind: str) -> Any:
    """Gives the coordinator a bundle, once it is of the kind that the command is for; returns what it is."""
    from edgefl.bundles.archive import read_bundle  # noqa: PLC0415 fast start
    from edgefl.protocol import BUNDLES_PATH  # noqa: PLC0415 likewise

    with bundle.open("rb") as file:
        found = read_bundle(file).manifest
        if found.kind != kind:
            raise UsageError(
                f"{bundle} is {found.kind} {found.name} {found.version}; bring it with: edgefl devices "
                + BRINGS[found.kind]
            )
        file.seek(0)
        return operator(url).upload(BUNDLES_PATH, file)


def _order(wish: dict[str, Any], waits: bool, url: str | None, fmt: str) -> None:
    given = {name: value for name, value in wish.items() if value is not None}
    found = operator(url).post("/edgefl/v1/installations", given)
    for name, reason in sorted(found["left_out"].items()):
        click.echo(f"{name} is left out: {reason}", err=True)
    if waits:
        path = path_of("installations", found["installation_id"])
        reader = operator(url)
        found = watched(found, lambda: reader.get(path))
    if fmt == "table":
        click.echo(found["installation_id"])
    if waits or fmt != "table":
        _print(found, fmt)
    bad = [row for row in found["each"] if row["state"] in {"refused", "failed", "rolled-back"}]
    if waits and (bad or found["status"] == "failed"):
        said = "; ".join(f"{row['device_id']} {row['state']}: {row['reason']}" for row in bad) or found["reason"]
        where = "off everywhere" if found["kind"] == "removal" else "everywhere"
        raise RunFailedError(f"{found['name']} {found['version']} is not {where}: {said}")


def _print(found: Any, fmt: str) -> None:
    print_rollout(found, fmt, kind="installations", columns=COLUMNS, device_columns=DEVICE_COLUMNS)
