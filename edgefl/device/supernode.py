"""Flower's SuperNode as a library: the only file of the device that knows Flower's private modules.

Pulls instructions, hands them to a Flower `ClientApp` in this process, and pushes what it answers. None of Flower's
stock loops is used: they end their own process on errors that a board has to survive (a coordinator that is away,
a clock that is hours off). Errors come out as the few classes below, and the agent decides.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import logging
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.clientapp import ClientApp
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_id
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, public_key_to_bytes, sign_message
from flwr.supernode.fleet_http_client import FleetHttpClient

from edgefl.device.kept_connections import KeptConnections
from edgefl.errors import ClonedError, NetworkError
from edgefl.protocol import (
    CHUNK_BYTES,
    CLONED_STATUS,
    FIELD_BYTES,
    FIELD_JSON,
    INLINE_BODY_BYTES,
    INSTANCE_HEADER,
    RECORD_BODY,
    RECORD_HEADER,
    REPLY_SALT_BYTES,
    STAMP_HEADER,
)
from edgefl.types import Json
from edgefl.untrusted import parse_json

REQUEST_TIMEOUT_S = 30.0
EARLIEST_MESSAGE_S = 1_740_700_800.0
"""Flower refuses messages that were made earlier; a coordinator without network time may stand there."""
ACTIVATION_S = 1800.0
"""What we tell Flower about our heartbeats; presence is ours (MQTT), Flower's is not used."""

Answer = tuple[Json, bytes]
Handler = Callable[[Json, bytes], Answer]
"""Takes header and body of an instruction and returns header and body of the reply."""


class UnauthorisedError(NetworkError):
    """The coordinator does not accept our signature: unknown key, or a clock that has drifted."""


class RefusedError(NetworkError):
    """The coordinator does not want this reply (any more): its instruction is settled, or its run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One message of the coordinator; `message` is Flower's, to be given back to `SuperNode.answer`."""

    message: Message
    header: Json
    num_bytes: int


_READ = httpx.ByteStream(b"")
"""In place of the stream of a response that has been read."""


class _Signer:
    """Signs every request with our clock corrected to the coordinator's."""

    def __init__(
        self, private_key: EllipticCurvePrivateKey, clock: Callable[[], float], instance: str, stamp: str = ""
    ) -> None:
        self._key, self._clock, self._instance, self.stamp = private_key, clock, instance, stamp
        self._public = base64.b64encode(public_key_to_bytes(private_key.public_key())).decode()

    def headers(self) -> dict[str, str]:
        stamp = dt.datetime.fromtimestamp(self._clock(), tz=dt.UTC).isoformat()
        signature = sign_message(self._key, stamp.encode("ascii"))
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: self._public,
            TIMESTAMP_HEADER: stamp,
            FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(signature).decode(),
            **({INSTANCE_HEADER: self._instance} if self._instance else {}),
            **({STAMP_HEADER: self.stamp} if self.stamp else {}),
        }

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers.update(self.headers())
        response = call_next(context)
        self.stamp = response.headers.get(STAMP_HEADER, self.stamp)
        # A response and its stream hold each other, and the request: models would stay until garbage is collected.
        response.stream = _READ
        return response


def signed_headers(private_key_pem: bytes, clock: Callable[[], float], instance: str = "") -> dict[str, str]:
    """Returns headers that prove who asks, signed with this key, and say which agent process it is."""
    return _Signer(bytes_to_private_key(private_key_pem), clock, instance).headers()


class _Client(FleetHttpClient):
    """Flower's client on a connection that stays open, ignores proxies and trusts only our CA."""

    def __init__(self, address: str, trust: ssl.SSLContext, signer: _Signer) -> None:
        super().__init__(f"https://{address}", interceptors=[signer], verify=trust)
        self._client.close()
        transport = KeptConnections(trust, timeout_s=REQUEST_TIMEOUT_S)
        self._client = httpx.Client(transport=transport, trust_env=False)

    def close(self) -> None:
        self._client.close()


class SuperNode:
    """The Flower side of one device.

    Args:
        private_key_pem: the device's key; its public half was registered when the board joined.
        trust: verifies the coordinator.
        clock: the coordinator's time in Unix seconds, as well as this board knows it.
        train, evaluate: what to do with an instruction.
        instance: of this agent process; the coordinator tells by it a copy of a device from one that restarted.
    """

    def __init__(
        self,
        *,
        private_key_pem: bytes,
        trust: ssl.SSLContext,
        clock: Callable[[], float],
        train: Handler,
        evaluate: Handler,
        instance: str = "",
    ) -> None:
        self._instance = instance
        self._signer: _Signer | None = None
        self._key = bytes_to_private_key(private_key_pem)
        self._trust, self._clock = trust, clock
        self._app = _client_app(train, evaluate, self._reply)
        self._client: _Client | None = None
        self._node = Node()
        self._arriving: str | None = None
        logging.getLogger("flwr").setLevel(logging.WARNING)

    @property
    def arriving(self) -> str | None:
        """Returns the assignment that was pulled and is not answered yet; its model may still be on the way."""
        return self._arriving

    def signed_headers(self) -> dict[str, str]:
        """Returns headers that prove who asks, good for five minutes of the coordinator's time."""
        return _Signer(self._key, self._clock, self._instance).headers()

    def use_key(self, private_key_pem: bytes) -> None:
        """Signs with another key from the next `connect` on."""
        self.close()
        self._key = bytes_to_private_key(private_key_pem)

    def connect(self, address: str) -> None:
        """Activates this device at a coordinator.

        Raises:
            UnauthorisedError: unknown key, or the clock is off.
            ClonedError: another agent of this identity was there before; so do all other calls.
            NetworkError: no answer.
        """
        self.close()
        stamp = self._signer.stamp if self._signer is not None else ""
        self._signer = _Signer(self._key, self._clock, self._instance, stamp)
        self._client = _Client(address, self._trust, self._signer)
        request = ActivateNodeRequest(
            public_key=public_key_to_bytes(self._key.public_key()), heartbeat_interval=ACTIVATION_S
        )
        self._node = Node(node_id=_call(self._client.ActivateNode, request).node_id)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def pull(self) -> Instruction | None:
        """Returns the next instruction with its whole body, or None when there is nothing to do."""
        client = self._connected()
        self._arriving = None
        answer = _call(client.PullMessages, PullMessagesRequest(node=self._node))
        if not answer.messages_list:
            return None
        try:
            message, tree = message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]
            header = _checked(parse_json(str(message.content[RECORD_HEADER][FIELD_JSON])))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NetworkError(f"the coordinator's instruction makes no sense: {error!r}") from None
        self._arriving = header.get("assignment")
        num_bytes = answer.ByteSize()
        if tree.children:
            pieces = [self._pull_chunk(client, message, child.object_id) for child in tree.children]
            num_bytes += sum(map(len, pieces))
            message.content[RECORD_BODY] = ConfigRecord({FIELD_BYTES: b"".join(pieces)})
        return Instruction(message=message, header=header, num_bytes=num_bytes)

    def _pull_chunk(self, client: _Client, message: Message, object_id: str) -> bytes:
        request = PullObjectRequest(node=self._node, run_id=message.metadata.run_id, object_id=object_id)
        answer = _call(client.PullObject, request)
        if not answer.object_available:
            raise NetworkError("the coordinator has taken the work back while its model was on the way")
        return get_object_body(answer.object_content, ArrayChunk)

    def answer(self, instruction: Instruction) -> Message:
        """Returns the reply of the `ClientApp`, which runs in this process."""
        context = Context(
            run_id=instruction.message.metadata.run_id,
            node_id=self._node.node_id,
            node_config={},
            state=RecordDict(),
            run_config={},
        )
        try:
            return self._app(instruction.message, context)
        finally:
            self._arriving = None

    def reply_to(self, instruction: Instruction, answer: Answer) -> Message:
        """Returns a reply made from a remembered answer, for an assignment that is asked for again."""
        return self._reply(instruction.message, answer)

    def push(self, reply: Message) -> None:
        """Sends a reply; safe to repeat, since equal replies have equal ids and only missing pieces are sent.

        Raises:
            RefusedError: the coordinator does not want it.
            UnauthorisedError: unknown key, or the clock is off.
            NetworkError: not sent; try again.
        """
        client = self._connected()
        body = cast("bytes", reply.content[RECORD_BODY][FIELD_BYTES])
        if len(body) <= INLINE_BODY_BYTES:
            tree = ObjectTree(object_id=reply.metadata.message_id)
            self._push_message(client, reply, tree)
            return
        by_id = {get_object_id(chunk): chunk for chunk in _chunks(reply.metadata.reply_to_message_id, body)}
        root, *rest = by_id
        tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=object_id) for object_id in rest])
        bare = RecordDict({RECORD_HEADER: reply.content[RECORD_HEADER]})
        rooted = make_message(metadata=_with_id(reply.metadata, root), content=bare)
        answer = self._push_message(client, rooted, tree)
        for object_id in answer.objects_to_push:
            request = PushObjectRequest(
                node=self._node,
                run_id=reply.metadata.run_id,
                object_id=object_id,
                object_content=by_id[object_id],
                session_id=answer.session_id,
            )
            if not _call(client.PushObject, request).stored:
                raise NetworkError("the coordinator has not kept a piece of the answer")

    def _push_message(self, client: _Client, message: Message, tree: ObjectTree) -> Any:
        request = PushMessagesRequest(
            node=self._node, messages_list=[message_to_proto(message)], message_object_trees=[tree]
        )
        return _call(client.PushMessages, request)

    def _connected(self) -> _Client:
        if self._client is None:
            raise NetworkError("not connected to a coordinator")
        return self._client

    def _reply(self, instruction: Message, answer: Answer) -> Message:
        header, body = answer
        asked, now = instruction.metadata, max(self._clock(), EARLIEST_MESSAGE_S)
        metadata = Metadata(
            run_id=asked.run_id,
            message_id=hashlib.sha256(b"reply" + asked.message_id.encode()).hexdigest(),
            src_node_id=self._node.node_id,
            dst_node_id=asked.src_node_id,
            reply_to_message_id=asked.message_id,
            group_id=asked.group_id,
            created_at=now,
            ttl=asked.created_at + asked.ttl - now,
            message_type=asked.message_type,
            src_task_id=asked.dst_task_id,
            dst_task_id=asked.src_task_id,
        )
        content = RecordDict(
            {
                RECORD_HEADER: ConfigRecord({FIELD_JSON: json.dumps(header)}),
                RECORD_BODY: ConfigRecord({FIELD_BYTES: body}),
            }
        )
        return make_message(metadata=metadata, content=content)


def _checked(header: Any) -> Json:
    """Returns the header of an instruction, once it is clear what it belongs to."""
    settled = header.get("settled", []) if isinstance(header, dict) else None
    if not isinstance(settled, list) or not all(isinstance(name, str) for name in settled):
        raise TypeError("its header must be an object, in which `settled` is a list of texts")
    if not isinstance(header.get("assignment"), str | None):
        raise TypeError("its assignment must be a text")
    return cast("Json", header)


def _client_app(train: Handler, evaluate: Handler, reply: Callable[[Message, Answer], Message]) -> ClientApp:
    """Returns a Flower `ClientApp` whose train and evaluate functions are ours."""
    app = ClientApp()

    def run(handler: Handler, message: Message) -> Message:
        header = parse_json(str(message.content[RECORD_HEADER][FIELD_JSON]))
        return reply(message, handler(header, cast("bytes", message.content[RECORD_BODY][FIELD_BYTES])))

    @app.train()
    def _train(message: Message, _context: Context) -> Message:
        return run(train, message)

    @app.evaluate()
    def _evaluate(message: Message, _context: Context) -> Message:
        return run(evaluate, message)

    return app


def _chunks(instruction_id: str, body: bytes) -> Iterator[bytes]:
    """Gives the chunks of a reply, each with bytes before it that no other chunk has.

    Flower keeps equal objects once, and takes the second of two replies that begin with the same chunk for a repeat.
    """
    view = memoryview(body)
    for start in range(0, len(body), CHUNK_BYTES):
        salt = hashlib.sha256(f"salt {instruction_id} {start}".encode()).digest()[:REPLY_SALT_BYTES]
        yield ArrayChunk(memoryview(salt + view[start : start + CHUNK_BYTES])).deflate()


def _with_id(metadata: Metadata, message_id: str) -> Metadata:
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


def _reason(response: httpx.Response) -> str:
    """Returns what the coordinator says to a copy."""
    try:
        told = parse_json(response.content)["detail"]
    except (ValueError, KeyError, TypeError):
        told = response.text
    return f"the coordinator refuses this agent, a copy: {str(told)[:500]}"


def _call(rpc: Callable[[Any], Any], request: Any) -> Any:
    """Makes one request; Flower's and httpx's errors become ours."""
    try:
        return rpc(request)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        detail = f"coordinator answered {status}: {error.response.text[:200]}"
        if status == CLONED_STATUS:
            raise ClonedError(_reason(error.response)) from None
        if status == 401:
            raise UnauthorisedError(detail) from None
        if status in {403, 413}:
            raise RefusedError(detail) from None
        raise NetworkError(detail) from None
    except ValueError as error:  # what Flower raises for a body that is no protobuf
        raise NetworkError(f"the coordinator's answer makes no sense: {error}") from None
    except httpx.RequestError as error:
        raise NetworkError(f"no answer from the coordinator: {error or type(error).__name__}") from None
