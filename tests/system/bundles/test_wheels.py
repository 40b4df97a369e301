"""Wheels, looked at before anything is installed."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from packaging.tags import Tag
from wheel_files import make_wheel

from edgefl.core.errors import BundleError
from edgefl.system.bundles import wheels
from edgefl.system.bundles.archive import BundleKind, WheelEntry
from edgefl.system.bundles.wheels import check_wheel, select_compatible_wheels


def entry(path: Path) -> WheelEntry:
    return WheelEntry(file=path.name, sha256="ab" * 32, num_bytes=path.stat().st_size)


def names(path: Path, kind: BundleKind = BundleKind.PACK) -> list[str]:
    return check_wheel(path, entry(path), kind)


def test_a_path_that_leads_out_or_is_spelled_in_a_roundabout_way_is_refused(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "gulls", "1.0", {"gulls/__init__.py": "", "gulls/data.bin": b"1"})
    assert names(path)[:2] == ["gulls/__init__.py", "gulls/data.bin"]
    for name in ("../../etc/cron.d/x", "/etc/cron.d/x", "gulls/../../x", "..\\x", "a/../b"):
        with pytest.raises(BundleError, match="lies outside of where it is installed"):
            names(make_wheel(tmp_path, "gulls", "1.0", {name: "x"}))
    for name in ("./evil.pth", "gulls//x.py", ".//sitecustomize.py"):
        with pytest.raises(BundleError, match=f"which must be called '{PurePosixPath(name)}'"):
            names(make_wheel(tmp_path, "gulls", "1.0", {name: "x"}))


def test_a_symbolic_link_in_a_wheel_is_refused(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "gulls", "1.0", {"gulls.py": ""})
    link = zipfile.ZipInfo("gulls/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr(link, "/etc/shadow")
    with pytest.raises(BundleError, match="'gulls/link', which is no plain file"):
        names(path)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("evil.pth", "which a pack must not"),
        ("sitecustomize.py", "which a pack must not"),
        ("sitecustomize/__init__.py", "which a pack must not"),
        ("sitecustomize.cpython-311-aarch64-linux-gnu.so", "which a pack must not"),
        ("UserCustomize.pyc", "which a pack must not"),
        ("Evil.PTH", "which a pack must not"),
        ("numpy-99.egg-info/PKG-INFO", "which a pack must not"),
        ("EdgeFL-99.dist-info/entry_points.txt", "which is edgefl's own; a pack must not replace it"),
        ("edgefl.abi3.so", "which is edgefl's own; a pack must not replace it"),
        ("gulls-1.0.data/scripts/sudo", "which a pack must not"),
        ("edgefl/device/agent.py", "which is edgefl's own; a pack must not replace it"),
        ("edgefl_fleet-9.dist-info/x", "which is edgefl's own"),
        ("EdgeFL.Fleet/x.py", "which is edgefl's own"),
    ],
)
def test_a_pack_must_not_bring_what_runs_by_itself_or_is_edgefls_own(tmp_path: Path, name: str, line: str) -> None:
    path = make_wheel(tmp_path, "gulls", "1.0", {name: "x"})
    with pytest.raises(BundleError, match=line):
        names(path)
    assert names(path, BundleKind.RELEASE)


def test_a_bomb_is_refused_by_what_it_announces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gulls-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("gulls/zeros", bytes(50_000_000))
    monkeypatch.setattr(wheels, "MAX_UNPACKED_BYTES", 40_000_000)
    assert path.stat().st_size < 100_000
    with pytest.raises(BundleError, match="would unpack to 1 files and 50000000 bytes"):
        names(path)


@pytest.mark.parametrize("way", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_whose_files_cannot_be_unpacked_in_parts_is_refused(tmp_path: Path, way: int) -> None:
    path = make_wheel(tmp_path, "gulls", "1.0", {"gulls.py": ""})
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("gulls.txt", "x", way)
    with pytest.raises(BundleError, match=r"holds 'gulls\.txt', which is compressed in a way other than deflate"):
        names(path)


def test_a_file_twice_no_metadata_or_another_s_and_no_zip_are_refused(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "gulls", "1.0", {"gulls.py": ""})
    with zipfile.ZipFile(path, "a") as wheel, pytest.warns(UserWarning, match="Duplicate"):
        wheel.writestr("gulls.py", "other")
    with pytest.raises(BundleError, match="holds a file twice"):
        names(path)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("gulls.py", "")
    with pytest.raises(BundleError, match="it has 0 METADATA"):
        names(path)
    path.write_bytes(b"PK nonsense")
    with pytest.raises(BundleError, match="is no wheel"):
        names(path)
    make_wheel(tmp_path, "edgefl-fleet", "1.0", {"x.py": ""}).replace(path)
    with pytest.raises(BundleError, match=r"says inside that it is edgefl-fleet 1\.0"):
        names(path)


def listed(*files: str) -> list[WheelEntry]:
    return [WheelEntry(file=file, sha256="ab" * 32, num_bytes=1) for file in files]


PI = [Tag("cp311", "cp311", "manylinux_2_31_aarch64"), Tag("cp311", "cp311", "manylinux_2_17_aarch64"),
      Tag("py3", "none", "any")]  # fmt: skip


def chosen(tags: Any, *files: str) -> list[str]:
    return [one.file for one in select_compatible_wheels(listed(*files), tags)]


def test_of_every_project_the_best_wheel_for_the_board_is_chosen() -> None:
    files = (
        "numpy-2.0-cp313-cp313-manylinux_2_17_aarch64.whl",
        "numpy-2.0-cp311-cp311-manylinux_2_17_aarch64.whl",
        "numpy-2.0-cp311-cp311-manylinux_2_31_aarch64.whl",
        "edgefl_fleet-1.0-py3-none-any.whl",
    )
    assert chosen(PI, *files) == [files[2], files[3]]
    with pytest.raises(BundleError, match=r"it is not for this board .*: of numpy it holds only numpy-2.0-cp313"):
        chosen(PI, files[0], files[3])
