"""The process with torch that trains the rest of a cut network: one training per assignment.

It answers one message after another on its standard streams, so that the coordinator itself needs no torch. What
boards send arrives here as it came: a damaged body fails that one message.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.split_bodies import BatchCodec
from edgefl.core.errors import CodecError, EdgeflError, SplitSessionError
from edgefl.core.protocol import MAX_BODY_BYTES, SPLIT_LABEL_BYTES, error_code
from edgefl.core.types import Array, Json, TrainConfig, derive_rng
from edgefl.system.process_messages import read_message, write_message
from edgefl.tasks.learners.torch_split import RestLearner, cut_rest
from edgefl.tasks.local_algorithms.rest_training import RestTraining
from edgefl.tasks.network_cut import describe_cut
from edgefl.tasks.registry import import_torch, make_task

_LOSS = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class _Session:
    training: RestTraining
    learner: RestLearner
    rng: Generator


class RestServer:
    """Trainings of assignments by session.

    Args:
        setup: `task`, `options`, and `split`, as in the header of the run's instructions.
    """

    def __init__(self, setup: Json) -> None:
        self._task, self._after = make_task(setup["task"], setup["options"]), str(setup["split"]["after"])
        cut = describe_cut(setup["task"], setup["options"], self._after)
        self._rest = cut.select_rest(self._task.shapes())
        self._up = BatchCodec(setup["split"]["up"], cut.activation_shape)
        self._down = BatchCodec(setup["split"]["down"], cut.activation_shape)
        self._outputs = BatchCodec("dense", (cut.num_outputs,))
        self._sessions: dict[str, _Session] = {}
        self._spare_learners: list[RestLearner] = []

    def handle(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns the answer to one message.

        Raises:
            SplitSessionError: there is no such session.
            EdgeflError: the message makes no sense, or the training failed.
        """
        name = str(header["session"])
        match header["do"]:
            case "open":
                self._sessions[name] = self._open(header, body)
                return {}, b""
            case "close":
                if (session := self._sessions.pop(name, None)) is not None:
                    self._spare_learners.append(session.learner)
                return {}, b""
        session = self._sessions.get(name)
        if session is None:
            raise SplitSessionError("the rest of the network is not trained for this assignment; it begins again")
        match header["do"]:
            case "step":
                return {}, self._step(session, body, int(header["num_examples"]))
            case "forward":
                activations = self._up.decode(body, int(header["num_examples"]))
                return {}, self._outputs.encode(session.training.forward(activations), session.rng)
            case "backward":
                gradient = self._outputs.decode(body, int(header["num_examples"]))
                return {}, self._down.encode(session.training.backward(gradient), session.rng)
            case _:
                displacement = session.training.finish()
                return {}, make_codec("dense", self._rest).encode(displacement, session.rng)

    def _open(self, header: Json, body: bytes) -> _Session:
        learner = self._spare_learners.pop() if self._spare_learners else self._make_learner()
        seed_key = [*header["seed_key"], "gradients"]
        plan = TrainConfig.from_json(header["plan"])
        return _Session(RestTraining(learner, plan, decode_body(body, self._rest)), learner, derive_rng(*seed_key))

    def _make_learner(self) -> RestLearner:
        return cut_rest(self._task.learner(), self._after)

    def _step(self, session: _Session, body: bytes, num_examples: int) -> bytes:
        labels, activations = body[: SPLIT_LABEL_BYTES * num_examples], body[SPLIT_LABEL_BYTES * num_examples :]
        if not activations:
            raise CodecError(f"a batch of {num_examples} labels has no activations")
        classes: Array = np.frombuffer(labels, "<i4").astype(np.int64)
        loss, gradient = session.training.step(self._up.decode(activations, num_examples), classes)
        return _LOSS.pack(loss) + self._down.encode(gradient, session.rng)


def serve(server: RestServer, source: BinaryIO, sink: BinaryIO) -> None:
    """Answers messages until the stream ends."""
    while (message := read_message(source, MAX_BODY_BYTES)) is not None:
        header: Json
        try:
            header, body = server.handle(*message)
        except EdgeflError as error:
            header, body = {"error": error_code(error), "message": str(error)}, b""
        except Exception as error:  # noqa: BLE001 the boundary of one message: other boards train on
            header, body = {"error": "data", "message": f"{type(error).__name__}: {error}"}, b""
        write_message(sink, header, body)


def main() -> None:
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints must not get between our messages
    setup: Any = read_message(source, MAX_BODY_BYTES)
    if setup is None:
        return
    # The coordinator has other work for one core.
    import_torch().set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    serve(RestServer(setup[0]), source, sink)


if __name__ == "__main__":
    main()
