"""Retention of a run's models on disk: the last ones, the best, and one every `keep_every` rounds.

A thread of its own writes files, at most once a second, so that no round waits for the disk; a model that the next
one replaces meanwhile is never written. A row is written after its file, and a file is deleted after its row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.core.config import ModelsSection
from edgefl.core.errors import DataError, EdgeflError, StoreError
from edgefl.core.metrics import NO_METRICS, MetricSet
from edgefl.core.types import Array, Decision, EvaluateInstruction, Tensors
from edgefl.engine.evaluations import DeviceAccuracy, VersionAccuracy
from edgefl.engine.round_loop import RunSubscriber
from edgefl.storage.checkpoints import save_model
from edgefl.storage.repositories.records import SavedModelRow
from edgefl.storage.repositories.saved_models import find_orphaned_models, save_model_rows
from edgefl.storage.store import Store
from edgefl.system.atomic_files import (
    compute_sha256,
    copy_file,
    make_private_directory,
    make_store_error,
    sync_directory,
    write_atomic,
)

if TYPE_CHECKING:
    from edgefl.engine.assembly.components import RunComponents

log = logging.getLogger(__name__)

WRITE_EVERY_S = 1.0
MAX_PENDING_BYTES = 1 << 30
MAX_UNSCORED = 8
"""Maximum number of models kept until their accuracy is known; slower evaluations are ignored."""
ORPHAN_AGE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingModel:
    """A model in memory, whose row has no file yet."""

    row: SavedModelRow
    model: Mapping[str, Array]
    num_bytes: int


class ModelRetention:
    """Retains the models of one run by its `[models]` section, with those saved by an earlier coordinator.

    Args:
        folder: of the model files.
        store: has their rows.
        run_id: of the run.
        rule: which models stay.
        clock: Unix seconds, for the rows.
        write_every_s: minimum interval between writes.
        max_pending_bytes: limit of models in memory; beyond it `add` waits for the disk.
        files_lock: shared by all runs of the folder: a file that one removes may be what another is about to name.
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
        max_pending_bytes: int = MAX_PENDING_BYTES,
        files_lock: threading.Lock | None = None,
    ) -> None:
        self._folder, self._store, self._run_id, self._rule = folder, store, run_id, rule
        self._clock, self._write_every_s, self._max_pending_bytes = clock, write_every_s, max_pending_bytes
        self._saved_rows = {row.version: row for row in reversed(store.list_saved_models(run_id))}
        self._pending: dict[int, _PendingModel] = {}
        self._changed_versions: set[int] = set()
        self._unscored: dict[int, None] = {}
        self._needed_bytes = 0  # of a model that `add` has no room for
        self._error: EdgeflError | None = None
        self._is_closing = False
        self._lock, self._files_lock = threading.Condition(), files_lock or threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, version: int, round_number: int, last_record: int, model: Tensors) -> None:
        """Copies the model of a version that is being evaluated.

        Raises:
            StoreError: an earlier model could not be written.
        """
        with self._lock:
            if version in self._pending or version in self._saved_rows:
                return
        dense = {name: np.array(t if isinstance(t, np.ndarray) else t.dense()) for name, t in model.items()}
        pending = _PendingModel(
            row=_create_row(version, round_number, last_record, self._clock()),
            model=dense,
            num_bytes=sum(array.nbytes for array in dense.values()),
        )
        with self._lock:
            self._raise_error()
            if not self._has_room(pending.num_bytes):
                self._needed_bytes = pending.num_bytes
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._error or self._has_room(pending.num_bytes))
                self._needed_bytes = 0
                self._raise_error()
            self._pending[version] = pending
            if self._rule.keep_best:
                self._unscored[version] = None
                while len(self._unscored) > MAX_UNSCORED:
                    self._unscored.pop(next(iter(self._unscored)))
            self._remove_unretained()
            self._start_writer()
            self._lock.notify_all()

    def record_accuracy(self, version: int, accuracy: float | None, quality: float | None = None) -> None:
        """Records the trusted accuracy and quality of a version; None when too few evaluations succeeded."""
        with self._lock:
            self._unscored.pop(version, None)
            is_scored = accuracy is not None or quality is not None
            if is_scored and version in self._pending:
                pending = self._pending[version]
                self._pending[version] = replace(
                    pending, row=replace(pending.row, accuracy=accuracy, quality=quality)
                )
            elif is_scored and version in self._saved_rows:
                self._saved_rows[version] = replace(self._saved_rows[version], accuracy=accuracy, quality=quality)
                self._changed_versions.add(version)
            self._remove_unretained()
            self._lock.notify_all()

    def finish(self, version: int, round_number: int, last_record: int, model: Tensors) -> None:
        """Writes the final model, and all pending ones.

        Raises:
            StoreError: something cannot be written.
        """
        self._unscored.clear()
        self._stop_writer()
        self._raise_error()
        pending = self._pending.pop(version, None)
        row = (
            pending.row
            if pending
            else self._saved_rows.get(version, _create_row(version, round_number, last_record, self._clock()))
        )
        self._write()
        replaced = {saved.sha256} if (saved := self._saved_rows.get(version)) is not None else set()
        with self._files_lock:
            sha256, path = save_model(self._folder, model)
            self._saved_rows[version] = replace(
                row, last_record=last_record, sha256=sha256, bytes_file=path.stat().st_size, at=self._clock()
            )
            self._apply_retention({version}, replaced)

    def close(self) -> None:
        """Writes pending models, unless a write failed before; an interrupted run keeps its models."""
        self._unscored.clear()
        self._stop_writer()
        if self._error is None and self._pending and (error := self._try_to_write()) is not None:
            log.warning("the last models of run %s are not kept: %s", self._run_id, error)

    def _start_writer(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_writer, name="models", daemon=True)
            self._thread.start()

    def _stop_writer(self) -> None:
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run_writer(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._is_closing or self._pending or self._changed_versions)
                if self._is_closing:
                    return
            if (error := self._try_to_write()) is not None:
                with self._lock:
                    self._error = error
                    self._lock.notify_all()
                return
            with self._lock:
                self._lock.wait_for(self._is_urgent, timeout=self._write_every_s)

    def _try_to_write(self) -> EdgeflError | None:
        """Writes; returns a failure as an error for the run's thread to raise."""
        try:
            self._write()
        except EdgeflError as error:
            return error
        except OSError as error:
            return make_store_error(self._folder, error)
        except (
            Exception
        ) as error:  # no memory to pack a model, say: the run's thread would wait for room indefinitely
            log.exception("models of run %s cannot be written", self._run_id)
            return StoreError(
                f"models of run {self._run_id} cannot be written: {error!r}; start the coordinator again"
            )
        return None

    def _write(self) -> None:
        """Writes pending models and changed rows, then removes models that are not retained."""
        with self._files_lock:
            self._write_files()

    def _write_files(self) -> None:
        with self._lock:
            pending_models = list(self._pending.values())
        for pending in pending_models:
            version = pending.row.version
            with self._lock:
                if version not in self._pending:  # a newer one has replaced it meanwhile
                    continue
            sha256, path = save_model(self._folder, pending.model)
            with self._lock:
                row = self._pending.pop(version, pending).row
                self._saved_rows[version] = replace(row, sha256=sha256, bytes_file=path.stat().st_size)
                self._changed_versions.add(version)
                self._lock.notify_all()
        with self._lock:
            changed, self._changed_versions = self._changed_versions, set()
        if changed:
            self._apply_retention(changed)

    def _apply_retention(self, changed: Collection[int], replaced: Collection[str] = ()) -> None:
        """Updates rows, then deletes the files of removed ones, and of `replaced` hashes."""
        with self._lock:
            retained = select_retained(
                [*self._saved_rows.values(), *(pending.row for pending in self._pending.values())],
                self._rule,
                self._unscored,
            )
            removed = {row.version: row.sha256 for row in self._saved_rows.values() if row.version not in retained}
            self._saved_rows = {version: row for version, row in self._saved_rows.items() if version in retained}
            rows = [self._saved_rows[version] for version in sorted(changed) if version in self._saved_rows]
        save_model_rows(self._store, self._run_id, rows, list(removed))
        remove_unreferenced(self._folder, self._store, {*removed.values(), *replaced})

    def _remove_unretained(self) -> None:
        """Drops pending models that would not be retained."""
        rows = [*self._saved_rows.values(), *(pending.row for pending in self._pending.values())]
        retained = select_retained(rows, self._rule, self._unscored)
        self._pending = {version: pending for version, pending in self._pending.items() if version in retained}

    def _has_room(self, num_bytes: int) -> bool:
        waiting = sum(waiting.num_bytes for waiting in self._pending.values())
        return not waiting or waiting + num_bytes <= self._max_pending_bytes

    def _is_urgent(self) -> bool:
        return self._is_closing or not self._has_room(self._needed_bytes)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def select_retained(rows: Sequence[SavedModelRow], rule: ModelsSection, unscored: Collection[int] = ()) -> set[int]:
    """Returns the retained versions: the last ones, the best, one every `keep_every` rounds, and `unscored`.

    The best has the highest quality, or accuracy where none has that, the newest of equals. An `unscored` version may
    yet be the best.
    """
    versions = sorted(row.version for row in rows)
    retained = {*versions[-rule.keep_last :], *(version for version in versions if version in unscored)}
    by_accuracy = [(row.accuracy, row.version) for row in rows if row.accuracy is not None]
    scored = [(row.quality, row.version) for row in rows if row.quality is not None] or by_accuracy
    if rule.keep_best and scored:
        retained.add(max(scored)[1])
    if rule.keep_every:
        retained |= {row.version for row in rows if row.round and row.round % rule.keep_every == 0}
    return retained


def remove_unreferenced(folder: Path, store: Store, sha256s: Collection[str]) -> None:
    """Removes the files of those models that no row in the store references."""
    orphans = find_orphaned_models(store, sha256s)
    for sha256 in orphans:
        (folder / f"{sha256}.safetensors").unlink(missing_ok=True)
    if orphans:
        sync_directory(folder)


def remove_orphans(folder: Path, store: Store, *, now: float) -> None:
    """Removes model files, a day old or more, that a coordinator left when it was killed between file and row."""
    if not folder.is_dir():
        return
    stems = [path.stem for path in folder.glob("*.safetensors") if now - path.stat().st_mtime > ORPHAN_AGE_S]
    remove_unreferenced(folder, store, {stem for stem in stems if len(stem) == 64})


def _create_row(version: int, round_number: int, last_record: int, at: float) -> SavedModelRow:
    return SavedModelRow(version=version, round=round_number, last_record=last_record, sha256="", bytes_file=0, at=at)


def save_base(components: RunComponents, folder: Path) -> None:
    """Writes what devices get once for a run, under its SHA-256; nothing where all of the model travels.

    Raises:
        DataError: the file of a pretrained base has another SHA-256.
    """
    if (adapted := components.adapted) is None:
        return
    sha256, source = adapted.plan.sha256, adapted.path
    path = folder / f"{sha256}.safetensors"
    if path.is_file() and compute_sha256(path) == sha256:
        return
    make_private_directory(folder)
    if source is None:
        write_atomic(path, adapted.encode_base())
    elif path.is_file() and path.samefile(source):
        raise DataError(
            f"base {path} must have the SHA-256 of its name, got {compute_sha256(path)}; "
            "bring the file again: edgefl base add FILE"
        )
    else:
        copy_file(source, path, sha256)


class EvaluatedModelSaver(RunSubscriber):
    """Subscriber of a run's log that passes evaluated models to the retention.

    Args:
        retention: gets the global model of every evaluated version, and its accuracy.
        get_model: a strategy's state -> its model.
        last_record: () -> number of the journal's last record.
        metrics: of the task; the first says which model is the best.
    """

    def __init__(
        self,
        retention: ModelRetention,
        get_model: Callable[[Any], Tensors],
        last_record: Callable[[], int],
        metrics: MetricSet = NO_METRICS,
    ) -> None:
        self._metrics = metrics
        self._retention, self._get_model, self._last_record = retention, get_model, last_record
        self._version, self._added_version = -1, -1
        self._state: object = None

    def on_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:  # noqa: ARG002
        self._version, self._state = version, state

    def on_decision(self, decision: Decision) -> None:
        for instruction in decision.instructions:
            if not isinstance(instruction, EvaluateInstruction) or instruction.subject:
                continue
            if instruction.version == self._version != self._added_version:
                # The state is that of the newest version until the loop folds updates into it, which follows.
                self._added_version = self._version
                model = self._get_model(self._state)
                self._retention.add(self._version, instruction.round, self._last_record(), model)

    def on_score(self, score: VersionAccuracy | DeviceAccuracy) -> None:
        if isinstance(score, VersionAccuracy):
            quality = self._metrics.compute_quality(score.trusted_metrics)
            self._retention.record_accuracy(score.version, score.trusted, quality)
