"""Which models of a run stay on disk: the last ones, the best, and every so many rounds.

Files are written by a thread of their own, at most once a second, so that no round waits for a disk; a model that the
next one replaces meanwhile is never written. A row follows its file, and a file goes after its row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgefl.config import ModelsSection
from edgefl.errors import EdgeflError, StoreError
from edgefl.files import store_error, sync_directory
from edgefl.storage.checkpoints import save_model
from edgefl.storage.model_rows import keep_models, unnamed_models
from edgefl.storage.records import CheckpointRow
from edgefl.storage.store import Store
from edgefl.types import Array, Tensors

log = logging.getLogger(__name__)

WRITE_EVERY_S = 1.0
MAX_WAITING_BYTES = 1 << 30
MAX_AWAITED = 8
"""So many models stay because their accuracy is not known yet; evaluations that take longer make none the best."""
SWEEP_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A model in memory; its row has no file yet."""

    row: CheckpointRow
    model: Mapping[str, Array]
    num_bytes: int


class ModelKeeper:
    """Keeps the models of one run as its `[models]` section says; what an earlier coordinator kept counts too.

    Args:
        folder: where model files lie.
        store: names them.
        run_id: whose models.
        rule: what stays.
        clock: Unix seconds, for the rows.
        write_every_s: files are written at most so often.
        max_waiting_bytes: more does not wait to be written: then `take` waits for the disk.
    """

    def __init__(  # noqa: PLR0913 two of them are for tests and odd disks
        self,
        folder: Path,
        store: Store,
        run_id: str,
        rule: ModelsSection,
        *,
        clock: Callable[[], float] = time.time,
        write_every_s: float = WRITE_EVERY_S,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._folder, self._store, self._run_id, self._rule = folder, store, run_id, rule
        self._clock, self._write_every_s, self._max_waiting_bytes = clock, write_every_s, max_waiting_bytes
        self._kept = {row.version: row for row in reversed(store.checkpoints(run_id))}
        self._waiting: dict[int, _Waiting] = {}
        self._changed: set[int] = set()
        self._awaited: dict[int, None] = {}
        self._needed_bytes = 0  # of a model that `take` has no room for
        self._error: EdgeflError | None = None
        self._closing = False
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, version: int, number: int, last_record: int, model: Tensors) -> None:
        """Takes a copy of the model of a version that is being evaluated.

        Raises:
            StoreError: an earlier model could not be written.
        """
        with self._lock:
            if version in self._waiting or version in self._kept:
                return
        dense = {name: np.array(t if isinstance(t, np.ndarray) else t.dense()) for name, t in model.items()}
        waiting = _Waiting(
            row=_row(version, number, last_record, self._clock()),
            model=dense,
            num_bytes=sum(array.nbytes for array in dense.values()),
        )
        with self._lock:
            self._raise_error()
            if not self._has_room(waiting.num_bytes):
                self._needed_bytes = waiting.num_bytes
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._error or self._has_room(waiting.num_bytes))
                self._needed_bytes = 0
                self._raise_error()
            self._waiting[version] = waiting
            if self._rule.keep_best:
                self._awaited[version] = None
                while len(self._awaited) > MAX_AWAITED:
                    self._awaited.pop(next(iter(self._awaited)))
            self._forget_waiting()
            self._start()
            self._lock.notify_all()

    def score(self, version: int, accuracy: float | None) -> None:
        """Takes the accuracy of a version, None when nobody could tell it."""
        with self._lock:
            self._awaited.pop(version, None)
            if accuracy is not None and version in self._waiting:
                waiting = self._waiting[version]
                self._waiting[version] = replace(waiting, row=replace(waiting.row, accuracy=accuracy))
            elif accuracy is not None and version in self._kept:
                self._kept[version] = replace(self._kept[version], accuracy=accuracy)
                self._changed.add(version)
            self._forget_waiting()
            self._lock.notify_all()

    def finish(self, version: int, number: int, last_record: int, model: Tensors) -> None:
        """Writes the model that the run ends with, and everything that waits.

        Raises:
            StoreError: something cannot be written.
        """
        self._awaited.clear()
        self._stop()
        self._raise_error()
        known = self._waiting.pop(version, None)
        row = known.row if known else self._kept.get(version, _row(version, number, last_record, self._clock()))
        self._write()
        before = {} if version not in self._kept else {self._kept.pop(version).last_record: row.sha256}
        sha256, path = save_model(self._folder, model)
        self._kept[version] = replace(
            row, last_record=last_record, sha256=sha256, bytes_file=path.stat().st_size, at=self._clock()
        )
        self._settle({version}, also_dropped=before)

    def close(self) -> None:
        """Writes what waits, unless something went wrong before; a run that was cut off keeps what it had."""
        self._awaited.clear()
        self._stop()
        if self._error is None and self._waiting and (error := self._try_to_write()) is not None:
            log.warning("the last models of run %s are not kept: %s", self._run_id, error)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="models", daemon=True)
            self._thread.start()

    def _stop(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closing or self._waiting or self._changed)
                if self._closing:
                    return
            if (error := self._try_to_write()) is not None:
                with self._lock:
                    self._error = error
                    self._lock.notify_all()
                return
            with self._lock:
                self._lock.wait_for(self._is_urgent, timeout=self._write_every_s)

    def _try_to_write(self) -> EdgeflError | None:
        """Returns what went wrong, if anything did, as an error that the run's thread may raise."""
        try:
            self._write()
        except EdgeflError as error:
            return error
        except OSError as error:
            return store_error(self._folder, error)
        except Exception as error:  # no memory to pack a model, say: the run's thread would wait for room for ever
            log.exception("models of run %s cannot be written", self._run_id)
            return StoreError(
                f"models of run {self._run_id} cannot be written: {error!r}; start the coordinator again"
            )
        return None

    def _write(self) -> None:
        """Writes what waits and what is known of it, then lets go of what the rule does not keep."""
        with self._lock:
            todo = list(self._waiting.values())
        for waiting in todo:
            version = waiting.row.version
            with self._lock:
                if version not in self._waiting:  # a newer one has taken its place meanwhile
                    continue
            sha256, path = save_model(self._folder, waiting.model)
            with self._lock:
                row = self._waiting.pop(version, waiting).row
                self._kept[version] = replace(row, sha256=sha256, bytes_file=path.stat().st_size)
                self._changed.add(version)
                self._lock.notify_all()
        with self._lock:
            changed, self._changed = self._changed, set()
        if changed:
            self._settle(changed)

    def _settle(self, changed: Collection[int], also_dropped: Mapping[int, str] | None = None) -> None:
        """Makes rows and files follow `_kept`: rows first, then the files of those that went."""
        with self._lock:
            stays = retained(
                [*self._kept.values(), *(w.row for w in self._waiting.values())], self._rule, self._awaited
            )
            going = {row.last_record: row.sha256 for row in self._kept.values() if row.version not in stays}
            self._kept = {version: row for version, row in self._kept.items() if version in stays}
            rows = [self._kept[version] for version in sorted(changed) if version in self._kept]
        going |= also_dropped or {}
        keep_models(self._store, self._run_id, rows, [record for record in going if record not in _records(rows)])
        remove_unnamed(self._folder, self._store, set(going.values()))

    def _forget_waiting(self) -> None:
        """Drops what waits and would be let go of at once."""
        rows = [*self._kept.values(), *(waiting.row for waiting in self._waiting.values())]
        stays = retained(rows, self._rule, self._awaited)
        self._waiting = {version: waiting for version, waiting in self._waiting.items() if version in stays}

    def _has_room(self, num_bytes: int) -> bool:
        waiting = sum(waiting.num_bytes for waiting in self._waiting.values())
        return not waiting or waiting + num_bytes <= self._max_waiting_bytes

    def _is_urgent(self) -> bool:
        return self._closing or not self._has_room(self._needed_bytes)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def retained(rows: Sequence[CheckpointRow], rule: ModelsSection, awaited: Collection[int] = ()) -> set[int]:
    """Returns the versions that stay: the last ones, the best, those of every so many rounds, and the `awaited`.

    The best is the one with the highest accuracy, of equals the newest. An awaited version may yet be it.
    """
    versions = sorted(row.version for row in rows)
    stays = {*versions[-rule.keep_last :], *(version for version in versions if version in awaited)}
    scored = [(row.accuracy, row.version) for row in rows if row.accuracy is not None]
    if rule.keep_best and scored:
        stays.add(max(scored)[1])
    if rule.keep_every:
        stays |= {row.version for row in rows if row.round and row.round % rule.keep_every == 0}
    return stays


def remove_unnamed(folder: Path, store: Store, sha256s: Collection[str]) -> None:
    """Removes the files of those models that nothing in the store names."""
    gone = unnamed_models(store, sha256s)
    for sha256 in gone:
        (folder / f"{sha256}.safetensors").unlink(missing_ok=True)
    if gone:
        sync_directory(folder)


def sweep_models(folder: Path, store: Store, *, now: float) -> None:
    """Removes model files, a day old or more, that a coordinator left when it was killed between file and row."""
    if not folder.is_dir():
        return
    old = [path.stem for path in folder.glob("*.safetensors") if now - path.stat().st_mtime > SWEEP_AFTER_S]
    remove_unnamed(folder, store, {stem for stem in old if len(stem) == 64})


def _row(version: int, number: int, last_record: int, at: float) -> CheckpointRow:
    return CheckpointRow(version=version, round=number, last_record=last_record, sha256="", bytes_file=0, at=at)


def _records(rows: Sequence[CheckpointRow]) -> set[int]:
    return {row.last_record for row in rows}
