"""Messages between the agent and its confined training process, and the agent's end of them.

A message is a JSON object and a body. The agent sends calls, one at a time, and notices; the process sends one reply
to a call, notices, and requests about the transport to neighbours, which the agent answers. Nothing that the process
sends is believed without a bound.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from edgefl.core.claims import parse_drift_claim
from edgefl.core.errors import DataError, TaskError
from edgefl.core.protocol import JOB_LOG, MAX_BODY_BYTES, parse_job_log
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Json
from edgefl.device.hardware.health import read_available_memory_bytes
from edgefl.system.confinement import Confinement, make_command, make_environment
from edgefl.system.process_messages import read_message, write_message
from edgefl.system.processes import exit_with_parent, lower_priority

MODULE = "edgefl.device.training.confined_process"
TICK_S = 0.5
SILENCE_S = 1800.0
"""Time without a word after which a process is stuck; an iteration of a large model takes minutes."""
STOP_S = 3.0
"""Time that a process has to save its state."""
NOTICE_INTERVAL_S = 0.001
"""Least time between two notices, whoever sends more: the agent has other work."""
MIN_REPLY_BYTES = 64 * 1024 * 1024
MAX_TEXT_CHARS, MAX_METRICS, MAX_STDERR_BYTES = 500, 64, 2048
MAX_QUEUED_NOTICES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """Arguments of the process's trainer, as those of `DeviceTrainer`; `shards` are of one task."""

    device_id: str
    role: str
    shards: Mapping[str, str]
    accelerator: str
    threads: int | None
    scratch: str
    incarnation: int
    max_temperature_c: float | None
    bases: str
    min_group: int
    drift_references: Mapping[str, str]


def parse_reply(reply: Json) -> Json:
    """Returns what a confined process answered to an instruction, without what it has no say in.

    Raises:
        DataError: it is malformed.
    """
    result: Json = {}
    for name, kind in (
        ("requires_full_model", bool),
        ("ready", bool),
        ("messages", list),
        (JOB_LOG, list),
        ("metrics", dict),
    ):
        if name in reply:
            if not isinstance(reply[name], kind):
                raise DataError(f"the training process answered a malformed {name}")
            result[name] = reply[name]
    for name in ("error", "reason"):
        if name in reply:
            result[name] = escape_text(str(reply[name])[:MAX_TEXT_CHARS])
    if result.keys().isdisjoint({"metrics", "error", "ready"}):
        raise DataError("the training process answered nothing")
    if JOB_LOG in result:
        result[JOB_LOG] = parse_job_log(result[JOB_LOG])
    if "metrics" in result:
        _check_metrics(result["metrics"])
    return result


def _check_metrics(metrics: Mapping[str, object], *, is_nested: bool = False) -> None:
    if len(metrics) > MAX_METRICS:
        raise DataError(f"the training process answered {len(metrics)} metrics, at most {MAX_METRICS} are taken")
    for name, value in metrics.items():
        if isinstance(value, Mapping) and not is_nested:
            _check_metrics(value, is_nested=True)
        elif value is not None and not isinstance(value, int | float):
            raise DataError(f"the training process answered a malformed metric {escape_text(name[:MAX_TEXT_CHARS])}")


class ProcessEndedError(TaskError):
    """End of a confined process in the middle of its work."""


class ConfinedProcess:
    """The agent's end of a confined training process.

    Args:
        setup: of its trainer.
        confinement: what it may use.
        on_message: handles its notices and requests, in a thread of its own.
        silence_s: see `SILENCE_S`.
        yields: whether it has the lowest priority.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        confinement: Confinement,
        *,
        on_message: Callable[[ConfinedProcess, Json, bytes], None],
        silence_s: float = SILENCE_S,
        yields: bool = False,
    ) -> None:
        self._on_message, self._silence_s = on_message, silence_s
        available = read_available_memory_bytes() or 0
        self._max_body_bytes = min(MAX_BODY_BYTES, max(MIN_REPLY_BYTES, available // 4))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 closed with the process
        self._process = subprocess.Popen(
            make_command(MODULE, confinement),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=make_environment(confinement),
            cwd=setup.scratch,
            start_new_session=True,
            preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
        )
        if yields:
            lower_priority(self._process.pid)
        self._replies: queue.SimpleQueue[tuple[Json, bytes] | str] = queue.SimpleQueue()
        self._outgoing: queue.Queue[tuple[Json, bytes] | None] = queue.Queue(MAX_QUEUED_NOTICES)
        self.received_s, self._is_called, self._has_ended = time.monotonic(), False, False
        for name, work in (("confined-in", self._receive), ("confined-out", self._send_queued)):
            threading.Thread(target=work, name=name, daemon=True).start()
        self.send(asdict(setup))

    def send(self, header: Json, body: bytes = b"") -> None:
        """Queues a message; drops it where the process has not read so many."""
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait((header, body))

    def call(
        self,
        name: str,
        header: Json,
        body: bytes = b"",
        *,
        on_tick: Callable[[], None],
        timeout_s: float | None = None,
    ) -> tuple[Json, bytes]:
        """Returns the process's reply; calls `on_tick` every so often while it works.

        Raises:
            ProcessEndedError: it ended, said nothing for too long, or nothing that makes sense; it is ended then.
        """
        self.received_s = began_s = time.monotonic()
        self._is_called = True
        self.send({"call": name, "header": header}, body)
        while True:
            try:
                reply = self._replies.get(timeout=TICK_S)
            except queue.Empty:
                if self._has_ended:
                    raise ProcessEndedError("the confined training process has ended") from None
                silence_s = time.monotonic() - self.received_s
                if silence_s > self._silence_s or (timeout_s is not None and time.monotonic() - began_s > timeout_s):
                    self.kill()
                    raise ProcessEndedError(
                        f"the confined training process said nothing for {silence_s:.0f} s, and was ended"
                    ) from None
                on_tick()
                continue
            if isinstance(reply, str):
                raise ProcessEndedError(f"the confined training process {reply}")
            return reply

    def close(self) -> None:
        """Lets the process save its state, and ends it."""
        if not self._has_ended:
            with contextlib.suppress(ProcessEndedError):
                self.call("close", {}, on_tick=lambda: None, timeout_s=STOP_S)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait(None)

    def _send_queued(self) -> None:
        assert self._process.stdin is not None
        while (message := self._outgoing.get()) is not None:
            try:
                write_message(self._process.stdin, *message)
            except (OSError, ValueError):  # its end; `_receive` says so
                break
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        try:
            while (message := read_message(self._process.stdout, self._max_body_bytes)) is not None:
                self.received_s = time.monotonic()
                if isinstance(message[0].get("reply"), dict) and self._is_called:
                    self._is_called = False
                    self._replies.put((message[0]["reply"], message[1]))
                    continue
                time.sleep(NOTICE_INTERVAL_S)
                self._on_message(self, *message)
            reason = ""
        except Exception as error:  # noqa: BLE001 the boundary of the thread: whatever it sent, it is ended
            reason = f"made no sense, and was ended: {escape_text(str(error)[:MAX_TEXT_CHARS])}"
        self._process.kill()
        self._has_ended = True
        self._replies.put(reason or self._describe_end(self._process.wait()))
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait(None)
        self._process.stdout.close()
        self._stderr.close()

    def _describe_end(self, status: int) -> str:
        self._stderr.seek(0, 2)
        self._stderr.seek(max(0, self._stderr.tell() - MAX_STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        last_line = f": {escape_text(lines[-1][:MAX_TEXT_CHARS])}" if lines else ""
        if status >= 0:
            return f"ended with code {status}{last_line}"
        cause = " (the kernel does that where memory runs out)" if status == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-status).name}{cause}{last_line}"


def parse_description(facts: Json) -> Json:
    """Returns what a confined process said of its task and shard, without what makes no sense."""
    traits = ("needs_torch", "has_shape", "is_job")
    result: Json = {name: facts[name] for name in traits if isinstance(facts.get(name), bool)}
    count, error = facts.get("num_examples"), facts.get("error")
    if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**53:
        result["num_examples"] = count
    if (drift := parse_drift_claim(facts.get("drift"))) is not None:
        result["drift"] = asdict(drift)
    return {**result, **({"error": escape_text(str(error)[:MAX_TEXT_CHARS])} if error else {})}
