"""What comes over MQTT, on both sides, and from board to board."""

from __future__ import annotations

import json
import queue
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from fuzz.reader import Form, Reader, Seed

from edgefl.coordinator import pki
from edgefl.coordinator.api.feed_state import make_device_row
from edgefl.coordinator.execution.headers import parse_evaluate_result
from edgefl.coordinator.execution.messaging import DeviceRpc
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.fleet.telemetry_writer import TelemetryWriter
from edgefl.coordinator.monitoring.metrics import render_device_series
from edgefl.coordinator.rollouts.deployments import Deployments, DeploymentService
from edgefl.coordinator.rollouts.installations import BundleStore, Installations, InstallationService
from edgefl.core.errors import EdgeflError
from edgefl.core.metrics import compute_sums, make_metric_set
from edgefl.core.protocol import (
    Capabilities,
    Command,
    CommandKind,
    CommandReply,
    Heartbeat,
    ProgressReport,
    StatusMessage,
    Topic,
    parse_peer_topic,
    parse_topic,
)
from edgefl.core.types import CollectiveConfig, EvaluateInstruction, PeerMessage, Progress
from edgefl.device.diagnostics.json_log import _parse_query, read_page
from edgefl.device.mqtt.session import MessageDispatcher, MqttCallbacks
from edgefl.device.peers.collective_link import CollectiveLink
from edgefl.device.peers.collective_messages import ChunkMessage
from edgefl.device.peers.collective_messages import decode_message as decode_chunk
from edgefl.device.peers.collective_messages import encode_message as encode_chunk
from edgefl.device.peers.peer_connection import (
    FRAME_VERSION,
    HEADER,
    MAGIC,
    FrameKind,
    read_frame,
    verify_certificate,
)
from edgefl.device.state_dir import parse_lockout
from edgefl.storage.store import Store
from edgefl.strategies.peer_algorithms.collectives import AllReduce, make_schedule
from edgefl.strategies.peer_algorithms.gossip_node import decode_messages, decode_peer_message, encode_peer_message
from edgefl.tasks.metrics.registry import make_metric

FLUSHED_EVERY = 8
"""Writing to the store takes a hundred times longer than hearing a message."""


class Fleet:
    """A coordinator's ears: everything that a message of a device reaches, down to the store and the page."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder / "fleet.db")
        self.now_s = 1000.0
        self.registry = DeviceRegistry(PresenceTracker(), lambda: self.now_s)
        self.registry.record_broker_link(connected=True)
        self.progress: list[Progress] = []
        common: dict[str, Any] = {
            "store": self.store, "registry": self.registry, "send_command": lambda *_: None, "on_fatal": self._fatal,
        }  # fmt: skip
        parts: dict[str, Any] = {"store": self.store, "registry": self.registry}
        directory: Any = SimpleNamespace(models=folder / "models", root=folder)
        self.deployments = DeploymentService(
            Deployments(
                directory=directory,
                export=lambda *_: None,
                bundle_store=BundleStore(folder / "bundles"),
                **parts,
            ),
            **common,
        )
        self.installations = InstallationService(
            Installations(bundle_store=BundleStore(folder / "bundles"), **parts), **common
        )
        self.diary = TelemetryWriter(
            store=self.store, registry=self.registry, clock=lambda: 1e9 + self.now_s,
            on_progress=self.progress.append, on_heartbeat=self._beat,
        )  # fmt: skip
        self.store.add_token(token_id="t", secret_sha256="ab" * 32, expires_at=2e9, uses=100, groups=())
        self.join("pi")

    def join(self, name: str) -> None:
        self.store.enroll_device(
            token_id="t", secret_sha256="ab" * 32, now=1e9, device_id=name, public_key=name.encode()
        )
        self.registry.add(name, node_id=5, role="trainer", groups=(), examples={"digits": 9})

    def hear(self, kind: Topic, payload: bytes) -> None:
        """Takes a message as the coordinator does, shows the device as the page does, and writes now and then."""
        self.now_s += 0.25
        self.progress.clear()
        self.diary.on_message("pi", kind, payload)
        self.registry.tick()
        row = make_device_row(self.registry, "pi")
        json.dumps({"row": row, "facts": self.registry.list_status_rows()}, allow_nan=False).encode()
        render_device_series(self.registry, max_devices=10, now=1e9).encode()
        dict(self.registry.health)
        if zlib.crc32(payload) % FLUSHED_EVERY == 0:
            for rollouts in (self.deployments, self.installations):
                for device_id in rollouts._status_updates.list_pending():
                    rollouts._status_updates.dispatch(device_id, rollouts._on_report)
            self.diary.flush()
        else:  # so that what breaks a flush is in the message that was flushed
            self.diary._pending = type(self.diary._pending)()

    def _beat(self, device_id: str, heartbeat: Heartbeat) -> None:
        self.deployments.on_heartbeat(device_id, heartbeat)
        self.installations.on_heartbeat(device_id, heartbeat)

    def _fatal(self, error: EdgeflError) -> None:
        raise AssertionError(f"the store is said to be lost: {error}")


def status(folder: Path) -> Reader:
    """`status`, as the coordinator hears it."""
    said = (
        StatusMessage(state="online", boot_id="b1", session_no=3, version="0.9.1"),
        StatusMessage(state="offline", boot_id="b1", session_no=3, will=True),
        StatusMessage(state="draining", boot_id="b2", session_no=4, version="0.9.1"),
    )
    return _heard(folder, Topic.STATUS, [one.dump() for one in said])


def heartbeat(folder: Path) -> Reader:
    """`heartbeat`, with all that it may tell."""
    whole = Heartbeat(
        seq=7, session_no=3, uptime_s=55.5, clock_skew_s=-0.2, temperature_c=61.5, throttled="ok", cpu_fraction=0.5,
        memory_fraction=0.25, memory_bytes=10**8, disk_free_bytes=10**9, battery_fraction=0.9, power_w=4.5,
        run="run-1", assignment="run-1/a1", iteration=12, holding=["run-1/a1"], model="ab" * 32,
        deployment={"id": "d1", "state": "running", "accuracy": 0.9, "num_examples": 12, "runs": "d1"},
        installation={"id": "i1", "state": "running", "reason": None},
        allowance={"window": [60, 90], "run": "run-1", "run_window": [5, None],
                   "day": {"renews_s": 60, "traffic": [1, 2, None], "energy": [1, 2, 0.5]}},
    )  # fmt: skip
    return _heard(folder, Topic.HEARTBEAT, [whole.dump(), Heartbeat(seq=1, session_no=9, uptime_s=0.0).dump()])


def capabilities(folder: Path) -> Reader:
    """`capabilities`: whatever a board found out about itself."""
    facts = {
        "model": "Raspberry Pi 5", "cores": 4, "memory_bytes": 8 * 10**9, "accelerators": ["cpu"],
        "steps_per_s": {"digits": {"steps_per_s": 12.5}}, "libraries": {"numpy": "2.1"}, "blocks": {"digits": [0, 1]},
        "compression": {"topk": 1e6},
    }  # fmt: skip
    return _heard(folder, Topic.CAPABILITIES, [Capabilities(facts=facts, shards={"digits": 90}).dump()])


def progress(folder: Path) -> Reader:
    """`progress` of an assignment."""
    report = ProgressReport(assignment="run-1/a1", iteration=3, seconds_per_iteration=0.25, age_s=0.1)
    return _heard(folder, Topic.PROGRESS, [report.dump()])


def answer(folder: Path) -> Reader:
    """`answer` to a question of the coordinator."""
    fleet = Fleet(folder)
    questions = DeviceRpc(SimpleNamespace(send_command=lambda *_: None), fleet.registry)
    said: queue.SimpleQueue[CommandReply] = queue.SimpleQueue()
    questions._pending_calls["c1"] = "pi", said
    lines = {"lines": [{"n": 1, "at": 5.0, "level": "INFO", "message": "ä"}], "has_more": False}

    def feed(data: bytes) -> None:
        questions.on_reply("pi", data)
        while not said.empty():
            json.dumps(said.get().content, allow_nan=False).encode()

    seeds = (CommandReply(id="c1", content=lines), CommandReply(id="c1", error="no"))
    seeds_of = tuple(Seed(content=one.dump(), form=Form.JSON) for one in seeds)
    return Reader(feed=feed, seeds=seeds_of, close=fleet.store.close)


def commands(folder: Path) -> Reader:
    """`command` and the device's own `status`, as the device's link takes them; and what a question asks."""
    obeyed: list[Command] = []
    told: list[StatusMessage] = []
    incoming: Any = MessageDispatcher(
        MqttCallbacks(on_wake_up=lambda: None, on_command=obeyed.append),
        SimpleNamespace(warning=_raise_again),  # type: ignore[arg-type] # it only complains
        is_subscribed_to_peers=lambda: False,
        on_offline=lambda _session, status: told.append(status),
    )
    incoming._guard = lambda action: action()
    session = SimpleNamespace()
    folder = folder / "logs"
    folder.mkdir()
    (folder / "agent.log").write_text('{"n": 1, "at": 5.0, "run": "r"}\n')

    def feed(data: bytes) -> None:
        kind, payload = (Topic.STATUS, data[1:]) if data[:1] == b"s" else (Topic.COMMAND, data[1:])
        message = SimpleNamespace(topic=f"edgefl/v1/lab/pi/{kind}", payload=payload)
        obeyed.clear()
        told.clear()
        incoming._recent_command_ids.clear()
        incoming._on_message(None, session, message)
        for command in obeyed:
            hash(command.id)
            assert command.argument is None or isinstance(command.argument, str)
            if command.kind == CommandKind.LOGS:
                json.dumps(read_page(folder, _parse_query(command)))
            if command.kind == CommandKind.LOCKOUT:
                with suppress(ValueError):
                    parse_lockout(command.argument or "", "b1")

    logs = Command(id="c1", kind="logs", argument=json.dumps({"after": 1, "since": 2.5, "run": "r"}))
    refused = Command(id="c3", kind="lockout", argument=json.dumps({"boot_id": "b1", "reason": "a copy"}))
    said = [
        logs,
        refused,
        *(Command(id="c2", kind=str(kind), argument="x") for kind in CommandKind if kind != CommandKind.LOGS),
    ]
    inner = Seed(
        content=(logs.argument or "").encode(), form=Form.JSON,
        close=lambda found: b"c" + json.dumps({"v": 1, "id": "c", "kind": "logs",
        "argument": found.decode(errors="replace")}).encode(),
    )  # fmt: skip
    seeds = [inner, *(Seed(content=one.dump(), form=Form.JSON, close=lambda found: b"c" + found) for one in said)]
    own = StatusMessage(state="offline", boot_id="b", session_no=1, will=True).dump()
    return Reader(feed=feed, seeds=(*seeds, Seed(content=own, form=Form.JSON, close=lambda found: b"s" + found)))


def topics(_folder: Path) -> Reader:
    """Names of topics."""

    def feed(data: bytes) -> None:
        name = data.decode(errors="surrogateescape")
        try:
            parse_topic(name)
        except EdgeflError:
            parse_peer_topic(name)

    seeds = [Seed(content=name, form=Form.TEXT) for name in (b"edgefl/v1/lab/pi/status", b"edgefl/v1/lab/a/peer/b")]
    return Reader(feed=feed, seeds=tuple(seeds), words=(b"edgefl", b"v1", b"peer", b"bell", b"+", b"#"))


def neighbours(_folder: Path) -> Reader:
    """`peer` messages of other devices, and the mail beside an instruction's body."""
    message = PeerMessage(edge=("a", "b"), step=3, body=b"body of a codec", is_reply=False)
    packed = encode_peer_message("run-1", message)
    line, _, body = packed.partition(b"\n")

    def feed(data: bytes) -> None:
        run, found = decode_peer_message(data)
        assert isinstance(run, str)
        hash((found.edge, found.step))
        decode_messages([[*found.edge, found.step, 0, len(found.body)]], found.body)

    seeds = (Seed(content=packed), Seed(content=line, form=Form.JSON, close=lambda found: found + b"\n" + body))
    return Reader(feed=feed, seeds=seeds)


def chunks(_folder: Path) -> Reader:
    """Messages of another member of a collective, up to the sum that they are added to."""
    names = ("a", "b")
    schedule = make_schedule("ring", 2, 4)
    transport = SimpleNamespace(
        **dict.fromkeys(("set_peers", "set_addresses", "start", "send"), lambda *_, **__: None)
    )
    link = CollectiveLink("a", lambda *_: transport)
    config = CollectiveConfig(collective="ring", members=names, group="g", addresses=("h:1", "h:2"))
    link.open("r", config, schedule, vector_bytes=16)
    message = ChunkMessage(group=link._group, session=b"s" * 8, reduction=0, step=0, start=2, values=bytes(8))

    def feed(data: bytes) -> None:
        found = decode_chunk(data)
        hash((found.group, found.session, found.reduction, found.step, found.start, found.is_abort))
        link.open("r", config, schedule, vector_bytes=16)
        link.receive("b", data)
        member = AllReduce(schedule, 0, np.zeros(4, np.float32), chunk_size=2)
        link._take(member, 0, np.dtype(np.float32))

    return Reader(feed=feed, seeds=(Seed(content=encode_chunk(message)),))


def frames(_folder: Path) -> Reader:
    """Frames from board to board, from a connection that ends behind them."""

    class Connection:
        def __init__(self, content: bytes) -> None:
            self.rest = memoryview(content)

        def settimeout(self, _seconds: float) -> None: ...

        def recv(self, count: int) -> bytes:
            piece, self.rest = self.rest[:count], self.rest[count:]
            return bytes(piece)

    def feed(data: bytes) -> None:
        connection: Any = Connection(data)
        while connection.rest:
            read_frame(connection, idle_timeout_s=1.0)

    def frame(kind: FrameKind, payload: bytes = b"") -> bytes:
        return HEADER.pack(MAGIC, FRAME_VERSION, kind, len(payload), 77, 3) + payload

    seeds = [
        frame(FrameKind.WELCOME),
        frame(FrameKind.MESSAGE, b"x" * 40) + frame(FrameKind.KEEP_ALIVE),
        frame(FrameKind.ACK),
    ]
    return Reader(feed=feed, seeds=tuple(Seed(content=one) for one in seeds), refuses=(EdgeflError, ConnectionError))


def metric_sums(_folder: Path) -> Reader:
    """The sums of metrics that a board answers an evaluation with."""
    names = ("f1-macro", "log-loss", "calibration-error")
    metrics = make_metric_set({name: make_metric(name) for name in names}, 3, np.zeros(0, np.int64))
    sums = compute_sums(metrics.metrics, [(np.eye(3), np.array([0, 1, 1]), None)])
    asked = EvaluateInstruction(assignment_id="e", device_id="pi", version=1, round=1)
    figures = {"num_examples": 3, "loss": 0.5, "accuracy": 0.5}
    return Reader(
        feed=lambda data: parse_evaluate_result(asked, figures, "device", data, metrics),
        seeds=(Seed(content=metrics.encode(sums)),),
        refuses=(ValueError,),
    )


def shown_certificates(_folder: Path) -> Reader:
    """The certificate that another board shows."""
    authority = pki.create_authority("lab")
    ours = x509.load_pem_x509_certificate(authority.cert_pem)
    client = x509.load_pem_x509_certificate(pki.issue_client_certificate(authority, "pi-1").cert_pem)
    other = x509.load_pem_x509_certificate(pki.issue_client_certificate(pki.create_authority("lab"), "pi-1").cert_pem)

    def feed(data: bytes) -> None:
        assert verify_certificate(data, ours) == "pi-1"

    der = client.public_bytes(Encoding.DER)
    assert der != other.public_bytes(Encoding.DER)
    return Reader(feed=feed, seeds=(Seed(content=der),))


def _heard(folder: Path, kind: Topic, payloads: list[bytes]) -> Reader:
    fleet = Fleet(folder)
    seeds = tuple(Seed(content=payload, form=Form.JSON) for payload in payloads)
    return Reader(feed=lambda data: fleet.hear(kind, data), seeds=seeds, close=fleet.store.close)


def _raise_again(_key: str, _text: str, *values: object) -> None:
    """Takes the place of a line in the log: what is logged as a malformed message is the refusal."""
    raise next(value for value in values if isinstance(value, EdgeflError))
