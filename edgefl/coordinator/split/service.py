"""Split runs of the coordinator: assignments of boards, the requests of their batches, and the process behind them.

A session is one attempt of a board at an assignment, from the first batch to the last. A batch that comes again,
since its answer was lost, is answered as before and trained once. What a session has learnt lives in the process
alone: where it is lost, by a kill of the process, of the coordinator or of the board, the assignment begins again, in
another session, from the round's model. The rest's displacement goes into the update before the journal has that.
"""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.split_bodies import join_displacements
from edgefl.core.claims import MAX_GROWTH_RATIO
from edgefl.core.errors import DataError, NotFoundError, SplitSessionError, TaskError, UsageError
from edgefl.core.protocol import MAX_BODY_BYTES, MAX_SPLIT_BYTES, SPLIT_LABEL_BYTES, error_from_code
from edgefl.core.types import Array, Json, ModelProvider, ModelSpec, TrainInstruction, derive_rng
from edgefl.system.process_messages import read_message, write_message
from edgefl.system.processes import exit_with_parent

if TYPE_CHECKING:
    from edgefl.engine.assembly.components import SplitModel

log = logging.getLogger(__name__)

MODULE = "edgefl.coordinator.split.rest_process"
STUCK_S = 300.0
"""Time after which the process is killed if it has not answered."""
MAX_STARTS = 10
"""Starts of a run's process without a finished assignment, after which its assignments fail."""
MAX_OVERHEAD_BYTES = 64 * 1024
"""A batch's body may be larger than its numbers by this much."""


class RestProcess:
    """The process that trains the rest; one call at a time, from any thread."""

    def __init__(self, setup: Json) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
        )
        self._lock = threading.Lock()
        self.is_lost = False
        with self._lock:
            self._write(setup, b"")

    def call(self, header: Json, body: bytes = b"") -> bytes:
        """Returns the process's answer.

        Raises:
            SplitSessionError: the process has ended, or does not answer.
            EdgeflError: that it answered with.
        """
        if not self._lock.acquire(timeout=STUCK_S):
            self.kill()
            raise self._make_loss_error()
        try:
            self._write(header, body)
            answer = self._read()
        finally:
            self._lock.release()
        if "error" in answer[0]:
            raise error_from_code(str(answer[0]["error"]), str(answer[0]["message"]))
        return answer[1]

    def kill(self) -> None:
        self.is_lost = True
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what it did not read is still in the pipe's buffer
                log.debug("the rest's process ended in the middle of a message")

    def _write(self, header: Json, body: bytes) -> None:
        try:
            write_message(cast(BinaryIO, self._process.stdin), header, body)
        except (OSError, ValueError):
            raise self._make_loss_error() from None

    def _read(self) -> tuple[Json, bytes]:
        try:
            answer = read_message(cast(BinaryIO, self._process.stdout), MAX_BODY_BYTES)
        except (OSError, ValueError):
            answer = None
        if answer is None:
            raise self._make_loss_error()
        return answer

    def _make_loss_error(self) -> SplitSessionError:
        self.is_lost = True
        return SplitSessionError(
            "the process that trains the rest of the network has ended; the assignment begins again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """What a board says of a batch: its session, its number in it from 0, and the number of examples."""

    session: str
    number: int
    num_examples: int


@dataclass(slots=True, kw_only=True)
class SplitAssignment:
    """An assignment that is out, and its present session.

    Attributes:
        device_id: who may send batches.
        opening: message that opens a session in the process; with `rest_body`, the rest of the round's model.
        max_examples, max_bytes: of one batch.
        max_requests: of one session; None where seconds decide, or nobody knows the device's examples.
        session, process: of the present session, None before the first batch.
        next_number: of its next batch.
        last_answer: to the batch before, which may come again.
        is_busy: a batch is on its way or in work.
        is_removed: it was answered or given up.
        bytes_up, bytes_down: of all sessions.
    """

    device_id: str
    opening: Json
    rest_body: bytes
    max_examples: int
    max_bytes: int
    max_requests: int | None = None
    session: str | None = None
    process: RestProcess | None = None
    next_number: int = 0
    last_answer: bytes = b""
    is_busy: bool = False
    is_removed: bool = False
    bytes_up: int = 0
    bytes_down: int = 0


class SplitRun:
    """The coordinator's side of one run. Thread-safe: batches come from the web server, all else from the run.

    Args:
        split: the cut network.
        header: of the run's instructions: task, options, seed and split.
        model_spec: of the whole network.
        start_process: starts the process of the rest, with `header`.
    """

    def __init__(
        self,
        split: SplitModel,
        header: Json,
        model_spec: ModelSpec,
        *,
        start_process: Callable[[Json], RestProcess] = RestProcess,
    ) -> None:
        self._split, self._header, self._model_spec, self._start_process = split, header, model_spec, start_process
        self._rest_codec = make_codec("dense", split.rest)
        self._num_requests = 1 if split.section.labels == "coordinator" else 2
        self._assignments: dict[str, SplitAssignment] = {}
        self._rest_body: tuple[int, bytes] | None = None
        self._process: RestProcess | None = None
        self._num_starts = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def add(
        self,
        wire_id: str,
        instruction: TrainInstruction,
        source: ModelProvider,
        *,
        num_examples: int | None = None,
    ) -> None:
        """Adds an assignment that is dispatched; without effect if its model is no longer the newest.

        `num_examples` are those that the device is known to have.
        """
        if instruction.base_version != source.version:
            return
        if self._rest_body is None or self._rest_body[0] != source.version:
            model = source.model()
            rest = {spec.name: model[spec.name] for spec in self._split.rest}
            self._rest_body = source.version, self._rest_codec.encode(rest, derive_rng("rest"))
        plan, block = instruction.plan, instruction.block
        batch_size = plan.batch_size
        most_values = max(math.prod(self._split.cut.activation_shape), self._split.cut.num_outputs)
        # Its data may have grown since it was counted.
        most_iterations = (
            plan.iterations if num_examples is None else plan.count_iterations(int(MAX_GROWTH_RATIO * num_examples))
        )
        seed_source = [instruction.device_id] if block is None else ["block", block]
        assignment = SplitAssignment(
            device_id=instruction.device_id,
            opening={
                "do": "open",
                "plan": plan.to_json(),
                "seed_key": [self._header["seed"], instruction.base_version, *seed_source],
            },
            rest_body=self._rest_body[1],
            max_examples=batch_size,
            max_bytes=min(MAX_SPLIT_BYTES, batch_size * (SPLIT_LABEL_BYTES + 4 * most_values) + MAX_OVERHEAD_BYTES),
            max_requests=None if most_iterations is None else self._num_requests * most_iterations,
        )
        with self._lock:
            self._assignments[wire_id] = assignment

    def remove(self, wire_id: str) -> None:
        """Removes an assignment that was answered or given up; its session ends."""
        with self._lock:
            assignment = self._assignments.pop(wire_id, None)
            if assignment is not None:
                assignment.is_removed = True
        if assignment is not None and not assignment.is_busy:
            self.end(assignment)

    def claim(self, device_id: str, wire_id: str) -> SplitAssignment:
        """Returns the assignment for one batch of a device, busy until `release`.

        Raises:
            NotFoundError: it is not out, or not to this device.
            UsageError: another batch of it is on its way.
        """
        with self._lock:
            assignment = self._assignments.get(wire_id)
            if assignment is None or assignment.device_id != device_id:
                raise NotFoundError(f"no assignment {wire_id[:80]!r} of this device is out")
            if assignment.is_busy:
                raise UsageError("another batch of this assignment is on its way; send one after the other")
            assignment.is_busy = True
        return assignment

    def release(self, assignment: SplitAssignment) -> bool:
        """Ends a batch; returns whether the assignment was removed meanwhile, and must be ended by `end`."""
        with self._lock:
            assignment.is_busy = False
            return assignment.is_removed

    def end(self, assignment: SplitAssignment) -> None:
        """Ends the session of a removed assignment; may block."""
        self._close_session(assignment)

    def exchange(self, assignment: SplitAssignment, request: SplitRequest, body: bytes) -> bytes:
        """Returns the answer to one batch of a claimed assignment.

        Raises:
            SplitSessionError: the session is lost: the device must begin the assignment again, in another one.
            EdgeflError: the batch makes no sense.
        """
        if not 1 <= request.num_examples <= assignment.max_examples:
            raise DataError(
                f"a batch has 1 to {assignment.max_examples} examples in this assignment, got {request.num_examples}"
            )
        if request.session != assignment.session:
            if request.number != 0:
                raise SplitSessionError("this coordinator does not know the session; the assignment begins again")
            self._open_session(assignment, request.session)
        process = assignment.process
        if process is None or process.is_lost:
            raise SplitSessionError("the rest of the network is lost with its process; the assignment begins again")
        if request.number == assignment.next_number - 1:
            return assignment.last_answer
        if request.number != assignment.next_number:
            raise SplitSessionError(
                f"batch {assignment.next_number} is next, got {request.number}; the assignment begins again"
            )
        if assignment.max_requests is not None and request.number >= assignment.max_requests:
            raise DataError(f"this assignment has at most {assignment.max_requests} batches, got another one")
        answer = process.call(
            {
                "do": self._name_request(request.number),
                "session": request.session,
                "num_examples": request.num_examples,
            },
            body,
        )
        assignment.next_number, assignment.last_answer = request.number + 1, answer
        assignment.bytes_up, assignment.bytes_down = (
            assignment.bytes_up + len(body),
            assignment.bytes_down + len(answer),
        )
        return answer

    def join(
        self, wire_id: str, header: Mapping[str, object], iterations: object, body: bytes
    ) -> tuple[bytes, int, int]:
        """Returns the update of the whole network of a device's, and the bytes of its batches up and down.

        Args:
            wire_id: of the assignment.
            header: of the device's reply, with its session.
            iterations: that the device reports.
            body: its own displacement.

        Raises:
            SplitSessionError: the rest that was trained beside it is lost.
            ValueError: the device reports other iterations than it sent batches for.
            CodecError: the body is damaged.
        """
        with self._lock:
            assignment = self._assignments.get(wire_id)
        process = None if assignment is None else assignment.process
        if assignment is None or process is None or header.get("split_session") != assignment.session:
            raise SplitSessionError("the rest that was trained beside it is lost")
        if iterations != assignment.next_number / self._num_requests:
            raise ValueError(
                f"it reports {iterations!r:.20} iterations, its batches were "
                f"{assignment.next_number / self._num_requests:g}"
            )
        rest = self._decode_rest(process.call({"do": "finish", "session": assignment.session}))
        self._num_starts = 0
        joined = join_displacements(body, rest, self._split.front, self._model_spec)
        return joined, assignment.bytes_up, assignment.bytes_down

    def close(self) -> None:
        """Ends the process, and all sessions with it."""
        with self._lock:
            self._is_closed = True
            self._assignments.clear()
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _name_request(self, number: int) -> str:
        if self._num_requests == 1:
            return "step"
        return "backward" if number % 2 else "forward"

    def _decode_rest(self, body: bytes) -> dict[str, Array]:
        return cast("dict[str, Array]", decode_body(body, self._split.rest))

    def _open_session(self, assignment: SplitAssignment, session: str) -> None:
        self._close_session(assignment)
        process = self._get_process()
        process.call({**assignment.opening, "session": session}, assignment.rest_body)
        assignment.session, assignment.process = session, process
        assignment.next_number, assignment.last_answer = 0, b""

    def _close_session(self, assignment: SplitAssignment) -> None:
        process, session = assignment.process, assignment.session
        assignment.session = assignment.process = None
        assignment.last_answer = b""
        if process is not None and not process.is_lost:
            try:
                process.call({"do": "close", "session": session})
            except SplitSessionError:
                log.debug("a session ended with its process")

    def _get_process(self) -> RestProcess:
        """Returns the process, started if it has ended."""
        with self._lock:
            if self._is_closed:
                raise NotFoundError("the run is over here")
            if self._process is not None and not self._process.is_lost:
                return self._process
            if self._num_starts >= MAX_STARTS:
                raise TaskError(
                    f"the process that trains the rest of the network ended {self._num_starts} times; "
                    "see the coordinator's log"
                )
            if self._process is not None:
                log.warning("the process that trains the rest of the network has ended; starting it again")
                self._process.close()
            self._num_starts += 1
            try:
                self._process = self._start_process({key: self._header[key] for key in ("task", "options", "split")})
            except OSError as error:
                raise TaskError(f"the rest of the network cannot be trained here: {error.strerror}") from None
            return self._process


class SplitRuns:
    """The split runs that are on, by the wire ids of their assignments: `RUN/...`. Thread-safe."""

    def __init__(self) -> None:
        self._runs: dict[str, SplitRun] = {}

    def open(self, run_id: str, run: SplitRun) -> None:
        self._runs[run_id] = run

    def close(self, run_id: str) -> None:
        """Closes a run's side here, if there is one."""
        if (run := self._runs.pop(run_id, None)) is not None:
            run.close()

    def get(self, wire_id: str) -> SplitRun:
        """Returns the run of an assignment.

        Raises:
            NotFoundError: it is not on, or not yet.
        """
        run = self._runs.get(wire_id.partition("/")[0])
        if run is None:
            raise NotFoundError(f"the run of assignment {wire_id[:80]!r} is not on")
        return run
