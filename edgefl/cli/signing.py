"""Signed bundles: `edgefl signing` for their maker, `edgefl device trust` and `apply-update` on a device."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.output import SHORT_HASH_DIGITS, FullHelpGroup, echo, format_option, print_rows
from edgefl.cli.sources import EXISTING_FILE_TYPE, FOLDER_TYPE
from edgefl.core.errors import BundleError

if TYPE_CHECKING:
    from edgefl.device.updates.slots import Slots

PASSPHRASE_VARIABLE = "EDGEFL_SIGNING_PASSPHRASE"  # noqa: S105 the name of a variable, no secret
COLUMNS = ("kind", "name", "version", "serial", "key", "allow_downgrade", "bytes", "sha256", "trusted")
WHEEL_COLUMNS = ("file", "bytes", "sha256")

folder_option = click.option(
    "--keys",
    "folder",
    type=FOLDER_TYPE,
    help="Folder of the key pair [default: ~/.config/edgefl/signing].",
)
RESTART_TIMEOUT_S = 180.0


@click.group("signing", cls=FullHelpGroup)
def command() -> None:
    """Sign releases and task packs for the boards, with a key that no coordinator has."""


@command.command()
@folder_option
@click.option("--no-passphrase", is_flag=True, help="Keep the private key unencrypted, readable by you alone.")
def init(*, folder: Path | None, no_passphrase: bool) -> None:
    """Make the key pair that signs; its public half is what boards get.

    The passphrase is asked for, or taken from EDGEFL_SIGNING_PASSPHRASE.
    """
    from edgefl.system.bundles.keys import PRIVATE_KEY_FILE, PUBLIC_KEY_FILE, create_key_pair  # noqa: PLC0415 fast start

    folder = folder or _default_folder()
    passphrase = None
    if not no_passphrase:
        passphrase = os.environ.get(PASSPHRASE_VARIABLE) or click.prompt(
            "Passphrase for the new key", hide_input=True, confirmation_prompt=True, err=True
        )
    key_id = create_key_pair(folder, passphrase)
    click.echo(f"key {key_id}: {folder / PRIVATE_KEY_FILE} signs; keep it off the coordinator, and keep a copy")
    click.echo(f"boards trust it with: edgefl device trust {folder / PUBLIC_KEY_FILE}")


@command.command()
@click.argument(
    "wheels",
    nargs=-1,
    type=EXISTING_FILE_TYPE,
    metavar="[WHEEL]...",
)
@click.option(
    "--kind",
    type=click.Choice(["release", "pack", "removal"]),
    required=True,
    help="edgefl itself, a task pack, or what takes a pack off the boards again, without wheels.",
)
@click.option("--version", required=True, help="That of its main wheel, or of the pack that is removed.")
@click.option("--name", help="The main project of a pack of several, or the pack that is removed.")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="The bundle to write.",
)
@click.option("--allow-downgrade", is_flag=True, help="Boards may take it in place of a newer version.")
@folder_option
def sign(  # noqa: PLR0913 one argument per option
    *,
    wheels: tuple[Path, ...],
    kind: str,
    version: str,
    name: str | None,
    out: Path,
    allow_downgrade: bool,
    folder: Path | None,
) -> None:
    """Put WHEELs into a signed bundle; of one project there may be several, for different boards.

    A removal has none: sign --kind removal --name PACK --version VERSION --out FILE.
    """
    from edgefl.system.bundles.archive import BundleKind, BundleManifest  # noqa: PLC0415 likewise
    from edgefl.system.bundles.wheels import make_bundle  # noqa: PLC0415 fast start

    # Only the signer's clock decides which one is newer; devices compare serials, never times.
    draft = BundleManifest(
        kind=BundleKind(kind),
        version=version,
        name=name or "",
        serial=int(time.time()),
        allow_downgrade=allow_downgrade,
    )
    bundle = make_bundle(draft, wheels, _load_private_key(folder or _default_folder()), out)
    click.echo(
        f"{bundle.kind} {bundle.name} {bundle.version}, {len(bundle.wheels)} wheels, signed by {bundle.key}: {out}"
    )


@command.command()
@click.argument("bundle", type=EXISTING_FILE_TYPE, metavar="FILE")
@click.option(
    "--signers",
    type=FOLDER_TYPE,
    help="Verify against the public keys in this folder [default: your own key].",
)
@folder_option
@format_option
def show(*, bundle: Path, signers: Path | None, folder: Path | None, fmt: str) -> None:
    """Tell what a bundle is, who signed it, and which wheels it holds; exit code 51 when it cannot be trusted."""
    from edgefl.system.atomic_files import compute_sha256  # noqa: PLC0415 likewise
    from edgefl.system.bundles.archive import read_bundle  # noqa: PLC0415 fast start
    from edgefl.system.bundles.keys import TrustedKeys  # noqa: PLC0415 likewise

    with bundle.open("rb") as file:
        bundle_file = read_bundle(file)
        manifest = bundle_file.manifest
        own_folder = folder or _default_folder()
        fault = _find_fault(
            lambda: (TrustedKeys.load(signers) if signers else TrustedKeys.from_key_pair(own_folder)).verify(
                bundle_file
            )
        )
    row = {
        "kind": str(manifest.kind), "name": manifest.name, "version": manifest.version, "serial": manifest.serial,
        "key": manifest.key, "allow_downgrade": manifest.allow_downgrade, "bytes": bundle.stat().st_size,
        "sha256": compute_sha256(bundle), "trusted": fault is None,
    }  # fmt: skip
    wheels = [{"file": wheel.file, "bytes": wheel.num_bytes, "sha256": wheel.sha256} for wheel in manifest.wheels]
    if fmt == "table":
        print_rows([{"fact": name, "value": value} for name, value in row.items()], ("fact", "value"))
        print_rows([{**wheel, "sha256": str(wheel["sha256"])[:SHORT_HASH_DIGITS]} for wheel in wheels], WHEEL_COLUMNS)
    else:
        print_rows([{**row, "wheels": wheels}], (*COLUMNS, "wheels"), fmt, kind="bundles")
    if fault is not None:
        raise fault


def _find_fault(verify: Callable[[], object]) -> BundleError | None:
    try:
        verify()
    except BundleError as error:
        return error
    return None


def _load_private_key(folder: Path) -> Any:
    from edgefl.system.bundles.keys import PRIVATE_KEY_FILE, is_encrypted, load_private_key  # noqa: PLC0415 fast start

    path = folder / PRIVATE_KEY_FILE
    passphrase = None
    if is_encrypted(path):
        passphrase = os.environ.get(PASSPHRASE_VARIABLE) or click.prompt(
            f"Passphrase of {path}", hide_input=True, err=True
        )
    return load_private_key(path, passphrase)


def _default_folder() -> Path:
    from edgefl.system.api_client import get_operator_path  # noqa: PLC0415 fast start

    return get_operator_path().parent / "signing"


DEFAULT_ROOT, DEFAULT_STATE_DIR = Path("/opt/edgefl"), Path("/var/lib/edgefl")

signers_option = click.option(
    "--signers",
    type=FOLDER_TYPE,
    default=Path("/etc/edgefl/signers"),
    show_default=True,
    help="Folder of the public keys that are trusted.",
)


@click.command()
@click.argument("key", type=EXISTING_FILE_TYPE, metavar="KEY.pem")
@signers_option
def trust(*, key: Path, signers: Path) -> None:
    """Let this board take releases and task packs that KEY signs; run by hand on the board, as root."""
    from edgefl.core.errors import ConfigError  # noqa: PLC0415 likewise
    from edgefl.system.atomic_files import open_atomic  # noqa: PLC0415 likewise
    from edgefl.system.bundles.keys import compute_key_id, load_public_key  # noqa: PLC0415 fast start

    name = compute_key_id(load_public_key(key))
    try:
        signers.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open_atomic(signers / f"{name}.pem", mode=0o644) as file:
            file.write(key.read_bytes())
    except OSError as error:
        raise ConfigError(f"{signers} cannot be written: {error.strerror}; run it as root: sudo …") from None
    click.echo(f"this board now takes what key {name} signs; to end that: rm {signers / name}.pem")


@click.command("apply-update")
@click.option("--root", type=FOLDER_TYPE, default=DEFAULT_ROOT, show_default=True, help="Where the slots lie.")
@click.option(
    "--state",
    "state_dir",
    type=FOLDER_TYPE,
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
    from edgefl.device.updates.updater import TrialTimeouts, Updater  # noqa: PLC0415 likewise

    slots = Slots(root)
    _restart_in_slot(slots)
    updater = Updater(
        slots=slots,
        state_dir=state_dir,
        signers=signers,
        restart_agent=lambda: _run_restart(restart),
        timeouts=TrialTimeouts(health_s=health_s, settle_s=settle_s, away_s=away_s),
    )
    outcome = updater.run()
    if outcome is None:
        click.echo("nothing to do")
        return
    echo(f"{outcome.id}: {outcome.state}" + (f", {outcome.reason}" if outcome.reason else ""))
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
