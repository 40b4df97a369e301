"""Files that are there whole or not at all, on a real disk and with a process that is killed."""

import signal
import subprocess
import sys

from edgefl.system.atomic_files import open_atomic, remove_temporary_files

WRITER = """
import sys, time
from pathlib import Path
from edgefl.system.atomic_files import open_atomic
with open_atomic(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(tmp_path):
    (tmp_path / "runs").mkdir()
    for name in ("notes.tmp", ".hidden.tmp", "runs/.a.short.tmp"):
        (tmp_path / name).write_text("not ours")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "runs" / "model.npz")], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "writing\n"
        writer.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.rglob(".model.npz.*.tmp"))) == 1
    with open_atomic(tmp_path / "runs" / "model.npz") as file:
        file.write(b"whole")
        remove_temporary_files(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        ".a.short.tmp", ".hidden.tmp", "model.npz", "notes.tmp",
    ]  # fmt: skip
    assert (tmp_path / "runs" / "model.npz").read_bytes() == b"whole"
