"""How much of a store's WAL is on disk for certain: what was written behind that, a power cut may take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgefl.storage.store import Store


class SyncedWal:
    """Counts on what this program makes durable itself, from now on; what is there already is on disk."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self._database = Path(store.database.location)
        self._wal = Path(f"{self._database}-wal")
        self.num_bytes, self._sync = self._wal.stat().st_size, os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._note)

    @property
    def is_whole(self) -> bool:
        """Whether a power cut takes nothing."""
        return self.num_bytes == self._wal.stat().st_size

    def cut(self, target: Path) -> Path:
        """Returns the database as it is after a power cut, at `target`."""
        target.write_bytes(self._database.read_bytes())
        Path(f"{target}-wal").write_bytes(self._wal.read_bytes()[: self.num_bytes])
        return target

    def _note(self, handle: int) -> None:
        size = os.fstat(handle).st_size
        self._sync(handle)
        if Path(f"/proc/self/fd/{handle}").readlink() == self._wal:
            self.num_bytes = size
