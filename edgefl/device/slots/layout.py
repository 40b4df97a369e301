"""Where the slots lie: `ROOT/a`, `ROOT/b`, and `ROOT/current`, which says by a symbolic link which is in use.

Root owns all of it. `ROOT/update` is the updater's: its lock, its status, and its own copy of a bundle.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from edgefl import DISTRIBUTION
from edgefl.errors import BundleError, ConfigError, StoreError
from edgefl.files import open_whole, sync_directory
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

NAMES = ("a", "b")
CURRENT = "current"
RECORD = "edgefl-slot.json"
LOCK = "lock"
"""In the updater's folder; held while it works, and by install.sh while that makes a slot."""
FORMAT = 1
PROVISIONED = "sudo /opt/edgefl/current/bin/python -m edgefl {} --state /var/lib/edgefl"
"""A command on a board that `edgefl provision` has made ready: `edgefl` is on no PATH there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A task pack in a slot, and the projects that came with it."""

    version: str
    projects: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """What bundles have brought into a slot. `serials` holds the newest of every bundle's name, packs' too."""

    packs: Mapping[str, Pack] = field(default_factory=dict)
    serials: Mapping[str, int] = field(default_factory=dict)

    def with_bundle(self, name: str, pack: Pack | None, serial: int) -> SlotRecord:
        """Returns the record after one more bundle of this name; a release and a removal leave no pack."""
        packs = {other: one for other, one in self.packs.items() if other != name}
        if pack is not None:
            packs[name] = pack
        return replace(self, packs=packs, serials={**self.serials, name: serial})

    def with_serial(self, name: str, serial: int) -> SlotRecord:
        """Returns the record after a bundle of this name that changed nothing else."""
        return replace(self, serials={**self.serials, name: serial})


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a board."""

    root: Path

    @property
    def work(self) -> Path:
        return self.root / "update"

    def path(self, name: str) -> Path:
        return self.root / name

    def python(self, name: str) -> Path:
        return self.root / name / "bin" / "python"

    def packages(self, name: str) -> Path:
        """Returns the folder of a slot's packages; all slots have the Python that runs this."""
        base = str(self.root / name)
        return Path(sysconfig.get_path("purelib", "venv", {"base": base, "platbase": base}))

    def in_use(self) -> str:
        """Returns the name of the slot that `current` leads to.

        Raises:
            ConfigError: it leads to none: this board has no slots.
        """
        try:
            name = str((self.root / CURRENT).readlink())
        except OSError:
            name = ""
        found = Path(name).name
        if found not in NAMES or name not in {found, str(self.root / found)}:
            raise ConfigError(
                f"{self.root / CURRENT} must be a symbolic link to one of the slots {' and '.join(NAMES)} beside it, "
                f"got {name or 'none'}; a board that was installed by hand is updated by hand"
            )
        return found

    def idle(self) -> str:
        """Returns the name of the other slot."""
        return next(name for name in NAMES if name != self.in_use())

    def flip(self, name: str) -> None:
        """Makes a slot the one in use: at any instant `current` leads to the old or to the new one, durably."""
        fresh = self.root / f".{CURRENT}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        fresh.replace(self.root / CURRENT)
        sync_directory(self.root)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the slots for one updater.

        Raises:
            StoreError: another one is at work.
        """
        with (self.work / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"another updater is at work in {self.root}; let it finish") from None
            yield

    def record(self, name: str) -> SlotRecord:
        """Returns what bundles have brought into a slot; one that was installed otherwise has none."""
        path = self.path(name) / RECORD
        try:
            value = parse_json(path.read_bytes())
            packs = {str(key): _pack(one) for key, one in value["packs"].items()}
            serials = {str(key): int(serial) for key, serial in value["serials"].items()}
        except FileNotFoundError:
            return SlotRecord()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BundleError(f"{path} is damaged ({error}); install the board's slots again") from None
        return SlotRecord(packs=packs, serials=serials)

    def write_record(self, name: str, record: SlotRecord) -> None:
        with open_whole(self.path(name) / RECORD, mode=0o644) as file:
            file.write(json.dumps({"v": FORMAT, **asdict(record)}).encode())

    def installed(self, name: str) -> dict[str, str]:
        """Returns the projects in a slot's own folder of packages, with their versions."""
        found = importlib.metadata.distributions(path=[str(self.packages(name))])
        return {str(canonicalize_name(one.name)): one.version for one in found if one.name}

    def release(self, name: str) -> str:
        """Returns the version of edgefl in a slot.

        Raises:
            BundleError: there is none.
        """
        version = self.installed(name).get(DISTRIBUTION)
        if version is None:
            raise BundleError(f"slot {self.path(name)} holds no {DISTRIBUTION}; install the board's slots again")
        return version


def own_slots(prefix: Path | None = None) -> Slots | None:
    """Returns the slots of which this process runs in one; None when it was installed otherwise.

    Args:
        prefix: the virtual environment of this process.
    """
    prefix = prefix or Path(sys.prefix)
    slots = Slots(prefix.parent)
    if prefix.name not in {*NAMES, CURRENT}:
        return None
    try:
        slots.in_use()
    except ConfigError:
        return None
    return slots


def files_of(folder: Path, projects: Iterable[str]) -> set[str]:
    """Returns the paths, below a folder of packages, of the files that came with these projects."""
    wanted, found = set(projects), set()
    for one in importlib.metadata.distributions(path=[str(folder)]):
        if one.name and canonicalize_name(one.name) in wanted:
            found |= {str(path) for path in one.files or ()}
    return found


def _pack(value: Mapping[str, object]) -> Pack:
    projects = value["projects"]
    if not isinstance(projects, list):
        raise TypeError(f"projects of a pack must be a list, got {projects!r}")
    return Pack(version=str(value["version"]), projects=tuple(map(str, projects)))
