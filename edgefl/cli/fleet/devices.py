"""`edgefl devices`: the devices of a fleet, as the coordinator sees them, their logs, and what is brought to them.

Releases and task packs are brought by `update`, `install` and `uninstall`, models by `edgefl model deploy`.
`edgefl top` shows devices, runs and events in a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.fleet.fleets import confirm
from edgefl.cli.history import parse_time
from edgefl.cli.output import SHORT_HASH_DIGITS, FullHelpGroup, echo, format_option, format_value, print_rows
from edgefl.cli.sources import EXISTING_FILE_TYPE, make_client, make_path, url_option
from edgefl.core.errors import RunFailedError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json
    from edgefl.system.api_client import CoordinatorClient

COLUMNS = (
    "device_id", "presence", "problem", "drift", "drained", "blocked", "allowance", "cloned", "silent_s", "role",
    "groups", "examples", "allotted_to", "run", "iteration", "temperature_c", "seconds_per_iteration", "model",
    "version", "joined_at",
)  # fmt: skip
LOG_COLUMNS = ("device_id", "n", "at", "level", "logger", "run", "assignment", "message")
FOLLOW_INTERVAL_S = 1.0
_OPTIONAL_COLUMNS = (
    "problem", "drift", "drained", "blocked", "allowance", "cloned", "groups", "allotted_to", "run", "iteration",
    "temperature_c", "model",
)  # fmt: skip
_DETAIL_COLUMNS = ("seconds_per_iteration", "joined_at")

TERMINAL_STATUSES = frozenset({"done", "failed", "superseded"})
POLL_S = 0.5
FAILED_STATES = frozenset({"rejected", "failed", "rolled-back"})
INSTALL_COMMANDS = {
    "release": "devices update --to VERSION --bundle FILE",
    "pack": "devices install FILE",
    "removal": "devices uninstall FILE",
    "signers": "devices signers FILE",
    "model": "model deploy MODEL --bundle FILE",
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


@click.group("devices", cls=FullHelpGroup)
def command() -> None:
    """On the owner's side: list and inspect the boards of a fleet, let them rest, take them out.

    What is typed on a board itself begins with `edgefl device`.
    """


@command.command("list")
@url_option
@format_option
def list_(*, url: str | None, fmt: str) -> None:
    """List the devices with presence, shards, what they are at and the model they run; `show` and JSON say more."""
    rows, columns = make_client(url).get("/edgefl/v1/devices")["rows"], list(COLUMNS)
    if fmt == "table":
        rows = [
            {
                **row,
                "presence": _format_presence(row),
                "model": (row.get("model") or "")[:SHORT_HASH_DIGITS],
                "cloned": "yes" if row.get("cloned") else "",
            }
            for row in rows
        ]
        unused = {name for name in _OPTIONAL_COLUMNS if not any(row.get(name) for row in rows)}
        columns = [name for name in COLUMNS if name not in unused and name not in _DETAIL_COLUMNS]
    print_rows(rows, columns, fmt, kind="devices")


@command.command()
@click.argument("device")
@url_option
@format_option
def show(*, device: str, url: str | None, fmt: str) -> None:
    """Show one device and its capabilities."""
    device_row = make_client(url).get(make_path("devices", device))
    if fmt != "table":
        print_rows([device_row], (*COLUMNS, "capabilities"), fmt, kind="devices")
        return
    # The name of a fact implies its unit, so a time is printed as a time here.
    visible = {**device_row, "presence": _format_presence(device_row)}
    facts = [{"fact": name, "value": format_value(name, visible.get(name))} for name in COLUMNS]
    if device_row.get("held_back"):
        facts.append({"fact": "held_back", "value": device_row["held_back"]})
    capabilities = [
        {"fact": name, "value": format_value(name, value)} for name, value in device_row["capabilities"].items()
    ]
    print_rows([*facts, *capabilities], ("fact", "value"), fmt)


@command.command()
@click.argument("device")
@click.option("--run", "run", metavar="RUN", help="Only what was logged while it worked for this run.")
@click.option("--since", metavar="WHEN", help="An age such as 2h, or a date and time (UTC).")
@click.option("--follow", "follows", is_flag=True, help="Go on printing what comes, until Ctrl-C.")
@url_option
@format_option
def logs(*, device: str, run: str | None, since: str | None, follows: bool, url: str | None, fmt: str) -> None:
    """Print what a device has logged: its own bounded log, fetched from the board."""
    if follows and fmt != "table":
        raise UsageError(f"--follow prints lines for people; --format {fmt} needs an end")
    lines = _read_lines(device, run=run, since=since, should_follow=follows, url=url)
    if fmt != "table":
        print_rows(list(lines), LOG_COLUMNS, fmt, kind="logs")
        return
    for line in lines:
        echo(_format_line(line))


@command.command()
@click.argument("device")
@url_option
def drain(*, device: str, url: str | None) -> None:
    """Let DEVICE finish what it has and give it no more, until it is resumed; restarts change nothing."""
    _post_action(device, "drain", url)
    click.echo(f"{device} gets no more work; to change that: edgefl devices resume {device}")


@command.command()
@click.argument("device")
@url_option
def resume(*, device: str, url: str | None) -> None:
    """Give DEVICE, which was drained, work again."""
    _post_action(device, "resume", url)
    click.echo(f"{device} gets work again")


@command.command()
@click.argument("device")
@click.option("--yes", is_flag=True, help="Do not ask.")
@url_option
def remove(*, device: str, yes: bool, url: str | None) -> None:
    """Take DEVICE out of the fleet: its key and certificate count no more, its history stays, its name is free."""
    make_client(url).get(make_path("devices", device))
    confirm(f"take {device} out of the fleet? To come back it has to join anew", is_confirmed=yes)
    _post_action(device, "remove", url)
    click.echo(f"{device} is out; to let it in again: edgefl coordinator token, and join anew on the board")


@click.command()
@url_option
def top(*, url: str | None) -> None:
    """Watch the fleet in this terminal: boards, run, events, what needs attention; q ends it.

    It needs the extra `coordinator`. A viewer's token suffices to look, stopping a run needs the role operator.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise UsageError(
            "edgefl top needs a terminal whose cursor it can move (ssh -t gives one; TERM must not be dumb); "
            "elsewhere: edgefl devices list, edgefl run watch, edgefl history events"
        )
    from edgefl.cli.fleet.top_app import TopApp  # noqa: PLC0415 Textual is slow to load, and an extra

    client = make_client(url)
    TopApp(client, client.url).run()


def _format_presence(row: Json) -> str:
    """Returns a device's state; of one that is away, since when."""
    presence, last_seen_at = str(row["presence"]), row.get("last_seen_at")
    if presence not in {"offline", "gone"} or last_seen_at is None:
        return presence
    return f"{presence} since {format_value('last_seen_at', last_seen_at)}"


def _post_action(device: str, action: str, url: str | None) -> None:
    make_client(url).post(f"{make_path('devices', device)}/{action}")


def _read_lines(
    device: str, *, run: str | None, since: str | None, should_follow: bool, url: str | None
) -> Iterator[Json]:
    operator, path, last_line = make_client(url), f"{make_path('devices', device)}/logs", None
    at = None if since is None else parse_time(since, now=time.time())
    while True:
        page = operator.get(path, {"run": run, "since": at, "after": last_line})
        yield from page["rows"]
        last_line = page["rows"][-1]["n"] if page["rows"] else last_line
        if not page["has_more"]:
            if not should_follow:
                return
            time.sleep(FOLLOW_INTERVAL_S)


def _format_line(line: Json) -> str:
    about: Any = line.get("assignment") or line.get("run")
    message = "\n".join(format_value("message", part) for part in str(line.get("message", "")).splitlines())
    return " ".join(
        [
            format_value("at", line.get("at")),
            f"{format_value('', line.get('level')):<7}",
            f"{format_value('', line.get('logger'))}:",
        ]
        + ([f"[{format_value('', about)}]"] if about and not message.startswith(str(about)) else [])
        + [message]
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
@click.option("--bundle", type=EXISTING_FILE_TYPE, help="Its signed bundle, for boards that run only signed models.")
@canary_option
@click.option("--to", "devices", multiple=True, metavar="DEVICE", help="Only this device; may be repeated.")
@click.option(
    "--cluster",
    type=click.IntRange(min=0),
    help="Of a run with ifca: which of its models, from 0; to the devices that took it last.",
)
@click.option("--within", "canary_s", type=float, metavar="SECONDS", help="Time of the canaries [default: 600].")
@click.option("--tolerance", type=float, help="How much lower the accuracy may be than before [default: 0.02].")
@click.option("--min-accuracy", type=float, help="What it must reach on a device's own data [default: 0].")
@click.option("--watch", "watches", is_flag=True, help="Stay until it is over; exit code 41 when it failed.")
@url_option
@format_option
def deploy(
    *, bundle: Path | None, watches: bool, url: str | None, fmt: str, devices: tuple[str, ...], **request: Any
) -> None:
    """Bring MODEL to the devices: a model's SHA-256 or its beginning, RUN, RUN:ROUND, RUN:best, best or latest.

    Each device fetches it, compares it with the model before on its own data, and switches or keeps that one.
    """
    if bundle is not None:
        request["bundle"] = _upload_bundle(bundle, url, kind="model")["sha256"]
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


@command.command()
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


def _add_bundle_command(name: str, *, kind: str, text: str) -> None:
    """Adds the command that deploys signed bundles of one kind to devices."""

    @command.command(name, help=text)
    @click.argument("pack", type=EXISTING_FILE_TYPE)
    @click.argument("devices", nargs=-1, metavar="[DEVICE]...")
    @canary_option
    @canary_time_option
    @wait_option
    @url_option
    @format_option
    def bring(*, pack: Path, url: str | None, **options: Any) -> None:
        _install({"bundle": _upload_bundle(pack, url, kind=kind)["sha256"]}, url=url, **options)


_add_bundle_command(
    "install",
    kind="pack",
    text="Bring the task pack in the signed bundle PACK to the boards, or to the DEVICEs alone.",
)
_add_bundle_command(
    "uninstall",
    kind="removal",
    text="Take a task pack off the boards again, or off the DEVICEs alone, as the signed removal in PACK says.",
)
_add_bundle_command(
    "signers",
    kind="signers",
    text="Bring the list of signers in the signed bundle PACK to the boards, or to the DEVICEs alone.",
)


@command.command()
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
                f"{bundle} is {manifest.kind} {manifest.name} {manifest.version}; bring it with: edgefl "
                + INSTALL_COMMANDS[manifest.kind]
            )
        file.seek(0)
        return make_client(url).upload(BUNDLES_PATH, file)


def _shorten_hash(row: Any, fmt: str) -> Any:
    return {**row, "model": row["model"][:SHORT_HASH_DIGITS]} if fmt == "table" and "model" in row else row
