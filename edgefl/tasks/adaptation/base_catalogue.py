"""Pretrained bases of a coordinator: files by their SHA-256, and names for them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.errors import ConfigError, DataError, NotFoundError, UsageError
from edgefl.core.protocol import validate_slug
from edgefl.core.safe_parsing import SHA256, parse_json
from edgefl.core.types import BASE_SUFFIX
from edgefl.system.atomic_files import (
    compute_sha256,
    copy_file,
    make_private_directory,
    make_store_error,
    write_atomic,
)
from edgefl.tasks.adaptation.base_file import MAX_BASE_BYTES, read_base_shapes

NAMES_FILE = "names.json"
MIN_HASH_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A base that a coordinator has; `name` is empty for one that a run has made of its own first model."""

    name: str
    sha256: str
    bytes_file: int
    num_tensors: int
    num_parameters: int


class BaseCatalogue:
    """Bases in one folder; a file never changes, and neither does what a name means.

    Args:
        folder: of the files, `bases` in a coordinator's directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, path: Path, name: str | None = None, *, sha256: str | None = None) -> Base:
        """Copies a safetensors file into the folder; one that is there undamaged only gets the name.

        Args:
            path: of the file.
            name: for it; None for its SHA-256 alone.
            sha256: that it must have; None for any.

        Raises:
            DataError: it is no such file, holds no tensors, is larger than a device takes, has another SHA-256, or
                changes meanwhile.
            UsageError: the name is no name, or another base has it.
            StoreError: it cannot be written.
        """
        names = self._read_names()
        if name is not None:
            validate_slug(name, "base name")
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        size = path.stat().st_size
        if size > MAX_BASE_BYTES:
            raise DataError(f"{path} has {size} bytes, a device takes {MAX_BASE_BYTES} at most")
        if not read_base_shapes(path):
            raise DataError(f"{path} holds no tensors")
        sha256 = self._copy(path, sha256)
        if name is not None:
            if names.get(name, sha256) != sha256:
                raise UsageError(
                    f"base {name} is {names[name][:12]} already, and this file is {sha256[:12]}: take another name, "
                    f"or remove that one first: edgefl base remove {name}"
                )
            self._write_names({**names, name: sha256})
        return self._describe(sha256, name or next((known for known, of in names.items() if of == sha256), ""))

    def list_bases(self) -> list[Base]:
        """Returns all bases, those with names first."""
        names = self._read_names()
        named = [
            self._describe(sha256, name) for name, sha256 in sorted(names.items()) if self._path(sha256).is_file()
        ]
        paths = sorted(self._folder.glob(f"*{BASE_SUFFIX}")) if self._folder.is_dir() else []
        others = [path.stem for path in paths if SHA256.match(path.stem) and path.stem not in names.values()]
        return [*named, *(self._describe(sha256, "") for sha256 in others)]

    def find(self, text: str) -> Path:
        """Returns the file of a base by its name, or by its SHA-256 or a beginning of that.

        Raises:
            NotFoundError: there is none, or several begin like that.
        """
        names = self._read_names()
        if text in names:
            return self._path(names[text])
        if SHA256.match(text) and self._path(text).is_file():  # whatever is wrong with others
            return self._path(text)
        found = [base.sha256 for base in self.list_bases() if base.sha256.startswith(text)]
        if len(text) >= MIN_HASH_DIGITS and len({*found}) == 1:
            return self._path(found[0])
        listed = ", ".join(sorted(names)) or "none"
        raise NotFoundError(
            f"there is no base {text[:80]!r}, only {listed}; bring it: edgefl base add FILE --name NAME"
        )

    def copy(self, text: str, folder: Path) -> Path:
        """Copies a base into a folder under its SHA-256, checked, and returns the file there.

        Raises:
            NotFoundError: there is no such base.
            DataError: it is damaged.
            StoreError: the folder cannot be written.
        """
        path = self.find(text)
        try:
            copy_file(path, folder / path.name, path.stem)
            with contextlib.suppress(OSError):  # a file system without modes, such as that of most sticks
                (folder / path.name).chmod(0o644)  # another user reads it on the board
        except OSError as error:
            raise make_store_error(folder, error) from None
        return folder / path.name

    def remove(self, text: str) -> str:
        """Removes a base, and its names; returns its SHA-256. Runs that train on it cannot go on without."""
        path = self.find(text)
        self._write_names({name: sha256 for name, sha256 in self._read_names().items() if sha256 != path.stem})
        path.unlink(missing_ok=True)
        return path.stem

    def _copy(self, source: Path, expected: str | None) -> str:
        """Copies a file under its SHA-256, which it returns; a damaged one that is there is replaced."""
        try:
            make_private_directory(self._folder)
            sha256 = compute_sha256(source)
            if expected not in {None, sha256}:
                raise DataError(f"{source} must have SHA-256 {expected}, got {sha256}; bring the file again")
            target = self._path(sha256)
            if target.is_file() and compute_sha256(target) == sha256:
                return sha256
            copy_file(source, target, sha256)
        except OSError as error:
            raise make_store_error(self._folder, error) from None
        return sha256

    def _describe(self, sha256: str, name: str) -> Base:
        path = self._path(sha256)
        shapes = read_base_shapes(path)
        return Base(
            name=name,
            sha256=sha256,
            bytes_file=path.stat().st_size,
            num_tensors=len(shapes),
            num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        )

    def _path(self, sha256: str) -> Path:
        return self._folder / f"{sha256}{BASE_SUFFIX}"

    def _read_names(self) -> dict[str, str]:
        path = self._folder / NAMES_FILE
        try:
            value = parse_json(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
        if not isinstance(value, Mapping):
            raise DataError(f"{path} must have a name for each base, got {type(value).__name__}")
        return {str(name): str(sha256) for name, sha256 in value.items() if SHA256.match(str(sha256))}

    def _write_names(self, names: Mapping[str, str]) -> None:
        make_private_directory(self._folder)
        write_atomic(self._folder / NAMES_FILE, json.dumps(names, indent=1).encode())


def compute_digest(path: Path) -> str:
    """Returns the SHA-256 of a base; one that is named by it was checked when it came."""
    return path.stem if SHA256.match(path.stem) else compute_sha256(path)


def find_base_file(text: str, folder: Path | None) -> Path:
    """Returns the file that `adapt.base` names: a path, or a base of a coordinator.

    Raises:
        ConfigError: there is no such file, or no coordinator.
        NotFoundError: the coordinator has no such base.
    """
    if text.endswith(BASE_SUFFIX):
        path = Path(text)
        if not path.is_file():
            raise ConfigError(f"adapt.base: there is no file {path}")
        return path
    if folder is None:
        raise ConfigError(
            f"adapt.base = {text!r}: only a coordinator has bases by name; give the path of a {BASE_SUFFIX} file"
        )
    return BaseCatalogue(folder).find(text)
