"""Privileged updater: processes a request, builds and tries the idle slot, keeps it or rolls back.

Each step is on disk before it begins (`status`), so that a kill or power cut is safe between any two steps: the next
start resumes or rolls back, and at no instant is a slot active that was not completely built and tested. It does not
trust the agent: it copies the bundle into its own folder first and verifies the copy.

In its trial the agent of a new version must reach coordinator and broker, and stay up. One that never starts, starts
anew again and again, or cannot reach a coordinator or a broker that the version before does reach has failed: it
needs the first for its work, and the second to be notified of a fixed release. Where neither version reaches the
coordinator, the network is down: then the wait is repeated, for an hour at most. After that the board is rolled back
as well: an unproven version is not kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.utils import canonicalize_version

from edgefl.core.errors import BundleError, EdgeflError, StoreError
from edgefl.core.safe_parsing import parse_json
from edgefl.device.rollouts.download import check_free_space
from edgefl.device.updates.build import SubprocessRunner, WheelSet, build_slot, delete_slot, run_smoke_test
from edgefl.device.updates.protocol import (
    AgentHealth,
    InstallAttempt,
    InstallPhase,
    InstallRequest,
    InstallResult,
    UpdaterStatus,
    copy_bundle,
    read_health,
    read_request,
    read_status,
    write_status,
)
from edgefl.device.updates.slots import InstalledPack, Slots, is_installed, verify_bundle
from edgefl.system.atomic_files import is_locked
from edgefl.system.bundles.archive import Bundle, BundleKind, BundleManifest, read_bundle
from edgefl.system.bundles.keys import LIST_FILE, TrustedKeys
from edgefl.system.bundles.wheels import check_wheel, compute_unpacked_bytes

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25

MAX_ATTEMPTS = 3
"""Number of interrupted builds or trials after which a request is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimeouts:
    """Timeouts of a trial.

    `health_s` until the agent has reached the coordinator, else the updater checks whether the former version can;
    `settle_s` it must stay up then; `away_s` the network may be down for both.
    """

    health_s: float = 300.0
    settle_s: float = 10.0
    away_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedHealth:
    """Health that the agent must report."""

    token: str
    slot: str
    previous_slot: str
    version: str
    packs: Mapping[str, str] = field(default_factory=dict)


def wait_until_healthy(
    expected: ExpectedHealth, slots: Slots, state_dir: Path, runner: SubprocessRunner, timeouts: TrialTimeouts
) -> None:
    """Returns when the new version is healthy.

    Raises:
        BundleError: it is not.
    """
    end_s = time.monotonic() + timeouts.away_s
    while True:
        until_s = min(time.monotonic() + timeouts.health_s, end_s)
        health = _poll_health(expected, state_dir, until_s, lambda health: health.connected)
        if health is not None and health.connected:
            _check_stays_up(health, state_dir, timeouts.settle_s)
            if health.linked is not None and can_reach(slots, expected.previous_slot, state_dir, runner, "broker"):
                _check_reaches_broker(expected, state_dir, until_s, timeouts)
            return
        if health is None:
            raise BundleError(f"its agent did not come up within {timeouts.health_s:g} s")
        if can_reach(slots, expected.previous_slot, state_dir, runner, "coordinator"):
            raise BundleError(
                f"its agent does not reach the coordinator within {timeouts.health_s:g} s, "
                "and the version before does"
            )
        if time.monotonic() >= end_s:
            raise BundleError(f"no version reached the coordinator for {timeouts.away_s:g} s; it is not proven")
        log.info("neither version reaches the coordinator; waiting for the network")


def can_reach(slots: Slots, slot: str, state_dir: Path, runner: SubprocessRunner, target: str) -> bool:
    """Returns whether a slot's edgefl reaches the target (`coordinator` or `broker`) now."""
    command = [
        str(slots.python(slot)), "-I", "-m", "edgefl", "-q", "device", "status", "--state", str(state_dir),
        "--format", "json",
    ]  # fmt: skip
    process = runner.run_as_device(command, timeout_s=120.0)
    try:
        return process.returncode == 0 and parse_json(process.stdout).get(target) is not None
    except ValueError:
        return False


def _poll_health(
    expected: ExpectedHealth, state_dir: Path, until_s: float, is_sufficient: Callable[[AgentHealth], bool]
) -> AgentHealth | None:
    """Returns the new agent's health once sufficient, else its last one at the deadline, or None."""
    last_health = None
    while time.monotonic() < until_s:
        health = read_health(state_dir)
        if health is not None and _is_expected(health, expected):
            last_health = health
            if is_sufficient(health):
                break
        time.sleep(POLL_INTERVAL_S)
    return last_health


def _is_expected(health: AgentHealth, expected: ExpectedHealth) -> bool:
    return (
        health.token == expected.token
        and health.slot == expected.slot
        and canonicalize_version(health.version) == canonicalize_version(expected.version)
        and health.packs == expected.packs
    )


def _check_stays_up(health: AgentHealth, state_dir: Path, settle_s: float) -> None:
    """Raises unless the same agent process is still up after `settle_s`."""
    time.sleep(settle_s)
    current = read_health(state_dir)
    if current is None or current.boot_id != health.boot_id or not is_locked(state_dir / "lock"):
        raise BundleError(f"its agent reached the coordinator and was gone again within {settle_s:g} s")


def _check_reaches_broker(expected: ExpectedHealth, state_dir: Path, until_s: float, timeouts: TrialTimeouts) -> None:
    """Raises unless the agent reaches the broker within its time."""
    until_s = max(until_s, time.monotonic() + timeouts.settle_s)
    health = _poll_health(expected, state_dir, until_s, lambda health: health.linked is True)
    if health is None or not health.linked:
        raise BundleError(
            f"its agent does not reach the broker within {timeouts.health_s:g} s, and the version before does"
        )


_DEFAULT_TIMEOUTS = TrialTimeouts()


class Updater:
    """Updater, for one run.

    Args:
        slots: of the board.
        state_dir: the device's state directory.
        signers: folder of the trusted keys.
        restart_agent: restarts the device's agent; raises BundleError on failure.
        timeouts: of the agent's trial.
        on_step: called after each step; the tests end the process there.
    """

    def __init__(
        self,
        *,
        slots: Slots,
        state_dir: Path,
        signers: Path,
        restart_agent: Callable[[], None],
        timeouts: TrialTimeouts = _DEFAULT_TIMEOUTS,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._slots, self._state_dir, self._signers, self._restart_agent = slots, state_dir, signers, restart_agent
        self._timeouts, self._on_step = timeouts, on_step
        self._runner = SubprocessRunner(state_dir)
        self._last_result: InstallResult | None = None

    def run(self) -> InstallResult | None:
        """Finishes an interrupted attempt, then processes the agent's request; returns the result.

        Raises:
            ConfigError: there are no slots.
            StoreError: another updater is running.
        """
        self._slots.get_active_slot()
        self._slots.work_dir.mkdir(mode=0o755, exist_ok=True)
        with self._slots.lock():
            status = read_status(self._slots)
            self._last_result = status.outcome
            if status.trial is not None:
                return self._resume(status.trial)
            request = read_request(self._state_dir)
            if request is None or (status.outcome is not None and status.outcome.id == request.id):
                return None
            return self._process_request(request, attempts=1)

    def _process_request(self, request: InstallRequest, *, attempts: int) -> InstallResult:
        active_slot = self._slots.get_active_slot()
        attempt = InstallAttempt(
            id=request.id,
            sha256=request.sha256,
            step=InstallPhase.BUILDING,
            old=active_slot,
            new=self._slots.get_idle_slot(),
            attempts=attempts,
        )
        try:
            self._write_attempt(attempt)
            self._on_step("taken")
            manifest = self._build_slot(request, attempt)
        except EdgeflError as error:
            return self._abort(attempt, error)
        except OSError as error:
            return self._abort(attempt, StoreError(f"the slot cannot be built: {error}"))
        if manifest is None:
            return self._complete(
                attempt, InstallResult(id=attempt.id, state="running", reason="nothing was to be done")
            )
        attempt = replace(
            attempt,
            step=InstallPhase.ACTIVATING,
            kind=str(manifest.kind),
            name=manifest.name,
            version=manifest.version,
        )
        return self._run_trial(attempt)

    def _build_slot(self, request: InstallRequest, attempt: InstallAttempt) -> BundleManifest | None:
        """Builds and tests the idle slot; returns None when this bundle is installed already."""
        copy = self._slots.work_dir / "bundle.tar"
        copy_bundle(self._state_dir, request, copy)
        self._on_step("copied")
        with copy.open("rb") as file:
            bundle = read_bundle(file)
            entries = verify_bundle(bundle, self._follow_lists(bundle), self._slots)
            manifest = bundle.manifest
            record = self._slots.load_record(attempt.old)
            if is_installed(manifest, record, self._slots.get_release_version(attempt.old)):
                # Of a removal without effect too: a bundle signed earlier must not be installed after it.
                if manifest.serial > record.serials.get(manifest.name, 0):
                    self._slots.write_record(attempt.old, record.with_serial(manifest))
                return None
            wheel_set = self._unpack_wheels(bundle, [entry.file for entry in entries])
        self._on_step("unpacked")
        try:
            self._fill_slot(attempt, wheel_set)
        except Exception:  # whatever failed, half a slot must not stay; it is raised again
            delete_slot(self._slots, attempt.new)
            raise
        return manifest

    def _follow_lists(self, bundle: Bundle) -> TrustedKeys:
        """Returns the trusted keys after the lists of signers in a bundle, which stay even if it is refused."""
        path = self._slots.work_dir / LIST_FILE
        former = TrustedKeys.load(self._signers, path)
        trusted = former.follow(bundle.signatures.lists)
        trusted.save(path, former)
        return trusted

    def _fill_slot(self, attempt: InstallAttempt, wheel_set: WheelSet) -> None:
        build_slot(self._slots, attempt.new, wheel_set, self._runner)
        self._on_step("built")
        self._write_record(attempt, wheel_set)
        self._run_smoke_test(attempt, wheel_set)
        os.sync()  # all of the slot is on the card before `current` points to it
        self._on_step("tested")

    def _unpack_wheels(self, bundle: Bundle, files: list[str]) -> WheelSet:
        folder = self._slots.work_dir / "wheels"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        chosen = [entry for entry in bundle.manifest.wheels if entry.file in files]
        check_free_space(self._slots.root, sum(entry.num_bytes for entry in chosen), "to unpack the bundle takes")
        names = {}
        for entry in chosen:
            path = folder / entry.file
            bundle.extract_wheel(entry, path)
            names[path] = check_wheel(path, entry, bundle.manifest.kind)
        check_free_space(self._slots.root, sum(map(compute_unpacked_bytes, names)), "to install the wheels takes")
        return WheelSet(
            manifest=bundle.manifest, files_by_wheel=names, projects=tuple(entry.project for entry in chosen)
        )

    def _write_record(self, attempt: InstallAttempt, wheel_set: WheelSet) -> None:
        manifest = wheel_set.manifest
        pack = (
            InstalledPack(version=manifest.version, projects=wheel_set.projects)
            if manifest.kind is BundleKind.PACK
            else None
        )
        record = self._slots.load_record(attempt.old).with_bundle(manifest, pack)
        self._slots.write_record(attempt.new, record)

    def _run_smoke_test(self, attempt: InstallAttempt, wheel_set: WheelSet) -> None:
        manifest = wheel_set.manifest
        version = (
            manifest.version if manifest.kind is BundleKind.RELEASE else self._slots.get_release_version(attempt.old)
        )
        packs = self._slots.load_record(attempt.new).packs
        projects = {project for pack in packs.values() for project in pack.projects}
        run_smoke_test(self._slots, attempt.new, version=version, projects=projects, runner=self._runner)

    def _run_trial(self, attempt: InstallAttempt) -> InstallResult:
        """Activates the new slot and keeps it when its agent is healthy."""
        self._delete_work_files()  # the slot is built; frees room for the status file
        try:
            attempt = self._activate_new_slot(attempt)
        except OSError as error:  # a full disk must not keep the board in an untested version
            store_error = StoreError(f"it cannot be tried: {error}")
            if self._slots.get_active_slot() == attempt.old:
                return self._abort(attempt, store_error)
            return self._roll_back(replace(attempt, step=InstallPhase.ROLLING_BACK, reason=str(store_error)))
        try:
            self._restart_agent()
            self._on_step("restarted")
            wait_until_healthy(
                self._make_expected_health(attempt),
                self._slots,
                self._state_dir,
                self._runner,
                self._timeouts,
            )
        except EdgeflError as error:
            return self._roll_back(replace(attempt, step=InstallPhase.ROLLING_BACK, reason=str(error)))
        self._on_step("proven")
        log.info("%s %s runs in slot %s", attempt.name, attempt.version, attempt.new)
        return self._complete(
            attempt, InstallResult(id=attempt.id, state="running", name=attempt.name, version=attempt.version)
        )

    def _activate_new_slot(self, attempt: InstallAttempt) -> InstallAttempt:
        """Activates the new slot; returns the attempt in its trial phase."""
        self._write_attempt(replace(attempt, step=InstallPhase.ACTIVATING))
        self._on_step("marked")
        self._slots.activate(attempt.new)
        self._on_step("flipped")
        # A new token for every attempt: an agent that has it was started after this activation, and health written
        # before a power cut does not count.
        attempt = replace(attempt, step=InstallPhase.TRIAL, token=secrets.token_hex(16))
        self._write_attempt(attempt)
        self._on_step("in trial")
        return attempt

    def _make_expected_health(self, attempt: InstallAttempt) -> ExpectedHealth:
        record = self._slots.load_record(attempt.new)
        return ExpectedHealth(
            token=attempt.token,
            slot=attempt.new,
            previous_slot=attempt.old,
            version=self._slots.get_release_version(attempt.new),
            packs={name: pack.version for name, pack in record.packs.items()},
        )

    def _roll_back(self, attempt: InstallAttempt) -> InstallResult:
        """Rolls back to the former slot; idempotent."""
        log.warning("%s %s is left again: %s", attempt.name, attempt.version, attempt.reason)
        try:
            self._write_attempt(attempt)
        except OSError as error:  # a full disk must not keep the board in a broken version
            log.warning("that it is left cannot be written down: %s", error)
        self._on_step("leaving")
        self._slots.activate(attempt.old)
        self._on_step("flipped back")
        try:
            self._restart_agent()
        except EdgeflError as error:
            log.warning("the agent of the version before could not be restarted: %s", error)
        self._on_step("restarted the old one")
        outcome = InstallResult(
            id=attempt.id, state="rolled-back", reason=attempt.reason, name=attempt.name, version=attempt.version
        )
        return self._complete(attempt, outcome)

    def _resume(self, attempt: InstallAttempt) -> InstallResult:
        """Resumes after a kill of the updater or a power cut."""
        log.info("goes on with %s, which was cut off while it was %s", attempt.id, attempt.step)
        if attempt.step is InstallPhase.BUILDING:
            return self._resume_build(attempt)
        if attempt.step is InstallPhase.ROLLING_BACK:
            reason = attempt.reason
        elif attempt.step is InstallPhase.TRIAL and attempt.old == self._slots.get_active_slot():
            reason = "it was left, which could not be noted then"
        elif attempt.attempts >= MAX_ATTEMPTS:
            reason = f"it was cut off {attempt.attempts} times while it was tried"
        else:
            return self._run_trial(replace(attempt, attempts=attempt.attempts + 1))
        return self._roll_back(replace(attempt, step=InstallPhase.ROLLING_BACK, reason=reason))

    def _resume_build(self, attempt: InstallAttempt) -> InstallResult:
        # It was installed without regard to this attempt; the updater must not delete or try an active slot.
        if attempt.new == self._slots.get_active_slot():
            return self._abort(attempt, StoreError(f"slot {attempt.new} was installed anew meanwhile, and is in use"))
        delete_slot(self._slots, attempt.new)
        if attempt.attempts >= MAX_ATTEMPTS:
            reason = f"it was cut off {attempt.attempts} times while its slot was built"
            return self._abort(attempt, BundleError(reason))
        return self._process_request(
            InstallRequest(id=attempt.id, sha256=attempt.sha256), attempts=attempt.attempts + 1
        )

    def _abort(self, attempt: InstallAttempt, error: EdgeflError) -> InstallResult:
        """Ends a request whose slot was never activated."""
        log.warning("%s is not installed: %s", attempt.id, error)
        state = "failed" if isinstance(error, StoreError) else "rejected"
        return self._complete(attempt, InstallResult(id=attempt.id, state=state, reason=" ".join(str(error).split())))

    def _complete(self, attempt: InstallAttempt, result: InstallResult) -> InstallResult:
        self._delete_work_files()
        self._last_result = result
        try:
            write_status(self._slots, UpdaterStatus(outcome=result))
        except OSError as error:  # the work is done; the next start finds the attempt and completes it again
            log.warning("what became of %s cannot be written down: %s", attempt.id, error)
        self._on_step("ended")
        log.info("%s: %s %s", attempt.id, result.state, result.reason or "")
        return result

    def _delete_work_files(self) -> None:
        for path in (self._slots.work_dir / "bundle.tar", self._slots.work_dir / "wheels"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _write_attempt(self, attempt: InstallAttempt) -> None:
        write_status(self._slots, UpdaterStatus(trial=attempt, outcome=self._last_result))
