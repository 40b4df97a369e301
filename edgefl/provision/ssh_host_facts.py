"""Facts about a running host, and whether it can become a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgefl.core.errors import ConfigError, NetworkError
from edgefl.core.safe_parsing import parse_json
from edgefl.provision.ssh_connection import CommandResult

MIN_PYTHON = (3, 11)
MIN_FREE_MB = 400
MAX_IGNORED_SKEW_S = 300.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Output of `probe.sh`; `become` is the command prefix for root, None when there is no way.

    `device` is the content of `device.json`, empty when the host has joined no fleet.
    """

    become: tuple[str, ...] | None
    time_s: float
    machine: str
    bits: int
    has_systemd: bool
    pythons: tuple[str, ...]
    free_mb: int
    version: str | None
    is_active: bool
    device: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_result(cls, result: CommandResult) -> HostFacts:
        """Returns the facts of a command's result.

        Raises:
            NetworkError: the output is incomplete.
        """
        values = result.values
        if "end" not in values:
            raise NetworkError(f"the board cannot be asked: {result.get_last_line()}")

        def one(name: str) -> str:
            return values.get(name, [""])[-1]

        return cls(
            become=_parse_become(one("root")),
            time_s=float(one("time")) if one("time").isdecimal() else 0.0,
            machine=one("machine"),
            bits=32 if one("bits") == "32" else 64,
            has_systemd=one("systemd") == "yes",
            pythons=tuple(version for version in values.get("python", []) if version),
            free_mb=int(one("free_mb")) if one("free_mb").isdecimal() else 0,
            version=one("version") or None,
            is_active=one("active") == "active",
            device=_parse_device(one("device")),
        )

    @property
    def newest_python(self) -> tuple[int, ...]:
        return max((_parse_version(version) for version in self.pythons), default=())

    def format_skew(self, now: float) -> str:
        """Returns advice about a wrong clock, empty when it is right; `now` is unix time."""
        skew_s = self.time_s - now
        if abs(skew_s) <= MAX_IGNORED_SKEW_S:
            return ""
        distance = f"{abs(skew_s) / DAY_S:.0f} days" if abs(skew_s) > 2 * DAY_S else f"{abs(skew_s) / 60:.0f} minutes"
        return f"its clock is {distance} {'ahead' if skew_s > 0 else 'behind'}: sudo timedatectl set-ntp true"

    def check(self, *, now: float, is_offline: bool, target: str) -> None:
        """Raises if edgefl cannot be installed on the host, before anything is copied there.

        Args:
            now: unix seconds here.
            is_offline: the payload has all wheels, so neither its clock nor an index matters.
            target: the host in ssh's notation.

        Raises:
            ConfigError: it cannot be installed; the text gives the remedy.
        """
        if self.become is None:
            raise ConfigError(
                f"this user may not become root without a password: ssh as root, or allow it with: ssh -t {target} "
                "'echo \"$USER ALL=(ALL) NOPASSWD: ALL\" | sudo tee /etc/sudoers.d/edgefl'"
            )
        if not self.has_systemd:
            raise ConfigError("it has no systemd; run edgefl in a container there")
        if self.newest_python < MIN_PYTHON:
            newest = ".".join(map(str, self.newest_python)) or "none"
            raise ConfigError(
                f"it has Python {newest}, edgefl needs 3.11 or newer: update its system (Debian 12, Ubuntu 24.04, "
                "JetPack 7), or run the container (JetPack 6)"
            )
        if self.free_mb < MIN_FREE_MB:
            raise ConfigError(
                f"/opt has {self.free_mb} MB free, edgefl needs {MIN_FREE_MB}: remove what is not needed"
            )
        if self.bits == 32 and not is_offline:
            raise ConfigError(
                f"its system has 32 bits ({self.machine}), for which no index has the wheels: write a 64-bit system, "
                "or bring wheels that you built with --wheels"
            )
        if abs(self.time_s - now) > DAY_S and not is_offline:
            raise ConfigError(f"{self.format_skew(now)}, or bring the wheels with --wheels: no index can be trusted")


def _parse_become(root: str) -> tuple[str, ...] | None:
    if root == "yes":
        return ()
    return None if root in {"", "no"} else (root, "-n")


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _parse_device(text: str) -> Mapping[str, Any]:
    try:
        value = parse_json(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
