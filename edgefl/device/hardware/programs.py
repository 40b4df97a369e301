"""Runner for vendor programs (`vcgencmd`, `tegrastats`) with strict time limits."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO

from edgefl.system.process_control import exit_with_parent

MAX_OUTPUT_BYTES = 256 * 1024
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
"""Searched after PATH: units and logins of boards often lack the folders of the system's programs."""

RunProgram = Callable[[Sequence[str], float], str | None]
"""(arguments, seconds) -> the program's output; None where it is missing, failed or printed nothing in time."""


def run_program(arguments: Sequence[str], timeout_s: float) -> str | None:
    """Returns a program's output within the time limit, even if it never ends.

    One that ends by itself must succeed. It runs without shell and input, and its children end with it.
    """
    path = shutil.which(arguments[0]) or shutil.which(arguments[0], path=SYSTEM_PATH)
    if path is None:
        return None
    try:
        process = subprocess.Popen(
            [path, *arguments[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, ValueError):
        return None
    with process:
        assert process.stdout is not None
        try:
            raw, has_ended = _read_until(process.stdout, time.monotonic() + timeout_s)
            if has_ended and _wait_for_exit_code(process) != 0:
                return None
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    return raw.decode(errors="replace").strip() or None


def no_program(_arguments: Sequence[str], _timeout_s: float) -> str | None:
    """Runs nothing; for callers that only read files."""
    return None


def _wait_for_exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Returns the exit code of a program that has closed its output; None when it lingers."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


def _read_until(stream: IO[bytes], deadline_s: float) -> tuple[bytes, bool]:
    """Returns the output in time, and whether the program closed it by then."""
    raw = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while len(raw) < MAX_OUTPUT_BYTES and (remaining_s := deadline_s - time.monotonic()) > 0:
            if not selector.select(remaining_s):
                break
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                return raw, True
            raw += chunk
    return raw, False
