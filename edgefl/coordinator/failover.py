"""Failover: of the hosts of a fleet one has the active coordinator, and the others stand by to take over.

A file of its own: this is the one part of a coordinator that runs before it is one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.core.errors import EdgeflError, LeaseLostError, StoreError
from edgefl.storage.database import Database
from edgefl.storage.lease import RENEW_INTERVAL_S, TTL_S, Lease
from edgefl.storage.mirror import DirectoryMirror
from edgefl.storage.shared_objects import open_shared_objects

log = logging.getLogger(__name__)

STAND_BY_INTERVAL_S = 0.5


class Failover:
    """This host's part among those of its fleet. A context manager; the lease is released at its end.

    Args:
        directory: locked for this process, with a store on a database server and shared models.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_lost, self._clock = on_lost, clock
        objects = open_shared_objects(directory.shared_models or "")
        self._lease = Lease.open(directory.store_url, f"{socket.gethostname()} ({directory.root.absolute()})")
        self.mirror = DirectoryMirror(directory.root, self._lease, objects, clock_ns=time.time_ns)
        self._renewed_s, self._closing = clock(), threading.Event()
        self._thread = threading.Thread(target=self._run_renewals, name="lease", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
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
            if self._lease.active_holder != reported:
                reported = self._lease.active_holder
                log.info("standing by: %s is active", reported)
            if stopping.wait(STAND_BY_INTERVAL_S):
                return False
        log.info("active, in epoch %d of the fleet's lease", self._lease.epoch)
        self._renewed_s = self._clock()
        self._thread.start()
        self.mirror.load()
        return True

    def open(self, database: Database) -> None:
        """Fences the store's transactions by the lease, and mirrors the directory; raises an `EdgeflError`."""
        self.mirror.open(database)

    def _try_to_take_over(self) -> bool:
        try:
            if self._lease.try_acquire():
                return True
            if self._lease.is_mirrored:
                self.mirror.load_files()
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
