"""`edgefl model deploy` and `deployments`, `edgefl devices update`, `install`, `uninstall` and `updates`.

They bring models, releases and task packs to devices, wait for them, and list them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.output import SHORT_HASH_DIGITS, echo, format_option, print_rows
from edgefl.cli.sources import EXISTING_FILE_TYPE, make_client, make_path, url_option
from edgefl.core.errors import RunFailedError, UsageError

if TYPE_CHECKING:
    from edgefl.system.api_client import CoordinatorClient

TERMINAL_STATUSES = frozenset({"done", "failed", "superseded"})
POLL_S = 0.5
FAILED_STATES = frozenset({"rejected", "failed", "rolled-back"})
INSTALL_COMMANDS = {
    "release": "update --to VERSION --bundle FILE",
    "pack": "install FILE",
    "removal": "uninstall FILE",
}

canary_option = click.option(
    "--canary", type=click.IntRange(0), default=0, show_default=True, help="How many devices get it first."
)
canary_time_option = click.option(
    "--within", "canary_s", type=float, metavar="SECONDS", help="Time of the canaries [default: 1800]."
)
wait_option = click.option(
    "--wait", "waits", is_flag=True, help="Stay until it is over; exit code 41 when a device could not take it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTable:
    """Kind of rollout, as it is printed: columns of its rows, and of the rows of its devices."""

    kind: str
    columns: tuple[str, ...]
    device_columns: tuple[str, ...]

    def list_or_show(self, rollout: str | None, url: str | None, fmt: str) -> None:
        """Prints all rollouts, or one with its devices."""
        if rollout is not None:
            self.show(make_client(url).get(make_path(f"{self.kind}s", rollout)), fmt)
            return
        rows = make_client(url).get(f"/edgefl/v1/{self.kind}s")["rows"]
        print_rows([_shorten_hash(row, fmt) for row in rows], self.columns, fmt, kind=f"{self.kind}s")

    def show(self, rollout: Any, fmt: str) -> None:
        """Prints a rollout and its devices; as CSV only the devices."""
        rollout = _shorten_hash(rollout, fmt)
        if fmt == "table":
            print_rows([rollout], self.columns)
            print_rows(rollout["each"], self.device_columns)
        elif fmt == "csv":
            print_rows(rollout["each"], self.device_columns, fmt, kind=f"{self.kind}s")
        else:
            print_rows([rollout], (*self.columns, "each"), fmt, kind=f"{self.kind}s")

    def submit(self, request: Mapping[str, Any], url: str | None, fmt: str, *, waits: bool) -> Any:
        """Submits a rollout, waits for its end if asked to, prints it and returns it."""
        client = make_client(url)
        fields = {name: value for name, value in request.items() if value is not None}
        rollout = client.post(f"/edgefl/v1/{self.kind}s", fields)
        rollout_id = rollout[f"{self.kind}_id"]
        for name, reason in sorted(rollout.get("left_out", {}).items()):
            echo(f"{name} is left out: {reason}", err=True)
        if waits:
            rollout = self._wait(rollout, client)
        if fmt == "table":
            echo(rollout_id)
        if waits or fmt != "table":
            self.show(rollout, fmt)
        return rollout

    def _wait(self, rollout: Any, client: CoordinatorClient) -> Any:
        """Returns a rollout at its end; prints the progress of its devices on stderr."""
        path, printed = make_path(f"{self.kind}s", rollout[f"{self.kind}_id"]), None
        while rollout["status"] not in TERMINAL_STATUSES:
            if (rollout["status"], rollout["counts"]) != printed:
                printed = rollout["status"], rollout["counts"]
                counts = ", ".join(f"{number} {state}" for state, number in sorted(rollout["counts"].items()))
                echo(f"{rollout['status']}: {counts}", err=True)
            time.sleep(POLL_S)
            rollout = client.get(path)
        return rollout


DEPLOYMENTS = RolloutTable(
    kind="deployment",
    columns=("deployment_id", "model", "task", "status", "counts", "created_at", "reason"),
    device_columns=(
        "device_id", "part", "state", "accuracy", "former_accuracy", "num_examples", "reported_at", "reason",
    ),
)  # fmt: skip
INSTALLATIONS = RolloutTable(
    kind="installation",
    columns=("installation_id", "kind", "name", "version", "status", "counts", "created_at", "reason"),
    device_columns=("device_id", "part", "state", "reported_at", "reason"),
)


@click.command()
@click.argument("model")
@canary_option
@click.option("--to", "devices", multiple=True, metavar="DEVICE", help="Only this device; may be repeated.")
@click.option("--within", "canary_s", type=float, metavar="SECONDS", help="Time of the canaries [default: 600].")
@click.option("--tolerance", type=float, help="How much lower the accuracy may be than before [default: 0.02].")
@click.option("--min-accuracy", type=float, help="What it must reach on a device's own data [default: 0].")
@click.option("--watch", "watches", is_flag=True, help="Stay until it is over; exit code 41 when it failed.")
@url_option
@format_option
def deploy(*, watches: bool, url: str | None, fmt: str, devices: tuple[str, ...], **request: Any) -> None:
    """Bring MODEL to the devices: a model's SHA-256 or its beginning, RUN, RUN:ROUND, RUN:best, best or latest.

    Each device fetches it, compares it with the model before on its own data, and switches or keeps that one.
    """
    deployment = DEPLOYMENTS.submit({**request, "devices": list(devices) or None}, url, fmt, waits=watches)
    if deployment["status"] == "failed":
        raise RunFailedError(f"deployment {deployment['deployment_id']} failed: {deployment['reason']}")


@click.command()
@click.argument("deployment", required=False)
@url_option
@format_option
def deployments(*, deployment: str | None, url: str | None, fmt: str) -> None:
    """List the deployments, oldest first, or the devices of one with what they report."""
    DEPLOYMENTS.list_or_show(deployment, url, fmt)


@click.command()
@click.argument("devices", nargs=-1, metavar="[DEVICE]...")
@click.option("--to", "version", required=True, metavar="VERSION", help="The release.")
@click.option("--bundle", type=EXISTING_FILE_TYPE, help="Its signed bundle, if the coordinator does not have it yet.")
@canary_option
@canary_time_option
@wait_option
@url_option
@format_option
def update(*, version: str, bundle: Path | None, url: str | None, **options: Any) -> None:
    """Bring release VERSION of edgefl to the boards, or to DEVICEs alone; a board on which it fails goes back."""
    request = {"version": version}
    if bundle is not None:
        uploaded = _upload_bundle(bundle, url, kind="release")
        if uploaded["version"] != version:
            raise UsageError(f"{bundle} is release {uploaded['version']}, not {version}")
        request = {"bundle": uploaded["sha256"]}
    _install(request, url=url, **options)


def _make_bundle_command(name: str, *, kind: str, text: str) -> click.Command:
    """Returns the command that deploys signed bundles of one kind to devices."""

    @click.command(name, help=text)
    @click.argument("pack", type=EXISTING_FILE_TYPE)
    @click.argument("devices", nargs=-1, metavar="[DEVICE]...")
    @canary_option
    @canary_time_option
    @wait_option
    @url_option
    @format_option
    def command(*, pack: Path, url: str | None, **options: Any) -> None:
        _install({"bundle": _upload_bundle(pack, url, kind=kind)["sha256"]}, url=url, **options)

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
    INSTALLATIONS.list_or_show(installation, url, fmt)


def _install(
    request: Mapping[str, Any], *, devices: tuple[str, ...], waits: bool, url: str | None, fmt: str, **canaries: Any
) -> None:
    request = {**request, **canaries, "devices": list(devices) or None}
    installation = INSTALLATIONS.submit(request, url, fmt, waits=waits)
    failed_rows = [row for row in installation["each"] if row["state"] in FAILED_STATES]
    if waits and (failed_rows or installation["status"] == "failed"):
        reasons = [f"{row['device_id']} {row['state']}: {row['reason']}" for row in failed_rows]
        scope = "off everywhere" if installation["kind"] == "removal" else "everywhere"
        raise RunFailedError(
            f"{installation['name']} {installation['version']} is not {scope}: "
            + ("; ".join(reasons) or installation["reason"])
        )


def _upload_bundle(bundle: Path, url: str | None, *, kind: str) -> Any:
    """Uploads a bundle of the command's kind; returns the coordinator's answer."""
    from edgefl.core.protocol import BUNDLES_PATH  # noqa: PLC0415 fast start
    from edgefl.system.bundles.archive import read_bundle  # noqa: PLC0415 likewise

    with bundle.open("rb") as file:
        manifest = read_bundle(file).manifest
        if manifest.kind != kind:
            raise UsageError(
                f"{bundle} is {manifest.kind} {manifest.name} {manifest.version}; bring it with: edgefl devices "
                + INSTALL_COMMANDS[manifest.kind]
            )
        file.seek(0)
        return make_client(url).upload(BUNDLES_PATH, file)


def _shorten_hash(row: Any, fmt: str) -> Any:
    return {**row, "model": row["model"][:SHORT_HASH_DIGITS]} if fmt == "table" and "model" in row else row
