"""The hash-pinned locks: for each family of boards, exactly one wheel of every package that a device needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from edgefl.errors import ConfigError, NotFoundError
from edgefl.provision import sources

OLDEST_GLIBC = 17
"""The first glibc (2.17) that manylinux wheels for aarch64 are built against."""

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64}) # (?P<file>\S+\.whl)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardFamily:
    """Boards that run the same wheels: those of one CPython, one machine and at least this glibc (2.`glibc`)."""

    name: str
    title: str
    python: tuple[int, int]
    machine: str
    glibc: int
    with_torch: bool = True

    @property
    def python_version(self) -> str:
        return ".".join(map(str, self.python))

    @property
    def abi(self) -> str:
        return "cp" + "".join(map(str, self.python))

    def platforms(self) -> list[str]:
        """Returns the platform tags that such a board installs, the newest first."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, OLDEST_GLIBC - 1, -1)]
        return [*tags, f"manylinux2014_{self.machine}"]


BOARDS = {
    family.name: family
    for family in (
        BoardFamily(
            name="pi-cp311",
            title="Raspberry Pi OS 12 (Bookworm), 64-bit",
            python=(3, 11),
            machine="aarch64",
            glibc=36,
        ),
        BoardFamily(
            name="pi-cp313", title="Raspberry Pi OS 13 (Trixie), 64-bit", python=(3, 13), machine="aarch64", glibc=41
        ),
        BoardFamily(
            name="jetson-cp312", title="Jetson with JetPack 7.2", python=(3, 12), machine="aarch64", glibc=39
        ),
        BoardFamily(
            name="pc-cp311", title="Debian 12 on x86-64", python=(3, 11), machine="x86_64", glibc=36, with_torch=False
        ),
        BoardFamily(
            name="pc-cp312",
            title="Ubuntu 24.04 on x86-64",
            python=(3, 12),
            machine="x86_64",
            glibc=39,
            with_torch=False,
        ),
        BoardFamily(
            name="pc-cp313", title="Debian 13 on x86-64", python=(3, 13), machine="x86_64", glibc=41, with_torch=False
        ),
    )
}


LOCKED_EXTRAS = {"": "-light", "train": "", "coordinator": "-coordinator"}
"""How the names of locks end, by the extra whose packages they hold beside what a device needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWheel:
    """One line of a lock."""

    name: str
    version: str
    sha256: str
    file: str

    def line(self) -> str:
        """Returns the requirement as pip reads it; the wheel's name is a comment to it."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256} # {self.file}"


def board_family(name: str) -> BoardFamily:
    """Returns the family of this name; raises `NotFoundError` with the names that there are."""
    if name not in BOARDS:
        raise NotFoundError(f"no lock for boards {name!r}; there are {', '.join(BOARDS)}")
    return BOARDS[name]


def lock_name(family: BoardFamily, extra: str = "") -> str:
    """Returns the file name of the lock with the packages of this extra, one of `LOCKED_EXTRAS`."""
    return f"{family.name}{LOCKED_EXTRAS[extra]}.txt"


def lock_text(family: BoardFamily, extra: str = "") -> str:
    """Returns the lock as it lies in `provisioning/locks/`: a requirements file of pip, to be installed --no-deps.

    Raises:
        NotFoundError: there is none with torch for these boards.
    """
    if extra == "train" and not family.with_torch:
        raise NotFoundError(
            f"there is no lock with torch for {family.name}: on x86-64 the index's torch brings gigabytes of CUDA; "
            "install torch from PyTorch's own CPU index instead"
        )
    return sources.text(f"locks/{lock_name(family, extra)}")


def parse_lock(text: str) -> tuple[LockedWheel, ...]:
    """Returns the wheels of a lock, in its order.

    Raises:
        ConfigError: a line is neither a comment, an option nor a wheel with its hash.
    """
    return tuple(_wheels(text))


def _wheels(text: str) -> Iterator[LockedWheel]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith(("#", "--only-binary")):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ConfigError(
                f"line {number} of the lock is {line[:60]!r}, not NAME==VERSION --hash=sha256:HEX # WHEEL; "
                "make it with provisioning/locks/make_locks.py"
            )
        yield LockedWheel(**found.groupdict())
