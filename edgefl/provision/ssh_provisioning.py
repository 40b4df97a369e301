"""Provisioning of running hosts over ssh: probe, copy, install, check data, join, wait.

Every step is idempotent. The token goes last, to a host that can use it, through the standard input of a command
and never in its arguments.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgefl.core.errors import ConfigError, DataError, EdgeflError, JoinError, NetworkError
from edgefl.core.safe_parsing import parse_json
from edgefl.device.enrolment.join_file import JoinFile, format_remedy
from edgefl.device.updates.slots import PROVISIONED_COMMAND
from edgefl.provision import provisioning_files
from edgefl.provision.payload import make_payload, render_shard_drop_ins
from edgefl.provision.ssh_host import CommandResult, SshConnection, SshHost

MIN_PYTHON = (3, 11)
MIN_FREE_MB = 400
MAX_IGNORED_SKEW_S = 300.0
DAY_S = 86_400.0
log = logging.getLogger(__name__)
REMOTE_PYTHON = "/opt/edgefl/current/bin/python"
_UNPACK_SCRIPT = 'umask 077; d=$(mktemp -d /var/tmp/edgefl.XXXXXXXX) && echo "edgefl: folder $d" && tar -xf - -C "$d"'
_INSTALL_JOIN_FILE_SCRIPT = """set -e
mkdir -p /etc/edgefl
umask 077
cat >/etc/edgefl/join.json.new
mv /etc/edgefl/join.json.new /etc/edgefl/join.json
systemctl reset-failed edgefl-join.service 2>/dev/null || true
systemctl start --no-block edgefl-join.service
"""
_REMOTE_FOLDER = re.compile(r"/var/tmp/edgefl\.[A-Za-z0-9]+\Z")  # noqa: S108 on the host, made by mktemp

ProvisionOutcome = Literal["joined", "already joined", "updated", "would join", "would update", "failed"]
"""Outcome for a host; those with `would` belong to a dry run."""
ProvisionStep = Literal["reach", "copy", "install", "data", "join"]
"""Last step reached by a host."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """One row of the result table; `text` gives the remedy, or other notes."""

    host: SshHost
    outcome: ProvisionOutcome
    step: ProvisionStep
    seconds: float
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshProvisionOptions:
    """Options common to all hosts.

    Args:
        version: of edgefl to install.
        ca_fingerprint: the fleet, by its CA.
        issue_token: makes a token for a device, once it is needed.
        extra_files: more files of the payload: wheels, a lock, signers.
        is_offline: `extra_files` has all wheels.
        become: the program to become root; empty for none.
        wait_s: timeout of a join.
        is_dry_run: probe only.
        clock: monotonic seconds.
        now: unix seconds.
        ssh_options: more words for ssh.
        on_step: called at the start of every step.
    """

    version: str
    ca_fingerprint: str
    issue_token: Callable[[SshHost], str] = field(repr=False)
    clock: Callable[[], float]
    now: Callable[[], float]
    extra_files: Mapping[str, bytes | Path] = field(default_factory=dict)
    is_offline: bool = False
    become: str = "sudo"
    wait_s: int = 300
    is_dry_run: bool = False
    ssh_options: Sequence[str] = ()
    on_step: Callable[[SshHost, ProvisionStep], None] = lambda _host, _step: None


def provision_hosts(hosts: Sequence[SshHost], options: SshProvisionOptions, *, jobs: int) -> list[HostResult]:
    """Returns the result of each host, in order; `jobs` run at a time, failures are isolated."""
    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="ssh") as pool:
        return list(pool.map(lambda host: provision_host(host, options), hosts))


def provision_host(host: SshHost, options: SshProvisionOptions) -> HostResult:
    """Returns the result of one host; never raises for faults of the host."""
    outcome: ProvisionOutcome
    started_s = options.clock()
    board = _HostProvisioning(host, options)
    try:
        with SshConnection(host, options.ssh_options) as connection:
            outcome, text = board.run(connection)
    except EdgeflError as error:
        outcome, text = "failed", str(error)
    except Exception as error:  # the boundary of one host: the others continue
        log.exception("%s", host.label)
        outcome, text = "failed", f"{type(error).__name__}: {error}; the log above says where"
    return HostResult(
        host=host, outcome=outcome, step=board.step, seconds=options.clock() - started_s, text=" ".join(text.split())
    )


class _HostProvisioning:
    """Provisioning of one host; `step` is the current one."""

    def __init__(self, host: SshHost, options: SshProvisionOptions) -> None:
        self._host, self._options = host, options
        self._become: tuple[str, ...] = ()
        self._skipped_packs = ""
        self.step: ProvisionStep = "reach"

    def run(self, connection: SshConnection) -> tuple[ProvisionOutcome, str]:
        """Returns the outcome, and notes worth knowing."""
        options, host = self._options, self._host
        self._start_step("reach")
        result = connection.run(
            "sh",
            "-s",
            "--",
            options.become,
            stdin=provisioning_files.find_path("board/probe.sh").read_bytes(),
            timeout_s=120,
        )
        facts = HostFacts.from_result(result)
        is_member = self._is_member(facts)
        if is_member and facts.version == options.version:
            if not facts.is_active:
                raise JoinError("it has joined, but its device does not run: sudo journalctl -u edgefl-device -n 20")
            return "already joined", self._format_notes(facts)
        facts.check(now=options.now(), is_offline=options.is_offline, target=host.target)
        if options.is_dry_run:
            return ("would update" if is_member else "would join"), self._format_notes(facts)
        self._become = facts.become or ()
        self._install(connection, is_update=is_member)
        if not is_member:
            self._check_data(connection)
        self._start_step("join")
        if not is_member:
            self._send_join_file(connection)
        self._wait_until_joined(connection)
        return ("updated" if is_member else "joined"), self._format_notes(facts)

    def _start_step(self, step: ProvisionStep) -> None:
        self.step = step
        self._options.on_step(self._host, step)

    def _is_member(self, facts: HostFacts) -> bool:
        device = facts.device
        if not device:
            return False
        fleet, device_id = device.get("fleet"), device.get("device_id")
        if device.get("ca_fingerprint") != self._options.ca_fingerprint:
            raise JoinError(
                f"it belongs to another fleet, {fleet}, as {device_id}; to take it out of there: "
                "sudo systemctl stop edgefl-device && sudo rm -r /var/lib/edgefl"
            )
        if device_id != self._host.name:
            raise JoinError(f"it is in this fleet already, as {device_id}; correct its name in the hosts file")
        return True

    def _install(self, connection: SshConnection, *, is_update: bool) -> None:
        self._start_step("copy")
        files = make_payload("", {**self._options.extra_files, **render_shard_drop_ins(self._host.shards)})
        del files["join.json"]
        result = connection.send_files(files, "sh", "-c", _UNPACK_SCRIPT)
        folder = result.values.get("folder", [""])[-1]
        try:
            if result.status or not _REMOTE_FOLDER.match(folder):
                raise NetworkError(f"the payload cannot be copied: {result.get_last_line()}")
            self._start_step("install")
            start_options = [] if is_update else ["--no-start"]
            result = self._run_as_root(connection, "sh", f"{folder}/install.sh", folder, *start_options)
            if result.status:
                raise ConfigError(result.get_last_line().removeprefix("edgefl-install: failed: "))
            self._skipped_packs = result.values.get("packs", [""])[-1]
        finally:
            if _REMOTE_FOLDER.match(folder):
                connection.run("rm", "-rf", folder, timeout_s=120)

    def _check_data(self, connection: SshConnection) -> None:
        self._start_step("data")
        paths = list(self._host.shards.values())
        if not paths:
            return
        result = self._run_as_root(
            connection, REMOTE_PYTHON, "-I", "-m", "edgefl.device.enrolment.join_file", "edgefl", *paths
        )
        try:
            reasons = dict(parse_json(result.output.splitlines()[-1])["unreadable"])
        except (ValueError, LookupError, TypeError):
            raise DataError(f"its data cannot be looked at: {result.get_last_line()}") from None
        for path, reason in reasons.items():
            raise DataError(
                f"{path}: {reason}; nothing was changed. If it is there, let the device read it: "
                f"{format_remedy(path, 'edgefl')}"
            )

    def _send_join_file(self, connection: SshConnection) -> None:
        host = self._host
        file = JoinFile(token=self._options.issue_token(host), name=host.name, role=host.role, shards=host.shards)
        result = self._run_as_root(connection, "sh", "-c", _INSTALL_JOIN_FILE_SCRIPT, stdin=file.to_text().encode())
        if result.status:
            raise JoinError(f"the join cannot be started: {result.get_last_line()}")

    def _wait_until_joined(self, connection: SshConnection) -> None:
        wait_s = self._options.wait_s
        script = provisioning_files.find_path("board/await.sh").read_bytes()
        result = self._run_as_root(connection, "sh", "-s", "--", str(wait_s), stdin=script, timeout_s=3 * wait_s + 60)
        if result.status:
            reason = result.values.get("reason", [""])[-1] or f"no word after {wait_s} s"
            raise JoinError(f"{reason}; more: sudo journalctl -u edgefl-join -u edgefl-device")

    def _run_as_root(
        self, connection: SshConnection, *words: str, stdin: bytes = b"", timeout_s: float = 3600.0
    ) -> CommandResult:
        return connection.run(*self._become, *words, stdin=stdin, timeout_s=timeout_s)

    def _format_notes(self, facts: HostFacts) -> str:
        notes = [facts.format_skew(self._options.now())]
        if self._skipped_packs:
            notes.append(f"without its task packs {self._skipped_packs}; bring them with edgefl devices install")
        shards = facts.device.get("shards")
        if isinstance(shards, dict) and shards != dict(self._host.shards):
            listing = ", ".join(f"{task}={path}" for task, path in shards.items()) or "none"
            notes.append(
                f"its data is {listing}; another with: {PROVISIONED_COMMAND.format('device shard add TASK PATH')}"
            )
        return "; ".join(note for note in notes if note)
