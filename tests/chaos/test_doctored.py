"""What is noted of a process is what it did, and what is done to it is what it feels."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos import doctored
from chaos.doctored import Control

from edgefl.storage.journal.wal_journal import WalJournal

FOLDER = Path(doctored.__file__).parent
CLOCK = """
import datetime, time
print(time.time(), time.time_ns(), datetime.datetime.now(datetime.UTC).timestamp(), time.monotonic())
"""
JOURNAL = """
import sys
from pathlib import Path
from edgefl.storage.journal.wal_journal import WalJournal
journal = WalJournal(Path(sys.argv.pop(1)), lambda _: {})
journal.record_aggregation(1, ["a"])
journal.commit()
print("kept", flush=True)
journal.record_aggregation(2, ["b"])
if len(sys.argv) > 1:
    print("waits", flush=True)
    sys.stdin.readline()
journal.commit()
print("kept", flush=True)
journal.prune(2)
"""
_PROLOGUE = """
import mmap, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from chaos import doctored
notes = Path(sys.argv.pop(1))
with (notes / "control").open("rb") as file:
    control = mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_READ)
doctored._bend_clock(control)
doctored._note_syncs(notes, control)
doctored._keep_journals(notes / "journal")
"""


@pytest.fixture
def control(tmp_path: Path) -> Control:
    made = Control(tmp_path / "notes")
    made.prepare()
    return made


def start(control: Control, program: str, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _PROLOGUE + program, str(FOLDER.parent), str(control.folder), *arguments]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ahead_s", [0.0, 86_400.0, -3_600.0])
def test_a_process_sees_the_time_that_it_is_told(control: Control, ahead_s: float) -> None:
    control.set_clock(ahead_s)
    before_s, monotonic_s = time.time(), time.monotonic()
    told, _ = start(control, CLOCK).communicate(timeout=60)
    seconds, nanoseconds, now, monotonic = map(float, told.split())
    for shown in (seconds, nanoseconds / 1e9, now):
        assert before_s + ahead_s <= shown <= time.time() + ahead_s
    assert monotonic_s <= monotonic <= time.monotonic()


def test_what_is_synced_is_noted_and_journals_that_go_are_kept(control: Control, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "journal"
    told, _ = start(control, JOURNAL, str(folder)).communicate(timeout=60)
    assert told.split() == ["kept", "kept"]
    (file,) = folder.glob("*.wal")
    size, path = (control.folder / "syncs").read_text().splitlines()[-1].split()
    assert (int(size), path) == (file.stat().st_size, str(file))
    assert (control.folder / "journal" / "run" / file.name).read_bytes() == file.read_bytes()


def test_a_process_that_is_to_die_does_so_before_what_it_wrote_is_synced(control: Control, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "journal"
    with start(control, JOURNAL, str(folder), "wait") as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(2)] == ["kept", "waits"]
        control.die_at_next_sync()
        told, _ = process.communicate("go\n", timeout=60)
    assert (told, process.returncode) == ("", -signal.SIGKILL)
    (file,) = folder.glob("*.wal")
    durable = int((control.folder / "syncs").read_text().splitlines()[-1].split()[0])
    assert durable < file.stat().st_size
    with WalJournal(folder, lambda _: {}) as journal:
        assert journal.last_record == 2
