"""The coordinator's port, as ASGI and without a socket: the API of operators and the page, Flower's, and replies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import quote, unquote_to_bytes

import anyio.to_thread
import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from fuzz.reader import MIB, Form, Reader, Seed
from noted_calls import NotedCalls

from edgefl.compression.codec import decode_body, make_codec
from edgefl.coordinator.api.server import make_app
from edgefl.coordinator.directory import add_access_tokens, init_directory
from edgefl.coordinator.execution.fleet_view import RunSpec
from edgefl.coordinator.execution.live_fleet import LiveFleet
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.flower.link_state import FleetApiError
from edgefl.coordinator.flower.messages import Reply
from edgefl.coordinator.flower.stock_messages import encode_objects
from edgefl.coordinator.flower.superlink import SuperLink, prepare_body
from edgefl.coordinator.service import Coordinator, StartOptions
from edgefl.core.errors import DataError, EdgeflError, NetworkError
from edgefl.core.fleet_messages import (
    REQUESTS,
    RESPONSES,
    Message,
    Metadata,
    Node,
    ObjectTree,
    make_content,
    parse_protobuf,
)
from edgefl.core.flower_objects import compute_object_id
from edgefl.core.protocol import (
    INSTANCE_HEADER,
    JOB_LIMITS,
    KEY_HEADER,
    SIGNATURE_HEADER,
    SIGNED_HEADERS,
    STAMP_HEADER,
    StatusMessage,
    compute_push_hash,
    make_signed_request,
)
from edgefl.core.types import (
    EvaluateInstruction,
    GossipConfig,
    InstructionFailed,
    PeerLinkConfig,
    TensorSpec,
    TrainConfig,
    TrainInstruction,
    derive_rng,
)
from edgefl.device.flower.supernode import RequestSigner, SuperNode
from edgefl.device.training.instruction import parse_instruction
from edgefl.engine.assembly.build import build_run
from edgefl.flower.app_bundle import AppBundle
from edgefl.flower.app_messages import encode_envelope, encode_message
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.checkpoints import save_model

SHAPES = (TensorSpec(name="w", shape=(3,)),)
RUN_FILE = {"run": {"task": "digits", "rounds": 3, "seed": 7}, "strategy": {"name": "fedavg"}}


class Port:
    """An ASGI application that is asked one request after the other; `end` is called when it is closed."""

    def __init__(self, app: Any, end: Callable[[], object] = lambda: None) -> None:
        self.app, self._loop, self._end = app, asyncio.new_event_loop(), end

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._end()

    def ask(
        self, method: str, path: bytes, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> tuple[int, bytes]:
        """Returns status and body; an exception that leaves the application is the caller's.

        What the application does in threads is done in this one: a request is over before the next one comes, and
        starting a thread for each takes longer than most of them.
        """
        with mock.patch.object(anyio.to_thread, "run_sync", _run_here):
            return self._loop.run_until_complete(self._asked(method, path, query, headers, body))

    async def _asked(
        self, method: str, path: bytes, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> tuple[int, bytes]:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "https",
            "path": path.decode(errors="replace"), "raw_path": path, "query_string": query, "root_path": "",
            "headers": [(b"host", b"pi"), (b"content-length", b"%d" % len(body)), *headers],
            "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        events = iter([{"type": "http.request", "body": body, "more_body": False}])
        status, answer = [0], bytearray()

        async def receive() -> dict[str, Any]:
            return next(events, {"type": "http.disconnect"})

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            answer.extend(message.get("body", b""))

        await self.app(scope, receive, send)
        return status[0], bytes(answer)


async def _run_here(function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
    return function(*arguments)


def open_coordinator(folder: Path) -> tuple[Coordinator, str]:
    """A whole coordinator with a run, a device and a model in its books, and the operator's token.

    Its run worker is stopped: runs that are submitted wait in the queue.
    """
    bare = init_directory(folder / "c", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
    directory, operator, _viewer = add_access_tokens(bare)
    options = StartOptions(host="127.0.0.1", port=directory.port, broker="embedded", broker_port=find_free_port())
    coordinator = Coordinator(directory, options, build_run)
    coordinator.__enter__()
    worker: Any = coordinator._clients.run_scheduler
    worker.stop()
    store = coordinator._store
    store.add_token(token_id="t", secret_sha256="ab" * 32, expires_at=2e9, uses=9, groups=())
    store.enroll_device(token_id="t", secret_sha256="ab" * 32, now=1e9, device_id="pi", public_key=b"k")
    coordinator._registry.add("pi", node_id=5, role="trainer", groups=(), examples={"digits": 9})
    store.add_run(
        run_id="run-1", name="first", task="digits", strategy="fedavg", config=RUN_FILE, seed=7, submitted_at=1e9
    )
    save_model(directory.models, {"w": np.zeros(3, np.float32)})
    return coordinator, operator


def port_of(coordinator: Coordinator) -> Port:
    web: Any = coordinator._web
    return Port(web._server.config.app, lambda: coordinator.__exit__(None, None, None))


API_REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/healthz", None), ("GET", "/metrics", None), ("GET", "/", None), ("GET", "/edgefl/v1/hello", None),
    ("GET", "/edgefl/v1/runs", None), ("GET", "/edgefl/v1/runs/first", None), ("GET",
    "/edgefl/v1/runs/latest/curve?points=40", None),
    ("GET", "/edgefl/v1/runs/run-1/spans?rounds=5&until=3", None), ("GET", "/edgefl/v1/devices", None),
    ("GET", "/edgefl/v1/devices/pi", None), ("GET", "/edgefl/v1/models?run=first", None), ("GET",
    "/edgefl/v1/models/latest/file", None),
    ("GET", "/edgefl/v1/history/why?run=first&round=2", None),
    ("GET", "/edgefl/v1/history/updates?run=first&device=pi&since=5&until=9e9&limit=5&where=loss%3C0.5&by=loss",
    None),
    ("GET", "/edgefl/v1/history/heartbeats?after=%5B5.5%2C1%5D&device=pi", None),
    ("GET", "/edgefl/v1/history/events?after=&where=kind%3Djoined", None), ("GET",
    "/edgefl/v1/history/rounds?limit=1", None),
    ("GET", "/edgefl/v1/deployments", None), ("GET", "/edgefl/v1/installations", None), ("GET", "/edgefl/v1/bundles",
    None),
    ("GET", "/edgefl/v1/access", None),
    ("POST", "/edgefl/v1/runs", {"config": RUN_FILE, "priority": 3}), ("POST", "/edgefl/v1/runs/plan",
    {"config": RUN_FILE}),
    ("POST", "/edgefl/v1/run-files", {"toml": '[run]\ntask = "digits"\nrounds = 3\n[strategy]\nname = "esync"\n'}),
    ("POST", "/edgefl/v1/tokens", {"ttl": "24h", "uses": 2, "groups": ["lab"], "role": "trainer"}),
    ("GET", "/edgefl/v1/users", None), ("POST", "/edgefl/v1/users/ada", {"role": "operator", "expires": "90d"}),
    ("POST", "/edgefl/v1/users/ada/revoke", {}),
    ("POST", "/edgefl/v1/runs/run-1/stop", {}), ("POST", "/edgefl/v1/runs/run-1/resume", {}),
    ("POST", "/edgefl/v1/devices/pi/drain", {}), ("POST", "/edgefl/v1/devices/pi/resume", {}),
    ("POST", "/edgefl/v1/deployments", {"model": "latest", "devices": ["pi"], "canary": 1, "canary_s": 5,
    "tolerance": 0.1}),
    ("POST", "/edgefl/v1/installations", {"bundle": "abcdef", "devices": ["pi"], "canary": 0}),
    ("POST", "/edgefl/v1/enroll", {"v": 1}), ("POST", "/edgefl/v1/certificates/rotate", {}),
)  # fmt: skip


def operator_api(folder: Path) -> Reader:
    """Requests of an operator and of the page: a line of method and path, then the body. A 5xx is a finding.

    Every request shows the operator's token: what those without one reach is less. `/feed` goes on for ever and has
    a reader of its own.
    """
    coordinator, token = open_coordinator(folder)
    port = port_of(coordinator)
    shown = [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json")]

    def feed(data: bytes) -> None:
        line, _, body = data.partition(b"\n")
        method, _, target = line.partition(b" ")
        path, _, query = target.partition(b"?")
        if b"feed" in path:
            return
        status, answer = port.ask(method.decode(errors="replace"), unquote_to_bytes(path), query, shown, body)
        assert status < 500, (status, answer[:300])
        if status >= 400:
            raise EdgeflError(answer.decode(errors="replace"))

    def closed(line: bytes):
        return lambda found: line + b"\n" + found

    seeds = []
    for method, target, value in API_REQUESTS:
        body = b"" if value is None else json.dumps(value).encode()
        if value:
            seeds.append(Seed(content=body, form=Form.JSON, close=closed(f"{method} {target}".encode())))
        seeds.append(
            Seed(
                content=f"{method} {target}".encode(),
                form=Form.TEXT,
                close=lambda found, body=body: found.replace(b"\n", b"") + b"\n" + body,
            )
        )
    words = (
        b"limit=", b"where=", b"after=", b"by=", b"since=nan", b"until=inf", b"%00", b"%ed%a0%80", b"%ff", b"..%2f",
        b"/edgefl/v1/",
        b"points=99999", b"&", b"?", b"run=latest", b"loss%3E", b"~", b"device=pi", b"1e400", b"-1", b"9" * 40,
        quote("ä").encode(),
    )  # fmt: skip
    return Reader(
        feed=feed, seeds=tuple(seeds), words=words, most_bytes=64 * MIB, takes_seeds=False, close=port.close
    )


def feed_requests(folder: Path) -> Reader:
    """`Last-Event-ID` of a page that comes back."""
    coordinator, _ = open_coordinator(folder)
    port = port_of(coordinator)

    def feed(data: bytes) -> None:
        header = data.replace(b"\r", b"").replace(b"\n", b"")
        status, answer = port.ask("GET", b"/edgefl/v1/feed", b"", [(b"last-event-id", header)], b"")
        assert status == 200, (status, answer[:300])

    seeds = (Seed(content=b"3f2a-17", form=Form.TEXT), Seed(content=b"17", form=Form.TEXT))
    # Under atheris, and only there, each of its statements to the database stays in memory: 0.8 kB an input.
    return Reader(feed=feed, seeds=seeds, is_guided=False, close=port.close)


class _Nodes:
    """Flower's side of a coordinator with one device, whose requests are signed."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.superlink = SuperLink(on_reply=self.replies.append, observer=NotedCalls())
        self.key = key = ec.generate_private_key(ec.SECP256R1())
        self.pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.node_id = self.superlink.register(self.public)
        self.run = self.superlink.open_run()
        self._signer = RequestSigner(self.pem, time.time)

    def sign(self, path: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
        """Signed headers of a request."""
        body_hash = None
        if path.endswith(b"/push-object"):
            with contextlib.suppress(ValueError):
                body_hash = compute_push_hash(parse_protobuf(REQUESTS["push-object"], body))
        headers = self._signer.sign("POST", path.decode("latin-1"), body, body_hash=body_hash)
        return [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    def reply(self, instruction: str, header: Any, body: bytes) -> Any:
        """A reply as a device makes it."""
        metadata = Metadata(
            run_id=self.run._run_id, message_id="ab" * 32, src_node_id=self.node_id, dst_node_id=1,
            reply_to_message_id=instruction, group_id="", created_at=time.time(), ttl=3600.0, message_type="train",
        )  # fmt: skip
        content = make_content(("header", "json", json.dumps(header)), ("body", "bytes", body))
        return Message(metadata=metadata, content=content)


def fleet_api(_folder: Path) -> Reader:
    """`/v1/fleet/…`: the call's name in a line, then its protobuf, signed by a device. A 5xx is a finding."""
    nodes = _Nodes()
    port = Port(make_app(nodes.superlink.api, []))
    body = prepare_body(b"model")
    node = Node(node_id=nodes.node_id)

    def feed(data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        if len(nodes.superlink.state.messages) < 2:
            nodes.run.send(nodes.node_id, kind="train", header={"assignment": "a"}, body=body)
        nodes.replies.clear()
        path = b"/v1/fleet/" + name
        status, answer = port.ask("POST", path, b"", nodes.sign(path, content), content)
        assert status < 500, (status, answer[:300])
        for reply in nodes.replies:
            json.dumps(reply.header)
            assert isinstance(bytes(reply.body), bytes)
        if status != 200:
            raise EdgeflError(str(status))

    instruction = nodes.run.send(nodes.node_id, kind="train", header={"assignment": "a"}, body=body)
    reply = nodes.reply(instruction, {"v": 2, "assignment": "a", "metrics": {}}, b"update")
    tree = ObjectTree(object_id=reply.metadata.message_id, children=[])
    calls: dict[str, Any] = {
        "activate-node": REQUESTS["activate-node"](public_key=nodes.public, heartbeat_interval=30.0),
        "send-node-heartbeat": REQUESTS["send-node-heartbeat"](node=node, heartbeat_interval=30.0),
        "pull-messages": REQUESTS["pull-messages"](node=node),
        "push-messages": REQUESTS["push-messages"](node=node, messages_list=[reply], message_object_trees=[tree]),
        "push-object": REQUESTS["push-object"](
            node=node, run_id=nodes.run._run_id, object_id="cd" * 32, object_content=b"piece", session_id="s"
        ),
        "pull-object": REQUESTS["pull-object"](node=node, run_id=nodes.run._run_id, object_id="cd" * 32),
        "get-run": REQUESTS["get-run"](node=node, run_id=nodes.run._run_id),
    }
    seeds = [
        Seed(content=call.SerializeToString(), close=lambda found, name=name: name.encode() + b"\n" + found)
        for name, call in calls.items()
    ]
    header = Seed(
        content=json.dumps({"v": 2, "assignment": "a", "metrics": {"loss": 0.5}}).encode(), form=Form.JSON,
        close=lambda found: b"push-messages\n" + _push(nodes, node, found).SerializeToString(),
    )  # fmt: skip
    names = Seed(content=b"pull-messages", form=Form.TEXT, close=lambda found: found.replace(b"\n", b"") + b"\n")
    return Reader(feed=feed, seeds=(*seeds, header, names), most_bytes=32 * MIB, takes_seeds=False, close=port.close)


def stock_replies(_folder: Path) -> Reader:
    """An object of a stock SuperNode's reply, after a line with its place; those above it name it as it is."""
    replies: list[Reply] = []
    superlink = SuperLink(on_reply=replies.append, observer=NotedCalls())
    node_id = superlink.register(b"a key", is_supernode=True)
    app = AppBundle(app_id="a/b", version="1.0.0", content=b"", config={})
    run, state = superlink.open_run(lambda: app), superlink.state
    header = {"assignment": "a", JOB_LIMITS: {"max_part_bytes": MIB}}
    part = encode_envelope({}) + encode_message({"type": "train", "group": ""}, RecordDict())
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.arange(4.0))}), "m": MetricRecord({"loss": 0.5})})

    def make_objects() -> list[tuple[str, bytes]]:
        """Objects of a reply to a new message, each after those that it names."""
        for old in list(state.messages):
            run.cancel(old)
        asked = run.send(node_id, kind="train", header=header, body=prepare_body(part))
        metadata = Metadata(
            run_id=run._run_id, src_node_id=node_id, dst_node_id=1, reply_to_message_id=asked, message_type="train",
        )  # fmt: skip
        return list(encode_objects(metadata, content).items())

    def feed(data: bytes) -> None:
        place, _, damaged = data.partition(b"\n")
        objects, names, contents = make_objects(), dict[str, str](), dict[str, bytes]()
        index = int(place) if place.isdigit() and len(place) < 3 else 0
        for number, (name, whole) in enumerate(objects):
            found = damaged if number == index else whole
            for before, after in names.items():
                found = found.replace(before.encode(), after.encode())
            names[name] = compute_object_id(found)
            contents[names[name]] = found
        *parts, root = names.values()
        asked = next(iter(state.messages))
        metadata = Metadata(
            run_id=run._run_id, message_id=root, src_node_id=node_id, dst_node_id=1, reply_to_message_id=asked,
            group_id="", created_at=time.time(), ttl=3600.0, message_type="train",
        )  # fmt: skip
        tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=part) for part in dict.fromkeys(parts)])
        replies.clear()
        try:
            session, missing = state.add_reply(Message(metadata=metadata), tree)
            for name in missing:
                state.add_object(
                    REQUESTS["push-object"](
                        node=Node(node_id=node_id), run_id=run._run_id, session_id=session, object_id=name,
                        object_content=contents[name],
                    )
                )  # fmt: skip
        except FleetApiError as error:
            raise EdgeflError(str(error)) from None
        (answer,) = replies
        json.dumps(answer.header)
        if "error" in answer.header:
            raise EdgeflError(str(answer.header["error"]))

    seeds = [
        Seed(content=found, close=lambda found, number=number: b"%d\n%s" % (number, found))
        for number, (_, found) in enumerate(make_objects())
    ]
    return Reader(feed=feed, seeds=tuple(seeds), most_bytes=32 * MIB, takes_seeds=False)


def fleet_headers(_folder: Path) -> Reader:
    """Headers of a device's signature, one a line, of a request that is otherwise right. A 5xx is a finding.

    What the signature covers is signed after it was changed, so that it is read and not only compared.
    """
    nodes = _Nodes()
    port = Port(make_app(nodes.superlink.api, []))
    path = b"/v1/fleet/pull-messages"
    content = REQUESTS["pull-messages"](node=Node(node_id=nodes.node_id)).SerializeToString()

    def feed(data: bytes) -> None:
        lines = (line.partition(b": ") for line in data.split(b"\n"))
        status, answer = port.ask("POST", path, b"", [(name, value) for name, _, value in lines], content)
        assert status in {200, 401, 409}, (status, answer[:300])
        if status != 200:
            raise EdgeflError(str(status))

    def close(name: bytes, value: bytes) -> bytes:
        headers = {**dict(nodes.sign(path, content)), name: value.replace(b"\n", b"")}
        if name.decode() in SIGNED_HEADERS:
            signed = {each: headers.get(each.encode(), b"").decode("latin-1") for each in SIGNED_HEADERS}
            message = make_signed_request("POST", path.decode(), signed)
            headers[SIGNATURE_HEADER.encode()] = base64.b64encode(nodes.key.sign(message, ec.ECDSA(SHA256())))
        return b"\n".join(b": ".join(header) for header in headers.items())

    def encode(name: bytes) -> Callable[[bytes], bytes]:
        return lambda found: close(name, base64.b64encode(found))

    more = {name.encode(): b"0" * 16 for name in (INSTANCE_HEADER, STAMP_HEADER)}
    valid = dict(nodes.sign(path, content)) | more
    seeds = [
        Seed(content=value, form=Form.TEXT, close=lambda found, name=name: close(name, found))
        for name, value in valid.items()
    ]
    inner = [
        Seed(content=base64.b64decode(valid[name]), close=encode(name))
        for name in (KEY_HEADER.encode(), SIGNATURE_HEADER.encode())
    ]
    words = (b"-", b"-0", b"9" * 40, b"Z", b"+99:99", b"0001-01-01", b"9999-12-31T23:59:59", b"\xff", b"=", b"\x00")
    return Reader(feed=feed, seeds=(*seeds, *inner), words=words, takes_seeds=False, close=port.close)


def _push(nodes: _Nodes, node: Any, header: bytes) -> Any:
    """A push of a reply to what is asked now, whose header is this text."""
    asked = next(iter(nodes.superlink.state.messages), "none")
    message = nodes.reply(asked, {}, b"update")
    record = next(item for item in message.content.items if item.key == "header")
    record.config_record.items[0].value.string = header.decode(errors="replace")
    tree = ObjectTree(object_id=message.metadata.message_id, children=[])
    return REQUESTS["push-messages"](node=node, messages_list=[message], message_object_trees=[tree])


class _Mail:
    """Flower's books, as short as can be."""

    def __init__(self) -> None:
        self._number = itertools.count(1)

    def send(self, _node_id: int, **_: Any) -> str:
        return f"i{next(self._number)}"

    def is_known(self, _name: str) -> bool:
        return True

    def is_delivered(self, _name: str) -> bool:
        return True

    def cancel(self, _name: str) -> None: ...

    def close(self) -> None: ...


def replies(_folder: Path) -> Reader:
    """Headers and bodies of replies to an assignment, an evaluation and a node's order; the first byte says which."""
    codec = make_codec("dense", SHAPES)
    registry = DeviceRegistry(PresenceTracker(), lambda: 5.0)
    registry.record_broker_link(connected=True)
    registry.add("pi", node_id=7, role="trainer", groups=(), examples={"digits": 9})
    registry.record_status("pi", StatusMessage(state="online", boot_id="b", session_no=1))
    run = RunSpec(
        run_id="r", task="digits", header={"v": 2, "run": "r", "task": "digits"}, groups=(), names=(),
        join_at_start=False,
        encode=lambda model, version: codec.encode(model, derive_rng(version)),
        decode=lambda body: decode_body(body, SHAPES), encode_changes=None,
    )  # fmt: skip
    source: Any = SimpleNamespace(
        version=0, model=lambda: {"w": np.zeros(3, np.float32)},
        device_model=lambda _: {"w": np.zeros(3, np.float32)}, changed=lambda _: None,
    )  # fmt: skip
    bell: Any = SimpleNamespace(notify=lambda _: None, send_command=lambda *_: None)
    mail: Any = _Mail()
    node = GossipConfig(
        method="gossip", edges=(PeerLinkConfig(neighbour="b", sign=1.0, degree=1, weight=0.5, period=1),),
        learning_rate=0.1,
        period=1, codec="dense", carrier="relay", reports=True,
    )  # fmt: skip
    plain = TrainInstruction(assignment_id="a", device_id="pi", base_version=0, plan=TrainConfig(iterations=3))
    orders = {
        b"u": plain, b"e": EvaluateInstruction(assignment_id="a", device_id="pi", version=0, round=0),
        b"n": TrainInstruction(
            assignment_id="a", device_id="pi", base_version=0, plan=TrainConfig(iterations=3, node=node)
        ),
    }  # fmt: skip
    update = codec.encode({"w": np.ones(3, np.float32)}, derive_rng(1))

    def feed(data: bytes) -> None:
        kind, header, body = _parted(data)
        try:
            value = json.loads(header)
        except (ValueError, RecursionError):
            return  # never comes so far: see fleet_api
        if not isinstance(value, dict):
            return
        fleet = LiveFleet(run=run, transport=mail, registry=registry, notifier=bell, clock=lambda: 5.0)
        fleet.dispatch([orders.get(kind, plain)], source)
        fleet.post(Reply(node_id=7, instruction_id="i1", header=value, body=body, bytes_up=5, bytes_down=5))
        events = fleet.wait(5.0)
        json.dumps([str(event) for event in events])
        for event in events:
            assert not isinstance(event, InstructionFailed) or len(event.reason) <= 1000
        fleet.close()

    metrics = {
        "iterations": 3, "num_examples": 9, "loss": 0.5, "compute_s": 1.5, "accuracy": 0.9, "extra": {"a": 1.0},
        "health": {"max_temperature_c": 60.0, "throttled": "ok", "energy_j": 5.0},
    }  # fmt: skip
    header = {"v": 2, "run": "r", "assignment": "r/a", "metrics": metrics}
    mailed = {**header, "messages": [["pi", "b", 1, 0, 4]]}
    said = ((b"u", header, update), (b"e", header, b""), (b"n", mailed, b"mail" + update), (b"u", {**header,
    "error": "no"}, b""),
            (b"u", {**header, "requires_full_model": True, "error": "x"}, b""))  # fmt: skip
    seeds = []
    for kind, value, body in said:
        text = json.dumps(value).encode()
        seeds.append(
            Seed(content=text, form=Form.JSON, close=lambda found, k=kind, b=body: _joined_parts(k, found, b))
        )
        seeds.append(Seed(content=body, close=lambda found, k=kind, t=text: _joined_parts(k, t, found)))
    return Reader(feed=feed, seeds=tuple(seeds))


def instructions(_folder: Path) -> Reader:
    """What a device pulls: Flower's answer, its header, and the job that it is made into."""
    nodes = _Nodes()
    node = SuperNode(private_key_pem=nodes.pem, tls_context=None, clock=time.time)  # type: ignore[arg-type]
    header = {
        "v": 2, "run": "r", "assignment": "r/a", "version": 3, "seed": 7, "task": "digits", "codec": "dense",
        "block": None,
        "plan": {"algorithm": "sgd", "iterations": 3, "batch_size": 4, "node": {
            "method": "gossip", "edges": [{"neighbour": "b", "sign": 1.0, "degree": 1, "weight": 0.5, "period": 1}],
            "learning_rate": 0.1, "period": 1, "codec": "dense", "carrier": "relay"}},
        "used_assignments": ["r/b"], "test_fraction": 0.2,
        "analysis": {"name": "statistics", "options": {"columns": "0-9", "cells": 64}},
    }  # fmt: skip

    def feed(data: bytes) -> None:
        try:
            answer = parse_protobuf(RESPONSES["pull-messages"], data)
        except ValueError as error:
            raise NetworkError(str(error)) from None  # as the client does
        node._client = SimpleNamespace(send=lambda *_: answer)  # type: ignore[assignment]
        pulled = node.pull()  # of its errors the agent's loop knows those of edgefl alone
        try:
            if pulled is not None:
                parse_instruction("pi", pulled.header)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(repr(error)) from None  # its caller takes whatever it raises

    def pulled(text: bytes) -> bytes:
        message = nodes.reply("cd" * 32, {}, b"model")
        record = next(item for item in message.content.items if item.key == "header")
        record.config_record.items[0].value.string = text.decode(errors="replace")
        tree = ObjectTree(object_id=message.metadata.message_id, children=[])
        answer = RESPONSES["pull-messages"](messages_list=[message], message_object_trees=[tree])
        return bytes(answer.SerializeToString())

    text = json.dumps(header).encode()
    seeds = (Seed(content=text, form=Form.JSON, close=pulled), Seed(content=pulled(text)))
    return Reader(feed=feed, seeds=seeds)


def _parted(data: bytes) -> tuple[bytes, bytes, bytes]:
    length = int.from_bytes(data[1:4], "little")
    return data[:1], data[4 : 4 + length], data[4 + length :]


def _joined_parts(kind: bytes, header: bytes, body: bytes) -> bytes:
    return kind + len(header).to_bytes(3, "little") + header + body
