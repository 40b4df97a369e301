"""Wheels made on the spot: small ones of a few lines, and edgefl itself. So pip installs for real, and offline."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgefl import DISTRIBUTION, __version__

ROOT = Path(__file__).parents[1]


def make_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, bytes | Path], requires: Sequence[str] = ()
) -> Path:
    """Returns a pure wheel that installs `files`, by their path in site-packages."""
    folder.mkdir(parents=True, exist_ok=True)
    file = f"{name.replace('-', '_')}-{version}"
    info = f"{file}.dist-info"
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    content: dict[str, bytes | Path] = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{file}-py3-none-any.whl"
    record = ""
    with zipfile.ZipFile(path, "w") as wheel:
        for place, given in content.items():
            body = given if isinstance(given, bytes) else given.read_bytes()
            wheel.writestr(place, body)
            digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
            record += f"{place},sha256={digest},{len(body)}\n"
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


def make_edgefl_wheels(folder: Path, version: str, site_packages: Path) -> None:
    """Makes the wheel of this very checkout, and one that lends it the packages of `site_packages`."""
    files: dict[str, bytes | Path] = {
        path.relative_to(ROOT).as_posix(): path
        for path in sorted((ROOT / "edgefl").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    files |= {
        f"edgefl/provision/data/{path.relative_to(ROOT / 'provisioning').as_posix()}": path
        for path in sorted((ROOT / "provisioning").rglob("*"))
        if path.is_file()
    }
    files["edgefl/__init__.py"] = (
        (ROOT / "edgefl" / "__init__.py").read_text().replace(f'"{__version__}"', f'"{version}"').encode()
    )
    make_wheel(folder, DISTRIBUTION, version, files, requires=["borrowed"])
    make_wheel(folder, "borrowed", "1.0", {"borrowed.pth": f"{site_packages}\n".encode()})
