"""The systemctl of a board without systemd: it runs what the installed units say, without their sandbox.

It knows the two units of a device, their conditions, the credential of the join, what comes after it, and their
restarts by hand; all that `edgefl provision ssh` asks of a board. Its state lies in /run/board.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

UNITS, RUN = Path("/etc/systemd/system"), Path("/run/board")
JOIN, DEVICE = "edgefl-join.service", "edgefl-device.service"


def command_of(unit: str) -> list[str]:
    line = re.search(r"^ExecStart=(.+)$", (UNITS / unit).read_text(), re.MULTILINE)
    assert line is not None
    words = line[1].replace("%S", "/var/lib").replace("${CREDENTIALS_DIRECTORY}", str(RUN / "credentials"))
    return words.split()


def is_active(unit: str) -> bool:
    try:
        pid = int((RUN / unit).read_text())
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, ValueError):
        return False


def start(unit: str) -> None:
    if not unit.endswith(".service"):
        return  # a path to watch: nothing of these tests writes there
    condition = re.search(r"^ConditionPathExists=(.+)$", (UNITS / unit).read_text(), re.MULTILINE)
    if is_active(unit) or (condition and not Path(condition[1].replace("%S", "/var/lib")).exists()):
        return
    log = (RUN / f"{unit}.log").open("ab")
    state = Path("/var/lib/edgefl")
    state.mkdir(mode=0o700, exist_ok=True)
    words = command_of(unit)
    if unit == JOIN:
        credentials = RUN / "credentials"
        credentials.mkdir(mode=0o700, exist_ok=True)
        (credentials / "join").write_bytes(Path("/etc/edgefl/join.json").read_bytes())
        words = [sys.executable, __file__, "--join", *words]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (RUN / unit).write_text(str(process.pid))


def join(words: list[str]) -> None:
    status = subprocess.run(words, check=False).returncode
    if Path("/var/lib/edgefl/device.json").exists():
        Path("/etc/edgefl/join.json").unlink(missing_ok=True)
        start(DEVICE)
    elif status:
        (RUN / f"{JOIN}.failed").touch()


def main(words: list[str]) -> int:
    RUN.mkdir(exist_ok=True)
    with (RUN / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    if words[0] == "--join":
        join(words[1:])
        return 0
    verb, *units = [word for word in words if not word.startswith("--")]
    for unit in units:
        if verb == "is-active":
            is_failed = (RUN / f"{unit}.failed").exists()
            sys.stdout.write("active\n" if is_active(unit) else "failed\n" if is_failed else "inactive\n")
            return 0 if is_active(unit) else 3
        if verb == "restart" and is_active(unit):
            os.kill(int((RUN / unit).read_text()), signal.SIGKILL)
            while is_active(unit):
                pass
        if verb in {"start", "restart"}:
            start(unit)
        if verb == "reset-failed":
            (RUN / f"{unit}.failed").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
