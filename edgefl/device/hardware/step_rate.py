"""Step rate cache: persistent training speeds and memory, measured when the board is idle.

A speed is valid for one set of library versions, accelerator and threads; for a task that does not declare the shape
of its examples, also for one shard; for a compiled task, for one file. Failures are stored with the reason, and not
retried every day.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgefl import DISTRIBUTION
from edgefl.core.errors import EdgeflError, StoreError
from edgefl.core.protocol import get_speed_name
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.hardware.health import read_available_memory_bytes
from edgefl.device.hardware.requirements import (
    NUMPY_BYTES,
    TORCH_BYTES,
    TaskTraits,
    find_unsupported_backends,
    list_usable_backends,
    make_confinement,
    read_task_traits,
)
from edgefl.system.atomic_files import write_atomic
from edgefl.system.confinement import make_command, make_environment
from edgefl.system.processes import exit_with_parent
from edgefl.tasks.compiled.artefact import read_manifest
from edgefl.tasks.registry import CONFIGURED, list_numpy_models

log = logging.getLogger(__name__)

FILE_NAME = "speeds.json"
MIN_IDLE_S = 20.0
"""Idle time of the agent before a measurement: runs and first heartbeats have priority."""
MEASURE_TIMEOUT_S = 90.0
MAX_REASON_CHARS = 200
LIBRARIES = (DISTRIBUTION, "numpy", "torch", "onnxruntime")


@dataclass(frozen=True, slots=True)
class Measurable:
    """What can be measured: a task with its shard, or a compiled task with its file.

    Attributes:
        name: TASK or TASK/MODEL, as a run file has them.
        path: of the shard, or of the file.
        is_compiled: it is a file.
    """

    name: str
    path: str
    is_compiled: bool = False


class StepRateCache:
    """Step rate cache; used by the agent's thread, `get_facts` by any.

    Args:
        state_dir: of the stored speeds.
        on_measured: called in a separate thread after each measurement.
        compiled_dir: of the compiled tasks' files, and of others; None for none.
        clock: monotonic seconds.
        min_idle_s: see `MIN_IDLE_S`.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        on_measured: Callable[[], None],
        compiled_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        min_idle_s: float = MIN_IDLE_S,
    ) -> None:
        self._path, self._on_measured, self._clock, self._min_idle_s = (
            state_dir / FILE_NAME,
            on_measured,
            clock,
            min_idle_s,
        )
        self._compiled_dir = compiled_dir
        self._compiled_names: dict[str, tuple[str, str] | None] = {}
        self._entries = _load(self._path)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._last_work_s = clock()
        self.version = 0

    def get_facts(self) -> Json:
        """Returns facts for the board's capabilities, each by task.

        These are `steps_per_s`, `training_bytes`, the peak of the process that trained, and `speed_errors` of what
        is missing.
        """
        with self._lock:
            entries = dict(self._entries)
        facts = {
            fact: {name: entry[key] for name, entry in entries.items() if key in entry}
            for fact, key in (
                ("steps_per_s", "steps_per_s"),
                ("training_bytes", "peak_bytes"),
                ("speed_errors", "error"),
            )
        }
        return {fact: values for fact, values in facts.items() if values}

    def on_work(self) -> None:
        """Cancels a running measurement because there is work; it is restarted later."""
        self._last_work_s = self._clock()
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()

    def on_idle(
        self,
        shards: Mapping[str, str],
        *,
        facts: Json,
        accelerator: str,
        threads: int | None,
        read_traits: Callable[[str], TaskTraits] = read_task_traits,
        is_confined: bool = True,
    ) -> None:
        """Starts to measure the next unknown speed, if the board was idle for long enough."""
        if self._clock() - self._last_work_s < self._min_idle_s or self._child is not None:
            return
        try:
            self._measure_next(shards, facts, accelerator, threads, read_traits, is_confined=is_confined)
        except Exception:  # a custom task may raise anything in its constructor, and the board must survive
            log.exception("cannot measure how fast this board is")
            self._last_work_s = self._clock()

    def close(self) -> None:
        """Cancels a running measurement."""
        self.on_work()

    def _measure_next(
        self,
        shards: Mapping[str, str],
        facts: Json,
        accelerator: str,
        threads: int | None,
        read_traits: Callable[[str], TaskTraits],
        *,
        is_confined: bool,
    ) -> None:
        tasks = [Measurable(*task) for task in list_measurable_tasks(shards, facts, read_traits)]
        if "torch" not in list_usable_backends(facts):
            tasks += self._list_compiled(shards, facts)
        self._remove_unlisted(tasks)
        for task in tasks:
            traits = TaskTraits(needs_torch=False, has_shape=False) if task.is_compiled else read_traits(task.name)
            fingerprint = _make_fingerprint(task.path, accelerator, threads, has_shape=traits.has_shape)
            if self._entries.get(task.name, {}).get("stamp") != fingerprint and _has_memory(traits):
                source = {"compiled" if task.is_compiled else "shard": task.path}
                request: Json = {"task": task.name, **source, "accelerator": accelerator, "threads": threads}
                self._start_measurement(task, fingerprint, request, is_confined=is_confined)
                return

    def _list_compiled(self, shards: Mapping[str, str], facts: Json) -> list[Measurable]:
        """Returns the compiled tasks of which this board has a shard, by the file that was used last."""
        if self._compiled_dir is None or "onnx" not in list_usable_backends(facts):
            return []
        found: dict[str, Measurable] = {}
        for path in sorted(self._compiled_dir.glob("*"), key=_get_modified_s):
            if path.name not in self._compiled_names:  # a file is named by its content
                self._compiled_names[path.name] = _read_names(path)
            task, name = self._compiled_names[path.name] or ("", "")
            if task in shards:
                found[name] = Measurable(name, str(path), is_compiled=True)
        return [*found.values()]

    def _start_measurement(self, task: Measurable, fingerprint: Json, request: Json, *, is_confined: bool) -> None:
        state_dir, name = self._path.parent, task.name
        confinement = (
            make_confinement(state_dir, "benchmark", [task.path], str(request["accelerator"]))
            if is_confined
            else None
        )
        try:
            child = subprocess.Popen(
                make_command("edgefl.device.hardware.benchmark", confinement),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=make_environment(confinement),
                start_new_session=True,
                preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
            )
        except OSError as error:
            log.warning("cannot measure the speed of task %s: %s", name, error)
            self._last_work_s = self._clock()
            return
        self._child = child
        threading.Thread(
            target=self._wait_for_result, args=(child, name, fingerprint, request), name="speed", daemon=True
        ).start()

    def _wait_for_result(self, child: subprocess.Popen[bytes], name: str, fingerprint: Json, request: Json) -> None:
        try:
            output, _ = child.communicate(json.dumps(request).encode(), timeout=MEASURE_TIMEOUT_S)
            entry = _parse_result(output, child.returncode)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            entry = {"error": f"one step takes more than {MEASURE_TIMEOUT_S:g} s"}
        except (OSError, ValueError) as error:
            entry = {"error": str(error)[:MAX_REASON_CHARS]}
        with self._lock:
            if self._child is not child:  # it was cancelled
                return
            self._child = None
            self._entries = {**self._entries, name: {**entry, "stamp": fingerprint}}
            self.version += 1
        log.info("task %s: %s", name, entry.get("error") or f"{entry['steps_per_s']:g} steps a second")
        self._save()
        self._on_measured()

    def _remove_unlisted(self, tasks: Iterable[Measurable]) -> None:
        names = {task.name for task in tasks}
        with self._lock:
            if self._entries.keys() - names:
                self._entries = {name: entry for name, entry in self._entries.items() if name in names}
                self.version += 1

    def _save(self) -> None:
        try:
            write_atomic(self._path, json.dumps({"v": 1, "speeds": self._entries}).encode())
        except StoreError as error:
            log.warning("cannot keep how fast this board is: %s", error)


def list_measurable_tasks(
    shards: Mapping[str, str], facts: Json, read_traits: Callable[[str], TaskTraits] = read_task_traits
) -> list[tuple[str, str]]:
    """Returns trainable tasks (TASK, or TASK/MODEL where only a smaller model fits) with their shards."""
    usable, tasks = list_usable_backends(facts), []
    if "numpy" in find_unsupported_backends(facts):
        return []
    for name, shard in sorted(shards.items()):
        if name in CONFIGURED:  # how long an iteration takes depends on the run file
            continue
        try:
            traits = read_traits(name)
        except EdgeflError:  # the agent reports the error of a shard that it cannot use
            continue
        if traits.is_job:
            continue
        if not traits.needs_torch or "torch" in usable:
            tasks.append((name, shard))
        elif models := list_numpy_models(name):
            tasks.append((get_speed_name(name, models[0]), shard))
    return tasks


def _has_memory(traits: TaskTraits) -> bool:
    """Returns whether a training process fits into the free memory."""
    free_bytes = read_available_memory_bytes()
    return free_bytes is None or free_bytes >= NUMPY_BYTES + (TORCH_BYTES if traits.needs_torch else 0)


def _make_fingerprint(shard: str, accelerator: str, threads: int | None, *, has_shape: bool) -> Json:
    versions = {library: _get_installed_version(library) for library in LIBRARIES}
    fingerprint: Json = {
        "python": platform.python_version(),
        **versions,
        "accelerator": accelerator,
        "threads": threads,
    }
    if not has_shape:
        fingerprint["shard"] = _make_shard_fingerprint(Path(shard))
    return fingerprint


def _make_shard_fingerprint(path: Path) -> list[object]:
    """Returns a file's name, size and time; of a folder only the name, since its content always changes."""
    try:
        stat = path.stat()
    except OSError:
        return [str(path)]
    return [str(path)] if path.is_dir() else [str(path), stat.st_size, stat.st_mtime_ns]


def _parse_result(output: bytes, exit_code: int) -> Json:
    try:
        reply = parse_json(output)
        if "error" in reply:
            return {"error": str(reply["error"]["message"])[:MAX_REASON_CHARS]}
        return {
            "steps_per_s": float(reply["steps_per_s"]),
            **({"peak_bytes": int(reply["peak_bytes"])} if reply.get("peak_bytes") else {}),
            "batch_size": int(reply["batch_size"]),
            "backend": str(reply["backend"]),
        }
    except (ValueError, KeyError, TypeError):
        return {"error": f"training ended with code {exit_code} on this board"}


def _load(path: Path) -> dict[str, Json]:
    """Returns the stored speeds; empty where damaged, so that they are measured again."""
    try:
        content = parse_json(path.read_bytes())
        speeds = content["speeds"] if content["v"] == 1 else {}
        return {str(name): _validate_entry(entry) for name, entry in speeds.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}


def _validate_entry(entry: Json) -> Json:
    result: Json = (
        {"error": str(entry["error"])} if "error" in entry else {"steps_per_s": float(entry["steps_per_s"])}
    )
    if "peak_bytes" in entry:
        result["peak_bytes"] = int(entry["peak_bytes"])
    return {**entry, **result, "stamp": entry["stamp"]}


def _read_names(path: Path) -> tuple[str, str] | None:
    """Returns TASK, and TASK or TASK/MODEL, of a compiled task's file; None of another file."""
    manifest = read_manifest(path)
    if manifest is None:
        return None
    return manifest.task, get_speed_name(manifest.task, manifest.options.get("model"))


def _get_modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another file has taken its place
        return 0.0


def _get_installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
