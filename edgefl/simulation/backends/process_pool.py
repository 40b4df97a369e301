"""Training in several processes of this machine, while virtual time goes on.

A worker gets jobs on stdin and gives results on stdout. A message is two lengths (u32, little-endian), a JSON header
and a body. A model travels once; later jobs start from the last one received. Torch and BLAS use one thread: several
such processes share the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgefl.compression.error_feedback import is_stateful_training
from edgefl.core.errors import RunFailedError
from edgefl.core.types import Json, ModelSpec, PeerMessage
from edgefl.simulation.backends.in_process import InProcessBackend, make_result
from edgefl.simulation.backends.partitioned_data import FleetData, load_data, save_data
from edgefl.simulation.backends.trainer import (
    EncodedModel,
    EvaluationMetrics,
    SimulatedTrainer,
    TaskSpec,
    TrainingFailedError,
    TrainingJob,
    TrainingResult,
)
from edgefl.simulation.backends.training_requests import (
    SINGLE_THREAD_ENVIRONMENT,
    instruction_to_json,
    make_setup,
    make_trainer,
    make_training_request,
    read_scores,
    read_update,
    run_request,
)
from edgefl.strategies.peer_algorithms.gossip_node import decode_messages, encode_messages
from edgefl.tasks.adaptation.base_file import encode_base, load_base

CONFIG_FILE = "site.json"
BASE_FILE = "base.safetensors"
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


def main() -> None:
    """Serves until stdin ends."""
    folder = Path(sys.argv[1])
    setup = json.loads((folder / CONFIG_FILE).read_text())
    trainer = make_trainer(setup, load_data(folder), load_base(folder / BASE_FILE))
    # A task's output must not get between our messages.
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    WorkerServer(trainer, sys.stdin.buffer, sink).serve()


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
            messages, body = decode_messages(header.get("messages", []), body)
            if body:
                self._model = EncodedModel(version=header["version"], body=body, owner=header["subject"])
            self._send_reply(header, messages)

    def _read_requests(self) -> None:
        while (message := read_message(self._source)) is not None:
            if message[0]["do"] == "undo":
                self._cancelled_ids.add(message[0]["of"])
            self._requests.put(message)
        self._requests.put(None)

    def _send_reply(self, header: Json, messages: tuple[PeerMessage, ...]) -> None:
        ticket = header["ticket"]
        header_fields, body = self._run_request(header, messages)
        write_message(self._sink, {"ticket": ticket, **header_fields}, body)

    def _run_request(self, header: Json, messages: tuple[PeerMessage, ...]) -> tuple[Json, bytes]:
        self._cancelled_ids.discard(header.get("of", -1))
        ticket = header["ticket"]
        return run_request(self._trainer, header, messages, self._model, lambda: ticket in self._cancelled_ids)


class WorkerProcess:
    """One training process. A thread reads its replies, so that neither side blocks the other."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "edgefl.simulation.backends.process_pool", str(folder)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **SINGLE_THREAD_ENVIRONMENT, "PYTHONPATH": path},
        )
        self._replies: dict[int, tuple[Json, bytes]] = {}
        self._discarded_ids: set[int] = set()
        self._replies_changed = threading.Condition()
        self._has_ended = False
        self._num_requests, self._model_key = 0, (-1, "")
        self._thread = threading.Thread(target=self._receive_replies, name="training worker", daemon=True)
        self._thread.start()

    def send_request(
        self, header: Json, model: EncodedModel | None = None, messages: Sequence[PeerMessage] = ()
    ) -> int:
        """Sends a request and returns its ticket for `wait_for_reply`."""
        self._num_requests += 1
        body = b""
        if model is not None and model.key != self._model_key:
            self._model_key, body = model.key, model.body
            header = {**header, "version": model.version, "subject": model.owner}
        if messages:
            message_headers, body = encode_messages(messages, body)
            header = {**header, "messages": message_headers}
        assert self._process.stdin is not None
        try:
            write_message(self._process.stdin, {**header, "ticket": self._num_requests}, body)  # type: ignore[arg-type]  # an unbuffered pipe writes like any binary file
        except OSError as error:
            raise RunFailedError(f"a training process cannot be reached any more: {error}") from None
        return self._num_requests

    def wait_for_reply(self, request_id: int) -> tuple[Json, bytes]:
        """Returns the reply to a request; blocks until it is available.

        Raises:
            TrainingFailedError: the request failed.
            RunFailedError: the process has ended.
        """
        with self._replies_changed:
            self._replies_changed.wait_for(lambda: request_id in self._replies or self._has_ended)
            if request_id not in self._replies:
                raise RunFailedError(f"a training process ended with code {self._process.wait()}")
            header, body = self._replies.pop(request_id)
        if "error" in header:
            raise TrainingFailedError(header["error"])
        return header, body

    def discard_reply(self, request_id: int) -> None:
        """Drops a reply, present or future."""
        with self._replies_changed:
            if self._replies.pop(request_id, None) is None:
                self._discarded_ids.add(request_id)

    def close(self) -> None:
        """Ends the process; kills it in the middle of a job."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # Data that the process did not read is still in the pipe's buffer, and cannot be written now.
                with contextlib.suppress(OSError):
                    pipe.close()

    def _receive_replies(self) -> None:
        assert self._process.stdout is not None
        while (message := read_message(self._process.stdout)) is not None:  # type: ignore[arg-type]  # as above
            with self._replies_changed:
                if message[0]["ticket"] in self._discarded_ids:
                    self._discarded_ids.discard(message[0]["ticket"])
                else:
                    self._replies[message[0]["ticket"]] = message
                self._replies_changed.notify_all()
        with self._replies_changed:
            self._has_ended = True
            self._replies_changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingJob:
    worker: WorkerProcess
    request_id: int
    iterations: int


class ProcessPoolBackend:
    """Implements `TrainingBackend` with several workers.

    A device with client state always has the same worker; others get the least loaded one.

    Args:
        task_spec: the task to train.
        data: the fleet's data.
        shard_indices: device id -> its shard's place in the data.
        model_spec: of the task.
        num_workers: number of processes.
        in_process: evaluates on the coordinator's data while the workers train.
    """

    def __init__(
        self,
        task_spec: TaskSpec,
        data: FleetData,
        *,
        shard_indices: Mapping[str, int],
        model_spec: ModelSpec,
        num_workers: int,
        in_process: InProcessBackend,
    ) -> None:
        self._shard_indices, self._model_spec, self._in_process = shard_indices, model_spec, in_process
        self._folder = tempfile.TemporaryDirectory(prefix="edgefl-training-")
        folder = Path(self._folder.name)
        save_data(folder, data)
        setup = make_setup(task_spec, shard_indices)
        (folder / CONFIG_FILE).write_text(json.dumps(setup))
        (folder / BASE_FILE).write_bytes(encode_base(task_spec.base))
        self._workers = [WorkerProcess(folder) for _ in range(num_workers)]
        self._assigned_iterations = dict.fromkeys(self._workers, 0)
        self._pinned_devices: set[str] = set()
        self._pending_jobs: dict[TrainingJob, _PendingJob] = {}

    def start(self, job: TrainingJob) -> None:
        request = make_training_request(job)
        worker = self._select_worker(job)
        self._assigned_iterations[worker] += job.iterations
        ticket = worker.send_request(request, job.model, job.instruction.plan.messages)
        self._pending_jobs[job] = _PendingJob(worker=worker, request_id=ticket, iterations=job.iterations)

    def get_result(self, job: TrainingJob) -> TrainingResult:
        pending = self._pending_jobs.pop(job)
        header, body = pending.worker.wait_for_reply(pending.request_id)
        return make_result(read_update(header, body), self._model_spec)

    def cancel(self, job: TrainingJob) -> None:
        pending = self._pending_jobs.pop(job, None)
        if pending is None:
            return
        self._assigned_iterations[pending.worker] -= pending.iterations
        pending.worker.discard_reply(pending.request_id)
        pending.worker.discard_reply(
            pending.worker.send_request(
                {"do": "undo", "of": pending.request_id, "order": instruction_to_json(job.instruction)}
            )
        )

    def evaluate(self, device_id: str | None, model: EncodedModel) -> EvaluationMetrics:
        if device_id is None:
            return self._in_process.evaluate(None, model)
        worker = self._get_pinned_worker(device_id)
        return read_scores(
            *worker.wait_for_reply(worker.send_request({"do": "evaluate", "device": device_id}, model))
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()

    def _select_worker(self, job: TrainingJob) -> WorkerProcess:
        device_id = job.instruction.device_id
        if is_stateful_training(job.instruction.plan, job.instruction.codec or "dense", self._model_spec):
            self._pinned_devices.add(device_id)
        if device_id in self._pinned_devices:
            return self._get_pinned_worker(device_id)
        return min(self._workers, key=self._assigned_iterations.__getitem__)

    def _get_pinned_worker(self, device_id: str) -> WorkerProcess:
        return self._workers[self._shard_indices[device_id] % len(self._workers)]


if __name__ == "__main__":
    main()
