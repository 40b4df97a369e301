"""Folder with all wheels of a device, for sites without internet: the payload's `wheels/`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgefl import __version__
from edgefl.core.errors import ConfigError, NetworkError, NotFoundError
from edgefl.provision.payload_extras import FOREIGN_WHEEL_PREFIX, OWN_WHEEL_PREFIX
from edgefl.provision.wheel_locks import PinnedWheel, WheelPlatform

_CHECKOUT = Path(__file__).parents[2]
_CHUNK_BYTES = 1 << 20


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
    return path.is_file() and _compute_sha256(path) == wheel.sha256


def _compute_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


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
