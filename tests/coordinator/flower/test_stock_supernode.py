"""A run's messages to stock SuperNodes and their replies, over TLS, with the connection that Flower ships."""

import base64
import contextlib
import datetime as dt
import json
import queue

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flower_apps import write_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto import node_pb2
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response
from noted_calls import NotedCalls

from edgefl.coordinator.api.server import WebServer, make_app, open_listener
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.flower.stock_messages import MAX_TREE_OBJECTS, OVERHEAD_BYTES
from edgefl.coordinator.flower.superlink import SuperLink, prepare_body
from edgefl.core.errors import NetworkError
from edgefl.core.protocol import JOB_LIMITS, KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from edgefl.flower.app_bundle import make_bundle, open_app
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
        self.node_id = self.superlink.register(self.public, "node", is_supernode=True)
        self.app = app
        self.run = self.superlink.open_run(lambda: make_bundle(app, {**app.config, "num-nodes": 5}))

    def close(self):
        self.run.close()
        self.web.stop()

    @contextlib.contextmanager
    def connected(self):
        ca = self.directory.ca_cert.read_bytes()
        keys = self.key, self.key.public_key()
        with http_request_response(f"127.0.0.1:{self.port}", False, ca, keys) as connection:
            yield Node(connection)

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
                state.message_ins_store, state.message_res_store, state.object_store, state.partial_replies,
                state.stock_instructions, state._object_push_sessions,
            )
        ]  # fmt: skip


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path / "coordinator", read_app(write_app(tmp_path / "app"), is_packed=True))
    yield site
    site.close()


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
    assert site.leftovers() == [0] * 6
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


def test_more_than_the_run_takes_of_a_reply_is_refused_before_it_is_kept(site):
    site.send()
    large = [np.zeros((MAX_PART_BYTES + OVERHEAD_BYTES) // 16) + i for i in range(3)]
    with site.connected() as node:
        reply = Message(RecordDict({"arrays": ArrayRecord(large)}), reply_to=node.take())
        with pytest.raises(RunNotRunningException):
            node.answer(reply)
    assert site.replies.empty()


def test_a_reply_that_unfolds_to_more_than_the_run_takes_is_an_error(site):
    """An array may name one chunk any number of times."""
    site.send()
    with site.connected() as node:
        array = Array(np.zeros(100_000))
        reply = Message(RecordDict({"arrays": ArrayRecord({"w": array})}), reply_to=node.take())
        objects = {name: found.deflate() for name, found in get_all_nested_objects(reply).items()}
        old = array.object_id
        head, _, body = objects.pop(old).partition(b"\x00")
        table = json.dumps({**json.loads(body), "arraychunk_ids": [0] * 1000}).encode()
        bomb = head.rpartition(b" ")[0] + f" {len(table)}".encode() + b"\x00" + table
        names = {old: get_object_id(bomb)}
        objects[names[old]] = bomb
        for kind in (reply.content["arrays"], reply.content, reply):  # each names the one before
            name = kind.object_id
            head, _, body = objects.pop(name).partition(b"\x00")
            for before, after in names.items():
                head, body = (part.replace(before.encode(), after.encode()) for part in (head, body))
            names[name] = get_object_id(head + b"\x00" + body)
            objects[names[name]] = head + b"\x00" + body
        root = names[reply.object_id]
        reply.metadata.__dict__["_message_id"] = root
        tree = ObjectTree.FromString(rename(get_object_tree(reply), names))
        node.push(reply, tree, objects)
        answer = site.reply()
    assert "it has more than" in answer.header["error"]
    assert answer.body == b""


def rename(tree, names):
    changed = ObjectTree(object_id=names.get(tree.object_id, tree.object_id))
    changed.children.extend(ObjectTree.FromString(rename(child, names)) for child in tree.children)
    return changed.SerializeToString()


@pytest.mark.parametrize("shape", ["wide", "deep"])
def test_a_reply_of_too_many_objects_is_refused(site, shape):
    site.send()
    with site.connected() as node:
        reply = Message(RecordDict(), reply_to=node.take())
        reply.metadata.__dict__["_message_id"] = reply.object_id
        leaf = ObjectTree(object_id="ab" * 32)
        tree = ObjectTree(object_id=reply.object_id, children=[leaf] * (MAX_TREE_OBJECTS if shape == "wide" else 1))
        for _ in range(0 if shape == "wide" else 5):
            tree = ObjectTree(object_id=reply.object_id, children=[tree])
        with pytest.raises(RunNotRunningException):
            node.send(reply, tree, 0.1)
    assert site.leftovers()[3] == 0


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
    body = PullMessagesRequest(node=node_pb2.Node(node_id=site.node_id)).SerializeToString()
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
