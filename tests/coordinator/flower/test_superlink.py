"""Both ends of the Flower side against each other over real TLS: the fence around Flower's private modules."""

import ast
import base64
import collections
import contextlib
import datetime as dt
import hashlib
import http.client
import importlib
import json
import queue
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import HEARTBEAT_MAX_INTERVAL, HEARTBEAT_MIN_INTERVAL, SUPERLINK_NODE_ID
from flwr.common.serde import metadata_to_proto
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.inflatable import inflatable_object
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode.fleet_http_client import FleetHttpClient
from google.protobuf.message import Message as ProtobufMessage
from noted_calls import NotedCalls
from starlette.requests import Request

import edgefl
from edgefl.coordinator.api.server import WebServer, make_app, open_listener
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.execution.messaging import MAX_MEMORY_BYTES, PUT_TIMEOUT_S, BoundedEventQueue
from edgefl.coordinator.flower import link_state
from edgefl.coordinator.flower import superlink as superlink_module
from edgefl.coordinator.flower.fleet_api import MAX_OBJECT_BYTES, MAX_PUSH_OBJECT_BYTES
from edgefl.coordinator.flower.link_state import ObjectStore
from edgefl.coordinator.flower.stock_messages import decode_objects, encode_objects, make_tree
from edgefl.coordinator.flower.superlink import SuperLink, prepare_body
from edgefl.core import fleet_messages
from edgefl.core.errors import ClonedError, NetworkError, NotAllowedError
from edgefl.core.fleet_messages import (
    FLEET_PREFIX,
    MESSAGES,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    REQUESTS,
    RESPONSES,
    Node,
    ObjectTree,
    make_content,
    parse_protobuf,
)
from edgefl.core.flower_objects import compute_object_id, encode_chunk, parse_chunk, parse_object
from edgefl.core.protocol import (
    BODY_HASH_HEADER,
    CHUNK_BYTES,
    INLINE_BODY_BYTES,
    INSTANCE_HEADER,
    KEY_HEADER,
    MAX_BODY_BYTES,
    MAX_REQUEST_BYTES,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    STAMP_HEADER,
    TIMESTAMP_HEADER,
)
from edgefl.device.flower.supernode import ReplyRejectedError, RequestSigner, SuperNode, UnauthorisedError
from edgefl.flower.app_job import SERVER_NODE_ID
from edgefl.flower.internals import ensure_identity
from edgefl.system.https_client import create_pinned_context

TWO_DAYS_S = 2 * 24 * 3600.0


def echo(header, body):
    return {"v": 2, "assignment": header["assignment"], "metrics": {}}, body


def new_key():
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem, public


class Site:
    """A coordinator's web server with nothing but Flower's side behind it; `restart` forgets all it knew."""

    def __init__(self, root):
        listener = open_listener("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.directory = init_directory(root, hosts=["127.0.0.1"], fleet="lab", port=self.port)
        self.trust = create_pinned_context(self.directory.ca_cert.read_bytes())
        self._closers = contextlib.ExitStack()
        self._start(listener)

    def _start(self, listener):
        self.replies, self.watcher, self.scopes = queue.Queue(), NotedCalls(), collections.deque(maxlen=20)
        self.contacts = self.watcher.contacts
        self.rejected = collections.deque(maxlen=20)
        self.superlink = SuperLink(
            on_reply=self.replies.put,
            observer=self.watcher,
            on_rejected=lambda kind, _request, node, detail: self.rejected.append((kind, node, detail)),
        )
        self.state = self.superlink.state
        self.web = WebServer(make_app(self._api, []), self.directory, listener)
        self.web.start()

    async def _api(self, scope, receive, send):
        self.scopes.append(scope)  # as the server does for each connection, until its next request comes
        await self.superlink.api(scope, receive, send)

    def restart(self):
        self.web.stop()
        self._start(open_listener("127.0.0.1", self.port))

    def close(self):
        self._closers.close()
        self.web.stop()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def node(self, *, handler=echo, register=True, clock=time.time, key=None, instance=""):
        pem, public = key or new_key()
        node = SuperNode(
            private_key_pem=pem,
            tls_context=self.trust,
            clock=clock,
            instance=instance,
        )
        self._closers.callback(node.close)
        number = self.superlink.register(public) if register else None
        return SimpleNamespace(supernode=node, id=number, public=public, key=(pem, public), handler=handler)

    def device(self, **options):
        device = self.node(**options)
        device.supernode.connect(self.address)
        return device

    def reply(self):
        return self.replies.get(timeout=10)

    def leftovers(self):
        state = self.state
        return {
            "instructions": len(state.messages),
            "objects": len(state.board_store) + len(state.stock_store),
            "open": len(state.partial_replies),
            "undelivered": state.num_queued(),
        }

    def request(self, path, *, headers=(), method="POST", body=None):
        """Returns status and body of a plain request; a promised body that is not given is never sent."""
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.trust, timeout=10)
        with contextlib.closing(connection):
            connection.putrequest(method, path)
            for name, value in dict(headers).items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.read()


def _order(run, device):
    return run.send(device.id, kind="train", header={}, body=prepare_body(b""))


NOTHING = dict.fromkeys(("instructions", "objects", "open", "undelivered"), 0)


def intercept(device, method, change):
    """Calls `change` with the client's own function in place of each request of a method; returns what ends that."""
    client = device.supernode._client
    send_request = client.send

    def send_changed(name, message):
        return change(send_request, message) if name == method else send_request(name, message)

    client.send = send_changed
    return lambda: setattr(client, "send", send_request)


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory):
    with contextlib.closing(Site(tmp_path_factory.mktemp("site") / "coordinator")) as site:
        yield site


@pytest.fixture
def site(shared_site):
    """The shared site, which every test must leave without anything of its own in Flower's books."""
    yield shared_site
    assert shared_site.leftovers() == NOTHING
    assert shared_site.replies.empty()


@pytest.fixture
def run(site):
    with contextlib.closing(site.superlink.open_run()) as run:
        yield run


def send(run, device, body=b"model", *, kind="train", name="a-1"):
    return run.send(device.id, kind=kind, header={"v": 2, "assignment": name}, body=prepare_body(body))


def answer(device, instruction):
    return device.supernode.create_reply(instruction, device.handler(instruction.header, instruction.body))


def work(device):
    instruction = device.supernode.pull()
    reply = answer(device, instruction)
    device.supernode.push(reply)
    return instruction, reply


SIZES = {
    "nothing": 0,
    "a kilobyte": 1000,
    "just inline": INLINE_BODY_BYTES,
    "just chunked": INLINE_BODY_BYTES + 1,
    "one chunk": CHUNK_BYTES,
    "two chunks": CHUNK_BYTES + 1_000_000,
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_body_arrives_as_it_was_both_ways(site, run, size):
    device = site.device()
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    sent = send(run, device, body)
    instruction, _ = work(device)
    reply = site.reply()
    assert reply.body == body
    assert instruction.header == {"v": 2, "assignment": "a-1"}
    assert (reply.node_id, reply.instruction_id, reply.header["assignment"]) == (device.id, sent, "a-1")
    assert size <= reply.bytes_up < size + 4000
    assert size <= reply.bytes_down < size + 4000
    assert site.leftovers() == NOTHING


def test_nothing_of_a_request_is_left_with_its_connection_when_it_is_answered(site, run):
    device = site.device()
    send(run, device, bytes(2 * INLINE_BODY_BYTES))
    work(device)
    site.reply()
    asked = [scope["path"].rpartition("/")[2] for scope in site.scopes]
    assert {"pull-messages", "pull-object", "push-messages", "push-object"} <= set(asked)
    assert [found for found in _within(list(site.scopes)) if isinstance(found, ProtobufMessage)] == []
    assert max(len(found) for found in _within(list(site.scopes)) if isinstance(found, bytes | str)) < 1000


def _within(container):
    """Yields what lies in dicts and lists, at any depth."""
    for found in container.values() if isinstance(container, dict) else container:
        yield found
        if isinstance(found, dict | list | tuple):
            yield from _within(found)


def test_chunks_that_are_all_the_same_are_all_there(site, run):
    device = site.device()
    body = bytes(2 * CHUNK_BYTES + 5000)
    send(run, device, body)
    work(device)
    assert site.reply().body == body
    assert site.leftovers() == NOTHING


@pytest.mark.parametrize("size", [100, INLINE_BODY_BYTES + 1, CHUNK_BYTES + 10], ids=["inline", "chunk", "chunks"])
def test_replies_of_two_devices_that_are_equal_to_the_byte_both_arrive(site, run, size):
    first, second = site.device(), site.device()
    for device in (first, second):
        send(run, device, bytes(size))
    pulled = [(device, device.supernode.pull()) for device in (first, second)]
    for device, instruction in pulled:
        device.supernode.push(answer(device, instruction))
    replies = [site.reply(), site.reply()]
    assert {reply.node_id for reply in replies} == {first.id, second.id}
    assert [reply.body for reply in replies] == [bytes(size)] * 2


def test_equal_replies_may_be_pushed_at_the_same_time(site, run):
    slow, fast = site.device(), site.device()
    for device in (slow, fast):
        send(run, device, bytes(CHUNK_BYTES + 10))

    def overtaken(send_request, message):
        end()
        work(fast)
        return send_request(PUSH_OBJECT, message)

    end = intercept(slow, PUSH_OBJECT, overtaken)
    work(slow)
    assert [site.reply().node_id, site.reply().node_id] == [fast.id, slow.id]


def test_a_model_for_many_devices_is_stored_once(site, run):
    devices, body = [site.device() for _ in range(3)], prepare_body(bytes(INLINE_BODY_BYTES + 1))
    for device in devices:
        run.send(device.id, kind="train", header={"assignment": "a"}, body=body)
    assert site.leftovers()["objects"] == len(devices) + 1
    for device in devices:
        work(device)
        site.reply()


def test_a_model_goes_out_whole_while_the_last_other_device_that_holds_it_answers():
    store, piece = ObjectStore(), "cd" * 32
    before, after = (ObjectTree(object_id=name * 32, children=[ObjectTree(object_id=piece)]) for name in ("aa", "bb"))
    store.register(before)
    store.put(piece, b"model")
    answer = threading.Thread(target=store.delete, args=(before.object_id,))

    class Interrupted:
        """The tree, of which the children are asked for twice: the first message is answered in between."""

        object_id, num_asked = after.object_id, 0

        @property
        def children(self):
            self.num_asked += 1
            if self.num_asked == 2:
                answer.start()
                answer.join(0.2)  # waits for the whole message; if it need not, it is done by then
            return after.children

    assert store.register(Interrupted()) == [after.object_id]
    answer.join()
    assert (store.get(piece), store.get(before.object_id)) == (b"model", None)
    store.delete(after.object_id)
    assert len(store) == 0


def test_an_object_that_a_model_has_twice_goes_with_the_model():
    store, piece = ObjectStore(), ObjectTree(object_id="cd" * 32)
    store.register(ObjectTree(object_id="aa" * 32, children=[piece, piece]))
    store.delete(piece.object_id)
    assert len(store) == 2
    store.delete("aa" * 32)
    assert len(store) == 0


def test_the_pieces_of_a_model_are_the_same_bytes_for_all_who_fetch_them(site, run):
    body, calls = bytes(INLINE_BODY_BYTES + 1), site.superlink.api._servicer
    calls._cached_answers.clear()
    devices = [site.device() for _ in range(3)]
    for device in devices:
        run.send(device.id, kind="train", header={}, body=prepare_body(body))
        device.supernode.pull()
    assert len(calls._cached_answers) == 1
    fresh = calls._encode_cached("another", SimpleNamespace(object_available=True, SerializeToString=lambda: b"said"))
    again = SimpleNamespace(object_available=True, SerializeToString=lambda: pytest.fail("said already"))
    assert calls._encode_cached("another", again) is fresh
    for number in range(superlink_module.MAX_CACHED_CHUNKS):
        calls._encode_cached(
            str(number), SimpleNamespace(object_available=True, SerializeToString=lambda: b"a piece of a newer model")
        )
    assert "another" not in calls._cached_answers


def test_what_is_not_there_yet_is_not_kept_as_its_answer(site):
    calls = site.superlink.api._servicer
    missing = SimpleNamespace(object_available=False, SerializeToString=lambda: b"not there")
    assert calls._encode_cached("a-piece", missing) == b"not there"
    assert "a-piece" not in calls._cached_answers


def test_a_pull_gets_the_instructions_of_its_own_device_alone_in_their_order(site, run):
    devices = [site.device() for _ in range(4)]
    sent = {device.id: [_order(run, device) for _ in range(3)] for device in devices}
    own = devices[2]
    pulled = [own.supernode.pull() for _ in range(3)]
    assert own.supernode.pull() is None
    assert [instruction.metadata.message_id for instruction in pulled] == sent[own.id]
    assert site.leftovers()["undelivered"] == 9


def test_an_instruction_that_was_cancelled_is_not_handed_out(site, run):
    device = site.device()
    first, second = _order(run, device), _order(run, device)
    run.cancel(first)
    assert device.supernode.pull().metadata.message_id == second
    run.cancel(second)
    assert site.leftovers() == NOTHING


def test_small_replies_do_not_hold_up_the_server_while_the_run_has_no_room_for_them(site, run, monkeypatch):
    inbox = BoundedEventQueue(lambda reply: lambda: reply)
    inbox.put("large", MAX_MEMORY_BYTES + 1)  # waits for a run that computes
    monkeypatch.setattr(site.superlink, "_on_reply", lambda reply: inbox.put(reply, len(reply.body)))
    device = site.device()
    began_s = time.monotonic()
    for body in (b"first", b"second", b"third"):
        send(run, device, body)
        work(device)
    assert time.monotonic() - began_s < PUT_TIMEOUT_S
    large, *replies = [item for portion in iter(lambda: inbox.get_batch(0.0), []) for item in portion]
    assert (large, [reply.body for reply in replies]) == ("large", [b"first", b"second", b"third"])


def test_a_reply_that_is_pushed_again_is_refused_and_delivered_once(site, run):
    device = site.device()
    for size in (10, INLINE_BODY_BYTES + 1):
        send(run, device, bytes(size))
        _, reply = work(device)
        with pytest.raises(ReplyRejectedError, match="refused"):
            device.supernode.push(reply)
        assert len(site.reply().body) == size
        assert site.replies.empty()


@pytest.mark.parametrize("size", [10, CHUNK_BYTES + 100], ids=["inline", "chunked"])
def test_a_reply_that_is_repeated_while_it_is_decoded_is_delivered_once(site, run, monkeypatch, size):
    device, repeated = site.device(), []
    send(run, device, bytes(size))
    instruction = device.supernode.pull()
    reply, calls = answer(device, instruction), site.superlink.api._servicer
    decode, pushes = site.superlink._decode_reply, []

    def decode_while_it_is_repeated(message):
        repeat = threading.Thread(target=lambda: repeated.append(push_again()))
        repeat.start()
        repeat.join(10)
        return decode(message)

    def push_again():
        return calls.handle(asked(device), PUSH_MESSAGES, pushes[0].SerializeToString()).status

    def note(send_request, message):
        pushes.append(message)
        return send_request(PUSH_MESSAGES, message)

    intercept(device, PUSH_MESSAGES, note)
    monkeypatch.setattr(site.superlink, "_decode_reply", decode_while_it_is_repeated)
    device.supernode.push(reply)
    assert len(site.reply().body) == size
    assert (repeated, site.replies.qsize()) == ([200], 0)


def test_a_push_that_broke_off_is_taken_up_by_the_next_one(site, run):
    device, body = site.device(), bytes(range(256)) * (CHUNK_BYTES // 256 + 100)
    send(run, device, body)
    instruction = device.supernode.pull()
    reply, pushed = answer(device, instruction), []

    def torn(send_request, message):
        pushed.append(message.object_id)
        if len(pushed) == 2:
            raise httpx.ReadError("the line went dead")
        return send_request(PUSH_OBJECT, message)

    intercept(device, PUSH_OBJECT, torn)
    with pytest.raises(NetworkError, match="the line went dead"):
        device.supernode.push(reply)
    assert site.replies.empty()
    device.supernode.push(reply)
    assert site.reply().body == body
    assert len(pushed) == 3
    assert len(set(pushed)) == 2


def test_pieces_of_answers_that_are_not_whole_yet_are_in_nobody_s_memory(site, run, tmp_path):
    pieces = site.state.board_store
    pieces.folder = tmp_path
    devices, body = [site.device() for _ in range(4)], bytes(range(256)) * (2 * CHUNK_BYTES // 256 + 100)
    replies = [_stopped_before_its_last_piece(run, device, body) for device in devices]
    assert site.leftovers()["open"] == len(devices)
    assert sum(len(one.content or b"") for one in pieces._objects.values()) < CHUNK_BYTES, "of 8 pieces"
    assert sum(one.spooled is not None for one in pieces._objects.values()) == 2 * len(devices)
    assert list(tmp_path.iterdir()) == []
    for device, reply in zip(devices, replies, strict=True):
        device.supernode.push(reply)
        assert site.reply().body == body
    pieces.folder = None


def _stopped_before_its_last_piece(run, device, body):
    """Returns a reply of three pieces, two of which have come; what the device sends next goes through."""
    send(run, device)
    instruction = device.supernode.pull()
    reply = device.supernode.create_reply(instruction, (instruction.header, body))
    pushed = []

    def torn(send_request, message):
        pushed.append(message.object_id)
        if len(pushed) == 3:
            end()
            raise httpx.ReadError("the line went dead")
        return send_request(PUSH_OBJECT, message)

    end = intercept(device, PUSH_OBJECT, torn)
    with pytest.raises(NetworkError, match="line went dead"):
        device.supernode.push(reply)
    return reply


def test_pieces_for_which_there_is_no_room_on_disk_stay_in_memory_and_arrive(site, run, tmp_path):
    site.state.board_store.folder = tmp_path / "missing"
    device, body = site.device(), bytes(CHUNK_BYTES + 100)
    send(run, device, body)
    work(device)
    site.state.board_store.folder = None
    assert site.reply().body == body


def test_a_reply_to_a_cancelled_instruction_is_refused(site, run):
    device = site.device()
    for size in (10, INLINE_BODY_BYTES + 1):
        sent = send(run, device, bytes(size))
        instruction = device.supernode.pull()
        run.cancel(sent)
        assert site.leftovers() == NOTHING
        with pytest.raises(ReplyRejectedError):
            device.supernode.push(answer(device, instruction))
    assert not run.is_known(sent)


def test_cancelling_in_the_middle_of_a_push_leaves_nothing_behind(site, run):
    device = site.device()
    sent = send(run, device, bytes(CHUNK_BYTES + 100))
    instruction = device.supernode.pull()

    def cancelling(send_request, message):
        run.cancel(sent)
        return send_request(PUSH_OBJECT, message)

    intercept(device, PUSH_OBJECT, cancelling)
    with pytest.raises(NetworkError, match="not kept"):
        device.supernode.push(answer(device, instruction))
    assert site.leftovers() == NOTHING


def test_work_that_is_taken_back_while_its_model_is_pulled_is_a_network_error(site, run):
    device = site.device()
    sent = send(run, device, bytes(CHUNK_BYTES + 100))

    def cancelling(send_request, message):
        run.cancel(sent)
        assert device.supernode.incoming_assignment == "a-1"
        return send_request("pull-object", message)

    intercept(device, "pull-object", cancelling)
    with pytest.raises(NetworkError, match="taken the work back"):
        device.supernode.pull()


def test_a_device_knows_what_it_has_pulled_until_it_has_answered(site, run):
    device = site.device()
    send(run, device)
    assert device.supernode.incoming_assignment is None
    instruction = device.supernode.pull()
    assert device.supernode.incoming_assignment == "a-1"
    reply = answer(device, instruction)
    assert device.supernode.incoming_assignment is None
    device.supernode.push(reply)
    site.reply()


def test_cancelling_what_was_never_sent_is_no_error_and_takes_nothing_else(site, run):
    sent = send(run, site.device())
    run.cancel("")
    run.cancel("0" * 64)
    assert run.is_known(sent)


def test_an_instruction_is_known_until_it_is_answered_and_delivered_once(site, run):
    device = site.device()
    sent = send(run, device)
    assert (run.is_known(sent), run.is_delivered(sent)) == (True, False)
    instruction = device.supernode.pull()
    assert (run.is_known(sent), run.is_delivered(sent)) == (True, True)
    assert device.supernode.pull() is None
    device.supernode.push(answer(device, instruction))
    assert not run.is_known(sent)
    site.reply()


def test_a_device_cannot_answer_for_another(site, run):
    device, stranger = site.device(), site.device()
    send(run, device)
    instruction = device.supernode.pull()
    with pytest.raises(ReplyRejectedError):
        stranger.supernode.push(stranger.supernode.create_reply(instruction, ({"assignment": "a-1"}, b"forged")))
    device.supernode.push(answer(device, instruction))
    assert site.reply().body == b"model"


def test_an_object_of_a_reply_is_kept_of_its_own_device_alone(site, run):
    device, other, stored = site.device(), site.device(), []
    send(run, device)
    instruction = device.supernode.pull()

    def pushed_by_another_before(send_request, message):
        own = message.node.node_id
        message.node.node_id = other.id
        stored.append(other.supernode._client.send(PUSH_OBJECT, message).stored)
        message.node.node_id = own
        assert site.replies.empty()
        return send_request(PUSH_OBJECT, message)

    intercept(device, PUSH_OBJECT, pushed_by_another_before)
    device.supernode.push(device.supernode.create_reply(instruction, (instruction.header, bytes(CHUNK_BYTES + 1))))
    assert stored == [False, False]
    assert site.reply().body == bytes(CHUNK_BYTES + 1)


@pytest.mark.parametrize("header", [[1, 2], "text", None], ids=str)
def test_a_reply_without_a_sensible_header_arrives_as_a_failure(site, run, header):
    device = site.device(handler=lambda _header, body: (header, body))
    sent = send(run, device)
    work(device)
    reply = site.reply()
    assert reply.instruction_id == sent
    assert reply.header["error"].startswith("malformed reply")
    assert reply.body == b""


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_device_sees_whether_it_is_to_train_or_to_evaluate(site, run, kind):
    device = site.device()
    send(run, device, kind=kind)
    instruction = device.supernode.pull()
    assert instruction.is_evaluation == (kind == "evaluate")
    device.supernode.push(answer(device, instruction))
    site.reply()


def test_a_repeated_assignment_can_be_answered_from_memory(site, run):
    device = site.device()
    send(run, device)
    device.supernode.push(device.supernode.create_reply(device.supernode.pull(), ({"assignment": "a-1"}, b"kept")))
    assert site.reply().body == b"kept"


def test_eight_devices_at_once_are_all_served(site, run):
    devices = [site.device() for _ in range(8)]
    bodies = {device.id: bytes([number]) * (INLINE_BODY_BYTES + number) for number, device in enumerate(devices)}
    threads, failures = [], []

    def rounds(device):
        try:
            for _ in range(3):
                send(run, device, bodies[device.id])
                work(device)
        except Exception as error:  # noqa: BLE001 told to the thread of the test
            failures.append(error)

    for device in devices:
        threads.append(threading.Thread(target=rounds, args=(device,)))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    replies = [site.reply() for _ in range(24)]
    assert all(reply.body == bodies[reply.node_id] for reply in replies)
    assert site.leftovers() == NOTHING


def test_an_unknown_key_is_refused_before_its_body_is_read(site):
    with pytest.raises(UnauthorisedError):
        site.device(register=False)
    headers = {"content-length": str(10 * 1024 * 1024), **key_header(new_key()[1])}
    assert site.request("/v1/fleet/push-messages", headers=headers)[0] == 401
    assert site.request("/v1/fleet/push-messages", headers={"content-length": "9000000"})[0] == 401


def key_header(public):
    return {KEY_HEADER: base64.b64encode(public).decode()}


def signed(device, method="pull-messages", *, body=b"", key_pem=None, off_s=0.0):
    """The headers of a signed request of the device; or signed with another key, or at another time."""
    signer = RequestSigner(key_pem or device.key[0], lambda: time.time() + off_s)
    return signer.sign("POST", f"/v1/fleet/{method}", body) | key_header(device.public)


def test_a_body_over_the_cap_is_refused_before_it_is_read(site):
    device = site.device()
    for name, limit in (("push-messages", MAX_REQUEST_BYTES), ("push-object", MAX_PUSH_OBJECT_BYTES)):
        headers = {"content-length": str(limit + 1), **signed(device, name)}
        assert site.request(f"/v1/fleet/{name}", headers=headers)[0] == 413


def test_a_known_key_without_its_signature_is_refused(site):
    device = site.device()
    headers = {"content-length": "0", **key_header(device.public)}
    assert site.request("/v1/fleet/pull-messages", headers=headers)[0] == 401


def test_a_known_key_with_a_bad_signature_is_refused_unread_and_is_no_sign_of_life(site):
    device = site.device()
    contacts, counted = list(site.contacts), site.superlink.api.byte_counters.pop_reply_bytes(device.id, "")
    good = signed(device)
    bad = [
        key_header(device.public),
        signed(device, key_pem=new_key()[0]),
        signed(device, off_s=-3600.0),
        signed(device, off_s=3600.0),
        {**good, TIMESTAMP_HEADER: "noon"},
        {**good, TIMESTAMP_HEADER: "2026-01-01T00:00:00"},
        {**good, SIGNATURE_HEADER: "?"},
    ]
    for headers in bad:  # the promised body never comes: an answer shows that nobody waited for it
        assert site.request("/v1/fleet/pull-messages", headers={"content-length": "9000000", **headers})[0] == 401
    assert site.contacts == contacts
    assert any(counted)
    assert site.superlink.api.byte_counters.pop_reply_bytes(device.id, "") == (0, 0)


def asked(device, *, method="pull-messages", body=b""):
    """A request as it stands when its headers have come."""
    headers = [(name.lower().encode(), value.encode()) for name, value in signed(device, method, body=body).items()]
    path = f"/v1/fleet/{method}"
    return Request({"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers})


@pytest.mark.parametrize(
    "change",
    [
        {"method": "GET"},
        {"path": "/v1/fleet/push-messages"},
        {"query_string": b"limit=1"},
        {"body": b"other"},
        {"nonce": "00" * 8 + "-1"},
        {"instance": "another"},
        {"stamp": "another"},
        {"timestamp": 1.0},
    ],
    ids=str,
)
def test_what_was_not_signed_is_refused(site, change):
    device, calls = site.device(), site.superlink.api._servicer
    request = asked(device)
    names = {
        "body": BODY_HASH_HEADER,
        "nonce": NONCE_HEADER,
        "instance": INSTANCE_HEADER,
        "stamp": STAMP_HEADER,
        "timestamp": TIMESTAMP_HEADER,
    }
    ((name, value),) = change.items()
    scope = dict(request.scope)
    if name in names:
        new = {
            "body": lambda: hashlib.sha256(value).hexdigest(),
            "timestamp": lambda: dt.datetime.fromtimestamp(time.time() + value, dt.UTC).isoformat(),
        }.get(name, lambda: value)()
        key = names[name].lower().encode()
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != key] + [(key, new.encode())]
    else:
        scope[name] = value
    with pytest.raises(NotAllowedError, match="does not count"):
        calls.authenticate(Request(scope))
    assert calls.authenticate(request) == device.id


def test_a_request_counts_once_and_its_repetition_is_an_event(site, run):
    device = site.device()
    body = pull_of(device.id)
    headers = signed(device, body=body) | {"content-length": str(len(body))}
    assert site.request("/v1/fleet/pull-messages", headers=headers, body=body)[0] == 200
    send(run, device)
    contacts = list(site.contacts)
    assert site.request("/v1/fleet/pull-messages", headers=headers, body=body)[0] == 401
    assert site.rejected.pop() == ("signature", None, "pull-messages: the request came before, and counts once")
    assert site.contacts == contacts
    work(device)
    assert site.reply().body == b"model"


def test_a_body_changed_on_its_way_is_refused_and_an_event(site):
    device = site.device()
    body = pull_of(device.id)
    headers = signed(device, body=body) | {"content-length": str(len(body))}
    assert site.request("/v1/fleet/pull-messages", headers=headers, body=body[:-1] + bytes([body[-1] ^ 1]))[0] == 401
    kind, node, detail = site.rejected.pop()
    assert (kind, node) == ("signature", device.id)
    assert "not the one that was signed" in detail


@pytest.mark.parametrize(
    ("field", "value", "detail"),
    [
        ("object_content", b"another", "its object is not the one that was signed"),
        ("object_id", "cd" * 32, "its ids are not the ones that were signed"),
        ("session_id", "another", "its ids are not the ones that were signed"),
        ("run_id", 17, "its ids are not the ones that were signed"),
    ],
)
def test_a_pushed_object_changed_on_its_way_is_refused_and_an_event(site, run, monkeypatch, field, value, detail):
    device = site.device()
    send(run, device, bytes(INLINE_BODY_BYTES + 1))
    instruction = device.supernode.pull()
    sign, changes = RequestSigner.sign, [value]

    def sign_and_change(self, method, target, body=b"", **options):
        headers = sign(self, method, target, body, **options)
        if target.endswith("/push-object") and changes:
            pushed = parse_protobuf(REQUESTS[PUSH_OBJECT], body)
            setattr(pushed, field, changes.pop())
            content = pushed.SerializeToString()
            headers |= {"content-length": str(len(content))}
            assert site.request(target, headers=headers, body=content)[0] == 401
            assert site.rejected.pop() == ("signature", device.id, f"push-object: {detail}")
            return sign(self, method, target, body, **options)
        return headers

    monkeypatch.setattr(RequestSigner, "sign", sign_and_change)
    device.supernode.push(answer(device, instruction))
    assert changes == []
    assert len(site.reply().body) == INLINE_BODY_BYTES + 1


def test_a_pushed_object_has_no_field_that_its_signature_leaves_out():
    fields = {field.name for field in REQUESTS[PUSH_OBJECT].DESCRIPTOR.fields}
    assert fields == {"node", "run_id", "session_id", "object_id", "object_content"}
    assert [field.name for field in Node.DESCRIPTOR.fields] == ["node_id"]


def test_the_timestamp_alone_signed_as_flower_does_is_refused(site):
    device = site.device()
    headers = signed(device)
    timestamp = headers[TIMESTAMP_HEADER]
    key = serialization.load_pem_private_key(device.key[0], None)
    signature = key.sign(timestamp.encode(), ec.ECDSA(SHA256()))
    only = key_header(device.public) | {
        "content-length": "0",
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: base64.b64encode(signature).decode(),
    }
    assert site.request("/v1/fleet/pull-messages", headers=only)[0] == 401


def pull_of(node_id):
    return REQUESTS["pull-messages"](node=Node(node_id=node_id)).SerializeToString()


def test_a_body_that_takes_longer_than_a_signature_counts_is_taken_all_the_same(site, monkeypatch):
    device, calls = site.device(), site.superlink.api._servicer
    request, body = asked(device), pull_of(device.id)
    assert calls.authenticate(request) == device.id

    in_ten_minutes = time.time() + 600
    monkeypatch.setattr(superlink_module, "time", SimpleNamespace(time=lambda: in_ten_minutes))

    assert calls.handle(request, "pull-messages", body).status == 200
    with pytest.raises(NotAllowedError, match="another time"):
        calls.authenticate(request)


def test_a_device_that_is_removed_while_its_body_comes_is_refused(site):
    device, calls = site.device(), site.superlink.api._servicer
    request, body = asked(device), pull_of(device.id)
    assert calls.authenticate(request) == device.id

    site.superlink.remove(device.id)

    assert calls.handle(request, "pull-messages", body).status == 401


def test_what_is_asked_in_the_name_of_another_device_is_refused(site):
    device, other, calls = site.device(), site.device(), site.superlink.api._servicer
    other_key = REQUESTS["activate-node"](public_key=other.public, heartbeat_interval=60).SerializeToString()
    own_key = REQUESTS["activate-node"](public_key=device.public, heartbeat_interval=60).SerializeToString()
    for name, body, status in (
        ("pull-messages", pull_of(other.id), 401),
        ("pull-messages", pull_of(device.id), 200),
        ("deactivate-node", REQUESTS["deactivate-node"](node_id=other.id).SerializeToString(), 401),
        ("activate-node", other_key, 401),
        ("activate-node", own_key, 200),
    ):
        assert calls.handle(asked(device), name, body).status == status, name
    for node, is_other in ((device, False), (other, True)):
        piece = REQUESTS[PUSH_OBJECT](node=Node(node_id=node.id)).SerializeToString()
        assert calls.is_from_other_device("push-object", piece, device.id) is is_other


def test_a_push_without_a_tree_or_with_another_root_opens_no_session(site, run):
    device, calls = site.device(), site.superlink.api._servicer
    send(run, device)
    made = answer(device, device.supernode.pull())
    reply = fleet_messages.Message(metadata=made.metadata, content=make_content(("header", "json", "{}")))
    own, piece = (ObjectTree(object_id=name) for name in (made.metadata.message_id, "a" * 64))
    doubled, in_circle = (
        ObjectTree(object_id=own.object_id, children=children) for children in ([piece, piece], [own])
    )
    for trees, status in (([], 400), ([piece], 403), ([doubled], 403), ([in_circle], 403)):
        push = REQUESTS[PUSH_MESSAGES](
            node=Node(node_id=device.id), messages_list=[reply], message_object_trees=trees
        )
        assert calls.handle(asked(device), "push-messages", push.SerializeToString()).status == status
        assert (site.leftovers()["open"], site.leftovers()["objects"]) == (0, 0)


def test_a_reply_that_begins_with_an_object_of_others_leaves_nothing(site, run):
    """A device knows the ids of a model's pieces, which stay as long as another device is to fetch them."""
    device, other, calls = site.device(), site.device(), site.superlink.api._servicer
    body = prepare_body(bytes(CHUNK_BYTES + 1))
    for one in (device, other):
        run.send(one.id, kind="train", header={"assignment": "a"}, body=body)
    before, made = site.leftovers()["objects"], answer(device, device.supernode.pull())
    root = ObjectTree(object_id=body.chunk_ids[0], children=[ObjectTree(object_id="a" * 64)])
    made.metadata.message_id = root.object_id
    reply = fleet_messages.Message(metadata=made.metadata, content=make_content(("header", "json", "{}")))
    push = REQUESTS[PUSH_MESSAGES](node=Node(node_id=device.id), messages_list=[reply], message_object_trees=[root])
    assert calls.handle(asked(device), PUSH_MESSAGES, push.SerializeToString()).status == 403
    assert site.leftovers()["objects"] == before
    assert other.supernode.pull().body == bytes(CHUNK_BYTES + 1)


def test_a_reply_that_declares_more_than_one_body_may_have_is_refused(site, run):
    device = site.device()
    sent = send(run, device, bytes(INLINE_BODY_BYTES + 1))
    instruction = device.supernode.pull()
    many = [ObjectTree(object_id=f"{number:064x}") for number in range(MAX_BODY_BYTES // CHUNK_BYTES)]
    deep = ObjectTree(object_id="a" * 64, children=[ObjectTree(object_id="b" * 64)])

    for children in (many, [deep]):

        def greedy(send_request, message, children=children):
            message.message_object_trees[0].children.extend(children)
            return send_request(PUSH_MESSAGES, message)

        end = intercept(device, PUSH_MESSAGES, greedy)
        with pytest.raises(ReplyRejectedError):
            device.supernode.push(answer(device, instruction))
        end()
        assert site.leftovers()["open"] == 0
    run.cancel(sent)


def test_of_a_tree_that_is_too_large_only_the_length_is_read():
    class Unread(list):
        def __iter__(self):
            raise AssertionError("an id was read")

    children = [ObjectTree(object_id=f"{number:064x}") for number in range(MAX_BODY_BYTES // CHUNK_BYTES)]
    largest = SimpleNamespace(object_id="a" * 64, children=children[1:])
    assert link_state._is_valid_tree(largest)
    assert not link_state._is_valid_tree(SimpleNamespace(object_id="a" * 64, children=Unread(children)))


def test_a_piece_larger_than_a_chunk_is_refused(site, run):
    device = site.device()
    sent = send(run, device, bytes(INLINE_BODY_BYTES + 1))
    instruction = device.supernode.pull()

    def swollen(send_request, message):
        message.object_content = bytes(MAX_OBJECT_BYTES + 1)
        return send_request(PUSH_OBJECT, message)

    intercept(device, PUSH_OBJECT, swollen)
    with pytest.raises(ReplyRejectedError):
        device.supernode.push(answer(device, instruction))
    assert site.replies.empty()
    run.cancel(sent)


def test_nothing_else_of_flower_can_be_reached(site):
    device = site.device()
    for name in ("register-node", "unregister-node", "", "nonsense"):
        assert site.request(f"/v1/fleet/{name}", headers={"content-length": "0", **signed(device, name)})[0] == 404
        assert site.request(f"/v1/fleet/{name}", headers={"content-length": "0"})[0] == 401
    for path in ("/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/pull", "/docs", "/openapi.json"):
        for method in ("GET", "POST"):
            assert site.request(path, headers={"content-length": "0"}, method=method)[0] == 404


@pytest.mark.parametrize("off_s", [TWO_DAYS_S, -TWO_DAYS_S])
def test_a_clock_that_is_days_off_is_refused_raw_and_served_corrected(site, run, off_s):
    def raw():
        return time.time() + off_s

    key = new_key()
    with pytest.raises(UnauthorisedError):
        site.device(clock=raw, key=key)
    device = site.device(clock=lambda: raw() - off_s, key=key)
    send(run, device)
    work(device)
    assert site.reply().body == b"model"


def test_a_board_that_comes_back_at_once_is_let_in(site, run):
    device = site.device()
    device.supernode.connect(site.address)
    send(run, device)
    work(device)
    assert site.reply().body == b"model"


def test_a_removed_device_is_refused_and_may_come_back_under_a_new_number(site):
    device = site.device()
    site.state.remove_node(device.id)
    with pytest.raises(UnauthorisedError):
        device.supernode.pull()
    again = site.device(key=device.key)
    assert again.supernode.pull() is None
    assert again.id != device.id


def test_the_same_key_keeps_its_number(site):
    device = site.device()
    assert site.superlink.register(device.public) == device.id


def test_every_request_of_a_known_device_is_a_sign_of_life(site):
    device = site.device()
    before = len(site.contacts)
    device.supernode.pull()
    assert site.contacts[before:] == [device.id]


def test_a_closed_run_leaves_nothing_and_refuses_what_still_comes(site):
    run, device = site.superlink.open_run(), site.device()
    send(run, device, bytes(INLINE_BODY_BYTES + 1))
    send(run, device, bytes(INLINE_BODY_BYTES + 2))
    instruction = device.supernode.pull()
    run.close()
    assert site.leftovers() == NOTHING
    with pytest.raises(ReplyRejectedError):
        device.supernode.push(answer(device, instruction))
    assert device.supernode.pull() is None
    with pytest.raises(NetworkError, match="refused an instruction"):
        send(run, device)
    assert site.leftovers() == NOTHING


def test_an_unknown_node_cannot_be_sent_to(run):
    with pytest.raises(NetworkError, match="unknown node"):
        run.send(12345, kind="train", header={}, body=prepare_body(bytes(INLINE_BODY_BYTES + 1)))


def test_after_a_restart_a_device_goes_on_under_its_old_number(tmp_path):
    with contextlib.closing(Site(tmp_path / "coordinator")) as site:
        run, device = site.superlink.open_run(), site.device()
        send(run, device)
        instruction = device.supernode.pull()
        run.close()
        device.supernode.close()  # an open connection would hold up the server's end for seconds
        site.restart()
        with pytest.raises(NetworkError):  # not known yet: as if it had never joined
            device.supernode.connect(site.address)
        site.state.restore_node(device.id, device.public)
        device.supernode.connect(site.address)
        with pytest.raises(ReplyRejectedError, match="no such run"):  # and not an error that is tried again for ever
            device.supernode.push(answer(device, instruction))
        with contextlib.closing(site.superlink.open_run()) as run:
            send(run, device)
            work(device)
            assert site.reply().node_id == device.id
        assert site.leftovers() == NOTHING


def describe(descriptor, path=()):
    """A message as it is on the wire: number, name, kind and repetition of each field; an entry of a map likewise."""
    if descriptor.full_name in path:
        return "as above"
    return {
        (field.number, field.name, field.type, field.is_repeated): field.message_type
        and describe(field.message_type, (*path, descriptor.full_name))
        for field in descriptor.fields
    }


@pytest.mark.parametrize("method", REQUESTS)
def test_every_request_is_on_the_wire_as_flower_has_it(method, monkeypatch):
    theirs = PROTOBUF_REQUEST_TYPES["POST", FLEET_PREFIX + method]
    assert describe(REQUESTS[method].DESCRIPTOR) == describe(theirs.DESCRIPTOR)
    client, made = FleetHttpClient("https://nowhere"), []
    monkeypatch.setattr(client, "_unary_unary", lambda **how: made.append(how))
    name = theirs.DESCRIPTOR.name.removesuffix("Request")
    getattr(client, name)(theirs())
    assert made[0]["path"] == FLEET_PREFIX + method
    assert describe(RESPONSES[method].DESCRIPTOR) == describe(made[0]["response_type"].DESCRIPTOR)


def test_what_may_be_absent_and_what_is_a_choice_is_so_in_flower_too():
    ensure_identity()
    metadata = metadata_to_proto(Message(RecordDict(), 3, "train").metadata).DESCRIPTOR
    for name in ("src_task_id", "dst_task_id", "message_id"):
        ours, theirs = (found.fields_by_name[name] for found in (MESSAGES["Metadata"].DESCRIPTOR, metadata))
        assert ours.has_presence == theirs.has_presence
    assert [field.name for field in MESSAGES["ConfigRecordValue"].DESCRIPTOR.oneofs[0].fields] == [
        field.name for field in MESSAGES["ConfigRecordValue"].DESCRIPTOR.fields
    ]


def test_every_request_that_we_serve_has_a_handler():
    assert REQUESTS.keys() == superlink_module._HANDLERS.keys() == RESPONSES.keys()
    assert SERVER_NODE_ID == SUPERLINK_NODE_ID
    limits = superlink_module.MIN_HEARTBEAT_S, superlink_module.MAX_HEARTBEAT_S
    assert limits == (HEARTBEAT_MIN_INTERVAL, HEARTBEAT_MAX_INTERVAL)


@pytest.mark.parametrize("name", ["RUN_IS_OVER", "BAD_INTERVAL", "NO_FAB"])
def test_an_error_is_the_one_that_flower_answers(name):
    ours = getattr(link_state, name)
    theirs = API_ERROR_MAP[ours.code]
    assert (ours.status, ours.detail) == (theirs.http_status_code, theirs.public_message)
    answered = json.dumps({"code": ours.code, "detail": ours.detail, "extra": "why"})
    assert FlowerError.from_json(answered).code == ours.code


VALUES = {
    "arrays": ArrayRecord({"w": Array(np.ones((2, 3))), "same": Array(np.zeros(2)), "none": Array(np.zeros(0))}),
    "again": ArrayRecord({"same": Array(np.zeros(2))}),
    "nothing": MetricRecord({"e": []}),
    "metrics": MetricRecord({"loss": 0.5, "n": -3, "many": [1.0, 2.0], "whole": [1, 2**63], "big": 2**64 - 1}),
    "config": ConfigRecord({"y": True, "n": 2**63, "t": "ü", "b": b"\0", "ts": ["a", ""], "bs": [b"a"], "m": [True],
                            "e": []}),
    "none": ConfigRecord({}),
}  # fmt: skip


def test_a_message_is_the_objects_that_flower_makes_of_it_and_is_read_from_them():
    ensure_identity()
    message = Message(RecordDict(VALUES), 3, "train", group_id="4")
    theirs = {name: one.deflate() for name, one in inflatable_object.get_all_nested_objects(message).items()}
    metadata = metadata_to_proto(message.metadata)
    metadata.message_id = ""
    ours = encode_objects(parse_protobuf(MESSAGES["Metadata"], metadata.SerializeToString()), message.content)
    assert ours == theirs
    root = next(reversed(ours))
    tree = inflatable_object.get_object_tree(message)
    assert make_tree(root, ours).SerializeToString() == tree.SerializeToString()
    content, error = decode_objects(root, theirs, max_bytes=10**8)
    assert (content, error) == (message.content, None)


def test_an_array_of_equal_chunks_has_each_once_and_is_read_whole():
    content = RecordDict({"arrays": ArrayRecord({"zeros": Array(np.zeros(3 * CHUNK_BYTES // 8))})})
    objects = encode_objects(MESSAGES["Metadata"](), content)
    (array,) = [found for found in map(parse_object, objects.values()) if found.kind == "Array"]
    assert (len(array.children), len(set(array.children))) == (3, 3)
    assert json.loads(array.body)["arraychunk_ids"] == [0, 1, 1, 2]
    assert decode_objects(next(reversed(objects)), objects, max_bytes=10**8) == (content, None)


def test_an_object_is_read_and_named_as_flower_writes_it():
    chunk = ArrayChunk(memoryview(b"a\0b")).deflate()
    assert (encode_chunk(b"a", b"\0b"), parse_chunk(chunk)) == (chunk, b"a\0b")
    ensure_identity()
    message = Message(RecordDict({"a": ArrayRecord([np.arange(6.0), np.arange(6.0)])}), 3, "train")
    for name, found in inflatable_object.get_all_nested_objects(message).items():
        content = found.deflate()
        head = inflatable_object.get_object_head_values_from_object_content(content)
        parsed = parse_object(content)
        assert (parsed.kind, list(parsed.children), len(parsed.body)) == head
        assert compute_object_id(content) == name
    bad = (chunk[:-1], chunk + b"c", b"", b"ArrayChunk 3", chunk.replace(b"  ", b" 00 "), chunk.replace(b" 3", b" x"))
    for content in (*bad, RecordDict().deflate(), b"\xff" + chunk):
        with pytest.raises(ValueError, match=r"."):
            parse_chunk(content)


PRIVATE_NAMES = {"coordinator": set(), "device": set(), "flower": {"make_message", "TaskIdentity"}}
"""Names of Flower's that its authors do not document, by the room that imports them."""


def test_private_names_of_flower_grow_no_more():
    """Public is what the packages `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and its strategies list."""
    found = {room: set() for room in PRIVATE_NAMES}
    for file in Path(edgefl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"flwr\b", node.module or ""):
                public = getattr(importlib.import_module(node.module), "__all__", ())
                is_package = node.module in {
                    "flwr.app",
                    "flwr.clientapp",
                    "flwr.serverapp",
                    "flwr.serverapp.strategy",
                }
                private = {name.name for name in node.names if not is_package or name.name not in public}
                if private:
                    found[file.relative_to(Path(edgefl.__file__).parent).parts[0]] |= private
    assert found == PRIVATE_NAMES


def test_a_torn_connection_does_not_disturb_the_others(site, run):
    device = site.device()
    for payload in (b"", b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nhalf"):
        plain = socket.create_connection(("127.0.0.1", site.port), timeout=5)
        with contextlib.closing(site.trust.wrap_socket(plain, server_hostname="127.0.0.1")) as line:
            line.sendall(payload)
    send(run, device)
    work(device)
    assert site.reply().body == b"model"


def test_a_process_says_who_it_is_and_repeats_the_stamp_that_it_was_given(site):
    site.watcher.calls.clear()
    device = site.device(instance="boot-a")
    device.supernode.pull()
    site.watcher.now = "life.2"
    device.supernode.pull()
    device.supernode.connect(site.address)
    assert site.watcher.calls == [(device.id, "boot-a", stamp) for stamp in ("", "life.1", "life.1", "life.2")]


def test_a_copy_is_refused_with_every_request_and_is_no_sign_of_life(site):
    original = site.device(instance="boot-a")
    copy = site.node(key=original.key, register=False, instance="boot-b")
    site.watcher.refused["boot-b"] = "another one was here before"
    before = len(site.contacts)
    with pytest.raises(ClonedError, match="a copy: another one was here before"):
        copy.supernode.connect(site.address)
    with pytest.raises(ClonedError):
        copy.supernode.pull()
    assert len(site.contacts) == before
    assert original.supernode.pull() is None
