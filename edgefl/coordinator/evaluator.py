"""The coordinator's own evaluator: a child device process on its test shards, so that it needs no torch itself."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.membership import Membership
from edgefl.coordinator.joining.tokens import TokenTerms, make_token
from edgefl.errors import EdgeflError, JoinError, StoreError
from edgefl.processes import end_with_parent
from edgefl.protocol import EVALUATOR_NAME, JoinToken
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

RESTART_DELAY_S = 2.0
LONGEST_PAUSE_S = 300.0
STOP_TIMEOUT_S = 10.0
TOKEN_TTL_S = 600.0
TOKEN_LEFT_S = 60.0
"""A token that is valid for less than so long may run out while somebody joins with it."""
EVALUATOR_HINDERED = "evaluator-hindered"
"""The event: what keeps the coordinator's own evaluator from starting; once, however often it is tried again."""


class Process(Protocol):
    """The part of a child process that is needed here."""

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class OwnEvaluator:
    """The coordinator's own evaluator, of which there is one: who may join under its name, and its process.

    Args:
        directory: of the coordinator; the evaluator's files lie in it.
        store: knows whether it has joined before.
        members: the fleet.
        monotonic: seconds that nobody sets.

    Attributes:
        token_id: the one token that lets somebody join under its name, while there is one.
    """

    def __init__(
        self,
        directory: CoordinatorDirectory,
        store: Store,
        members: Membership,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._store, self._members, self._monotonic = directory, store, members, monotonic
        self.token_id: str | None = None
        self._token: JoinToken | None = None
        self._token_until_s = 0.0

    def started(self, shards: Mapping[str, Path], address: str) -> EvaluatorProcess:
        """Returns its process, on these test shards (by task); `address` is HOST:PORT of this coordinator."""
        state_dir = self._directory.root / "evaluator"
        process = EvaluatorProcess(
            state_dir=state_dir,
            shards={task: Path(path).resolve() for task, path in shards.items()},
            address=address,
            token=lambda: self.token(state_dir),
            log_file=self._directory.root / "evaluator.log",
            note=lambda message: self._store.record_event(EVALUATOR_HINDERED, message, at=time.time()),
        )
        process.start()
        return process

    def token(self, state_dir: Path) -> str | None:
        """Returns what it has to join with, the same while that is good; None when it has joined before.

        Raises:
            StoreError: the store cannot be used now.
        """
        known = {record.device_id for record in self._store.devices()}
        if EVALUATOR_NAME in known and (state_dir / "device.json").exists():
            return None
        if EVALUATOR_NAME in known:  # its state directory is gone, and with it the key that holds the name
            self._members.remove(EVALUATOR_NAME)
            self._token = None  # that was its one use
        now_s = self._monotonic()
        if self._token is None or now_s >= self._token_until_s:
            terms = TokenTerms(ttl_s=TOKEN_TTL_S, role="evaluator")
            self._token = make_token(self._store, self._directory, terms, now=time.time())
            self.token_id, self._token_until_s = self._token.token_id, now_s + TOKEN_TTL_S - TOKEN_LEFT_S
        return self._token.text()


class EvaluatorProcess:
    """Joins (once) and runs a device with the role evaluator; starts it again when it dies.

    What keeps it from joining may pass (a store that is in use, a full disk), so that is tried again and again.

    Args:
        state_dir: the evaluator's state directory.
        shards: task -> path of a test shard.
        address: HOST:PORT of this coordinator.
        token: returns a join token, None when the evaluator has joined; asked before each try.
        log_file: where its log goes.
        note: told once what keeps it from starting; may raise `StoreError`, and is told again then.
        spawn: starts `edgefl` with these arguments; its output goes to the file.
        delay_s: the pause after the first failure, which grows, and before it is started again.
    """

    def __init__(  # noqa: PLR0913 a keyword for each part
        self,
        *,
        state_dir: Path,
        shards: Mapping[str, Path],
        address: str,
        token: Callable[[], str | None],
        log_file: Path,
        note: Callable[[str], None],
        spawn: Callable[[list[str], BinaryIO], Process] | None = None,
        delay_s: float = RESTART_DELAY_S,
    ) -> None:
        self._state_dir, self._shards = state_dir, shards
        self._address, self._token, self._log_file, self._note = address, token, log_file, note
        self._spawn, self._delay_s, self._is_told = spawn or _spawned, delay_s, False
        self._stopping = threading.Event()
        self._process: Process | None = None
        self._thread = threading.Thread(target=self._supervise, name="evaluator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        self._thread.join(STOP_TIMEOUT_S)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _supervise(self) -> None:
        is_ready, pause_s = False, self._delay_s
        while not self._stopping.is_set():
            try:
                with self._log_file.open("ab") as output:
                    if not is_ready:
                        self._prepare(output)
                        is_ready, pause_s = True, self._delay_s
                    if not self._stopping.is_set():
                        self._run(output)
            except (EdgeflError, OSError) as error:
                self._tell(str(error))
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _run(self, output: BinaryIO) -> None:
        self._process = self._spawn(["device", "start", "--state", str(self._state_dir)], output)
        code = self._process.wait()
        if not self._stopping.is_set():
            log.warning("the evaluator ended with code %d; starting it again", code)
            self._stopping.wait(self._delay_s)

    def _tell(self, reason: str) -> None:
        if self._is_told or self._stopping.is_set():
            return
        log.error("the evaluator cannot start, and is tried again: %s; see %s", reason, self._log_file)
        with contextlib.suppress(StoreError):  # which is told of by who needs it more, and this at the next try
            self._note(f"the coordinator's own evaluator cannot start, and is tried again: {reason}")
            self._is_told = True

    def _prepare(self, output: BinaryIO) -> None:
        """Joins the first time, afterwards only says where the shards lie now.

        Raises:
            JoinError: that did not work.
            StoreError: the store cannot be used now.
        """
        state, token = str(self._state_dir), self._token()
        shards = [f"{task}={path}" for task, path in self._shards.items()]
        if token is None:
            commands = [["device", "shard", "add", *text.split("=", 1), "--state", state] for text in shards]
        else:
            given = [word for text in shards for word in ("--shard", text)]
            join = ["device", "join", self._address, "--token", token, "--name", EVALUATOR_NAME]
            commands = [[*join, "--role", "evaluator", "--threads", "1", "--state", state, *given]]
        for command in commands:
            if (code := self._spawn(command, output).wait()) != 0:
                raise JoinError(f"`edgefl {' '.join(command[:2])}` ended with code {code}")


def _spawned(arguments: list[str], output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "edgefl.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=end_with_parent,  # noqa: PLW1509 one system call, no locks
    )
