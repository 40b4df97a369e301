"""Child processes of the updater: with a bare environment, and without its privileges where they need none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_CHARS = 400
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a child ended; one that took too long has the code -1."""

    returncode: int
    stdout: str
    stderr: str

    def last_line(self) -> str:
        """Returns the line that says most: pip's errors and Python's exceptions end with it."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        return errors[-1][:MAX_LINE_CHARS] if errors else f"it ended with code {self.returncode} and said nothing"


@dataclass(frozen=True, slots=True)
class Children:
    """Starts children; `owner` is the device's state directory, whose user runs what needs no privilege."""

    owner: Path

    def as_root(self, command: Sequence[str], *, within_s: float) -> Done:
        """Runs a command with the privileges of the updater."""
        return _run(command, within_s, {})

    def as_device(self, command: Sequence[str], *, within_s: float) -> Done:
        """Runs a command as the device's own user."""
        return _run(command, within_s, self._identity())

    def _identity(self) -> Mapping[str, object]:
        found = self.owner.stat()
        if os.geteuid() != 0 or found.st_uid == 0:
            return {}
        return {"user": found.st_uid, "group": found.st_gid, "extra_groups": []}


def _run(command: Sequence[str], within_s: float, identity: Mapping[str, object]) -> Done:
    # Nothing of the updater's own environment may change what Python or pip do.
    environment = {"PATH": _PATH, "LANG": "C.UTF-8", "PIP_CONFIG_FILE": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            env=environment,
            cwd="/",
            check=False,
            **identity,
        )
    except subprocess.TimeoutExpired:
        return Done(returncode=-1, stdout="", stderr=f"{command[0]} took longer than {within_s:g} s")
    except OSError as error:
        return Done(returncode=-1, stdout="", stderr=f"{command[0]} cannot be started: {error.strerror or error}")
    return Done(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)
