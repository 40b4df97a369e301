"""The run's end of a ServerApp's process: starts it confined, takes its requests, and collects what it wrote."""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import subprocess
import tempfile
import threading
import weakref
import zipfile
from pathlib import Path
from typing import IO

from edgefl.core.errors import RunFailedError
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Json
from edgefl.system.confinement import Confinement, find_gaps, make_command, make_environment
from edgefl.system.process_messages import MessageSizeError, read_message, write_message
from edgefl.system.processes import exit_with_parent

log = logging.getLogger(__name__)

MODULE = "edgefl.flower.server_process"
LOG_NAME = "server-app.log"
"""What the app printed and logged, in its result."""
MAX_TEXT_CHARS = 300
_ZIP_DATE = (2024, 1, 1, 0, 0, 0)

Request = tuple[Json, bytes]
_Requests = queue.SimpleQueue[Request | str | None]
"""With the reason as a text where the process sent what cannot be read, and None at its end."""


class ServerLink:
    """A ServerApp's process, which is started with the first request; used by one thread.

    Args:
        setup: `root`, `server`, `run_config`, `run_id` and `seed`.
        secret: folder of the coordinator, which stays closed to the process.
        deadline_s: how long it may compute between two requests.
        max_body_bytes: of a message.
    """

    def __init__(self, setup: Json, *, secret: Path, deadline_s: float, max_body_bytes: int) -> None:
        self._setup, self._secret = setup, secret
        self._deadline_s, self._max_body_bytes = deadline_s, max_body_bytes
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: _Requests = queue.SimpleQueue()
        self._held: Request | None = None

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
                self.close()
                raise RunFailedError(
                    f"the ServerApp computed for more than {self._deadline_s:g} s between two messages: raise "
                    "job.deadline_s"
                ) from None
            if not isinstance(found, tuple):
                reason = found or f"the ServerApp's process ended{self._read_last_line()}"
                self.close()
                raise RunFailedError(reason)
            self._held = found
        return self._held

    def answer(self, header: Json, body: bytes = b"", *, is_last: bool = True) -> None:
        """Sends an answer to the request; more follow unless it is the last."""
        assert self._process is not None
        assert self._process.stdin is not None
        if is_last:
            self._held = None
        with contextlib.suppress(OSError):  # its end; the next request says so
            write_message(self._process.stdin, header, body)

    def collect(self, max_bytes: int) -> bytes:
        """Ends the process, and returns the files in its folder as a ZIP archive.

        Raises:
            RunFailedError: they are larger than `max_bytes`.
        """
        self._kill()
        assert self._folder is not None
        root, archive, total = Path(self._folder.name), io.BytesIO(), 0
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
            for path in sorted(root.rglob("*")):
                place = path.relative_to(root)
                if path.is_symlink() or not path.is_file() or any(part.startswith(".") for part in place.parts):
                    continue
                total += path.stat().st_size
                if total > max_bytes:
                    raise RunFailedError(
                        f"the ServerApp wrote more than {max_bytes} bytes of files: raise job.max_result_bytes"
                    )
                bundle.writestr(zipfile.ZipInfo(place.as_posix(), _ZIP_DATE), path.read_bytes())
        return archive.getvalue()

    def close(self) -> None:
        """Ends the process, whatever it does, and removes its files."""
        self._kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _kill(self) -> None:
        if self._process is not None:
            _end(self._process)

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
        threading.Thread(target=_receive, args=arguments, name="server-app", daemon=True).start()
        with contextlib.suppress(OSError):  # likewise
            write_message(process.stdin, self._setup)
        return process

    def _read_last_line(self) -> str:
        """Returns the last line of its log, for a message."""
        assert self._folder is not None
        try:
            lines = (Path(self._folder.name) / LOG_NAME).read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
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
