"""The coordinator's own evaluator: a child device process on its test shards, so that it needs no torch itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.membership import Membership
from edgefl.coordinator.joining.tokens import TokenTerms, make_token
from edgefl.processes import end_with_parent
from edgefl.protocol import EVALUATOR_NAME
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

RESTART_DELAY_S = 2.0
STOP_TIMEOUT_S = 10.0
TOKEN_TTL_S = 600.0


class OwnEvaluator:
    """The coordinator's own evaluator, of which there is one: who may join under its name, and its process.

    Args:
        directory: of the coordinator; the evaluator's files lie in it.
        store: knows whether it has joined before.
        members: the fleet.

    Attributes:
        token_id: the one token that lets somebody join under its name, while there is one.
    """

    def __init__(self, directory: CoordinatorDirectory, store: Store, members: Membership) -> None:
        self._directory, self._store, self._members = directory, store, members
        self.token_id: str | None = None

    def started(self, shards: Mapping[str, Path], address: str) -> EvaluatorProcess:
        """Returns its process, on these test shards (by task); `address` is HOST:PORT of this coordinator."""
        state_dir = self._directory.root / "evaluator"
        process = EvaluatorProcess(
            state_dir=state_dir,
            shards={task: Path(path).resolve() for task, path in shards.items()},
            address=address,
            token=self._token(state_dir),
            log_file=self._directory.root / "evaluator.log",
        )
        process.start()
        return process

    def _token(self, state_dir: Path) -> str | None:
        """Returns what it has to join with, None when it has joined before."""
        known = {record.device_id for record in self._store.devices()}
        if EVALUATOR_NAME in known and (state_dir / "device.json").exists():
            return None
        if EVALUATOR_NAME in known:  # its state directory is gone, and with it the key that holds the name
            self._members.remove(EVALUATOR_NAME)
        terms = TokenTerms(ttl_s=TOKEN_TTL_S, role="evaluator")
        made = make_token(self._store, self._directory, terms, now=time.time())
        self.token_id = made.token_id
        return made.text()


class EvaluatorProcess:
    """Joins (once) and runs a device with the role evaluator; starts it again when it dies.

    Args:
        state_dir: the evaluator's state directory.
        shards: task -> path of a test shard.
        address: HOST:PORT of this coordinator.
        token: makes a join token; only asked when the evaluator has not joined yet.
        log_file: where its log goes.
    """

    def __init__(
        self, *, state_dir: Path, shards: Mapping[str, Path], address: str, token: str | None, log_file: Path
    ) -> None:
        self._state_dir, self._shards = state_dir, shards
        self._address, self._token, self._log_file = address, token, log_file
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
        with self._log_file.open("ab") as output:
            if self._prepare(output) and not self._stopping.is_set():
                while not self._stopping.is_set():
                    self._process = self._spawn(["device", "start", "--state", str(self._state_dir)], output)
                    code = self._process.wait()
                    if not self._stopping.is_set():
                        log.warning("the evaluator ended with code %d; starting it again", code)
                        self._stopping.wait(RESTART_DELAY_S)

    def _prepare(self, output: BinaryIO) -> bool:
        """Joins the first time, afterwards only says where the shards lie now."""
        state = str(self._state_dir)
        shards = [f"{task}={path}" for task, path in self._shards.items()]
        if self._token is None:
            commands = [["device", "shard", "add", *text.split("=", 1), "--state", state] for text in shards]
        else:
            given = [word for text in shards for word in ("--shard", text)]
            join = ["device", "join", self._address, "--token", self._token, "--name", EVALUATOR_NAME]
            commands = [[*join, "--role", "evaluator", "--threads", "1", "--state", state, *given]]
        for command in commands:
            if self._spawn(command, output).wait() != 0:
                log.error("the evaluator cannot start; see %s", self._log_file)
                return False
        return True

    def _spawn(self, arguments: list[str], output: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "edgefl.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            preexec_fn=end_with_parent,  # noqa: PLW1509 one system call, no locks
        )
