"""Work loop: waits for work, pulls instructions from Flower, executes them, caches and uploads the replies.

Replies are uploaded in a separate thread, while the next work is trained. A finished update is cached until the
coordinator reports it as used, and a repeated assignment is answered from the cache.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from edgefl.core.conditions import DOWNLOAD, NETWORK, Blocker, ConditionsEndedError
from edgefl.core.errors import ClonedError, EdgeflError, NetworkError
from edgefl.core.protocol import (
    ALLOWANCE_KEY,
    CONDITIONS_KEY,
    HANDED_BACK_KEY,
    IGNORES_REPLY_KEY,
    INSTRUCTION_VERSION,
    METERED_KEY,
    POLL_S,
)
from edgefl.core.types import Json, Role
from edgefl.device.conditions.gate import ConditionGate
from edgefl.device.flower.supernode import PulledInstruction, ReplyContent, ReplyRejectedError, SuperNode
from edgefl.device.secure_worker import SecureWorker
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.training.shard_uses import USES_NAME, ShardUses
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.system.processes import LowestPriorityThread
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

INITIAL_DISCONNECTED_S = 0.5
MAX_DISCONNECTED_S = POLL_S / 2
"""Both readiness phases of a run must be answered within 30 s."""

A = TypeVar("A")
T = TypeVar("T")
ModelIdentity = tuple[object, object, object]
"""Lineage of the coordinator's store, version and SHA-256 of the model of an instruction."""
MAX_CACHED_REPLIES = 2
"""At most two assignments are outstanding per device, so no more finished updates can be requested again."""


@dataclass(slots=True)
class PollBackoff:
    """Poll back-off: long intervals while wake-ups arrive, else short after work and growing.

    A device without a broker finds the next work after at most twice the time that passed until it was ready, with a
    handful of polls. So polling costs little, however long rounds are, and an idle fleet polls rarely.

    Attributes:
        poll_s: between two polls while wake-ups arrive.
    """

    poll_s: float = POLL_S
    _disconnected: Backoff = field(
        default_factory=lambda: Backoff(initial_s=INITIAL_DISCONNECTED_S, max_s=MAX_DISCONNECTED_S), init=False
    )

    def compute_interval_s(self, *, is_connected: bool) -> float:
        """Returns how long to wait for a wake-up before polling."""
        if is_connected:
            self._disconnected.reset()
            return self.poll_s
        return min(self._disconnected.next_s(), self.poll_s)

    def on_work(self) -> None:
        """Resets the back-off after work: more may follow soon."""
        self._disconnected.reset()


class ReplyUploader(Generic[A]):
    """Upload queue used by one thread, beside its own.

    Args:
        push: sends one reply; raises `NetworkError` when it must be retried, `ClonedError` for a rejected clone.
        on_failure: called in the uploader's thread when a reply could not be sent; `check` then raises the error.
    """

    def __init__(self, push: Callable[[A], None], on_failure: Callable[[], None]) -> None:
        self._push, self._on_failure = push, on_failure
        self._replies: deque[A] = deque()
        self._error: EdgeflError | None = None
        self._is_open, self._is_sending, self._is_closed, self._has_sent = False, False, False, False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, reply: A) -> None:
        """Queues a reply, after the one before has been sent, so that at most two are in memory."""
        with self._changed:
            self._changed.wait_for(lambda: not self._replies or not self._is_open or self._is_closed)
            self._replies.append(reply)
            self._changed.notify_all()

    def has_progressed(self) -> bool:
        """Returns whether the queue is empty, or a reply was sent since the last call."""
        with self._changed:
            has_progressed, self._has_sent = self._has_sent or not self._replies, False
            return has_progressed

    def check(self) -> None:
        """Raises the error since the last `resume`, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def resume(self) -> None:
        """Resumes uploads over a restored connection."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
            self._thread.start()
        with self._changed:
            self._error, self._is_open = None, True
            self._changed.notify_all()

    def pause(self) -> None:
        """Pauses uploads until `resume`; returns when none is under way."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_sending or self._is_closed)

    def close(self, timeout_s: float) -> None:
        """Sends queued replies, if connected, for up to `timeout_s`; then ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._replies or not self._is_open, timeout_s)
            self._is_open, self._is_closed = False, True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._wait_for_reply():
            error = self._send_first()
            with self._changed:
                self._is_sending = False
                if error is None:
                    self._replies.popleft()
                    self._has_sent = True
                else:
                    self._error, self._is_open = error, False
                self._changed.notify_all()
            if error is not None:
                self._on_failure()

    def _wait_for_reply(self) -> bool:
        """Returns when there is a reply to send; False when the uploader was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._is_open and self._replies))
            self._is_sending = not self._is_closed
            return self._is_sending

    def _send_first(self) -> EdgeflError | None:
        """Returns why the oldest reply could not be sent, or None."""
        try:
            self._push(self._replies[0])
        except (NetworkError, ClonedError) as error:
            return error
        except Exception as error:  # the boundary of the thread: without it no more replies would be sent
            log.exception("an answer could not be sent")
            return NetworkError(f"an answer could not be sent: {error}")
        return None


class WorkLoop:
    """Work loop of the main thread; `list_held_assignments` and `get_log_context` by any.

    Args:
        state: has the key that signs requests; reloaded for each instruction.
        tls_context: verifies the coordinator.
        trainer: executes the work.
        clock: the coordinator's time in unix seconds.
        instance: of this agent process.
        gate: says whether this board may work.
        on_work: called when there is work, before its execution.
        on_failure: called in another thread when a reply could not be sent; `uploader.check` then raises the error.

    Attributes:
        supernode: the connection to Flower.
        uploader: replies under way.
    """

    def __init__(  # noqa: PLR0913 one keyword per collaborator
        self,
        state: DeviceStateDir,
        *,
        tls_context: ssl.SSLContext,
        trainer: DeviceTrainer,
        clock: Callable[[], float],
        instance: str,
        gate: ConditionGate,
        on_work: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._state, self._trainer, self._gate, self._on_work = state, trainer, gate, on_work
        self._secure_worker = SecureWorker(state, trainer.train)
        self._reply_cache: OrderedDict[str, tuple[ModelIdentity, ReplyContent]] = OrderedDict()
        self._newest_record: tuple[tuple[object, object], int] = (None, None), 0
        self._current: tuple[str, str] | None = None
        self._update_bytes: dict[str, int] = {}
        self._uses, self._yielding = ShardUses(state.root / USES_NAME, clock), LowestPriorityThread("training")
        self.supernode = SuperNode(
            private_key_pem=state.key.read_bytes(),
            tls_context=tls_context,
            clock=clock,
            instance=instance,
            charge_traffic=gate.charge_traffic,
            admit=self._admit,
            check_link=gate.require_download,
        )
        self.uploader: ReplyUploader[tuple[str, Any]] = ReplyUploader(self._send_reply, on_failure)

    def run_once(self) -> bool:
        """Executes the next instruction; returns whether there was one. Takes none while this board may not train.

        Raises:
            UnauthorisedError: the clock may have jumped; the next connect measures it again.
            NetworkError: the coordinator is unreachable.
        """
        if self._gate.check() is not None:
            return False
        instruction = self.supernode.pull()
        if instruction is None:
            return False
        self._on_work()
        self._state.reload()  # a shard may have been added since
        assignment = str(instruction.header.get("assignment"))
        for used_id in instruction.header.get("used_assignments", ()):
            self._reply_cache.pop(used_id, None)
        self._current = str(instruction.header.get("run")), assignment
        store_header = self._make_store_header(instruction.header)
        content = self._answer(assignment, instruction)
        if added := {**store_header, **self._make_allowance_header()}:
            content = {**content[0], **added}, content[1]
        reply = self.supernode.create_reply(instruction, content)
        self._current = None
        del instruction  # frees its model before the upload
        self.uploader.add((assignment, reply))
        return True

    def _answer(self, assignment: str, instruction: PulledInstruction) -> ReplyContent:
        """Returns the reply to an instruction; hands it back where this board may not go on, or not reply."""
        header, blocker = instruction.header, instruction.blocker
        if blocker is not None:
            return self._hand_back(header, blocker)
        try:
            content = self._get_cached_reply(assignment, header)
            if content is None:
                content = self._work(header, instruction)
            self._gate.require_network()
            self._gate.charge_traffic(len(content[1]))
        except ConditionsEndedError as error:
            return self._hand_back(header, error.blocker)
        return content

    def _admit(self, header: Json) -> None:
        """Raises where the conditions of an instruction's run do not hold; evaluators keep none.

        What is finished is sent all the same, but over no network that they forbid.
        """
        is_trainer = self._state.settings.role == Role.TRAINER
        try:
            self._gate.admit(
                str(header.get("run")),
                header.get(CONDITIONS_KEY) if is_trainer else None,
                asks_metered=is_trainer and header.get(METERED_KEY) is True,
            )
        except ConditionsEndedError as error:
            is_finished = self._get_cached_reply(str(header.get("assignment")), header) is not None
            if not is_finished or error.blocker.kind in {NETWORK, DOWNLOAD}:
                raise

    def _work(self, header: Json, instruction: PulledInstruction) -> ReplyContent:
        """Returns the reply of the trainer; notes that the run has used the shard, however the work ended."""
        is_used = "phase" not in header
        try:
            with self._gate.work():
                work = self._trainer.evaluate if instruction.is_evaluation else self._train
                compute = partial(work, header, instruction.body)
                # Not a question before a run, which has 30 s.
                content = compute() if "phase" in header else self.run_yielding(compute)
            is_used &= "error" not in content[0]
        finally:
            if is_used:
                self._uses.record(str(header.get("task")), str(header.get("run")))
        return content

    def run_yielding(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns: of a thread with the lowest priority where the owner wants that, else here."""
        if self._gate.conditions.yields:
            return self._yielding.run(work)
        self._yielding.restore_libraries()
        return work()

    def _hand_back(self, header: Json, blocker: Blocker) -> ReplyContent:
        log.info("%s is handed back: %s", header.get("assignment"), blocker.reason)
        self._reply_cache.pop(str(header.get("assignment")), None)
        reply = {
            "v": INSTRUCTION_VERSION,
            "run": header.get("run"),
            "assignment": header.get("assignment"),
            HANDED_BACK_KEY: blocker.to_json(),
        }
        if "phase" in header:
            return {**reply, "ready": False, "reason": blocker.reason}, b""
        return {**reply, "error": blocker.reason}, b""

    def list_held_assignments(self) -> tuple[str, ...]:
        """Returns the assignments of this device: finished, running or arriving."""
        current = self._trainer.current
        # Counts as held while its model arrives, else it would be sent again.
        incoming = self.supernode.incoming_assignment
        running = [current[1]] if current and current[1] else []
        return tuple(dict.fromkeys([*self._reply_cache, *running, *([incoming] if incoming else [])]))

    def get_log_context(self) -> tuple[str, str] | None:
        """Returns the run and assignment in progress."""
        current = self._trainer.current or self._current
        return (current[0], current[1]) if current is not None else None

    def _get_cached_reply(self, assignment: str, header: Json) -> ReplyContent | None:
        """Returns the cached reply to an instruction; None if it was to other work of the same name.

        A coordinator whose directory is an older copy, or restored from a backup, uses names again.
        """
        cached = self._reply_cache.get(assignment)
        if cached is None or header.get(IGNORES_REPLY_KEY) is True:
            return None
        former, present = cached[0], _get_identity(header)
        # An instruction from before the coordinator's restart may not name the model: only its reply is requested.
        is_same_model = present[2] is None or former[2] == present[2]
        return cached[1] if former[:2] == present[:2] and is_same_model else None

    def _make_store_header(self, header: Json) -> Json:
        """Returns what a reply repeats of the store's state, with the highest record heard of in lineage and run."""
        lineage, record = header.get("lineage"), header.get("newest_record")
        if lineage is None or not isinstance(record, int):
            return {}
        key = lineage, header.get("run")
        highest = max(record, self._newest_record[1]) if self._newest_record[0] == key else record
        self._newest_record = key, highest
        return {"lineage": lineage, "model_sha256": header.get("model_sha256"), "newest_record": highest}

    def _make_allowance_header(self) -> Json:
        """Returns what is left after a work, ahead of the next heartbeat; empty where nothing limits this board."""
        allowance = self._gate.find_allowance()
        return {} if allowance is None else {ALLOWANCE_KEY: allowance.to_json()}

    def _train(self, header: Json, body: bytes) -> ReplyContent:
        run = str(header.get("run"))
        is_dense = header.get("codec") == "dense"  # the update is as large as the model
        self._gate.require_traffic(self._update_bytes.get(run, len(body) if is_dense else 0))
        reply = self._secure_worker.train(header, body)
        if reply[1]:
            self._update_bytes = {run: len(reply[1])}
        _log_result(reply[0])
        if "error" not in reply[0] and "phase" not in header:
            self._reply_cache[str(header["assignment"])] = _get_identity(header), reply
            while len(self._reply_cache) > MAX_CACHED_REPLIES:
                self._reply_cache.popitem(last=False)
        return reply

    def _send_reply(self, item: tuple[str, Any]) -> None:
        """Sends one reply; a rejected one is dropped."""
        assignment, reply = item
        try:
            self.supernode.push(reply)
        except ReplyRejectedError as error:
            log.info("the answer to %s is not wanted: %s", assignment, error)


def _get_identity(header: Json) -> ModelIdentity:
    return header.get("lineage"), header.get("version"), header.get("model_sha256")


def _log_result(header: Json) -> None:
    """Logs the result in one line; failures are logged elsewhere."""
    if isinstance(metrics := header.get("metrics"), dict):
        log.info(
            "%s: %s iterations, loss %.4g, %.3g s",
            header.get("assignment"), metrics.get("iterations"), _to_float(metrics.get("loss")),
            _to_float(metrics.get("compute_s")),
        )  # fmt: skip
    elif header.get("ready") is True:
        log.info("%s: ready", header.get("assignment"))


def _to_float(value: object) -> float:
    return value if isinstance(value, int | float) else float("nan")
