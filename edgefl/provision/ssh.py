"""One board over the system's OpenSSH: a connection that all steps share, commands, and a folder sent as a tar.

Host keys are checked as the user's own ssh does, and nothing ever asks for a password: what needs one fails at once.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from edgefl.errors import NetworkError, NotFoundError
from edgefl.provision.hosts_file import BoardHost

CONNECT_WITHIN_S = 30
LONGEST_S = 3600.0
SSH_FAILED = 255
"""ssh's own exit status; a command of ours does not end with it."""
_MARK = "edgefl: "
_HINTS = {
    "host key verification failed": "look at its key and accept it once by hand: ssh {target}",
    "remote host identification has changed": "the board was written anew, or is another one: ssh-keygen -R {host}",
    "permission denied": "let this user in without a password: ssh-copy-id {target}",
    "could not resolve": "no such host is known; look at its name in the hosts file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a command on a board said; `values` are its lines of the form "edgefl: NAME VALUE"."""

    status: int
    output: str
    errors: str

    @property
    def values(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in self.output.splitlines():
            if line.startswith(_MARK):
                name, _, value = line.removeprefix(_MARK).partition(" ")
                found.setdefault(name, []).append(value.strip())
        return found

    def last_line(self) -> str:
        """Returns the last thing that it complained of."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status}"


@dataclass(slots=True)
class Connection:
    """A board that can be spoken to; use it as a context manager.

    Args:
        host: which board.
        options: more words for ssh, such as `-F FILE`.
    """

    host: BoardHost
    options: Sequence[str] = ()
    _closers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _socket: str = ""

    def __enter__(self) -> Self:
        """Connects.

        Raises:
            NetworkError: it cannot be reached, is another one than it was, or lets this user not in.
            NotFoundError: there is no ssh on this machine.
        """
        # A socket's path has room for some hundred letters only.
        folder = self._closers.enter_context(tempfile.TemporaryDirectory(prefix="edgefl-ssh-"))
        self._socket = f"{folder}/%C"
        try:
            self._connect()
        except BaseException:
            self._closers.close()
            raise
        self._closers.callback(self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        self._closers.close()

    def run(self, *words: str, script: bytes = b"", within_s: float = LONGEST_S) -> Told:
        """Returns what a command says; `script` is its standard input.

        Raises:
            NetworkError: the connection was lost, or it took too long.
        """
        command = [*self._ssh(), "--", self.host.host, shlex.join(words)]
        try:
            done = subprocess.run(command, input=script, capture_output=True, timeout=within_s, check=False)
        except subprocess.TimeoutExpired:
            raise NetworkError(f"{words[0]} has not ended after {within_s:.0f} s; look at the board") from None
        return self._told(done.returncode, done.stdout, done.stderr)

    def send(self, files: Mapping[str, bytes | Path], *words: str, within_s: float = LONGEST_S) -> Told:
        """Returns what a command says whose standard input is a tar of these files, all for their owner alone."""
        command = [*self._ssh(), "--", self.host.host, shlex.join(words)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            timer = threading.Timer(within_s, process.kill)
            timer.start()
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it says below why it did not listen
                    write_tar(process.stdin, files)
                output, errors = process.communicate()
            finally:
                timer.cancel()
        return self._told(process.returncode, output, errors)

    def _ssh(self) -> list[str]:
        user = ["-l", self.host.user] if self.host.user else []
        port = ["-p", str(self.host.port)] if self.host.port else []
        shared = ["-o", "BatchMode=yes", "-o", f"ControlPath={self._socket}"]
        return ["ssh", *self.options, *user, *port, *shared]

    def _connect(self) -> None:
        alive = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8"]
        patience = ["-o", f"ConnectTimeout={CONNECT_WITHIN_S}", "-o", "ControlMaster=yes", "-o", "ControlPersist=yes"]
        command = [*self._ssh(), *alive, *patience, "-fN", "--", self.host.host]
        # The connection that stays in the background keeps standard error open: a pipe would never end.
        with tempfile.TemporaryFile() as said:
            try:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    timeout=2 * CONNECT_WITHIN_S,
                    check=False,
                ).returncode
            except FileNotFoundError:
                raise NotFoundError("there is no ssh on this machine: apt-get install openssh-client") from None
            except subprocess.TimeoutExpired:
                raise NetworkError("it does not answer; see that the board is on and its network works") from None
            said.seek(0)
            errors = said.read().decode(errors="replace")
        if status:
            raise NetworkError(_reason(self.host, errors))

    def _told(self, status: int, output: bytes, errors: bytes) -> Told:
        told = Told(status=status, output=output.decode(errors="replace"), errors=errors.decode(errors="replace"))
        if status == SSH_FAILED or status < 0:
            raise NetworkError(f"the connection was lost ({told.last_line()}); try again")
        return told

    def _hang_up(self) -> None:
        command = [*self._ssh(), "-O", "exit", "--", self.host.host]
        subprocess.run(command, capture_output=True, timeout=CONNECT_WITHIN_S, check=False)


def write_tar(out: IO[bytes], files: Mapping[str, bytes | Path]) -> None:
    """Writes files into a tar that is not kept anywhere; root owns them, and only he reads them."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.mode = 0o600
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                continue
            info.size = content.stat().st_size
            with content.open("rb") as source:
                tar.addfile(info, source)


def _reason(host: BoardHost, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    told = (lines[-1] if lines else "ssh says nothing").rstrip(".")
    target = f"-p {host.port} {host.target}" if host.port else host.target
    for words, hint in _HINTS.items():
        if words in errors.lower():
            return f"{told}: {hint.format(target=target, host=host.host)}"
    return f"{told}: see that the board is on and reached by this name: ssh {target}"
