"""A device's wheels: hash-pinned locks for each platform, and the folder for sites without internet."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl import DISTRIBUTION, __version__
from edgefl.core.errors import ConfigError, NetworkError, NotFoundError
from edgefl.provision import provisioning_files

OWN_WHEEL_PREFIX = f"{DISTRIBUTION.replace('-', '_')}-"
"""Prefix of the file name of edgefl's own wheel."""
FOREIGN_WHEEL_PREFIX = "edgefl-"
"""Likewise of another project's wheels, and of edgefl's under its earlier name."""
MIN_GLIBC_MINOR = 17
"""The first glibc (2.17) that manylinux wheels for aarch64 are built against."""

_LOCK_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64}) # (?P<file>\S+\.whl)"
)
LOCK_SUFFIXES = {"": "-light", "train": "", "coordinator": "-coordinator"}
"""Suffixes of lock names, by the extra whose packages they add to a device's."""
_CHECKOUT = Path(__file__).parents[2]


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


def fill_wheelhouse(
    folder: Path, platform: WheelPlatform, lock: Sequence[PinnedWheel], *, own_wheel: Path | None = None
) -> list[Path]:
    """Downloads the lock's wheels, adds edgefl's own wheel, and returns all of them.

    Existing wheels are kept when their hash is right. Other files are not touched.

    Args:
        folder: created when it is missing.
        platform: of the lock.
        lock: the wheels to have.
        own_wheel: edgefl's wheel; None builds it from the checkout that this edgefl runs from.

    Raises:
        ConfigError: `own_wheel` is no wheel of edgefl.
        NotFoundError: there is no checkout to build edgefl's wheel from.
        NetworkError: the index lacks a wheel, or gave another one than the lock's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [wheel for wheel in lock if not _is_downloaded(folder, wheel)]
    if missing:
        _download(folder, platform, missing)
    if missing_files := [wheel.file for wheel in missing if not _is_downloaded(folder, wheel)]:
        raise NetworkError(
            f"the index gave other files than the lock names: {', '.join(missing_files)} missing in {folder}"
        )
    return [*(folder / wheel.file for wheel in lock), _add_own_wheel(folder, own_wheel)]


def _is_downloaded(folder: Path, wheel: PinnedWheel) -> bool:
    path = folder / wheel.file
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256


def _download(folder: Path, platform: WheelPlatform, wheels: Sequence[PinnedWheel]) -> None:
    """Downloads with pip, so that its settings for mirrors, proxies and certificates apply."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        lock = Path(temporary_folder) / "lock.txt"
        lock.write_text("\n".join(wheel.format_requirement() for wheel in wheels) + "\n", encoding="utf-8")
        platforms = [word for tag in platform.list_platform_tags() for word in ("--platform", tag)]
        abis = [word for abi in (platform.abi, "abi3", "none") for word in ("--abi", abi)]
        _run_pip(
            "download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", str(folder),
            "--python-version", platform.python_version, "--implementation", "cp", *platforms, *abis, "-r", str(lock),
            description=f"the wheels for {platform.name}",
        )  # fmt: skip


def _add_own_wheel(folder: Path, wheel: Path | None) -> Path:
    """Returns edgefl's only wheel in the folder: the given one, or one built from the checkout."""
    if wheel is not None:
        if not wheel.name.startswith(OWN_WHEEL_PREFIX) or wheel.suffix != ".whl" or not wheel.is_file():
            raise ConfigError(
                f"edgefl's wheel must be a file {OWN_WHEEL_PREFIX}VERSION-py3-none-any.whl, got {wheel}"
            )
        return _replace_own_wheel(folder, wheel)
    if not (_CHECKOUT / "pyproject.toml").is_file():
        raise NotFoundError(
            f"edgefl {__version__} does not run from a checkout, so its wheel cannot be built; "
            "name it with --edgefl-wheel FILE"
        )
    with tempfile.TemporaryDirectory() as temporary_folder:
        _run_pip(
            "wheel", "--no-deps", "--wheel-dir", temporary_folder, str(_CHECKOUT), description="edgefl's own wheel"
        )
        return _replace_own_wheel(folder, next(Path(temporary_folder).glob(f"{OWN_WHEEL_PREFIX}*.whl")))


def _replace_own_wheel(folder: Path, wheel: Path) -> Path:
    """Copies the wheel into the folder and removes other versions and foreign packages, to avoid ambiguity."""
    target = folder / wheel.name
    if wheel.resolve() != target.resolve():
        shutil.copy(wheel, target)
    for other in (*folder.glob(f"{OWN_WHEEL_PREFIX}*.whl"), *folder.glob(f"{FOREIGN_WHEEL_PREFIX}*.whl")):
        if other != target:
            other.unlink()
    return target


def _run_pip(*arguments: str, description: str) -> None:
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    if process.returncode:
        error_text = " ".join(process.stderr.rpartition("ERROR: ")[2].split())
        raise NetworkError(f"pip could not get {description}: {error_text or 'it says nothing'}")
