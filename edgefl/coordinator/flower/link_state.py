"""What is kept of Flower's side: nodes, runs with their apps, messages between dispatch and reply, their objects.

It is in memory alone, and built anew at each start: the store is the truth. Nothing in it expires, since the clock
may jump: the loop of a run ends what is over.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.coordinator.flower.fleet_api import MAX_OBJECT_BYTES
from edgefl.coordinator.flower.messages import ReplyAssembler, SpooledBytes, spool_to_disk
from edgefl.coordinator.flower.stock_messages import OBJECT_KINDS, StockInstruction
from edgefl.core.errors import DataError, NotAllowedError
from edgefl.core.fleet_messages import MESSAGES, Message, ObjectTree, has_record, make_content
from edgefl.core.flower_objects import compute_object_id, parse_object
from edgefl.core.protocol import CHUNK_BYTES, FIELD_BYTES, FIELD_JSON, MAX_BODY_BYTES, RECORD_BODY, RECORD_HEADER

_OBJECT_ID = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
_FEDERATION, _RUNNING, _TASK = "@none/default", "running", "flwr-serverapp"
"""What Flower calls its one federation, a run that goes on, and what a run's ServerApp is."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Status of an error response, and Flower's number and text for it."""

    status: int
    code: int
    detail: str


RUN_IS_OVER = ErrorKind(403, 2007, "The current run status does not allow this Fleet API operation.")
BAD_INTERVAL = ErrorKind(400, 2003, "Invalid heartbeat interval.")
NO_FAB = ErrorKind(403, 2009, "Failed to get FAB.")


class FleetApiError(Exception):
    """A request that is answered with an error, as Flower answers it."""

    def __init__(self, reason: str, kind: ErrorKind = RUN_IS_OVER) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(slots=True)
class _StoredObject:
    children: tuple[str, ...]
    num_parents: int = 0
    content: bytes | None = None
    spooled: SpooledBytes | None = None


class ObjectStore:
    """Objects of messages by their ids, each once; those of incomplete replies are on disk. Thread-safe.

    An object is dropped with the last message that refers to it.

    Args:
        folder: of spooled objects; None for the system's temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._objects: dict[str, _StoredObject] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._objects)

    def register(self, tree: Any) -> list[str]:
        """Adds the objects of a message, without content, all at once; returns the ids of those that have none."""
        with self._lock:
            missing = list[str]()
            self._register(tree, missing)
            return missing

    def _register(self, tree: Any, missing: list[str]) -> None:
        children = [child.object_id for child in tree.children]
        for child in tree.children:
            self._register(child, missing)
        found = self._objects.get(tree.object_id)
        if found is None:
            found = self._objects[tree.object_id] = _StoredObject(tuple(children))
            for child_id in children:
                self._objects[child_id].num_parents += 1
        if found.content is None:
            missing.append(tree.object_id)

    def has_other_children(self, tree: Any) -> bool:
        """Returns whether the first object of a tree is registered with other children than it has there."""
        with self._lock:
            found = self._objects.get(tree.object_id)
            return found is not None and found.children != tuple(child.object_id for child in tree.children)

    def get_tree(self, object_id: str) -> Any:
        """Returns an object's id with those that it refers to.

        Raises:
            LookupError: it is not there.
        """
        with self._lock:
            children = [self.get_tree(child) for child in self._objects[object_id].children]
        return ObjectTree(object_id=object_id, children=children)

    def put(self, object_id: str, content: bytes) -> bool:
        """Sets the content of an object, which is not checked here; returns whether it is registered."""
        with self._lock:
            found = self._objects.get(object_id)
            if found is not None and found.content is None:
                found.content = content
            return found is not None

    def spool(self, object_id: str) -> None:
        """Moves the content of an object to disk, if it is there and there is room."""
        content = self.get(object_id)
        spooled = spool_to_disk(content, self.folder) if content else None
        with self._lock:
            if spooled is not None and (found := self._objects.get(object_id)) is not None:
                found.spooled, found.content = spooled, b""

    def is_registered(self, object_id: str) -> bool:
        return object_id in self._objects

    def get(self, object_id: str) -> bytes | None:
        """Returns the content of an object, None if there is none."""
        with self._lock:
            found = self._objects.get(object_id)
            content, spooled = (None, None) if found is None else (found.content, found.spooled)
        return content if spooled is None else spooled.read()

    def delete(self, object_id: str) -> None:
        """Drops an object, if no other refers to it, with those to which only it refers."""
        with self._lock:
            found = self._objects.get(object_id)
            if found is None or found.num_parents:
                return
            del self._objects[object_id]
            for child in found.children:
                self._objects[child].num_parents -= 1
                self.delete(child)


@dataclass(slots=True, kw_only=True)
class QueuedMessage:
    """A message to a node from its dispatch until it is answered or cancelled.

    Attributes:
        metadata: Flower's.
        header: JSON, of a board's message; empty in a stock SuperNode's, whose content is objects.
        inline: the body, of a board's message whose body is no chunks.
        is_delivered: whether the node has it.
        reply_id: of the reply that has begun to arrive.
        session_id: of the push of its missing objects.
        is_answered: whether its reply is complete: one that is repeated while it is decoded is not delivered again.
    """

    metadata: Any
    header: str = ""
    inline: bytes | None = None
    is_delivered: bool = False
    reply_id: str = ""
    session_id: str = ""
    is_answered: bool = False

    @property
    def message_id(self) -> str:
        return str(self.metadata.message_id)

    def encode(self) -> Any:
        """Returns the message as it is sent."""
        values = [(RECORD_HEADER, FIELD_JSON, self.header)] if self.header else []
        body = [] if self.inline is None else [(RECORD_BODY, FIELD_BYTES, self.inline)]
        return Message(metadata=self.metadata, content=make_content(*values, *body))


class LinkState:
    """Nodes, runs and messages, with callbacks per reply, in the thread that completed it. Thread-safe.

    What stock SuperNodes are sent has a store of its own, into which no device writes: others know the ids in it
    beforehand. Their replies are in none, but each in its instruction.

    Args:
        on_reply: called with a board's complete reply, Flower's message.
        on_stock_reply: called with what a stock SuperNode has answered, or cannot answer.
        folder: of large replies; None for the system's temporary files.
    """

    def __init__(
        self,
        on_reply: Callable[[Any], None],
        on_stock_reply: Callable[[StockInstruction], None],
        folder: Path | None = None,
    ) -> None:
        self.board_store, self.stock_store = ObjectStore(folder), ObjectStore(folder)
        self.messages: dict[str, QueuedMessage] = {}
        self.partial_replies = ReplyAssembler[Any]()
        self.supernodes: set[int] = set()
        self.stock_instructions: dict[str, StockInstruction] = {}
        self._on_reply, self._on_stock_reply, self._folder = on_reply, on_stock_reply, folder
        self._keys: dict[int, bytes] = {}
        self._nodes: dict[bytes, int] = {}
        self._queues: dict[int, dict[str, None]] = {}
        self._runs: dict[int, Any] = {}
        self._fabs: dict[str, bytes] = {}
        self._fab_users = Counter[str]()
        self._lock = threading.RLock()

    def num_queued(self) -> int:
        """Returns the number of messages that no node has pulled."""
        with self._lock:
            return sum(map(len, self._queues.values()))

    def find_store(self, node_id: int) -> ObjectStore:
        """Returns the store of the objects of a node's messages."""
        return self.stock_store if node_id in self.supernodes else self.board_store

    # Nodes.

    def create_node(self, public_key: bytes) -> int:
        """Returns the id of a new node."""
        with self._lock:
            node_id = self._sample_id(self._keys)
            self.restore_node(node_id, public_key)
            return node_id

    def restore_node(self, node_id: int, public_key: bytes) -> None:
        """Adds a known node under its id."""
        with self._lock:
            self._keys[node_id], self._nodes[public_key] = public_key, node_id

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        return self._nodes.get(public_key)

    def update_node_key(self, node_id: int, public_key: bytes) -> None:
        """Replaces the key of a device, which keeps its node id; the former key gets 401 from now on."""
        with self._lock:
            self._nodes.pop(self._keys[node_id], None)
            self.restore_node(node_id, public_key)

    def remove_node(self, node_id: int) -> None:
        """Removes a device; its key gets 401 from now on and may be registered again later."""
        with self._lock:
            self.supernodes.discard(node_id)
            key = self._keys.pop(node_id, None)
            if key is not None:
                self._nodes.pop(key, None)

    # Runs and their apps.

    def open_run(self, app_id: str, version: str, config: dict[str, Any], fab: bytes | None) -> int:
        """Returns the id of a new run of an app, which is stored while a run of it is open."""
        fab_hash = "" if fab is None else hashlib.sha256(fab).hexdigest()
        now = dt.datetime.now(dt.UTC).isoformat()
        with self._lock:
            run_id = self._sample_id(self._runs)
            self._runs[run_id] = MESSAGES["Run"](
                run_id=run_id,
                series_id=run_id,
                fab_id=app_id,
                fab_version=version,
                fab_hash=fab_hash,
                override_config=[_encode_setting(name, value) for name, value in config.items()],
                pending_at=now,
                starting_at=now,
                running_at=now,
                status=MESSAGES["RunStatus"](status=_RUNNING),
                federation=_FEDERATION,
                primary_task_type=_TASK,
            )
            if fab is not None:
                self._fabs[fab_hash] = fab
                self._fab_users[fab_hash] += 1
            return run_id

    def close_run(self, run_id: int) -> None:
        """Deletes a run with its messages; requests for it are rejected from now on."""
        with self._lock:
            run = self._runs.pop(run_id, None)
            message_ids = [name for name, found in self.messages.items() if found.metadata.run_id == run_id]
            if run is not None and run.fab_hash:
                self._fab_users[run.fab_hash] -= 1
                if self._fab_users[run.fab_hash] <= 0:
                    del self._fab_users[run.fab_hash], self._fabs[run.fab_hash]
        for message_id in message_ids:
            self.delete_message(message_id)

    def get_run(self, run_id: int) -> Any:
        """Returns an open run.

        Raises:
            FleetApiError: there is none, as after a restart of the coordinator.
        """
        run = self._runs.get(run_id)
        if run is None:
            raise FleetApiError("no such run")
        return run

    def get_fab(self, run_id: int, fab_hash: str) -> bytes:
        """Returns the app of an open run.

        Raises:
            FleetApiError: the run has no such app, or is none.
        """
        run = self.get_run(run_id)
        with self._lock:
            fab = self._fabs.get(fab_hash)
        if fab is None or run.fab_hash != fab_hash:
            raise FleetApiError("the run has no such app", NO_FAB)
        return fab

    # Messages.

    def add_message(self, message: QueuedMessage) -> bool:
        """Queues a message, whose objects are stored; returns whether its node and its run are there."""
        metadata = message.metadata
        with self._lock:
            if metadata.dst_node_id not in self._keys or metadata.run_id not in self._runs:
                return False
            self.messages[message.message_id] = message
            self._queues.setdefault(metadata.dst_node_id, {})[message.message_id] = None
            return True

    def pop_message(self, node_id: int) -> QueuedMessage | None:
        """Returns the oldest message that a node has not pulled; it is delivered once."""
        with self._lock:
            for message_id in self._queues.get(node_id, ()):
                message = self.messages[message_id]
                self._remove_from_queue(message)
                message.is_delivered = True
                return message
        return None

    def delete_message(self, message_id: str) -> None:
        """Deletes a message, and what has arrived of its reply; later parts of it are rejected."""
        with self._lock:
            message = self.messages.pop(message_id, None)
            stock_instruction = self.stock_instructions.pop(message_id, None)
            if message is not None:
                self._remove_from_queue(message)
                self.partial_replies.remove(message.session_id)
                self.board_store.delete(message.reply_id)
                for store in (self.board_store, self.stock_store):  # its node may be removed
                    store.delete(message_id)
        if stock_instruction is not None:
            stock_instruction.close()

    def _remove_from_queue(self, message: QueuedMessage) -> None:
        node_id = message.metadata.dst_node_id
        queue = self._queues.get(node_id, {})
        queue.pop(message.message_id, None)
        if not queue:
            self._queues.pop(node_id, None)

    # Replies.

    def add_reply(self, reply: Any, tree: Any) -> tuple[str, list[str]]:
        """Takes a reply, again too; returns the session of its push, and the ids of the objects that are missing.

        Raises:
            FleetApiError: it is rejected.
        """
        metadata, session_id = reply.metadata, secrets.token_hex(16)
        self.get_run(metadata.run_id)
        if metadata.src_node_id in self.supernodes:
            return session_id, self._announce_stock(reply, tree, session_id)
        if tree.object_id != metadata.message_id or not _is_valid_tree(tree):
            raise FleetApiError(f"a reply has at most {MAX_BODY_BYTES} bytes, in one row of pieces")
        with self._lock:
            message = self._match(metadata)
            if message.is_answered:
                return session_id, []
            is_inline = has_record(reply.content, RECORD_BODY)
            if not is_inline and self.board_store.has_other_children(tree):
                raise FleetApiError("reply refused")
            missing = [] if is_inline else self.board_store.register(tree)
            message.reply_id = metadata.message_id
            self.partial_replies.remove(message.session_id)
            message.session_id, message.is_answered = session_id, not missing
            if missing:
                self.partial_replies.start(session_id, reply, missing)
        if not missing:
            self._on_reply(reply)
        return session_id, missing

    def _match(self, metadata: Any) -> QueuedMessage:
        """Returns the message that a reply answers."""
        message = self.messages.get(metadata.reply_to_message_id)
        if (
            message is None
            or message.metadata.run_id != metadata.run_id
            or message.metadata.dst_node_id != metadata.src_node_id
            or message.reply_id not in {"", metadata.message_id}
        ):
            raise FleetApiError("reply refused")
        return message

    def add_object(self, request: Any) -> bool:
        """Takes an object of a reply, from the node that announced it; returns whether it is kept.

        Raises:
            FleetApiError: its run is over, or it is too large.
            NotAllowedError: it is not the one that its id names.
        """
        self.get_run(request.run_id)
        session_id, object_id, content = request.session_id, request.object_id, request.object_content
        pusher = request.node.node_id, request.run_id
        for instruction in list(self.stock_instructions.values()):
            is_its_own = pusher == (instruction.node_id, instruction.run_id)
            if is_its_own and session_id and instruction.session_id == session_id:
                return self._add_stock_object(instruction, object_id, content)
        _check_object(object_id, content)
        reply = self.partial_replies.get(session_id)
        if reply is None or pusher != (reply.metadata.src_node_id, reply.metadata.run_id):
            return False
        with self._lock:
            message = self.messages.get(reply.metadata.reply_to_message_id)
            is_missing = self.partial_replies.is_missing(session_id, object_id)
            if message is None or not is_missing or not self.board_store.put(object_id, content):
                return False
            is_complete = message.is_answered = self.partial_replies.add_object(session_id, object_id) is not None
        if is_complete:
            self._on_reply(reply)
        else:
            self.board_store.spool(object_id)
        return True

    def _announce_stock(self, reply: Any, tree: Any, session_id: str) -> list[str]:
        """Returns the ids of the objects of a stock SuperNode's reply that it is to send."""
        metadata = reply.metadata
        with self._lock:
            message = self._match(metadata)
            instruction = self.stock_instructions.get(message.message_id)
            if instruction is None:
                raise FleetApiError("reply refused")
            message.reply_id = metadata.message_id
            try:
                return instruction.announce(metadata.message_id, tree, session_id=session_id, folder=self._folder)
            except DataError as error:
                reason = str(error)
        self.finish_stock(instruction, reason)
        raise FleetApiError(reason)

    def _add_stock_object(self, instruction: StockInstruction, object_id: str, content: bytes) -> bool:
        """Adds an object to a stock SuperNode's reply; one that cannot be taken ends it."""
        if instruction.reply is None or object_id not in instruction.reply.ids:
            return False
        try:
            _check_object(object_id, content)
            is_complete = instruction.reply.add(object_id, content)
        except (DataError, FleetApiError, NotAllowedError) as error:
            self.finish_stock(instruction, str(error))
            raise FleetApiError(str(error)) from None
        if is_complete:
            self.finish_stock(instruction)
        return True

    def finish_stock(self, instruction: StockInstruction, error: str = "") -> None:
        """Hands on what a stock SuperNode has answered, once; `error` says why it cannot be taken."""
        if self.stock_instructions.pop(instruction.message_id, None) is not None:
            instruction.error = error
            self._on_stock_reply(instruction)

    def _sample_id(self, taken: Any) -> int:
        """Returns a random id that is neither taken nor one of Flower's own, 0 and 1."""
        while (sampled := secrets.randbits(63)) in taken or sampled < 2:
            pass
        return sampled


def _encode_setting(name: str, value: Any) -> Any:
    kinds = {bool: "bool", float: "double", int: "sint64", str: "string"}
    return MESSAGES["ConfigEntry"](key=name, value=MESSAGES["Scalar"](**{kinds[type(value)]: value}))


def _is_valid_tree(tree: Any) -> bool:
    """Returns whether a device may push an object tree: a first chunk with the others as its children, each once."""
    if (1 + len(tree.children)) * CHUNK_BYTES > MAX_BODY_BYTES:
        return False
    names = {found.object_id for found in (tree, *tree.children)}
    is_flat = not any(child.children for child in tree.children) and len(names) == 1 + len(tree.children)
    return is_flat and all(map(_OBJECT_ID.match, names))


def _check_object(object_id: str, content: bytes) -> None:
    """Checks size and content of a pushed object, by its id, which a board has signed."""
    if len(content) > MAX_OBJECT_BYTES:
        raise FleetApiError(f"a piece of a reply has at most {MAX_OBJECT_BYTES} bytes, got {len(content)}")
    try:
        if compute_object_id(content) == object_id and parse_object(content).kind in OBJECT_KINDS:
            return
    except ValueError:
        raise NotAllowedError("its object is malformed") from None
    raise NotAllowedError("its object is not the one that was signed")
