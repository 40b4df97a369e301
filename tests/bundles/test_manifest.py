"""The manifest of a bundle: whatever in it makes no sense is said in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgefl.bundles.manifest import MAX_MANIFEST_BYTES, BundleKind, BundleManifest, WheelEntry, is_newer
from edgefl.core.errors import BundleError

WHEEL = {"file": "edgefl_fleet-1.2.0-py3-none-any.whl", "sha256": "ab" * 32, "bytes": 10}
GOOD = {
    "v": 1,
    "kind": "release",
    "name": "edgefl-fleet",
    "version": "1.2.0",
    "serial": 7,
    "key": "k",
    "wheels": [WHEEL],
}


def load(**changes: Any) -> BundleManifest:
    return BundleManifest.decode(json.dumps({**GOOD, **changes}).encode())


def test_what_is_dumped_is_loaded() -> None:
    wheels = (WheelEntry(file=WHEEL["file"], sha256=WHEEL["sha256"], num_bytes=10),)  # type: ignore[arg-type]
    manifest = BundleManifest(
        kind=BundleKind.RELEASE,
        name="edgefl-fleet",
        version="1.2.0",
        serial=7,
        key="k",
        wheels=wheels,
        allow_downgrade=True,
    )
    assert BundleManifest.decode(manifest.encode()) == manifest
    removal = load(kind="removal", name="gulls", wheels=[])
    assert (removal.kind, removal.name, removal.version, removal.wheels) == (BundleKind.REMOVAL, "gulls", "1.2.0", ())
    assert BundleManifest.decode(removal.encode()) == removal
    entry = WheelEntry(file="Sea_Gulls-1.0-cp311-cp311-manylinux_2_17_aarch64.whl", sha256="", num_bytes=1)
    assert (entry.project, entry.version) == ("sea-gulls", "1.0")
    assert [str(tag) for tag in entry.tags] == ["cp311-cp311-manylinux_2_17_aarch64"]
    assert (is_newer("1.10.0", "1.9.0"), is_newer("1.9.0", "1.9"), is_newer("1.0", "1.0rc1")) == (True, False, True)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"v": 2}, "not of format 1"),
        ({"kind": "virus"}, "makes no sense"),
        ({"name": "../x"}, "a bundle is named with a-z"),
        ({"version": "new"}, "its version must be one such as 1.2.0, got 'new'"),
        ({"serial": -1}, "expected a whole number"),
        ({"serial": True}, "expected a whole number"),
        ({"wheels": []}, "holds 1 to 500 wheels"),
        ({"wheels": [WHEEL] * 501}, "holds 1 to 500 wheels"),
        ({"wheels": [WHEEL, WHEEL]}, "it names a wheel twice"),
        ({"wheels": [{**WHEEL, "file": "../../x-1-py3-none-any.whl"}]}, "which is no name of a wheel"),
        ({"wheels": [{**WHEEL, "file": "edgefl_fleet-1.2.0.tar.gz"}]}, "which is no name of a wheel"),
        ({"wheels": [{**WHEEL, "sha256": "AB" * 32}]}, "says no SHA-256"),
        ({"wheels": [{**WHEEL, "bytes": 1 << 40}]}, "its wheels have 1099511627776 bytes together"),
        ({"version": "1.3.0"}, "must hold a wheel of edgefl-fleet in this version, and of it in no other"),
        ({"kind": "pack"}, "a release is named edgefl-fleet, a pack is not"),
        ({"name": "gulls"}, "a release is named edgefl-fleet, a pack is not"),
        ({"kind": "pack", "name": "gulls"}, "must hold a wheel of gulls .* it holds none"),
        ({"wheels": {}}, "holds 1 to 500 wheels"),
        ({"kind": "removal", "name": "gulls"}, "a removal none"),
        ({"kind": "removal", "wheels": []}, "a release is named edgefl-fleet"),
        ({"key": None}, "expected a text"),
        ({"kind": "pack", "name": "gulls", "wheels": [{**WHEEL, "file": "gulls-1.2.0-py3-none-any.whl"}, WHEEL]},
         "a pack must not bring edgefl-fleet itself"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(BundleError, match=line):
        load(**changes)


def test_no_more_than_the_cap_is_parsed() -> None:
    with pytest.raises(BundleError, match="its manifest has"):
        BundleManifest.decode(b" " * (MAX_MANIFEST_BYTES + 1))
    for text in (b"\xff", b"[" * 200_000):
        with pytest.raises(BundleError, match="is not JSON"):
            BundleManifest.decode(text)
