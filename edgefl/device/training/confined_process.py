"""Confined training process: the trainer beside the agent, and the messages between the two.

A message is a JSON object and a body. The agent sends calls, one at a time, and notices; the process sends one reply
to a call, notices, and requests of its own, about transports of messages to neighbours, which the agent answers.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

from edgefl.core.errors import EdgeflError, NetworkError
from edgefl.core.protocol import MAX_BODY_BYTES
from edgefl.core.types import GossipConfig, Json
from edgefl.device.hardware.health import create_thermal_pacer
from edgefl.device.hardware.requirements import read_task_traits
from edgefl.device.peers.peer_connection import OnPeerMessage
from edgefl.device.training.process_link import TrainingSetup
from edgefl.device.training.trainer import DeviceTrainer, TrainingAbortedError
from edgefl.system.process_messages import read_message, write_message

ALIVE_INTERVAL_S = 0.25
IDLE_POLL_S = 30.0


class AgentConnection:
    """The process's end; sends from any thread."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._send_lock, self._request_lock = threading.Lock(), threading.Lock()
        self._answers: queue.SimpleQueue[Json] = queue.SimpleQueue()
        self.calls: queue.SimpleQueue[tuple[Json, bytes]] = queue.SimpleQueue()

    def send(self, header: Json, body: bytes = b"") -> None:
        with self._send_lock:
            write_message(self._sink, header, body)

    def request(self, name: str) -> Json:
        """Returns the agent's answer to a request.

        Raises:
            NetworkError: that the agent answered with.
        """
        with self._request_lock:
            self.send({"request": name})
            answer = self._answers.get()
        if "error" in answer:
            raise NetworkError(str(answer["error"]))
        return answer

    def receive(self) -> tuple[Json, bytes]:
        """Returns the next call or notice; ends the process with the agent's end."""
        while True:
            message = read_message(self._source, MAX_BODY_BYTES)
            if message is None:
                os._exit(0)
            if "answer" not in message[0]:
                return message
            self._answers.put(message[0])


class RelayedTransport:
    """`PeerTransport` of the agent, used from here: the key that its connections need stays there."""

    def __init__(self, agent: AgentConnection) -> None:
        self._agent = agent
        self._peers: frozenset[str] = frozenset()

    def start(self) -> None:
        self._agent.request("start")

    def stop(self) -> None:
        self._agent.request("stop")

    def send(self, receiver: str, payload: bytes, *, is_reply: bool = False) -> bool:
        self._agent.send({"notice": "message", "receiver": receiver, "is_reply": is_reply}, payload)
        return True

    def is_drained(self) -> bool:
        return bool(self._agent.request("is_drained").get("is_drained"))

    def list_connected_peers(self) -> frozenset[str]:
        return self._peers

    def get_refusal_times(self) -> Mapping[str, float]:
        return {}

    def set_peers(self, peers: Collection[str]) -> None:
        self._peers = frozenset(peers)
        self._agent.send({"notice": "peers", "peers": list(peers)})

    def set_addresses(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Does nothing: the agent has them from the instruction."""


class TrainingProcess:
    """The process: its main thread trains, another one receives."""

    def __init__(self, setup: TrainingSetup, agent: AgentConnection) -> None:
        self._agent = agent
        self._alive_s, self._is_interrupted = 0.0, False
        self._receive_peer_message: OnPeerMessage = lambda *_: None
        self._trainer = DeviceTrainer(
            device_id=setup.device_id,
            role=setup.role,
            shards=lambda: setup.shards,
            accelerator=setup.accelerator,
            threads=setup.threads,
            state_dir=Path(setup.scratch),
            on_progress=self._report_progress,
            incarnation=setup.incarnation,
            make_transport=self._make_transport,
            thermal_pacer=create_thermal_pacer(lambda: setup.max_temperature_c),
            on_alive=self._report_alive,
            bases_dir=Path(setup.bases),
            get_min_group=lambda: setup.min_group,
            get_drift_references=lambda: setup.drift_references,
            check_conditions=self._check_interrupted,
        )

    def run(self) -> None:
        threading.Thread(target=self._receive, name="agent", daemon=True).start()
        while True:
            try:
                header, body = self._agent.calls.get(timeout=IDLE_POLL_S)
            except queue.Empty:
                self._trainer.remove_expired()
                continue
            reply, result = self._execute(str(header["call"]), header.get("header", {}), body)
            self._agent.send({"reply": reply}, result)
            if header["call"] == "close":
                return

    def _execute(self, name: str, header: Json, body: bytes) -> tuple[Json, bytes]:
        try:
            match name:
                case "train":
                    return self._trainer.train(header, body)
                case "evaluate":
                    return self._trainer.evaluate(header, body)
                case "describe":
                    return self._describe(str(header["task"])), b""
                case "resume":
                    self._trainer.resume()
                case "close":
                    self._trainer.close()
        except TrainingAbortedError:
            return {"is_aborted": True}, b""
        return {}, b""

    def _describe(self, name: str) -> Json:
        """Returns what an agent must know of a task and its shard without loading either."""
        try:
            facts = asdict(read_task_traits(name))
        except EdgeflError as error:
            return {"error": str(error)}
        counts = self._trainer.count_examples()
        errors, drift = self._trainer.get_shard_errors(), self._trainer.measure_drift()
        facts |= {"drift": drift[name]} if name in drift else {}
        return {**facts, **({"num_examples": counts[name]} if name in counts else {"error": errors.get(name, "")})}

    def _receive(self) -> None:
        while True:
            header, body = self._agent.receive()
            if "call" in header:
                self._is_interrupted = False  # here: an interrupt may follow before the main thread takes the call
                self._agent.calls.put((header, body))
                continue
            argument = str(header.get("argument"))
            match header.get("notice"):
                case "finish_early":
                    self._trainer.finish_early(argument)
                case "continue":
                    self._trainer.continue_training(argument)
                case "complete_run":
                    self._trainer.complete_run(argument)
                case "pause":
                    self._trainer.pause()
                case "interrupt":
                    self._is_interrupted = True
                case "abort":
                    self._trainer.abort()
                case "message":
                    self._receive_peer_message(argument, body)

    def _check_interrupted(self) -> None:
        if self._is_interrupted:
            raise TrainingAbortedError

    def _make_transport(self, _plan: GossipConfig, on_message: OnPeerMessage) -> RelayedTransport:
        self._receive_peer_message = on_message
        return RelayedTransport(self._agent)

    def _report_progress(self, assignment: str, iteration: int, seconds: float) -> bool:
        self._agent.send({"notice": "progress", "assignment": assignment, "iteration": iteration, "seconds": seconds})
        return True

    def _report_alive(self) -> None:
        if time.monotonic() - self._alive_s >= ALIVE_INTERVAL_S:
            self._alive_s, current = time.monotonic(), self._trainer.current
            self._agent.send({"notice": "alive", "iteration": current[2] if current else 0})


def main() -> None:
    """Serves the agent over the standard streams, which code of others then no longer has."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    agent = AgentConnection(source, sink)
    setup, _ = agent.receive()
    TrainingProcess(TrainingSetup(**setup), agent).run()
    os._exit(0)


if __name__ == "__main__":
    main()
