"""`edgefl provision`: makes devices of blank cards or running hosts; all ways but a Raspberry Pi's card."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edgefl.cli.output import FullHelpGroup, echo, format_option, print_rows
from edgefl.cli.provision.options import PLACEHOLDER_TOKEN, ProvisionOptions, board_options, read_text, read_token
from edgefl.cli.provision.raspberry_pi import command as raspberry_pi
from edgefl.cli.sources import (
    EXISTING_FILE_TYPE,
    FILE_TYPE,
    FOLDER_TYPE,
    dir_option,
    fleet_option,
    format_dir_argument,
    warn_visible_secret,
)
from edgefl.core.errors import JoinError, UsageError
from edgefl.core.protocol import JoinToken
from edgefl.provision import systemd_units as units
from edgefl.provision.payload import load_extras, make_payload, write_overlay, write_setup
from edgefl.provision.ssh_host import parse_hosts
from edgefl.provision.ssh_provisioning import HostResult, SshProvisionOptions, provision_hosts
from edgefl.provision.wheels import WHEEL_PLATFORMS, fill_wheelhouse, get_platform, load_lock_text, parse_lock
from edgefl.system.api_client import CoordinatorClient, find_operator_file

COLUMNS = ("host", "name", "result", "step", "seconds", "note")
MAX_HOSTS_CHARS = 1_000_000
TOKEN_TTL = "1h"  # noqa: S105 a lifetime, no secret


@click.command("jetson")
@board_options
@click.option(
    "--out",
    type=FILE_TYPE,
    required=True,
    help="The tar to write, such as overlay.tar.gz; it holds a token.",
)
def jetson(out: Path) -> None:
    """Make the overlay of a Jetson: unpacked over Linux_for_Tegra/rootfs before flashing, its first boot joins.

    JetPack 7.2 (Python 3.12). JetPack 6 has Python 3.10, which edgefl does not run on: use the container there.
    """
    options = ProvisionOptions.from_context()
    name, extras = options.get_single_name(), options.load_extras()
    options.make_join_file(name, PLACEHOLDER_TOKEN.token)  # rejects before a token is made
    token = options.get_token()
    write_overlay(out, make_payload(options.make_join_file(name, token.token).to_text(), extras))
    click.echo(f"{name}: {out}, {out.stat().st_size / 1e6:.1f} MB{token.format_expiry()}")
    click.echo(f"next, in Linux_for_Tegra: sudo tar -xpzf {out} -C rootfs --numeric-owner; then flash")


@click.command("wheels")
@click.option("--board", "name", type=click.Choice(list(WHEEL_PLATFORMS)), required=True, help="Whose lock.")
@click.option("--out", "folder", type=FOLDER_TYPE, required=True, help="The folder to fill.")
@click.option("--with-torch", is_flag=True, help="Also what training with torch needs.")
@click.option(
    "--edgefl-wheel",
    "own_wheel",
    type=EXISTING_FILE_TYPE,
    help="edgefl's own wheel [default: built from this checkout].",
)
def wheels(*, name: str, folder: Path, with_torch: bool, own_wheel: Path | None) -> None:
    """Download the wheels of a board's lock, checked by their hashes, and add edgefl's own."""
    family = get_platform(name)
    lock = parse_lock(load_lock_text(family, "train" if with_torch else ""))
    wheels = fill_wheelhouse(folder, family, lock, own_wheel=own_wheel)
    megabytes = sum(path.stat().st_size for path in wheels) / 1e6
    click.echo(f"{len(wheels)} wheels for {name} in {folder} ({megabytes:.0f} MB)")


@click.command("setup")
@dir_option
@click.option("--wheels", type=FOLDER_TYPE, help="edgefl's wheel, or all wheels of the boards.")
@click.option("--lock", type=EXISTING_FILE_TYPE, help="A hash-pinned requirements file [default: each board's].")
@click.option(
    "--signer",
    "signers",
    multiple=True,
    type=EXISTING_FILE_TYPE,
    help="Public key, or signers.json, whose releases they run; repeat.",
)
def setup(root: Path, wheels: Path | None, lock: Path | None, signers: tuple[Path, ...]) -> None:
    """Let boards download edgefl from this coordinator, and join by one pasted line.

    On the coordinator's machine, running or not; again for another version. `edgefl coordinator token` and the page
    then print the line. Only who has a join token can download.
    """
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start

    directory = load_directory(root)
    extras, version = load_extras(wheels, lock, signers)
    write_setup(directory.setup_script, directory.setup_payload, extras)
    megabytes = directory.setup_payload.stat().st_size / 1e6
    click.echo(f"boards can download edgefl {version} from this coordinator ({megabytes:.1f} MB)")
    click.echo(f"next: edgefl coordinator token{format_dir_argument(root)}")


@click.command("systemd")
@click.option("--device", "kind", flag_value="device", default="device", help="Units of a device (the default).")
@click.option("--coordinator", "kind", flag_value="coordinator", help="Units of a coordinator.")
@click.option("--out", type=FOLDER_TYPE, help="Write them into this folder.")
@click.option("--install", "installs", is_flag=True, help="As root: put them in place, make the user, enable them.")
@click.option("--python", help="The interpreter that has edgefl [default: that of /opt/edgefl, else this one].")
@click.option("--shard", "shards", multiple=True, metavar="TASK=PATH", help="Data that the device is to see; repeat.")
@click.option("--gpu", "has_gpu", is_flag=True, help="Let the device use the GPU.")
@click.option("--broker", "has_broker", is_flag=True, help="Run the coordinator's broker as a unit of its own.")
@click.option(
    "--collect", "has_collector", is_flag=True, help="Run the device's collector, of /etc/edgefl/collect.toml."
)
@click.option("--serve", "has_server", is_flag=True, help="Run the inference server of the device's deployed model.")
def systemd(  # noqa: PLR0913 one argument per option
    *,
    kind: units.MachineKind,
    out: Path | None,
    installs: bool,
    python: str | None,
    shards: tuple[str, ...],
    has_gpu: bool,
    has_broker: bool,
    has_collector: bool,
    has_server: bool,
) -> None:
    """Print, write or install hardened units for this machine, with the paths of this installation."""
    if kind == "coordinator" and (has_gpu or shards or has_collector or has_server):
        raise UsageError(
            "--gpu, --shard, --collect and --serve are for devices; "
            "a coordinator's test shard stands in its own options"
        )
    if kind == "device" and has_broker:
        raise UsageError("--broker is for a coordinator: edgefl provision systemd --coordinator --broker")
    installation = units.SystemdInstallation(
        python=python or (units.DEFAULT_PYTHON if Path(units.DEFAULT_PYTHON).exists() else sys.executable),
        kind=kind,
        shards=dict(_parse_shard(text) for text in shards),
        has_gpu=has_gpu,
        has_broker=has_broker,
        has_collector=has_collector,
        has_server=has_server,
    )
    if installs:
        for path in units.install_units(installation):
            click.echo(f"wrote {path}")
        click.echo(f"enabled {', '.join(installation.enabled_units)}")
    elif out is not None:
        for path in units.write_units(units.render_units(installation), out):
            click.echo(f"wrote {path}")
        click.echo(f"next: sudo cp -r {shlex.quote(str(out))}/. {units.UNITS_FOLDER}/")
        for command in units.list_commands(installation):
            click.echo(f"next: sudo {shlex.join(command)}")
    else:
        for name, text in units.render_units(installation).items():
            click.echo(f"# {units.UNITS_FOLDER / name}\n{text}")
    if (installs or out is not None) and (step := units.get_next_step(installation)):
        click.echo(f"next: {step}")


def _parse_shard(text: str) -> tuple[str, str]:
    task, separator, path = text.partition("=")
    if not (separator and task and path):
        raise UsageError(f"--shard must be TASK=PATH, got {text!r}")
    return task, path


@click.command("ssh")
@click.option(
    "--hosts",
    "hosts_file",
    type=click.File(),
    required=True,
    help="One board a line: [user@]host name=NAME TASK=PATH.",
)
@click.option(
    "--token",
    "text",
    envvar="EDGEFL_JOIN_TOKEN",
    callback=warn_visible_secret,
    help="A token for all; better in the variable or in a file [default: one is made for each].",
)
@click.option(
    "--token-file", type=click.Path(path_type=Path, allow_dash=True), help="A file with it; - is the input."
)
@click.option("--url", metavar="URL", help="The coordinator that makes the tokens [default: operator.toml's].")
@fleet_option
@click.option("--wheels", type=FOLDER_TYPE, help="edgefl's wheel, or all wheels.")
@click.option("--lock", type=EXISTING_FILE_TYPE, help="A hash-pinned requirements file [default: each board's].")
@click.option(
    "--signer",
    "signers",
    multiple=True,
    type=EXISTING_FILE_TYPE,
    help="Public key, or signers.json, whose releases it runs; repeat.",
)
@click.option("--jobs", type=click.IntRange(1, 256), default=8, show_default=True, help="How many boards at a time.")
@click.option(
    "--become", type=click.Choice(["sudo", "doas", "none"]), default="sudo", show_default=True, help="Who makes root."
)
@click.option(
    "--wait", "wait_s", type=click.IntRange(1, 86400), default=300, show_default=True, help="Seconds to join."
)
@click.option("--ssh-config", type=EXISTING_FILE_TYPE, help="Another ssh_config than your own.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only look at the boards.")
@format_option
def ssh(  # noqa: PLR0913 one argument per option
    *,
    hosts_file: Any,
    text: str | None,
    token_file: Path | None,
    url: str | None,
    wheels: Path | None,
    lock: Path | None,
    signers: tuple[Path, ...],
    jobs: int,
    become: str,
    wait_s: int,
    ssh_config: Path | None,
    is_dry: bool,
    fmt: str,
) -> None:
    """Install edgefl on boards that run already, and join them; data stays where it is.

    Whatever is done already is left alone, so the same command again mends what failed.
    """
    hosts = parse_hosts(read_text(hosts_file, "the hosts file", max_chars=MAX_HOSTS_CHARS))
    fingerprint, make = _make_token_source(text if token_file is None else read_token(token_file), url)
    extra, version = load_extras(wheels, lock, signers)
    options = SshProvisionOptions(
        version=version,
        ca_fingerprint=fingerprint,
        issue_token=lambda host: make(host.role),
        clock=time.monotonic,
        now=time.time,
        extra_files=extra,
        is_offline=sum(name.startswith("wheels/") for name in extra) > 1,
        become="" if become == "none" else become,
        wait_s=wait_s,
        is_dry_run=is_dry,
        ssh_options=["-F", str(ssh_config)] if ssh_config else [],
        on_step=lambda host, step: echo(f"{host.name}: {step}", err=True),
    )
    results = provision_hosts(hosts, options, jobs=jobs)
    print_rows([_make_row(result) for result in results], COLUMNS, fmt, kind="boards")
    if failed := [result.host.name for result in results if result.outcome == "failed"]:
        raise JoinError(f"{len(failed)} of {len(hosts)} boards did not get through: {', '.join(failed)}")


def _make_row(result: HostResult) -> dict[str, Any]:
    return {
        "host": result.host.label,
        "name": result.host.name,
        "result": result.outcome,
        "step": result.step,
        "seconds": round(result.seconds, 1),
        "note": result.text,
    }


def _make_token_source(text: str | None, url: str | None) -> tuple[str, Callable[[str], str]]:
    """Returns the fleet's fingerprint, and a token issuer for a role."""
    if text is not None:
        return JoinToken.parse(text).ca_fingerprint, lambda _role: text
    operator = CoordinatorClient.from_options(url)

    def make(role: str) -> str:
        answer = operator.post("/edgefl/v1/tokens", {"ttl": TOKEN_TTL, "uses": 1, "role": role})
        return JoinToken.parse(str(answer["token"])).text()

    return find_operator_file(operator.url).ca_fingerprint, make


@click.group(cls=FullHelpGroup)
def command() -> None:
    """Make boards into devices: cards, images, hosts that run already."""


command.add_command(raspberry_pi)
command.add_command(jetson)
command.add_command(ssh)
command.add_command(wheels)
command.add_command(setup)
command.add_command(systemd)
