"""Releases for emulated boards: this checkout under another version, built by pip and signed by a key of the test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from boards.site import ROOT, Site
from wheel_files import Signer

from edgefl import __version__

MAJOR, MINOR, PATCH = (int(part) for part in __version__.split("."))
NOT_SHIPPED = shutil.ignore_patterns("__pycache__")
STARTS = ("self._connection.start()", 'raise RuntimeError("broken on purpose")')
BREAKS: Mapping[str, tuple[str, str]] = {"edgefl/device/agent.py": STARTS}
"""An edgefl that imports, says its version and never starts as an agent."""


def later(patches: int) -> str:
    """Returns a later version that this coordinator works with."""
    return f"{MAJOR}.{MINOR}.{PATCH + patches}"


def release(signer: Signer, folder: Path, version: str, changes: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """Returns a signed bundle of this checkout as `version`; `changes` replaces one text in each of these files."""
    tree = folder / f"checkout-{version}"
    tree.mkdir(parents=True)
    for name in ("edgefl", "provisioning"):
        shutil.copytree(ROOT / name, tree / name, ignore=NOT_SHIPPED)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copyfile(path, tree / path.name)
    own = {"edgefl/__init__.py": (f'"{__version__}"', f'"{version}"')}
    for name, (old, new) in {**own, **(changes or {})}.items():
        text = (tree / name).read_text()
        assert old in text, f"{name} does not hold {old!r}"
        (tree / name).write_text(text.replace(old, new, 1))
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tree / "dist"),
        str(tree),
    ]
    subprocess.run(words, check=True)
    [wheel] = (tree / "dist").glob("edgefl_fleet-*.whl")
    return signer.bundle(folder / f"edgefl-{version}.bundle", wheel, version=version)


def update(site: Site, device: str, bundle: Path, version: str) -> tuple[int, str]:
    """Runs `edgefl devices update` for one board to its end; returns the exit code and what it printed."""
    process = site.fleet.start_command(
        ["devices", "update", device, "--to", version, "--bundle", str(bundle), "--wait", "--format", "json"]
    )
    output, _ = process.communicate(timeout=600)
    return process.returncode, output.decode()
