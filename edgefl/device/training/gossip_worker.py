"""Gossip assignments of a device: single relayed exchanges, or an autonomous node, kept for a reboot."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgefl.compression.codec import decode_body, make_codec
from edgefl.core.errors import EdgeflError, NetworkError, StoreError
from edgefl.core.protocol import finite_or_none
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Dataset, GossipConfig, Json, PeerMessage, TrainConfig, derive_rng
from edgefl.device.peers.gossip_session import GossipSession, TrainLocally
from edgefl.device.peers.peer_connection import MakePeerTransport, PeerTransport, get_peer_addresses
from edgefl.device.training.client_state import GossipStateStore
from edgefl.device.training.instruction import FullModelRequiredError, ParsedInstruction, parse_instruction
from edgefl.device.training.task_cache import CachedTask, TaskCache
from edgefl.strategies.peer_algorithms.gossip_node import (
    GossipNode,
    decode_messages,
    decode_peer_message,
    encode_messages,
    encode_peer_message,
)
from edgefl.system.atomic_files import write_atomic
from edgefl.system.retries import RateLimitedLog
from edgefl.tasks.augmentation import AUGMENT, augment_batches
from edgefl.tasks.local_algorithms.local_training import run_gossip_instruction, train_node

log = logging.getLogger(__name__)

RELAY = "relay"
POLL_INTERVAL_S = 0.1
INSTRUCTION_FILE = "node.json"
MAX_COMPLETED_RUNS = 16
"""Number of completed runs that are stored: the command may come before the node has been resumed."""


class GossipWorker:
    """Owner of a device's only gossip node and its session.

    Used by the training thread; `complete_run`, `pause` and `run_progress` by any, `_receive` by transports.

    Args:
        device_id: of the node.
        state_dir: the device's state directory.
        incarnation: grows with every start of the device, 1 or more.
        tasks: trainable tasks of this board.
        make_transport: for nodes whose messages the coordinator does not relay; None without transports.
        training_lock: guards the learner; held during `run_instruction`.
        pace: called between iterations of an autonomous node; may wait, until its argument returns True.
    """

    def __init__(  # noqa: PLR0913 a composition root hands over its parts by name
        self,
        device_id: str,
        state_dir: Path,
        *,
        incarnation: int,
        tasks: TaskCache,
        make_transport: MakePeerTransport | None,
        training_lock: threading.Lock,
        pace: Callable[[Callable[[], bool]], None] = lambda _: None,
    ) -> None:
        self._pace = pace
        self._device_id, self._tasks, self._training_lock = device_id, tasks, training_lock
        self._state_store = GossipStateStore(device_id, state_dir, incarnation=incarnation)
        self._instruction_path, self._make_transport = state_dir / INSTRUCTION_FILE, make_transport
        self._run_id = ""
        self._session: GossipSession | None = None
        self._transport: PeerTransport | None = None
        self._paused_transport: PeerTransport | None = None
        self._session_lock = threading.RLock()
        self._completed_runs: deque[str] = deque(maxlen=MAX_COMPLETED_RUNS)
        self._rate_limited_log = RateLimitedLog(log)

    def run_instruction(
        self,
        instruction: ParsedInstruction,
        cached_task: CachedTask,
        body: bytes,
        *,
        on_iteration: Callable[[int, float], bool],
        should_finish_early: Callable[[int], bool],
    ) -> tuple[Json, bytes]:
        """Returns the reply's header, and its body: messages, and the node's model if requested.

        Args:
            instruction: with a plan for a node.
            cached_task: task of the instruction.
            body: messages of neighbours, and a model for a node that has none.
            on_iteration: as `local_training.train` has it.
            should_finish_early: given an autonomous node's iterations, returns whether it must report now.

        Raises:
            FullModelRequiredError: there is no node yet, and the body has no model.
        """
        assert instruction.plan.node is not None
        messages, model = decode_messages(instruction.messages, body)
        if instruction.plan.node.carrier != RELAY:
            return self._wait_for_report(instruction, cached_task, model, instruction.plan.node, should_finish_early)
        node = self._require_node(instruction, cached_task, model, instruction.plan.node)
        seed_key = (*instruction.seed_key, node.algorithm.iterations)
        result = run_gossip_instruction(
            node,
            cached_task.learner,
            augment_batches(
                cached_task.task,
                self._load_training_data(instruction, cached_task),
                derive_rng(*seed_key, AUGMENT),
            ),
            replace(instruction.plan, messages=messages),
            derive_rng(*seed_key),
            clock=time.monotonic,
            on_iteration=on_iteration,
        )
        self._save_state(instruction)
        report = b""
        if result.model is not None:
            report = make_codec(instruction.codec_spec, cached_task.model_spec).encode(
                result.model, derive_rng(*seed_key, "uplink")
            )
        index, reply_body = encode_messages(result.messages, report)
        metrics = {
            "iterations": result.iterations,
            "num_examples": result.num_examples,
            "loss": finite_or_none(result.loss),
            "compute_s": result.compute_s,
            "extra": {"dropped_messages": node.num_dropped},
        }
        return {"metrics": metrics, "messages": index}, reply_body

    @property
    def run_id(self) -> str:
        """Returns the run of the session, "" without one."""
        return self._run_id if self._session is not None else ""

    @property
    def run_progress(self) -> tuple[str, int] | None:
        """Returns run and iterations of an autonomous node, or None."""
        session = self._session
        return None if session is None else (self._run_id, session.iterations)

    def resume(self) -> None:
        """Resumes the node of an earlier run of the agent, if any."""
        header = load_node_instruction(self._instruction_path)
        if header is None:
            return
        try:
            instruction = parse_instruction(self._device_id, header)
            with self._training_lock:
                if instruction.plan.node is not None:
                    cached_task = self._tasks.get(
                        instruction.task, instruction.options, adapt=instruction.adapt, compiled=instruction.compiled
                    )
                    self._start_session(instruction, cached_task, b"", instruction.plan.node)
        except FullModelRequiredError:
            self._discard_session()
        except Exception as error:  # the boundary of one run: the board must survive for the next
            is_known = isinstance(error, EdgeflError)
            log.warning("cannot go on as node of run %s: %s", header.get("run"), error, exc_info=not is_known)

    def complete_run(self, run: str) -> None:
        """Completes a run: its autonomous node stops soon, and later instructions of the run are rejected."""

        def complete() -> None:
            with self._session_lock:
                if run not in self._completed_runs:
                    self._completed_runs.append(run)
                self._discard_session(run)

        threading.Thread(target=complete, name="end of run", daemon=True).start()

    def reopen_run(self, run: str) -> None:
        """Accepts instructions of a run that starts, or continues after completion."""
        with self._session_lock:
            if run in self._completed_runs:
                self._completed_runs.remove(run)

    def pause(self) -> None:
        """Stops an autonomous node until its next assignment."""
        threading.Thread(target=self._stop_session, name="rest", daemon=True).start()

    def discard_other_runs(self, run: str) -> None:
        """Discards nodes of all runs but this one."""
        if self.run_id not in {"", run}:
            self._discard_session()

    def close(self) -> None:
        """Stops and saves the node; a later start of the device resumes it."""
        self._stop_session()
        self._state_store.save()

    def _wait_for_report(
        self,
        instruction: ParsedInstruction,
        cached_task: CachedTask,
        model: bytes,
        plan: GossipConfig,
        should_finish_early: Callable[[int], bool],
    ) -> tuple[Json, bytes]:
        """Runs the node autonomously, and returns its report after enough iterations.

        A diverged node requests a full model to restart from; if it started from one, it reports its divergence.
        """
        if self._state_store.has_diverged(instruction.run):
            self._discard_session(instruction.run)
        if self.run_id == instruction.run:
            session = self._update_session(instruction, plan)
        else:
            session = self._start_session(instruction, cached_task, model, plan)
        self._training_lock.release()  # the node trains while this thread only waits
        try:
            report = session.wait_for_report(plan.until, lambda: should_finish_early(session.iterations))
            if not model and self._state_store.has_diverged(instruction.run):
                raise FullModelRequiredError("needs the model: its training has diverged")
        except EdgeflError:
            if self.run_id == instruction.run:  # a paused one is resumed later
                self._discard_session(instruction.run)
            raise
        finally:
            self._training_lock.acquire()
        rng = derive_rng(*instruction.seed_key, report.total_iterations, "uplink")
        index, reply_body = encode_messages(
            [], make_codec(instruction.codec_spec, cached_task.model_spec).encode(report.model, rng)
        )
        metrics = {
            "iterations": report.iterations,
            "num_examples": len(self._load_training_data(instruction, cached_task)),
            "loss": finite_or_none(report.loss),
            "compute_s": report.compute_s,
            "extra": {
                "messages": report.num_messages,
                "message_bytes": report.num_bytes,
                "dropped_messages": report.num_dropped,
                "iterations_in_all": report.total_iterations,
            },
        }
        return {"metrics": metrics, "messages": index}, reply_body

    def _update_session(self, instruction: ParsedInstruction, plan: GossipConfig) -> GossipSession:
        """Updates the session to a newer plan of the same run."""
        with self._session_lock:
            if self._session is None or self._transport is None:
                raise NetworkError("the node was stopped: its run is over")
            self._transport.set_addresses(get_peer_addresses(plan))
            self._transport.set_peers([edge.neighbour for edge in plan.edges])
            self._session.update_config(instruction.plan)
            self._save_instruction(instruction)
            return self._session

    def _start_session(
        self, instruction: ParsedInstruction, cached_task: CachedTask, model: bytes, plan: GossipConfig
    ) -> GossipSession:
        """Starts the session of a run, replacing any other.

        Raises:
            NetworkError: the transport is unavailable; there is no session then.
        """
        node = self._require_node(instruction, cached_task, model, plan)
        with self._session_lock:
            self._discard_session()
            if instruction.run in self._completed_runs:
                raise NetworkError(f"run {instruction.run} is over")
            if self._make_transport is None:
                raise NetworkError(f"this device cannot carry messages by {plan.carrier!r}, only by relay")
            transport = self._make_transport(plan, self._receive)
            session = GossipSession(
                node,
                instruction.plan,
                rng=derive_rng("firing", self._device_id, node.algorithm.incarnation, node.algorithm.iterations),
                train=self._make_local_training(instruction, cached_task),
                send=self._send_message,
                is_drained=transport.is_drained,
                save=lambda _: self._save_state(instruction),
            )
            self._transport, self._run_id, self._session = transport, instruction.run, session
            transport.set_peers([edge.neighbour for edge in plan.edges])
            try:
                transport.start()
                session.start()
            except BaseException:  # or the next assignment would wait for a session that never started
                self._stop_session()
                raise
            self._save_instruction(instruction)
            return session

    def _make_local_training(self, instruction: ParsedInstruction, cached_task: CachedTask) -> TrainLocally:
        def train(engine: GossipNode, plan: TrainConfig, is_leaving: Callable[[], bool]) -> tuple[int, float]:
            # The thread that ends this session may hold the lock while it waits for this one.
            while not self._training_lock.acquire(timeout=POLL_INTERVAL_S):
                if is_leaving():
                    return 0, 0.0

            def on_iteration(*_: object) -> bool:
                self._pace(is_leaving)
                return is_leaving()

            try:
                seed_key = instruction.seed, self._device_id, engine.algorithm.iterations
                data = self._load_training_data(instruction, cached_task)
                done, loss, _ = train_node(
                    engine,
                    cached_task.learner,
                    augment_batches(cached_task.task, data, derive_rng(*seed_key, AUGMENT)),
                    plan,
                    derive_rng(*seed_key),
                    clock=time.monotonic,
                    on_iteration=on_iteration,
                )
            finally:
                self._training_lock.release()
            return done, loss

        return train

    def _stop_session(self) -> None:
        with self._session_lock:
            session, transport = self._session, self._transport
            self._session = self._transport = None
            if session is not None:
                session.stop()
            if transport is not None:
                transport.stop()
                self._paused_transport = transport

    def _discard_session(self, run: str | None = None) -> None:
        """Ends the session of this run (any if None); a later instruction may start another."""
        with self._session_lock:
            session_run = self.run_id or str((load_node_instruction(self._instruction_path) or {}).get("run", ""))
            if run is not None and run != session_run:
                return
            self._stop_session()
            if self._paused_transport is not None:
                self._paused_transport.set_peers([])  # clears their retained messages
                self._paused_transport = None
            with contextlib.suppress(OSError):
                self._instruction_path.unlink(missing_ok=True)

    def _receive(self, sender: str, payload: bytes) -> None:
        """Processes a neighbour's message; drops those of other runs or senders."""
        try:
            run, message = decode_peer_message(payload)
        except NetworkError as error:
            self._rate_limited_log.warning(f"from {sender}", "dropped a message of %s: %s", sender, error)
            return
        session = self._session
        if session is not None and run == self._run_id and message.edge == (sender, self._device_id):
            session.receive(message)

    def _send_message(self, message: PeerMessage) -> None:
        transport, receiver = self._transport, message.edge[1]
        if transport is None:
            return
        try:
            transport.send(receiver, encode_peer_message(self._run_id, message), is_reply=message.is_reply)
        except EdgeflError as error:
            self._rate_limited_log.warning(f"to {receiver}", "a message to %s cannot be sent: %s", receiver, error)

    def _save_instruction(self, instruction: ParsedInstruction) -> None:
        """Stores the instruction for a reboot."""
        try:
            write_atomic(self._instruction_path, json.dumps(instruction.header).encode())
        except StoreError as error:
            log.warning("cannot keep what node this device is: %s", error)

    def _require_node(
        self, instruction: ParsedInstruction, cached_task: CachedTask, model: bytes, plan: GossipConfig
    ) -> GossipNode:
        """Returns the node of this device, started from the received model if new."""
        engine = self._state_store.load(instruction.run, plan, cached_task.learner, cached_task.model_spec)
        if engine is not None:
            return engine
        if not model:
            raise FullModelRequiredError("needs the model: it holds no node of this run")
        cached_task.learner.load(decode_body(model, cached_task.model_spec))
        return self._state_store.create(instruction.run, plan, cached_task.learner, cached_task.model_spec)

    def _load_training_data(self, instruction: ParsedInstruction, cached_task: CachedTask) -> Dataset:
        return self._tasks.load_training(cached_task, instruction.test_fraction)

    def _save_state(self, instruction: ParsedInstruction) -> None:
        self._state_store.save(only_when_due=not instruction.is_durable)


def load_node_instruction(path: Path) -> Json | None:
    """Returns the stored instruction of an earlier run of the agent, or None."""
    try:
        header = parse_json(path.read_text())
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) else None
