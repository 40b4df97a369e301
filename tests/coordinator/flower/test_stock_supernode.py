"""A run's messages to stock SuperNodes and their replies, over TLS, with the connection that Flower ships."""

import base64
import contextlib
import datetime as dt
import json
import queue
from pathlib import Path

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flower_apps import write_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response
from noted_calls import NotedCalls

from edgefl.coordinator.api.server import WebServer, make_app, open_listener
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.flower.fleet_api import MAX_OBJECT_BYTES, MAX_PUSH_OBJECT_BYTES
from edgefl.coordinator.flower.link_state import FleetApiError
from edgefl.coordinator.flower.stock_messages import MAX_TREE_DEPTH, MAX_TREE_OBJECTS, OVERHEAD_BYTES
from edgefl.coordinator.flower.superlink import SuperLink, prepare_body
from edgefl.core import fleet_messages
from edgefl.core.errors import NetworkError
from edgefl.core.fleet_messages import REQUESTS
from edgefl.core.protocol import JOB_LIMITS, KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from edgefl.flower.app_bundle import make_bundle, open_app
from edgefl.flower.app_codec import ModelCodec
from edgefl.flower.app_folder import read_app
from edgefl.flower.app_messages import decode_message, encode_envelope, encode_message
from edgefl.system.https_client import create_pinned_context

MAX_PART_BYTES = 4 * 1024 * 1024
HEADER = {"assignment": "run/1", "lineage": "a", "newest_record": 7, JOB_LIMITS: {"max_part_bytes": MAX_PART_BYTES}}
CONTENT = RecordDict(
    {"arrays": ArrayRecord({"w": Array(np.arange(6.0))}), "config": ConfigRecord({"server-round": 3, "lr": 0.5})}
)


class Node:
    """A stock connection; its members are what Flower's SuperNode calls."""

    def __init__(self, connection):
        (
            self.id,
            self.receive,
            self.send,
            self.get_run,
            self.get_fab,
            self.pull_object,
            self.push_object,
            self.confirm,
        ) = connection

    def take(self):
        """Returns the next message with its content, as a SuperNode takes it."""
        message, tree = self.receive()
        run_id = message.metadata.run_id
        ids, trees = [], [tree]
        while trees:
            ids.append((tree := trees.pop()).object_id)
            trees += tree.children
        contents = {name: self.pull_object(run_id, name) for name in ids}
        whole = inflate_object_from_contents(message.metadata.message_id, contents)
        self.confirm(run_id, message.metadata.message_id)
        whole.metadata.__dict__["_message_id"] = message.metadata.message_id
        return whole

    def answer(self, reply):
        objects = {name: found.deflate() for name, found in get_all_nested_objects(reply).items()}
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.push(reply, get_object_tree(reply), objects)

    def push(self, reply, tree, objects):
        missing, session = self.send(reply, tree, 0.1)
        for name in missing:
            self.push_object(reply.metadata.run_id, session, name, objects[name])


class Site:
    def __init__(self, root, app):
        listener = open_listener("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.directory = init_directory(root, hosts=["127.0.0.1"], fleet="lab", port=self.port)
        self.replies, self.rejected, self.held = queue.Queue(), [], []
        self.superlink = SuperLink(
            on_reply=self.replies.put,
            observer=NotedCalls(),
            on_rejected=lambda kind, _request, node, detail: self.rejected.append((kind, node, detail)),
            on_supernode=lambda node, method, held: self.held.append((node, method, held)),
        )
        self.web = WebServer(make_app(self.superlink.api, []), self.directory, listener)
        self.web.start()
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.public = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.node_id = self.superlink.register(self.public, is_supernode=True)
        self.app = app
        self.run = self.superlink.open_run(lambda: make_bundle(app, {**app.config, "num-nodes": 5}))

    def close(self):
        self.run.close()
        self.web.stop()

    @contextlib.contextmanager
    def connected(self):
        ca = self.directory.ca_cert.read_bytes()
        keys = self.key, self.key.public_key()
        raised = None
        with http_request_response(f"127.0.0.1:{self.port}", False, ca, keys) as connection:
            try:
                yield Node(connection)
            except Exception as error:  # noqa: BLE001 Flower's connection logs what is raised within it, no more
                raised = error
        if raised is not None:
            raise raised

    def send(self, content=CONTENT, header=HEADER, kind="train"):
        body = encode_envelope({"node_id": 1}) + encode_message({"type": kind, "group": "3"}, content)
        return self.run.send(self.node_id, kind="train", header=header, body=prepare_body(body))

    def reply(self):
        return self.replies.get(timeout=10)

    def leftovers(self):
        state = self.superlink.state
        return [
            len(kept)
            for kept in (
                state.messages, state.board_store, state.partial_replies, state.stock_instructions, state.stock_store,
            )
        ]  # fmt: skip


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path / "coordinator", read_app(write_app(tmp_path / "app"), is_packed=True))
    yield site
    site.close()


def test_a_message_in_a_codec_for_boards_goes_out_with_whole_rounded_arrays(site):
    content = RecordDict({"arrays": ArrayRecord([np.linspace(0, 1, 500, dtype=np.float32)])})
    message = encode_message({"type": "train", "group": "3"}, content, ModelCodec("fp16"))
    assert b'"model"' in message
    body = prepare_body(encode_envelope({"node_id": 1}) + message)
    site.run.send(site.node_id, kind="train", header=HEADER, body=body)
    with site.connected() as node:
        (found,) = node.take().content["arrays"].to_numpy_ndarrays()
    np.testing.assert_array_equal(found, np.linspace(0, 1, 500, dtype=np.float32).astype(np.float16))
    assert found.dtype == np.float32


def test_a_message_goes_out_as_flower_s_and_its_reply_comes_back_as_a_board_s(site):
    sent = site.send()
    with site.connected() as node:
        message = node.take()
        assert (message.metadata.message_type, message.metadata.group_id) == ("train", "3")
        assert message.metadata.message_id == sent
        np.testing.assert_array_equal(message.content["arrays"]["w"].numpy(), np.arange(6.0))
        assert dict(message.content["config"]) == {"server-round": 3, "lr": 0.5}
        metrics = MetricRecord({"num-examples": 10, "train_loss": 0.25})
        node.answer(Message(RecordDict({"arrays": ArrayRecord([np.ones(3)]), "m": metrics}), reply_to=message))
        reply = site.reply()
    assert (reply.node_id, reply.instruction_id) == (site.node_id, sent)
    assert {key: reply.header[key] for key in ("assignment", "lineage", "newest_record")} == {
        "assignment": "run/1", "lineage": "a", "newest_record": 7,
    }  # fmt: skip
    assert reply.header["log"] == ["train in round 3: num-examples 10, train_loss 0.25"]
    assert reply.header["metrics"]["compute_s"] < 60
    header, content = decode_message(reply.body)
    assert header == {}
    np.testing.assert_array_equal(content["arrays"].to_numpy_ndarrays()[0], np.ones(3))
    assert reply.bytes_up > 24
    assert site.leftovers() == [0] * 5
    held = [held for _, method, held in site.held if method == "pull-messages"]
    assert held == [("run/1",)]


def test_a_supernode_fetches_the_app_of_the_run_with_its_configuration(site, tmp_path):
    site.send()
    with site.connected() as node:
        run = node.get_run(node.take().metadata.run_id)
        assert (run.fab_id, run.fab_version) == ("nobody/mean-app", "1.2.0")
        assert run.override_config == {"num-nodes": 5, "num-server-rounds": 3, "model.size": 4}
        fab = tmp_path / "app.fab"
        fab.write_bytes(node.get_fab(run.fab_hash, run.run_id).content)
    with open_app(fab) as opened:
        assert opened.files == site.app.files
        assert {file: (opened.root / file).read_bytes() for file in opened.files} == {
            file: (site.app.root / file).read_bytes() for file in site.app.files
        }


def test_an_error_of_the_clientapp_arrives_with_its_code_and_reason(site):
    site.send()
    with site.connected() as node:
        node.answer(Message(Error(2, "it raised"), reply_to=node.take()))
        reply = site.reply()
    assert decode_message(reply.body) == ({"error": 2, "reason": "it raised"}, None)
    assert reply.header["log"] == ["train in round 3: it raised"]


def test_a_large_model_arrives_in_both_directions(site):
    model = np.random.default_rng(1).standard_normal(400_000)
    site.send(RecordDict({"arrays": ArrayRecord([model])}))
    with site.connected() as node:
        message = node.take()
        node.answer(Message(message.content, reply_to=message))
        reply = site.reply()
    _, content = decode_message(reply.body)
    np.testing.assert_array_equal(content["arrays"].to_numpy_ndarrays()[0], model)


def test_a_question_before_the_run_is_answered_here_and_a_run_without_an_app_is_refused(site):
    asked = site.run.send(site.node_id, kind="train", header={"assignment": "run/can", "phase": "can"}, body=None)
    reply = site.reply()
    assert (reply.instruction_id, reply.header) == (asked, {"assignment": "run/can", "ready": True})
    refused = pytest.raises(NetworkError, match="Flower apps alone")
    with contextlib.closing(site.superlink.open_run()) as other, refused:
        other.send(site.node_id, kind="train", header=HEADER, body=prepare_body(b""))


def large_reply(message):
    large = [np.zeros((MAX_PART_BYTES + OVERHEAD_BYTES) // 16) + i for i in range(3)]
    return Message(RecordDict({"arrays": ArrayRecord(large)}), reply_to=message)


def send_large(node, message):
    node.answer(large_reply(message))


def send_large_piece(node, message):
    send_object(node, message, ArrayChunk(memoryview(bytes(MAX_OBJECT_BYTES))).deflate())


def send_larger_request(node, message):
    send_object(node, message, ArrayChunk(memoryview(bytes(MAX_PUSH_OBJECT_BYTES))).deflate())


def send_other_content(node, message):
    send_object(node, message, b"other", object_id="ab" * 32)


def send_object(node, message, content, object_id=None):
    reply, name = Message(RecordDict(), reply_to=message), object_id or get_object_id(content)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    tree = ObjectTree(object_id=reply.object_id, children=[ObjectTree(object_id=name)])
    node.push(reply, tree, {reply.object_id: reply.deflate(), name: content})


def announce(node, message, children=(), *, root=None):
    """Announces a reply with these trees below its first object; returns the missing ids and the session."""
    reply = Message(RecordDict(), reply_to=message)
    reply.metadata.__dict__.update(_message_id="ef" * 32)
    return node.send(reply, ObjectTree(object_id=root or "ef" * 32, children=children), 0.1)


def send_many(node, message):
    announce(node, message, [ObjectTree(object_id="ab" * 32)] * MAX_TREE_OBJECTS)


def send_deep(node, message):
    tree = ObjectTree(object_id="ab" * 32)
    for _ in range(4):
        tree = ObjectTree(object_id="cd" * 32, children=[tree])
    announce(node, message, [tree])


def send_another_root(node, message):
    announce(node, message, root="ab" * 32)


def send_another_tree(node, message):
    announce(node, message, [ObjectTree(object_id="ab" * 32)])
    announce(node, message, [ObjectTree(object_id="cd" * 32)])


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (send_large, f"at most {MAX_PART_BYTES + OVERHEAD_BYTES} bytes: raise job.max_part_bytes"),
        (send_large_piece, f"a piece of a reply has at most {MAX_OBJECT_BYTES} bytes"),
        (send_larger_request, f"at most {MAX_PUSH_OBJECT_BYTES} bytes"),
        (send_other_content, "its object is not the one"),
        (send_many, f"at most {MAX_TREE_OBJECTS} objects"),
        (send_deep, f"{MAX_TREE_DEPTH} deep"),
        (send_another_root, "the first of its objects"),
        (send_another_tree, "other objects than before"),
    ],
)
def test_what_cannot_be_taken_of_a_reply_is_refused_and_the_run_is_told(tmp_path, act, error):
    roomy = {**HEADER, JOB_LIMITS: {"max_part_bytes": 4 * MAX_PART_BYTES}} if "piece" in act.__name__ else HEADER
    site = Site(tmp_path / "coordinator", read_app(write_app(tmp_path / "app"), is_packed=True))
    with contextlib.closing(site), site.connected() as node:
        sent = site.send(header=roomy)
        with pytest.raises((RunNotRunningException, httpx.HTTPStatusError)):
            act(node, node.take())
        reply = site.reply()
        assert (reply.node_id, reply.instruction_id, reply.body) == (site.node_id, sent, b"")
        assert error in reply.header["error"]
        assert [kind for kind, _, _ in site.rejected] == (["size"] if "request" in act.__name__ else [])
        assert (site.run.is_known(sent), site.leftovers(), site.replies.qsize()) == (False, [0] * 5, 0)


def test_a_larger_request_of_another_kind_or_node_does_not_end_the_reply(site):
    sent = site.send()
    with site.connected() as node:
        _, session = announce(node, node.take())
        site.superlink.api._servicer.refuse_body("pull-messages", site.node_id, 1)
        site.superlink.api._servicer.refuse_body("push-object", site.node_id + 1, 1)
    assert (site.run.is_known(sent), site.replies.empty(), bool(session)) == (True, True, True)


def test_a_reply_that_is_announced_again_goes_on_and_no_object_counts_twice(site):
    site.send()
    with site.connected() as node:
        values = np.random.default_rng(1).standard_normal((2, MAX_PART_BYTES // 20))
        reply = Message(RecordDict({"arrays": ArrayRecord(list(values))}), reply_to=node.take())
        objects = {name: found.deflate() for name, found in get_all_nested_objects(reply).items()}
        reply.metadata.__dict__["_message_id"] = reply.object_id
        large = max(objects, key=lambda name: len(objects[name]))
        _, first = node.send(reply, get_object_tree(reply), 0.1)
        for _ in range(5):
            node.push_object(reply.metadata.run_id, first, large, objects[large])
        missing, second = node.send(reply, get_object_tree(reply), 0.1)
        assert missing == objects.keys() - {large}
        for name in missing:
            node.push_object(reply.metadata.run_id, second, name, objects[name])
        _, content = decode_message(site.reply().body)
    np.testing.assert_array_equal(content["arrays"].to_numpy_ndarrays(), values)
    assert (site.leftovers(), site.replies.qsize()) == ([0] * 5, 0)


def test_the_objects_of_a_reply_are_in_one_file_until_it_is_cancelled(site):
    sent = site.send()
    contents = {}
    for number in range(400):
        content = ArrayChunk(memoryview(b"%d" % number * 1000)).deflate()
        contents[get_object_id(content)] = content
    with site.connected() as node:
        message = node.take()
        _, session = announce(node, message, [ObjectTree(object_id=name) for name in contents])
        count, state = lambda: len(list(Path("/proc/self/fd").iterdir())), site.superlink.state
        before = count()
        for name, content in contents.items():
            assert state.add_object(push_of(site.node_id, message.metadata.run_id, session, name, content))
        assert count() == before + 1
        site.run.cancel(sent)
        assert count() == before
    assert site.leftovers() == [0] * 5


def push_of(node_id, run_id, session, object_id, content):
    return REQUESTS["push-object"](
        node=fleet_messages.Node(node_id=node_id),
        run_id=run_id,
        session_id=session,
        object_id=object_id,
        object_content=content,
    )


def test_an_object_is_kept_of_the_node_and_in_the_run_alone_that_announced_it(site):
    other = site.superlink.register(b"another key", is_supernode=True)
    sent, state = site.send(), site.superlink.state
    content = ArrayChunk(memoryview(b"content")).deflate()
    name = get_object_id(content)
    with site.connected() as node, contextlib.closing(site.superlink.open_run()) as run:
        message = node.take()
        _, session = announce(node, message, [ObjectTree(object_id=name)])
        own = message.metadata.run_id
        pushes = [(other, own, session), (site.node_id, run._run_id, session), (site.node_id, own, "")]
        assert [state.add_object(push_of(*push, name, content)) for push in pushes] == [False] * 3
        assert name in state.stock_instructions[sent].reply.list_missing()
        assert state.add_object(push_of(site.node_id, own, session, name, content))
        assert name not in state.stock_instructions[sent].reply.list_missing()


def test_a_supernode_cannot_answer_for_another_nor_end_its_work(site):
    other = site.superlink.register(b"another key", is_supernode=True)
    sent = site.send()
    with site.connected() as node:
        message = node.take()
    state = site.superlink.state
    metadata = fleet_messages.Metadata(
        run_id=message.metadata.run_id, message_id="ef" * 32, src_node_id=other, reply_to_message_id=sent,
    )  # fmt: skip
    with pytest.raises(FleetApiError, match="reply refused"):
        state.add_reply(fleet_messages.Message(metadata=metadata), fleet_messages.ObjectTree(object_id="ab" * 32))
    assert (site.run.is_known(sent), site.replies.empty()) == (True, True)


def test_what_a_supernode_announces_changes_nothing_of_what_another_is_sent(site):
    """The ids of a record are known before it is sent, and Flower keeps the children of the first who names them."""
    other = site.superlink.register(b"another key", is_supernode=True)
    content = RecordDict({"config": ConfigRecord({"server-round": 4})})
    known = content["config"].object_id
    site.send()
    with site.connected() as node:
        doubled, levels = ObjectTree(object_id="00" * 32), []
        for number in range(1, 20):
            levels.append(ObjectTree(object_id=f"{number:064x}", children=[doubled] * 2))
            doubled = ObjectTree(object_id=f"{number:064x}")
        announce(node, node.take(), [*levels, ObjectTree(object_id=known, children=[doubled])])
        assert len(site.superlink.state.board_store) == 0
        body = encode_envelope({}) + encode_message({"type": "train", "group": "4"}, content)
        sent = site.run.send(other, kind="train", header=HEADER, body=prepare_body(body))
    tree = site.superlink.state.stock_store.get_tree(sent)
    assert [found.object_id for found in iterate_object_tree(tree)] == [known, content.object_id, sent]


def encode_object(kind, children, body):
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\x00" + body


def make_repeated_chunk(add):
    """An array may name one chunk any number of times."""
    chunk = add("ArrayChunk", [], bytes(100_000))
    about = {"dtype": "<f4", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 1000}
    array = add("Array", [chunk], json.dumps(about).encode())
    record = add("ArrayRecord", [array], json.dumps({"w": array}).encode())
    return add("RecordDict", [record], json.dumps({"arrays": record}).encode())


def make_unnamed_child(add):
    """A table may leave out what the head names, and Flower unfolds all that the head names."""
    record = add("ConfigRecord", [], b"")
    return add("RecordDict", [record], b"{}")


def make_array_of_no_record(add):
    chunk = add("ArrayChunk", [], bytes(100_000))
    about = {"dtype": "<f4", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0]}
    array = add("Array", [chunk], json.dumps(about).encode())
    return add("RecordDict", [array], json.dumps({"w": array}).encode())


def make_deep(add):
    name = add("RecordDict", [], b"{}")
    for _ in range(3000):
        name = add("RecordDict", [name], json.dumps({"a": name}).encode())
    return name


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (make_repeated_chunk, "raise job.max_part_bytes"),
        (make_unnamed_child, "a RecordDict refers to other objects than its head names"),
        (make_array_of_no_record, "a 'Array' is where ArrayRecord or ConfigRecord or MetricRecord should be"),
        (make_deep, "a 'RecordDict' is where ArrayRecord"),
    ],
)
def test_a_reply_that_unfolds_to_what_no_supernode_sends_is_an_error(site, make, error):
    site.send()
    objects = {}

    def add(kind, children, body):
        content = encode_object(kind, children, body)
        objects[get_object_id(content)] = content
        return get_object_id(content)

    with site.connected() as node:
        reply = Message(RecordDict(), reply_to=node.take())
        body = reply.deflate().partition(b"\x00")[2]
        root = add("Message", [make(add)], body)
        reply.metadata.__dict__["_message_id"] = root
        children = [ObjectTree(object_id=name) for name in objects if name != root]
        missing, session = node.send(reply, ObjectTree(object_id=root, children=children), 0.1)
        for name in missing:
            run_id = reply.metadata.run_id
            site.superlink.state.add_object(push_of(site.node_id, run_id, session, name, objects[name]))
        answer = site.reply()
    assert error in answer.header["error"]
    assert answer.body == b""
    assert site.leftovers() == [0] * 5


def test_a_closed_run_leaves_nothing_and_its_app_stays_for_another_that_has_it(site):
    state = site.superlink.state
    with contextlib.closing(site.superlink.open_run(lambda: make_bundle(site.app, site.app.config))) as other:
        site.send()
        with site.connected() as node:
            announce(node, node.take(), [ObjectTree(object_id="ab" * 32)])
            site.send()
            site.run.close()
        assert site.leftovers() == [0] * 5
        assert len(state._fabs) == 1
        assert not site.run.is_known(
            other.send(site.node_id, kind="train", header=HEADER | {"phase": "can"}, body=None)
        )
    site.run.close()
    assert (len(state._fabs), site.leftovers()) == (0, [0] * 5)


@pytest.mark.parametrize(("key", "off_s", "status"), [("own", 0.0, 200), ("own", -400.0, 401), ("other", 0.0, 401)])
def test_a_supernode_is_known_by_the_signature_of_its_time(site, key, off_s, status):
    signer = site.key if key == "own" else ec.generate_private_key(ec.SECP384R1())
    assert ask_signed(site, signer, off_s) == status
    assert [kind for kind, _, _ in site.rejected] == (["signature"] if status == 401 else [])


def ask_signed(site, signer, off_s=0.0):
    """Returns the status of a request for messages, signed as a SuperNode does."""
    stamp = (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=off_s)).isoformat()
    headers = {
        KEY_HEADER: base64.b64encode(site.public).decode(),
        TIMESTAMP_HEADER: stamp,
        SIGNATURE_HEADER: base64.b64encode(sign_message(signer, stamp.encode())).decode(),
    }
    body = REQUESTS["pull-messages"](node=fleet_messages.Node(node_id=site.node_id)).SerializeToString()
    trust = create_pinned_context(site.directory.ca_cert.read_bytes())
    with httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{site.port}") as client:
        return client.post("/v1/fleet/pull-messages", content=body, headers=headers).status_code


def test_a_refused_reply_ends_the_work_of_its_supernode_too(site):
    site.send()
    with site.connected() as node:
        message = node.take()
        site.run.close()
        with pytest.raises(RunNotRunningException):
            node.answer(Message(RecordDict(), reply_to=message))
    assert (site.node_id, "push-messages", None) in site.held


def test_a_removed_supernode_is_refused_and_its_key_counts_no_more(site):
    assert ask_signed(site, site.key) == 200
    site.superlink.remove(site.node_id)
    assert ask_signed(site, site.key) == 401
    assert site.superlink.state.supernodes == set()
    with pytest.raises(NetworkError):
        site.send()
