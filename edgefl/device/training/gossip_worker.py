"""Gossip assignments of a device: single relayed exchanges, or an autonomous node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgefl.compression.codec import make_codec
from edgefl.compression.decoding import decode_body
from edgefl.core.errors import EdgeflError, NetworkError
from edgefl.core.protocol import finite_or_none
from edgefl.core.types import Dataset, GossipConfig, Json, TrainConfig, derive_rng
from edgefl.decentralised.gossip_node import GossipNode
from edgefl.decentralised.message_bundle import decode_messages, encode_messages
from edgefl.device.peers.gossip_runner import GossipRunner, MakePeerTransport
from edgefl.device.training.gossip_state import GossipStateStore
from edgefl.device.training.instruction import ParsedInstruction, parse_instruction
from edgefl.device.training.task_cache import CachedTask, TaskCache
from edgefl.tasks.local_algorithms.decentralised_training import run_gossip_instruction, train_node

log = logging.getLogger(__name__)

RELAY = "relay"
POLL_INTERVAL_S = 0.1


class FullModelRequiredError(NetworkError):
    """Missing base model: this device lacks the model that the instruction builds on."""


class GossipWorker:
    """Gossip worker; used by the training thread, `complete_run` and `pause` by any.

    Args:
        device_id: of the node.
        state_dir: the device's state directory.
        incarnation: grows with every start of the device, 1 or more.
        tasks: trainable tasks of this board.
        make_transport: for nodes whose messages the coordinator does not relay.
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
        self._runner = GossipRunner(device_id, state_dir, make_transport)

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
        inbox, model = decode_messages(instruction.header.get("mail", []), body)
        if instruction.plan.node.carrier != RELAY:
            return self._wait_for_report(instruction, cached_task, model, instruction.plan.node, should_finish_early)
        node = self._require_node(instruction, cached_task, model, instruction.plan.node)
        seed_key = (*instruction.seed_key, node.algorithm.iterations)
        result = run_gossip_instruction(
            node,
            cached_task.learner,
            self._load_training_data(instruction, cached_task),
            replace(instruction.plan, inbox=inbox),
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
        index, reply_body = encode_messages(result.outbox, report)
        metrics = {
            "iterations": result.iterations,
            "num_examples": result.num_examples,
            "loss": finite_or_none(result.loss),
            "compute_s": result.compute_s,
            "extra": {"dropped_messages": node.num_dropped},
        }
        return {"metrics": metrics, "mail": index}, reply_body

    def resume(self) -> None:
        """Resumes the node of an earlier run of the agent, if any."""
        header = self._runner.load_instruction()
        if header is None:
            return
        try:
            instruction = parse_instruction(self._device_id, header)
            with self._training_lock:
                if instruction.plan.node is not None:
                    self._start_session(instruction, self._tasks.get(header), b"", instruction.plan.node)
        except FullModelRequiredError:
            self._runner.discard_session()
        except Exception as error:  # the boundary of one run: the board must survive for the next
            is_known = isinstance(error, EdgeflError)
            log.warning("cannot go on as node of run %s: %s", header.get("run"), error, exc_info=not is_known)

    def complete_run(self, run: str) -> None:
        """Completes a run: its autonomous node stops soon."""
        threading.Thread(target=self._runner.complete_run, args=(run,), name="end of run", daemon=True).start()

    def reopen_run(self, run: str) -> None:
        """Accepts a run that starts, or continues after completion."""
        self._runner.reopen_run(run)

    def pause(self) -> None:
        """Stops an autonomous node until its next assignment."""
        threading.Thread(target=self._runner.pause, name="rest", daemon=True).start()

    def discard_other_runs(self, run: str) -> None:
        """Discards nodes of all runs but this one."""
        if self._runner.run_id not in {"", run}:
            self._runner.discard_session()

    @property
    def run_progress(self) -> tuple[str, int] | None:
        """Returns run and iterations of an autonomous node, or None."""
        return (self._runner.run_id, self._runner.count_iterations()) if self._runner.run_id else None

    def close(self) -> None:
        """Stops and saves the node."""
        self._runner.pause()
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
            self._runner.discard_session(instruction.run)
        if self._runner.run_id == instruction.run:
            self._runner.update_config(instruction.plan, instruction.header)
        else:
            self._start_session(instruction, cached_task, model, plan)
        self._training_lock.release()  # the node trains while this thread only waits
        try:
            report = self._runner.wait_for_report(
                plan.until, lambda: should_finish_early(self._runner.count_iterations())
            )
            if not model and self._state_store.has_diverged(instruction.run):
                raise FullModelRequiredError("needs the model: its training has diverged")
        except EdgeflError:
            if self._runner.run_id == instruction.run:  # a paused one is resumed later
                self._runner.discard_session(instruction.run)
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
        return {"metrics": metrics, "mail": index}, reply_body

    def _start_session(
        self, instruction: ParsedInstruction, cached_task: CachedTask, model: bytes, plan: GossipConfig
    ) -> None:
        def train(engine: GossipNode, burst: TrainConfig, is_leaving: Callable[[], bool]) -> tuple[int, float]:
            # The thread that ends this session may hold the lock while it waits for this one.
            while not self._training_lock.acquire(timeout=POLL_INTERVAL_S):
                if is_leaving():
                    return 0, 0.0

            def on_iteration(*_: object) -> bool:
                self._pace(is_leaving)
                return is_leaving()

            try:
                rng = derive_rng(instruction.seed, self._device_id, engine.algorithm.iterations)
                done, loss, _ = train_node(
                    engine,
                    cached_task.learner,
                    self._load_training_data(instruction, cached_task),
                    burst,
                    rng,
                    clock=time.monotonic,
                    on_iteration=on_iteration,
                )
            finally:
                self._training_lock.release()
            return done, loss

        self._runner.start(
            instruction.run,
            self._require_node(instruction, cached_task, model, plan),
            instruction.plan,
            train=train,
            save=lambda _: self._save_state(instruction),
            instruction=instruction.header,
        )

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
        return self._tasks.load_split(cached_task, float(instruction.header["test_fraction"]))[0]

    def _save_state(self, instruction: ParsedInstruction) -> None:
        self._state_store.save(only_when_due=instruction.header.get("residuals") != "durable")
