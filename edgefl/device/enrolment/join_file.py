"""Join file of a board, and the check that its user can read the data that the file names.

The check is run by root before enrolment, with `python -m`. The unit sees an empty /home with only the shards'
folders mounted, so there only the folder's permissions count; elsewhere those of its parents count as well.
Read-only: the owner of the data decides on access.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import stat
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePosixPath
from typing import Self

from edgefl.core.errors import ConfigError
from edgefl.core.protocol import JoinToken, validate_address, validate_slug
from edgefl.core.safe_parsing import parse_json

VERSION = 1
ROLES = ("trainer", "evaluator")

MISSING = "there is nothing"
HIDDEN_PREFIXES = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 folders of a board, not ours
"""Paths that the sandbox of the units hides."""
MAX_FILES = 10_000
"""Maximum number of a shard's files to check: unreadable ones are hardly the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFile:
    """Enrolment data of a board; `shards` maps a task to a path, `addresses` are tried first.

    The token's text stays out of the repr. `name` None means the host's name.
    """

    token: str = field(repr=False)
    name: str | None = None
    role: str = "trainer"
    shards: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Returns the JSON of the file."""
        return json.dumps({"v": VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the checked content.

        Raises:
            ConfigError: it is no join file; the message never shows the token.
            TokenInvalidError, UsageError: its token, name or an address is malformed.
        """
        try:
            value = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"the join file is not JSON: {error}") from None
        if not isinstance(value, dict) or value.pop("v", None) != VERSION:
            raise ConfigError(f'a join file is a JSON object with "v": {VERSION}; make it with edgefl provision')
        field_names = {item.name for item in fields(cls)}
        if unknown := set(value) - field_names:
            raise ConfigError(f"the join file has unknown entries: {', '.join(sorted(unknown))}")
        return cls._validate(value)

    @classmethod
    def _validate(cls, value: Mapping[str, object]) -> Self:
        token, name, role = value.get("token"), value.get("name"), value.get("role", "trainer")
        shards, addresses = value.get("shards", {}), value.get("addresses", [])
        if not isinstance(token, str):
            raise ConfigError("the join file has no token; make it with edgefl provision")
        JoinToken.parse(token)
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"the join file's name must be a text, got {name!r}")
        if role not in ROLES:
            raise ConfigError(f"the join file's role must be one of {', '.join(ROLES)}, got {role!r}")
        if not isinstance(shards, dict) or not all(isinstance(path, str) for path in shards.values()):
            raise ConfigError("the join file's shards must map tasks to paths")
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError("the join file's addresses must be a list of HOST:PORT")
        return cls(
            token=token,
            name=None if name is None else validate_slug(name),
            role=str(role),
            shards=shards,
            addresses=tuple(validate_address(address) for address in addresses),
        )


def is_hidden(path: str) -> bool:
    """Returns whether a path is visible to the units only through a drop-in."""
    return path.startswith(HIDDEN_PREFIXES)


def get_visible_folder(path: str) -> str:
    """Returns the folder to mount in a drop-in: a file's parent, which also holds its metadata.

    A mounted file would also be stale: a replacement has another inode.
    """
    location = PurePosixPath(path)
    return str(location.parent if location.suffix else location)


def find_read_error(path: str, user: str) -> str | None:
    """Returns why `user` cannot read the shard at `path` within the units, or None; needs root."""
    if not os.path.exists(path):  # noqa: PTH110 a path of the command line
        return MISSING
    base_folder = get_visible_folder(path) if is_hidden(path) else "/"
    if not os.path.isdir(base_folder):  # noqa: PTH112 likewise
        base_folder = str(PurePosixPath(base_folder).parent)
    folder = os.open(base_folder, os.O_PATH | os.O_DIRECTORY)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        _check_as_user(user, folder, os.path.relpath(path, base_folder), writer)
    os.close(writer)
    os.close(folder)
    with os.fdopen(reader, "rb") as pipe:
        reason = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return reason or None


def _check_as_user(user: str, folder_fd: int, name: str, writer_fd: int) -> None:
    """Becomes the user, writes the read error, and exits; irreversible for this process."""
    reason = "it could not be looked at"
    try:
        account = pwd.getpwnam(user)
        os.initgroups(user, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
        _check_readable(folder_fd, name, [MAX_FILES])
        reason = ""
    except KeyError:
        reason = f"there is no user {user}"
    except PermissionError as error:
        reason = f"{user} may not read it ({error.filename})"
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
    finally:
        os.write(writer_fd, reason.encode())
        os._exit(0)


def _check_readable(folder_fd: int, name: str, files_left: list[int]) -> None:
    """Opens a file, or all files below a folder; raises `OSError` without permission."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder_fd)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        for entry in sorted(os.listdir(descriptor)):  # noqa: PTH208 likewise
            files_left[0] -= 1
            if files_left[0] < 0:
                return
            _check_readable(descriptor, entry, files_left)
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Prints the read errors of USER for PATH... as JSON; returns 1 if there are any.

    With `--join FILE USER` the paths are those of a join file, and the output are lines for a board's log.
    """
    if arguments[0] == "--join":
        return _print_report(PurePosixPath(arguments[1]), arguments[2])
    user, *paths = arguments
    errors = {path: reason for path in paths if (reason := find_read_error(path, user))}
    sys.stdout.write(json.dumps({"v": 1, "unreadable": errors}) + "\n")
    return 1 if errors else 0


def format_remedy(path: str, user: str) -> str:
    """Returns the command by which the data's owner grants the user access."""
    folder = shlex.quote(get_visible_folder(path))
    return f"sudo chgrp -R {user} {folder} && sudo chmod -R g+rX {folder}, or sudo setfacl -R -m u:{user}:rX {folder}"


def _print_report(file: PurePosixPath, user: str) -> int:
    with open(file, encoding="utf-8") as text:  # noqa: PTH123 a pure path
        shards = JoinFile.parse(text.read()).shards
    errors = {task: reason for task, path in shards.items() if (reason := find_read_error(path, user))}
    for task, reason in errors.items():
        path = shards[task]
        remedy = "put it there" if reason == MISSING else f"let the device read it: {format_remedy(path, user)}"
        sys.stdout.write(f"the data of {task}, {path}, cannot be used yet: {reason}; {remedy}\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
