"""The hosts file: devices to join over ssh, one a line.

    # [user@]host[:port]      its options
    pi@192.168.1.21           name=shelf-1  digits=/home/pi/digits.npz
    pi@shelf-2.local:2222     name=shelf-2  digits=/srv/data/digits  role=evaluator

A word TASK=PATH is a path of data on the device; `name` and `role` are no tasks. Words with blanks are quoted as in a
shell, and a # begins a comment. Any line that cannot be parsed is an error.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgefl.core.errors import ConfigError, EdgeflError
from edgefl.core.protocol import validate_slug
from edgefl.device.enrolment.join_file import ROLES
from edgefl.provision.drop_ins import render_shard_drop_ins

# Nothing with a meaning as an option of ssh or to a shell.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?"
    r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?\Z"
)
_TASK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*\Z")


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
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
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
