"""Subprocesses of the updater: minimal environment, and dropped privileges where possible."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_CHARS = 400
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """Result of a command; one that timed out has the code -1."""

    returncode: int
    stdout: str
    stderr: str

    def get_error_line(self) -> str:
        """Returns the most informative line: the last error of pip, or the last line."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        return errors[-1][:MAX_LINE_CHARS] if errors else f"it ended with code {self.returncode} and said nothing"


@dataclass(frozen=True, slots=True)
class SubprocessRunner:
    """Runner of commands; unprivileged ones run as the owner of `state_dir`, the device's state directory."""

    state_dir: Path

    def run_as_root(self, command: Sequence[str], *, timeout_s: float) -> CompletedCommand:
        """Runs a command with the privileges of the updater."""
        return _run(command, timeout_s, {})

    def run_as_device(self, command: Sequence[str], *, timeout_s: float) -> CompletedCommand:
        """Runs a command as the device's own user."""
        return _run(command, timeout_s, self._get_device_identity())

    def _get_device_identity(self) -> Mapping[str, object]:
        status = self.state_dir.stat()
        if os.geteuid() != 0 or status.st_uid == 0:
            return {}
        return {"user": status.st_uid, "group": status.st_gid, "extra_groups": []}


def _run(command: Sequence[str], timeout_s: float, identity: Mapping[str, object]) -> CompletedCommand:
    # The updater's environment must not influence Python or pip.
    environment = {"PATH": _PATH, "LANG": "C.UTF-8", "PIP_CONFIG_FILE": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(  # type: ignore[call-overload]
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environment,
            cwd="/",
            check=False,
            **identity,
        )
    except subprocess.TimeoutExpired:
        return CompletedCommand(returncode=-1, stdout="", stderr=f"{command[0]} took longer than {timeout_s:g} s")
    except OSError as error:
        return CompletedCommand(
            returncode=-1, stdout="", stderr=f"{command[0]} cannot be started: {error.strerror or error}"
        )
    return CompletedCommand(returncode=process.returncode, stdout=process.stdout, stderr=process.stderr)
