"""The privileged half of an update: takes a request, builds the idle slot, tries it, keeps it or goes back.

What it is at is on disk before it begins (`status`), so that it can be killed, or the power go, between any two
steps: the next start goes on or goes back, and at no instant is a slot in use that was not built and tried as a
whole. It trusts nothing that the agent says: it copies the bundle into its own folder first and verifies the copy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl.bundles.archive import Bundle, read_bundle
from edgefl.bundles.keys import Signers
from edgefl.bundles.manifest import Kind, Manifest
from edgefl.bundles.wheels import unpacked_bytes, wheel_names
from edgefl.device.slots.acceptance import accepted_wheels, is_there
from edgefl.device.slots.building import Brought, build_slot, clear_slot
from edgefl.device.slots.children import Children
from edgefl.device.slots.inbox import InstallRequest, copy_bundle, read_request
from edgefl.device.slots.layout import Pack, Slots
from edgefl.device.slots.proving import Expected, Pace, prove
from edgefl.device.slots.smoke import smoke_test
from edgefl.device.slots.status import Outcome, Step, Trial, UpdaterStatus, read_status, write_status
from edgefl.errors import BundleError, EdgeflError, StoreError, StoreFullError

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""A request that was cut off so often while its slot was built or tried is given up."""
SPARE_BYTES = 32 * 1024 * 1024
"""What must be left on the disk beside what an update brings, for the board itself."""
_USUAL_PACE = Pace()

Restart = Callable[[], None]
"""Restarts the device's agent; raises BundleError when that does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What the updater works on: the slots, the device's state, whom it trusts, and how the agent is restarted."""

    slots: Slots
    state_dir: Path
    signers: Path
    restart: Restart


class Updater:
    """One run of the updater.

    Args:
        board: see `Board`.
        pace: how long an agent may take to come up.
        on_step: told what was just done; the tests end the process there.
    """

    def __init__(
        self, board: Board, *, pace: Pace = _USUAL_PACE, on_step: Callable[[str], None] = lambda _: None
    ) -> None:
        self._board, self._slots, self._pace, self._on_step = board, board.slots, pace, on_step
        self._children = Children(board.state_dir)
        self._last: Outcome | None = None

    def run(self) -> Outcome | None:
        """Finishes what an earlier run was at, then does what the agent asks for; returns what became of it.

        Raises:
            ConfigError: there are no slots.
            StoreError: another updater runs.
        """
        self._slots.in_use()
        self._slots.work.mkdir(mode=0o755, exist_ok=True)
        with self._slots.locked():
            status = read_status(self._slots)
            self._last = status.outcome
            if status.trial is not None:
                return self._resume(status.trial)
            request = read_request(self._board.state_dir)
            if request is None or (status.outcome is not None and status.outcome.id == request.id):
                return None
            return self._take(request, attempts=1)

    def _take(self, request: InstallRequest, *, attempts: int) -> Outcome:
        old = self._slots.in_use()
        trial = Trial(
            id=request.id,
            sha256=request.sha256,
            step=Step.BUILDING,
            old=old,
            new=self._slots.idle(),
            attempts=attempts,
        )
        try:
            self._write(trial)
            self._on_step("taken")
            manifest = self._build(request, trial)
        except EdgeflError as error:
            return self._give_up(trial, error)
        except OSError as error:
            return self._give_up(trial, StoreError(f"the slot cannot be built: {error}"))
        if manifest is None:
            return self._end(trial, Outcome(id=trial.id, state="running", reason="nothing was to be done"))
        trial = replace(
            trial, step=Step.FLIPPING, kind=str(manifest.kind), name=manifest.name, version=manifest.version
        )
        return self._try(trial)

    def _build(self, request: InstallRequest, trial: Trial) -> Manifest | None:
        """Builds and tries the idle slot; None when this very bundle is in use already."""
        copy = self._slots.work / "bundle.tar"
        copy_bundle(self._board.state_dir, request, copy)
        self._on_step("copied")
        with copy.open("rb") as file:
            bundle = read_bundle(file)
            entries = accepted_wheels(bundle, Signers.load(self._board.signers), self._slots)
            manifest = bundle.manifest
            record = self._slots.record(trial.old)
            if is_there(manifest, record, self._slots.release(trial.old)):
                # Of a removal too, which may find nothing: what was signed before it must not come after it.
                if manifest.serial > record.serials.get(manifest.name, 0):
                    self._slots.write_record(trial.old, record.with_serial(manifest.name, manifest.serial))
                return None
            brought = self._unpacked(bundle, [entry.file for entry in entries])
        self._on_step("unpacked")
        try:
            self._fill(trial, brought)
        except Exception:
            clear_slot(self._slots, trial.new)
            raise
        return manifest

    def _fill(self, trial: Trial, brought: Brought) -> None:
        build_slot(self._slots, trial.new, brought, self._children)
        self._on_step("built")
        self._keep_record(trial, brought)
        self._smoke(trial, brought)
        os.sync()  # all of the slot is on the card before `current` leads to it
        self._on_step("tested")

    def _unpacked(self, bundle: Bundle, files: list[str]) -> Brought:
        folder = self._slots.work / "wheels"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        chosen = [entry for entry in bundle.manifest.wheels if entry.file in files]
        self._check_room(sum(entry.num_bytes for entry in chosen), "unpack the bundle")
        names = {}
        for entry in chosen:
            path = folder / entry.file
            bundle.unpack(entry, path)
            names[path] = wheel_names(path, entry, bundle.manifest.kind)
        self._check_room(sum(map(unpacked_bytes, names)), "install the wheels")
        return Brought(manifest=bundle.manifest, names=names, projects=tuple(entry.project for entry in chosen))

    def _check_room(self, num_bytes: int, what: str) -> None:
        """Raises `StoreFullError` unless the board keeps some room for itself beside what is to come."""
        free = shutil.disk_usage(self._slots.root).free
        if free < num_bytes + SPARE_BYTES:
            raise StoreFullError(
                f"to {what} takes {num_bytes} bytes and {SPARE_BYTES} must stay free; "
                f"{self._slots.root} has {free} left"
            )

    def _keep_record(self, trial: Trial, brought: Brought) -> None:
        manifest = brought.manifest
        pack = Pack(version=manifest.version, projects=brought.projects) if manifest.kind is Kind.PACK else None
        record = self._slots.record(trial.old).with_bundle(manifest.name, pack, manifest.serial)
        self._slots.write_record(trial.new, record)

    def _smoke(self, trial: Trial, brought: Brought) -> None:
        manifest = brought.manifest
        version = manifest.version if manifest.kind is Kind.RELEASE else self._slots.release(trial.old)
        packs = self._slots.record(trial.new).packs
        projects = {project for pack in packs.values() for project in pack.projects}
        smoke_test(self._slots, trial.new, version=version, projects=projects, children=self._children)

    def _try(self, trial: Trial) -> Outcome:
        """Brings the new slot into use and keeps it when its agent proves itself."""
        self._clear_work()  # it is built: what brought it takes the room that a note may need
        try:
            trial = self._flipped(trial)
        except OSError as error:  # a disk that is full must not keep the board in a version that nobody judges
            failed = StoreError(f"it cannot be tried: {error}")
            if self._slots.in_use() == trial.old:
                return self._give_up(trial, failed)
            return self._leave(replace(trial, step=Step.LEAVING, reason=str(failed)))
        try:
            self._board.restart()
            self._on_step("restarted")
            prove(self._expected(trial), self._slots, self._board.state_dir, self._children, self._pace)
        except EdgeflError as error:
            return self._leave(replace(trial, step=Step.LEAVING, reason=str(error)))
        self._on_step("proven")
        log.info("%s %s runs in slot %s", trial.name, trial.version, trial.new)
        return self._end(trial, Outcome(id=trial.id, state="running", name=trial.name, version=trial.version))

    def _flipped(self, trial: Trial) -> Trial:
        """Makes `current` lead to the new slot; returns the trial that begins."""
        self._write(replace(trial, step=Step.FLIPPING))
        self._on_step("marked")
        self._slots.flip(trial.new)
        self._on_step("flipped")
        # A new token for every try: an agent that knows it has started after this flip, and what an agent said before
        # a power cut does not count.
        trial = replace(trial, step=Step.TRIAL, token=secrets.token_hex(16))
        self._write(trial)
        self._on_step("in trial")
        return trial

    def _expected(self, trial: Trial) -> Expected:
        record = self._slots.record(trial.new)
        return Expected(
            token=trial.token,
            slot=trial.new,
            old=trial.old,
            version=self._slots.release(trial.new),
            packs={name: pack.version for name, pack in record.packs.items()},
        )

    def _leave(self, trial: Trial) -> Outcome:
        """Goes back to the slot before; the same when it is done twice."""
        log.warning("%s %s is left again: %s", trial.name, trial.version, trial.reason)
        try:
            self._write(trial)
        except OSError as error:  # a disk that is full must not keep the board in a version that does not work
            log.warning("that it is left cannot be written down: %s", error)
        self._on_step("leaving")
        self._slots.flip(trial.old)
        self._on_step("flipped back")
        try:
            self._board.restart()
        except EdgeflError as error:
            log.warning("the agent of the version before could not be restarted: %s", error)
        self._on_step("restarted the old one")
        outcome = Outcome(
            id=trial.id, state="rolled-back", reason=trial.reason, name=trial.name, version=trial.version
        )
        return self._end(trial, outcome)

    def _resume(self, trial: Trial) -> Outcome:
        """Goes on after the updater was killed, or the power went."""
        log.info("goes on with %s, which was cut off while it was %s", trial.id, trial.step)
        if trial.step is Step.BUILDING:
            return self._resume_building(trial)
        if trial.step is Step.LEAVING:
            reason = trial.reason
        elif trial.step is Step.TRIAL and trial.old == self._slots.in_use():
            reason = "it was left, which could not be noted then"
        elif trial.attempts >= MAX_ATTEMPTS:
            reason = f"it was cut off {trial.attempts} times while it was tried"
        else:
            return self._try(replace(trial, attempts=trial.attempts + 1))
        return self._leave(replace(trial, step=Step.LEAVING, reason=reason))

    def _resume_building(self, trial: Trial) -> Outcome:
        # Whoever installed it took no notice of this trial; what is in use is not the updater's to clear or to try.
        if trial.new == self._slots.in_use():
            return self._give_up(trial, StoreError(f"slot {trial.new} was installed anew meanwhile, and is in use"))
        clear_slot(self._slots, trial.new)
        if trial.attempts >= MAX_ATTEMPTS:
            reason = f"it was cut off {trial.attempts} times while its slot was built"
            return self._give_up(trial, BundleError(reason))
        return self._take(InstallRequest(id=trial.id, sha256=trial.sha256), attempts=trial.attempts + 1)

    def _give_up(self, trial: Trial, error: EdgeflError) -> Outcome:
        """Ends a request whose slot was never used."""
        log.warning("%s is not installed: %s", trial.id, error)
        state = "failed" if isinstance(error, StoreError) else "refused"
        return self._end(trial, Outcome(id=trial.id, state=state, reason=" ".join(str(error).split())))

    def _end(self, trial: Trial, outcome: Outcome) -> Outcome:
        self._clear_work()
        self._last = outcome
        try:
            write_status(self._slots, UpdaterStatus(outcome=outcome))
        except OSError as error:  # what was done is done; the next start finds the trial and ends it once more
            log.warning("what became of %s cannot be written down: %s", trial.id, error)
        self._on_step("ended")
        log.info("%s: %s %s", trial.id, outcome.state, outcome.reason or "")
        return outcome

    def _clear_work(self) -> None:
        for path in (self._slots.work / "bundle.tar", self._slots.work / "wheels"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _write(self, trial: Trial) -> None:
        write_status(self._slots, UpdaterStatus(trial=trial, outcome=self._last))
