"""One device that is only as much as its coordinator can see: it joins, connects, beats, pulls, answers.

All that it says goes through edgefl's own code for devices (`enroll`, `create_session`, `MessageDispatcher`,
`SuperNode`). What a board does besides (a heart and a link with threads of their own, vital signs, training) is left
out: a crowd of them in one process has one thread for MQTT and some for work (`stand_ins`).
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paho.mqtt.client as mqtt
from flwr.app import Message

from edgefl import __version__
from edgefl.compression.codec import decode_body, make_codec
from edgefl.core.protocol import (
    HEARTBEAT_JITTER,
    Capabilities,
    Command,
    CommandKind,
    Heartbeat,
    PresenceState,
    Topic,
    host_and_port,
)
from edgefl.core.types import Array, Json, ModelSpec, derive_rng
from edgefl.device.flower.supernode import ReplyContent, ReplyRejectedError, SuperNode
from edgefl.device.flower.work_loop import MAX_CACHED_REPLIES
from edgefl.device.mqtt.connection import KEEP_ALIVE_S
from edgefl.device.mqtt.session import (
    MessageDispatcher,
    MqttCallbacks,
    MqttIdentity,
    MqttSession,
    create_session,
    create_tls_context,
)
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.training.instruction import parse_instruction
from edgefl.system.https_client import fetch_coordinator_info
from edgefl.system.retries import RateLimitedLog
from edgefl.tasks.noop import NUM_EXAMPLES

log = logging.getLogger(__name__)

STEP = 1e-3
"""Standard deviation of every number of an update."""


@dataclass(slots=True)
class Tally:
    """What the stand-ins of a process have done.

    Attributes:
        sums: their displacements by run and version, added up.
        late_s: by how much later than it was due each heartbeat left, since that was last told.
    """

    shapes: ModelSpec
    num_updates: int = 0
    num_lost_sessions: int = 0
    late_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tries: list[str] = field(default_factory=list)
    sums: dict[tuple[str, int], Array] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    bodies: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def count(self, run: str, version: int, displacement: Array) -> None:
        with self.lock:
            self.num_updates += 1
            if (run, version) not in self.sums:
                self.sums[run, version] = np.zeros(displacement.shape, np.float64)
            self.sums[run, version] += displacement

    def note_try(self, what: str) -> None:
        """Counts what is tried again."""
        with self.lock:
            self.tries.append(what)

    def failed(self, what: str) -> None:
        with self.lock:
            self.errors.append(what)


class StandIn:
    """A device that has joined; its MQTT side belongs to one thread, `work` to one other at a time.

    Args:
        state: of its join.
        trust: verifies the coordinator; one for all.
        facts: what it says that it can do.
        tally: where it counts what it does.
        on_bell: called when work waits, with itself.
    """

    def __init__(
        self,
        state: DeviceStateDir,
        trust: ssl.SSLContext,
        facts: Json,
        tally: Tally,
        on_bell: Callable[[StandIn], None],
    ) -> None:
        self.name, self._state, self._trust, self._facts, self._tally = state.device_id, state, trust, facts, tally
        self._rng = derive_rng("stand-in", self.name)
        self._boot_id, self._tls = uuid.uuid4().hex, state.tls_files
        self._context: ssl.SSLContext | None = None
        self._incoming = MessageDispatcher(
            MqttCallbacks(on_wake_up=lambda: on_bell(self), on_command=self._obey),
            RateLimitedLog(log),
            is_subscribed_to_peers=lambda: False,
            on_offline=lambda session, _: session.publish_status(PresenceState.ONLINE),
        )
        self._node = SuperNode(private_key_pem=state.key.read_bytes(), tls_context=trust, clock=time.time)
        self._prepared: tuple[str, int] | None = None
        self._finished: deque[str] = deque(maxlen=MAX_CACHED_REPLIES)
        self._now: tuple[str, str] | None = None
        self._unsent: Message | None = None
        self._started_s = time.monotonic()
        self.session: MqttSession | None = None
        self.beats_at: list[float] = []
        """When its heartbeats left, in Unix seconds, by their numbers."""
        self.is_up, self.asked_s = False, 0.0
        self.lock = threading.Lock()

    # HTTPS: in any thread, one at a time.

    def activate(self) -> None:
        """Takes its place at the coordinator; raises an `EdgeflError` where that fails."""
        address = self._state.settings.addresses[0]
        fetch_coordinator_info(address, self._trust)
        self._node.connect(address)

    def work(self) -> None:
        """Asks for work once, and does it."""
        with self.lock:
            self._push_waiting()
            self.asked_s = time.monotonic()
            instruction = self._node.pull()
            if instruction is None:
                return
            for used in instruction.header.get("used_assignments", ()):
                if used in self._finished:
                    self._finished.remove(used)
            try:
                execute = self._evaluated if instruction.is_evaluation else self._trained
                self._unsent = self._node.create_reply(instruction, execute(instruction.header, instruction.body))
            finally:
                self._now = None
            self._push_waiting()

    def _push_waiting(self) -> None:
        """Sends the answer that is not sent yet; it stays here until it is, or nobody wants it."""
        if self._unsent is None:
            return
        try:
            self._node.push(self._unsent)
        except ReplyRejectedError:
            self._tally.note_try(f"the answer of {self.name} is not wanted")
        self._unsent = None

    def close(self) -> None:
        self._node.close()

    def _trained(self, header: Json, body: bytes) -> ReplyContent:
        reply = _create_reply(header)
        if "phase" in header:
            self._prepare(header, body)
            return {**reply, "ready": True}, b""
        begun_s, job = time.monotonic(), parse_instruction(self.name, header)
        self._now = job.run, job.assignment_id
        if header.get("prefetched_version") is not None:
            if self._prepared != (job.run, header["prefetched_version"]):
                return {**reply, "error": "the model is not here", "requires_full_model": True}, b""
            body = self._tally.bodies[self._prepared]
        decode_body(body, self._tally.shapes)
        rng = derive_rng(*job.seed_key, "stand-in")
        (spec,) = self._tally.shapes
        moved = rng.standard_normal(spec.shape, np.float32) * np.float32(STEP)
        encoded = make_codec(job.codec_spec, self._tally.shapes).encode({spec.name: moved}, rng)
        if job.assignment_id not in self._finished:  # or it is asked for again, and gets the same
            self._tally.count(job.run, job.version, moved)
            self._finished.append(job.assignment_id)
        metrics = {
            "iterations": 1, "num_examples": NUM_EXAMPLES, "loss": 0.0, "compute_s": time.monotonic() - begun_s,
        }  # fmt: skip
        return {**reply, "metrics": metrics}, encoded

    def _prepare(self, header: Json, body: bytes) -> None:
        """Keeps the model that comes ahead: one copy for all, since it is the same for all."""
        if body:
            decode_body(body, self._tally.shapes)
            self._prepared = str(header["run"]), int(header["version"])
            self._tally.bodies.setdefault(self._prepared, body)

    def _evaluated(self, header: Json, body: bytes) -> ReplyContent:
        decode_body(body, self._tally.shapes)
        reply = _create_reply(header)
        return {**reply, "metrics": {"num_examples": NUM_EXAMPLES, "loss": 0.0, "accuracy": 0.0}}, b""

    # MQTT.

    def dial(self) -> MqttSession:
        """Returns a session that is connecting; TLS is done, what MQTT says is not yet read or written."""
        if self._context is None:
            self._context = create_tls_context(self._tls)
        device = self._state.settings
        identity = MqttIdentity(fleet=device.fleet, device_id=self.name, boot_id=self._boot_id, version=__version__)
        session = create_session(identity, self._state.next_session_no(), self._context)
        session.client.on_connect = self._connected
        session.client.on_subscribe = self._subscribed
        self._incoming.attach(session)
        host = device.broker_host or host_and_port(device.addresses[0])[0]
        session.client.connect(host, device.broker_port, keepalive=KEEP_ALIVE_S)
        return session

    def beat(self) -> None:
        """Sends a heartbeat, if there is a link."""
        session = self.session
        if session is None or not self.is_up:
            return
        self.beats_at.append(time.time())
        run, assignment = self._now or (None, None)
        arriving = self._node.incoming_assignment
        holding = [*self._finished, *([arriving] if arriving else [])]
        told = Heartbeat(
            seq=len(self.beats_at), session_no=session.number, uptime_s=round(time.monotonic() - self._started_s, 3),
            clock_skew_s=0.0, temperature_c=round(float(self._rng.normal(56, 7)), 1), throttled="ok",
            cpu_fraction=round(float(self._rng.uniform(0.1, 0.9)), 3), memory_fraction=0.41,
            memory_bytes=75_000_000, disk_free_bytes=20_000_000_000, run=run, assignment=assignment, holding=holding,
        )  # fmt: skip
        session.publish(Topic.HEARTBEAT, told.dump())

    def next_beat_s(self, beat_s: float) -> float:
        """Returns in how many seconds it beats again, on average in so many."""
        return beat_s * (1 + float(self._rng.uniform(-HEARTBEAT_JITTER, HEARTBEAT_JITTER)))

    def say_goodbye(self) -> None:
        if self.session is not None and self.is_up:
            self.session.publish_status(PresenceState.OFFLINE)
            self.session.client.disconnect()

    def _obey(self, command: Command) -> None:
        if command.kind == CommandKind.HEARTBEAT:  # the others are about what a stand-in has not
            self.beat()

    def _connected(self, client: mqtt.Client, session: MqttSession, _flags: Any, reason: Any, _props: Any) -> None:
        if reason.is_failure:
            self._tally.failed(f"the broker refuses {self.name}: {reason}")
            return
        session.is_accepted = True
        session.publish_status(PresenceState.ONLINE)
        capabilities = Capabilities(facts=self._facts, shards={"noop": NUM_EXAMPLES})
        session.publish(Topic.CAPABILITIES, capabilities.dump(), qos=1, retain=True)
        kinds = ((Topic.WAKEUP, 0), (Topic.COMMAND, 1), (Topic.STATUS, 1))
        client.subscribe([(session.topic(kind), qos) for kind, qos in kinds])

    def _subscribed(self, _client: Any, session: MqttSession, _mid: int, reasons: Any, _props: Any) -> None:
        if any(reason.is_failure for reason in reasons):
            self._tally.failed(f"the broker lets {self.name} hear nothing")
            return
        self.session, self.is_up = session, True
        self.beat()
        self._incoming.notify_connection(is_connected=True)


def _create_reply(header: Json) -> Json:
    repeated = {key: header[key] for key in ("lineage", "model_sha256", "newest_record") if key in header}
    return {"v": 2, "run": header["run"], "assignment": header["assignment"], **repeated}
