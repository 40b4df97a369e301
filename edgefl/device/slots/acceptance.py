"""Whether a board takes a bundle: who signed it, for whom it is, and whether it is newer than what there is."""

from __future__ import annotations

from packaging.tags import sys_tags
from packaging.version import Version

from edgefl.bundles.archive import Bundle
from edgefl.bundles.keys import Signers
from edgefl.bundles.manifest import Kind, Manifest, WheelEntry, later
from edgefl.bundles.wheels import fitting
from edgefl.device.slots.layout import SlotRecord, Slots
from edgefl.errors import BundleError


def accepted_wheels(bundle: Bundle, signers: Signers, slots: Slots) -> list[WheelEntry]:
    """Returns the wheels of a bundle that are for this board; of a removal none.

    Raises:
        BundleError: it is not signed by somebody whom this board trusts, not for this board, or not newer.
    """
    signers.verify(bundle)  # first: what nobody has signed is not even compared
    slot = slots.in_use()
    manifest, record = bundle.manifest, slots.record(slot)
    check_order(manifest, record, slots.release(slot))
    return fitting(manifest.wheels, list(sys_tags()))


def check_order(manifest: Manifest, record: SlotRecord, release: str) -> None:
    """Raises `BundleError` for a bundle that is older than what a slot has, or was signed before it."""
    newest = record.serials.get(manifest.name, 0)
    if manifest.serial < newest:
        raise BundleError(
            f"{manifest.name} {manifest.version} was signed before what this board has (serial {manifest.serial}, "
            f"it has {newest}); sign it anew if it is really wanted"
        )
    pack = record.packs.get(manifest.name)
    there = release if manifest.kind is Kind.RELEASE else pack.version if pack is not None else None
    if there is not None and later(there, manifest.version) and not manifest.allow_downgrade:
        raise BundleError(
            f"{manifest.name} {manifest.version} is older than the {there} that this board has; a way back has to be "
            "signed as one: edgefl signing sign --allow-downgrade"
        )


def is_there(manifest: Manifest, record: SlotRecord, release: str) -> bool:
    """Returns whether a slot is already as this very bundle would make it."""
    pack = record.packs.get(manifest.name)
    if manifest.kind is Kind.REMOVAL:
        return pack is None
    there = release if manifest.kind is Kind.RELEASE else pack.version if pack is not None else None
    is_same = there is not None and Version(there) == Version(manifest.version)
    return is_same and record.serials.get(manifest.name) == manifest.serial
