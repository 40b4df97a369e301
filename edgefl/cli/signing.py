"""`edgefl signing`: makes keys, signs bundles, inspects them; on the operator's own machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edgefl.cli.command_group import FullHelpGroup
from edgefl.cli.render import format_option, print_rows
from edgefl.core.errors import BundleError

PASSPHRASE_VARIABLE = "EDGEFL_SIGNING_PASSPHRASE"  # noqa: S105 the name of a variable, no secret
COLUMNS = ("kind", "name", "version", "serial", "key", "allow_downgrade", "bytes", "sha256", "trusted")
WHEEL_COLUMNS = ("file", "bytes", "sha256")
SHORT_HASH_DIGITS = 12

folder_option = click.option(
    "--keys",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the key pair [default: ~/.config/edgefl/signing].",
)


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
    from edgefl.bundles.keys import PRIVATE_KEY_FILE, PUBLIC_KEY_FILE, create_key_pair  # noqa: PLC0415 fast start

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
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
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
    from edgefl.bundles.build import BundleSpec, make_bundle  # noqa: PLC0415 fast start
    from edgefl.bundles.manifest import BundleKind  # noqa: PLC0415 likewise

    # Only the signer's clock decides which one is newer; devices compare serials, never times.
    spec = BundleSpec(
        kind=BundleKind(kind), version=version, name=name, serial=int(time.time()), allow_downgrade=allow_downgrade
    )
    bundle = make_bundle(spec, wheels, _load_private_key(folder or _default_folder()), out)
    click.echo(
        f"{bundle.kind} {bundle.name} {bundle.version}, {len(bundle.wheels)} wheels, signed by {bundle.key}: {out}"
    )


@command.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE")
@click.option(
    "--signers",
    type=click.Path(path_type=Path, file_okay=False),
    help="Verify against the public keys in this folder [default: your own key].",
)
@folder_option
@format_option
def show(*, bundle: Path, signers: Path | None, folder: Path | None, fmt: str) -> None:
    """Tell what a bundle is, who signed it, and which wheels it holds; exit code 51 when it cannot be trusted."""
    from edgefl.bundles.archive import read_bundle  # noqa: PLC0415 fast start
    from edgefl.bundles.keys import TrustedKeys  # noqa: PLC0415 likewise
    from edgefl.system.atomic_files import compute_sha256  # noqa: PLC0415 likewise

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
    from edgefl.bundles.keys import PRIVATE_KEY_FILE, is_encrypted, load_private_key  # noqa: PLC0415 fast start

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
