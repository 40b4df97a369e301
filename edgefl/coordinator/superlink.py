"""Flower's SuperLink inside our process: the only file of the coordinator that knows Flower's private modules.

Flower's in-memory LinkState is a cache: it holds messages between dispatch and reply, while the store is the
truth. The subclass here wakes us when a reply's last byte has landed, keeps node ids over restarts, and makes
refused replies visible. `FlowerCalls` answers Flower's Fleet API and nothing else of Flower's HTTP surface.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from fastapi import HTTPException
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    SubStatus,
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    NOOP_FEDERATION_ID,
    OBJECT_PUSH_SESSION_TTL_SECONDS,
    NodeStatus,
    TaskType,
)
from flwr.supercore.date import now
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_id
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from google.protobuf.message import DecodeError
from starlette.requests import Request

from edgefl.coordinator.asgi import error_json
from edgefl.coordinator.aside import LaidAside, lay_aside
from edgefl.coordinator.fleet_api import (
    MAX_OBJECT_BYTES,
    PREFIX,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    Answer,
    FleetApi,
    OnRefused,
    Watcher,
)
from edgefl.coordinator.half_replies import HalfReplies
from edgefl.coordinator.mail import PreparedBody, Reply
from edgefl.errors import NetworkError
from edgefl.protocol import (
    CHUNK_BYTES,
    FIELD_BYTES,
    FIELD_JSON,
    INLINE_BODY_BYTES,
    MAX_BODY_BYTES,
    RECORD_BODY,
    RECORD_HEADER,
    REPLY_SALT_BYTES,
)
from edgefl.types import Json
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

TTL_S = 100 * 365 * 24 * 3600.0
"""How long Flower keeps a message by wall clock: a clock that jumps must not end it, our own deadlines do."""
KEPT_PIECES = 4
"""So many pieces of models are kept as they go out; each has at most `protocol.CHUNK_BYTES`."""
KEPT_KEYS = 4096
"""Of so many devices the public key is kept in the form in which it verifies: to read it costs a third of that."""
EARLIEST_MESSAGE_S = 1_740_700_800.0
"""Flower refuses messages that were made earlier; a coordinator without network time may stand there."""


def prepare_body(body: bytes) -> PreparedBody:
    if len(body) <= INLINE_BODY_BYTES:
        return PreparedBody(inline=body)
    view = memoryview(body)
    chunks = tuple(ArrayChunk(view[i : i + CHUNK_BYTES]).deflate() for i in range(0, len(body), CHUNK_BYTES))
    return PreparedBody(inline=None, chunk_ids=tuple(get_object_id(chunk) for chunk in chunks), chunks=chunks)


class PieceStore(InMemoryObjectStore):
    """Flower's objects in memory, but for pieces of answers that wait for others: those lie on disk.

    Args:
        folder: where; None for the system's temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._aside: dict[str, LaidAside] = {}

    def preregister(self, run_id: int, object_tree: Any) -> list[str]:
        """Registers a message with its pieces at once.

        Flower does it one by one: a piece that others hold is gone when their last message is deleted in between.
        """
        with self.lock_store:
            missing: list[str] = super().preregister(run_id, object_tree)
            return missing

    def put_own(self, object_id: str, content: bytes) -> None:
        """Keeps an object that is registered and was named by its content here: its name need not be checked."""
        with self.lock_store:
            entry = self.store[object_id]
            if not entry.is_available:
                entry.content, entry.is_available = content, True

    def lay_aside(self, object_id: str) -> None:
        """Takes the content of an object out of memory, if it is there and there is room for it on disk."""
        content = super().get(object_id)
        aside = lay_aside(content, self._folder) if content else None
        with self.lock_store:
            if aside is not None and (entry := self.store.get(object_id)) is not None:
                self._aside[object_id], entry.content = aside, b""

    def get(self, object_id: str) -> bytes | None:
        with self.lock_store:
            aside = self._aside.get(object_id)
            content: bytes | None = super().get(object_id)
        return content if aside is None else aside.read()

    def delete(self, object_id: str) -> None:
        with self.lock_store:
            super().delete(object_id)
            if object_id not in self.store:
                self._aside.pop(object_id, None)


class EdgeLinkState(InMemoryLinkState):
    """Flower's link state, awake: `on_reply` is called once per stored reply, in the thread that stored it."""

    def __init__(self, manager: Any, store: PieceStore, on_reply: Callable[[Message], None]) -> None:
        super().__init__(manager, store)
        self.pieces, self._on_reply = store, on_reply
        self.half = HalfReplies[Message]()
        self._undelivered: dict[int, dict[str, None]] = {}

    def store_message_and_object_tree(self, message: Message, object_tree: Any, session_id: str) -> Any:
        if not _fits(object_tree):
            self._cleanup_push_session(session_id, cleanup_messages=False)
            raise _refusal(f"a reply has at most {MAX_BODY_BYTES} bytes, in one row of pieces")
        stored, missing = super().store_message_and_object_tree(message, object_tree, session_id)
        if not message.metadata.reply_to_message_id:
            return stored, missing
        if not stored:  # stock Flower answers 200 and drops the reply silently
            self._cleanup_push_session(session_id, cleanup_messages=False)
            raise _refusal("reply refused")
        if (message.has_content() and RECORD_BODY in message.content) or not missing:
            self._cleanup_push_session(session_id, cleanup_messages=False)
            self._on_reply(message)
            return stored, []
        self.half.begin(session_id, message, missing)
        return stored, missing

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        if len(object_content) > MAX_OBJECT_BYTES:
            raise _refusal(f"a piece of a reply has at most {MAX_OBJECT_BYTES} bytes, got {len(object_content)}")
        self._prolong(session_id)
        stored = bool(super().store_object(run_id, session_id, object_id, object_content))
        if not stored:
            return False
        complete = self.half.arrived(session_id, object_id)
        if complete is not None:
            self._on_reply(complete)
        else:
            self.pieces.lay_aside(object_id)
        return True

    def store_message_ins(self, message: Message) -> str | None:
        with self.lock:
            message_id: str | None = super().store_message_ins(message)
            if message_id is not None:
                self._undelivered.setdefault(message.metadata.dst_node_id, {})[message_id] = None
        return message_id

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """Looks at the node's own instructions alone; stock Flower looks at those of all nodes, at every pull."""
        found: list[Message] = []
        with self.lock:
            for message_id in list(self._undelivered.get(node_id, ())):
                self._check_stored_messages({message_id})
                message = self.message_ins_store.get(message_id)
                if message is not None and run_id is not None and message.metadata.run_id != run_id:
                    continue
                self._forget_undelivered(node_id, message_id)
                if message is None:
                    continue
                message.metadata.delivered_at = now().isoformat()
                found.append(message)
                if len(found) == limit:
                    break
        return found

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        with self.lock:
            for message_id in message_ins_ids:
                if (message := self.message_ins_store.get(message_id)) is not None:
                    self._forget_undelivered(message.metadata.dst_node_id, message_id)
            super().delete_messages(message_ins_ids)

    def _forget_undelivered(self, node_id: int, message_id: str) -> None:
        own = self._undelivered.get(node_id, {})
        own.pop(message_id, None)
        if not own:
            self._undelivered.pop(node_id, None)

    def discard(self, instruction_id: str, reply_id: str | None = None) -> None:
        """Forgets an instruction, its reply, and the pushing of it; what comes of them later is refused."""
        reply_id = reply_id or self.message_ins_id_to_message_res_id.get(instruction_id)
        if reply_id:
            for session_id in self.half.drop(lambda reply: reply.metadata.message_id == reply_id):
                self._cleanup_push_session(session_id, cleanup_messages=False)
            self.object_store.delete(reply_id)
        self.object_store.delete(instruction_id)
        self.delete_messages({instruction_id})

    def get_run_status(self, run_ids: set[int]) -> Any:
        """Refuses what belongs to a run of an earlier coordinator; stock Flower fails with a KeyError."""
        statuses = super().get_run_status(run_ids)
        if len(statuses) < len(run_ids):
            raise _refusal("no such run")
        return statuses

    def _cleanup_expired_task_tokens_locked(self) -> None:
        """Lets no run expire: when a run ends is the loop's business, and this clock may jump."""

    def _prolong(self, session_id: str) -> None:
        """Keeps a push session whose next piece has come, however long that took on a slow link."""
        with self._lock_object_push_sessions:
            session = self._object_push_sessions.get(session_id)
            if session is not None:
                session.expires_at = now() + dt.timedelta(seconds=OBJECT_PUSH_SESSION_TTL_SECONDS)

    def forget_sessions(self, run_id: int) -> None:
        self.half.drop(lambda reply: reply.metadata.run_id == run_id)
        self.delete_sessions_in_run(run_id)

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Activates a node also when it is still online: a board that was power-cycled comes back at once."""
        with self.lock:
            self.deactivate_node(node_id)
            return bool(super().activate_node(node_id, heartbeat_interval))

    def restore_node(self, node_id: int, public_key: bytes) -> None:
        """Puts a known device back under its old node id after a restart of the coordinator."""
        with self.lock:
            self.nodes[node_id] = NodeInfo(
                node_id=node_id,
                owner_aid=NOOP_FLWR_AID,
                owner_name=NOOP_ACCOUNT_NAME,
                status=NodeStatus.OFFLINE,
                public_key=public_key,
                heartbeat_interval=30.0,
                online_until=0.0,
            )
            self.node_public_key_to_node_id[public_key] = node_id
            self.owner_to_node_ids.setdefault(NOOP_FLWR_AID, set()).add(node_id)

    def change_key(self, node_id: int, public_key: bytes) -> None:
        """Gives a device another key, in whose place it stays; the one before gets 401 from now on."""
        with self.lock:
            node = self.nodes[node_id]
            self.node_public_key_to_node_id.pop(node.public_key, None)
            node.public_key = public_key
            self.node_public_key_to_node_id[public_key] = node_id

    def forget_node(self, node_id: int) -> None:
        """Removes a device; its key gets 401 from now on and may be registered again later."""
        with self.lock:
            node = self.nodes.pop(node_id, None)
            if node is not None:
                self.node_public_key_to_node_id.pop(node.public_key, None)
                self.owner_to_node_ids.get(NOOP_FLWR_AID, set()).discard(node_id)


def _fits(tree: Any) -> bool:
    """Returns whether an object tree is what a device may push: a first piece with the others below it."""
    is_flat = not any(child.children for child in tree.children)
    return is_flat and (1 + len(tree.children)) * CHUNK_BYTES <= MAX_BODY_BYTES


def _refusal(reason: str) -> FlowerError:
    return FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, reason, public_details=reason)


class SuperLink:
    """The Flower side of the coordinator: nodes, runs and messages.

    Args:
        on_reply: called with every complete reply, in a thread of the web server; where that is the thread of its
            event loop, it must not wait.
        watcher: told of every authenticated request.
        on_refused: called with what was tried, the request, its node if it is known, and why it was refused.
        folder: where large replies lie while they wait for their turn; None for the system's temporary files.
    """

    def __init__(
        self,
        *,
        on_reply: Callable[[Reply], None],
        watcher: Watcher,
        on_refused: OnRefused = lambda _what, _request, _node, _detail: None,
        folder: Path | None = None,
    ) -> None:
        logging.getLogger("flwr").setLevel(logging.CRITICAL)  # it logs every push, and what we raise ourselves
        self.state = EdgeLinkState(NoOpFederationManager(), PieceStore(folder), self._collect)
        self._deliver = on_reply
        self.api = FleetApi(FlowerCalls(self.state), watcher, on_refused, folder)

    def register(self, public_key: bytes, name: str) -> int:
        """Returns the node id of a new device; the same key gets the same id again."""
        known = self.state.get_node_id_by_public_key(public_key)
        if known is not None:
            return int(known)
        node_id = int(self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key, 0, name=name))
        # Flower takes no messages for a node that was never active; MQTT may say "online" before Flower is asked.
        self.state.restore_node(node_id, public_key)
        return node_id

    def remove(self, node_id: int | None) -> None:
        """Forgets a device: its key gets 401 from now on, and may be registered again."""
        if node_id is not None:
            self.state.forget_node(node_id)

    def open_run(self) -> FlowerRun:
        return FlowerRun(self.state)

    def _collect(self, message: Message) -> None:
        """Takes a complete reply out of Flower's state and hands it on; a malformed one as a failure."""
        metadata = message.metadata
        try:
            header, body = self._read(message)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            log.warning("node %s sent a malformed reply: %r", metadata.src_node_id, error)
            header, body = {"error": f"malformed reply: {error!r}"}, b""
        finally:
            self.state.discard(metadata.reply_to_message_id, metadata.message_id)
        up, down = self.api.traffic.take(metadata.src_node_id, metadata.reply_to_message_id)
        self._deliver(
            Reply(
                node_id=metadata.src_node_id,
                instruction_id=metadata.reply_to_message_id,
                header=header,
                body=body,
                bytes_up=up,
                bytes_down=down,
            )
        )

    def _read(self, message: Message) -> tuple[Json, bytes]:
        metadata, content = message.metadata, message.content
        header = parse_json(str(content[RECORD_HEADER][FIELD_JSON]))
        if not isinstance(header, dict):
            raise TypeError(f"the header is a {type(header).__name__}, not an object")
        if RECORD_BODY in content:
            body = cast("bytes", content[RECORD_BODY][FIELD_BYTES])
        else:
            tree = self.state.object_store.get_object_tree(metadata.message_id)
            ids = [tree.object_id, *(child.object_id for child in tree.children)]
            whole = io.BytesIO()
            for object_id in ids:  # one piece at a time is in memory twice
                piece = get_object_body(self.state.object_store.get(object_id) or b"", ArrayChunk)
                whole.write(memoryview(piece)[REPLY_SALT_BYTES:])
            body = whole.getvalue()
        return header, body


class FlowerRun:
    """One run in Flower's books, open until `close`. Messages go out through it."""

    def __init__(self, state: EdgeLinkState) -> None:
        self._state = state
        self._run_id = state.create_run(
            "edgefl/run", "1.0.0", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self._task_id = cast("int", state.get_run_info(run_ids=[self._run_id])[0].primary_task_id)
        state.claim_task(self._task_id)
        state.activate_task(self._task_id)

    def send(self, node_id: int, *, kind: str, header: Mapping[str, Any], body: PreparedBody) -> str:
        """Queues one instruction for a device.

        Args:
            node_id: as `SuperLink.register` gave it.
            kind: Flower's message type, train or evaluate.
            header: JSON object.
            body: the model, shared by all devices that get the same one.

        Returns:
            The instruction id that the reply will name.

        Raises:
            NetworkError: Flower refused it (unknown node, finished run).
        """
        message_id = os.urandom(32).hex()
        metadata = Metadata(
            run_id=self._run_id,
            message_id=message_id,
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=node_id,
            reply_to_message_id="",
            group_id="",
            created_at=max(time.time(), EARLIEST_MESSAGE_S),
            ttl=TTL_S,
            message_type=kind,
        )
        content = RecordDict({RECORD_HEADER: ConfigRecord({FIELD_JSON: json.dumps(header)})})
        if body.inline is not None:
            content[RECORD_BODY] = ConfigRecord({FIELD_BYTES: body.inline})
        tree = ObjectTree(object_id=message_id, children=[ObjectTree(object_id=i) for i in body.chunk_ids])
        store = self._state.pieces
        missing = set(store.preregister(self._run_id, tree))
        for chunk_id, chunk in zip(body.chunk_ids, body.chunks, strict=True):
            if chunk_id in missing:
                store.put_own(chunk_id, chunk)
        if self._state.store_message_ins(make_message(metadata=metadata, content=content)) is None:
            store.delete(message_id)
            raise NetworkError(f"Flower refused an instruction for node {node_id}: unknown node or finished run")
        return message_id

    def is_known(self, instruction_id: str) -> bool:
        """Returns whether Flower still has the instruction: it was not answered, cancelled or refused."""
        return instruction_id in self._state.message_ins_store

    def is_delivered(self, instruction_id: str) -> bool:
        """Returns whether the instruction was handed out; Flower hands it out once."""
        message = self._state.message_ins_store.get(instruction_id)
        return message is None or bool(message.metadata.delivered_at)

    def cancel(self, instruction_id: str) -> None:
        """Forgets an instruction and any half-received reply; a later reply is refused visibly."""
        self._state.discard(instruction_id)

    def close(self) -> None:
        self._state.forget_sessions(self._run_id)
        self._state.finish_task(self._task_id, SubStatus.COMPLETED, "")
        self._state.cleanup_run(self._run_id)


Handler = Callable[[Any, Any], Any]

_HANDLERS: dict[str, Handler] = {
    "activate-node": fleet_handlers.activate_node,
    "deactivate-node": fleet_handlers.deactivate_node,
    "send-node-heartbeat": fleet_handlers.send_node_heartbeat,
    PULL_MESSAGES: lambda message, state: fleet_handlers.pull_messages(message, state, state.object_store),
    PUSH_MESSAGES: fleet_handlers.push_messages,
    PUSH_OBJECT: fleet_handlers.push_object,
    PULL_OBJECT: fleet_handlers.pull_object,
    "confirm-message-received": lambda message, state: fleet_handlers.confirm_message_received(
        message, state, state.object_store
    ),
    "get-run": fleet_handlers.get_run,
    "get-fab": fleet_handlers.get_fab,
}


class FlowerCalls:
    """Flower's handlers of the Fleet API; see `fleet_api.Calls`.

    Flower's `authenticate_node` is done in two halves: the signature when the headers have come, the rest when the
    body has. Both at the end would cost a second verification of every signature, and refuse bodies that take longer
    over a slow link than a signature counts.
    """

    names = frozenset(_HANDLERS)

    def __init__(self, state: EdgeLinkState) -> None:
        self._state = state
        self._said: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def node_of(self, request: Request) -> int | None:
        try:
            key = base64.b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            known: int | None = self._state.get_node_id_by_public_key(key)
            return known if known is not None and _is_signed(request, key) else None
        except (KeyError, ValueError, TypeError):  # a header that is missing or makes no sense
            return None

    def answer(self, request: Request, name: str, body: bytes) -> Answer:
        """Whatever a handler raises must become a response: this is the boundary."""
        try:
            message = PROTOBUF_REQUEST_TYPES[("POST", PREFIX + name)]()
            message.ParseFromString(body)
            self._check_speaker(request, message)
            if name == PUSH_MESSAGES:
                _check_sender(message)
            answer = _HANDLERS[name](message, self._state)
            content = self._shared(message.object_id, answer) if name == PULL_OBJECT else answer.SerializeToString()
        except HTTPException as error:
            return Answer(status=error.status_code, content=error_json(str(error.detail)))
        except FlowerError as error:
            spec = API_ERROR_MAP[error.code]
            told = json.dumps(error.to_json(spec.public_message)).encode()
            return Answer(status=spec.http_status_code, content=told)
        except Exception:  # the boundary of one request: the next device must still be served
            log.debug("a request to %s failed", name, exc_info=True)
            return Answer(status=500, content=error_json("Internal server error."))
        pulled = [item.metadata.message_id for item in answer.messages_list] if name == PULL_MESSAGES else []
        return Answer(status=200, content=content, instruction_id=pulled[-1] if pulled else None)

    def _check_speaker(self, request: Request, message: Any) -> None:
        """Checks that a request is about the device that has signed it, and that this one still counts."""
        key = base64.b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        known = self._state.get_node_id_by_public_key(key)
        if isinstance(message, ActivateNodeRequest):
            is_own = known is not None and message.public_key == key
        else:
            is_own = known is not None and known == (message.node if hasattr(message, "node") else message).node_id
        if not is_own:
            raise HTTPException(401, "Invalid SuperNode authentication")

    def _shared(self, object_id: str, answer: Any) -> bytes:
        """Returns the answer with a piece of a model: the same bytes for all devices that fetch it meanwhile.

        An object is named by its content, so that equal names have equal answers.
        """
        if not answer.object_available:
            return bytes(answer.SerializeToString())
        with self._lock:
            if object_id not in self._said:
                self._said[object_id] = answer.SerializeToString()
            self._said.move_to_end(object_id)
            said = self._said[object_id]
            while len(self._said) > KEPT_PIECES:
                self._said.popitem(last=False)
        return said

    def is_foreign(self, name: str, body: bytes, node_id: int) -> bool:
        if name != PUSH_MESSAGES:
            return True
        try:
            request = PushMessagesRequest.FromString(body)
            told = [message.metadata for message in request.messages_list]
        except DecodeError:
            return True
        asked = [self._state.message_ins_store.get(one.reply_to_message_id) for one in told]
        owners = {request.node.node_id, *(one.src_node_id for one in told)}
        return bool((owners | {one.metadata.dst_node_id for one in asked if one is not None}) - {node_id})


def _check_sender(request: Any) -> None:
    """Checks that a reply is from the device that has signed; Flower asks that of the request alone."""
    if any(message.metadata.src_node_id != request.node.node_id for message in request.messages_list):
        raise HTTPException(401, "a reply is from another node than the request")


def _is_signed(request: Request, key: bytes) -> bool:
    """Returns whether the timestamp is signed and recent; Flower's own check has the same window."""
    timestamp = request.headers[TIMESTAMP_HEADER]
    signature = base64.b64decode(request.headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
    age_s = (now() - dt.datetime.fromisoformat(timestamp)).total_seconds()
    if not -SYSTEM_TIME_TOLERANCE < age_s < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        return False
    return bool(verify_signature(_public_key(key), timestamp.encode("ascii"), signature))


@lru_cache(maxsize=KEPT_KEYS)
def _public_key(key: bytes) -> EllipticCurvePublicKey:
    return bytes_to_public_key(key)
