"""Programs that may take so much memory and no more, page cache included, by a control group of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class NoLimitError(Exception):
    """This machine lets nobody make a control group for memory; the text says why."""


@dataclass(frozen=True, slots=True)
class Group:
    """A control group; what is started with `prefix` lives in it."""

    folder: Path
    is_unified: bool

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words to put before a program and its arguments."""
        return ("/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh")

    @property
    def num_kills(self) -> int:
        """How many processes were killed since there was no room for them."""
        name = "memory.events" if self.is_unified else "memory.oom_control"
        lines = (line.split() for line in (self.folder / name).read_text().splitlines())
        return next((int(value) for key, value in lines if key == "oom_kill"), 0)


@contextmanager
def limited(size_bytes: int) -> Iterator[Group]:
    """Makes a control group of so many bytes; its processes must have ended before this is left.

    Raises:
        NoLimitError: it cannot be made here.
    """
    is_unified = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if is_unified else ROOT / "memory") / f"edgefl-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoLimitError(f"{folder} cannot be made: {error.strerror}") from None
    try:
        try:
            (folder / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(size_bytes))
            with suppress(OSError):  # a machine without swap has no such file
                swap = "memory.swap.max" if is_unified else "memory.memsw.limit_in_bytes"
                (folder / swap).write_text("0" if is_unified else str(size_bytes))
        except OSError as error:
            raise NoLimitError(f"{folder} takes no limit: {error.strerror}") from None
        yield Group(folder, is_unified)
    finally:
        with suppress(OSError):
            folder.rmdir()
