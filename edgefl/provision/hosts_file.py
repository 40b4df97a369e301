"""The hosts file: which boards are joined over ssh, one a line.

    # [user@]host[:port]      what it is to be
    pi@192.168.1.21           name=shelf-1  digits=/home/pi/digits.npz
    pi@shelf-2.local:2222     name=shelf-2  digits=/srv/data/digits  role=evaluator

A word TASK=PATH says where data lies on the board; `name` and `role` are no tasks. Words with blanks are quoted as in
a shell, and a # begins a comment. Whatever is not understood is an error with its line.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgefl.device.joining.join_file import ROLES
from edgefl.errors import ConfigError, EdgeflError
from edgefl.protocol import checked_slug
from edgefl.provision.drop_ins import shard_drop_ins

# Nothing that ssh could take for an option, and nothing that a shell could take for anything.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?"
    r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?\Z"
)
_TASK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardHost:
    """A board that runs and is reached by ssh; `shards` maps a task to a path on it."""

    host: str
    name: str
    user: str | None = None
    port: int | None = None
    role: str = "trainer"
    shards: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """How ssh is told whom to reach."""
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def label(self) -> str:
        """How people are told which board it is."""
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port else "")


def parse_hosts(text: str) -> list[BoardHost]:
    """Returns the boards of a hosts file, in its order.

    Raises:
        ConfigError: a line is not understood, there is none, or a host or name comes twice.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if words := shlex.split(line, comments=True):
                hosts.append(_host(words))
        except (ValueError, EdgeflError) as error:
            raise ConfigError(f"line {number} of the hosts file: {error}") from None
    if not hosts:
        raise ConfigError("the hosts file names no board; a line is: pi@192.168.1.21 name=shelf-1 digits=/srv/digits")
    for what, values in (("host", [host.label for host in hosts]), ("name", [host.name for host in hosts])):
        value, count = Counter(values).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"the {what} {value} stands {count} times in the hosts file; each board has one line")
    return hosts


def _host(words: list[str]) -> BoardHost:
    match = _HOST.match(words[0])
    if match is None or not 0 < int(match["port"] or 22) < 65536:
        raise ConfigError(f"a line begins with [user@]host[:port], got {words[0]!r}")
    given: dict[str, str] = {}
    for word in words[1:]:
        key, mark, value = word.partition("=")
        if not (mark and value and _TASK.match(key)):
            raise ConfigError(f"expected name=NAME, role=ROLE or TASK=PATH, got {word!r}")
        if key in given:
            raise ConfigError(f"{key} stands there twice")
        given[key] = value
    role = given.pop("role", "trainer")
    if role not in ROLES:
        raise ConfigError(f"the role must be one of {', '.join(ROLES)}, got {role!r}")
    if "name" not in given:
        raise ConfigError(f"{words[0]} has no name; add name=NAME, which it is called in the fleet")
    name = checked_slug(given.pop("name"))
    shard_drop_ins(given)
    return BoardHost(
        host=match["host"].strip("[]"),
        name=name,
        user=match["user"],
        port=int(match["port"]) if match["port"] else None,
        role=role,
        shards=given,
    )
