"""Findings of `edgefl doctor`, and the checks shared by coordinator and device.

Read-only. Time comes as an argument; each finding is one line, with a remedy.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Literal

from edgefl import DISTRIBUTION, __version__

MIN_PYTHON = (3, 11)
FLOWER_RELEASES = ("1.41", "1.42")
"""The minor releases that the tests run with, oldest first; older ones are not supported."""
REPORTED_PACKAGES = ("flwr", "numpy", "cryptography", "paho-mqtt", "onnxruntime", "torch")
MIN_DAYS_LEFT = 30
MIN_DAYS_LEFT_RENEWED = 15
"""Automatically renewed certificates have fewer days left only after failed renewals."""
DAY_S = 86_400.0
LOW_DISK_BYTES = 500_000_000
FULL_DISK_BYTES = 20_000_000
MAX_SKEW_S = 5.0
EARLIEST_CLOCK_S = datetime(2025, 1, 1, tzinfo=UTC).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check: of a `problem` something does not work, a `warning` may become one.

    `remedy` is empty when all is well.
    """

    check: str
    level: Literal["ok", "warning", "problem"]
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, level="ok", text=text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, level="warning", text=text, remedy=remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, level="problem", text=text, remedy=remedy)


def check_software() -> list[Finding]:
    """Returns installed versions, and whether edgefl supports them."""
    versions = {name: _get_installed_version(name) for name in REPORTED_PACKAGES}
    description = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    findings = [ok("versions", f"edgefl {__version__}, Python {platform.python_version()}, {description}")]
    if sys.version_info[:2] < MIN_PYTHON:
        findings.append(problem("versions", f"Python {platform.python_version()} is too old", "install Python 3.11"))
    return [*findings, *check_flower(versions["flwr"]), *_check_foreign_packages()]


def check_flower(version: str | None) -> list[Finding]:
    """Returns what is wrong with an installed version of Flower, None where none is."""
    release = None if version is None else re.match(r"(\d+)\.(\d+)", version)
    tested = f"edgefl is tested with {' and '.join(FLOWER_RELEASES)}"
    remedy = f"pip install 'flwr=={FLOWER_RELEASES[-1]}.*'"
    oldest, newest = ([*map(int, name.split("."))] for name in (FLOWER_RELEASES[0], FLOWER_RELEASES[-1]))
    if release is None or (found := [*map(int, release.groups())]) < oldest:
        return [problem("versions", f"flwr {version or 'none'} is installed, {tested}", remedy)]
    return [warning("versions", f"flwr {version} is installed, {tested}", remedy)] if found > newest else []


def _check_foreign_packages() -> list[Finding]:
    """Returns problems with installed packages named edgefl, which on package indexes is another project."""
    versions_by_folder = {
        str(distribution.locate_file("")): distribution.version for distribution in distributions(name="edgefl")
    }
    remedy = (
        f"{sys.executable} -m pip uninstall edgefl; then install {DISTRIBUTION} anew, both write the folder edgefl"
    )
    return [
        problem(
            "versions",
            f"a foreign package, edgefl {version}, is installed in {folder}; ours is {DISTRIBUTION}",
            remedy,
        )
        for folder, version in versions_by_folder.items()
    ]


def check_private(root: Path, files: Iterable[Path]) -> list[Finding]:
    """Checks that a state directory and its keys are private to their owner."""
    exposed = [path for path in (root, *files) if path.exists() and path.stat().st_mode & 0o077]
    missing = [path for path in files if not path.exists()]
    findings = [
        problem("files", f"{path} is missing", "restore it from a backup, or join or set up again")
        for path in missing
    ]
    for path in exposed:
        mode = "700" if path.is_dir() else "600"
        description = f"{path} can be read by others (mode {path.stat().st_mode & 0o777:o})"
        findings.append(problem("files", description, f"chmod {mode} {path}"))
    return findings or [ok("files", f"{root} and its keys are private")]


def check_disk(root: Path) -> Finding:
    """Checks the free disk space of the state directory."""
    free_bytes, remedy = shutil.disk_usage(root).free, f"free some space on the disk of {root}"
    description = f"{free_bytes / 1e9:.1f} GB are free for {root}"
    if free_bytes < FULL_DISK_BYTES:
        return problem("disk", description, remedy)
    return warning("disk", description, remedy) if free_bytes < LOW_DISK_BYTES else ok("disk", description)


def check_memory_limits(root: Path = Path("/")) -> list[Finding]:
    """Checks that the kernel enforces memory limits of units; returns nothing where unknown."""
    try:
        controllers = (root / "sys/fs/cgroup/cgroup.controllers").read_text().split()
        is_enabled = "memory" in controllers
    except OSError:
        try:
            rows = [line.split() for line in (root / "proc/cgroups").read_text().splitlines()]
        except OSError:
            return []
        is_enabled = any(row[0] == "memory" and row[-1] == "1" for row in rows if row)
    if is_enabled:
        return [ok("memory", "memory limits of units hold")]
    description = "the kernel's memory controller is off, so a unit's MemoryMax means nothing here"
    remedy = "on a Raspberry Pi add cgroup_enable=memory to the line of /boot/firmware/cmdline.txt, and reboot"
    return [warning("memory", description, remedy)]


def check_clock(now: float) -> Finding:
    """Checks that this machine's clock is plausible; `now` is its unix time."""
    description = f"this machine's clock says {datetime.fromtimestamp(now, tz=UTC):%Y-%m-%d %H:%M} UTC"
    if now < EARLIEST_CLOCK_S:
        return warning("clock", description, "set it, or switch network time on: timedatectl set-ntp true")
    return ok("clock", description)


def check_skew(skew_s: float, clock_owner: str = "the coordinator") -> Finding:
    """Checks the difference between two clocks; `skew_s` is the other minus this."""
    description = f"{clock_owner}'s clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this one"
    if abs(skew_s) > MAX_SKEW_S:
        # Nothing of ours depends on it, but a comparison of two logs is misleading.
        return warning("clock", description, "switch network time on, on both machines: timedatectl set-ntp true")
    return ok("clock", f"{clock_owner}'s clock and this one agree to {abs(skew_s):.1f} s")


def check_certificate(  # noqa: PLR0913 one keyword per fact
    name: str,
    cert_pem: bytes,
    ca_pem: bytes,
    *,
    key_pem: bytes | None = None,
    now: float,
    remedy: str,
    renewed_by: str | None = None,
) -> Finding:
    """Checks that a certificate is of this CA, fits its key, and does not expire soon.

    Args:
        name: of the certificate in messages.
        cert_pem: the certificate; the CA's own is checked against itself.
        ca_pem: the CA's certificate.
        key_pem: its private key, None where it is not available.
        now: unix seconds.
        remedy: how to get a new one.
        renewed_by: component that renews it before it expires, None for manual renewal.
    """
    from cryptography import x509  # noqa: PLC0415 slow to load, and only a doctor needs it
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # noqa: PLC0415 likewise
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415 likewise

    try:
        cert, authority = x509.load_pem_x509_certificate(cert_pem), x509.load_pem_x509_certificate(ca_pem)
        key = None if key_pem is None else load_pem_private_key(key_pem, password=None).public_key()
        cert.verify_directly_issued_by(authority)
    except InvalidSignature:
        return problem("certificates", f"{name} is not from this fleet's CA", remedy)
    except (ValueError, TypeError, KeyError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        return problem("certificates", f"{name} cannot be used: {error}", remedy)
    if key is not None and key != cert.public_key():
        return problem("certificates", f"{name} and its key do not belong together", remedy)
    return _check_dates(name, cert.not_valid_after_utc, now, remedy, renewed_by)


def _check_dates(name: str, not_after: datetime, now: float, remedy: str, renewed_by: str | None) -> Finding:
    days = (not_after.timestamp() - now) / DAY_S
    if days <= 0:
        return problem("certificates", f"{name} ended on {not_after:%Y-%m-%d}", remedy)
    description = f"{name} ends on {not_after:%Y-%m-%d}, in {days:.0f} days"
    if renewed_by is None:
        return (
            warning("certificates", description, remedy) if days < MIN_DAYS_LEFT else ok("certificates", description)
        )
    if days < MIN_DAYS_LEFT_RENEWED:
        return warning("certificates", f"{description}; {renewed_by} should have renewed it", remedy)
    return ok("certificates", f"{description}; {renewed_by} renews it before")


def _get_installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
