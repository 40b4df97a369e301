"""Verification of a bundle: signature, compatibility with the board, and order of versions."""

from __future__ import annotations

from packaging.tags import sys_tags
from packaging.version import Version

from edgefl.bundles.archive import Bundle
from edgefl.bundles.keys import TrustedKeys
from edgefl.bundles.manifest import BundleKind, BundleManifest, WheelEntry, is_newer
from edgefl.bundles.wheels import select_compatible_wheels
from edgefl.core.errors import BundleError
from edgefl.device.updates.slots import SlotRecord, Slots


def verify_bundle(bundle: Bundle, trusted_keys: TrustedKeys, slots: Slots) -> list[WheelEntry]:
    """Returns a bundle's compatible wheels; none for a removal.

    Raises:
        BundleError: its signer is not trusted, it is incompatible with this board, or not newer.
    """
    trusted_keys.verify(bundle)  # first: nothing of an unsigned bundle is used
    slot = slots.get_active_slot()
    manifest, record = bundle.manifest, slots.load_record(slot)
    check_order(manifest, record, slots.get_release_version(slot))
    return select_compatible_wheels(manifest.wheels, list(sys_tags()))


def check_order(manifest: BundleManifest, record: SlotRecord, release: str) -> None:
    """Raises `BundleError` for a bundle that is older than the installed one, or was signed before it."""
    newest_serial = record.serials.get(manifest.name, 0)
    if manifest.serial < newest_serial:
        raise BundleError(
            f"{manifest.name} {manifest.version} was signed before what this board has (serial {manifest.serial}, "
            f"it has {newest_serial}); sign it anew if it is really wanted"
        )
    pack = record.packs.get(manifest.name)
    present = release if manifest.kind is BundleKind.RELEASE else pack.version if pack is not None else None
    if present is not None and is_newer(present, manifest.version) and not manifest.allow_downgrade:
        raise BundleError(
            f"{manifest.name} {manifest.version} is older than the {present} that this board has; a way back has to "
            "be signed as one: edgefl signing sign --allow-downgrade"
        )


def is_installed(manifest: BundleManifest, record: SlotRecord, release: str) -> bool:
    """Returns whether this very bundle is already installed in a slot."""
    pack = record.packs.get(manifest.name)
    if manifest.kind is BundleKind.REMOVAL:
        return pack is None
    present = release if manifest.kind is BundleKind.RELEASE else pack.version if pack is not None else None
    has_version = present is not None and Version(present) == Version(manifest.version)
    return has_version and record.serials.get(manifest.name) == manifest.serial
