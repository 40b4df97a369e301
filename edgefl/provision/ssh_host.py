"""Running hosts: the hosts file, and one host over the system's OpenSSH.

A hosts file names devices to join over ssh, one a line:

    # [user@]host[:port]      its options
    pi@192.168.1.21           name=shelf-1  digits=/home/pi/digits.npz
    pi@shelf-2.local:2222     name=shelf-2  digits=/srv/data/digits  role=evaluator

A word TASK=PATH is a path of data on the device; `name` and `role` are no tasks. Words with blanks are quoted as in a
shell, and a # begins a comment. Any line that cannot be parsed is an error. Two other formats are read as well, which
name no data: Parallel-SGD's worker.json, `[[0, "UUID", "192.168.1.1"], …]`, whose devices are called worker-0 and so
on, and ECL-ISVR's hosts.json, `{"hosts": [{"name": "a", "addr": "192.168.1.1", "port": 5000}, …]}`, whose ports are
not ssh's.

Host keys are checked as by the user's own ssh, and there is no password prompt: commands that need one fail at once.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from edgefl.core.errors import ConfigError, EdgeflError, NetworkError, NotFoundError
from edgefl.core.protocol import validate_slug
from edgefl.core.safe_parsing import parse_json
from edgefl.device.enrolment.join_file import ROLES
from edgefl.provision.payload import render_shard_drop_ins, write_tar

# Nothing with a meaning as an option of ssh or to a shell.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?"
    r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?\Z"
)
_TASK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*\Z")
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
class SshHost:
    """A running device reached by ssh; `shards` maps a task to a path on it."""

    host: str
    name: str
    user: str | None = None
    port: int | None = None
    role: str = "trainer"
    shards: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The host in ssh's notation."""
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def label(self) -> str:
        """The host in messages."""
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port else "")


def parse_hosts(text: str) -> list[SshHost]:
    """Returns the hosts of a hosts file, in its order.

    Raises:
        ConfigError: a line cannot be parsed, there is none, or a host or name comes twice.
    """
    lines = _list_json_lines(text) if text.lstrip().startswith(("[", "{")) else text.splitlines()
    hosts = []
    for number, line in enumerate(lines, 1):
        try:
            if words := shlex.split(line, comments=True):
                hosts.append(_parse_host(words))
        except (ValueError, EdgeflError) as error:
            raise ConfigError(f"line {number} of the hosts file: {error}") from None
    if not hosts:
        raise ConfigError("the hosts file names no board; a line is: pi@192.168.1.21 name=shelf-1 digits=/srv/digits")
    for kind, values in (("host", [host.label for host in hosts]), ("name", [host.name for host in hosts])):
        value, count = Counter(values).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"the {kind} {value} stands {count} times in the hosts file; each board has one line")
    return hosts


def _list_json_lines(text: str) -> list[str]:
    """Returns the lines of a hosts file that say what a worker.json or hosts.json does."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"the hosts file begins as JSON does, but is none: {error}") from None
    rows = content.get("hosts") if isinstance(content, Mapping) else content
    lines = []
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [int(number), str(), str(address)] if number >= 0 and not isinstance(number, bool):
                lines.append(shlex.join([address, f"name=worker-{number}"]))
            case {"name": str(name), "addr": str(address)}:
                lines.append(shlex.join([address, f"name={name}"]))
            case _:
                rows = None
    if rows is None or not isinstance(rows, list):
        raise ConfigError(
            'a hosts file in JSON is [[0, "UUID", "ADDRESS"], …] or {"hosts": [{"name": …, "addr": …}, …]}; '
            "what names no addresses, such as node_list.json, is for a graph"
        )
    return lines


def _parse_host(words: list[str]) -> SshHost:
    match = _HOST.match(words[0])
    if match is None or not 0 < int(match["port"] or 22) < 65536:
        raise ConfigError(f"a line begins with [user@]host[:port], got {words[0]!r}")
    options: dict[str, str] = {}
    for word in words[1:]:
        key, separator, value = word.partition("=")
        if not (separator and value and _TASK.match(key)):
            raise ConfigError(f"expected name=NAME, role=ROLE or TASK=PATH, got {word!r}")
        if key in options:
            raise ConfigError(f"{key} stands there twice")
        options[key] = value
    role = options.pop("role", "trainer")
    if role not in ROLES:
        raise ConfigError(f"the role must be one of {', '.join(ROLES)}, got {role!r}")
    if "name" not in options:
        raise ConfigError(f"{words[0]} has no name; add name=NAME, which it is called in the fleet")
    name = validate_slug(options.pop("name"))
    render_shard_drop_ins(options)
    return SshHost(
        host=match["host"].strip("[]"),
        name=name,
        user=match["user"],
        port=int(match["port"]) if match["port"] else None,
        role=role,
        shards=options,
    )


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
        except BaseException:  # an interrupt too: ssh is ended
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


def _format_failure(host: SshHost, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last_line = (lines[-1] if lines else "ssh says nothing").rstrip(".")
    target = f"-p {host.port} {host.target}" if host.port else host.target
    for words, advice in _HINTS.items():
        if words in errors.lower():
            return f"{last_line}: {advice.format(target=target, host=host.host)}"
    return f"{last_line}: see that the board is on and reached by this name: ssh {target}"
