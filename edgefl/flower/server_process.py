"""Process of a ServerApp: the app's own code over a `Grid` whose other end is the run's strategy.

Each method of the grid is a request on the standard streams, answered by one message and, for replies, as many more
as it says. What the app prints goes to a log beside the files that it writes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid, ServerApp

from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import Json
from edgefl.flower.app_codec import ChangeCodec, ModelCodec, check_codec
from edgefl.flower.app_job import CRASHED_ERROR, MAX_REASON_CHARS, ROUND_KEY, SERVER_NODE_ID, load_component
from edgefl.flower.app_messages import EVALUATE, TRAIN, decode_message, encode_message
from edgefl.flower.internals import ensure_identity, make_message
from edgefl.flower.strategy import seed_global_generators
from edgefl.system.process_messages import read_message, write_message

MAX_BODY_BYTES = 2**32 - 1
MAX_DIGITS = 9
"""Of a round in the name of a group."""


class ProcessGrid(Grid):
    """Implements Flower's `Grid`; may be used from several threads.

    Args:
        source: of answers.
        sink: for requests.
        run_id: Flower's number of the run.
        codec: in which boards may send what they changed of the arrays in a message; empty for none.
        down: codec of the arrays in messages that train or evaluate; empty for none.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes], run_id: int, *, codec: str = "", down: str = "") -> None:
        self._source, self._sink, self._run_id = source, sink, run_id
        self._sent: dict[str, Metadata] = {}
        self._codec, self._codecs, self._is_checked = codec, dict[str, ChangeCodec](), False
        self._down = ModelCodec(down) if down else None
        self._number = self._earlier_rounds = 0
        self._lock = threading.Lock()

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=self._run_id)

    def set_run(self, run: Any) -> None:
        """Does nothing: the process has one run."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        with self._lock:
            return list(self._ask({"do": "nodes"})["nodes"])

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sends messages, and returns their ids; raises `ConfigError` where the codec does not fit their arrays."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns replies that are there; waits for the first for as long as a turn of the run takes."""
        return self._wait(list(message_ids), needs_all=False, timeout=0.0)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        message_ids = [self._push(message) for message in messages]
        replies = self._wait(message_ids, needs_all=True, timeout=timeout)
        for message_id in message_ids:  # of replies that never came: nobody asks for them again
            self._sent.pop(message_id, None)
            self._codecs.pop(message_id, None)
        return replies

    def _push(self, message: Message) -> str:
        metadata = message.metadata
        header = {"type": metadata.message_type, "group": metadata.group_id}
        has_changes = bool(self._codec) and metadata.message_type.startswith(TRAIN)
        if has_changes and not self._is_checked:
            self._is_checked = check_codec(self._codec, message.content)
        down = self._down if metadata.message_type.startswith((TRAIN, EVALUATE)) else None
        with self._lock:
            request = {
                "do": "push",
                "node": metadata.dst_node_id,
                "type": metadata.message_type.partition(".")[0],
                "round": self._number_round(message),
            }
            message_id = str(self._ask(request, encode_message(header, message.content, down))["message"])
            if has_changes:  # of what the board has
                content = message.content if down is None else down.round(message.content)
                self._codecs[message_id] = ChangeCodec(content)
        for one, sent in [*self._sent.items()]:
            if sent.created_at + sent.ttl < metadata.created_at:  # a codec holds the whole model
                self._codecs.pop(one, None)
        self._sent[message_id] = metadata
        return message_id

    def _number_round(self, message: Message) -> int | None:
        """Returns the round of a message in the app: where numbers begin with 1 again, another strategy goes on."""
        number = _find_round(message)
        if number is None:
            return None
        if number == 1 < self._number:
            self._earlier_rounds += self._number
        self._number = number
        return self._earlier_rounds + number

    def _wait(self, message_ids: list[str], *, needs_all: bool, timeout: float | None) -> list[Message]:
        if not message_ids:
            return []
        request = {"do": "wait", "messages": message_ids, "all": needs_all, "timeout_s": timeout}
        with self._lock:
            count = self._ask(request)["count"]
            # All are read before one is looked into: what is left in the pipe is the next request's answer.
            replies = [self._read() for _ in range(count)]
        return [self._make_reply(*reply) for reply in replies]

    def _make_reply(self, header: Json, body: bytes) -> Message:
        sent = self._sent.pop(header["message"])
        metadata = Metadata(
            run_id=sent.run_id,
            message_id=f"reply-{header['message']}",
            src_node_id=sent.dst_node_id,
            dst_node_id=sent.src_node_id,
            reply_to_message_id=header["message"],
            group_id=sent.group_id,
            created_at=sent.created_at,
            ttl=sent.ttl,
            message_type=sent.message_type,
        )
        outcome = _read_outcome(header, body, self._codecs.pop(header["message"], None))
        if isinstance(outcome, Error):
            return make_message(metadata, error=outcome)
        return make_message(metadata, content=outcome)

    def _ask(self, request: Json, body: bytes = b"") -> Json:
        write_message(self._sink, request, body)
        return self._read()[0]

    def _read(self) -> tuple[Json, bytes]:
        message = read_message(self._source, MAX_BODY_BYTES)
        if message is None:  # the run is over
            os._exit(0)
        return message


def _find_round(message: Message) -> int | None:
    """Returns the round of a message, by what Flower's strategies and its older workflows write; else None."""
    values = [record.get(ROUND_KEY) for record in message.content.config_records.values()]
    found = next((value for value in values if isinstance(value, int)), None)
    group = message.metadata.group_id
    return int(group) if found is None and group.isdecimal() and len(group) < MAX_DIGITS else found


def _read_outcome(header: Json, body: bytes, codec: ChangeCodec | None) -> RecordDict | Error:
    """Returns the content of a board's reply, or its error; what makes no sense is an error of that board alone."""
    content: RecordDict | None = None
    try:
        if "error" not in header:
            header, content = decode_message(body, codec)
        if content is None:
            return Error(
                code=int(header.get("error", 0)), reason=str(header.get("reason", "no content"))[:MAX_REASON_CHARS]
            )
    except (DataError, TypeError, ValueError, OverflowError) as error:
        return Error(code=CRASHED_ERROR, reason=f"the reply makes no sense: {error}"[:MAX_REASON_CHARS])
    return content


def run_app(setup: Json, grid: Grid) -> None:
    """Runs the ServerApp of a setup to its end, with seeded generators."""
    ensure_identity()
    with seed_global_generators(int(setup["seed"])):
        sys.path.insert(0, setup["root"])
        for name in setup.get("seeded", ()):  # before the app draws from it, wherever it imports it
            importlib.import_module(name).manual_seed(int(setup["seed"]) % 2**63)
        app = load_component(Path(setup["root"]), setup["server"])
        if not isinstance(app, ServerApp):
            raise TaskError(f"{setup['server']} is a {type(app).__name__}, no ServerApp")
        context = Context(
            run_id=int(setup["run_id"]),
            node_id=SERVER_NODE_ID,
            node_config={},
            state=RecordDict(),
            run_config=setup["run_config"],
        )
        app(grid, context)


def main() -> None:
    """Serves one run; the app itself does not have the standard streams."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    message = read_message(source, 0)
    if message is None:
        return
    end: Json = {}
    # The first that is registered is the last that runs, after the app's threads and all that the app registered.
    atexit.register(_send_end, sink, end)
    try:
        setup = message[0]
        grid = ProcessGrid(source, sink, int(setup["run_id"]), codec=str(setup["codec"]), down=str(setup["down"]))
        run_app(setup, grid)
        end["do"] = "end"
    except (Exception, SystemExit) as error:  # noqa: BLE001 another author's code may raise anything
        if isinstance(error, SystemExit) and (error.code is None or error.code == 0):
            end["do"] = "end"
        else:
            traceback.print_exc()
            end |= {"do": "fail", "reason": f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]}


def _send_end(sink: IO[bytes], end: Json) -> None:
    """Says that the app is over, once all of its files are on the disk; its run ends this process."""
    for file in [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            file.flush()
    if end:
        write_message(sink, end)
    os._exit(0)


if __name__ == "__main__":
    main()
