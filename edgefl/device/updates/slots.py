"""Slot layout: `ROOT/a`, `ROOT/b`, and `ROOT/current`, a symbolic link to the active one.

Root owns all of it. `ROOT/update` is the updater's folder: lock, status, and its copy of a bundle. A bundle fits a
slot by its signature, its compatibility with the board, and the order of versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import canonicalize_name
from packaging.version import Version

from edgefl import DISTRIBUTION
from edgefl.core.errors import BundleError, ConfigError, EdgeflError, StoreError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.system.atomic_files import open_atomic, sync_directory
from edgefl.system.bundles.archive import Bundle, BundleKind, BundleManifest, WheelEntry, is_newer
from edgefl.system.bundles.keys import LIST_FILE, TRUSTED_KEYS_FOLDER, TrustedKeys
from edgefl.system.bundles.wheels import select_compatible_wheels

log = logging.getLogger(__name__)

SLOT_NAMES = ("a", "b")
MODELS_FOLDER = "models"
"""Folder of a state directory with the deployed models, and the lists of signers that came with them."""
CURRENT_LINK = "current"
RECORD_FILE = "edgefl-slot.json"
LOCK_FILE = "lock"
"""Lock in the updater's folder; held while it works, and by install.sh while that creates a slot."""
RECORD_FORMAT = 1
PROVISIONED_COMMAND = "sudo /opt/edgefl/current/bin/python -m edgefl {} --state /var/lib/edgefl"
"""A command on a board set up by `edgefl provision`, where `edgefl` is not on PATH."""

UPDATER_TIMEOUT_S = 120.0
"""Time within which the updater must start, else it counts as missing."""
NO_SLOTS_REASON = (
    "this edgefl is not installed in slots (ROOT/a, ROOT/b, ROOT/current); update it by hand on the board"
)
ENTRY_POINT_PREFIX = "edgefl."


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPack:
    """Task pack in a slot, with its projects."""

    version: str
    projects: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """Bundles installed in a slot; `serials` and `expiries` are those of the newest by bundle name, packs too."""

    packs: Mapping[str, InstalledPack] = field(default_factory=dict)
    serials: Mapping[str, int] = field(default_factory=dict)
    expiries: Mapping[str, int] = field(default_factory=dict)

    def with_bundle(self, manifest: BundleManifest, pack: InstalledPack | None) -> SlotRecord:
        """Returns the record with a bundle added; `pack` is None for a release or removal."""
        packs = {other: installed for other, installed in self.packs.items() if other != manifest.name}
        if pack is not None:
            packs[manifest.name] = pack
        return replace(self.with_serial(manifest), packs=packs)

    def with_serial(self, manifest: BundleManifest) -> SlotRecord:
        """Returns the record with the serial of a bundle that changed nothing else."""
        serials = {**self.serials, manifest.name: manifest.serial}
        return replace(self, serials=serials, expiries={**self.expiries, manifest.name: manifest.expires})

    def compute_time(self) -> float:
        """Returns Unix seconds: this board's clock, or the time of the newest signature where the clock is behind."""
        return max(time.time(), *self.serials.values(), 0)


@dataclass(frozen=True, slots=True)
class Slots:
    """A/B slots of a board."""

    root: Path

    @property
    def work_dir(self) -> Path:
        return self.root / "update"

    def path(self, name: str) -> Path:
        return self.root / name

    def python(self, name: str) -> Path:
        return self.root / name / "bin" / "python"

    def site_packages(self, name: str) -> Path:
        """Returns a slot's site-packages folder; all slots share the running Python version."""
        base = str(self.root / name)
        return Path(sysconfig.get_path("purelib", "venv", {"base": base, "platbase": base}))

    def get_active_slot(self) -> str:
        """Returns the name of the slot that `current` points to.

        Raises:
            ConfigError: it points to none: this board has no slots.
        """
        try:
            name = str((self.root / CURRENT_LINK).readlink())
        except OSError:
            name = ""
        slot = Path(name).name
        if slot not in SLOT_NAMES or name not in {slot, str(self.root / slot)}:
            raise ConfigError(
                f"{self.root / CURRENT_LINK} must be a symbolic link to one of the slots {' and '.join(SLOT_NAMES)} "
                f"beside it, got {name or 'none'}; a board that was installed by hand is updated by hand"
            )
        return slot

    def get_idle_slot(self) -> str:
        """Returns the name of the other slot."""
        return next(name for name in SLOT_NAMES if name != self.get_active_slot())

    def activate(self, name: str) -> None:
        """Activates a slot atomically and durably by replacing the `current` link."""
        new_link = self.root / f".{CURRENT_LINK}.new"
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(name)
        new_link.replace(self.root / CURRENT_LINK)
        sync_directory(self.root)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the slots for one updater.

        Raises:
            StoreError: another one holds the lock.
        """
        with (self.work_dir / LOCK_FILE).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"another updater is at work in {self.root}; let it finish") from None
            yield

    def load_record(self, name: str) -> SlotRecord:
        """Returns the bundle record of a slot; empty for one installed without bundles."""
        path = self.path(name) / RECORD_FILE
        try:
            value = parse_json(path.read_bytes())
            packs = {str(key): _parse_pack(entry) for key, entry in value["packs"].items()}
            serials, expiries = (
                {str(key): int(number) for key, number in value.get(name, {}).items()}
                for name in ("serials", "expiries")
            )
        except FileNotFoundError:
            return SlotRecord()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BundleError(f"{path} is damaged ({error}); install the board's slots again") from None
        return SlotRecord(packs=packs, serials=serials, expiries=expiries)

    def write_record(self, name: str, record: SlotRecord) -> None:
        with open_atomic(self.path(name) / RECORD_FILE, mode=0o644) as file:
            file.write(json.dumps({"v": RECORD_FORMAT, **asdict(record)}).encode())

    def list_projects(self, name: str) -> dict[str, str]:
        """Returns the projects in a slot's site-packages, with their versions."""
        distributions = importlib.metadata.distributions(path=[str(self.site_packages(name))])
        return {
            str(canonicalize_name(distribution.name)): distribution.version
            for distribution in distributions
            if distribution.name
        }

    def get_release_version(self, name: str) -> str:
        """Returns the version of edgefl in a slot.

        Raises:
            BundleError: edgefl is missing.
        """
        version = self.list_projects(name).get(DISTRIBUTION)
        if version is None:
            raise BundleError(f"slot {self.path(name)} holds no {DISTRIBUTION}; install the board's slots again")
        return version


def find_own_slots(prefix: Path | None = None) -> Slots | None:
    """Returns the slots that this process runs in; None outside of slots.

    Args:
        prefix: the virtual environment of this process.
    """
    prefix = prefix or Path(sys.prefix)
    slots = Slots(prefix.parent)
    if prefix.name not in {*SLOT_NAMES, CURRENT_LINK}:
        return None
    try:
        slots.get_active_slot()
    except ConfigError:
        return None
    return slots


def list_project_files(folder: Path, projects: Iterable[str]) -> set[str]:
    """Returns the relative paths of these projects' files in a site-packages folder."""
    names, files = set(projects), set()
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        if distribution.name and canonicalize_name(distribution.name) in names:
            files |= {str(path) for path in distribution.files or ()}
    return files


def _parse_pack(value: Mapping[str, object]) -> InstalledPack:
    projects = value["projects"]
    if not isinstance(projects, list):
        raise TypeError(f"projects of a pack must be a list, got {projects!r}")
    return InstalledPack(version=str(value["version"]), projects=tuple(map(str, projects)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareUpdateConfig:
    """Slots of this installation (None without slots) and the folder of trusted keys."""

    slots: Slots | None
    signers: Path = TRUSTED_KEYS_FOLDER
    updater_timeout_s: float = UPDATER_TIMEOUT_S

    def load_keys(self, state_dir: Path | None = None) -> TrustedKeys:
        """Returns the trusted keys, after the lists of signers that the updater or the agent followed.

        Raises:
            BundleError, ConfigError: as `TrustedKeys.load`.
        """
        folders = [self.slots.work_dir] if self.slots is not None else []
        folders += [state_dir / MODELS_FOLDER] if state_dir is not None else []
        return TrustedKeys.load(self.signers, *(folder / LIST_FILE for folder in folders))


def load_update_config(signers: Path = TRUSTED_KEYS_FOLDER) -> SoftwareUpdateConfig:
    """Returns the configuration of this process."""
    return SoftwareUpdateConfig(slots=find_own_slots(), signers=signers)


def get_install_facts(config: SoftwareUpdateConfig, state_dir: Path | None = None) -> Json:
    """Returns installation facts for capabilities: remote updatability, signed models alone, and installed packs."""
    try:
        trusted = config.load_keys(state_dir)
    except EdgeflError as error:
        return {"installs": {"able": False, "reason": str(error)}, "signed_models": True}
    facts: Json = {"signed_models": bool(trusted.keys)}
    if config.slots is None:
        return {"installs": {"able": False, "reason": NO_SLOTS_REASON}, **facts}
    try:
        slot = config.slots.get_active_slot()
        record = config.slots.load_record(slot)
        packs = {
            name: {"version": pack.version, **_list_entry_points(pack.projects)}
            for name, pack in sorted(record.packs.items())
        }
    except (EdgeflError, importlib.metadata.PackageNotFoundError) as error:
        return {"installs": {"able": False, "reason": str(error)}, **facts}
    installs: Json = {"able": bool(trusted.keys), "slot": slot, "signers": sorted(trusted.keys), "packs": packs}
    if not trusted.keys:
        installs["reason"] = (
            f"it trusts no signer: {config.signers} holds no key; on the board: edgefl device trust KEY.pem"
        )
    if (current := trusted.current_list) is not None:
        installs["list"] = {"version": current.version, "expires": current.expires}
    if ends := {name: end for name, end in sorted(record.expiries.items()) if name in {DISTRIBUTION, *packs}}:
        installs["valid_until"] = ends
    if expired := _list_expired(trusted, record):
        installs["expired"] = expired
    return {"installs": installs, **facts}


def _list_expired(trusted: TrustedKeys, record: SlotRecord) -> list[str]:
    """Returns what has expired since it was accepted: somebody may hold newer ones back."""
    now_s = record.compute_time()
    installed = {DISTRIBUTION, *record.packs}
    expired = [f"{name}" for name, end in sorted(record.expiries.items()) if name in installed and now_s >= end]
    try:
        trusted.check_list_expiry(now_s)
    except BundleError as error:
        expired.append(str(error))
    return expired


def _list_entry_points(projects: tuple[str, ...]) -> dict[str, list[str]]:
    """Returns the entry points of a pack by kind: tasks, codecs and local steps."""
    names_by_kind: dict[str, list[str]] = {}
    for project in projects:
        for point in importlib.metadata.distribution(project).entry_points:
            if point.group.startswith(ENTRY_POINT_PREFIX):
                names_by_kind.setdefault(point.group.removeprefix(ENTRY_POINT_PREFIX), []).append(point.name)
    return names_by_kind


def verify_bundle(bundle: Bundle, trusted_keys: TrustedKeys, slots: Slots) -> list[WheelEntry]:
    """Returns a bundle's compatible wheels; none for a removal.

    Raises:
        BundleError: its signers are not trusted, it has expired, is incompatible with this board, or not newer.
    """
    slot = slots.get_active_slot()
    manifest, record = bundle.manifest, slots.load_record(slot)
    trusted_keys.verify(bundle, record.compute_time())  # first: nothing of an unsigned bundle is used
    if manifest.kind is BundleKind.MODEL:
        raise BundleError("it holds a model, which is deployed and not installed")
    check_order(manifest, record, slots.get_release_version(slot))
    return select_compatible_wheels(manifest.wheels, list(sys_tags()))


def check_order(manifest: BundleManifest, record: SlotRecord, release: str) -> None:
    """Raises `BundleError` for a bundle that is older than the installed one, or was signed before it."""
    newest_serial = record.serials.get(manifest.name, 0)
    if manifest.serial < newest_serial:
        raise BundleError(
            f"{manifest.name} {manifest.version} was signed before what this board has (serial {manifest.serial}, "
            f"it has {newest_serial}); sign it anew if it is really wanted"
        )
    present = _get_present_version(manifest, record, release)
    if present is not None and is_newer(present, manifest.version) and not manifest.allow_downgrade:
        raise BundleError(
            f"{manifest.name} {manifest.version} is older than the {present} that this board has; a way back has to "
            "be signed as one: edgefl signing sign --allow-downgrade"
        )


def is_installed(manifest: BundleManifest, record: SlotRecord, release: str) -> bool:
    """Returns whether this very bundle is already installed in a slot."""
    present = _get_present_version(manifest, record, release)
    if manifest.kind is BundleKind.SIGNERS:
        return True
    if manifest.kind is BundleKind.REMOVAL:
        return present is None
    has_version = present is not None and Version(present) == Version(manifest.version)
    return has_version and record.serials.get(manifest.name) == manifest.serial


def _get_present_version(manifest: BundleManifest, record: SlotRecord, release: str) -> str | None:
    """Returns the version of the release or pack of this name that a slot has."""
    if manifest.kind is BundleKind.RELEASE:
        return release
    pack = record.packs.get(manifest.name)
    return pack.version if pack is not None else None
