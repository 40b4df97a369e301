"""One process that trains for the simulator: jobs on stdin, results on stdout.

A message is two lengths (u32, little-endian), a JSON header and a body. A model travels once; jobs that follow start
from the last one that came. Torch and BLAS use one thread: several such processes share the machine.
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

from edgefl.decentralised.mailbag import pack_mail, unpack_mail
from edgefl.simulation.data import load_data
from edgefl.simulation.in_process import reason
from edgefl.simulation.training import Sent
from edgefl.simulation.workbench import Trade, Workbench
from edgefl.types import Assignment, EdgeMessage, Json, LocalPlan

SITE_FILE = "site.json"
_LENGTHS = struct.Struct("<II")


def write_message(stream: BinaryIO, header: Json, body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    stream.write(_LENGTHS.pack(len(text), len(body)) + text)
    stream.write(body)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[Json, bytes] | None:
    """Returns the next message; None when there are no more."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header_bytes, body_bytes = _LENGTHS.unpack(lengths)
    header: Json = json.loads(stream.read(header_bytes))
    return header, stream.read(body_bytes)


def order_json(order: Assignment) -> Json:
    """Returns an assignment as JSON; the bodies in its inbox are no part of it."""
    plan = {name: value for name, value in asdict(order.plan).items() if name != "inbox"}
    return {**{name: getattr(order, name) for name in _ORDER}, "plan": plan, "settled": list(order.settled)}


def order_from_json(value: Json, inbox: tuple[EdgeMessage, ...] = ()) -> Assignment:
    plan = LocalPlan.from_json(value["plan"], inbox)
    return Assignment(**{name: value[name] for name in _ORDER}, plan=plan, settled=tuple(value["settled"]))


_ORDER = tuple(f.name for f in fields(Assignment) if f.name not in {"plan", "settled"})


def main() -> None:
    """Serves until stdin ends."""
    folder = Path(sys.argv[1])
    site = json.loads((folder / SITE_FILE).read_text())
    trade = Trade(task=site["task"], options=site["options"], seed=site["seed"])
    # What a task prints must not get between our messages.
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    Server(Workbench(trade, load_data(folder), site["places"]), sys.stdin.buffer, sink).serve()


class Server:
    """Does one job after the other; a second thread reads ahead, so that whoever asks never waits for us."""

    def __init__(self, bench: Workbench, source: BinaryIO, sink: BinaryIO) -> None:
        self._bench, self._source, self._sink = bench, source, sink
        self._inbox: queue.SimpleQueue[tuple[Json, bytes] | None] = queue.SimpleQueue()
        self._unwanted: set[int] = set()
        self._sent = Sent(version=-1, body=b"")

    def serve(self) -> None:
        threading.Thread(target=self._read, name="jobs", daemon=True).start()
        while (message := self._inbox.get()) is not None:
            header, body = message
            inbox, body = unpack_mail(header.get("mail", []), body)
            if body:
                self._sent = Sent(version=header["version"], body=body, subject=header["subject"])
            self._answer(header, inbox)

    def _read(self) -> None:
        while (message := read_message(self._source)) is not None:
            if message[0]["do"] == "undo":
                self._unwanted.add(message[0]["of"])
            self._inbox.put(message)
        self._inbox.put(None)

    def _answer(self, header: Json, inbox: tuple[EdgeMessage, ...]) -> None:
        ticket = header["ticket"]
        try:
            done, body = self._do(header, inbox)
        except Exception as error:  # noqa: BLE001 the boundary of one job: the next must still be done
            done, body = {"error": reason(error)}, b""
        write_message(self._sink, {"ticket": ticket, **done}, body)

    def _do(self, header: Json, inbox: tuple[EdgeMessage, ...]) -> tuple[Json, bytes]:
        match header["do"]:
            case "undo":
                self._unwanted.discard(header["of"])
                self._bench.undo(order_from_json(header["order"]))
                return {}, b""
            case "evaluate":
                scores = self._bench.evaluate(header["device"], self._sent)
                return asdict(scores), b""
        ticket = header["ticket"]
        if ticket in self._unwanted:
            return {}, b""
        product: Any = self._bench.train(
            order_from_json(header["order"], inbox),
            self._sent,
            header["iterations"],
            is_unwanted=lambda: ticket in self._unwanted,
        )
        told, packed = pack_mail(product.outbox, product.body)
        return {"num_examples": product.num_examples, "loss": product.loss, "mail": told}, packed


if __name__ == "__main__":
    main()
