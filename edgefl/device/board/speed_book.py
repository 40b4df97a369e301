"""Keeps how fast this board trains, over restarts, and has measured what is not known while nothing else is to do.

A speed holds for one set of library versions, accelerator and threads, and for a task that does not say what its
examples look like for one shard. What cannot be measured is kept too, with the reason, and not tried every day anew.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from edgefl import DISTRIBUTION
from edgefl.device.board.fits import NUMPY_BYTES, TORCH_BYTES, lacks, usable_backends
from edgefl.device.board.vitals import memory_available_bytes
from edgefl.errors import EdgeflError, StoreError
from edgefl.files import write_whole
from edgefl.processes import end_with_parent
from edgefl.tasks.backends import needs_torch, numpy_models
from edgefl.tasks.registry import make_task
from edgefl.types import Json
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

FILE_NAME = "speeds.json"
QUIET_S = 20.0
"""Nothing is measured before the agent has had nothing to do for so long: runs and first heartbeats come first."""
WITHIN_S = 90.0
MAX_REASON_CHARS = 200
LIBRARIES = (DISTRIBUTION, "numpy", "torch")


class SpeedBook:
    """Used by the agent's thread; `told` by any.

    Args:
        state_dir: where the speeds are kept.
        on_measured: called in a thread of its own when there is a new one.
        clock: monotonic seconds.
        quiet_s: see `QUIET_S`.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        on_measured: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._path, self._on_measured, self._clock, self._quiet_s = state_dir / FILE_NAME, on_measured, clock, quiet_s
        self._kept = _load(self._path)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._busy_s = clock()
        self.version = 0

    def told(self) -> Json:
        """Returns `steps_per_s` by task, and in `speed_errors` why one is missing, for the board's capabilities."""
        with self._lock:
            kept = dict(self._kept)
        speeds = {name: entry["steps_per_s"] for name, entry in kept.items() if "steps_per_s" in entry}
        errors = {name: entry["error"] for name, entry in kept.items() if "error" in entry}
        return {**({"steps_per_s": speeds} if speeds else {}), **({"speed_errors": errors} if errors else {})}

    def busy(self) -> None:
        """Says that there is work: a measurement that is under way ends, and is begun again another time."""
        self._busy_s = self._clock()
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()

    def idle(self, shards: Mapping[str, str], *, facts: Json, accelerator: str, threads: int | None) -> None:
        """Says that there is nothing to do: begins to measure the next speed that is not known, if it is time."""
        if self._clock() - self._busy_s < self._quiet_s or self._child is not None:
            return
        try:
            self._measure_next(shards, facts, accelerator, threads)
        except Exception:
            # A task of the user's own may raise anything where it is made, and the board must stay.
            log.exception("cannot measure how fast this board is")
            self._busy_s = self._clock()

    def close(self) -> None:
        """Ends a measurement that is under way."""
        self.busy()

    def _measure_next(self, shards: Mapping[str, str], facts: Json, accelerator: str, threads: int | None) -> None:
        wanted = dict(measurable(shards, facts))
        self._forget_all_but(wanted)
        for name, shard in wanted.items():
            stamp = _stamp(name, shard, accelerator, threads)
            if self._kept.get(name, {}).get("stamp") != stamp and _has_room(name):
                question: Json = {"task": name, "shard": shard, "accelerator": accelerator, "threads": threads}
                self._begin(name, stamp, question)
                return

    def _begin(self, name: str, stamp: Json, question: Json) -> None:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "edgefl.device.board.speed"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 one system call, no locks
            )
        except OSError as error:
            log.warning("cannot measure the speed of task %s: %s", name, error)
            self._busy_s = self._clock()
            return
        self._child = child
        threading.Thread(target=self._follow, args=(child, name, stamp, question), name="speed", daemon=True).start()

    def _follow(self, child: subprocess.Popen[bytes], name: str, stamp: Json, question: Json) -> None:
        try:
            out, _ = child.communicate(json.dumps(question).encode(), timeout=WITHIN_S)
            entry = _entry(out, child.returncode)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            entry = {"error": f"one step takes more than {WITHIN_S:g} s"}
        except (OSError, ValueError) as error:
            entry = {"error": str(error)[:MAX_REASON_CHARS]}
        with self._lock:
            if self._child is not child:  # it was ended for something better
                return
            self._child = None
            self._kept = {**self._kept, name: {**entry, "stamp": stamp}}
            self.version += 1
        log.info("task %s: %s", name, entry.get("error") or f"{entry['steps_per_s']:g} steps a second")
        self._save()
        self._on_measured()

    def _forget_all_but(self, wanted: Mapping[str, str]) -> None:
        with self._lock:
            if self._kept.keys() - wanted.keys():
                self._kept = {name: entry for name, entry in self._kept.items() if name in wanted}
                self.version += 1

    def _save(self) -> None:
        try:
            write_whole(self._path, json.dumps({"v": 1, "speeds": self._kept}).encode())
        except StoreError as error:
            log.warning("cannot keep how fast this board is: %s", error)


def measurable(shards: Mapping[str, str], facts: Json) -> list[tuple[str, str]]:
    """Returns what this board can train, TASK or TASK/MODEL where only a smaller model fits, each with its shard."""
    usable, found = usable_backends(facts), []
    if "numpy" in lacks(facts):
        return []
    for name, shard in sorted(shards.items()):
        try:
            torch = needs_torch(make_task(name))
        except EdgeflError:  # the agent says what is wrong with a shard that it cannot use
            continue
        if not torch or "torch" in usable:
            found.append((name, shard))
        elif models := numpy_models(name):
            found.append((f"{name}/{models[0]}", shard))
    return found


def _has_room(name: str) -> bool:
    """Whether a process that trains fits into what is free; if not now, then perhaps later."""
    task, _, model = name.partition("/")
    free = memory_available_bytes()
    torch = needs_torch(make_task(task, {"model": model} if model else {}))
    return free is None or free >= NUMPY_BYTES + (TORCH_BYTES if torch else 0)


def _stamp(name: str, shard: str, accelerator: str, threads: int | None) -> Json:
    task, _, _ = name.partition("/")
    versions = {library: _installed(library) for library in LIBRARIES}
    stamp: Json = {"python": platform.python_version(), **versions, "accelerator": accelerator, "threads": threads}
    if getattr(make_task(task), "input_shape", None) is None:
        stamp["shard"] = _shard_stamp(Path(shard))
    return stamp


def _shard_stamp(path: Path) -> list[object]:
    """A file's name, size and time; of a folder that a board collects into only the name, since it always changes."""
    try:
        stat = path.stat()
    except OSError:
        return [str(path)]
    return [str(path)] if path.is_dir() else [str(path), stat.st_size, stat.st_mtime_ns]


def _entry(out: bytes, code: int) -> Json:
    try:
        answer = parse_json(out)
        if "error" in answer:
            return {"error": str(answer["error"]["message"])[:MAX_REASON_CHARS]}
        return {
            "steps_per_s": float(answer["steps_per_s"]),
            "batch_size": int(answer["batch_size"]),
            "backend": str(answer["backend"]),
        }
    except (ValueError, KeyError, TypeError):
        return {"error": f"training ended with code {code} on this board"}


def _load(path: Path) -> dict[str, Json]:
    """Returns what was kept; nothing where that is damaged, and it is measured again."""
    try:
        kept = parse_json(path.read_bytes())
        speeds = kept["speeds"] if kept["v"] == 1 else {}
        return {str(name): _checked(entry) for name, entry in speeds.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}


def _checked(entry: Json) -> Json:
    told = {"error": str(entry["error"])} if "error" in entry else {"steps_per_s": float(entry["steps_per_s"])}
    return {**entry, **told, "stamp": entry["stamp"]}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
