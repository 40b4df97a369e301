"""What a SuperNode is to Flower's Fleet API, without Flower: pulls instructions and pushes replies.

A board needs no package of Flower for it. Errors are mapped to the few classes below, and the agent decides.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import itertools
import json
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from edgefl.core.conditions import Blocker, ConditionsEndedError
from edgefl.core.errors import ClonedError, EdgeflError, NetworkError
from edgefl.core.fleet_messages import (
    ACTIVATE_NODE,
    FLEET_PREFIX,
    MEDIA_TYPE,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    REQUESTS,
    RESPONSES,
    Message,
    Metadata,
    Node,
    ObjectTree,
    find_value,
    make_content,
    parse_protobuf,
)
from edgefl.core.flower_objects import compute_object_id, encode_chunk, parse_chunk
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
    """Instruction of the coordinator, to train or to evaluate; `metadata` is Flower's, used by `create_reply`.

    With a `blocker` its body was left where it is: this board may not fetch it.
    """

    metadata: Any
    header: Json
    body: bytes
    blocker: Blocker | None = None

    @property
    def is_evaluation(self) -> bool:
        return bool(self.metadata.message_type == EVALUATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedReply:
    """Reply to an instruction; `metadata` is Flower's, `header` JSON."""

    metadata: Any
    header: str
    body: bytes


class RequestSigner:
    """Signer of a device's requests, each of which the coordinator accepts once. Thread-safe.

    Args:
        private_key_pem: the device's key.
        clock: estimate of the coordinator's time in Unix seconds.
        instance: of this agent process; empty for other processes.
    """

    def __init__(self, private_key_pem: bytes, clock: Callable[[], float], instance: str = "") -> None:
        self._key = cast("EllipticCurvePrivateKey", load_pem_private_key(private_key_pem, password=None))
        self._clock, self._instance = clock, instance
        self.public_key = self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
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
        signature = self._key.sign(make_signed_request(method, target, headers), ECDSA(SHA256()))
        return {
            **headers,
            KEY_HEADER: self._encoded_key,
            SIGNATURE_HEADER: base64.b64encode(signature).decode(),
        }


class _FleetClient:
    """Client of the Fleet API on a keep-alive connection without proxies, trusting only our CA.

    Signs requests, and repeats the coordinator's stamp.
    """

    def __init__(self, address: str, tls_context: ssl.SSLContext, signer: RequestSigner, stamp: str) -> None:
        self._signer, self.stamp = signer, stamp
        transport = PooledHttpTransport(tls_context, timeout_s=REQUEST_TIMEOUT_S)
        self._http = httpx.Client(transport=transport, base_url=f"https://{address}", trust_env=False)

    def close(self) -> None:
        self._http.close()

    def send(self, method: str, message: Any) -> Any:
        """Returns the response to a request.

        Raises:
            httpx.HTTPError: no answer, or one of another status than 200.
            ValueError: the answer is no response.
        """
        body, target = message.SerializeToString(), FLEET_PREFIX + method
        body_hash = compute_push_hash(message) if method == PUSH_OBJECT else None
        signed = self._signer.sign("POST", target, body, body_hash=body_hash, stamp=self.stamp)
        response = self._http.post(
            target, content=body, headers={"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, **signed}
        )
        self.stamp = response.headers.get(STAMP_HEADER, self.stamp)
        # A response and its stream reference each other, and the request: models would stay until garbage collection.
        response.stream = _EMPTY_STREAM
        response.raise_for_status()
        return parse_protobuf(RESPONSES[method], response.content)


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
        check_link: called between two chunks of a body; may raise likewise.
    """

    def __init__(  # noqa: PLR0913 one keyword per collaborator
        self,
        *,
        private_key_pem: bytes,
        tls_context: ssl.SSLContext,
        clock: Callable[[], float],
        instance: str = "",
        charge_traffic: Callable[[int], None] = lambda _: None,
        admit: Callable[[Json], None] = lambda _: None,
        check_link: Callable[[], None] = lambda: None,
    ) -> None:
        self._charge_traffic, self._admit, self._check_link = charge_traffic, admit, check_link
        self._instance, self._tls_context, self._clock = instance, tls_context, clock
        self._signer = RequestSigner(private_key_pem, clock, instance)
        self._stamp = ""
        self._client: _FleetClient | None = None
        self._node = Node()
        self._incoming_assignment: str | None = None

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
        try:
            self._client = _FleetClient(address, self._tls_context, self._signer, self._stamp)
        except httpx.InvalidURL as error:
            raise NetworkError(f"the coordinator's address {address!r:.200} makes no sense: {error}") from None
        response = self._send(
            ACTIVATE_NODE, public_key=self._signer.public_key, heartbeat_interval=FLOWER_HEARTBEAT_INTERVAL_S
        )
        self._node = Node(node_id=response.node_id)

    def close(self) -> None:
        if self._client is not None:
            self._stamp = self._client.stamp
            self._client.close()
            self._client = None

    def pull(self) -> PulledInstruction | None:
        """Returns the next instruction with its complete body, or None without work."""
        self._incoming_assignment = None
        response = self._send(PULL_MESSAGES, node=self._node)
        if not response.messages_list:
            return None
        try:
            message, tree = response.messages_list[0], response.message_object_trees[0]
            metadata, header = Metadata(), _parse_header(message)
            metadata.CopyFrom(message.metadata)  # apart: a part of a response keeps all of it in memory
            body = b"" if tree.children else _check_bytes(find_value(message.content, RECORD_BODY, FIELD_BYTES))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NetworkError(f"the coordinator's instruction makes no sense: {error!r}") from None
        object_ids = [child.object_id for child in tree.children]
        del response, message, tree
        self._incoming_assignment = header.get("assignment")
        try:
            self._admit(header)
            self._charge_traffic(len(object_ids) * CHUNK_BYTES or len(body))
            if object_ids:
                body = self._pull_chunks(metadata.run_id, object_ids)
        except ConditionsEndedError as error:
            return PulledInstruction(metadata=metadata, header=header, body=b"", blocker=error.blocker)
        return PulledInstruction(metadata=metadata, header=header, body=body)

    def _pull_chunks(self, run_id: int, object_ids: list[str]) -> bytes:
        chunks: list[bytes] = []
        num_started = 0
        try:
            for object_id in object_ids:
                if chunks:
                    self._check_link()
                num_started += 1
                chunks.append(self._pull_chunk(run_id, object_id))
        except (NetworkError, ConditionsEndedError):
            with contextlib.suppress(ConditionsEndedError):  # what was not begun comes back
                self._charge_traffic(-CHUNK_BYTES * (len(object_ids) - num_started))
            raise
        return b"".join(chunks)

    def _pull_chunk(self, run_id: int, object_id: str) -> bytes:
        response = self._send(PULL_OBJECT, node=self._node, run_id=run_id, object_id=object_id)
        if not response.object_available:
            raise NetworkError("the coordinator has taken the work back while its model was on the way")
        try:
            return parse_chunk(response.object_content)
        except ValueError as error:
            raise NetworkError(f"the coordinator's answer makes no sense: {error}") from None

    def create_reply(self, instruction: PulledInstruction, reply_content: ReplyContent) -> PreparedReply:
        """Returns the reply to an instruction, which is answered with it."""
        self._incoming_assignment = None
        header, body = reply_content
        request, now_s = instruction.metadata, max(self._clock(), MIN_MESSAGE_TIME_S)
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
        )
        for task in ("src_task_id", "dst_task_id"):
            if request.HasField(task):
                setattr(metadata, "dst_task_id" if task == "src_task_id" else "src_task_id", getattr(request, task))
        return PreparedReply(metadata=metadata, header=json.dumps(header), body=body)

    def push(self, reply: PreparedReply) -> None:
        """Sends a reply; idempotent, since equal replies have equal ids and only missing chunks are sent.

        Raises:
            ReplyRejectedError: the coordinator rejects it.
            UnauthorisedError: unknown key, or the clock is off.
            NetworkError: not sent; try again.
        """
        metadata = Metadata()
        metadata.CopyFrom(reply.metadata)
        header = RECORD_HEADER, FIELD_JSON, reply.header
        if len(reply.body) <= INLINE_BODY_BYTES:
            content = make_content(header, (RECORD_BODY, FIELD_BYTES, reply.body))
            self._push_message(metadata, content, ObjectTree(object_id=metadata.message_id))
            return
        chunks_by_id = {
            compute_object_id(chunk): chunk for chunk in _encode_chunks(metadata.reply_to_message_id, reply.body)
        }
        metadata.message_id, *child_ids = chunks_by_id
        children = [ObjectTree(object_id=object_id) for object_id in child_ids]
        tree = ObjectTree(object_id=metadata.message_id, children=children)
        response = self._push_message(metadata, make_content(header), tree)
        for object_id in response.objects_to_push:
            if object_id not in chunks_by_id:
                raise NetworkError("the coordinator asks for a piece that the answer has not")
            pushed = self._send(
                PUSH_OBJECT,
                node=self._node,
                run_id=metadata.run_id,
                object_id=object_id,
                object_content=chunks_by_id[object_id],
                session_id=response.session_id,
            )
            if not pushed.stored:
                raise NetworkError("the coordinator has not kept a piece of the answer")

    def _push_message(self, metadata: Any, content: Any, tree: Any) -> Any:
        message = Message(metadata=metadata, content=content)
        return self._send(PUSH_MESSAGES, node=self._node, messages_list=[message], message_object_trees=[tree])

    def _send(self, method: str, **fields: Any) -> Any:
        """Makes one request of these fields; maps httpx's errors to ours."""
        if self._client is None:
            raise NetworkError("not connected to a coordinator")
        try:
            return self._client.send(method, REQUESTS[method](**fields))
        except httpx.HTTPStatusError as error:
            raise _translate_status(error.response) from None
        except ValueError as error:
            raise NetworkError(f"the coordinator's answer makes no sense: {error}") from None
        except httpx.RequestError as error:
            raise NetworkError(f"no answer from the coordinator: {error or type(error).__name__}") from None


def _check_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"its body must be bytes, got {type(value).__name__}")
    return value


def _parse_header(message: Any) -> Json:
    """Returns the validated header of an instruction."""
    if message.metadata.message_type not in {TRAIN, EVALUATE}:
        raise ValueError(f"it must be to train or to evaluate, got {message.metadata.message_type!r}")
    header = parse_json(str(find_value(message.content, RECORD_HEADER, FIELD_JSON)))
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
        yield encode_chunk(salt, view[start : start + CHUNK_BYTES])


def _parse_clone_reason(response: httpx.Response) -> str:
    """Returns the coordinator's reason for rejecting a clone."""
    try:
        detail = parse_json(response.content)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = response.text
    return f"the coordinator refuses this agent, a copy: {str(detail)[:500]}"


def _translate_status(response: httpx.Response) -> EdgeflError:
    """Returns the error for an answer of another status than 200."""
    status = response.status_code
    detail = f"coordinator answered {status}: {response.text[:200]}"
    if status == CLONED_STATUS:
        return ClonedError(_parse_clone_reason(response))
    if status == 401:
        return UnauthorisedError(detail)
    return ReplyRejectedError(detail) if status in {403, 413} else NetworkError(detail)
