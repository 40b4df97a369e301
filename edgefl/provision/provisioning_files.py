"""Files of cards and payloads; and the scripts, units and templates of `provisioning/`.

They lie beside the package, or inside a wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from edgefl.core.errors import NotFoundError

FileContents = dict[str, bytes | Path]
"""Content by path; a path is a file to copy."""
ReadFile = Callable[[str], bytes | None]
"""Returns the content of a file of a boot partition; None where there is none."""
_PACKAGE_DATA = Path(__file__).with_name("data")
_CHECKOUT = Path(__file__).parents[2] / "provisioning"


def find_path(name: str) -> Path:
    """Returns the file or folder of this name, such as `board/install.sh`.

    Raises:
        NotFoundError: there is none; the installation is damaged.
    """
    for folder in (_PACKAGE_DATA, _CHECKOUT):
        if (folder / name).exists():
            return folder / name
    raise NotFoundError(f"this installation of edgefl lacks its file {name!r}; install it again")


def load_text(name: str) -> str:
    """Returns the text of the file of this name; raises as `find_path`."""
    return find_path(name).read_text(encoding="utf-8")


def read_content(content: bytes | Path) -> bytes:
    """Returns the bytes of a file's content."""
    return content if isinstance(content, bytes) else content.read_bytes()


def count_bytes(files: Mapping[str, bytes | Path]) -> int:
    """Returns the total size of all files."""
    return sum(len(body) if isinstance(body, bytes) else body.stat().st_size for body in files.values())
