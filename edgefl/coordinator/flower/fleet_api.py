"""Flower's Fleet API under `/v1/fleet/`: authentication, size limits, traffic counters, and Flower's own handlers."""

from __future__ import annotations

import base64
import datetime as dt
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from anyio import CapacityLimiter, to_thread
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from fastapi import HTTPException
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.servicer.fleet import fleet_handlers
from google.protobuf.message import DecodeError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from edgefl.coordinator.flower.asgi import (
    FLEET_PREFIX,
    ByteCounters,
    SpooledRequestBody,
    encode_error,
    read_chunks,
    send_response,
)
from edgefl.core.protocol import (
    CHUNK_BYTES,
    CLONED_STATUS,
    INSTANCE_HEADER,
    MAX_REQUEST_BYTES,
    REPLY_SALT_BYTES,
    STAMP_HEADER,
)

log = logging.getLogger(__name__)

PULL_MESSAGES, PULL_OBJECT = "pull-messages", "pull-object"
PUSH_MESSAGES, PUSH_OBJECT = "push-messages", "push-object"
MAX_OBJECT_BYTES = CHUNK_BYTES + REPLY_SALT_BYTES + 1024
"""Maximum size of a reply's chunk: salted, with Flower's header."""
MAX_PUSH_OBJECT_BYTES = MAX_OBJECT_BYTES + 4096
"""Maximum size of a request with such a chunk: ids and lengths come on top."""

MAX_CONCURRENT_REQUESTS = 4
"""Maximum number of requests processed at a time: more would only compete for the interpreter, which heartbeats and
operators need as well, with their bodies in memory."""

INLINE_METHODS = frozenset({PULL_MESSAGES, PUSH_MESSAGES})
MAX_INLINE_BYTES = 64 * 1024
"""`INLINE_METHODS` up to this size are handled in the event loop: passing them to another thread and back costs more
than they do, and both threads share one interpreter. Handlers of their content must not block."""

MAX_CACHED_CHUNKS = 4
"""Maximum number of cached encoded model chunks, each of at most `protocol.CHUNK_BYTES`."""
MAX_CACHED_KEYS = 4096
"""Maximum number of cached parsed public keys: parsing costs a third of a verification."""

Handler = Callable[[Any, Any], Any]

_HANDLERS: Mapping[str, Handler] = {
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

OnRejected = Callable[[str, Request, int | None, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResponse:
    """Response to a request; `instruction_id` names the instruction in it, if there is one."""

    status: int
    content: bytes
    instruction_id: str | None = None


class RequestObserver(Protocol):
    """Observer of every authenticated request (the device registry)."""

    def record_contact(self, node_id: int) -> None:
        """Records a sign of life."""

    def record_request(self, node_id: int, instance_id: str, *, stamp: str, address: str) -> str | None:
        """Records the requesting process of a device; returns why it is rejected, None if it is not."""

    def get_stamp(self, node_id: int) -> str:
        """Returns the stamp for the response, which the process repeats in its next request."""


class FleetApi:
    """The ASGI application under the prefix, without FastAPI's injection and middlewares.

    An unknown key or an invalid signature gets 401 before its body is read, and is no sign of life; a body over its
    limit gets 413, the clone of a live device 409. Registration by devices is not offered: nodes come from our own
    enrolment only.

    Args:
        servicer: handles the requests.
        observer: called for every authenticated request; it may reject the process.
        on_rejected: called with the kind of request, the request, its node if known, and the reason.
        folder: where large bodies are spooled; None for the system's temporary files.
    """

    def __init__(
        self,
        servicer: FlowerFleetServicer,
        observer: RequestObserver,
        on_rejected: OnRejected,
        folder: Path | None = None,
    ) -> None:
        self._servicer, self._observer, self._on_rejected, self._folder = servicer, observer, on_rejected, folder
        self._limiter = CapacityLimiter(MAX_CONCURRENT_REQUESTS)
        self.byte_counters = ByteCounters()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        name = scope["path"].removeprefix(FLEET_PREFIX)
        node_id = self._servicer.authenticate(request)
        if node_id is None:
            self._on_rejected("signature", request, None, f"{name[:40]}: its key or its signature does not count")
            await send_response(send, 401, encode_error("Invalid SuperNode authentication"))
        elif (rejection := self._check_process(request, node_id)) is not None:
            await send_response(send, CLONED_STATUS, encode_error(rejection))
        elif request.method != "POST" or name not in self._servicer.methods:
            await send_response(send, 404, encode_error("Not Found"))
        else:
            limit_bytes = MAX_PUSH_OBJECT_BYTES if name == PUSH_OBJECT else MAX_REQUEST_BYTES
            with SpooledRequestBody(self._folder) as body:
                if not await read_chunks(request, receive, limit_bytes, body.append):
                    self._on_rejected(
                        "size", request, node_id, f"{name}: a body over {limit_bytes} bytes, or cut off"
                    )
                    await send_response(send, 413, encode_error(f"body over {limit_bytes} bytes"))
                    return
                response = await self._handle(request, name, body, node_id)
            stamp = self._observer.get_stamp(node_id).encode()
            await send_response(send, response.status, response.content, (STAMP_HEADER.encode(), stamp))

    def authenticate(self, request: Request) -> int | None:
        """Returns the node that signed a request to another part of the application, or None.

        Also None for a rejected process: a clone must not renew the certificate of a live device.
        """
        node_id = self._servicer.authenticate(request)
        if node_id is None or self._check_process(request, node_id) is not None:
            return None
        self._observer.record_contact(node_id)
        return node_id

    def _check_process(self, request: Request, node_id: int) -> str | None:
        """Returns why the requesting process is rejected, None if it is not; older agents send no instance id."""
        headers, address = request.headers, request.client.host if request.client else ""
        instance = headers.get(INSTANCE_HEADER, "")
        return self._observer.record_request(node_id, instance, stamp=headers.get(STAMP_HEADER, ""), address=address)

    async def _handle(self, request: Request, method: str, body: SpooledRequestBody, node_id: int) -> FleetResponse:
        """Returns the response to a known device, and counts the bytes of both."""
        self._observer.record_contact(node_id)
        self.byte_counters.add_uplink(node_id, body.num_bytes)
        if method in INLINE_METHODS and body.num_bytes <= MAX_INLINE_BYTES:
            response = self._servicer.handle(request, method, body.read())
        else:
            response = await to_thread.run_sync(
                lambda: self._servicer.handle(request, method, body.read()), limiter=self._limiter
            )
        if response.status in {401, 403} and self._servicer.is_from_other_device(method, body.read(), node_id):
            self._on_rejected("reply", request, node_id, "it speaks for another device")
        if response.instruction_id is not None or method == PULL_OBJECT:
            self.byte_counters.add_instruction_downlink(node_id, len(response.content), response.instruction_id)
        else:
            self.byte_counters.add_other_downlink(node_id, len(response.content))
        return response


class FlowerFleetServicer:
    """Flower's handlers of the Fleet API; `methods` are their names after the prefix.

    Flower's `authenticate_node` is split in two: the signature is checked with the headers, the rest with the body.
    Both at the end would cost a second verification of every signature, and reject bodies that take longer over a
    slow link than a signature is valid.
    """

    methods = frozenset(_HANDLERS)

    def __init__(self, state: InMemoryLinkState) -> None:
        self._state = state
        self._cached_answers: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def authenticate(self, request: Request) -> int | None:
        """Returns the node that signed a request's headers, before the body is read."""
        try:
            key = base64.b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            node_id: int | None = self._state.get_node_id_by_public_key(key)
            return node_id if node_id is not None and _is_signed(request, key) else None
        except (KeyError, ValueError, TypeError):  # a missing or invalid header
            return None

    def handle(self, request: Request, method: str, body: bytes) -> FleetResponse:
        """Returns the response of a handler; every error becomes one, since this is the boundary.

        `authenticate` has checked the headers before. May block unless in `INLINE_METHODS`.
        """
        try:
            message = PROTOBUF_REQUEST_TYPES[("POST", FLEET_PREFIX + method)]()
            message.ParseFromString(body)
            self._check_node(request, message)
            if method == PUSH_MESSAGES:
                _check_sender(message)
            reply = _HANDLERS[method](message, self._state)
            content = (
                self._encode_cached(message.object_id, reply) if method == PULL_OBJECT else reply.SerializeToString()
            )
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
        return FleetResponse(status=200, content=content, instruction_id=pulled[-1] if pulled else None)

    def _check_node(self, request: Request, message: Any) -> None:
        """Checks that a request is about the device that signed it, and that this is registered."""
        key = base64.b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        node_id = self._state.get_node_id_by_public_key(key)
        if isinstance(message, ActivateNodeRequest):
            is_own = node_id is not None and message.public_key == key
        else:
            is_own = (
                node_id is not None and node_id == (message.node if hasattr(message, "node") else message).node_id
            )
        if not is_own:
            raise HTTPException(401, "Invalid SuperNode authentication")

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
        if method != PUSH_MESSAGES:
            return True
        try:
            request = PushMessagesRequest.FromString(body)
            metadata = [message.metadata for message in request.messages_list]
        except DecodeError:
            return True
        instructions = [self._state.message_ins_store.get(item.reply_to_message_id) for item in metadata]
        owners = {request.node.node_id, *(item.src_node_id for item in metadata)}
        return bool((owners | {item.metadata.dst_node_id for item in instructions if item is not None}) - {node_id})


def _check_sender(request: Any) -> None:
    """Checks that replies are from the device that signed; Flower checks that of the request only."""
    if any(message.metadata.src_node_id != request.node.node_id for message in request.messages_list):
        raise HTTPException(401, "a reply is from another node than the request")


def _is_signed(request: Request, key: bytes) -> bool:
    """Returns whether the timestamp is signed and recent; Flower's own check has the same window."""
    timestamp = request.headers[TIMESTAMP_HEADER]
    signature = base64.b64decode(request.headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
    age_s = (now() - dt.datetime.fromisoformat(timestamp)).total_seconds()
    if not -SYSTEM_TIME_TOLERANCE < age_s < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        return False
    return bool(verify_signature(_parse_public_key(key), timestamp.encode("ascii"), signature))


@lru_cache(maxsize=MAX_CACHED_KEYS)
def _parse_public_key(key: bytes) -> EllipticCurvePublicKey:
    return bytes_to_public_key(key)
