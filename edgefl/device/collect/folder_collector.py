"""Collector of files: keeps what recorders make and what something else puts into a folder, until it is stopped.

The folder is looked at once a second, and read where its own time has changed. inotify would need a package and a
thread, and sees nothing that another machine writes on a network mount; a look at a folder without news is one call
of the system. A file counts when it has not changed for `settle_s`. How far a folder was read is the time at which
the system last changed a file there (ctime), which no program can set.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.core.errors import DataError, StoreError
from edgefl.device.collect.alignment import JumpDetector
from edgefl.device.collect.answers import Answerer
from edgefl.device.collect.event_labels import EventLabeller
from edgefl.device.collect.file_store import (
    SUFFIXES,
    UNLABELLED,
    FileStore,
    KeptFile,
    check_example,
    compute_digest,
    read_file_time,
)
from edgefl.device.collect.forgetting import (
    forget_files,
    has_forget_request,
    read_forget_request,
    remove_forget_request,
)
from edgefl.device.collect.newest_input import NewFile
from edgefl.device.collect.readings import Counts, ReadingSource, ResumableSource, read_source
from edgefl.device.collect.recorder import Recorder
from edgefl.device.collect.settings import FolderSection, is_label
from edgefl.device.collect.store_state import count_written
from edgefl.system.retries import RateLimitedLog
from edgefl.system.row_labels import get_labels_version, read_row_labels

if TYPE_CHECKING:
    from edgefl.device.collect.similar_pictures import SimilarPictures  # NumPy, which few collectors need

log = logging.getLogger(__name__)

POLL_S, RETRY_S, REPORT_S = 1.0, 10.0, 3600.0
TRIM_S = 7 * 86_400
"""After which labels go where there are many; a file that comes later with an older time gets none."""
MAX_FILES_AT_ONCE = 100
MAX_ENTRIES = 200_000


@dataclass(frozen=True, slots=True, order=True)
class FoundFile:
    """A file that has not changed for a while; `label` is the folder that it lies in, below the source's."""

    changed_ns: int
    path: str
    label: str
    num_bytes: int
    time_s: float


class FolderWatcher:
    """Watcher of one folder and the class folders in it.

    Args:
        section: of the source.
        position: time of the last file that was taken, as of `position`; empty for none.
    """

    def __init__(self, section: FolderSection, position: str) -> None:
        self._section, self._root = section, Path(section.path)
        self._last_ns = int(position) if position.isdecimal() and len(position) < 20 else 0
        self._folders: list[Path] = []
        self._fingerprint: tuple[int, ...] = ()
        self._has_more = True

    @property
    def position(self) -> str:
        return str(self._last_ns)

    def find_unchanged(self, now_s: float) -> list[FoundFile]:
        """Returns the next files, oldest first, at most about `MAX_FILES_AT_ONCE`.

        Raises:
            OSError: a folder cannot be read.
        """
        if not self._has_more and self._read_times() == self._fingerprint:
            return []
        if self._last_ns > now_s * 1e9:
            log.warning("%s was read later than it is now: the clock was set back; it is read again", self._root)
            self._last_ns = 0
        self._folders = [Path(entry.path) for entry in os.scandir(self._root) if _is_class_folder(entry)]
        self._fingerprint = self._read_times()
        # A folder's time has ticks: a change in the same one as the last look would go unseen.
        self._has_more = max(self._fingerprint) > (now_s - self._section.settle_s) * 1e9
        found = sorted(file for folder in [self._root, *self._folders] for file in self._scan(folder, now_s))
        end = MAX_FILES_AT_ONCE
        while end < len(found) and found[end].changed_ns == found[end - 1].changed_ns:
            end += 1  # the position tells no two of the same time apart
        self._has_more |= end < len(found)
        return found[:end]

    def advance(self, file: FoundFile) -> None:
        """Marks a file as taken, and all before it."""
        self._last_ns = file.changed_ns

    def look_again(self) -> None:
        """Makes the next call read the folder, after a file that could not be taken."""
        self._has_more = True

    def _read_times(self) -> tuple[int, ...]:
        """Returns when names in each folder changed last; 0 of one that is gone."""
        times = []
        for folder in [self._root, *self._folders]:
            try:
                times.append(folder.stat().st_mtime_ns)
            except FileNotFoundError:
                times.append(0)
        return tuple(times)

    def _scan(self, folder: Path, now_s: float) -> list[FoundFile]:
        label = "" if folder == self._root else folder.name
        found, limit_ns = list[FoundFile](), int((now_s - self._section.settle_s) * 1e9)
        for entry, _ in zip(os.scandir(folder), range(MAX_ENTRIES), strict=False):
            if entry.name.startswith(".") or not entry.name.lower().endswith(SUFFIXES):
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(info.st_mode) and info.st_ctime_ns > self._last_ns:
                if info.st_ctime_ns > limit_ns:
                    self._has_more = True
                else:
                    found.append(FoundFile(info.st_ctime_ns, entry.path, label, info.st_size, info.st_mtime))
        return found


class FolderCollector:
    """Collector of one shard of files.

    Args:
        sections: of the sources, by name.
        store: for the files.
        counts: of what was left out, so far.
        flush_s: how often positions and counts are written.
        recorders: of cameras and microphones, by name.
        events: sources of events, by name.
        labeller: makes labels of events; None where there are none.
        similar: finds near-duplicates of pictures; None where all are kept.
        answerer: gets the new files; None where there is none.
        clock: seconds since 1970; it may jump.
        monotonic: seconds; it does not.
    """

    def __init__(  # noqa: PLR0913 one keyword for each collaborator
        self,
        sections: Mapping[str, FolderSection],
        store: FileStore,
        counts: Counts,
        *,
        flush_s: float,
        recorders: Mapping[str, Recorder] | None = None,
        events: Mapping[str, ReadingSource] | None = None,
        labeller: EventLabeller | None = None,
        similar: SimilarPictures | None = None,
        answerer: Answerer[NewFile] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sections, self._store, self._counts, self._flush_s = dict(sections), store, counts, flush_s
        self._clock, self._monotonic = clock, monotonic
        self._jumps = JumpDetector(clock, monotonic)
        self._watchers = {
            name: FolderWatcher(section, store.state.positions.get(name, "")) for name, section in sections.items()
        }
        self._recorders = dict(recorders or {})
        self._events, self._labeller, self._similar = dict(events or {}), labeller, similar
        self._answerer = answerer
        for name, source in self._events.items():
            if isinstance(source, ResumableSource):
                source.resume(store.state.positions.get(name, ""))
        self._labelled: tuple[object, ...] = ()
        self._num_written = 0
        self._committed_s = self._reported_s = self._forget_s = monotonic()
        self._log = RateLimitedLog(log)

    def run(self, stopping: threading.Event, on_turn: Callable[[], None] = lambda: None) -> None:
        """Collects until `stopping` is set."""
        pause_s = 0.0
        while not stopping.wait(pause_s):
            pause_s = self.step()
            on_turn()
        self.flush()

    def step(self) -> float:
        """Takes new files of each source once; returns the seconds until the next call."""
        try:
            self._forget()
            for name, watcher in self._watchers.items():
                self._take(name, watcher)
            for name, recorder in self._recorders.items():
                self._take_recordings(name, recorder)
            self._take_events()
            if self._monotonic() - self._committed_s >= self._flush_s and not self.flush():
                return RETRY_S
        except StoreError as error:
            self._log.warning("store", "files wait: %s", error)
            self.flush()  # what is too old makes room
            return RETRY_S
        if self._monotonic() - self._reported_s >= REPORT_S:
            self._reported_s = self._monotonic()
            self._store.refresh()  # somebody may have moved or removed files
            if self._labeller is not None:
                self._labeller.trim(self._clock() - TRIM_S)
            if self._answerer is not None:
                times_s = {read_file_time(file) for file in self._store.list_class(UNLABELLED)}
                self._answerer.trim(lambda time: time.since_s in times_s)
            log.info("%s", self.format_report())
        return POLL_S

    def flush(self) -> bool:
        """Writes positions and counts, and removes what is too much; returns whether that was possible."""
        self._committed_s = self._monotonic()
        state = self._store.state
        positions = {name: watcher.position for name, watcher in self._watchers.items()}
        positions |= {name: one.position for name, one in self._events.items() if isinstance(one, ResumableSource)}
        counts = {name: count for name, count in dict(self._counts).items() if count}
        now_s = self._clock()
        if not (is_labelled := self._label()):  # events are read again after a crash
            kept = {name: place for name, place in state.positions.items() if name in self._events}
            positions = {name: place for name, place in positions.items() if name not in self._events} | kept
        is_known = positions == dict(state.positions) and counts == dict(state.counts)
        if is_known and not self._store.has_excess(now_s):
            return is_labelled
        state = count_written(replace(state, positions=positions, counts=counts), self._num_written, now_s)
        try:
            self._store.commit(state, now_s)
        except StoreError as error:
            self._log.warning("store", "what was taken cannot be noted: %s", error)
            return False
        self._num_written = 0
        return is_labelled

    def _take_events(self) -> None:
        now_s, jump_s = self._jumps.read()
        if jump_s:
            log.warning("the clock jumped by %.1f s", jump_s)
            self._counts["clock_jumps"] += 1
        if self._labeller is None:
            return
        if jump_s:
            self._labeller.restart(now_s)
        sources = self._events.items()
        found = [one for name, source in sources for one in read_source(name, source, self._counts, self._log)]
        self._labeller.take_events(found, now_s)

    def _label(self) -> bool:
        """Writes labels, and moves files that have one to their class; returns whether that was possible."""
        if self._labeller is None:
            return True
        try:
            self._labeller.flush()
            news = get_labels_version(self._store.folder), self._store.num_added
            if news == self._labelled:
                return True
            files = self._store.list_class(UNLABELLED)
            labels = read_row_labels(self._store.folder).find([read_file_time(file) for file in files])
            for file, label in zip(files, labels, strict=True):
                if label:
                    self._store.move(file, label)
            self._labelled = news
        except (StoreError, OSError) as error:
            self._log.warning("labels", "labels wait: %s", error)
            return False
        return True

    def format_report(self) -> str:
        """Returns one line of what is kept, and what was left out."""
        classes = ", ".join(f"{label} {count}" for label, count in self._store.count_classes().items()) or "none"
        left_out = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items()) if count) or "nothing"
        size = self._store.num_bytes / 1e6
        return f"{self._store.num_files} files of {size:.1f} MB kept: {classes}; left out: {left_out}"

    def _forget(self) -> None:
        """Removes the files that somebody asked to forget."""
        folder = self._store.folder
        if not has_forget_request(folder) or self._monotonic() < self._forget_s:
            return
        try:
            if (request := read_forget_request(folder)) is None:
                return
            if self._answerer is not None:
                self._answerer.forget()
            num_files = len(forget_files(folder, request))
            remove_forget_request(folder)
            log.info("forgot %d files as asked for; %d are left", num_files, self._store.num_files - num_files)
        except (StoreError, OSError) as error:
            self._forget_s = self._monotonic() + RETRY_S
            self._log.warning("forget", "files that are to go stay, and it is tried again: %s", error)
        self._store.refresh()

    def _take(self, name: str, watcher: FolderWatcher) -> None:
        try:
            files = watcher.find_unchanged(self._clock())
        except OSError as error:
            self._log.warning(f"folder {name}", "source %s: %s", name, error)
            return
        for file in files:
            try:
                self._take_file(name, file)
            except StoreError:
                watcher.look_again()
                raise
            watcher.advance(file)

    def _take_file(self, name: str, file: FoundFile) -> None:
        """Copies a file into the store, or counts why not."""
        section, path = self._sections[name], Path(file.path)
        if file.num_bytes > section.max_file_mb * 1e6:
            self._counts[f"{name}.too_large"] += 1
            return
        try:
            with path.open("rb") as opened:
                content = opened.read(int(section.max_file_mb * 1e6))
            check_example(content, path.suffix.lower())
            self._add(name, content, _get_label(file.label), path.suffix.lower(), file.time_s)
        except (OSError, ValueError, DataError, MemoryError) as error:
            self._counts[f"{name}.refused"] += 1
            reason = error.strerror if isinstance(error, OSError) else str(error) or "too little memory"
            self._log.warning(f"file {name}", "source %s: %s is left out: %s", name, path, reason)
            return
        if section.remove:
            self._remove(name, path)

    def _take_recordings(self, name: str, recorder: Recorder) -> None:
        for _ in range(MAX_FILES_AT_ONCE):
            if (recording := recorder.read()) is None:
                return
            try:
                self._add(name, recording.content, UNLABELLED, recording.suffix, recording.time_s)
            except (ValueError, DataError, MemoryError) as error:
                self._counts[f"{name}.refused"] += 1
                self._log.warning(f"recording {name}", "source %s: a recording is left out: %s", name, error)
            recorder.advance()

    def _add(self, name: str, content: bytes, label: str, suffix: str, time_s: float) -> None:
        """Stores a file of a source, or counts why not; it is answered either way."""
        kept = self._keep(name, content, label, suffix, time_s)
        if self._answerer is not None:
            self._answerer.add(NewFile(content=content, suffix=suffix, time_s=time_s, kept=kept))

    def _keep(self, name: str, content: bytes, label: str, suffix: str, time_s: float) -> KeptFile | None:
        digest, signature = compute_digest(content), None
        if self._similar is not None and not self._store.has_digest(digest):
            signature = self._similar.compute_signature(content, suffix, name)
            if signature is not None and self._similar.find(signature, label):
                self._counts[f"{name}.similar"] += 1
                return None
        if (kept := self._store.add(content, label, suffix, time_s)) is None:
            self._counts[f"{name}.duplicates"] += 1
            return None
        self._num_written += len(content)
        if self._similar is not None and signature is not None:
            self._similar.add(signature, digest, label)
        return kept

    def _remove(self, name: str, path: Path) -> None:
        """Removes a file that is in the store, or counts that it stays, as in a folder that may not be written."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._counts[f"{name}.not_removed"] += 1
            self._log.warning(f"remove {name}", "source %s: %s cannot be removed: %s", name, path, error.strerror)


def _get_label(folder: str) -> str:
    if folder and not is_label(folder):
        raise ValueError("the name of its folder is too long, or not visible")
    return folder or UNLABELLED


def _is_class_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
