"""Where the scripts, units and templates of `provisioning/` lie: beside the package, or in it when it is a wheel."""

from __future__ import annotations

from pathlib import Path

from edgefl.errors import NotFoundError

_PACKED = Path(__file__).with_name("data")
_CHECKOUT = Path(__file__).parents[2] / "provisioning"


def path(name: str) -> Path:
    """Returns the file or folder of this name, such as `board/install.sh`.

    Raises:
        NotFoundError: there is none; the installation is damaged.
    """
    for folder in (_PACKED, _CHECKOUT):
        if (folder / name).exists():
            return folder / name
    raise NotFoundError(f"this installation of edgefl lacks its file {name!r}; install it again")


def text(name: str) -> str:
    """Returns the text of the file of this name; raises as `path`."""
    return path(name).read_text(encoding="utf-8")
