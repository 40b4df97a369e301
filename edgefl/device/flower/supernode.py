"""Flower's SuperNode as a library: the only device module that imports Flower's private modules.

Pulls instructions and pushes replies. None of Flower's stock loops is used: they end their own process on errors
that a board has to survive (an unreachable coordinator, a clock that is hours off). Errors are mapped to the few
classes below, and the agent decides.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import itertools
import json
import logging
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, public_key_to_bytes, sign_message
from flwr.supernode.fleet_http_client import FleetHttpClient

from edgefl.core.conditions import Blocker, ConditionsEndedError
from edgefl.core.errors import ClonedError, NetworkError
from edgefl.core.flower_objects import compute_object_id, parse_chunk
from edgefl.core.protocol import (
    BODY_HASH_HEADER,
    CHUNK_BYTES,
    CLONED_STATUS,
    FIELD_BYTES,
    FIELD_JSON,
    INLINE_BODY_BYTES,
    INSTANCE_HEADER,
    KEY_HEADER,
    NONCE_HEADER,
    RECORD_BODY,
    RECORD_HEADER,
    REPLY_SALT_BYTES,
    SIGNATURE_HEADER,
    STAMP_HEADER,
    TIMESTAMP_HEADER,
    compute_push_hash,
    make_signed_request,
)
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.flower.http_pool import PooledHttpTransport

REQUEST_TIMEOUT_S = 30.0
MIN_MESSAGE_TIME_S = 1_740_700_800.0
"""Flower rejects messages created earlier; a coordinator without network time may have such a clock."""
FLOWER_HEARTBEAT_INTERVAL_S = 1800.0
"""Heartbeat interval reported to Flower; presence is ours (MQTT), Flower's is not used."""

ReplyContent = tuple[Json, bytes]
"""Header and body of a reply."""
TRAIN, EVALUATE = "train", "evaluate"

_EMPTY_STREAM = httpx.ByteStream(b"")
"""Replaces the stream of a response that has been read."""


class UnauthorisedError(NetworkError):
    """Rejected signature: unknown key, or a clock that has drifted."""


class ReplyRejectedError(NetworkError):
    """Rejected reply: its update was used, or its run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledInstruction:
    """Instruction of the coordinator, to train or to evaluate; `message` is Flower's, used by `create_reply`.

    With a `blocker` its body was left where it is: this board may not fetch it.
    """

    message: Message
    header: Json
    body: bytes
    blocker: Blocker | None = None

    @property
    def is_evaluation(self) -> bool:
        return self.message.metadata.message_type == EVALUATE


class RequestSigner:
    """Signer of a device's requests, each of which the coordinator accepts once. Thread-safe.

    Args:
        private_key_pem: the device's key.
        clock: estimate of the coordinator's time in Unix seconds.
        instance: of this agent process; empty for other processes.
    """

    def __init__(self, private_key_pem: bytes, clock: Callable[[], float], instance: str = "") -> None:
        self._key, self._clock, self._instance = bytes_to_private_key(private_key_pem), clock, instance
        self.public_key = public_key_to_bytes(self._key.public_key())
        self._encoded_key = base64.b64encode(self.public_key).decode()
        self._name, self._numbers = os.urandom(8).hex(), itertools.count()

    def sign(
        self, method: str, target: str, body: bytes = b"", *, body_hash: str | None = None, stamp: str = ""
    ) -> dict[str, str]:
        """Returns the headers of one request, valid for five minutes of the coordinator's time.

        Args:
            method: in capitals.
            target: path with query, as it is sent.
            body: as it is sent.
            body_hash: in place of the body's own (`protocol.compute_push_hash`).
            stamp: from the coordinator's last answer to this process.
        """
        headers = {
            TIMESTAMP_HEADER: dt.datetime.fromtimestamp(self._clock(), tz=dt.UTC).isoformat(),
            NONCE_HEADER: f"{self._name}-{next(self._numbers)}",
            BODY_HASH_HEADER: hashlib.sha256(body).hexdigest() if body_hash is None else body_hash,
            **({INSTANCE_HEADER: self._instance} if self._instance else {}),
            **({STAMP_HEADER: stamp} if stamp else {}),
        }
        signature = sign_message(self._key, make_signed_request(method, target, headers))
        return {
            **headers,
            KEY_HEADER: self._encoded_key,
            SIGNATURE_HEADER: base64.b64encode(signature).decode(),
        }


class _SigningInterceptor:
    """Interceptor of Flower's client that signs requests and repeats the coordinator's stamp."""

    def __init__(self, signer: RequestSigner, stamp: str) -> None:
        self._signer, self.stamp = signer, stamp

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        request: httpx.Request = context.request
        target = request.url.raw_path.decode("ascii")
        message = context.message
        body_hash = compute_push_hash(message) if isinstance(message, PushObjectRequest) else None
        signed = self._signer.sign(request.method, target, request.read(), body_hash=body_hash, stamp=self.stamp)
        request.headers.update(signed)
        response = call_next(context)
        self.stamp = response.headers.get(STAMP_HEADER, self.stamp)
        # A response and its stream reference each other, and the request: models would stay until garbage collection.
        response.stream = _EMPTY_STREAM
        return response


class _FleetClient(FleetHttpClient):
    """Flower's client on a keep-alive connection without proxies, trusting only our CA."""

    def __init__(self, address: str, tls_context: ssl.SSLContext, signer: _SigningInterceptor) -> None:
        super().__init__(f"https://{address}", interceptors=[signer], verify=tls_context)
        self._client.close()
        transport = PooledHttpTransport(tls_context, timeout_s=REQUEST_TIMEOUT_S)
        self._client = httpx.Client(transport=transport, trust_env=False)

    def close(self) -> None:
        self._client.close()


class SuperNode:
    """Flower client of one device.

    Args:
        private_key_pem: the device's key; its public half was registered at enrolment.
        tls_context: verifies the coordinator.
        clock: estimate of the coordinator's time in Unix seconds.
        instance: of this agent process; lets the coordinator distinguish a clone from a restart.
        charge_traffic: called with the most bytes of a transfer before it, and with what was not begun, below 0,
            after one that broke; may raise `ConditionsEndedError`.
        admit: called with the header of each instruction before its body is fetched; may raise likewise.
    """

    def __init__(
        self,
        *,
        private_key_pem: bytes,
        tls_context: ssl.SSLContext,
        clock: Callable[[], float],
        instance: str = "",
        charge_traffic: Callable[[int], None] = lambda _: None,
        admit: Callable[[Json], None] = lambda _: None,
    ) -> None:
        self._charge_traffic, self._admit = charge_traffic, admit
        self._instance, self._tls_context, self._clock = instance, tls_context, clock
        self._signer = RequestSigner(private_key_pem, clock, instance)
        self._interceptor: _SigningInterceptor | None = None
        self._client: _FleetClient | None = None
        self._node = Node()
        self._incoming_assignment: str | None = None
        logging.getLogger("flwr").setLevel(logging.WARNING)

    @property
    def incoming_assignment(self) -> str | None:
        """Returns the pulled, unanswered assignment; its model may still be arriving."""
        return self._incoming_assignment

    def sign(self, method: str, target: str, body: bytes = b"") -> dict[str, str]:
        """Returns the headers of a request to another part of the coordinator; see `RequestSigner.sign`."""
        return self._signer.sign(method, target, body)

    def update_key(self, private_key_pem: bytes) -> None:
        """Replaces the signing key from the next `connect` on."""
        self.close()
        self._signer = RequestSigner(private_key_pem, self._clock, self._instance)

    def connect(self, address: str) -> None:
        """Activates this device at a coordinator.

        Raises:
            UnauthorisedError: unknown key, or the clock is off.
            ClonedError: another agent has this identity; all other calls raise it, too.
            NetworkError: no answer.
        """
        self.close()
        self._interceptor = _SigningInterceptor(self._signer, self._interceptor.stamp if self._interceptor else "")
        self._client = _FleetClient(address, self._tls_context, self._interceptor)
        request = ActivateNodeRequest(
            public_key=self._signer.public_key, heartbeat_interval=FLOWER_HEARTBEAT_INTERVAL_S
        )
        self._node = Node(node_id=_send_request(self._client.ActivateNode, request).node_id)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def pull(self) -> PulledInstruction | None:
        """Returns the next instruction with its complete body, or None without work."""
        client = self._require_client()
        self._incoming_assignment = None
        response = _send_request(client.PullMessages, PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        try:
            message, tree = message_from_proto(response.messages_list[0]), response.message_object_trees[0]
            header = _parse_header(message)
            body = b"" if tree.children else cast("bytes", message.content[RECORD_BODY][FIELD_BYTES])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NetworkError(f"the coordinator's instruction makes no sense: {error!r}") from None
        self._incoming_assignment = header.get("assignment")
        try:
            self._admit(header)
            self._charge_traffic(len(tree.children) * CHUNK_BYTES or len(body))
        except ConditionsEndedError as error:
            return PulledInstruction(message=message, header=header, body=b"", blocker=error.blocker)
        if tree.children:
            body = self._pull_chunks(client, message, [child.object_id for child in tree.children])
        return PulledInstruction(message=message, header=header, body=body)

    def _pull_chunks(self, client: _FleetClient, message: Message, object_ids: list[str]) -> bytes:
        chunks: list[bytes] = []
        try:
            for object_id in object_ids:
                chunks.append(self._pull_chunk(client, message, object_id))  # noqa: PERF401 counted where one fails
        except NetworkError:
            with contextlib.suppress(ConditionsEndedError):  # what was not begun comes back
                self._charge_traffic(-CHUNK_BYTES * (len(object_ids) - len(chunks) - 1))
            raise
        return b"".join(chunks)

    def _pull_chunk(self, client: _FleetClient, message: Message, object_id: str) -> bytes:
        request = PullObjectRequest(node=self._node, run_id=message.metadata.run_id, object_id=object_id)
        response = _send_request(client.PullObject, request)
        if not response.object_available:
            raise NetworkError("the coordinator has taken the work back while its model was on the way")
        return parse_chunk(response.object_content)

    def create_reply(self, instruction: PulledInstruction, reply_content: ReplyContent) -> Message:
        """Returns the reply to an instruction, which is answered with it."""
        self._incoming_assignment = None
        header, body = reply_content
        request, now_s = instruction.message.metadata, max(self._clock(), MIN_MESSAGE_TIME_S)
        metadata = Metadata(
            run_id=request.run_id,
            message_id=hashlib.sha256(b"reply" + request.message_id.encode()).hexdigest(),
            src_node_id=self._node.node_id,
            dst_node_id=request.src_node_id,
            reply_to_message_id=request.message_id,
            group_id=request.group_id,
            created_at=now_s,
            ttl=request.created_at + request.ttl - now_s,
            message_type=request.message_type,
            src_task_id=request.dst_task_id,
            dst_task_id=request.src_task_id,
        )
        content = RecordDict(
            {
                RECORD_HEADER: ConfigRecord({FIELD_JSON: json.dumps(header)}),
                RECORD_BODY: ConfigRecord({FIELD_BYTES: body}),
            }
        )
        return make_message(metadata=metadata, content=content)

    def push(self, reply: Message) -> None:
        """Sends a reply; idempotent, since equal replies have equal ids and only missing chunks are sent.

        Raises:
            ReplyRejectedError: the coordinator rejects it.
            UnauthorisedError: unknown key, or the clock is off.
            NetworkError: not sent; try again.
        """
        client = self._require_client()
        body = cast("bytes", reply.content[RECORD_BODY][FIELD_BYTES])
        if len(body) <= INLINE_BODY_BYTES:
            tree = ObjectTree(object_id=reply.metadata.message_id)
            self._push_message(client, reply, tree)
            return
        chunks_by_id = {
            compute_object_id(chunk): chunk for chunk in _encode_chunks(reply.metadata.reply_to_message_id, body)
        }
        root_id, *child_ids = chunks_by_id
        tree = ObjectTree(object_id=root_id, children=[ObjectTree(object_id=object_id) for object_id in child_ids])
        header_only = RecordDict({RECORD_HEADER: reply.content[RECORD_HEADER]})
        root_message = make_message(metadata=_replace_message_id(reply.metadata, root_id), content=header_only)
        response = self._push_message(client, root_message, tree)
        for object_id in response.objects_to_push:
            request = PushObjectRequest(
                node=self._node,
                run_id=reply.metadata.run_id,
                object_id=object_id,
                object_content=chunks_by_id[object_id],
                session_id=response.session_id,
            )
            if not _send_request(client.PushObject, request).stored:
                raise NetworkError("the coordinator has not kept a piece of the answer")

    def _push_message(self, client: _FleetClient, message: Message, tree: ObjectTree) -> Any:
        request = PushMessagesRequest(
            node=self._node, messages_list=[message_to_proto(message)], message_object_trees=[tree]
        )
        return _send_request(client.PushMessages, request)

    def _require_client(self) -> _FleetClient:
        if self._client is None:
            raise NetworkError("not connected to a coordinator")
        return self._client


def _parse_header(message: Message) -> Json:
    """Returns the validated header of an instruction."""
    if message.metadata.message_type not in {TRAIN, EVALUATE}:
        raise ValueError(f"it must be to train or to evaluate, got {message.metadata.message_type!r}")
    header = parse_json(str(message.content[RECORD_HEADER][FIELD_JSON]))
    used_assignments = header.get("used_assignments", []) if isinstance(header, dict) else None
    if not isinstance(used_assignments, list) or not all(isinstance(name, str) for name in used_assignments):
        raise TypeError("its header must be an object, in which `used_assignments` is a list of texts")
    if not isinstance(header.get("assignment"), str | None):
        raise TypeError("its assignment must be a text")
    return cast("Json", header)


def _encode_chunks(instruction_id: str, body: bytes) -> Iterator[bytes]:
    """Yields the chunks of a reply, each with a unique salt before it.

    Flower stores equal objects once, and treats the second of two replies that begin with the same chunk as a repeat.
    """
    view = memoryview(body)
    for start in range(0, len(body), CHUNK_BYTES):
        salt = hashlib.sha256(f"salt {instruction_id} {start}".encode()).digest()[:REPLY_SALT_BYTES]
        yield ArrayChunk(memoryview(salt + view[start : start + CHUNK_BYTES])).deflate()


def _replace_message_id(metadata: Metadata, message_id: str) -> Metadata:
    return Metadata(
        run_id=metadata.run_id,
        message_id=message_id,
        src_node_id=metadata.src_node_id,
        dst_node_id=metadata.dst_node_id,
        reply_to_message_id=metadata.reply_to_message_id,
        group_id=metadata.group_id,
        created_at=metadata.created_at,
        ttl=metadata.ttl,
        message_type=metadata.message_type,
        src_task_id=metadata.src_task_id,
        dst_task_id=metadata.dst_task_id,
    )


def _parse_clone_reason(response: httpx.Response) -> str:
    """Returns the coordinator's reason for rejecting a clone."""
    try:
        detail = parse_json(response.content)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = response.text
    return f"the coordinator refuses this agent, a copy: {str(detail)[:500]}"


def _send_request(rpc: Callable[[Any], Any], request: Any) -> Any:
    """Makes one request; maps Flower's and httpx's errors to ours."""
    try:
        return rpc(request)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        detail = f"coordinator answered {status}: {error.response.text[:200]}"
        if status == CLONED_STATUS:
            raise ClonedError(_parse_clone_reason(error.response)) from None
        if status == 401:
            raise UnauthorisedError(detail) from None
        if status in {403, 413}:
            raise ReplyRejectedError(detail) from None
        raise NetworkError(detail) from None
    except ValueError as error:  # raised by Flower for a body that is no protobuf
        raise NetworkError(f"the coordinator's answer makes no sense: {error}") from None
    except httpx.RequestError as error:
        raise NetworkError(f"no answer from the coordinator: {error or type(error).__name__}") from None
