"""One host over the system's OpenSSH: a shared connection, commands, and a folder sent as a tar.

Host keys are checked as by the user's own ssh, and there is no password prompt: commands that need one fail at once.
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

from edgefl.core.errors import NetworkError, NotFoundError
from edgefl.provision.hosts_file import SshHost

CONNECT_TIMEOUT_S = 30
COMMAND_TIMEOUT_S = 3600.0
SSH_ERROR_STATUS = 255
"""ssh's own exit status; none of edgefl's commands ends with it."""
_VALUE_PREFIX = "edgefl: "
_HINTS = {
    "host key verification failed": "look at its key and accept it once by hand: ssh {target}",
    "remote host identification has changed": "the board was written anew, or is another one: ssh-keygen -R {host}",
    "permission denied": "let this user in without a password: ssh-copy-id {target}",
    "could not resolve": "no such host is known; look at its name in the hosts file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a remote command; `values` are its output lines "edgefl: NAME VALUE"."""

    status: int
    output: str
    errors: str

    @property
    def values(self) -> dict[str, list[str]]:
        values: dict[str, list[str]] = {}
        for line in self.output.splitlines():
            if line.startswith(_VALUE_PREFIX):
                name, _, value = line.removeprefix(_VALUE_PREFIX).partition(" ")
                values.setdefault(name, []).append(value.strip())
        return values

    def get_last_line(self) -> str:
        """Returns the last line of its error output."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status}"


@dataclass(slots=True)
class SshConnection:
    """Connection to a host; a context manager.

    Args:
        host: the host.
        options: more words for ssh, such as `-F FILE`.
    """

    host: SshHost
    options: Sequence[str] = ()
    _exit_stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _control_path: str = ""

    def __enter__(self) -> Self:
        """Connects.

        Raises:
            NetworkError: it cannot be reached, its host key changed, or it rejects this user.
            NotFoundError: there is no ssh on this machine.
        """
        # A socket's path has room for about a hundred characters only.
        folder = self._exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="edgefl-ssh-"))
        self._control_path = f"{folder}/%C"
        try:
            self._connect()
        except BaseException:
            self._exit_stack.close()
            raise
        self._exit_stack.callback(self._close_connection)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def run(self, *words: str, stdin: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
        """Returns the result of a command; `stdin` is its standard input.

        Raises:
            NetworkError: the connection was lost, or it took too long.
        """
        command = [*self._make_ssh_command(), "--", self.host.host, shlex.join(words)]
        try:
            process = subprocess.run(command, input=stdin, capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise NetworkError(f"{words[0]} has not ended after {timeout_s:.0f} s; look at the board") from None
        return self._make_result(process.returncode, process.stdout, process.stderr)

    def send_files(
        self, files: Mapping[str, bytes | Path], *words: str, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> CommandResult:
        """Returns the result of a command that reads a tar of these files, each of mode 0600."""
        command = [*self._make_ssh_command(), "--", self.host.host, shlex.join(words)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            timer = threading.Timer(timeout_s, process.kill)
            timer.start()
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # the reason is in its error output, read below
                    write_tar(process.stdin, files)
                output, errors = process.communicate()
            finally:
                timer.cancel()
        return self._make_result(process.returncode, output, errors)

    def _make_ssh_command(self) -> list[str]:
        user = ["-l", self.host.user] if self.host.user else []
        port = ["-p", str(self.host.port)] if self.host.port else []
        shared = ["-o", "BatchMode=yes", "-o", f"ControlPath={self._control_path}"]
        return ["ssh", *self.options, *user, *port, *shared]

    def _connect(self) -> None:
        keepalive_options = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8"]
        timeout_options = [
            "-o",
            f"ConnectTimeout={CONNECT_TIMEOUT_S}",
            "-o",
            "ControlMaster=yes",
            "-o",
            "ControlPersist=yes",
        ]
        command = [*self._make_ssh_command(), *keepalive_options, *timeout_options, "-fN", "--", self.host.host]
        # The connection that stays in the background keeps standard error open: a pipe would never end.
        with tempfile.TemporaryFile() as error_file:
            try:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=error_file,
                    timeout=2 * CONNECT_TIMEOUT_S,
                    check=False,
                ).returncode
            except FileNotFoundError:
                raise NotFoundError("there is no ssh on this machine: apt-get install openssh-client") from None
            except subprocess.TimeoutExpired:
                raise NetworkError("it does not answer; see that the board is on and its network works") from None
            error_file.seek(0)
            errors = error_file.read().decode(errors="replace")
        if status:
            raise NetworkError(_format_failure(self.host, errors))

    def _make_result(self, status: int, output: bytes, errors: bytes) -> CommandResult:
        result = CommandResult(
            status=status, output=output.decode(errors="replace"), errors=errors.decode(errors="replace")
        )
        if status == SSH_ERROR_STATUS or status < 0:
            raise NetworkError(f"the connection was lost ({result.get_last_line()}); try again")
        return result

    def _close_connection(self) -> None:
        command = [*self._make_ssh_command(), "-O", "exit", "--", self.host.host]
        subprocess.run(command, capture_output=True, timeout=CONNECT_TIMEOUT_S, check=False)


def write_tar(out: IO[bytes], files: Mapping[str, bytes | Path]) -> None:
    """Writes files into a tar stream; root owns them, and only root reads them."""
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


def _format_failure(host: SshHost, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last_line = (lines[-1] if lines else "ssh says nothing").rstrip(".")
    target = f"-p {host.port} {host.target}" if host.port else host.target
    for words, advice in _HINTS.items():
        if words in errors.lower():
            return f"{last_line}: {advice.format(target=target, host=host.host)}"
    return f"{last_line}: see that the board is on and reached by this name: ssh {target}"
