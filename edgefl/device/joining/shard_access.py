"""Whether the device's own user may read a board's data; run by root before a join, with `python -m`.

The unit sees an empty /home with the shards' folders in it, so that what matters there is the folder alone and not
the way to it; elsewhere the way matters as well. Nothing is changed: whoever owns the data decides who reads it.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import stat
import sys
from pathlib import PurePosixPath

from edgefl.device.joining.join_file import JoinFile

MISSING = "there is nothing"
HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 places of a board, not ours
"""What the sandbox of the units hides."""
MOST_FILES = 10_000
"""More of a shard's files are not looked at: those that are not readable are hardly the last ones."""


def is_hidden(path: str) -> bool:
    """Returns whether the units see a path only with a drop-in that shows it."""
    return path.startswith(HIDDEN)


def shown_folder(path: str) -> str:
    """Returns the folder that a drop-in shows: of a file the one that it lies in, since its card lies beside it.

    A file alone would also be shown as it was at the start: one that takes its place later has another inode.
    """
    place = PurePosixPath(path)
    return str(place.parent if place.suffix else place)


def unreadable(path: str, user: str) -> str | None:
    """Returns why `user` cannot read the shard at `path` as the units show it, None if he can; asked by root."""
    if not os.path.exists(path):  # noqa: PTH110 a path of the command line
        return MISSING
    start = shown_folder(path) if is_hidden(path) else "/"
    if not os.path.isdir(start):  # noqa: PTH112 likewise
        start = str(PurePosixPath(start).parent)
    folder = os.open(start, os.O_PATH | os.O_DIRECTORY)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        _answer_as(user, folder, os.path.relpath(path, start), writer)
    os.close(writer)
    os.close(folder)
    with os.fdopen(reader, "rb") as answer:
        reason = answer.read().decode(errors="replace")
    os.waitpid(child, 0)
    return reason or None


def _answer_as(user: str, folder: int, name: str, writer: int) -> None:
    """Becomes the user, says what it cannot read, and ends; this process has no way back."""
    reason = "it could not be looked at"
    try:
        known = pwd.getpwnam(user)
        os.initgroups(user, known.pw_gid)
        os.setgid(known.pw_gid)
        os.setuid(known.pw_uid)
        _read(folder, name, [MOST_FILES])
        reason = ""
    except KeyError:
        reason = f"there is no user {user}"
    except PermissionError as error:
        reason = f"{user} may not read it ({error.filename})"
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
    finally:
        os.write(writer, reason.encode())
        os._exit(0)


def _read(folder: int, name: str, left: list[int]) -> None:
    """Opens a file, or all that lies below a folder; raises `OSError` where that is not allowed."""
    opened = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            return
        for entry in sorted(os.listdir(opened)):  # noqa: PTH208 likewise
            left[0] -= 1
            if left[0] < 0:
                return
            _read(opened, entry, left)
    finally:
        os.close(opened)


def main(arguments: list[str]) -> int:
    """Prints what USER cannot read of PATH..., as JSON by path; ends with 1 if there is anything.

    With `--join FILE USER` the paths are those of a join file, and what is printed are lines for a board's log.
    """
    if arguments[0] == "--join":
        return _tell(PurePosixPath(arguments[1]), arguments[2])
    user, *paths = arguments
    found = {path: reason for path in paths if (reason := unreadable(path, user))}
    sys.stdout.write(json.dumps({"v": 1, "unreadable": found}) + "\n")
    return 1 if found else 0


def remedy(path: str, user: str) -> str:
    """Returns what whoever owns the data may type to let the user read it."""
    folder = shlex.quote(shown_folder(path))
    return f"sudo chgrp -R {user} {folder} && sudo chmod -R g+rX {folder}, or sudo setfacl -R -m u:{user}:rX {folder}"


def _tell(file: PurePosixPath, user: str) -> int:
    with open(file, encoding="utf-8") as text:  # noqa: PTH123 a pure path
        shards = JoinFile.parse(text.read()).shards
    found = {task: reason for task, path in shards.items() if (reason := unreadable(path, user))}
    for task, reason in found.items():
        path = shards[task]
        mend = "put it there" if reason == MISSING else f"let the device read it: {remedy(path, user)}"
        sys.stdout.write(f"the data of {task}, {path}, cannot be used yet: {reason}; {mend}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
