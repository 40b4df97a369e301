"""The `edgefl` of a chaos test: nothing of ours is changed, but what it does is noted, and it can be tampered with.

    python doctored.py NOTES coordinator start …

NOTES is a folder outside of the process's own state. In it lie

- `control`: sixteen bytes that the test writes, see `Control`: how far the process's clock is off, and whether it is
  to die at its next fdatasync;
- `syncs`: one line a sync, `SIZE PATH`: so many bytes of this journal file were durable when it returned;
- `journal/`: copies of journal files that are let go of, in a folder for each run;
- `answers`: one JSON line before and one after every answer that a device sends: which, of what content, what came of
  it. Files of a process outlive its SIGKILL, so nothing here needs a sync.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import mmap
import os
import shutil
import signal
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONTROL = struct.Struct("<d?7x")


@dataclass(frozen=True)
class Control:
    """The test's end of a process's `control`."""

    folder: Path

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "control").write_bytes(bytes(_CONTROL.size))

    def set_clock(self, ahead_s: float) -> None:
        self._write(struct.pack("<d", ahead_s), 0)

    def die_at_next_sync(self, *, shall: bool = True) -> None:
        self._write(struct.pack("<?", shall), 8)

    def _write(self, content: bytes, at: int) -> None:
        with (self.folder / "control").open("r+b") as file:
            file.seek(at)
            file.write(content)


def main() -> None:
    notes = Path(sys.argv.pop(1))
    with (notes / "control").open("rb") as file:
        control = mmap.mmap(file.fileno(), _CONTROL.size, access=mmap.ACCESS_READ)
    _bend_clock(control)
    if "coordinator" in sys.argv:
        _note_syncs(notes, control)
        _keep_journals(notes / "journal")
    else:
        _note_answers(notes)
    from edgefl.cli.main import main as edgefl  # noqa: PLC0415 not before the clock is bent

    edgefl()


def _bend_clock(control: mmap.mmap) -> None:
    real_time, real_time_ns = time.time, time.time_ns

    def ahead_s() -> float:
        return float(_CONTROL.unpack(control[:])[0])

    class Bent(dt.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().fromtimestamp(time.time(), tz)

    time.time = lambda: real_time() + ahead_s()
    time.time_ns = lambda: real_time_ns() + int(ahead_s() * 1e9)
    dt.datetime = Bent  # type: ignore[misc]


def _note_syncs(notes: Path, control: mmap.mmap) -> None:
    """Notes what is durable before the process learns it: what was not noted, nobody has relied on."""
    log = os.open(notes / "syncs", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def noting(sync: Any) -> Any:
        def noted(handle: int) -> None:
            path = Path(f"/proc/self/fd/{handle}").readlink()
            if path.suffix != ".wal":
                sync(handle)
                return
            if _CONTROL.unpack(control[:])[1]:
                os.kill(os.getpid(), signal.SIGKILL)
            size = os.fstat(handle).st_size
            sync(handle)
            os.write(log, f"{size} {path}\n".encode())

        return noted

    os.fdatasync, os.fsync = noting(os.fdatasync), noting(os.fsync)


def _keep_journals(kept: Path) -> None:
    from edgefl.storage.journal import wal_journal  # noqa: PLC0415 see `main`

    prune = wal_journal.WalJournal.prune

    def pruned(self: Any, through: int) -> None:
        folder = kept / self._directory.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        for path in wal_journal.list_journal_files(self._directory):
            shutil.copyfile(path, folder / path.name)
        prune(self, through)

    wal_journal.WalJournal.prune = pruned  # type: ignore[method-assign]


def _note_answers(notes: Path) -> None:
    from edgefl.device.flower import supernode  # noqa: PLC0415 see `main`

    log = os.open(notes / "answers", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    push = supernode.SuperNode.push

    def noted(self: Any, reply: Any) -> None:
        header, body = json.loads(reply.header), reply.body
        if not body:  # a failure, scores, or a word at the door
            push(self, reply)
            return
        answer = {
            "run": header["run"],
            "assignment": header["assignment"].rpartition("/")[2],
            "sha256": hashlib.sha256(body).hexdigest(),
        }

        def note(what: str) -> None:
            os.write(log, (json.dumps({"what": what, **answer}) + "\n").encode())

        note("sending")
        try:
            push(self, reply)
        except supernode.ReplyRejectedError:
            note("refused")
            raise
        note("taken")

    supernode.SuperNode.push = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
