"""One device that is only as much as its coordinator can see: it joins, connects, beats, pulls, answers.

All that it says goes through edgefl's own code for devices (`join`, `new_session`, `Incoming`, `SuperNode`). What a
board does besides (a heart and a link with threads of their own, vital signs, training) is left out: a crowd of them
in one process has one thread for MQTT and some for work (`stand_ins`).
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
from edgefl.compression.codec import make_codec
from edgefl.compression.decoding import decode_body
from edgefl.device.complaints import Complaints
from edgefl.device.incoming import Incoming, LinkCallbacks
from edgefl.device.jobs import job_of
from edgefl.device.link import KEEP_ALIVE_S
from edgefl.device.mqtt_session import LinkIdentity, LinkTls, Session, link_context, new_session
from edgefl.device.state import DeviceState
from edgefl.device.supernode import Answer, RefusedError, SuperNode
from edgefl.device.trust import say_hello
from edgefl.device.workbench import KEPT_ANSWERS
from edgefl.protocol import (
    HEARTBEAT_JITTER,
    Capabilities,
    Command,
    CommandKind,
    Heartbeat,
    PresenceState,
    Topic,
    host_and_port,
)
from edgefl.tasks.noop import NUM_EXAMPLES
from edgefl.types import Array, Json, Shapes, derived_rng

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

    shapes: Shapes
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
        state: DeviceState,
        trust: ssl.SSLContext,
        facts: Json,
        tally: Tally,
        on_bell: Callable[[StandIn], None],
    ) -> None:
        self.name, self._state, self._trust, self._facts, self._tally = state.device_id, state, trust, facts, tally
        self._rng = derived_rng("stand-in", self.name)
        self._boot_id, self._tls = uuid.uuid4().hex, LinkTls(ca=state.ca, cert=state.cert, key=state.key)
        self._context: ssl.SSLContext | None = None
        self._incoming = Incoming(
            LinkCallbacks(on_bell=lambda: on_bell(self), on_command=self._obey),
            Complaints(log),
            listens_to_peers=lambda: False,
            on_offline=lambda session, _: session.publish_status(PresenceState.ONLINE),
        )
        self._node = SuperNode(
            private_key_pem=state.key.read_bytes(), trust=trust, clock=time.time, train=self._trained,
            evaluate=self._evaluated,
        )  # fmt: skip
        self._prepared: tuple[str, int] | None = None
        self._finished: deque[str] = deque(maxlen=KEPT_ANSWERS)
        self._now: tuple[str, str] | None = None
        self._unsent: Message | None = None
        self._started_s = time.monotonic()
        self.session: Session | None = None
        self.beats_at: list[float] = []
        """When its heartbeats left, in Unix seconds, by their numbers."""
        self.is_up, self.asked_s = False, 0.0
        self.lock = threading.Lock()

    # HTTPS: in any thread, one at a time.

    def activate(self) -> None:
        """Takes its place at the coordinator; raises an `EdgeflError` where that fails."""
        address = self._state.device.addresses[0]
        say_hello(address, self._trust)
        self._node.connect(address)

    def work(self) -> None:
        """Asks for work once, and does it."""
        with self.lock:
            self._push_waiting()
            self.asked_s = time.monotonic()
            instruction = self._node.pull()
            if instruction is None:
                return
            for used in instruction.header.get("settled", ()):
                if used in self._finished:
                    self._finished.remove(used)
            try:
                self._unsent = self._node.answer(instruction)
            finally:
                self._now = None
            self._push_waiting()

    def _push_waiting(self) -> None:
        """Sends the answer that is not sent yet; it stays here until it is, or nobody wants it."""
        if self._unsent is None:
            return
        try:
            self._node.push(self._unsent)
        except RefusedError:
            self._tally.note_try(f"the answer of {self.name} is not wanted")
        self._unsent = None

    def close(self) -> None:
        self._node.close()

    def _trained(self, header: Json, body: bytes) -> Answer:
        reply: Json = {"v": 1, "run": header["run"], "assignment": header["assignment"]}
        if "phase" in header:
            self._prepare(header, body)
            return {**reply, "ready": True}, b""
        begun_s, job = time.monotonic(), job_of(self.name, header)
        self._now = job.run, job.assignment_id
        if header.get("prepared") is not None:
            if self._prepared != (job.run, header["prepared"]):
                return {**reply, "error": "the model is not here", "needs_dense": True}, b""
            body = self._tally.bodies[self._prepared]
        decode_body(body, self._tally.shapes)
        rng = derived_rng(*job.origin, "stand-in")
        (spec,) = self._tally.shapes
        moved = rng.standard_normal(spec.shape, np.float32) * np.float32(STEP)
        encoded = make_codec(job.spec, self._tally.shapes).encode({spec.name: moved}, rng)
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

    def _evaluated(self, header: Json, body: bytes) -> Answer:
        decode_body(body, self._tally.shapes)
        reply: Json = {"v": 1, "run": header["run"], "assignment": header["assignment"]}
        return {**reply, "metrics": {"num_examples": NUM_EXAMPLES, "loss": 0.0, "accuracy": 0.0}}, b""

    # MQTT.

    def dial(self) -> Session:
        """Returns a session that is connecting; TLS is done, what MQTT says is not yet read or written."""
        if self._context is None:
            self._context = link_context(self._tls)
        device = self._state.device
        identity = LinkIdentity(fleet=device.fleet, device_id=self.name, boot_id=self._boot_id, version=__version__)
        session = new_session(identity, self._state.next_session_no(), self._context)
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
        arriving = self._node.arriving
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
        if command.kind == CommandKind.BEAT:  # the others are about what a stand-in has not
            self.beat()

    def _connected(self, client: mqtt.Client, session: Session, _flags: Any, reason: Any, _props: Any) -> None:
        if reason.is_failure:
            self._tally.failed(f"the broker refuses {self.name}: {reason}")
            return
        session.was_accepted = True
        session.publish_status(PresenceState.ONLINE)
        capabilities = Capabilities(facts=self._facts, shards={"noop": NUM_EXAMPLES})
        session.publish(Topic.CAPABILITIES, capabilities.dump(), qos=1, retain=True)
        kinds = ((Topic.BELL, 0), (Topic.COMMAND, 1), (Topic.STATUS, 1))
        client.subscribe([(session.topic(kind), qos) for kind, qos in kinds])

    def _subscribed(self, _client: Any, session: Session, _mid: int, reasons: Any, _props: Any) -> None:
        if any(reason.is_failure for reason in reasons):
            self._tally.failed(f"the broker lets {self.name} hear nothing")
            return
        self.session, self.is_up = session, True
        self.beat()
        self._incoming.connection(is_up=True)
