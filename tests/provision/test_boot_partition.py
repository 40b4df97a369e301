"""A card's boot partition: a folder, and a FAT inside a copy of an image, read back with the tools of others."""

import gzip
import lzma
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from requirements import require

from edgefl.core.errors import ConfigError, StoreError, StoreFullError
from edgefl.provision.boot_partition import BootFolder, BootImage, find_fat_offset, open_copy

MIB = 1 << 20
START = 1 * MIB
FAT_BYTES = 48 * MIB
NEW = {
    "edgefl/join.json": b"new join file",
    "edgefl/units/edgefl-device.service": b"[Unit]\n",
    "user-data": b"#cloud-config\n",
    "cmdline.txt": b"root=x new\n",
}


@pytest.fixture
def card(tmp_path):
    root = tmp_path / "bootfs"
    root.mkdir()
    (root / "config.txt").write_text("arm_64bit=1\n")
    (root / "cmdline.txt").write_text("root=x\n")
    return root


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_files_are_written_and_an_earlier_payload_is_gone(card, tmp_path):
    folder = BootFolder(card)
    (tmp_path / "a.whl").write_bytes(b"wheel" * 1000)
    folder.write({**NEW, "edgefl/wheels/old.whl": tmp_path / "a.whl"})
    assert (card / "edgefl/wheels/old.whl").read_bytes() == b"wheel" * 1000
    (tmp_path / "link").hardlink_to(card / "edgefl/join.json")
    folder.write(NEW)
    assert tree(card) == {"config.txt": b"arm_64bit=1\n", **NEW}
    assert (tmp_path / "link").read_bytes() == bytes(len(b"new join file")), "an old token is only unlinked"


def test_what_starts_the_payload_is_written_after_it(card, monkeypatch):
    order = []
    real = BootFolder._write_file
    monkeypatch.setattr(
        BootFolder, "_write_file", lambda self, name, body: (order.append(name), real(self, name, body))[1]
    )
    BootFolder(card).write({"cmdline.txt": b"x\n", **NEW})
    assert [name.startswith("edgefl.new/") for name in order] == [True, True, False, False]
    assert order[-1] == "cmdline.txt"


def test_a_card_that_breaks_off_keeps_its_command_line_and_no_halves(card, tmp_path):
    folder = BootFolder(card)
    with pytest.raises(StoreError):
        folder.write({**NEW, "edgefl/wheels/a.whl": Gone(tmp_path)})
    assert (card / "cmdline.txt").read_text() == "root=x\n"
    assert not (card / "edgefl").exists()
    assert not list(card.rglob("*.tmp"))
    folder.write(NEW)
    assert not (card / "edgefl.new").exists()


class Gone(type(Path())):
    """A file that vanishes after it was looked at."""

    def stat(self, **_):
        return os.stat_result((0,) * 10)

    def open(self, *_, **__):
        raise FileNotFoundError(2, "No such file or directory")


def test_what_does_not_fit_is_refused_before_anything_is_written(card, monkeypatch):
    usage = shutil.disk_usage(card)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * MIB))
    before = tree(card)
    with pytest.raises(StoreFullError, match="2 MB free and 4 MB are needed"):
        BootFolder(card).write(NEW)
    assert tree(card) == before


@pytest.mark.parametrize("missing", ["config.txt", "cmdline.txt"])
def test_another_folder_than_a_boot_partition_is_refused_unless_forced(card, missing):
    (card / missing).unlink()
    with pytest.raises(ConfigError, match="no boot partition"):
        BootFolder(card).check(force=False)
    BootFolder(card).check(force=True)
    with pytest.raises(ConfigError, match="is no folder"):
        BootFolder(card / "none").check(force=True)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A card's image: MBR, a FAT32 as Raspberry Pi OS has it, and room for a root file system, mostly holes."""
    require("mtools", "dosfstools")
    folder = tmp_path_factory.mktemp("image")
    path = folder / "raspios.img"
    with path.open("wb") as file:
        file.truncate(START + FAT_BYTES + 64 * MIB)
    words = ["-F", "32", "-s", "1", "-n", "bootfs", f"--offset={START // 512}", path, str(FAT_BYTES // 1024)]
    subprocess.run(["mkfs.vfat", *words], check=True, capture_output=True)
    entry = bytes([0x80, 0, 0, 0, 0x0C, 0, 0, 0])
    entry += (START // 512).to_bytes(4, "little") + (FAT_BYTES // 512).to_bytes(4, "little")
    with path.open("r+b") as file:
        file.seek(446)
        file.write(entry)
        file.seek(510)
        file.write(b"\x55\xaa")
        file.seek(START + FAT_BYTES)
        file.write(b"root file system")
    for name, body in (("config.txt", b"arm_64bit=1\n"), ("cmdline.txt", b"root=x\n"), ("user-data", b"#old\n")):
        (folder / name).write_bytes(body)
        subprocess.run(["mcopy", "-i", f"{path}@@{START}", folder / name, f"::{name}"], check=True)
    return path


def partition(image, out):
    with image.open("rb") as file:
        file.seek(START)
        out.write_bytes(file.read(FAT_BYTES))
    return out


def files_of(image, tmp_path):
    place = tmp_path / "read-back"
    place.mkdir()
    subprocess.run(["mcopy", "-s", "-n", "-i", f"{image}@@{START}", "::", place], check=True, capture_output=True)
    yield from tree(place).items()


def test_a_copy_of_the_image_holds_the_files_and_its_fat_is_sound(image, tmp_path):
    before, half_done = image.read_bytes(), tmp_path / ".out.img.part"
    half_done.touch()
    for place in (half_done, image):
        place.chmod(0o644)
    (tmp_path / "a-wheel-with-a-long-name-1.0-cp313-cp313-manylinux_2_28_aarch64.whl").write_bytes(os.urandom(MIB))
    wheel = next(tmp_path.glob("*.whl"))
    with open_copy(image, tmp_path / "out.img") as boot:
        boot.check(force=False)
        assert boot.read("config.txt") == b"arm_64bit=1\n"
        assert boot.read("none") is None
        assert stat.S_IMODE(half_done.stat().st_mode) == 0o600, "others may read it before it is done"
        boot.write({**NEW, "edgefl/wheels/old.whl": b"old"})
        boot.write({**NEW, f"edgefl/wheels/{wheel.name}": wheel})
    told = dict(files_of(tmp_path / "out.img", tmp_path))
    assert told == {"config.txt": b"arm_64bit=1\n", **NEW, f"edgefl/wheels/{wheel.name}": wheel.read_bytes()}
    checked = subprocess.run(
        ["fsck.fat", "-n", partition(tmp_path / "out.img", tmp_path / "fat")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
    assert image.read_bytes() == before
    assert (tmp_path / "out.img").read_bytes()[START + FAT_BYTES :][:16] == b"root file system"
    made = (tmp_path / "out.img").stat()
    assert (made.st_size, stat.S_IMODE(made.st_mode)) == (image.stat().st_size, 0o600)
    assert made.st_blocks * 512 < 16 * MIB, "the copy has lost its holes"


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["xz", "gz"])
def test_a_packed_image_is_unpacked(image, tmp_path, kind):
    packed = tmp_path / f"raspios.img.{kind}"
    content = image.read_bytes()
    packed.write_bytes(lzma.compress(content, preset=0) if kind == "xz" else gzip.compress(content, 1))
    with open_copy(packed, tmp_path / "out.img") as boot:
        assert boot.read("cmdline.txt") == b"root=x\n"
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="is damaged"), open_copy(packed, tmp_path / "second.img"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {packed.name, "out.img"}


def test_an_image_without_room_and_a_machine_without_mtools_are_told(image, tmp_path, monkeypatch):
    (tmp_path / "big.whl").write_bytes(b"x" * (FAT_BYTES + 1))
    with pytest.raises(StoreFullError, match="MB free"), open_copy(image, tmp_path / "out.img") as boot:
        boot.write({**NEW, "edgefl/wheels/big.whl": tmp_path / "big.whl"})
    assert {path.name for path in tmp_path.iterdir()} == {"big.whl"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exception, match=r"needs mtools .* use --boot"):
        BootImage(image)


def test_devices_and_the_image_itself_are_never_written(image, tmp_path):
    device = next((path for path in sorted(Path("/dev").iterdir()) if path.is_block_device()), Path("/dev/null"))
    for origin, out in ((device, tmp_path / "x"), (image, device)):
        with pytest.raises(ConfigError, match="devices are never written"), open_copy(origin, out):
            pass
    with pytest.raises(ConfigError, match="another file"), open_copy(image, image):
        pass
    with pytest.raises(ConfigError, match="devices are never written"):
        BootImage(device)


def test_an_image_of_something_else_is_refused(tmp_path):
    (tmp_path / "x.img").write_bytes(bytes(MIB))
    with pytest.raises(ConfigError, match="no FAT partition"):
        find_fat_offset(tmp_path / "x.img")
    (tmp_path / "x.img").write_bytes(b"short")
    with pytest.raises(ConfigError, match="no FAT partition"):
        find_fat_offset(tmp_path / "x.img")


def test_a_gpt_and_a_bare_file_system_are_understood(image, tmp_path):
    fat = partition(image, tmp_path / "bare.img")
    assert find_fat_offset(fat) == 0
    require("fdisk")
    path = tmp_path / "gpt.img"
    with path.open("wb") as file:
        file.truncate(FAT_BYTES + 8 * MIB)
    table = f"label: gpt\nstart=8192,size={FAT_BYTES // 512},type=EBD0A0A2-B9E5-4433-87C0-68B6B72699C7\n"
    subprocess.run(["sfdisk", "-q", path], input=table, text=True, check=True)
    with path.open("r+b") as file:
        file.seek(8192 * 512)
        file.write(fat.read_bytes())
    assert find_fat_offset(path) == 8192 * 512
