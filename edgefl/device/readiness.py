"""Before a run: says whether this board can take part, and makes it ready, so that the first round finds it warm."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgefl import __version__
from edgefl.compression.decoding import decode_body
from edgefl.device.board.fits import check_fits
from edgefl.device.board.vitals import memory_available_bytes
from edgefl.device.warm_tasks import WarmTasks
from edgefl.errors import DataError, EdgeflError, NetworkError, TaskError
from edgefl.protocol import Phase, check_version, layout_of
from edgefl.types import Json

log = logging.getLogger(__name__)

LEASE_S = 600.0
"""A model that was fetched ahead is kept so long; a run that does not begin meanwhile sends it again."""


class NotHeldError(NetworkError):
    """The model that was fetched ahead is not here any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    run: str
    version: int
    body: bytes
    until_s: float


class Readiness:
    """Used by the thread that trains; `forget` by any.

    Args:
        state_dir: where a run keeps what it is to remember.
        tasks: what this board trains.
        working: held by whoever uses the learner.
        is_at: says whether a node of this run is at work on its own; then all is warm already.
        clock: seconds, monotone.
        root: where the board's files hang.
    """

    def __init__(
        self,
        state_dir: Path,
        tasks: WarmTasks,
        *,
        working: threading.Lock,
        is_at: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
    ) -> None:
        self._root = root
        self._state_dir, self._tasks, self._working = state_dir, tasks, working
        self._is_at, self._clock = is_at, clock
        self._prepared: _Prepared | None = None

    def answer(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns what the reply to the question of a phase says: `ready`, or the `reason` why not."""
        reply: Json = {"v": 1, "run": header.get("run"), "assignment": header.get("assignment")}
        try:
            _check_protocol(header)
            if not self._is_at(str(header["run"])):
                with self._working:
                    (self._prepare if header["phase"] == Phase.PREPARE else self._can)(header, body)
        except Exception as error:  # the boundary of one question: the board must be there for the next
            ours = isinstance(error, EdgeflError)
            log.warning("cannot take part in run %s: %s", header.get("run"), error, exc_info=not ours)
            return {
                **reply,
                "ready": False,
                "reason": str(error) if ours else f"{type(error).__name__}: {error}",
            }, b""
        return {**reply, "ready": True}, b""

    def completed(self, header: Json, body: bytes) -> bytes:
        """Returns the body of an instruction with the model behind it that was fetched ahead.

        Raises:
            NotHeldError: it is not here any more.
        """
        prepared, version = self._prepared, header.get("prepared")
        if version is None:
            return body
        if prepared is None or (prepared.run, prepared.version) != (header.get("run"), version):
            raise NotHeldError(f"needs the whole model: version {version} was to be here, and is not")
        self._prepared = None
        return body + prepared.body

    def forget(self, run: str) -> None:
        """Lets go of what was prepared for a run."""
        prepared = self._prepared
        if prepared is not None and prepared.run == run:
            self._prepared = None
            log.info("run %s does not begin here; forgot its model", run)

    def tidy(self) -> None:
        """Lets go of what nobody has asked for in time."""
        prepared = self._prepared
        if prepared is not None and self._clock() >= prepared.until_s:
            self.forget(prepared.run)

    def _can(self, header: Json, _body: bytes) -> None:
        check_version(__version__, str(header["edgefl"]))
        name, needs = str(header["task"]), header.get("needs", {})
        self._tasks.check_held(name)
        check_fits(name, dict(header.get("options", {})), self._root)
        _check_room("memory", memory_available_bytes(self._root), int(needs.get("memory_bytes", 0)))
        _check_room("disk", shutil.disk_usage(self._state_dir).free, int(needs.get("disk_bytes", 0)))
        warm = self._tasks.of(header)
        own = layout_of(warm.shapes)
        if own != header["layout"]:
            raise TaskError(
                f"its task {name} has another model ({own}) than the coordinator's ({header['layout']}); "
                "update the package that it comes from"
            )
        self._tasks.data(warm)

    def _prepare(self, header: Json, body: bytes) -> None:
        self._prepared = None
        warm = self._tasks.of(header)
        training, _ = self._tasks.split(warm, float(header["test_fraction"]))
        if not len(training):
            raise DataError(f"the shard of task {warm.name} holds no example to train on")
        if body:
            decode_body(body, warm.shapes)
            until_s = self._clock() + LEASE_S
            self._prepared = _Prepared(
                run=str(header["run"]), version=int(header["version"]), body=body, until_s=until_s
            )


def _check_protocol(header: Json) -> None:
    if header.get("v") != 1:
        raise NetworkError(f"a question of version {header.get('v')!r}, this agent reads 1: update it")


def _check_room(what: str, free_bytes: int | None, needed_bytes: int) -> None:
    if free_bytes is not None and free_bytes < needed_bytes:
        raise DataError(f"it has {free_bytes / 1e6:.0f} MB of {what} free, the run needs {needed_bytes / 1e6:.0f} MB")
