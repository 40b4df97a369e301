"""Imports every wheel of a lock under the processors of old boards: who uses an instruction they lack is found here.

    make wheel-check [ARGS="--without-torch --cpu cortex-a53 --only numpy"]

Needs root. The arm64 root file system of the emulated board and the wheels are made when they are missing and kept;
its Python must be the lock's. A wheel counts when all its top-level packages and all its extension modules import,
each wheel in a process of its own; programs of wheels must tell their version. The exit code is 1 when one does not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from boards import cache

from edgefl.provision.wheels import PinnedWheel, WheelPlatform, get_platform, load_lock_text, parse_lock

SIGILL = -4
# What a wheel brings besides packages, and modules that are meant for other systems or to be run.
NO_MODULE = re.compile(r"(^|\.)(__main__|tests?|testing|_?win.*|_pywrap.*)($|\.)")
# Libraries of one wheel's own that are no modules are named without the mark of an extension.
EXTENSION = re.compile(r"\.(cpython-[0-9a-z]+-[a-z0-9_-]+|abi3)\.so$")
# Packages must import. Some extensions are libraries that their package loads in another way, or only in its order:
# to have been loaded is all that is asked of them.
IMPORT = """
import importlib, sys
cut = sys.argv.index("--")
for name in sys.argv[1:cut]:
    importlib.import_module(name)
for name in sys.argv[cut + 1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one wheel did on one processor; `code` is the process's, negative for a signal."""

    wheel: str
    cpu: str
    code: int
    seconds: float
    words: str

    @property
    def verdict(self) -> str:
        if self.code == SIGILL:
            return "illegal instruction"
        return "ok" if self.code == 0 else f"code {self.code}: {self.words}"


def main() -> int:
    """Returns the exit code."""
    asked = _asked()
    if reason := cache.why_no_image("arm64"):
        sys.exit(f"check_wheels.py: {reason}")
    family = get_platform(asked.board)
    lock = parse_lock(load_lock_text(family, "" if asked.without_torch else "train"))
    root, wheels = cache.image("arm64"), cache.wheels(family, with_torch=not asked.without_torch)
    chosen = [wheel for wheel in lock if not asked.only or wheel.name in asked.only]
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        cross_install(family, lock, wheels, site)
        outcomes = []
        for cpu in asked.cpu or ["cortex-a53", "cortex-a72"]:
            for wheel in chosen:
                outcomes.append(outcome := tried(wheel, wheels, root, site, cpu))
                line = f"{outcome.cpu:<11} {outcome.seconds:6.1f} s  {outcome.wheel:<32} {outcome.verdict}\n"
                sys.stdout.write(line)
                sys.stdout.flush()
    failed = [outcome for outcome in outcomes if outcome.code]
    sys.stdout.write(f"{len(outcomes) - len(failed)} of {len(outcomes)} imports worked\n")
    return 1 if failed else 0


def cross_install(family: WheelPlatform, lock: Sequence[PinnedWheel], wheels: Path, site: Path) -> None:
    """Unpacks the lock's wheels for another machine and Python than this one's."""
    requirements = site.with_suffix(".txt")
    requirements.write_text("\n".join(wheel.format_requirement() for wheel in lock) + "\n")
    platforms = [word for tag in family.list_platform_tags() for word in ("--platform", tag)]
    abis = [word for abi in (family.abi, "abi3", "none") for word in ("--abi", abi)]
    words = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(site),
        "--no-index", "--find-links", str(wheels), "--no-deps", "--no-compile", "--require-hashes",
        "--ignore-requires-python", "--only-binary", ":all:", "--python-version", family.python_version,
        "--implementation", "cp", *platforms, *abis, "-r", str(requirements),
    ]  # fmt: skip
    # Folders that pip's settings name would be searched too.
    subprocess.run(words, check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""})


def tried(wheel: PinnedWheel, wheels: Path, root: Path, site: Path, cpu: str) -> Outcome:
    """Imports one wheel on a processor."""
    with zipfile.ZipFile(wheels / wheel.file) as packed:
        names = packed.namelist()
    programs = [name.rpartition("/")[2] for name in names if ".data/scripts/" in name]
    commands = [f"/mnt/bin/{name} --version >&2" for name in programs if _is_elf(site / "bin" / name)]
    packages, extensions = modules(names)
    commands.append(f"exec python3 -c '{IMPORT}' " + " ".join([*packages, "--", *extensions]))
    inside = (
        f'mount --bind "{site}" "{root}/mnt" && mount -t proc proc "{root}/proc" && exec chroot "{root}" sh -ec "$1"'
    )
    started_s = time.monotonic()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", inside, "sh", "\n".join(commands)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": "/mnt", "QEMU_CPU": cpu, "HOME": "/tmp"},
    )
    words = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
    # The shell gives a program's death by a signal as 128 and its number.
    code = 128 - done.returncode if done.returncode > 128 else done.returncode
    return Outcome(wheel=wheel.name, cpu=cpu, code=code, seconds=time.monotonic() - started_s, words=words)


def modules(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the top-level packages and the extension modules that are among the files of a wheel."""
    own = [name for name in names if ".dist-info/" not in name and ".data/" not in name]
    tops = {name.partition("/")[0] for name in own if name.count("/") == 1 and name.endswith("/__init__.py")}
    tops |= {name.removesuffix(".py") for name in own if "/" not in name and name.endswith(".py")}
    inner = {EXTENSION.sub("", name).replace("/", ".") for name in own if EXTENSION.search(name)}
    # A namespace (google) has no file of its own: what lies below is imported.
    nested = {
        name.removesuffix("/__init__.py").replace("/", ".")
        for name in own
        if name.count("/") == 2 and name.endswith("/__init__.py") and name.partition("/")[0] not in tops
    }
    return _importable(tops | nested), _importable(inner - tops)


def _importable(names: set[str]) -> list[str]:
    return sorted(name for name in names if not NO_MODULE.search(name))


def _is_elf(path: Path) -> bool:
    return path.is_file() and path.open("rb").read(4) == b"\x7fELF"


def _asked() -> argparse.Namespace:
    options = argparse.ArgumentParser(description="Import every wheel of a lock under the processors of old boards.")
    options.add_argument("--board", default="pi-cp313", help="whose lock [default: pi-cp313]")
    options.add_argument("--without-torch", action="store_true", help="the lock without torch")
    options.add_argument("--cpu", action="append", help="a processor of qemu; may be repeated")
    options.add_argument("--only", action="append", help="only this package; may be repeated")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
