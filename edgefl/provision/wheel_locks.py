"""Hash-pinned locks: for each platform, exactly one wheel of every package that a device needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from edgefl.core.errors import ConfigError, NotFoundError
from edgefl.provision import provisioning_files

MIN_GLIBC_MINOR = 17
"""The first glibc (2.17) that manylinux wheels for aarch64 are built against."""

_LOCK_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64}) # (?P<file>\S+\.whl)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPlatform:
    """Devices that run the same wheels: one CPython, one machine and at least this glibc (2.`glibc`)."""

    name: str
    title: str
    python: tuple[int, int]
    machine: str
    glibc: int
    has_torch: bool = True

    @property
    def python_version(self) -> str:
        return ".".join(map(str, self.python))

    @property
    def abi(self) -> str:
        return "cp" + "".join(map(str, self.python))

    def list_platform_tags(self) -> list[str]:
        """Returns the platform tags of such a device, newest first."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, MIN_GLIBC_MINOR - 1, -1)]
        return [*tags, f"manylinux2014_{self.machine}"]


WHEEL_PLATFORMS = {
    family.name: family
    for family in (
        WheelPlatform(
            name="pi-cp311",
            title="Raspberry Pi OS 12 (Bookworm), 64-bit",
            python=(3, 11),
            machine="aarch64",
            glibc=36,
        ),
        WheelPlatform(
            name="pi-cp313", title="Raspberry Pi OS 13 (Trixie), 64-bit", python=(3, 13), machine="aarch64", glibc=41
        ),
        WheelPlatform(
            name="jetson-cp312", title="Jetson with JetPack 7.2", python=(3, 12), machine="aarch64", glibc=39
        ),
        WheelPlatform(
            name="pc-cp311", title="Debian 12 on x86-64", python=(3, 11), machine="x86_64", glibc=36, has_torch=False
        ),
        WheelPlatform(
            name="pc-cp312",
            title="Ubuntu 24.04 on x86-64",
            python=(3, 12),
            machine="x86_64",
            glibc=39,
            has_torch=False,
        ),
        WheelPlatform(
            name="pc-cp313", title="Debian 13 on x86-64", python=(3, 13), machine="x86_64", glibc=41, has_torch=False
        ),
    )
}


LOCK_SUFFIXES = {"": "-light", "train": "", "coordinator": "-coordinator"}
"""Suffixes of lock names, by the extra whose packages they add to a device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedWheel:
    """One line of a lock."""

    name: str
    version: str
    sha256: str
    file: str

    def format_requirement(self) -> str:
        """Returns the requirement in pip's syntax; the wheel's name is its comment."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256} # {self.file}"


def get_platform(name: str) -> WheelPlatform:
    """Returns the platform of this name; raises `NotFoundError` with the known names."""
    if name not in WHEEL_PLATFORMS:
        raise NotFoundError(f"no lock for boards {name!r}; there are {', '.join(WHEEL_PLATFORMS)}")
    return WHEEL_PLATFORMS[name]


def get_lock_name(platform: WheelPlatform, extra: str = "") -> str:
    """Returns the file name of the lock with the packages of this extra, one of `LOCK_SUFFIXES`."""
    return f"{platform.name}{LOCK_SUFFIXES[extra]}.txt"


def load_lock_text(platform: WheelPlatform, extra: str = "") -> str:
    """Returns a lock of `provisioning/locks/`: a requirements file of pip, to be installed --no-deps.

    Raises:
        NotFoundError: there is none with torch for this platform.
    """
    if extra == "train" and not platform.has_torch:
        raise NotFoundError(
            f"there is no lock with torch for {platform.name}: on x86-64 the index's torch brings gigabytes of CUDA; "
            "install torch from PyTorch's own CPU index instead"
        )
    return provisioning_files.load_text(f"locks/{get_lock_name(platform, extra)}")


def parse_lock(text: str) -> tuple[PinnedWheel, ...]:
    """Returns the wheels of a lock, in its order.

    Raises:
        ConfigError: a line is neither a comment, an option nor a wheel with its hash.
    """
    return tuple(_parse_wheels(text))


def _parse_wheels(text: str) -> Iterator[PinnedWheel]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith(("#", "--only-binary")):
            continue
        match = _LOCK_LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"line {number} of the lock is {line[:60]!r}, not NAME==VERSION --hash=sha256:HEX # WHEEL; "
                "make it with provisioning/locks/make_locks.py"
            )
        yield PinnedWheel(**match.groupdict())
