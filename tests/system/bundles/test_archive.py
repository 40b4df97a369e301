"""Bundle files and their manifests: what is read back, and what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wheel_files import Signer, make_wheel

from edgefl.core.errors import BundleError
from edgefl.system.bundles.archive import (
    MAX_MANIFEST_BYTES,
    Bundle,
    BundleKind,
    BundleManifest,
    WheelEntry,
    is_newer,
    read_bundle,
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    wheels = [
        make_wheel(tmp_path / "w", "gulls", "1.0", {"gulls.py": "x = 1\n"}),
        make_wheel(tmp_path / "w", "terns", "2.0", {"terns.py": "y = 2\n" * 500}),
    ]
    return Signer(tmp_path).bundle(tmp_path / "b.bundle", *wheels, kind="pack", version="1.0", name="gulls")


def read(path: Path) -> Bundle:
    with path.open("rb") as file:
        return read_bundle(file)


def test_what_was_written_is_read_wheel_by_wheel(bundle: Path, tmp_path: Path) -> None:
    with bundle.open("rb") as file:
        found = read_bundle(file)
        assert [wheel.project for wheel in found.manifest.wheels] == ["gulls", "terns"]
        for entry in reversed(found.manifest.wheels):
            found.extract_wheel(entry, tmp_path / "out.whl")
            assert (tmp_path / "out.whl").read_bytes() == (tmp_path / "w" / entry.file).read_bytes()
    with tarfile.open(bundle, "r:") as tar:  # any tar can list it
        wheels = ("wheels/gulls-1.0-py3-none-any.whl", "wheels/terns-2.0-py3-none-any.whl")
        assert tar.getnames() == ["manifest.json", "signatures.json", *wheels]


def test_a_bundle_of_any_length_is_read_also_when_tar_has_filled_up_its_last_record(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    for num_bytes in range(1, tarfile.RECORDSIZE, tarfile.BLOCKSIZE):
        wheel = make_wheel(tmp_path / "w", "gulls", "1.0", {"gulls.bin": bytes(num_bytes)})
        path = signer.bundle(tmp_path / "b.bundle", wheel, kind="pack", version="1.0")
        assert read(path).manifest.name == "gulls"
        assert path.stat().st_size % tarfile.BLOCKSIZE == 0
        filled = rebuilt(path, lambda _: None)
        assert filled.stat().st_size % tarfile.RECORDSIZE == 0
        assert read(filled).manifest.name == "gulls"


def test_a_wheel_that_was_changed_is_not_unpacked(bundle: Path, tmp_path: Path) -> None:
    content = bytearray(bundle.read_bytes())
    content[content.rindex(b"y = 2")] ^= 1
    bundle.write_bytes(content)
    with bundle.open("rb") as file:
        found = read_bundle(file)
        with pytest.raises(BundleError, match=r"terns-2\.0.*is not what was signed"):
            found.extract_wheel(found.manifest.wheels[1], tmp_path / "out.whl")
    assert not (tmp_path / "out.whl").exists()


def test_a_wheel_of_another_signed_bundle_is_not_taken(bundle: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "w2", "terns", "2.0", {"terns.py": "z = 2\n" * 500})
    other = Signer(tmp_path / "2").bundle(tmp_path / "c", wheel, kind="pack", version="2.0")
    with tarfile.open(other, "r:") as tar:
        foreign = [(info, tar.extractfile(info).read()) for info in tar][-1]  # type: ignore[union-attr]
    mixed = rebuilt(bundle, lambda entries: entries.__setitem__(-1, foreign))
    with mixed.open("rb") as file:
        found = read_bundle(file)
        with pytest.raises(BundleError, match=r"terns-2\.0.*is not what was signed"):
            found.extract_wheel(found.manifest.wheels[1], tmp_path / "out.whl")


def rebuilt(bundle: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], Any]) -> Path:
    """The bundle with its entries changed; the headers are right again afterwards."""
    with tarfile.open(bundle, "r:") as tar:
        entries = [(info, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    change(entries)
    with tarfile.open(bundle, "w", format=tarfile.GNU_FORMAT) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return bundle


def made(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **attributes: Any) -> tuple[Any, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info, content


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (made("wheels/gulls-1.0-py3-none-any.whl", tarfile.SYMTYPE, linkname="/etc/shadow"), "a symbolic link"),
        (made("wheels/gulls-1.0-py3-none-any.whl", tarfile.LNKTYPE, linkname="manifest.json"), "a hard link"),
        (made("wheels/gulls-1.0-py3-none-any.whl", tarfile.CHRTYPE), "a device"),
        (made("wheels/gulls-1.0-py3-none-any.whl", tarfile.DIRTYPE), "a folder"),
        (made("/etc/passwd", content=b"x"), "holds '/etc/passwd' where its manifest says 'wheels/gulls"),
        (made("wheels/" + "x" * 200, content=b"x"), "an entry of type b'L'"),
        (made("wheels/gulls-1.0-py3-none-any.whl", content=b"short"), "has 5 bytes, the manifest says"),
    ],
)
def test_only_the_plain_file_that_is_due_is_taken(bundle: Path, entry: Any, line: str) -> None:
    with pytest.raises(BundleError, match=line):
        read(rebuilt(bundle, lambda entries: entries.__setitem__(2, entry)))


def test_nothing_may_stand_behind_the_last_wheel(bundle: Path) -> None:
    whole = bundle.read_bytes()
    for entry in (
        made("wheels/extra-1.0-py3-none-any.whl", content=b"PK"),
        made("../../etc/cron.d/evil", content=b"x"),
        made("wheels/link", tarfile.SYMTYPE, linkname="/etc/shadow"),
    ):
        bundle.write_bytes(whole)
        with pytest.raises(BundleError, match="holds more than its manifest names"):
            read(rebuilt(bundle, lambda entries: entries.append(entry)))  # noqa: B023 called at once


def test_a_file_cut_short_anywhere_or_of_another_kind_is_refused(bundle: Path) -> None:
    content = bundle.read_bytes().rstrip(b"\0")
    for end in range(0, len(content) - 512, 257):
        bundle.write_bytes(content[:end])
        with pytest.raises(BundleError):
            read(bundle)
    for content in (b"", b"PK\3\4" + bytes(2000), bytes(10240)):
        bundle.write_bytes(content)
        with pytest.raises(BundleError, match="this is no bundle"):
            read(bundle)
    info = tarfile.TarInfo("manifest.json")
    info.size = 1 << 40  # a header that announces so much costs nothing
    bundle.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(BundleError, match=r"manifest\.json of the bundle has 1099511627776 bytes, expected 1 to"):
        read(bundle)


WHEEL = {"file": "edgefl_fleet-1.2.0-py3-none-any.whl", "sha256": "ab" * 32, "bytes": 10}
MODEL = {"file": "digits.onnx", "sha256": "ab" * 32, "bytes": 10}
FACTS = {"sha256": "cd" * 32, "task": "digits", "options": {}}
AS_MODEL = {"kind": "model", "name": "model-digits", "wheels": [MODEL], "model": FACTS}
AS_SIGNERS = {"kind": "signers", "name": "edgefl-signers", "wheels": []}
GOOD = {
    "v": 2,
    "kind": "release",
    "name": "edgefl-fleet",
    "version": "1.2.0",
    "serial": 7,
    "expires": 9,
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
        expires=9,
        key="k",
        wheels=wheels,
        allow_downgrade=True,
    )
    assert BundleManifest.decode(manifest.encode()) == manifest
    removal = load(kind="removal", name="gulls", wheels=[])
    assert (removal.kind, removal.name, removal.version, removal.wheels) == (BundleKind.REMOVAL, "gulls", "1.2.0", ())
    assert BundleManifest.decode(removal.encode()) == removal
    assert load(**AS_SIGNERS).kind is BundleKind.SIGNERS
    model = load(**AS_MODEL)
    assert model.model is not None
    assert (model.model.task, BundleManifest.decode(model.encode())) == ("digits", model)
    entry = WheelEntry(file="Sea_Gulls-1.0-cp311-cp311-manylinux_2_17_aarch64.whl", sha256="", num_bytes=1)
    assert (entry.project, entry.version) == ("sea-gulls", "1.0")
    assert [str(tag) for tag in entry.tags] == ["cp311-cp311-manylinux_2_17_aarch64"]
    assert (is_newer("1.10.0", "1.9.0"), is_newer("1.9.0", "1.9"), is_newer("1.0", "1.0rc1")) == (True, False, True)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"v": 1}, "not of format 2"),
        ({"expires": 7}, "it expires before it was signed"),
        ({"expires": None}, "expected a whole number"),
        ({**AS_SIGNERS, "kind": "removal"}, "a list of signers, and nothing else, is named"),
        ({**AS_SIGNERS, "name": "gulls"}, "a list of signers, and nothing else, is named"),
        ({"kind": "model"}, "which is no name of a model"),
        ({**AS_MODEL, "model": {**FACTS, "sha256": "x"}}, "says no SHA-256"),
        ({**AS_MODEL, "model": {**FACTS, "options": [1]}}, "a table of at most"),
        ({**AS_MODEL, "name": "model-mnist"}, "named after the task"),
        ({**AS_MODEL, "model": None}, "named after the task"),
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
