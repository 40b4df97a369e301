"""Failover: of the hosts of a fleet one has the active coordinator, and the others stand by to take over.

A file of its own: this is the one part of a coordinator that runs before it is one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.core.errors import EdgeflError, LeaseLostError, StoreError, UsageError
from edgefl.storage.lease import RENEW_INTERVAL_S, TTL_S, Lease
from edgefl.storage.mirror import DirectoryMirror
from edgefl.storage.repositories.saved_models import list_models
from edgefl.storage.shared_objects import open_shared_objects
from edgefl.storage.store import Store
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

STAND_BY_INTERVAL_S = 0.5
HOST_ID_FILE = "host-id"
_BEING_TAKEN = "the lease has expired, and its holder ends a transaction, or another host takes it"


class Failover:
    """This host's part among those of its fleet. A context manager; the lease is released at its end.

    Args:
        directory: locked for this process, with a store on a database server and shared models.
        on_progress: called at each look at the lease, while this host stands by.
        on_lost: called from a thread when the lease is lost: the coordinator must stop.
        clock: monotonic seconds.

    Raises:
        UsageError, StoreError: as `Lease` and `open_shared_objects`.
    """

    def __init__(
        self,
        directory: CoordinatorDirectory,
        *,
        on_lost: Callable[[EdgeflError], None],
        on_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_lost, self._on_progress, self._clock = on_lost, on_progress, clock
        objects = open_shared_objects(directory.shared_models or "")
        self._directory = directory
        self._lease = Lease.open(
            directory.store_url,
            f"{socket.gethostname()} ({directory.root.absolute()})",
            host_id=_load_host_id(directory.root),
            ca_fingerprint=directory.compute_ca_fingerprint(),
        )
        self.mirror = DirectoryMirror(directory.root, self._lease, objects, clock_ns=time.time_ns)
        self._renewed_s, self._closing = clock(), threading.Event()
        self._thread = threading.Thread(target=self._run_renewals, name="lease", daemon=True)
        self._deadline_thread = threading.Thread(target=self._run_deadline, name="lease-deadline", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(TTL_S)
            if not self._thread.is_alive():  # else the store hangs
                with contextlib.suppress(StoreError):  # it expires then
                    self._lease.release()
        self._lease.close()

    def wait_for_lease(self, stopping: threading.Event) -> bool:
        """Returns once this host is the active one, with the directory as the former one left it.

        Returns:
            False if `stopping` was set before.

        Raises:
            EdgeflError: this host cannot take over.
        """
        reported = None
        while not self._try_to_take_over():
            self._on_progress()
            if self._lease.active_holder != reported:
                reported = self._lease.active_holder
                log.info("standing by: %s", f"{reported} is active" if reported else _BEING_TAKEN)
            if stopping.wait(STAND_BY_INTERVAL_S):
                return False
        log.info("active, in epoch %d of the fleet's lease", self._lease.epoch)
        self._renewed_s = self._clock()
        self._thread.start()
        self._deadline_thread.start()
        self.mirror.load()
        return True

    def open(self, store: Store) -> None:
        """Fences the store's transactions by the lease, and mirrors the directory.

        Raises:
            UsageError: nothing is mirrored yet, and this is not the directory that the store belongs to.
            EdgeflError: something cannot be read or saved.
        """
        if not self._lease.is_mirrored and (missing := _find_missing(self._directory, store)) is not None:
            self._lease.withdraw()
            raise UsageError(
                f"the store names {missing}, which is not in {self._directory.root}; with --models the first host to "
                "start is the one whose directory has the store's runs and models"
            )
        self.mirror.open(store.database)

    def _try_to_take_over(self) -> bool:
        try:
            if self._lease.try_acquire():
                return True
            if self._lease.is_mirrored:
                self.mirror.load_files()
        except UsageError:  # this host belongs to another fleet
            raise
        except EdgeflError as error:
            if self._lease.epoch == 0 and not self._lease.active_holder:
                raise
            log.warning("standing by: %s", error)
        return False

    def _run_renewals(self) -> None:
        while not self._closing.wait(RENEW_INTERVAL_S):
            try:
                self._lease.renew()
                self._renewed_s = self._clock()
            except LeaseLostError as error:
                self._on_lost(error)
                return
            except StoreError as error:
                log.warning("the fleet's lease cannot be renewed: %s", error)
                if self._clock() - self._renewed_s > TTL_S:
                    self._on_lost(LeaseLostError(f"the lease expired, since the store could not be reached: {error}"))
                    return

    def _run_deadline(self) -> None:
        """Ends this host where a renewal does not return.

        It counts its own rounds: after this process was frozen, the renewal has time to find who holds the lease.
        """
        renewed_s, silent_s = self._renewed_s, 0.0
        while not self._closing.wait(RENEW_INTERVAL_S):
            silent_s = silent_s + RENEW_INTERVAL_S if self._renewed_s == renewed_s else 0.0
            renewed_s = self._renewed_s
            if silent_s > TTL_S:
                self._on_lost(LeaseLostError("the lease expired, since the store does not answer"))
                return


def _load_host_id(root: Path) -> str:
    """Returns the random id of this directory, made at the first call; a backup has it not."""
    path = root / HOST_ID_FILE
    if not path.is_file():
        write_atomic(path, secrets.token_hex(16).encode())
    return path.read_text(errors="replace")


def _find_missing(directory: CoordinatorDirectory, store: Store) -> str | None:
    """Returns a run that is not over, or a saved model, that the store has and the directory has not."""
    for record in store.list_runs():
        is_open = record.rounds > 0 and not record.status.is_final
        if is_open and not (directory.runs / record.run_id).is_dir():
            return f"run {record.run_id}"
    for model in list_models(store):
        if not (directory.models / f"{model['sha256']}.safetensors").is_file():
            return f"model {model['sha256'][:12]}… of run {model['run_id']}"
    return None
