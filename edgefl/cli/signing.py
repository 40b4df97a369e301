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
from edgefl.cli.sources import EXISTING_FILE_TYPE, FOLDER_TYPE, NumberRange
from edgefl.core.errors import BundleError, UsageError

if TYPE_CHECKING:
    from edgefl.device.updates.slots import Slots

PASSPHRASE_VARIABLE = "EDGEFL_SIGNING_PASSPHRASE"  # noqa: S105 the name of a variable, no secret
COLUMNS = (
    "kind", "name", "version", "serial", "expires", "key", "signers", "allow_downgrade", "bytes", "sha256", "trusted",
)  # fmt: skip
WHEEL_COLUMNS = ("file", "bytes", "sha256")

folder_option = click.option(
    "--keys",
    "folder",
    type=FOLDER_TYPE,
    help="Folder of the key pair [default: ~/.config/edgefl/signing].",
)
days_option = click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="How long boards take it, by their clock.",
)
RESTART_TIMEOUT_S, DAY_S = 180.0, 86_400
SIGNERS_KIND = "signers"

DEFAULT_ROOT, DEFAULT_STATE_DIR = Path("/opt/edgefl"), Path("/var/lib/edgefl")

signers_option = click.option(
    "--signers",
    type=FOLDER_TYPE,
    default=Path("/etc/edgefl/signers"),
    show_default=True,
    help="Folder of the public keys that are trusted.",
)


@click.group("signing", cls=FullHelpGroup)
def command() -> None:
    """Sign releases, task packs and models for the boards, with a key that no coordinator has."""


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
@click.argument("files", nargs=-1, type=EXISTING_FILE_TYPE, metavar="[FILE]...")
@click.option(
    "--kind",
    type=click.Choice(["release", "pack", "removal", "model", "signers"]),
    required=True,
    help="edgefl itself, a task pack, what takes a pack off the boards again, a model for a deployment, or your list "
    "of signers.",
)
@click.option("--version", help="That of the main wheel, or of the pack that is removed.")
@click.option("--name", help="The main project of a pack of several, or the pack that is removed.")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="The bundle to write.",
)
@click.option("--allow-downgrade", is_flag=True, help="Boards may take it in place of a newer version.")
@days_option
@folder_option
def sign(  # noqa: PLR0913 one argument per option
    *,
    files: tuple[Path, ...],
    kind: str,
    version: str | None,
    name: str | None,
    out: Path,
    allow_downgrade: bool,
    days: int,
    folder: Path | None,
) -> None:
    """Put FILEs into a signed bundle: wheels, of one project several for different boards, or a model's ONNX file.

    A removal and a list of signers have none: sign --kind removal --name PACK --version VERSION --out FILE.
    """
    from edgefl.system.bundles.archive import BundleKind, BundleManifest  # noqa: PLC0415 likewise
    from edgefl.system.bundles.keys import LIST_FILE, load_lists  # noqa: PLC0415 likewise
    from edgefl.system.bundles.wheels import make_bundle  # noqa: PLC0415 fast start

    folder = folder or _default_folder()
    bundle_kind, lists = BundleKind(kind), load_lists(folder / LIST_FILE)
    model = _read_model_facts(files) if bundle_kind is BundleKind.MODEL else None
    if bundle_kind is BundleKind.SIGNERS:
        if not lists:
            raise UsageError(f"there is no {folder / LIST_FILE}; make one: edgefl signing signers")
        version = str(lists[-1].content.version)
    if version is None and model is None:
        raise UsageError("say with --version which version it is")
    # Only the signer's clock decides which one is newer: the serial is the time of signing.
    serial = int(time.time())
    draft = BundleManifest(
        kind=bundle_kind,
        version=version or "0",
        name=(name or "") if model is None else model.bundle_name,
        serial=serial,
        expires=serial + days * DAY_S,
        allow_downgrade=allow_downgrade,
        model=model,
    )
    bundle = make_bundle(draft, files, _load_private_key(folder), out, lists)
    what = "a model" if model else f"{len(bundle.wheels)} wheels"
    echo(f"{bundle.kind} {bundle.name} {bundle.version}, {what}, signed by {bundle.key}: {out}")


@command.command()
@click.argument("file", type=EXISTING_FILE_TYPE, metavar="FILE")
@folder_option
def cosign(*, file: Path, folder: Path | None) -> None:
    """Add your signature to a bundle, or to the last list of a file of signers, where a threshold needs several."""
    from edgefl.system.bundles.keys import load_lists, write_lists  # noqa: PLC0415 likewise
    from edgefl.system.bundles.wheels import add_signature  # noqa: PLC0415 fast start

    key = _load_private_key(folder or _default_folder())
    if file.suffix != ".json":
        manifest = add_signature(file, key)
        echo(f"{file}: {manifest.kind} {manifest.name} {manifest.version} has your signature, too")
        return
    lists = load_lists(file)
    if not lists:
        raise UsageError(f"{file} holds no list of signers")
    write_lists(file, (*lists[:-1], lists[-1].sign(key)))
    echo(f"{file}: list {lists[-1].content.version} has your signature, too")


@command.command()
@click.argument("keys", nargs=-1, type=EXISTING_FILE_TYPE, metavar="[KEY.pem]...")
@click.option("--threshold", type=click.IntRange(1), help="How many of them must sign [default: as before, else 1].")
@days_option
@folder_option
def signers(*, keys: tuple[Path, ...], threshold: int | None, days: int, folder: Path | None) -> None:
    """Make the next list of signers: these KEYs, or those before for longer; it is signed with your own key.

    It lies beside the key pair as signers.json, travels with all that is signed from there, and boards follow it.
    """
    from edgefl.system.bundles.keys import LIST_FILE, PUBLIC_KEY_FILE, load_lists, load_public_key, write_lists  # noqa: PLC0415 fast start
    from edgefl.system.bundles.signatures import SignerList, compute_key_id, make_next_list  # noqa: PLC0415 likewise

    folder = folder or _default_folder()
    path, private = folder / LIST_FILE, _load_private_key(folder)
    lists, now = load_lists(path), int(time.time())
    former = lists[-1].content if lists else None
    loaded = [load_public_key(key) for key in keys or ([] if former else [folder / PUBLIC_KEY_FILE])]
    by_id = {compute_key_id(key): key for key in loaded} or (former.keys if former else {})
    if compute_key_id(private.public_key()) not in {*by_id, *(former.keys if former else ())}:
        raise UsageError(f"the key in {folder} is neither in the new list of signers nor in the one before")
    content = SignerList(
        version=former.version + 1 if former else 1,
        issued=now,
        expires=now + days * DAY_S,
        threshold=threshold or (former.threshold if former and not keys else 1),
        keys=by_id,
    )
    made = make_next_list(lists, content)
    write_lists(path, (*made[:-1], made[-1].sign(private)))
    echo(f"{path}: list {content.version}, {content.threshold} of {', '.join(by_id)} must sign")
    click.echo(
        f"boards get it with what you sign next, or at once: edgefl signing sign --kind {SIGNERS_KIND} --out FILE"
    )


def _read_model_facts(files: tuple[Path, ...]) -> Any:
    from edgefl.device.inference.onnx_model import OnnxModel  # noqa: PLC0415 onnxruntime is slow to load
    from edgefl.system.bundles.archive import ModelFacts  # noqa: PLC0415 fast start

    if len(files) != 1:
        raise UsageError(f"a bundle holds one model, got {len(files)} files")
    model = OnnxModel(files[0])
    if not model.model or not model.task:
        raise UsageError(f"{files[0]} does not say what model it is; make it with edgefl model export")
    return ModelFacts(sha256=model.model, task=model.task, options=model.options)


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
                bundle_file, time.time()
            )
        )
    row = {
        "kind": str(manifest.kind), "name": manifest.name, "version": manifest.version, "serial": manifest.serial,
        "expires": manifest.expires, "key": manifest.key, "signers": ", ".join(bundle_file.signatures.by_key),
        "allow_downgrade": manifest.allow_downgrade, "bytes": bundle.stat().st_size,
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


@click.command()
@click.argument("key", type=EXISTING_FILE_TYPE, metavar="KEY.pem")
@signers_option
def trust(*, key: Path, signers: Path) -> None:
    """Let this board take what KEY signs, or the list in a signers.json says; run by hand on the board, as root."""
    from edgefl.core.errors import ConfigError  # noqa: PLC0415 likewise
    from edgefl.system.atomic_files import open_atomic  # noqa: PLC0415 likewise
    from edgefl.system.bundles.keys import LIST_FILE, load_lists, load_public_key  # noqa: PLC0415 fast start
    from edgefl.system.bundles.signatures import compute_key_id  # noqa: PLC0415 likewise

    if key.suffix == ".json":
        lists, file_name = load_lists(key), LIST_FILE
        if not lists:
            raise UsageError(f"{key} holds no list of signers")
        names = f"{lists[-1].content.threshold} of the keys {', '.join(lists[-1].content.keys)} sign"
    else:
        name = compute_key_id(load_public_key(key))
        if (signers / LIST_FILE).exists():
            raise UsageError(f"{signers / LIST_FILE} counts here, and single keys do not; remove it first")
        names, file_name = f"key {name} signs", f"{name}.pem"
    try:
        signers.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open_atomic(signers / file_name, mode=0o644) as file:
            file.write(key.read_bytes())
    except OSError as error:
        raise ConfigError(f"{signers} cannot be written: {error.strerror}; run it as root: sudo …") from None
    echo(f"this board now takes what {names}; to end that: rm {signers / file_name}")


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
@click.option("--health-s", type=NumberRange(1), default=300.0, show_default=True, help="Time to come up.")
@click.option("--settle-s", type=NumberRange(0), default=10.0, show_default=True, help="Time to stay up.")
@click.option("--away-s", type=NumberRange(1), default=3600.0, show_default=True, help="Wait for the network.")
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
