"""What tests need beside Python, each with the command that supplies it.

    python tests/requirements.py             a table of what is here and what is absent, and one command to install it
    python tests/requirements.py --packages  the absent Debian packages
    python tests/requirements.py --files     the programs that are here, as files

It imports nothing but the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
FOLDERS = [
    *os.environ.get("PATH", "").split(os.pathsep),
    *("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin"),
    *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"))),
]
"""Debian keeps half of these where only root's PATH leads, and PostgreSQL where none does."""


@dataclass(frozen=True)
class Part:
    """Programs of Debian packages."""

    programs: tuple[str, ...]
    packages: tuple[str, ...]

    def path(self) -> str | None:
        """Returns where the first program is; None unless all of them are somewhere."""
        found = [shutil.which(name, path=os.pathsep.join(FOLDERS)) for name in self.programs]
        return found[0] if all(found) else None

    def files(self) -> set[Path]:
        """Returns every file that is one of the programs."""
        places = {Path(folder, name).resolve() for folder in FOLDERS for name in self.programs}
        return {place for place in places if place.is_file() and place != Path("/bin/sh").resolve()}


PARTS = {
    "chromium": Part(("chromium",), ("chromium",)),
    "dash": Part(("dash",), ("dash",)),
    "dosfstools": Part(("mkfs.vfat", "fsck.fat"), ("dosfstools",)),
    "fdisk": Part(("sfdisk",), ("fdisk",)),
    "iproute2": Part(("ip", "tc"), ("iproute2",)),
    "mosquitto": Part(("mosquitto",), ("mosquitto",)),
    "mtools": Part(("mcopy",), ("mtools",)),
    "nftables": Part(("nft",), ("nftables",)),
    "openssh": Part(("sshd", "ssh"), ("openssh-server", "openssh-client")),
    "postgresql": Part(("postgres", "initdb"), ("postgresql",)),
    "shellcheck": Part(("shellcheck",), ("shellcheck",)),
    "systemd": Part(("systemd-analyze", "systemctl"), ("systemd",)),
}
_USE = re.compile(r'\b(?:needs|require|missing)\(((?:"[\w-]+",? ?)+)')


def missing(*names: str) -> str | None:
    """Returns why a test cannot run here, with the command that changes it; None when all of these are here.

    Names are those of `PARTS`; "root" and "user" are who runs the tests.
    """
    for name in names:
        if name in {"root", "user"}:
            if (os.geteuid() == 0) != (name == "root"):
                return (
                    "needs root: sudo make test-all" if name == "root" else "root may do everything: run it as a user"
                )
        elif PARTS[name].path() is None:
            return f"{name} is not installed: sudo apt-get install {' '.join(PARTS[name].packages)}"
    return None


def needs(*names: str) -> Any:
    """Marks a test, or with `pytestmark` a module, that is skipped where one of these is missing."""
    import pytest  # noqa: PLC0415 the table needs none

    reason = missing(*names)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def require(*names: str) -> None:
    """Skips the test that asks, where one of these is missing."""
    import pytest  # noqa: PLC0415 likewise

    if reason := missing(*names):
        pytest.skip(reason)


def real_data_at(name: str) -> Path:
    """Returns a folder or a file of real data; skips the test that asks where it is not."""
    import pytest  # noqa: PLC0415 likewise

    root = os.environ.get("EDGEFL_DATA")
    path = Path(root, name) if root else None
    if path is None or not path.exists():
        pytest.skip(f"no {name} in EDGEFL_DATA, {root or 'which is not set'}: EDGEFL_DATA=FOLDER make test-all")
    return path


def table() -> str:
    """Returns what is here, which tests need it, and how to install what is absent."""
    rows = [("part", "where it is", "folders of tests that need it, with the number of files")]
    rows += [(name, part.path() or "ABSENT", _users(name)) for name, part in PARTS.items()]
    rows.append(("root", "yes" if os.geteuid() == 0 else "no", _users("root")))
    rows.append(("EDGEFL_DATA", os.environ.get("EDGEFL_DATA") or "not set: optional real data", _users("data")))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name:{widths[0]}}  {place:{widths[1]}}  {users}".rstrip() for name, place, users in rows]
    if absent := absent_packages():
        lines.append(f"What is absent has its tests skipped. All of it: sudo apt-get install {' '.join(absent)}")
    return "\n".join(lines)


def absent_packages() -> list[str]:
    return [package for part in PARTS.values() if part.path() is None for package in part.packages]


def _users(name: str) -> str:
    """Returns the folders whose tests need it, with the number of their files."""
    texts = {path: path.read_text() for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)}
    counts: dict[str, int] = {}
    for path, text in texts.items():
        asked = {word for use in _USE.findall(text) for word in re.findall(r'"([\w-]+)"', use)}
        if name not in asked and not (name == "data" and "real_data_at(" in text):
            continue
        is_helper = path.parent == TESTS and not path.name.startswith("test_")
        users = [one for one in texts if f"from {path.stem} import" in texts[one]] if is_helper else [path]
        for user in users:
            folder = user.relative_to(TESTS).parts[0] if user.parent != TESTS else user.name
            counts[folder] = counts.get(folder, 0) + 1
    return ", ".join(f"{folder} ({count})" for folder, count in counts.items())


if __name__ == "__main__":
    if "--packages" in sys.argv:
        print(" ".join(absent_packages()))  # noqa: T201 a program
    elif "--files" in sys.argv:
        print("\n".join(sorted({str(file) for part in PARTS.values() for file in part.files()})))  # noqa: T201 likewise
    else:
        print(table())  # noqa: T201 likewise
