"""A training process of the simulator: jobs on stdin, results on stdout.

A message is two lengths (u32, little-endian), a JSON header and a body. A model travels once; later jobs start
from the last one received. Torch and BLAS use one thread: several such processes share the machine.
"""

from __future__ import annotations

import json
import os
import queue
import struct
import sys
import threading
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

from edgefl.core.types import Json, PeerMessage, TrainConfig, TrainInstruction
from edgefl.decentralised.message_bundle import decode_messages, encode_messages
from edgefl.simulation.backends.backend import EncodedModel
from edgefl.simulation.backends.in_process import format_error
from edgefl.simulation.backends.trainer import SimulatedTrainer, TaskSpec
from edgefl.simulation.partitioned_data import load_data

CONFIG_FILE = "site.json"
_LENGTHS = struct.Struct("<II")


def write_message(stream: BinaryIO, header: Json, body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    stream.write(_LENGTHS.pack(len(text), len(body)) + text)
    stream.write(body)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[Json, bytes] | None:
    """Returns the next message; None at the end of the stream."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header_bytes, body_bytes = _LENGTHS.unpack(lengths)
    header: Json = json.loads(stream.read(header_bytes))
    return header, stream.read(body_bytes)


def instruction_to_json(instruction: TrainInstruction) -> Json:
    """Returns an instruction as JSON, without the bodies of its inbox."""
    plan = {name: value for name, value in asdict(instruction.plan).items() if name != "inbox"}
    return {
        **{name: getattr(instruction, name) for name in _INSTRUCTION_FIELDS},
        "plan": plan,
        "settled": list(instruction.settled),
    }


def instruction_from_json(value: Json, inbox: tuple[PeerMessage, ...] = ()) -> TrainInstruction:
    plan = TrainConfig.from_json(value["plan"], inbox)
    return TrainInstruction(
        **{name: value[name] for name in _INSTRUCTION_FIELDS}, plan=plan, settled=tuple(value["settled"])
    )


_INSTRUCTION_FIELDS = tuple(f.name for f in fields(TrainInstruction) if f.name not in {"plan", "settled"})


def main() -> None:
    """Serves until stdin ends."""
    folder = Path(sys.argv[1])
    config = json.loads((folder / CONFIG_FILE).read_text())
    task_spec = TaskSpec(task=config["task"], options=config["options"], seed=config["seed"])
    # A task's output must not get between our messages.
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    WorkerServer(SimulatedTrainer(task_spec, load_data(folder), config["places"]), sys.stdin.buffer, sink).serve()


class WorkerServer:
    """Runs one job after another; a second thread reads ahead, so that the client never blocks."""

    def __init__(self, trainer: SimulatedTrainer, source: BinaryIO, sink: BinaryIO) -> None:
        self._trainer, self._source, self._sink = trainer, source, sink
        self._requests: queue.SimpleQueue[tuple[Json, bytes] | None] = queue.SimpleQueue()
        self._cancelled_ids: set[int] = set()
        self._model = EncodedModel(version=-1, body=b"")

    def serve(self) -> None:
        threading.Thread(target=self._read_requests, name="jobs", daemon=True).start()
        while (message := self._requests.get()) is not None:
            header, body = message
            inbox, body = decode_messages(header.get("mail", []), body)
            if body:
                self._model = EncodedModel(version=header["version"], body=body, owner=header["subject"])
            self._send_reply(header, inbox)

    def _read_requests(self) -> None:
        while (message := read_message(self._source)) is not None:
            if message[0]["do"] == "undo":
                self._cancelled_ids.add(message[0]["of"])
            self._requests.put(message)
        self._requests.put(None)

    def _send_reply(self, header: Json, messages: tuple[PeerMessage, ...]) -> None:
        ticket = header["ticket"]
        try:
            header_fields, body = self._run_request(header, messages)
        except Exception as error:  # noqa: BLE001 the boundary of one job: the next must still run
            header_fields, body = {"error": format_error(error)}, b""
        write_message(self._sink, {"ticket": ticket, **header_fields}, body)

    def _run_request(self, header: Json, messages: tuple[PeerMessage, ...]) -> tuple[Json, bytes]:
        match header["do"]:
            case "undo":
                self._cancelled_ids.discard(header["of"])
                self._trainer.rollback(instruction_from_json(header["order"]))
                return {}, b""
            case "evaluate":
                scores = self._trainer.evaluate(header["device"], self._model)
                return asdict(scores), b""
        ticket = header["ticket"]
        if ticket in self._cancelled_ids:
            return {}, b""
        update: Any = self._trainer.train(
            instruction_from_json(header["order"], messages),
            self._model,
            header["iterations"],
            is_cancelled=lambda: ticket in self._cancelled_ids,
        )
        message_headers, packed = encode_messages(update.outbox, update.body)
        return {"num_examples": update.num_examples, "loss": update.loss, "mail": message_headers}, packed


if __name__ == "__main__":
    main()
