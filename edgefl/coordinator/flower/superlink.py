"""Flower's SuperLink inside our process: the only module of the coordinator that uses Flower's private ones.

Flower's in-memory LinkState is a cache: it holds messages between dispatch and reply, while the store is the
truth. The subclass here calls back when a reply is complete, keeps node ids over restarts, and makes rejected replies
visible. The servicer hands the requests that `fleet_api` lets in to Flower's own handlers.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from fastapi import HTTPException
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SubStatus,
)
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import GetRunRequest
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import (
    NOOP_FEDERATION_ID,
    OBJECT_PUSH_SESSION_TTL_SECONDS,
    NodeStatus,
    TaskType,
)
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from google.protobuf.message import DecodeError
from starlette.requests import Request

from edgefl.coordinator.flower.fleet_api import (
    MAX_OBJECT_BYTES,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    FleetApi,
    FleetResponse,
    OnRejected,
    RequestObserver,
    encode_error,
)
from edgefl.coordinator.flower.messages import PreparedBody, Reply, ReplyAssembler, SpooledBytes, spool_to_disk
from edgefl.coordinator.flower.signatures import NonceMemory, get_public_key, verify_request, verify_timestamp
from edgefl.coordinator.flower.stock_messages import StockInstruction, encode_stock_reply, read_part
from edgefl.core.errors import DataError, NetworkError, NotAllowedError
from edgefl.core.flower_objects import compute_object_id, parse_chunk, parse_object
from edgefl.core.protocol import (
    BODY_HASH_HEADER,
    CHUNK_BYTES,
    FIELD_BYTES,
    FIELD_JSON,
    INLINE_BODY_BYTES,
    MAX_BODY_BYTES,
    RECORD_BODY,
    RECORD_HEADER,
    REPLY_SALT_BYTES,
    compute_push_hash,
)
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.flower.app_bundle import AppBundle
from edgefl.flower.app_job import SERVER_NODE_ID

log = logging.getLogger(__name__)

MESSAGE_TTL_S = 100 * 365 * 24 * 3600.0
"""Lifetime of a Flower message by wall clock: our own deadlines end it, not a clock that jumps."""
EARLIEST_MESSAGE_S = 1_740_700_800.0
"""Flower rejects messages created earlier; the clock of a coordinator without network time may be there."""

MAX_CACHED_CHUNKS = 4
"""Maximum number of cached encoded model chunks, each of at most `protocol.CHUNK_BYTES`."""

Handler = Callable[[Any, Any], Any]
OnSuperNode = Callable[[int, str, tuple[str, ...] | None], None]
"""(node, method, assignments that it has pulled, None if it pulled none) -> None"""

_HANDLERS: Mapping[str, Handler] = {
    "activate-node": fleet_handlers.activate_node,
    "deactivate-node": fleet_handlers.deactivate_node,
    "send-node-heartbeat": fleet_handlers.send_node_heartbeat,
    PULL_MESSAGES: lambda message, state: fleet_handlers.pull_messages(message, state, state.find_store(message)),
    PUSH_MESSAGES: fleet_handlers.push_messages,
    PUSH_OBJECT: fleet_handlers.push_object,
    PULL_OBJECT: fleet_handlers.pull_object,
    "confirm-message-received": lambda message, state: fleet_handlers.confirm_message_received(
        message, state, state.find_store(message)
    ),
    "get-run": fleet_handlers.get_run,
    "get-fab": fleet_handlers.get_fab,
}
_REQUESTS: Mapping[str, Any] = {
    "activate-node": ActivateNodeRequest,
    "deactivate-node": DeactivateNodeRequest,
    "send-node-heartbeat": SendNodeHeartbeatRequest,
    PULL_MESSAGES: PullMessagesRequest,
    PUSH_MESSAGES: PushMessagesRequest,
    PUSH_OBJECT: PushObjectRequest,
    PULL_OBJECT: PullObjectRequest,
    "confirm-message-received": ConfirmMessageReceivedRequest,
    "get-run": GetRunRequest,
    "get-fab": GetFabRequest,
}


def prepare_body(body: bytes) -> PreparedBody:
    if len(body) <= INLINE_BODY_BYTES:
        return PreparedBody(inline=body)
    view = memoryview(body)
    chunks = tuple(ArrayChunk(view[i : i + CHUNK_BYTES]).deflate() for i in range(0, len(body), CHUNK_BYTES))
    return PreparedBody(inline=None, chunk_ids=tuple(compute_object_id(chunk) for chunk in chunks), chunks=chunks)


class ChunkStore(InMemoryObjectStore):
    """Flower's objects in memory, but for chunks of incomplete replies, which are spooled to disk.

    Objects are checked before they come here: Flower would drop a wrong one without a word to us.

    Args:
        folder: of the spooled chunks; None for the system's temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(verify=False)
        self._folder = folder
        self._spooled: dict[str, SpooledBytes] = {}

    def preregister(self, run_id: int, object_tree: Any) -> list[str]:
        """Registers a message with its chunks atomically.

        Flower registers them one by one: a shared chunk is lost when its last other message is deleted in between.
        """
        with self.lock_store:
            missing: list[str] = super().preregister(run_id, object_tree)
            return missing

    def put_local(self, object_id: str, content: bytes) -> None:
        """Stores a registered object whose id was computed here, so that it need not be checked."""
        with self.lock_store:
            entry = self.store[object_id]
            if not entry.is_available:
                entry.content, entry.is_available = content, True

    def spool(self, object_id: str) -> None:
        """Moves the content of an object to disk, if it is stored and there is room."""
        content = super().get(object_id)
        spooled_content = spool_to_disk(content, self._folder) if content else None
        with self.lock_store:
            if spooled_content is not None and (entry := self.store.get(object_id)) is not None:
                self._spooled[object_id], entry.content = spooled_content, b""

    def get(self, object_id: str) -> bytes | None:
        with self.lock_store:
            spooled_content = self._spooled.get(object_id)
            content: bytes | None = super().get(object_id)
        return content if spooled_content is None else spooled_content.read()

    def delete(self, object_id: str) -> None:
        with self.lock_store:
            super().delete(object_id)
            if object_id not in self.store:
                self._spooled.pop(object_id, None)


class NotifyingLinkState(InMemoryLinkState):
    """Flower's link state, with callbacks per reply, in the thread that stored it.

    What stock SuperNodes are sent has a store of its own, into which no device writes: others know the ids in it
    beforehand. Their replies are in none, but each in its instruction.

    Args:
        manager: Flower's, of federations.
        store: of the objects of boards.
        on_reply: called with a board's complete reply.
        on_stock_reply: called with what a stock SuperNode has answered, or cannot answer.
        folder: of large replies; None for the system's temporary files.
    """

    def __init__(
        self,
        manager: Any,
        store: ChunkStore,
        on_reply: Callable[[Message], None],
        on_stock_reply: Callable[[StockInstruction], None],
        folder: Path | None = None,
    ) -> None:
        super().__init__(manager, store)
        self.chunk_store, self.stock_store = store, ChunkStore()
        self._on_reply, self._on_stock_reply, self._folder = on_reply, on_stock_reply, folder
        self.partial_replies = ReplyAssembler[Message]()
        self._undelivered: dict[int, dict[str, None]] = {}
        self.supernodes: set[int] = set()
        self.stock_instructions: dict[str, StockInstruction] = {}
        self._fab_users = Counter[str]()

    def find_store(self, request: Any) -> ChunkStore:
        """Returns the store of the instructions for the node of a request."""
        return self.stock_store if request.node.node_id in self.supernodes else self.chunk_store

    def store_message_and_object_tree(self, message: Message, object_tree: Any, session_id: str) -> Any:
        if message.metadata.src_node_id in self.supernodes:
            self._cleanup_push_session(session_id, cleanup_messages=False)
            return True, self._announce_stock(message, object_tree, session_id)
        if object_tree.object_id != message.metadata.message_id or not _is_valid_tree(object_tree):
            self._cleanup_push_session(session_id, cleanup_messages=False)
            raise _make_rejection(f"a reply has at most {MAX_BODY_BYTES} bytes, in one row of pieces")
        stored, missing = super().store_message_and_object_tree(message, object_tree, session_id)
        if not stored:  # unpatched Flower answers 200 and drops the reply silently
            self._cleanup_push_session(session_id, cleanup_messages=False)
            raise _make_rejection("reply refused")
        is_inline = message.has_content() and RECORD_BODY in message.content
        if is_inline or not missing:
            self._cleanup_push_session(session_id, cleanup_messages=False)
            self._on_reply(message)
            return stored, []
        self.partial_replies.start(session_id, message, missing)
        return stored, missing

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        instructions = list(self.stock_instructions.values())
        instruction = next((item for item in instructions if session_id and item.session_id == session_id), None)
        if instruction is not None:
            return self._store_stock_object(instruction, object_id, object_content)
        _check_object(object_id, object_content)
        self._extend_session(session_id)
        stored = bool(super().store_object(run_id, session_id, object_id, object_content))
        if not stored:
            return False
        complete = self.partial_replies.add_object(session_id, object_id)
        if complete is not None:
            self._on_reply(complete)
        else:
            self.chunk_store.spool(object_id)
        return True

    def _announce_stock(self, message: Message, tree: Any, session_id: str) -> list[str]:
        """Returns the ids of the objects of a stock SuperNode's reply that it is to send."""
        metadata = message.metadata
        with self.lock:
            instruction = self.stock_instructions.get(metadata.reply_to_message_id)
            is_stored = instruction is not None and self.store_message_res(message) is not None
            reply_id = self.message_ins_id_to_message_res_id.get(metadata.reply_to_message_id)
            if instruction is None or not is_stored or reply_id != metadata.message_id:
                raise _make_rejection("reply refused")
            try:
                return instruction.announce(metadata.message_id, tree, session_id=session_id, folder=self._folder)
            except DataError as error:
                reason = str(error)
        self.finish_stock(instruction, reason)
        raise _make_rejection(reason)

    def _store_stock_object(self, instruction: StockInstruction, object_id: str, content: bytes) -> bool:
        """Adds an object to a stock SuperNode's reply; one that cannot be taken ends it."""
        if instruction.reply is None or object_id not in instruction.reply.ids:
            return False
        try:
            _check_object(object_id, content)
            is_complete = instruction.reply.add(object_id, content)
        except (DataError, FlowerError, NotAllowedError) as error:
            self.finish_stock(instruction, str(error))
            raise _make_rejection(str(error)) from None
        if is_complete:
            self.finish_stock(instruction)
        return True

    def finish_stock(self, instruction: StockInstruction, error: str = "") -> None:
        """Hands on what a stock SuperNode has answered, once; `error` says why it cannot be taken."""
        if self.stock_instructions.pop(instruction.message_id, None) is not None:
            instruction.error = error
            self._on_stock_reply(instruction)

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        content = self.stock_store.get(object_id)
        return super().get_object(run_id, object_id) if content is None else content

    def open_fab(self, content: bytes) -> str:
        """Stores an app until `close_fab` was called as often; returns its hash."""
        with self.lock:
            fab_hash = str(self.store_fab(Fab(hash_str="", content=content, verifications={})))
            self._fab_users[fab_hash] += 1
            return fab_hash

    def close_fab(self, fab_hash: str) -> None:
        with self.lock:
            self._fab_users[fab_hash] -= 1
            if self._fab_users[fab_hash] <= 0:
                del self._fab_users[fab_hash]
                with self.lock_fab_store:
                    self.fab_store.pop(fab_hash, None)

    def store_message_ins(self, message: Message) -> str | None:
        with self.lock:
            message_id: str | None = super().store_message_ins(message)
            if message_id is not None:
                self._undelivered.setdefault(message.metadata.dst_node_id, {})[message_id] = None
        return message_id

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """Checks only the node's own instructions; unpatched Flower checks those of all nodes at every pull."""
        messages: list[Message] = []
        with self.lock:
            for message_id in list(self._undelivered.get(node_id, ())):
                self._check_stored_messages({message_id})
                message = self.message_ins_store.get(message_id)
                if message is not None and run_id is not None and message.metadata.run_id != run_id:
                    continue
                self._remove_undelivered(node_id, message_id)
                if message is None:
                    continue
                message.metadata.delivered_at = _now().isoformat()
                messages.append(message)
                if len(messages) == limit:
                    break
        return messages

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        with self.lock:
            for message_id in message_ins_ids:
                if (message := self.message_ins_store.get(message_id)) is not None:
                    self._remove_undelivered(message.metadata.dst_node_id, message_id)
            super().delete_messages(message_ins_ids)

    def _remove_undelivered(self, node_id: int, message_id: str) -> None:
        node_messages = self._undelivered.get(node_id, {})
        node_messages.pop(message_id, None)
        if not node_messages:
            self._undelivered.pop(node_id, None)

    def delete_instruction(self, instruction_id: str, reply_id: str | None = None) -> None:
        """Deletes an instruction, its reply and push session; later messages of them are rejected."""
        stock_instruction = self.stock_instructions.pop(instruction_id, None)
        if stock_instruction is not None:
            self.delete_stock_instruction(stock_instruction)
            return
        reply_id = reply_id or self.message_ins_id_to_message_res_id.get(instruction_id)
        if reply_id:
            for session_id in self.partial_replies.remove(lambda reply: reply.metadata.message_id == reply_id):
                self._cleanup_push_session(session_id, cleanup_messages=False)
            self.object_store.delete(reply_id)
        self.object_store.delete(instruction_id)
        self.delete_messages({instruction_id})

    def delete_stock_instruction(self, instruction: StockInstruction) -> None:
        """Deletes what a stock SuperNode was sent, which is in `stock_instructions` no more, and what it answered."""
        self.stock_store.delete(instruction.message_id)
        self.delete_messages({instruction.message_id})
        instruction.close()

    def get_run_status(self, run_ids: set[int]) -> Any:
        """Rejects runs of an earlier coordinator; unpatched Flower fails with a KeyError."""
        statuses = super().get_run_status(run_ids)
        if len(statuses) < len(run_ids):
            raise _make_rejection("no such run")
        return statuses

    def _cleanup_expired_task_tokens_locked(self) -> None:
        """Does nothing, so that no run expires: the loop ends runs, and this clock may jump."""

    def _extend_session(self, session_id: str) -> None:
        """Extends a push session whose next chunk has arrived, however slow the link."""
        with self._lock_object_push_sessions:
            session = self._object_push_sessions.get(session_id)
            if session is not None:
                session.expires_at = _now() + dt.timedelta(seconds=OBJECT_PUSH_SESSION_TTL_SECONDS)

    def close_push_sessions(self, run_id: int) -> None:
        self.partial_replies.remove(lambda reply: reply.metadata.run_id == run_id)
        self.delete_sessions_in_run(run_id)
        for instruction in list(self.stock_instructions.values()):
            if instruction.run_id == run_id:
                self.delete_instruction(instruction.message_id)

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Activates a node also when it is still online: a power-cycled device comes back at once."""
        with self.lock:
            self.deactivate_node(node_id)
            return bool(super().activate_node(node_id, heartbeat_interval))

    def restore_node(self, node_id: int, public_key: bytes) -> None:
        """Restores a known device under its old node id after a restart of the coordinator."""
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

    def update_node_key(self, node_id: int, public_key: bytes) -> None:
        """Replaces the key of a device, which keeps its node id; the former key gets 401 from now on."""
        with self.lock:
            node = self.nodes[node_id]
            self.node_public_key_to_node_id.pop(node.public_key, None)
            node.public_key = public_key
            self.node_public_key_to_node_id[public_key] = node_id

    def remove_node(self, node_id: int) -> None:
        """Removes a device; its key gets 401 from now on and may be registered again later."""
        with self.lock:
            self.supernodes.discard(node_id)
            node = self.nodes.pop(node_id, None)
            if node is not None:
                self.node_public_key_to_node_id.pop(node.public_key, None)
                self.owner_to_node_ids.get(NOOP_FLWR_AID, set()).discard(node_id)


def _is_valid_tree(tree: Any) -> bool:
    """Returns whether a device may push an object tree: a first chunk with the others as its children."""
    is_flat = not any(child.children for child in tree.children)
    return is_flat and (1 + len(tree.children)) * CHUNK_BYTES <= MAX_BODY_BYTES


_CHILD_KINDS: Mapping[str, frozenset[str]] = {
    kind.__qualname__: frozenset(child.__qualname__ for child in children)
    for kind, children in (
        (Message, (RecordDict,)),
        (RecordDict, (ArrayRecord, ConfigRecord, MetricRecord)),
        (ArrayRecord, (Array,)),
        (Array, (ArrayChunk,)),
        (ConfigRecord, ()),
        (MetricRecord, ()),
        (ArrayChunk, ()),
    )
}
"""Kinds of objects, and what each refers to, as Flower writes them: so none can be deep."""
_TABLES = frozenset({ArrayRecord.__qualname__, RecordDict.__qualname__})


def _measure_object(
    object_id: str, contents: Mapping[str, bytes], kinds: frozenset[str], sizes: dict[str, int]
) -> int:
    """Returns the bytes of an object with all that it refers to, each as often as it does.

    Args:
        object_id: of the object.
        contents: of all objects.
        kinds: one of which the object is.
        sizes: of those measured before; it is updated.

    Raises:
        KeyError, IndexError, ValueError, TypeError, AttributeError: an object is missing, or makes no sense.
    """
    content = contents[object_id]
    found = parse_object(content)
    kind, children = found.kind, found.children
    if kind not in kinds:
        raise ValueError(f"a {kind[:40]!r} is where {' or '.join(sorted(kinds)) or 'nothing'} should be")
    if object_id not in sizes:
        referred = list(children)
        if kind == Array.__qualname__:
            referred = [children[i] for i in parse_json(found.body)["arraychunk_ids"]]
        elif kind in _TABLES:
            referred = list(parse_json(found.body).values())
        counts = Counter(referred)
        if counts.keys() != set(children):
            raise ValueError(f"a {kind} refers to other objects than its head names")
        measured = (n * _measure_object(child, contents, _CHILD_KINDS[kind], sizes) for child, n in counts.items())
        sizes[object_id] = len(content) + sum(measured)
    return sizes[object_id]


def _make_tree(object_id: str, contents: Mapping[str, bytes]) -> ObjectTree:
    children = parse_object(contents[object_id]).children
    return ObjectTree(object_id=object_id, children=[_make_tree(child, contents) for child in children])


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _make_rejection(reason: str) -> FlowerError:
    return FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, reason, public_details=reason)


class FlowerFleetServicer:
    """Flower's handlers of the Fleet API; `methods` are their names after the prefix.

    Flower's `authenticate_node` is split in two: the signature is checked with the headers, the rest with the body.
    Both at the end would cost a second verification of every signature, and reject bodies that take longer over a
    slow link than a signature is valid.
    """

    methods = frozenset(_HANDLERS)

    def __init__(self, state: NotifyingLinkState, on_supernode: OnSuperNode) -> None:
        self._state, self._on_supernode = state, on_supernode
        self._nonces = NonceMemory(_now().timestamp())
        self._cached_answers: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def authenticate(self, request: Request) -> int:
        """Returns the node that signed a request's headers, before the body is read; each request counts once.

        Raises:
            NotAllowedError: an unknown key, or a signature that is wrong, of another time, or used before.
        """
        try:
            key = get_public_key(request)
            node_id = self._state.get_node_id_by_public_key(key)
            if node_id is None:
                raise NotAllowedError("its key or its signature does not count")
            now_s = _now().timestamp()
            if node_id in self._state.supernodes:
                verify_timestamp(request, key, now_s=now_s)
                return int(node_id)
            nonce, signed_s = verify_request(request, key, now_s=now_s)
            self._nonces.add(node_id, nonce, signed_s=signed_s, now_s=now_s)
        except (KeyError, ValueError, TypeError):
            raise NotAllowedError("a header of its signature is missing or malformed") from None
        return int(node_id)

    def signs_bodies(self, node_id: int) -> bool:
        return node_id not in self._state.supernodes

    def handle(self, request: Request, method: str, body: bytes) -> FleetResponse:
        """Returns the response of a handler; every error becomes one, since this is the boundary.

        `authenticate` has checked the headers before, and the caller the body's hash, but that of a pushed object.
        May block unless in `INLINE_METHODS`.

        Raises:
            NotAllowedError: a pushed object is not the one that was signed.
        """
        try:
            message = _REQUESTS[method]()
            message.ParseFromString(body)
            node_id = self._check_node(request, message)
            if method == PUSH_MESSAGES and node_id in self._state.supernodes:  # a refused reply, too, ends its work
                self._on_supernode(node_id, method, None)
            if method == PUSH_MESSAGES:
                _check_sender(message)
            elif method == PUSH_OBJECT and self.signs_bodies(node_id):
                _check_push_hash(request, message)
            reply = _HANDLERS[method](message, self._state)
            content = (
                self._encode_cached(message.object_id, reply) if method == PULL_OBJECT else reply.SerializeToString()
            )
        except NotAllowedError:
            raise
        except DecodeError:
            return FleetResponse(status=400, content=encode_error("The body is no message of the Fleet API."))
        except HTTPException as error:
            return FleetResponse(status=error.status_code, content=encode_error(str(error.detail)))
        except FlowerError as error:
            spec = API_ERROR_MAP[error.code]
            error_content = json.dumps(error.to_json(spec.public_message)).encode()
            return FleetResponse(status=spec.http_status_code, content=error_content)
        except Exception:  # the boundary of one request: the next device must still be served
            log.debug("a request to %s failed", method, exc_info=True)
            return FleetResponse(status=500, content=encode_error("Internal server error."))
        pulled = [item.metadata.message_id for item in reply.messages_list] if method == PULL_MESSAGES else []
        if node_id in self._state.supernodes:
            sent = [self._state.stock_instructions.get(name) for name in pulled]
            held = tuple(instruction.assignment for instruction in sent if instruction is not None)
            self._on_supernode(node_id, method, held if method == PULL_MESSAGES else None)
        return FleetResponse(status=200, content=content, instruction_id=pulled[-1] if pulled else None)

    def _check_node(self, request: Request, message: Any) -> int:
        """Returns the device that signed a request, after checking that it is about this one, and registered."""
        key = get_public_key(request)
        node_id = self._state.get_node_id_by_public_key(key)
        if isinstance(message, ActivateNodeRequest):
            is_own = node_id is not None and message.public_key == key
        else:
            is_own = (
                node_id is not None and node_id == (message.node if hasattr(message, "node") else message).node_id
            )
        if node_id is None or not is_own:
            raise HTTPException(401, "Invalid SuperNode authentication")
        return int(node_id)

    def _encode_cached(self, object_id: str, answer: Any) -> bytes:
        """Returns the encoded response with a model's chunk, cached for all devices that fetch it.

        An object id is a hash of its content, so that equal ids have equal responses.
        """
        if not answer.object_available:
            return bytes(answer.SerializeToString())
        with self._lock:
            if object_id not in self._cached_answers:
                self._cached_answers[object_id] = answer.SerializeToString()
            self._cached_answers.move_to_end(object_id)
            encoded = self._cached_answers[object_id]
            while len(self._cached_answers) > MAX_CACHED_CHUNKS:
                self._cached_answers.popitem(last=False)
        return encoded

    def is_from_other_device(self, method: str, body: bytes, node_id: int) -> bool:
        """Returns whether a rejected request names another device, or answers its work."""
        if method not in {PUSH_MESSAGES, PUSH_OBJECT}:
            return True
        try:
            if method == PUSH_OBJECT:
                return bool(PushObjectRequest.FromString(body).node.node_id != node_id)
            request = PushMessagesRequest.FromString(body)
            metadata = [message.metadata for message in request.messages_list]
        except DecodeError:
            return True
        instructions = [self._state.message_ins_store.get(item.reply_to_message_id) for item in metadata]
        owners = {request.node.node_id, *(item.src_node_id for item in metadata)}
        return bool((owners | {item.metadata.dst_node_id for item in instructions if item is not None}) - {node_id})

    def refuse_body(self, method: str, node_id: int, limit_bytes: int) -> None:
        """Ends the reply of a stock SuperNode that has a body over the limit; a board knows the limits."""
        if method not in {PUSH_MESSAGES, PUSH_OBJECT}:
            return
        for instruction in list(self._state.stock_instructions.values()):
            message = self._state.message_ins_store.get(instruction.message_id)
            if instruction.node_id == node_id and message is not None and message.metadata.delivered_at:
                self._state.finish_stock(instruction, f"a request with a reply has at most {limit_bytes} bytes")


def _check_sender(request: Any) -> None:
    """Checks that one reply is pushed, from the device that signed; Flower checks that of the request only."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise HTTPException(400, "a push has one reply, with one tree of its objects")
    if any(message.metadata.src_node_id != request.node.node_id for message in request.messages_list):
        raise HTTPException(401, "a reply is from another node than the request")


def _check_object(object_id: str, content: bytes) -> None:
    """Checks size and content of a pushed object, by its id, which a board has signed."""
    if len(content) > MAX_OBJECT_BYTES:
        raise _make_rejection(f"a piece of a reply has at most {MAX_OBJECT_BYTES} bytes, got {len(content)}")
    try:
        if compute_object_id(content) == object_id and parse_object(content).kind in _CHILD_KINDS:
            return
    except ValueError:
        raise NotAllowedError("its object is malformed") from None
    raise NotAllowedError("its object is not the one that was signed")


def _check_push_hash(request: Request, message: PushObjectRequest) -> None:
    """Checks that a pushed object's ids are those that were signed."""
    if request.headers.get(BODY_HASH_HEADER) != compute_push_hash(message):
        raise NotAllowedError("its ids are not the ones that were signed")


def _read_reply(node_id: int, decode: Callable[[], tuple[Json, bytes]]) -> tuple[Json, bytes]:
    """Returns header and body that `decode` makes of a reply; a malformed one as an error."""
    try:
        return decode()
    except DataError as error:
        return {"error": str(error)}, b""
    except Exception as error:  # noqa: BLE001 the boundary of one reply: whatever is wrong, the run must hear of it
        log.warning("node %s sent a malformed reply: %r", node_id, error)
        return {"error": f"malformed reply: {error!r}"}, b""


def _decode_stock_reply(instruction: StockInstruction) -> tuple[Json, bytes]:
    """Returns header and body of a stock SuperNode's reply, as a board's would be.

    Raises:
        DataError: it is refused, or unfolds to more than the run takes.
    """
    if instruction.error or instruction.reply is None:
        raise DataError(instruction.error)
    contents, root = instruction.reply.read(), instruction.reply.message_id
    if _measure_object(root, contents, frozenset({Message.__qualname__}), {}) > instruction.max_bytes:
        raise DataError(f"a reply has at most {instruction.max_bytes} bytes: raise job.max_part_bytes")
    reply = cast("Message", inflate_object_from_contents(root, contents))
    error = (reply.error.code, str(reply.error.reason)) if reply.has_error() else None
    return encode_stock_reply(
        instruction, None if error else reply.content, error, elapsed_s=time.monotonic() - instruction.sent_s
    )


class SuperLink:
    """The Flower side of the coordinator: nodes, runs and messages.

    Args:
        on_reply: called with every complete reply, in a thread of the web server; it must not block in that of its
            event loop.
        observer: called for every authenticated request.
        on_rejected: called with the kind of request, the request, its node if known, and the reason.
        on_supernode: called with every request of a stock SuperNode, once it is handled.
        folder: where large replies are spooled; None for the system's temporary files.
    """

    def __init__(
        self,
        *,
        on_reply: Callable[[Reply], None],
        observer: RequestObserver,
        on_rejected: OnRejected = lambda _what, _request, _node, _detail: None,
        on_supernode: OnSuperNode = lambda _node, _method, _held: None,
        folder: Path | None = None,
    ) -> None:
        logging.getLogger("flwr").setLevel(logging.CRITICAL)  # it logs every push, and our own rejections
        self.state = NotifyingLinkState(
            NoOpFederationManager(), ChunkStore(folder), self._on_message, self._on_stock_reply, folder
        )
        self._on_reply = on_reply
        self.api = FleetApi(FlowerFleetServicer(self.state, on_supernode), observer, on_rejected, folder)

    def restore(self, node_id: int, public_key: bytes, *, is_supernode: bool = False) -> None:
        """Restores a known device under its node id; a stock SuperNode signs and is sent messages as Flower does."""
        self.state.restore_node(node_id, public_key)
        if is_supernode:
            self.state.supernodes.add(node_id)

    def register(self, public_key: bytes, name: str, *, is_supernode: bool = False) -> int:
        """Returns the node id of a new device; the same key gets the same id again."""
        known_id = self.state.get_node_id_by_public_key(public_key)
        if known_id is not None:
            return int(known_id)
        node_id = int(self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key, 0, name=name))
        # Flower takes no messages for a node that was never active; the MQTT status may arrive before its activation.
        self.restore(node_id, public_key, is_supernode=is_supernode)
        return node_id

    def remove(self, node_id: int | None) -> None:
        """Removes a device: its key gets 401 from now on, and may be registered again."""
        if node_id is not None:
            self.state.remove_node(node_id)

    def open_run(self, make_bundle: Callable[[], AppBundle] | None = None) -> FlowerRun:
        """Opens a run; `make_bundle` returns its app for stock SuperNodes, which take part in no other."""
        return FlowerRun(self.state, self._on_reply, None if make_bundle is None else make_bundle())

    def _on_message(self, message: Message) -> None:
        """Moves a complete reply out of Flower's state to `on_reply`; a malformed one as an error."""
        metadata = message.metadata
        header, body = _read_reply(metadata.src_node_id, lambda: self._decode_reply(message))
        self.state.delete_instruction(metadata.reply_to_message_id, metadata.message_id)
        self._deliver(metadata.src_node_id, metadata.reply_to_message_id, header, body)

    def _on_stock_reply(self, instruction: StockInstruction) -> None:
        """Moves a stock SuperNode's reply to `on_reply`; one that was refused, or is malformed, as an error."""
        header, body = _read_reply(instruction.node_id, lambda: _decode_stock_reply(instruction))
        self.state.delete_stock_instruction(instruction)
        self._deliver(instruction.node_id, instruction.message_id, header, body)

    def _deliver(self, node_id: int, instruction_id: str, header: Json, body: bytes) -> None:
        bytes_up, bytes_down = self.api.byte_counters.pop_reply_bytes(node_id, instruction_id)
        self._on_reply(
            Reply(
                node_id=node_id,
                instruction_id=instruction_id,
                header=header,
                body=body,
                bytes_up=bytes_up,
                bytes_down=bytes_down,
            )
        )

    def _decode_reply(self, message: Message) -> tuple[Json, bytes]:
        metadata, content = message.metadata, message.content
        header = parse_json(str(content[RECORD_HEADER][FIELD_JSON]))
        if not isinstance(header, dict):
            raise TypeError(f"the header is a {type(header).__name__}, not an object")
        if RECORD_BODY in content:
            body = cast("bytes", content[RECORD_BODY][FIELD_BYTES])
        else:
            tree = self.state.object_store.get_object_tree(metadata.message_id)
            ids = [tree.object_id, *(child.object_id for child in tree.children)]
            buffer = io.BytesIO()
            for object_id in ids:  # only one chunk at a time is in memory twice
                chunk = parse_chunk(self.state.object_store.get(object_id) or b"")
                buffer.write(memoryview(chunk)[REPLY_SALT_BYTES:])
            body = buffer.getvalue()
        return header, body


class FlowerRun:
    """One Flower run, open until `close`; sends the messages of a run.

    Args:
        state: of all runs.
        on_reply: called with what is answered here for stock SuperNodes.
        bundle: the app of the run; None where it is no Flower app.
    """

    def __init__(
        self, state: NotifyingLinkState, on_reply: Callable[[Reply], None], bundle: AppBundle | None = None
    ) -> None:
        self._state, self._on_reply, self._has_bundle = state, on_reply, bundle is not None
        app_id, version, config = "edgefl/run", "1.0.0", dict[str, Any]()
        fab_hash = ""
        if bundle is not None:
            app_id, version, config = bundle.app_id, bundle.version, dict(bundle.config)
            fab_hash = state.open_fab(bundle.content)
        self._fab_hash = fab_hash
        self._run_id = state.create_run(
            app_id, version, fab_hash, config, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self._task_id = cast("int", state.get_run_info(run_ids=[self._run_id])[0].primary_task_id)
        state.claim_task(self._task_id)
        state.activate_task(self._task_id)

    def send(self, node_id: int, *, kind: str, header: Mapping[str, Any], body: PreparedBody) -> str:
        """Queues one instruction for a device.

        Args:
            node_id: from `SuperLink.register`.
            kind: Flower's message type, train or evaluate.
            header: JSON object.
            body: the model, shared by all devices that get the same one.

        Returns:
            The instruction id that the reply will name.

        Raises:
            NetworkError: Flower rejected it (unknown node, finished run), or a stock SuperNode cannot do it.
        """
        if node_id in self._state.supernodes:
            return self._send_stock(node_id, header, body)
        message_id = os.urandom(32).hex()
        content = RecordDict({RECORD_HEADER: ConfigRecord({FIELD_JSON: json.dumps(header)})})
        if body.inline is not None:
            content[RECORD_BODY] = ConfigRecord({FIELD_BYTES: body.inline})
        tree = ObjectTree(object_id=message_id, children=[ObjectTree(object_id=i) for i in body.chunk_ids])
        metadata = self._make_metadata(node_id, kind, message_id)
        objects = dict(zip(body.chunk_ids, body.chunks, strict=True))
        self._store(self._state.chunk_store, tree, objects, metadata, content)
        return message_id

    def _send_stock(self, node_id: int, header: Mapping[str, Any], body: PreparedBody) -> str:
        """Queues a message of an app for a stock SuperNode; what is asked before it is answered here."""
        if not self._has_bundle:
            raise NetworkError(
                "a stock SuperNode takes part in runs of Flower apps alone, and which name a publisher"
            )
        if "phase" in header:
            message_id = os.urandom(32).hex()
            ready = {"assignment": header["assignment"], "ready": True}
            self._on_reply(
                Reply(node_id=node_id, instruction_id=message_id, header=ready, body=b"", bytes_up=0, bytes_down=0)
            )
            return message_id
        joined = b"".join(map(parse_chunk, body.chunks))
        try:
            part, content = read_part(joined if body.inline is None else body.inline)
        except DataError as error:
            raise NetworkError(str(error)) from None
        metadata = self._make_metadata(node_id, str(part["type"]), "", str(part["group"]))
        with no_object_id_recompute():
            message = make_message(metadata=metadata, content=content)
            objects = {name: found.deflate() for name, found in get_all_nested_objects(message).items()}
        message_id = next(reversed(objects))  # each comes behind those that it refers to
        tree = _make_tree(message_id, objects)
        self._state.stock_instructions[message_id] = StockInstruction.create(
            header,
            part,
            content,
            message_id=message_id,
            node_id=node_id,
            run_id=self._run_id,
            sent_s=time.monotonic(),
        )
        metadata = self._make_metadata(node_id, metadata.message_type, message_id, metadata.group_id)
        try:
            self._store(self._state.stock_store, tree, objects, metadata, RecordDict())
        except NetworkError:
            self._state.stock_instructions.pop(message_id, None)
            raise
        return message_id

    def _make_metadata(self, node_id: int, kind: str, message_id: str, group_id: str = "") -> Metadata:
        return Metadata(
            run_id=self._run_id,
            message_id=message_id,
            src_node_id=SERVER_NODE_ID,
            dst_node_id=node_id,
            reply_to_message_id="",
            group_id=group_id,
            created_at=max(time.time(), EARLIEST_MESSAGE_S),
            ttl=MESSAGE_TTL_S,
            message_type=kind,
        )

    def _store(
        self,
        store: ChunkStore,
        tree: ObjectTree,
        objects: Mapping[str, bytes],
        metadata: Metadata,
        content: RecordDict,
    ) -> None:
        """Stores a message with the objects in its tree that are not there yet."""
        missing = set(store.preregister(self._run_id, tree))
        for object_id, stored in objects.items():
            if object_id in missing:
                store.put_local(object_id, stored)
        if self._state.store_message_ins(make_message(metadata=metadata, content=content)) is None:
            store.delete(metadata.message_id)
            raise NetworkError(
                f"Flower refused an instruction for node {metadata.dst_node_id}: unknown node or finished run"
            )

    def is_known(self, instruction_id: str) -> bool:
        """Returns whether Flower still has the instruction: not answered, cancelled or rejected."""
        return instruction_id in self._state.message_ins_store

    def is_delivered(self, instruction_id: str) -> bool:
        """Returns whether the instruction was delivered; Flower delivers it once."""
        message = self._state.message_ins_store.get(instruction_id)
        return message is None or bool(message.metadata.delivered_at)

    def cancel(self, instruction_id: str) -> None:
        """Deletes an instruction and any partial reply; a later reply is rejected."""
        self._state.delete_instruction(instruction_id)

    def close(self) -> None:
        self._state.close_push_sessions(self._run_id)
        self._state.finish_task(self._task_id, SubStatus.COMPLETED, "")
        self._state.cleanup_run(self._run_id)
        self._state.stock_store.delete_objects_in_run(self._run_id)
        if self._fab_hash:
            self._state.close_fab(self._fab_hash)
            self._fab_hash = ""
