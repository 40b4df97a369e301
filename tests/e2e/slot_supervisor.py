"""Stands in for systemd on a board with slots: keeps the agent running, and starts the updater when it is asked to.

python slot_supervisor.py ROOT SIGNERS device start --state STATE    edgefl-device.service, edgefl-update.path
python slot_supervisor.py ROOT SIGNERS ...                           any other command of the slot in use
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

from edgefl.system.processes import exit_with_parent

RESTART_S = 0.3
LOOK_S = 0.2


class Supervisor:
    def __init__(self, root: str, signers: str, state: Path) -> None:
        self.program = [f"{root}/current/bin/python", "-I", "-m", "edgefl"]
        self.start = [*self.program, "device", "start", "--state", str(state), "--signers", signers]
        times = ["--health-s", "40", "--settle-s", "2"]
        places = ["--root", root, "--state", str(state), "--signers", signers]
        restart = ["kill", "-HUP", str(os.getpid())]
        self.update = [*self.program, "-v", "device", "apply-update", *places, *times, "--", *restart]
        self.request = state / "updates" / "request.json"
        self.stopping = threading.Event()
        self.agent: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.heard)
        threading.Thread(target=self.watch, daemon=True).start()
        while not self.stopping.is_set():
            self.agent = subprocess.Popen(self.start, preexec_fn=exit_with_parent)  # noqa: PLW1509 no locks
            self.agent.wait()
            self.stopping.wait(RESTART_S)

    def heard(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.stopping.set()
        if self.agent is not None:
            self.agent.terminate()

    def watch(self) -> None:
        """As a `.path` unit: one run of the updater for every change of the request, and one at the start."""
        seen: object = "nothing yet"
        while not self.stopping.wait(LOOK_S):
            now = self.request.stat().st_ino if self.request.exists() else None
            if now != seen:
                seen = now
                subprocess.run(self.update, check=False, preexec_fn=exit_with_parent)


if __name__ == "__main__":
    own, trusted, *arguments = sys.argv[1:]
    if arguments[:2] == ["device", "start"]:
        Supervisor(own, trusted, Path(arguments[arguments.index("--state") + 1])).run()
    else:
        python = f"{own}/current/bin/python"
        os.execv(python, [python, "-I", "-m", "edgefl", *arguments])
