"""`edgefl device trust` and `apply-update`: the steps of an update on the device itself."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.core.errors import BundleError

if TYPE_CHECKING:
    from edgefl.device.updates.slots import Slots

DEFAULT_ROOT, DEFAULT_STATE_DIR = Path("/opt/edgefl"), Path("/var/lib/edgefl")
RESTART_TIMEOUT_S = 180.0
DIRECTORY_TYPE = click.Path(path_type=Path, file_okay=False)

signers_option = click.option(
    "--signers",
    type=DIRECTORY_TYPE,
    default=Path("/etc/edgefl/signers"),
    show_default=True,
    help="Folder of the public keys that are trusted.",
)


@click.command()
@click.argument("key", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="KEY.pem")
@signers_option
def trust(*, key: Path, signers: Path) -> None:
    """Let this board take releases and task packs that KEY signs; run by hand on the board, as root."""
    from edgefl.bundles.keys import compute_key_id, load_public_key  # noqa: PLC0415 fast start
    from edgefl.core.errors import ConfigError  # noqa: PLC0415 likewise
    from edgefl.system.atomic_files import open_atomic  # noqa: PLC0415 likewise

    name = compute_key_id(load_public_key(key))
    try:
        signers.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open_atomic(signers / f"{name}.pem", mode=0o644) as file:
            file.write(key.read_bytes())
    except OSError as error:
        raise ConfigError(f"{signers} cannot be written: {error.strerror}; run it as root: sudo …") from None
    click.echo(f"this board now takes what key {name} signs; to end that: rm {signers / name}.pem")


@click.command("apply-update")
@click.option("--root", type=DIRECTORY_TYPE, default=DEFAULT_ROOT, show_default=True, help="Where the slots lie.")
@click.option(
    "--state",
    "state_dir",
    type=DIRECTORY_TYPE,
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="State of the device.",
)
@signers_option
@click.option("--health-s", type=click.FloatRange(1), default=300.0, show_default=True, help="Time to come up.")
@click.option("--settle-s", type=click.FloatRange(0), default=10.0, show_default=True, help="Time to stay up.")
@click.option("--away-s", type=click.FloatRange(1), default=3600.0, show_default=True, help="Wait for the network.")
@click.argument("restart", nargs=-1, required=True, metavar="RESTART...")
def apply_update(  # noqa: PLR0913 one argument per option
    *,
    root: Path,
    state_dir: Path,
    signers: Path,
    health_s: float,
    settle_s: float,
    away_s: float,
    restart: tuple[str, ...],
) -> None:
    """Install what the agent asks for, as root: build the idle slot, try it, keep it or go back.

    RESTART is the command that restarts the agent, such as: systemctl restart edgefl-device. What was cut off before
    is finished first; without anything to do nothing happens.
    """
    from edgefl.device.updates.slots import Slots  # noqa: PLC0415 fast start
    from edgefl.device.updates.trial import TrialTimeouts  # noqa: PLC0415 likewise
    from edgefl.device.updates.updater import Updater, UpdaterContext  # noqa: PLC0415 likewise

    slots = Slots(root)
    _restart_in_slot(slots)
    board = UpdaterContext(
        slots=slots, state_dir=state_dir, signers=signers, restart_agent=lambda: _run_restart(restart)
    )
    outcome = Updater(board, timeouts=TrialTimeouts(health_s=health_s, settle_s=settle_s, away_s=away_s)).run()
    if outcome is None:
        click.echo("nothing to do")
        return
    click.echo(f"{outcome.id}: {outcome.state}" + (f", {outcome.reason}" if outcome.reason else ""))
    if outcome.state != "running":
        raise BundleError(f"{outcome.name or outcome.id} is not installed: {outcome.state}, {outcome.reason}")


def _restart_in_slot(slots: Slots) -> None:
    """Re-executes from the slot's own path: through `current`, modules would come from the other one after a flip."""
    from edgefl.device.updates.slots import CURRENT_LINK  # noqa: PLC0415 fast start

    if Path(sys.prefix) == slots.root / CURRENT_LINK:
        program = str(slots.python(slots.get_active_slot()))
        os.execv(program, [program, "-I", "-m", "edgefl", *sys.argv[1:]])  # noqa: S606 without a shell


def _run_restart(command: tuple[str, ...]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=RESTART_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BundleError(f"`{shlex.join(command)}` does not work: {error}") from None
    if process.returncode:
        raise BundleError(
            f"`{shlex.join(command)}` ended with code {process.returncode}: {process.stderr.strip()[:300]}"
        )
