"""File store: a shard of class folders, in which each example is a file that is named by its time and its SHA-256.

The name makes a second copy the same file, after a crash too, and lets anybody check what it holds. Files come by
rename, so that a task never sees half of one, and only whole ones: one damaged file spoils a shard. Those without a
class lie in a folder that tasks leave alone.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import io
import logging
import os
import re
import wave
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from edgefl.core.errors import ConfigError
from edgefl.device.collect.row_store import StoreLimits
from edgefl.device.collect.store_state import StoreState, lock_folder, read_store_state, save_store_state
from edgefl.system.atomic_files import (
    make_private_directory,
    make_store_error,
    open_atomic,
    remove_temporary_files,
    sync_directory,
)
from edgefl.system.row_labels import UNLABELLED_FOLDER, parse_example_time

log = logging.getLogger(__name__)

UNLABELLED = UNLABELLED_FOLDER
SUFFIXES = (".png", ".jpg", ".jpeg", ".wav")
MAX_SOUND_CHANNELS = 16
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"
_JPEG_START, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
MAX_CLASSES = 1000
MAX_FILES = 100_000
MAX_TIME_S = 1e11
_NAME = re.compile(r"(\d{8}T\d{6}\.\d{3})-([0-9a-f]{16})\.[a-z]+")


@dataclass(frozen=True, slots=True, order=True)
class KeptFile:
    """A file of the store; the name begins with its time, so that they sort by it."""

    name: str
    label: str
    num_bytes: int

    @property
    def digest(self) -> str:
        return self.name[20:36]


class FileStore:
    """Store of files in a folder; one process at a time, by `open_file_store`.

    Args:
        folder: of the shard.
        state: as of the last commit.
        limits: most bytes and age; there are at most `MAX_FILES`, too.
        evicted: what goes first: the oldest of all, or with `balanced` of the class that has most files.

    Attributes:
        folder: of the shard.
        state: as of the last commit, with positions, counts and what was written.
        num_files: of all classes.
        num_added: files that came to the books, also by reading the folder anew.
    """

    def __init__(
        self, folder: Path, state: StoreState, limits: StoreLimits, evicted: Literal["oldest", "balanced"] = "oldest"
    ) -> None:
        self.folder, self.state, self._limits, self._evicted = folder, state, limits, evicted
        self._files: dict[str, list[KeptFile]] = {}
        self._digests: set[str] = set()
        self._times: dict[str, int] = {}
        self.num_files = self.num_bytes = self.num_added = 0
        self.refresh()

    def add(self, content: bytes, label: str, suffix: str, time_s: float) -> KeptFile | None:
        """Stores an example of a class, durably; returns it, None where it is there. `label` is a folder's name.

        What is too much then goes at once, so that files which come fast do not fill the card.

        Raises:
            ValueError: there would be too many classes.
            StoreError: it cannot be written.
        """
        digest = compute_digest(content)
        if digest in self._digests:
            return None
        if label not in self._files and len(self._files) >= MAX_CLASSES:
            raise ValueError(f"there are {MAX_CLASSES} classes already")
        time = datetime.fromtimestamp(min(max(time_s, 0.0), MAX_TIME_S), UTC)
        name = f"{time:%Y%m%dT%H%M%S}.{time.microsecond // 1000:03d}-{digest}{suffix}"
        path = self.folder / label / name
        with self._own_change(label):
            make_private_directory(path.parent)
            try:
                with open_atomic(path) as file:
                    file.write(content)
            except OSError as error:
                raise make_store_error(path, error) from None
        kept = KeptFile(name, label, len(content))
        self._insert(kept)
        self._remove_surplus()
        return kept

    def commit(self, state: StoreState, now_s: float) -> None:
        """Removes what is too much or too old, and then stores the state.

        Raises:
            StoreError: it cannot be written.
        """
        self._catch_up()
        oldest = self._format_oldest(now_s)
        for label in list(self._files):
            while (files := self._files.get(label)) and files[0].name < oldest:
                self._remove(files[0])
        self._remove_surplus()
        save_store_state(self.folder, state)
        self.state = state

    def has_excess(self, now_s: float) -> bool:
        """Returns whether a commit would remove something that is too much or too old."""
        self._catch_up()
        oldest = self._format_oldest(now_s)
        return self._has_surplus() or any(files and files[0].name < oldest for files in self._files.values())

    def refresh(self) -> None:
        """Reads the folder anew, after files of it went or were moved."""
        self._times = self._read_times()  # first: what changes meanwhile is seen by the next look
        self._files, self._digests = {}, set()
        self.num_files = self.num_bytes = 0
        for file in sorted(list_files(self.folder)):
            self._insert(file)

    def has_digest(self, digest: str) -> bool:
        """Returns whether a file whose name has this digest is in the store."""
        return digest in self._digests

    def list_class(self, label: str) -> list[KeptFile]:
        """Returns the files of a class, oldest first."""
        self._catch_up()
        return list(self._files.get(label, ()))

    def move(self, file: KeptFile, label: str) -> None:
        """Moves a file to another class, durably; one that is gone leaves the store, one class too many is none.

        Raises:
            StoreError: it cannot be moved.
        """
        if label not in self._files and len(self._files) >= MAX_CLASSES:
            return
        with self._own_change(file.label, label):
            is_there = move_example(self.folder, file, label)
        self._forget(file)
        if is_there:
            self._insert(replace(file, label=label))

    def count_classes(self) -> dict[str, int]:
        """Returns the number of files by class."""
        return {label: len(files) for label, files in sorted(self._files.items()) if files}

    def _format_oldest(self, now_s: float) -> str:
        """Returns the beginning of the name of the oldest file that stays."""
        limit_s = now_s - self._limits.max_age_s if self._limits.max_age_s else 0.0
        return f"{datetime.fromtimestamp(max(limit_s, 0.0), UTC):%Y%m%dT%H%M%S}"

    def _has_surplus(self) -> bool:
        return self.num_bytes > self._limits.get_max_bytes(self.folder) or self.num_files > MAX_FILES

    def _remove_surplus(self) -> None:
        while self._has_surplus():
            self._remove(self._find_evicted())

    def _find_evicted(self) -> KeptFile:
        classes = [files for files in self._files.values() if files]
        return max(classes, key=len)[0] if self._evicted == "balanced" else min(files[0] for files in classes)

    def _insert(self, file: KeptFile) -> None:
        bisect.insort(self._files.setdefault(file.label, []), file)
        self._digests.add(file.digest)
        self.num_files += 1
        self.num_added += 1
        self.num_bytes += file.num_bytes

    def _remove(self, file: KeptFile) -> None:
        try:
            with self._own_change(file.label):
                (self.folder / file.label / file.name).unlink()
        except FileNotFoundError:  # somebody has removed it, or moved it to another class, where it still counts
            self.refresh()
            return
        except OSError as error:  # the next look finds it again
            log.debug("%s cannot be removed: %s", file.name, error.strerror)
        self._forget(file)

    def _catch_up(self) -> None:
        """Reads the folder anew where somebody else has changed a class, such as a person who labels."""
        if self._read_times() != self._times:
            self.refresh()

    @contextlib.contextmanager
    def _own_change(self, *labels: str) -> Iterator[None]:
        """Notes what the block changes in class folders as known, unless somebody else was there before."""
        known = [label for label in labels if self._read_time(label) == self._times.get(label, 0)]
        try:
            yield
        finally:
            times = self._times | {label: self._read_time(label) for label in known}
            self._times = {label: time_ns for label, time_ns in times.items() if time_ns}

    def _read_times(self) -> dict[str, int]:
        """Returns when names in each class folder changed last."""
        names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]
        return {name: time_ns for name in names if (time_ns := self._read_time(name))}

    def _read_time(self, label: str) -> int:
        try:
            return (self.folder / label).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _forget(self, file: KeptFile) -> None:
        self._files[file.label].remove(file)
        self._digests.discard(file.digest)
        self.num_files -= 1
        self.num_bytes -= file.num_bytes


@contextlib.contextmanager
def open_file_store(folder: Path, limits: StoreLimits, evicted: Literal["oldest", "balanced"]) -> Iterator[FileStore]:
    """Yields the store in a folder, which is made where there is none, locked for this process.

    Raises:
        StoreBusyError: another collector uses it.
        ConfigError: it holds rows.
        StoreError: it cannot be used, or its state is damaged.
    """
    make_private_directory(folder)
    with lock_folder(folder):
        state = read_store_state(folder) or StoreState(columns=())
        if state.columns:
            raise ConfigError(
                f"{folder} holds rows of {', '.join(state.columns):.200}; take another folder for files"
            )
        remove_temporary_files(folder)
        yield FileStore(folder, state, limits, evicted)


def compute_digest(content: bytes) -> str:
    """Returns what a file's name says of its content."""
    return hashlib.sha256(content).hexdigest()[:16]


def move_example(folder: Path, file: KeptFile, label: str) -> bool:
    """Moves a file of a shard to another class by rename, durably; returns whether it was there.

    A class that has no file any more goes with its folder, which no task could read.

    Raises:
        StoreError: it cannot be moved.
    """
    make_private_directory(folder / label)
    try:
        (folder / file.label / file.name).rename(folder / label / file.name)
        for name in (label, file.label):
            with contextlib.suppress(FileNotFoundError):  # it has no file any more, and somebody was faster
                sync_directory(folder / name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise make_store_error(folder / label, error) from None
    if file.label not in {label, UNLABELLED}:
        with contextlib.suppress(OSError):  # others are in it
            (folder / file.label).rmdir()
    return True


def list_files(folder: Path) -> Iterator[KeptFile]:
    """Yields the files of a folder that a collector has named; one that goes or moves meanwhile may be left out."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from list_class_files(folder, entry.name)


def list_class_files(folder: Path, label: str) -> Iterator[KeptFile]:
    """Yields those of one class; none where it has no folder."""
    with contextlib.suppress(FileNotFoundError):
        for file in os.scandir(folder / label):
            with contextlib.suppress(FileNotFoundError, ValueError):  # a time that there is not: of another
                if _NAME.fullmatch(file.name):
                    found = KeptFile(file.name, label, file.stat().st_size)
                    read_file_time(found)
                    yield found


def read_file_time(file: KeptFile) -> float:
    """Returns the time in a file's name, in seconds since 1970."""
    return parse_example_time(file.name)


def check_example(content: bytes, suffix: str) -> None:
    """Checks that a file is whole and of the kind that its suffix says.

    Nothing is decoded: a PNG's chunks have checksums, a JPEG has an end, and a WAV says how long it is.

    Raises:
        ValueError: it is not.
    """
    if suffix == ".wav":
        _check_wav(content)
    elif suffix == ".png":
        _check_png(content)
    elif not content.startswith(_JPEG_START) or not content.rstrip(b"\0").endswith(_JPEG_END):
        raise ValueError("it is no JPEG picture, or has no end")


def _check_png(content: bytes) -> None:
    if not content.startswith(_PNG_START):
        raise ValueError("it is no PNG picture")
    place, kind = len(_PNG_START), b""
    while kind != _PNG_END:
        length = int.from_bytes(content[place : place + 4], "big")
        end = place + 8 + length
        kind, check = content[place + 4 : place + 8], content[end : end + 4]
        if len(check) < 4 or zlib.crc32(content[place + 4 : end]) != int.from_bytes(check, "big"):
            raise ValueError("a part of the PNG picture is missing or damaged")
        place = end + 4


def _check_wav(content: bytes) -> None:
    try:
        with wave.open(io.BytesIO(content)) as sound:
            frame_bytes, num_frames = sound.getnchannels() * sound.getsampwidth(), sound.getnframes()
            num_bytes = len(sound.readframes(num_frames))
    except (wave.Error, EOFError, ValueError, RuntimeError) as error:
        raise ValueError(f"it is no WAV file of whole numbers: {error}") from None
    if not num_frames or num_bytes != num_frames * frame_bytes or sound.getnchannels() > MAX_SOUND_CHANNELS:
        raise ValueError("the WAV file is empty, has no end, or too many channels")
