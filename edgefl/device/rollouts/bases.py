"""Bases of models and compiled tasks on the card: fetched once by their SHA-256, the newest kept."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.errors import DataError, NetworkError, TaskError
from edgefl.core.protocol import BASES_PATH
from edgefl.core.types import BASE_SUFFIX, derive_rng
from edgefl.device.rollouts.download import (
    CHUNK_BYTES,
    PART_SUFFIX,
    DownloadSource,
    RemoteFile,
    check_free_space,
    download_file,
)
from edgefl.system.atomic_files import DISK_FULL_ERRNOS, compute_sha256, make_private_directory, make_store_error
from edgefl.system.retries import Backoff
from edgefl.tasks.adaptation.base_file import AdaptPlan
from edgefl.tasks.compiled.plan import CompiledPlan

log = logging.getLogger(__name__)

FOLDER = "bases"
"""In the device's state directory."""
MAX_BASES = 4
"""Files that stay on the card; an older one is fetched again if a run needs it."""
MAX_LOCAL_FILES, MAX_HASHED_FILES = 1000, 8
"""Of a local folder: files that are looked at, and those of the right size that are read."""
MAX_TRIES = 8
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0


FilePlan = AdaptPlan | CompiledPlan
"""What an instruction says of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFolder:
    """Folder that may have files of bases, such as a mounted USB stick.

    Attributes:
        get_path: returns it, None for none.
        charge: called with the bytes that are copied from there, before that; what it raises ends the fetch. A number
            below 0 gives back what was not copied.
    """

    get_path: Callable[[], str | None] = lambda: None
    charge: Callable[[int], None] = lambda _: None


class BaseFiles:
    """Files of bases and compiled tasks in one folder; used by the training thread.

    Args:
        folder: of the files.
        get_source: returns the coordinator's address and our signature; None where this process has no connection.
        should_continue: called while a file arrives and between tries; False ends that with `NetworkError`.
        charge_traffic: called with the bytes of a transfer before it; what it raises ends the fetch, and what has
            arrived stays.
        check_link: called while a file arrives; likewise.
        local: a folder in which a file is looked for first.
    """

    def __init__(
        self,
        folder: Path,
        get_source: Callable[[], DownloadSource] | None,
        *,
        should_continue: Callable[[], bool] = lambda: True,
        charge_traffic: Callable[[int], None] = lambda _: None,
        check_link: Callable[[], None] = lambda: None,
        local: LocalFolder | None = None,
    ) -> None:
        self._local = local or LocalFolder()
        self._charge_traffic, self._check_link = charge_traffic, check_link
        self.folder, self._get_source, self._should_continue = folder, get_source, should_continue
        self._verified: set[str] = set()
        self._received_bytes = 0

    def fetch(self, plan: FilePlan) -> Path:
        """Returns the verified file of a plan, fetched unless it is here; goes on with one that broke off.

        Raises:
            NetworkError: the coordinator is away, or this is stopping; what has arrived stays.
            DataError: the content is not what its name says.
            StoreFullError: it does not fit on the card.
            NotFoundError: the coordinator has it no more.
            TaskError: it is not here, and this process cannot fetch it.
        """
        path = self.folder / f"{plan.sha256}{BASE_SUFFIX}"
        if path.is_file() and (plan.sha256 in self._verified or compute_sha256(path) == plan.sha256):
            self._verified.add(plan.sha256)
            if self._get_source is not None:
                os.utime(path)  # in use: the next file takes another's place
            return path
        if self._get_source is None:
            raise TaskError(f"the base {plan.sha256[:12]} is not on this device, and this process has no connection")
        self._remove_older(plan.sha256)
        if (source := self._find_local(plan)) is not None:
            self._copy(source, plan)
        self._download(plan)  # what is still missing; it checks the whole
        self._verified.add(plan.sha256)
        log.info("base %s is here, %d bytes", plan.sha256[:12], plan.num_bytes)
        return path

    def pop_received_bytes(self) -> int:
        """Returns and clears the number of bytes that were fetched."""
        received, self._received_bytes = self._received_bytes, 0
        return received

    def _find_local(self, plan: FilePlan) -> Path | None:
        """Returns the file of a plan in the local folder: by its name, else by its size and content."""
        folder = self._local.get_path()
        if folder is None:
            return None
        try:
            named = Path(folder) / f"{plan.sha256}{BASE_SUFFIX}"
            listed = [named] if named.exists() else sorted(itertools.islice(Path(folder).iterdir(), MAX_LOCAL_FILES))
            alike = [path for path in listed if path.is_file() and path.stat().st_size == plan.num_bytes]
            for path in alike[:MAX_HASHED_FILES]:
                if self._compute_sha256(path) == plan.sha256:
                    return path
        except OSError as error:  # no stick is plugged in, or it has just been pulled
            log.warning("no base is taken from %s: %s", folder, error.strerror or error)
        return None

    def _compute_sha256(self, path: Path) -> str:
        """Returns the hash of a file that may be large and slow to read; raises a `NetworkError` when stopping."""
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                if not self._should_continue():
                    raise NetworkError(f"{path} was not read to its end: this is stopping")
        return digest.hexdigest()

    def _copy(self, source: Path, plan: FilePlan) -> None:
        """Appends what is missing of a file to its beginning on the card, as far as the source can be read.

        Raises:
            NetworkError: this is stopping.
            StoreError: the card cannot be written.
        """
        make_private_directory(self.folder)
        part = self.folder / f"{plan.sha256}{PART_SUFFIX}"
        try:
            with source.open("rb") as file, part.open("ab") as copy:
                missing = plan.num_bytes - copy.tell()
                if missing <= 0:
                    return
                check_free_space(self.folder, missing, "the base needs")
                self._local.charge(missing)
                file.seek(copy.tell())
                try:
                    while missing > 0 and (chunk := file.read(min(missing, CHUNK_BYTES))):
                        copy.write(chunk)
                        missing -= len(chunk)
                        if not self._should_continue():
                            raise NetworkError(
                                f"the base {plan.sha256[:12]} was not copied to its end: this is stopping"
                            )
                finally:
                    if missing:
                        self._local.charge(-missing)  # what was not written
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                part.unlink(missing_ok=True)
                raise make_store_error(part, error) from None
            log.warning("%s could not be copied to its end: %s", source, error.strerror or error)
        else:
            log.info("base %s was copied from %s", plan.sha256[:12], source)

    def _download(self, plan: FilePlan) -> None:
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=MAX_BACKOFF_S, rng=derive_rng(time.time_ns()))
        for remaining in reversed(range(MAX_TRIES)):
            try:
                self._try_download(plan)
            except (NetworkError, DataError) as error:
                if not remaining or not self._should_continue():
                    raise
                log.info("base %s: %s; trying again", plan.sha256[:12], error)
                time.sleep(backoff.next_s())
            else:
                return

    def _try_download(self, plan: FilePlan) -> None:
        assert self._get_source is not None
        remote = RemoteFile(
            what="the base" if isinstance(plan, AdaptPlan) else "the compiled task",
            path=f"{BASES_PATH}/{plan.sha256}",
            sha256=plan.sha256,
            num_bytes=plan.num_bytes,
            suffix=BASE_SUFFIX,
        )
        part = self.folder / f"{plan.sha256}{PART_SUFFIX}"
        present = part.stat().st_size if part.is_file() else 0
        if present != plan.num_bytes:  # else nothing is transferred, whatever the network
            self._charge_traffic(max(0, plan.num_bytes - present))
        try:
            download_file(self._get_source(), remote, self.folder, self._should_receive)
        finally:
            now = part.stat().st_size if part.is_file() else plan.num_bytes
            self._received_bytes += max(0, now - present)

    def _should_receive(self) -> bool:
        self._check_link()
        return self._should_continue()

    def _remove_older(self, sha256: str) -> None:
        """Removes all but the newest other bases, and what is left of other downloads."""
        if not self.folder.is_dir():
            return
        paths = [path for path in self.folder.iterdir() if path.stem != sha256]
        whole = sorted((path for path in paths if path.suffix == BASE_SUFFIX), key=_get_mtime_ns, reverse=True)
        parts = [path for path in paths if path.suffix == PART_SUFFIX]
        for path in [*whole[MAX_BASES - 1 :], *parts]:
            path.unlink(missing_ok=True)
            self._verified.discard(path.stem)


def _get_mtime_ns(path: Path) -> int:
    return path.stat().st_mtime_ns
