"""Boot partitions: mounted, in a folder that will be copied onto one, or inside an image's copy; and their changes.

Images are written by mtools: no root, no mount, never a device.
"""

from __future__ import annotations

import difflib
import gzip
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from edgefl.core.errors import ConfigError, NotFoundError, StoreError, StoreFullError
from edgefl.provision.payload import PAYLOAD_FOLDER
from edgefl.provision.provisioning_files import ReadFile, count_bytes, read_content
from edgefl.system.atomic_files import make_store_error, sync_directory

MAX_TEXT_BYTES = 256 * 1024
_TOKEN = re.compile(r"efl1\.[A-Za-z0-9_=-]+")
_NAMED_SECRET = re.compile(r"""(?im)^(.*?\b(?:passwd|password|psk)["']?\s*[:=]\s*)\S.*$""")
STAGING_FOLDER = f"{PAYLOAD_FOLDER}.new"
FREE_MARGIN_BYTES = 4 << 20
"""Reserve for the device's log and the rounding of a FAT."""
SECTOR_BYTES = 512
FAT_TYPES = frozenset({0x01, 0x04, 0x06, 0x0B, 0x0C, 0x0E})
PROTECTIVE_MBR_TYPE = 0xEE
MAX_GPT_ENTRIES = 128
# EBD0A0A2-… (basic data) and C12A7328-… (EFI system), as they lie on the disk.
GPT_FAT_GUIDS = frozenset(
    {bytes.fromhex("a2a0d0ebe5b9334487c068b6b72699c7"), bytes.fromhex("28732ac11ff8d211ba4b00a0c93ec93b")}
)
CHUNK_BYTES = 1 << 20
MTOOLS_TIMEOUT_S = 600.0


def render_diff(files: Mapping[str, bytes | Path], read: ReadFile) -> Iterator[str]:
    """Yields the lines of a unified diff between the present card and its new files."""
    for name, content in files.items():
        new = read_content(content)
        old = read(name)
        if old == new:
            continue
        old_lines, new_lines = _split_lines(old or b""), _split_lines(new)
        if old_lines is None or new_lines is None:
            yield f"{'new' if old is None else 'other'} file {name}, {len(new)} bytes"
            continue
        origin = f"a/{name}" if old is not None else "/dev/null"
        yield from difflib.unified_diff(old_lines, new_lines, origin, f"b/{name}", lineterm="")


def redact_secrets(text: str) -> str:
    """Returns the text without tokens and without values named a password or key."""
    return _NAMED_SECRET.sub(r"\1(secret)", _TOKEN.sub("efl1.(secret)", text))


def _split_lines(content: bytes) -> list[str] | None:
    if len(content) > MAX_TEXT_BYTES or b"\0" in content:
        return None
    try:
        return redact_secrets(content.decode()).splitlines()
    except UnicodeDecodeError:
        return None


class BootFolder:
    """Writes a boot partition; a power cut leaves a bootable card: payload first, its start last."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check(self, *, force: bool) -> None:
        """Raises `ConfigError` for a folder that is no Raspberry Pi's boot partition."""
        if not self.root.is_dir():
            raise ConfigError(f"{self.root} is no folder; give the mounted boot partition of the card (bootfs)")
        if not force and not all((self.root / name).is_file() for name in ("config.txt", "cmdline.txt")):
            raise ConfigError(
                f"{self.root} has no config.txt and cmdline.txt, so it is no boot partition of a Raspberry Pi; "
                "--force writes all the same"
            )

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None where there is none."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self.root / name} cannot be read: {error.strerror}") from None

    def count_free_bytes(self) -> int:
        """Returns the free space, including that of an earlier payload."""
        old = sum(path.stat().st_size for path in (self.root / PAYLOAD_FOLDER).rglob("*") if path.is_file())
        return shutil.disk_usage(self.root).free + old

    def write(self, files: Mapping[str, bytes | Path]) -> None:
        """Writes the files, in their order.

        Raises:
            StoreFullError: there is no room; nothing was written.
            StoreError: the partition cannot be written.
        """
        check_free_space(files, self.count_free_bytes(), str(self.root))
        try:
            self._remove_folder(STAGING_FOLDER)
            inside = {name: body for name, body in files.items() if name.startswith(f"{PAYLOAD_FOLDER}/")}
            if shutil.disk_usage(self.root).free < count_bytes(inside) + FREE_MARGIN_BYTES:
                self._remove_folder(
                    PAYLOAD_FOLDER
                )  # both do not fit; the card has no payload until the new one is whole
            for name, body in inside.items():
                self._write_file(f"{STAGING_FOLDER}/{name.removeprefix(f'{PAYLOAD_FOLDER}/')}", body)
            if inside:
                self._remove_folder(PAYLOAD_FOLDER)
                (self.root / STAGING_FOLDER).rename(self.root / PAYLOAD_FOLDER)
            for name in files.keys() - inside.keys():
                if name != "cmdline.txt":
                    self._write_file(name, files[name])
            if "cmdline.txt" in files:
                self._write_file("cmdline.txt", files["cmdline.txt"])
            sync_directory(self.root)
        except OSError as error:
            raise make_store_error(self.root, error) from None

    def _write_file(self, name: str, body: bytes | Path) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a change of mode: a FAT has none, and refuses.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                if isinstance(body, bytes):
                    file.write(body)
                else:
                    with body.open("rb") as origin:
                        shutil.copyfileobj(origin, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:  # an interrupt too: no half of a file stays on the card
            Path(temporary).unlink(missing_ok=True)
            raise

    def _remove_folder(self, folder: str) -> None:
        old = self.root / folder
        secret = old / "join.json"
        if secret.is_file():
            secret.write_bytes(bytes(secret.stat().st_size))
        if old.is_dir():
            shutil.rmtree(old)


def check_free_space(files: Mapping[str, bytes | Path], free_bytes: int, location: str) -> None:
    """Raises `StoreFullError` where the files do not fit."""
    required_bytes = count_bytes(files) + FREE_MARGIN_BYTES
    if required_bytes > free_bytes:
        raise StoreFullError(
            f"{location} has {free_bytes / 1e6:.0f} MB free and {required_bytes / 1e6:.0f} MB are needed; "
            "nothing was written. Without --wheels the board installs from the network"
        )


class BootImage:
    """The FAT partition at an offset of an image file owned by edgefl."""

    def __init__(self, image: Path) -> None:
        if shutil.which("mcopy") is None:
            raise NotFoundError(
                "writing into an image needs mtools (sudo apt-get install mtools, brew install mtools); "
                "without it, write the card and use --boot"
            )
        if not image.is_file():
            raise ConfigError(f"{image} is no file; devices are never written: --boot writes onto a mounted card")
        self.image = image
        self.offset = find_fat_offset(image)

    def check(self, *, force: bool) -> None:
        """Raises `ConfigError` for a partition that is no Raspberry Pi's."""
        if not force and any(self.read(name) is None for name in ("config.txt", "cmdline.txt")):
            raise ConfigError(
                "the image's first FAT partition has no config.txt and cmdline.txt, so it is no Raspberry Pi's; "
                "--force writes all the same"
            )

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None where there is none."""
        process = self._run_mtools("mtype", f"::{name}", may_fail=True)
        return process.stdout if process.returncode == 0 else None

    def count_free_bytes(self) -> int:
        """Returns the free space."""
        listing = self._run_mtools("mdir", "::").stdout.decode("ascii", errors="replace")
        match = re.search(r"([\d ]+) bytes free", listing)
        if not match:
            raise StoreError(f"{self.image} has a boot partition that mtools cannot read")
        return int(match[1].replace(" ", ""))

    def write(self, files: Mapping[str, bytes | Path]) -> None:
        """Writes the files; an earlier payload goes first. Raises `StoreFullError` and `StoreError`."""
        for old in (PAYLOAD_FOLDER, f"{PAYLOAD_FOLDER}.new"):
            self._run_mtools("mdeltree", f"::{old}", may_fail=True)
        check_free_space(files, self.count_free_bytes(), f"the boot partition of {self.image.name}")
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            for name, body in files.items():
                path = tree / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(body, bytes):
                    path.write_bytes(body)
                else:
                    path.symlink_to(body.resolve())
            # -s with folders, -o overwrites.
            self._run_mtools("mcopy", "-s", "-o", *map(str, sorted(tree.iterdir())), "::")

    def _run_mtools(
        self, program: str, *arguments: str, may_fail: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "MTOOLS_SKIP_CHECK": "1", "MTOOLSRC": os.devnull, "LC_ALL": "C"}
        # Without a terminal mtools prompts for nothing; each prompt counts as declined.
        process = subprocess.run(
            [program, "-i", f"{self.image}@@{self.offset}", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MTOOLS_TIMEOUT_S,
            check=False,
        )
        if process.returncode and not may_fail:
            error_lines = process.stderr.decode(errors="replace").strip().splitlines()
            raise StoreError(
                f"{program} cannot write {self.image.name}: {error_lines[-1] if error_lines else process.returncode}"
            )
        return process


@contextmanager
def open_copy(image: Path, out: Path) -> Iterator[BootImage]:
    """Opens the boot partition of an image's copy, which appears at `out` only on success.

    Holes stay holes; images that end in .xz or .gz are unpacked. The copy is for its owner alone: a join token comes
    into it.

    Raises:
        ConfigError: one of them is a device, or the image is none.
        StoreFullError, StoreError: the copy cannot be written.
    """
    for path in (image, out):
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"{path} is no file; devices are never written: --boot writes onto a card that is mounted"
            )
    if out.exists() and out.samefile(image):
        raise ConfigError("--out must be another file than --image: the image stays as it is")
    part = out.with_name(f".{out.name}.part")
    try:
        _copy_image(image, part)
        yield BootImage(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(out)
    except OSError as error:
        raise make_store_error(out, error) from None
    finally:
        part.unlink(missing_ok=True)


def find_fat_offset(image: Path) -> int:
    """Returns where the first FAT partition begins, in bytes; MBR, GPT, or a bare file system.

    Raises:
        ConfigError: there is none.
    """
    with image.open("rb") as file:
        table = file.read(SECTOR_BYTES)
        candidates = [0, *_list_mbr_offsets(table), *_list_gpt_offsets(file, table)]
        for offset in candidates:
            file.seek(offset)
            boot = file.read(SECTOR_BYTES)
            if len(boot) == SECTOR_BYTES and b"FAT" in (boot[54:57], boot[82:85]):
                return offset
    raise ConfigError(f"{image.name} has no FAT partition; is it an image of a Raspberry Pi's card?")


def _list_mbr_offsets(table: bytes) -> list[int]:
    if len(table) < SECTOR_BYTES or table[510:512] != b"\x55\xaa":
        return []
    entries = [table[446 + 16 * number : 462 + 16 * number] for number in range(4)]
    return [int.from_bytes(entry[8:12], "little") * SECTOR_BYTES for entry in entries if entry[4] in FAT_TYPES]


def _list_gpt_offsets(file: IO[bytes], table: bytes) -> list[int]:
    if len(table) < SECTOR_BYTES or table[450] != PROTECTIVE_MBR_TYPE:
        return []
    file.seek(SECTOR_BYTES)
    header = file.read(SECTOR_BYTES)
    if header[:8] != b"EFI PART":
        return []
    start, count, size = (int.from_bytes(header[a:b], "little") for a, b in ((72, 80), (80, 84), (84, 88)))
    if not 128 <= size <= 4096:
        return []
    file.seek(start * SECTOR_BYTES)
    entries = [file.read(size) for _ in range(min(count, MAX_GPT_ENTRIES))]
    return [int.from_bytes(entry[32:40], "little") * SECTOR_BYTES for entry in entries if entry[:16] in GPT_FAT_GUIDS]


def _copy_image(image: Path, part: Path) -> None:
    try:
        # A partial file of an earlier call may be readable by others, and would stay so.
        part.unlink(missing_ok=True)
        with _open_image(image) as origin, open(part, "xb", opener=_open_private) as copy:
            while chunk := origin.read(CHUNK_BYTES):
                if chunk.count(0) == len(chunk):
                    copy.seek(len(chunk), os.SEEK_CUR)
                else:
                    copy.write(chunk)
            copy.truncate(copy.tell())
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{image} is damaged: {error}") from None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _open_image(image: Path) -> IO[bytes]:
    if image.suffix == ".xz":
        return cast("IO[bytes]", lzma.open(image))
    if image.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(image))
    return image.open("rb")
