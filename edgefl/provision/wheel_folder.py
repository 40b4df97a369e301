"""A folder with every wheel that a board installs, for sites without internet: the payload's `wheels/`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgefl import __version__
from edgefl.errors import ConfigError, NetworkError, NotFoundError
from edgefl.provision.extras import FOREIGN_WHEEL, OWN_WHEEL
from edgefl.provision.locks import BoardFamily, LockedWheel

_CHECKOUT = Path(__file__).parents[2]
_CHUNK_BYTES = 1 << 20


def fill_wheel_folder(
    folder: Path, family: BoardFamily, lock: Sequence[LockedWheel], *, own_wheel: Path | None = None
) -> list[Path]:
    """Downloads what the lock names, adds edgefl's own wheel, and returns all of them.

    What lies in the folder already is kept when its hash is right. Other files are not touched.

    Args:
        folder: made when it is missing.
        family: the boards that the lock is for.
        lock: the wheels to have.
        own_wheel: edgefl's wheel; None builds it from the checkout that this edgefl runs from.

    Raises:
        ConfigError: `own_wheel` is no wheel of edgefl.
        NotFoundError: there is no checkout to build edgefl's wheel from.
        NetworkError: the index does not give a wheel, or gave another one than the lock's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [wheel for wheel in lock if not _is_there(folder, wheel)]
    if missing:
        _download(folder, family, missing)
    if wrong := [wheel.file for wheel in missing if not _is_there(folder, wheel)]:
        raise NetworkError(f"the index gave other files than the lock names: {', '.join(wrong)} missing in {folder}")
    return [*(folder / wheel.file for wheel in lock), _own_wheel(folder, own_wheel)]


def _is_there(folder: Path, wheel: LockedWheel) -> bool:
    path = folder / wheel.file
    return path.is_file() and _sha256(path) == wheel.sha256


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _download(folder: Path, family: BoardFamily, wheels: Sequence[LockedWheel]) -> None:
    """Lets pip fetch, so that its settings for mirrors, proxies and certificates hold here too."""
    with tempfile.TemporaryDirectory() as scratch:
        lock = Path(scratch) / "lock.txt"
        lock.write_text("\n".join(wheel.line() for wheel in wheels) + "\n", encoding="utf-8")
        platforms = [word for tag in family.platforms() for word in ("--platform", tag)]
        abis = [word for abi in (family.abi, "abi3", "none") for word in ("--abi", abi)]
        _pip(
            "download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", str(folder),
            "--python-version", family.python_version, "--implementation", "cp", *platforms, *abis, "-r", str(lock),
            what=f"the wheels for {family.name}",
        )  # fmt: skip


def _own_wheel(folder: Path, given: Path | None) -> Path:
    """Returns edgefl's wheel in the folder, the only one there: the given one, or a new one of the checkout."""
    if given is not None:
        if not given.name.startswith(OWN_WHEEL) or given.suffix != ".whl" or not given.is_file():
            raise ConfigError(f"edgefl's wheel must be a file {OWN_WHEEL}VERSION-py3-none-any.whl, got {given}")
        return _only(folder, given)
    if not (_CHECKOUT / "pyproject.toml").is_file():
        raise NotFoundError(
            f"edgefl {__version__} does not run from a checkout, so its wheel cannot be built; "
            "name it with --edgefl-wheel FILE"
        )
    with tempfile.TemporaryDirectory() as scratch:
        _pip("wheel", "--no-deps", "--wheel-dir", scratch, str(_CHECKOUT), what="edgefl's own wheel")
        return _only(folder, next(Path(scratch).glob(f"{OWN_WHEEL}*.whl")))


def _only(folder: Path, wheel: Path) -> Path:
    """Copies it into the folder and takes other versions and foreign packages out: a board could not choose."""
    place = folder / wheel.name
    if wheel.resolve() != place.resolve():
        shutil.copy(wheel, place)
    for other in (*folder.glob(f"{OWN_WHEEL}*.whl"), *folder.glob(f"{FOREIGN_WHEEL}*.whl")):
        if other != place:
            other.unlink()
    return place


def _pip(*arguments: str, what: str) -> None:
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.rpartition("ERROR: ")[2].split())
        raise NetworkError(f"pip could not get {what}: {said or 'it says nothing'}")
