"""Location of the scripts, units and templates of `provisioning/`: beside the package, or inside a wheel."""

from __future__ import annotations

from pathlib import Path

from edgefl.core.errors import NotFoundError

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
