"""Compiles a run's task when it starts, for boards without torch; its record has the file's SHA-256."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl.coordinator.execution.fleet_view import find_training_blocker, is_selected, is_selected_evaluator
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.config import RunConfig
from edgefl.core.errors import RETRYABLE_STORE_ERRORS, EdgeflError, TaskError
from edgefl.core.protocol import COMPILED_KEY, FOR_ALL_KEY, ONNX
from edgefl.core.types import DeviceInfo, Json, Role
from edgefl.engine.assembly.compiled import can_be_compiled, choose_batch_size
from edgefl.engine.assembly.components import RunComponents
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.store import Store
from edgefl.system.atomic_files import make_private_directory
from edgefl.system.processes import StoppedCallError, call_in_subprocess

log = logging.getLogger(__name__)

MODULE = "edgefl.tasks.compiler.process"
"""Run as a process of its own: torch's hundreds of megabytes go with it."""
COMPILE_TIMEOUT_S = 1800.0
NEEDED_PACKAGES = ("torch", "onnx", "onnxscript")
TASK_COMPILED, TASK_NOT_COMPILED = "task-compiled", "task-not-compiled"
"""Kinds of events."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compiles tasks of runs.

    Attributes:
        bases: folder of what boards fetch.
        cache: folder of earlier compilations.
        registry: of the fleet.
        store: has the runs' records.
        should_stop: whether the run or the coordinator is to stop, which ends a compilation at once.
        call: runs `MODULE`.
    """

    bases: Path
    cache: Path
    registry: DeviceRegistry
    store: Store
    should_stop: Callable[[], bool] = lambda: False
    call: Callable[..., Json] = call_in_subprocess

    def record_compiled(self, record: RunRecord, run: RunComponents) -> RunRecord:
        """Returns the record of a run that starts, with the SHA-256 of its compiled task.

        Where that fails and some boards have torch, the run goes on with those, and its history says why.

        Raises:
            StoppedCallError: it was stopped meanwhile.
            TaskError: it cannot be compiled, and no board could train it otherwise.
        """
        started_s = time.monotonic()
        try:
            sha256, is_cached = self._compile(run)
        except (*RETRYABLE_STORE_ERRORS, StoppedCallError):
            raise  # a full card says nothing of the task: the run waits, as for any other write
        except EdgeflError as error:
            message = f"task {run.config.run.task} cannot be compiled for boards without torch: {error}"
            if run.config.run.backend == ONNX or not _has_trainer_with_torch(run, self.registry):
                raise TaskError(message) from None
            log.warning("run %s: %s", record.run_id, message)
            self._record_event(record.run_id, TASK_NOT_COMPILED, message)
            return record
        seconds = time.monotonic() - started_s
        if is_cached:
            message = f"compiled task {sha256[:12]} is that of an earlier run ({seconds:.1f} s)"
        else:
            message = f"compiled task {sha256[:12]} in {seconds:.1f} s"
        log.info("run %s: %s", record.run_id, message)
        config = replace(run.config, run=replace(run.config.run, compiled=sha256)).to_json()
        with self.store.batch(durable=True):
            self.store.set_run_config(record.run_id, config)
            self._record_event(record.run_id, TASK_COMPILED, message)
        return replace(record, config=config)

    def _compile(self, run: RunComponents) -> tuple[str, bool]:
        """Returns the SHA-256 of the file for boards, and whether an earlier run had it compiled."""
        make_private_directory(self.bases)
        request: Json = {
            "task": run.config.run.task,
            "options": dict(run.config.task),
            "batch_size": choose_batch_size(run.strategy, run.config),
            "constant": [] if run.adapted is None else sorted(run.adapted.task.parts.constant_names),
            "folder": str(self.bases),
            "cache": str(self.cache),
            "since_s": time.time(),
        }
        reply = self.call(
            MODULE,
            request,
            description="compiling the task",
            timeout_s=COMPILE_TIMEOUT_S,
            should_stop=self.should_stop,
        )
        return str(reply["sha256"]), bool(reply["is_cached"])

    def _record_event(self, run_id: str, kind: str, message: str) -> None:
        self.store.record_event(kind, message, at=time.time(), run_id=run_id)


def should_compile(run: RunComponents, registry: DeviceRegistry) -> bool:
    """Returns whether a run's task is to be compiled when it starts: all boards train so, or one has no torch."""
    if not (can_be_compiled(run) and may_compile(run.config, registry)):
        return False
    selection = run.policy.selection
    return run.config.run.backend == ONNX or any(
        info.role == Role.EVALUATOR or selection.is_satisfied_by(info) for info in _list_small(run.config, registry)
    )


def may_compile(config: RunConfig, registry: DeviceRegistry) -> bool:
    """Returns whether a run's task is to be compiled if it is one of torch, which is known when it has been made."""
    if config.job.name or config.run.compiled is not None or config.run.backend not in ("auto", ONNX):
        return False
    return config.run.backend == ONNX or (can_compile_here() and any(_list_small(config, registry)))


def can_compile_here() -> bool:
    """Returns whether this machine has what a compilation imports."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED_PACKAGES)


def expect_compiled(run: RunComponents, registry: DeviceRegistry) -> RunComponents:
    """Returns a run as it will be when its task has been compiled; for what is checked before."""
    if not should_compile(run, registry):
        return run
    return replace(run, header={**run.header, COMPILED_KEY: {FOR_ALL_KEY: run.config.run.backend == ONNX}})


def _list_small(config: RunConfig, registry: DeviceRegistry) -> Iterator[DeviceInfo]:
    """Yields the members that can train a compiled task and nothing of torch, by what they reported last."""
    for info in _list_members(config, registry):
        if find_training_blocker(info, needs_torch=True) and not find_training_blocker(
            info, needs_torch=True, compiled={FOR_ALL_KEY: False}
        ):
            yield info


def _list_members(config: RunConfig, registry: DeviceRegistry) -> Iterator[DeviceInfo]:
    """Yields the trainers that the run file selects, and the evaluators of its task; none that is drained.

    One that is offline counts: it may come back while the run goes on.
    """
    task, devices = config.run.task, config.devices
    for info in registry.list_devices():
        if registry.is_drained(info.device_id):
            continue
        if is_selected_evaluator(info, task=task, excluded=devices.exclude) or (
            info.role == Role.TRAINER
            and is_selected(info, task=task, groups=devices.groups, names=devices.names, excluded=devices.exclude)
        ):
            yield info


def _has_trainer_with_torch(run: RunComponents, registry: DeviceRegistry) -> bool:
    return any(
        info.role == Role.TRAINER and not find_training_blocker(info, needs_torch=True)
        for info in _list_members(run.config, registry)
    )
