"""What `edgefl doctor` says, and the checks that a coordinator and a device have in common.

Nothing here changes a byte. Time comes as an argument; what is found is said in one line, with a remedy.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from edgefl import DISTRIBUTION, __version__

PYTHON = (3, 11)
FLOWER = "1.41."
"""The one minor release whose private modules we know."""
PACKAGES = ("flwr", "numpy", "cryptography", "paho-mqtt", "onnxruntime", "torch")
DAYS_LEFT = 30
RENEWED_DAYS_LEFT = 15
"""What is renewed by itself has so many days left when that has failed for some time."""
DAY_S = 86_400.0
LOW_DISK_BYTES = 500_000_000
FULL_DISK_BYTES = 20_000_000
SKEW_S = 5.0
EARLIEST_CLOCK_S = datetime(2025, 1, 1, tzinfo=UTC).timestamp()


class Level(StrEnum):
    """How bad a finding is: with a `problem` something does not work, a `warning` may become one."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line about one thing; `remedy` is what to do, empty when all is well."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, level=Level.OK, text=text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, level=Level.WARNING, text=text, remedy=remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, level=Level.PROBLEM, text=text, remedy=remedy)


def check_software() -> list[Finding]:
    """Returns what runs here, and whether edgefl was made for it."""
    found = {name: _installed(name) for name in PACKAGES}
    told = ", ".join(f"{name} {known}" for name, known in found.items() if known)
    findings = [ok("versions", f"edgefl {__version__}, Python {platform.python_version()}, {told}")]
    if sys.version_info[:2] < PYTHON:
        findings.append(problem("versions", f"Python {platform.python_version()} is too old", "install Python 3.11"))
    flower = found["flwr"]
    if flower is None or not flower.startswith(FLOWER):
        told = f"flwr {flower} is installed" if flower else "flwr is not installed"
        findings.append(problem("versions", f"{told}, edgefl needs {FLOWER}x", f"pip install 'flwr=={FLOWER}*'"))
    return [*findings, *_foreign_packages()]


def _foreign_packages() -> list[Finding]:
    """Returns what is installed as edgefl, which on package indexes is another project."""
    found = {str(each.locate_file("")): each.version for each in distributions(name="edgefl")}
    remedy = (
        f"{sys.executable} -m pip uninstall edgefl; then install {DISTRIBUTION} anew, both write the folder edgefl"
    )
    return [
        problem(
            "versions", f"a foreign package, edgefl {known}, is installed in {place}; ours is {DISTRIBUTION}", remedy
        )
        for place, known in found.items()
    ]


def check_private(root: Path, files: Iterable[Path]) -> list[Finding]:
    """Returns whether a state directory and its keys are for their owner alone."""
    open_to_others = [path for path in (root, *files) if path.exists() and path.stat().st_mode & 0o077]
    missing = [path for path in files if not path.exists()]
    findings = [
        problem("files", f"{path} is missing", "restore it from a backup, or join or set up again")
        for path in missing
    ]
    for path in open_to_others:
        mode = "700" if path.is_dir() else "600"
        told = f"{path} can be read by others (mode {path.stat().st_mode & 0o777:o})"
        findings.append(problem("files", told, f"chmod {mode} {path}"))
    return findings or [ok("files", f"{root} and its keys are private")]


def check_disk(root: Path) -> Finding:
    """Returns how much room is left where the state is."""
    free, remedy = shutil.disk_usage(root).free, f"free some space on the disk of {root}"
    told = f"{free / 1e9:.1f} GB are free for {root}"
    if free < FULL_DISK_BYTES:
        return problem("disk", told, remedy)
    return warning("disk", told, remedy) if free < LOW_DISK_BYTES else ok("disk", told)


def check_memory_limits(root: Path = Path("/")) -> list[Finding]:
    """Returns whether the kernel keeps to a unit's memory limits; nothing where that cannot be known."""
    try:
        controllers = (root / "sys/fs/cgroup/cgroup.controllers").read_text().split()
        is_on = "memory" in controllers
    except OSError:
        try:
            rows = [line.split() for line in (root / "proc/cgroups").read_text().splitlines()]
        except OSError:
            return []
        is_on = any(row[0] == "memory" and row[-1] == "1" for row in rows if row)
    if is_on:
        return [ok("memory", "memory limits of units hold")]
    told = "the kernel's memory controller is off, so a unit's MemoryMax means nothing here"
    remedy = "on a Raspberry Pi add cgroup_enable=memory to the line of /boot/firmware/cmdline.txt, and reboot"
    return [warning("memory", told, remedy)]


def check_clock(now: float) -> Finding:
    """Returns whether this machine's clock can be right at all; `now` is its unix time."""
    told = f"this machine's clock says {datetime.fromtimestamp(now, tz=UTC):%Y-%m-%d %H:%M} UTC"
    if now < EARLIEST_CLOCK_S:
        return warning("clock", told, "set it, or switch network time on: timedatectl set-ntp true")
    return ok("clock", told)


def check_skew(skew_s: float, whose: str = "the coordinator") -> Finding:
    """Returns how far this clock and another one are apart; `skew_s` is the other minus this."""
    told = f"{whose}'s clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this one"
    if abs(skew_s) > SKEW_S:
        # Nothing of ours depends on it, but whoever compares two logs is led astray.
        return warning("clock", told, "switch network time on, on both machines: timedatectl set-ntp true")
    return ok("clock", f"{whose}'s clock and this one agree to {abs(skew_s):.1f} s")


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
    """Returns whether a certificate is of this CA, fits its key, and ends no time soon.

    Args:
        name: how it is called.
        cert_pem: the certificate; the CA's own is checked against itself.
        ca_pem: the CA's certificate.
        key_pem: its private key, None where that lies elsewhere.
        now: unix seconds.
        remedy: how to get a new one.
        renewed_by: who renews it before it ends, None when nobody does.
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
    return _dates(name, cert.not_valid_after_utc, now, remedy, renewed_by)


def _dates(name: str, end: datetime, now: float, remedy: str, renewed_by: str | None) -> Finding:
    days = (end.timestamp() - now) / DAY_S
    if days <= 0:
        return problem("certificates", f"{name} ended on {end:%Y-%m-%d}", remedy)
    told = f"{name} ends on {end:%Y-%m-%d}, in {days:.0f} days"
    if renewed_by is None:
        return warning("certificates", told, remedy) if days < DAYS_LEFT else ok("certificates", told)
    if days < RENEWED_DAYS_LEFT:
        return warning("certificates", f"{told}; {renewed_by} should have renewed it", remedy)
    return ok("certificates", f"{told}; {renewed_by} renews it before")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
