"""Flower's SuperLink inside our process: the requests of its Fleet API, and the runs whose messages it carries.

The wire is `core.fleet_messages`, what is kept is `link_state`. Flower itself is imported by `stock_messages` alone.
"""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request

from edgefl.coordinator.flower.fleet_api import FleetApi, FleetResponse, OnRejected, RequestObserver, encode_error
from edgefl.coordinator.flower.link_state import BAD_INTERVAL, FleetApiError, LinkState, ObjectStore, QueuedMessage
from edgefl.coordinator.flower.messages import PreparedBody, Reply
from edgefl.coordinator.flower.signatures import NonceMemory, get_public_key, verify_request, verify_timestamp
from edgefl.coordinator.flower.stock_messages import (
    StockInstruction,
    decode_objects,
    encode_objects,
    encode_stock_reply,
    make_tree,
    read_part,
)
from edgefl.core.errors import DataError, NetworkError, NotAllowedError
from edgefl.core.fleet_messages import (
    ACTIVATE_NODE,
    CONFIRM_MESSAGE,
    DEACTIVATE_NODE,
    GET_FAB,
    GET_RUN,
    MESSAGES,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    REQUESTS,
    RESPONSES,
    SEND_HEARTBEAT,
    Metadata,
    ObjectTree,
    find_value,
    has_record,
    parse_protobuf,
)
from edgefl.core.flower_objects import compute_object_id, encode_chunk, parse_chunk
from edgefl.core.protocol import (
    BODY_HASH_HEADER,
    CHUNK_BYTES,
    FIELD_BYTES,
    FIELD_JSON,
    INLINE_BODY_BYTES,
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
MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 10, 1800
"""Of the interval of heartbeats that a node announces."""
RECONNECT_S = 5
"""What Flower answers to a push; its SuperNodes do not use it."""

MAX_CACHED_CHUNKS = 4
"""Maximum number of cached encoded model chunks, each of at most `protocol.CHUNK_BYTES`."""

Handler = Callable[[LinkState, Any], Mapping[str, Any]]
OnSuperNode = Callable[[int, str, tuple[str, ...] | None], None]
"""(node, method, assignments that it has pulled, None if it pulled none) -> None"""


def prepare_body(body: bytes) -> PreparedBody:
    if len(body) <= INLINE_BODY_BYTES:
        return PreparedBody(inline=body)
    view = memoryview(body)
    chunks = tuple(encode_chunk(view[i : i + CHUNK_BYTES]) for i in range(0, len(body), CHUNK_BYTES))
    return PreparedBody(inline=None, chunk_ids=tuple(compute_object_id(chunk) for chunk in chunks), chunks=chunks)


def _activate_node(state: LinkState, request: Any) -> Json:
    _check_interval(request.heartbeat_interval)
    return {"node_id": state.get_node_id_by_public_key(request.public_key)}


def _send_heartbeat(_state: LinkState, request: Any) -> Json:
    _check_interval(request.heartbeat_interval)
    return {"success": True}


def _check_interval(interval_s: float) -> None:
    if not MIN_HEARTBEAT_S <= interval_s <= MAX_HEARTBEAT_S:
        raise FleetApiError(f"from {MIN_HEARTBEAT_S} to {MAX_HEARTBEAT_S} s, got {interval_s}", BAD_INTERVAL)


def _pull_messages(state: LinkState, request: Any) -> Json:
    node_id = request.node.node_id
    message = state.pop_message(node_id)
    if message is None:
        return {}
    store, name = state.find_store(node_id), message.message_id
    tree = store.get_tree(name) if store.is_registered(name) else ObjectTree(object_id=name)
    return {"messages_list": [message.encode()], "message_object_trees": [tree]}


def _push_messages(state: LinkState, request: Any) -> Json:
    reply = request.messages_list[0]
    session_id, missing = state.add_reply(reply, request.message_object_trees[0])
    return {
        "reconnect": MESSAGES["Reconnect"](reconnect=RECONNECT_S),
        "results": [MESSAGES["ResultEntry"](key=reply.metadata.message_id)],
        "objects_to_push": missing,
        "session_id": session_id,
    }


def _push_object(state: LinkState, request: Any) -> Json:
    return {"stored": state.add_object(request)}


def _pull_object(state: LinkState, request: Any) -> Json:
    state.get_run(request.run_id)
    store = state.find_store(request.node.node_id)
    is_found, content = store.is_registered(request.object_id), store.get(request.object_id)
    return {"object_found": is_found, "object_available": bool(content), "object_content": content}


def _confirm_message(state: LinkState, request: Any) -> Json:
    state.get_run(request.run_id)
    message = state.messages.get(request.message_object_id)
    if message is not None and message.metadata.dst_node_id == request.node.node_id:
        state.find_store(request.node.node_id).delete(request.message_object_id)
    return {}


def _get_fab(state: LinkState, request: Any) -> Json:
    content = state.get_fab(request.run_id, request.hash_str)
    return {"fab": MESSAGES["Fab"](hash_str=request.hash_str, content=content)}


_HANDLERS: Mapping[str, Handler] = {
    ACTIVATE_NODE: _activate_node,
    DEACTIVATE_NODE: lambda _state, _request: {},
    SEND_HEARTBEAT: _send_heartbeat,
    PULL_MESSAGES: _pull_messages,
    PUSH_MESSAGES: _push_messages,
    PUSH_OBJECT: _push_object,
    PULL_OBJECT: _pull_object,
    CONFIRM_MESSAGE: _confirm_message,
    GET_RUN: lambda state, request: {"run": state.get_run(request.run_id)},
    GET_FAB: _get_fab,
}
"""Handlers of the requests: state and request to the fields of the response."""


class FlowerFleetServicer:
    """Handlers of the Fleet API; `methods` are their names after the prefix.

    The signature is checked with the headers, the rest with the body: bodies may take longer over a slow link than a
    signature is valid.
    """

    methods = frozenset(_HANDLERS)

    def __init__(self, state: LinkState, on_supernode: OnSuperNode) -> None:
        self._state, self._on_supernode = state, on_supernode
        self._nonces = NonceMemory(time.time())
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
            now_s = time.time()
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
            message = parse_protobuf(REQUESTS[method], body)
        except ValueError:
            return FleetResponse(status=400, content=encode_error("The body is no message of the Fleet API."))
        node_id = self._check_node(request, message)
        if node_id is None:
            return FleetResponse(status=401, content=encode_error("Invalid SuperNode authentication"))
        try:
            if method == PUSH_MESSAGES and node_id in self._state.supernodes:  # a refused reply, too, ends its work
                self._on_supernode(node_id, method, None)
            if method == PUSH_MESSAGES and (refused := _check_sender(message)) is not None:
                return refused
            if method == PUSH_OBJECT and self.signs_bodies(node_id):
                _check_push_hash(request, message)
            reply = RESPONSES[method](**_HANDLERS[method](self._state, message))
            content = (
                self._encode_cached(message.object_id, reply) if method == PULL_OBJECT else reply.SerializeToString()
            )
        except NotAllowedError:
            raise
        except FleetApiError as error:
            kind = error.kind
            content = json.dumps({"code": kind.code, "detail": kind.detail, "extra": str(error)}).encode()
            return FleetResponse(status=kind.status, content=content)
        except Exception:  # the boundary of one request: the next device must still be served
            log.debug("a request to %s failed", method, exc_info=True)
            return FleetResponse(status=500, content=encode_error("Internal server error."))
        pulled = [item.metadata.message_id for item in reply.messages_list] if method == PULL_MESSAGES else []
        if node_id in self._state.supernodes:
            sent = [self._state.stock_instructions.get(name) for name in pulled]
            held = tuple(instruction.assignment for instruction in sent if instruction is not None)
            self._on_supernode(node_id, method, held if method == PULL_MESSAGES else None)
        return FleetResponse(status=200, content=content, instruction_id=pulled[-1] if pulled else None)

    def _check_node(self, request: Request, message: Any) -> int | None:
        """Returns the device that signed a request, None where it is about another, or no longer registered."""
        key = get_public_key(request)
        node_id = self._state.get_node_id_by_public_key(key)
        if isinstance(message, REQUESTS[ACTIVATE_NODE]):
            return node_id if message.public_key == key else None
        named = message if isinstance(message, REQUESTS[DEACTIVATE_NODE]) else message.node
        return node_id if named.node_id == node_id else None

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
            request = parse_protobuf(REQUESTS[method], body)
        except ValueError:
            return True
        if method == PUSH_OBJECT:
            return bool(request.node.node_id != node_id)
        metadata = [message.metadata for message in request.messages_list]
        messages = [self._state.messages.get(item.reply_to_message_id) for item in metadata]
        owners = {request.node.node_id, *(item.src_node_id for item in metadata)}
        return bool((owners | {item.metadata.dst_node_id for item in messages if item is not None}) - {node_id})

    def refuse_body(self, method: str, node_id: int, limit_bytes: int) -> None:
        """Ends the reply of a stock SuperNode that has a body over the limit; a board knows the limits."""
        if method not in {PUSH_MESSAGES, PUSH_OBJECT}:
            return
        for instruction in list(self._state.stock_instructions.values()):
            message = self._state.messages.get(instruction.message_id)
            if instruction.node_id == node_id and message is not None and message.is_delivered:
                self._state.finish_stock(instruction, f"a request with a reply has at most {limit_bytes} bytes")


def _check_sender(request: Any) -> FleetResponse | None:
    """Returns the response to a push that is not of one reply, from the device that signed; None if it is."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return FleetResponse(status=400, content=encode_error("a push has one reply, with one tree of its objects"))
    if request.messages_list[0].metadata.src_node_id != request.node.node_id:
        return FleetResponse(status=401, content=encode_error("a reply is from another node than the request"))
    return None


def _check_push_hash(request: Request, message: Any) -> None:
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
    content, error = decode_objects(
        instruction.reply.message_id, instruction.reply.read(), max_bytes=instruction.max_bytes
    )
    return encode_stock_reply(instruction, content, error, elapsed_s=time.monotonic() - instruction.sent_s)


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
        self.state = LinkState(self._on_message, self._on_stock_reply, folder)
        self._on_reply = on_reply
        self.api = FleetApi(FlowerFleetServicer(self.state, on_supernode), observer, on_rejected, folder)

    def restore(self, node_id: int, public_key: bytes, *, is_supernode: bool = False) -> None:
        """Restores a known device under its node id; a stock SuperNode signs and is sent messages as Flower does."""
        self.state.restore_node(node_id, public_key)
        if is_supernode:
            self.state.supernodes.add(node_id)

    def register(self, public_key: bytes, *, is_supernode: bool = False) -> int:
        """Returns the node id of a new device; the same key gets the same id again."""
        known_id = self.state.get_node_id_by_public_key(public_key)
        if known_id is not None:
            return known_id
        node_id = self.state.create_node(public_key)
        if is_supernode:
            self.state.supernodes.add(node_id)
        return node_id

    def remove(self, node_id: int | None) -> None:
        """Removes a device: its key gets 401 from now on, and may be registered again."""
        if node_id is not None:
            self.state.remove_node(node_id)

    def open_run(self, make_bundle: Callable[[], AppBundle] | None = None) -> FlowerRun:
        """Opens a run; `make_bundle` returns its app for stock SuperNodes, which take part in no other."""
        return FlowerRun(self.state, self._on_reply, None if make_bundle is None else make_bundle())

    def _on_message(self, message: Any) -> None:
        """Moves a complete reply out of the state to `on_reply`; a malformed one as an error."""
        metadata = message.metadata
        header, body = _read_reply(metadata.src_node_id, lambda: self._decode_reply(message))
        self.state.delete_message(metadata.reply_to_message_id)
        self._deliver(metadata.src_node_id, metadata.reply_to_message_id, header, body)

    def _on_stock_reply(self, instruction: StockInstruction) -> None:
        """Moves a stock SuperNode's reply to `on_reply`; one that was refused, or is malformed, as an error."""
        header, body = _read_reply(instruction.node_id, lambda: _decode_stock_reply(instruction))
        instruction.close()
        self.state.delete_message(instruction.message_id)
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

    def _decode_reply(self, message: Any) -> tuple[Json, bytes]:
        metadata, content = message.metadata, message.content
        header = parse_json(str(find_value(content, RECORD_HEADER, FIELD_JSON)))
        if not isinstance(header, dict):
            raise TypeError(f"the header is a {type(header).__name__}, not an object")
        if has_record(content, RECORD_BODY):
            body = find_value(content, RECORD_BODY, FIELD_BYTES)
            if not isinstance(body, bytes):
                raise TypeError(f"the body is a {type(body).__name__}, not bytes")
            return header, body
        store = self.state.board_store
        tree = store.get_tree(metadata.message_id)
        buffer = io.BytesIO()
        for object_id in (tree.object_id, *(child.object_id for child in tree.children)):
            chunk = parse_chunk(store.get(object_id) or b"")  # only one at a time is in memory twice
            buffer.write(memoryview(chunk)[REPLY_SALT_BYTES:])
        return header, buffer.getvalue()


class FlowerRun:
    """One Flower run, open until `close`; sends the messages of a run.

    Args:
        state: of all runs.
        on_reply: called with what is answered here for stock SuperNodes.
        bundle: the app of the run; None where it is no Flower app.
    """

    def __init__(self, state: LinkState, on_reply: Callable[[Reply], None], bundle: AppBundle | None = None) -> None:
        self._state, self._on_reply, self._has_bundle = state, on_reply, bundle is not None
        if bundle is None:
            self._run_id = state.open_run("edgefl/run", "1.0.0", {}, None)
        else:
            self._run_id = state.open_run(bundle.app_id, bundle.version, dict(bundle.config), bundle.content)

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
            NetworkError: the node is unknown or the run over, or a stock SuperNode cannot do it.
        """
        if node_id in self._state.supernodes:
            return self._send_stock(node_id, header, body)
        message_id = os.urandom(32).hex()
        tree = ObjectTree(object_id=message_id, children=[ObjectTree(object_id=i) for i in body.chunk_ids])
        metadata = self._make_metadata(node_id, kind, message_id)
        objects = dict(zip(body.chunk_ids, body.chunks, strict=True))
        message = QueuedMessage(metadata=metadata, header=json.dumps(header), inline=body.inline)
        self._queue(self._state.board_store, tree, objects, message)
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
        objects = encode_objects(metadata, content)
        metadata.message_id = message_id = next(reversed(objects))
        self._state.stock_instructions[message_id] = StockInstruction.create(
            header,
            part,
            content,
            message_id=message_id,
            node_id=node_id,
            run_id=self._run_id,
            sent_s=time.monotonic(),
        )
        tree = make_tree(message_id, objects)
        try:
            self._queue(self._state.stock_store, tree, objects, QueuedMessage(metadata=metadata))
        except NetworkError:
            self._state.stock_instructions.pop(message_id, None)
            raise
        return message_id

    def _make_metadata(self, node_id: int, kind: str, message_id: str, group_id: str = "") -> Any:
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

    def _queue(self, store: ObjectStore, tree: Any, objects: Mapping[str, bytes], message: QueuedMessage) -> None:
        """Queues a message, and stores the objects in its tree that are not there yet."""
        missing = set(store.register(tree)) if objects else set[str]()
        for object_id, content in objects.items():
            if object_id in missing:
                store.put(object_id, content)
        if not self._state.add_message(message):
            store.delete(message.message_id)
            raise NetworkError(
                f"refused an instruction for node {message.metadata.dst_node_id}: unknown node or finished run"
            )

    def is_known(self, instruction_id: str) -> bool:
        """Returns whether the instruction is still there: not answered, cancelled or rejected."""
        return instruction_id in self._state.messages

    def is_delivered(self, instruction_id: str) -> bool:
        """Returns whether the instruction was delivered, as it is once."""
        message = self._state.messages.get(instruction_id)
        return message is None or message.is_delivered

    def cancel(self, instruction_id: str) -> None:
        """Deletes an instruction and any partial reply; a later reply is rejected."""
        self._state.delete_message(instruction_id)

    def close(self) -> None:
        self._state.close_run(self._run_id)
