"""Central evaluator: a child device process on the coordinator's test shards, so that it needs no torch."""

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
from typing import BinaryIO

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.tokens import make_token
from edgefl.coordinator.fleet.membership import Membership
from edgefl.core.errors import EdgeflError, JoinError, StoreError
from edgefl.core.protocol import EVALUATOR_NAME, JoinToken
from edgefl.storage.store import Store
from edgefl.system.atomic_files import write_atomic
from edgefl.system.processes import exit_with_parent
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

RESTART_DELAY_S = 2.0
MAX_RESTART_DELAY_S = 300.0
STOP_TIMEOUT_S = 10.0
TOKEN_TTL_S = 600.0
MIN_TOKEN_LIFETIME_S = 60.0
"""Minimum remaining lifetime of a token: it must not expire during the join."""
EVALUATOR_BLOCKED = "evaluator-unavailable"
"""Event kind: the evaluator cannot start; recorded once for all retries."""


class CentralEvaluator:
    """The coordinator's one own evaluator: its join token and its process.

    Args:
        directory: of the coordinator, with the evaluator's files.
        store: has its device record once it has joined.
        members: of the fleet.
        monotonic: seconds, monotonic.

    Attributes:
        token_id: of the only token that may join under its name, while there is one.
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
        self._token_deadline_s = 0.0

    def start(self, shards: Mapping[str, Path], address: str) -> EvaluatorSupervisor:
        """Starts and returns its supervisor; `shards` are by task, `address` is HOST:PORT of this coordinator."""
        state_dir = self._directory.root / "evaluator"
        process = EvaluatorSupervisor(
            state_dir=state_dir,
            shards={task: Path(path).resolve() for task, path in shards.items()},
            address=address,
            get_token=lambda: self.get_token(state_dir),
            log_file=self._directory.root / "evaluator.log",
            record_event=lambda message: self._store.record_event(EVALUATOR_BLOCKED, message, at=time.time()),
        )
        process.start()
        return process

    def get_token(self, state_dir: Path) -> str | None:
        """Returns its join token, the same while that is valid; None when it has joined before.

        Raises:
            StoreError: the store cannot be used now.
        """
        device_ids = {record.device_id for record in self._store.list_devices()}
        if EVALUATOR_NAME in device_ids and (state_dir / "device.json").exists():
            return None
        if EVALUATOR_NAME in device_ids:  # its state directory is gone, and with it its key
            self._members.remove(EVALUATOR_NAME)
            self._token = None  # that was its one use
        now_s = self._monotonic()
        if self._token is None or now_s >= self._token_deadline_s:
            self._token = make_token(
                self._store, self._directory, now=time.time(), ttl_s=TOKEN_TTL_S, role="evaluator"
            )
            self.token_id, self._token_deadline_s = self._token.token_id, now_s + TOKEN_TTL_S - MIN_TOKEN_LIFETIME_S
        return self._token.text()


class EvaluatorSupervisor:
    """Joins (once) and runs a device with the role evaluator; restarts it when it dies.

    A failed join may be temporary (a locked store, a full disk), so it is retried for ever.

    Args:
        state_dir: the evaluator's state directory.
        shards: task -> path of a test shard.
        address: HOST:PORT of this coordinator.
        get_token: returns a join token, None when the evaluator has joined; called before each try.
        log_file: where its log goes.
        record_event: called once with the reason that it cannot start; called again if it raises `StoreError`.
        spawn: (arguments, output file) -> process; starts `edgefl`.
        delay_s: pause after the first failure, doubled with each further one, and before a restart.
    """

    def __init__(  # noqa: PLR0913 a keyword for each part
        self,
        *,
        state_dir: Path,
        shards: Mapping[str, Path],
        address: str,
        get_token: Callable[[], str | None],
        log_file: Path,
        record_event: Callable[[str], None],
        spawn: Callable[[list[str], BinaryIO], subprocess.Popen[bytes]] | None = None,
        delay_s: float = RESTART_DELAY_S,
    ) -> None:
        self._state_dir, self._shards = state_dir, shards
        self._address, self._get_token = address, get_token
        self._log_file, self._record_event, self._is_reported = log_file, record_event, False
        self._spawn, self._delay_s = spawn or _spawn_process, delay_s
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
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
        is_ready, backoff = False, Backoff(initial_s=self._delay_s, max_s=MAX_RESTART_DELAY_S)
        while not self._stopping.is_set():
            try:
                with self._log_file.open("ab") as output:
                    if not is_ready:
                        self._join(output)
                        is_ready = True
                        backoff.reset()
                    if not self._stopping.is_set():
                        self._run(output)
            except (EdgeflError, OSError) as error:
                self._report(str(error))
                self._stopping.wait(backoff.next_s())

    def _run(self, output: BinaryIO) -> None:
        self._process = self._spawn(["device", "start", "--state", str(self._state_dir)], output)
        code = self._process.wait()
        if not self._stopping.is_set():
            log.warning("the evaluator ended with code %d; starting it again", code)
            self._stopping.wait(self._delay_s)

    def _report(self, reason: str) -> None:
        if self._is_reported or self._stopping.is_set():
            return
        log.error("the evaluator cannot start, and is tried again: %s; see %s", reason, self._log_file)
        with contextlib.suppress(StoreError):  # reported elsewhere; recorded at the next try
            self._record_event(f"the coordinator's own evaluator cannot start, and is tried again: {reason}")
            self._is_reported = True

    def _join(self, output: BinaryIO) -> None:
        """Joins the first time, afterwards only updates the shards, which are then those of this start alone.

        Raises:
            JoinError: a command failed.
            StoreError: the store cannot be used now.
        """
        state, token = str(self._state_dir), self._get_token()
        shards = [f"{task}={path}" for task, path in self._shards.items()]
        if token is None:
            commands = [["device", "shard", "add", *shard.split("=", 1), "--state", state] for shard in shards]
            commands[0].append("--only")
        else:
            shard_options = [word for shard in shards for word in ("--shard", shard)]
            # In a file of this user's alone: arguments are visible to every user of the machine.
            token_file = self._state_dir.with_name(f"{self._state_dir.name}.token")
            write_atomic(token_file, token.encode())
            join = ["device", "join", self._address, "--token-file", str(token_file), "--name", EVALUATOR_NAME]
            commands = [[*join, "--role", "evaluator", "--threads", "1", "--state", state, *shard_options]]
        try:
            for command in commands:
                if (code := self._spawn(command, output).wait()) != 0:
                    raise JoinError(f"`edgefl {' '.join(command[:2])}` ended with code {code}")
        finally:
            self._state_dir.with_name(f"{self._state_dir.name}.token").unlink(missing_ok=True)


def _spawn_process(arguments: list[str], output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "edgefl.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
    )
