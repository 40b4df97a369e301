"""Verification of a bundle: signature, compatibility with the board, and order of versions."""

from __future__ import annotations

from packaging.tags import sys_tags
from packaging.version import Version

from edgefl.core.errors import BundleError
from edgefl.device.updates.slots import SlotRecord, Slots
from edgefl.system.bundles.archive import Bundle, BundleKind, BundleManifest, WheelEntry, is_newer
from edgefl.system.bundles.keys import TrustedKeys
from edgefl.system.bundles.wheels import select_compatible_wheels


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
    present = _get_present_version(manifest, record, release)
    if present is not None and is_newer(present, manifest.version) and not manifest.allow_downgrade:
        raise BundleError(
            f"{manifest.name} {manifest.version} is older than the {present} that this board has; a way back has to "
            "be signed as one: edgefl signing sign --allow-downgrade"
        )


def is_installed(manifest: BundleManifest, record: SlotRecord, release: str) -> bool:
    """Returns whether this very bundle is already installed in a slot."""
    present = _get_present_version(manifest, record, release)
    if manifest.kind is BundleKind.REMOVAL:
        return present is None
    has_version = present is not None and Version(present) == Version(manifest.version)
    return has_version and record.serials.get(manifest.name) == manifest.serial


def _get_present_version(manifest: BundleManifest, record: SlotRecord, release: str) -> str | None:
    """Returns the version of the release or pack of this name that a slot has."""
    if manifest.kind is BundleKind.RELEASE:
        return release
    pack = record.packs.get(manifest.name)
    return pack.version if pack is not None else None
