"""The run's end of a ServerApp's process: starts it confined, takes its requests, and collects what it wrote."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import subprocess
import tempfile
import threading
import weakref
import zipfile
from pathlib import Path
from typing import IO

from edgefl.core.errors import RunFailedError, StoreError
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Json
from edgefl.system.atomic_files import write_atomic
from edgefl.system.confinement import Confinement, find_gaps, make_command, make_environment
from edgefl.system.process_messages import MessageSizeError, read_message, write_message
from edgefl.system.processes import exit_with_parent

log = logging.getLogger(__name__)

MODULE = "edgefl.flower.server_process"
LOG_NAME = "server-app.log"
"""What the app printed and logged, in its result."""
MAX_TEXT_CHARS = 300
MAX_LAST_BYTES = 4096
"""Of the log, in which its last line is looked for."""
MAX_KEPT_BYTES = 1024 * 1024
"""Of the log of an app that failed: its end."""
MAX_RESULT_FILES = 10_000
_ZIP_DATE = (2024, 1, 1, 0, 0, 0)

Request = tuple[Json, bytes]
_Requests = queue.Queue[Request | str | None]
"""With the reason as a text where the process sent what cannot be read, and None at its end."""


class ServerLink:
    """A ServerApp's process, which is started with the first request; used by one thread.

    Args:
        setup: `root`, `server`, `run_config`, `run_id` and `seed`.
        secret: folder of the coordinator, which stays closed to the process.
        deadline_s: how long it may compute between two requests.
        max_body_bytes: of a message.
        kept_log: where the log of an app that failed is kept; None for nowhere.
    """

    def __init__(
        self, setup: Json, *, secret: Path, deadline_s: float, max_body_bytes: int, kept_log: Path | None = None
    ) -> None:
        self._setup, self._secret, self._kept_log = setup, secret, kept_log
        self._deadline_s, self._max_body_bytes = deadline_s, max_body_bytes
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: _Requests = queue.Queue(1)  # a process that asks on and on waits
        self._reader: threading.Thread | None = None
        self._held: Request | None = None
        self._is_late = False

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def get_request(self) -> Request:
        """Returns the request that is not answered yet, waiting for it; the same until it is answered.

        Raises:
            RunFailedError: the process ended, said nothing for too long, or nothing that makes sense.
        """
        if self._process is None:
            self._process = self._start()
        if self._held is None:
            try:
                found = self._requests.get(timeout=self._deadline_s)
            except queue.Empty:
                raise self.fail(
                    f"the ServerApp computed for more than {self._deadline_s:g} s between two messages: raise "
                    "job.deadline_s"
                ) from None
            if not isinstance(found, tuple):
                late = f"the ServerApp's process did not read its answers for {self._deadline_s:g} s"
                ended = f"the ServerApp's process ended{self._read_last_line()}"
                reason = late if self._is_late else found or ended
                raise self.fail(reason)
            self._held = found
        return self._held

    def answer(self, header: Json, body: bytes = b"", *, is_last: bool = True) -> None:
        """Sends an answer to the request; more follow unless it is the last.

        A process that does not read it within the deadline is ended, which the next request says.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        if is_last:
            self._held = None
        timer = threading.Timer(self._deadline_s, self._end_late)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # its end; the next request says so
                write_message(self._process.stdin, header, body)
        finally:
            timer.cancel()

    def collect(self, max_bytes: int) -> bytes:
        """Ends the process, and returns the files in its folder as a ZIP archive.

        Raises:
            RunFailedError: they are larger than `max_bytes`, or too many.
        """
        self._kill()
        assert self._folder is not None
        root, archive, total, num_files = Path(self._folder.name), io.BytesIO(), 0, 0
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
            for path in sorted(root.rglob("*")):
                place = path.relative_to(root)
                if path.is_symlink() or not path.is_file() or any(part.startswith(".") for part in place.parts):
                    continue
                num_files += 1
                if num_files > MAX_RESULT_FILES:
                    raise RunFailedError(f"the ServerApp wrote more than {MAX_RESULT_FILES} files: write fewer")
                total += path.stat().st_size
                if total > max_bytes:
                    raise RunFailedError(
                        f"the ServerApp wrote more than {max_bytes} bytes of files: raise job.max_result_bytes"
                    )
                info = zipfile.ZipInfo(place.as_posix(), _ZIP_DATE)
                bundle.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
        return archive.getvalue()

    def fail(self, reason: str) -> RunFailedError:
        """Ends the process, and returns the error of its run, which names where the end of its log is kept."""
        self._kill()
        place = self._keep_log()
        self.close()
        return RunFailedError(f"{reason}; the app's log is {place}" if place else reason)

    def close(self) -> None:
        """Ends the process, whatever it does, and removes its files."""
        self._kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _kill(self) -> None:
        if self._process is not None:
            _end(self._process)
        while self._reader is not None and self._reader.is_alive():  # it may have a request that nobody takes
            with contextlib.suppress(queue.Empty):
                self._requests.get(timeout=0.05)

    def _end_late(self) -> None:
        assert self._process is not None
        self._is_late = True
        self._process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder = tempfile.TemporaryDirectory(prefix="edgefl-app-", ignore_cleanup_errors=True)
        folder = self._folder.name
        confinement = Confinement(secret=str(self._secret), readable=(str(self._setup["root"]),), writable=(folder,))
        for gap in find_gaps():
            log.warning("the ServerApp's process is not confined completely: %s", gap)
        with (Path(folder) / LOG_NAME).open("wb") as output:
            process = subprocess.Popen(
                make_command(MODULE, confinement),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**make_environment(confinement), "PYTHONHASHSEED": "0"},
                cwd=folder,
                start_new_session=True,
                preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
            )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        arguments = process.stdout, self._requests, self._max_body_bytes
        self._reader = threading.Thread(target=_receive, args=arguments, name="server-app", daemon=True)
        self._reader.start()
        with contextlib.suppress(OSError):  # likewise
            write_message(process.stdin, self._setup)
        return process

    def _keep_log(self) -> Path | None:
        """Returns where the end of the log is kept; None where it cannot be."""
        if self._folder is None or self._kept_log is None or not self._kept_log.parent.is_dir():
            return None
        try:
            write_atomic(self._kept_log, self._read_end(MAX_KEPT_BYTES))
        except StoreError as error:
            log.warning("the log of the ServerApp is lost: %s", error)
            return None
        return self._kept_log

    def _read_end(self, max_bytes: int) -> bytes:
        """Returns the end of its log; nothing where there is none."""
        assert self._folder is not None
        path = Path(self._folder.name) / LOG_NAME
        try:
            # The app may have put something else there: a link to a file of ours is not followed.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as log_file:
                log_file.seek(max(0, log_file.seek(0, os.SEEK_END) - max_bytes))
                return log_file.read(max_bytes)
        except OSError:
            return b""

    def _read_last_line(self) -> str:
        """Returns the last line of its log, for a message."""
        lines = self._read_end(MAX_LAST_BYTES).decode(errors="replace").strip().splitlines()
        return f": {escape_text(lines[-1][:MAX_TEXT_CHARS])}" if lines else ""


def _receive(source: IO[bytes], received: _Requests, max_body_bytes: int) -> None:
    """Queues a process's requests, then None at its end, or the reason where it makes no sense."""
    end: str | None = None
    try:
        with source:
            while (message := read_message(source, max_body_bytes)) is not None:
                received.put(message)
    except MessageSizeError as error:
        end = make_size_reason(error.num_bytes, max_body_bytes)
    except (OSError, ValueError) as error:
        end = f"the ServerApp's process sent {escape_text(str(error)[:MAX_TEXT_CHARS])}"
    received.put(end)


def make_size_reason(num_bytes: int, max_bytes: int) -> str:
    """Returns why a run fails whose ServerApp sends a message that is too long."""
    return (
        f"the ServerApp sends a message of {num_bytes} bytes, at most {max_bytes} are taken: raise job.max_part_bytes"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # what it did not read
        process.stdin.close()
