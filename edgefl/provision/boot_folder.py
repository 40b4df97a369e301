"""A mounted boot partition, or a folder that will be copied onto one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from edgefl.core.errors import ConfigError, StoreError, StoreFullError
from edgefl.provision.payload import PAYLOAD_FOLDER
from edgefl.system.atomic_files import make_store_error, sync_directory

STAGING_FOLDER = f"{PAYLOAD_FOLDER}.new"
FREE_MARGIN_BYTES = 4 << 20
"""Reserve for the device's log and the rounding of a FAT."""


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
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _remove_folder(self, folder: str) -> None:
        old = self.root / folder
        secret = old / "join.json"
        if secret.is_file():
            secret.write_bytes(bytes(secret.stat().st_size))
        if old.is_dir():
            shutil.rmtree(old)


def count_bytes(files: Mapping[str, bytes | Path]) -> int:
    """Returns the total size of all files."""
    return sum(len(body) if isinstance(body, bytes) else body.stat().st_size for body in files.values())


def check_free_space(files: Mapping[str, bytes | Path], free_bytes: int, location: str) -> None:
    """Raises `StoreFullError` where the files do not fit."""
    required_bytes = count_bytes(files) + FREE_MARGIN_BYTES
    if required_bytes > free_bytes:
        raise StoreFullError(
            f"{location} has {free_bytes / 1e6:.0f} MB free and {required_bytes / 1e6:.0f} MB are needed; "
            "nothing was written. Without --wheels the board installs from the network"
        )
