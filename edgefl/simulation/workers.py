"""Training in several processes of this machine: what is begun is done while virtual time goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.compression.leftovers import leaves_something
from edgefl.decentralised.mailbag import pack_mail, unpack_mail
from edgefl.errors import RunFailedError
from edgefl.simulation.data import FleetData, save_data
from edgefl.simulation.in_process import InProcess, trained
from edgefl.simulation.training import FailedJobError, Job, Scores, Sent, Trained
from edgefl.simulation.workbench import Product, Trade
from edgefl.simulation.worker import SITE_FILE, order_json, read_message, write_message
from edgefl.types import EdgeMessage, Json, Shapes

log = logging.getLogger(__name__)

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Worker:
    """One training process. What it answers is taken in by a thread, so that neither side waits for the other."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "edgefl.simulation.worker", str(folder)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        )
        self._answers: dict[int, tuple[Json, bytes]] = {}
        self._forgotten: set[int] = set()
        self._changed = threading.Condition()
        self._has_ended = False
        self._tickets, self._sent = 0, (-1, "")
        self._thread = threading.Thread(target=self._listen, name="training worker", daemon=True)
        self._thread.start()

    def ask(self, header: Json, sent: Sent | None = None, inbox: Sequence[EdgeMessage] = ()) -> int:
        """Returns the ticket under which the answer will be there."""
        self._tickets += 1
        body = b""
        if sent is not None and sent.key != self._sent:
            self._sent, body = sent.key, sent.body
            header = {**header, "version": sent.version, "subject": sent.subject}
        if inbox:
            told, body = pack_mail(inbox, body)
            header = {**header, "mail": told}
        assert self._process.stdin is not None
        try:
            write_message(self._process.stdin, {**header, "ticket": self._tickets}, body)  # type: ignore[arg-type]  # an unbuffered pipe writes like any binary file
        except OSError as error:
            raise RunFailedError(f"a training process cannot be reached any more: {error}") from None
        return self._tickets

    def answer(self, ticket: int) -> tuple[Json, bytes]:
        """Returns the answer to a question, as soon as it is there.

        Raises:
            FailedJobError: it is that it could not be done.
            RunFailedError: the process has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: ticket in self._answers or self._has_ended)
            if ticket not in self._answers:
                raise RunFailedError(f"a training process ended with code {self._process.wait()}")
            header, body = self._answers.pop(ticket)
        if "error" in header:
            raise FailedJobError(header["error"])
        return header, body

    def forget(self, ticket: int) -> None:
        """Drops an answer, whether it is there already or will be."""
        with self._changed:
            if self._answers.pop(ticket, None) is None:
                self._forgotten.add(ticket)

    def close(self) -> None:
        """Ends the process; one that is in the middle of a job is killed."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # What the process did not read any more is still in the pipe's buffer, and cannot be written now.
                with contextlib.suppress(OSError):
                    pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        while (message := read_message(self._process.stdout)) is not None:  # type: ignore[arg-type]  # as above
            with self._changed:
                if message[0]["ticket"] in self._forgotten:
                    self._forgotten.discard(message[0]["ticket"])
                else:
                    self._answers[message[0]["ticket"]] = message
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    worker: Worker
    ticket: int
    iterations: int


class WorkerPool:
    """Implements `Training` with several workers.

    A board that leaves something where it trains always has the same one; others have the one with the least to do.

    Args:
        trade: what is trained.
        data: on what.
        places: device id -> its shard's place in the data.
        shapes: of the task.
        num_workers: how many processes.
        here: evaluates on the coordinator's data while the others train.
    """

    def __init__(
        self,
        trade: Trade,
        data: FleetData,
        *,
        places: Mapping[str, int],
        shapes: Shapes,
        num_workers: int,
        here: InProcess,
    ) -> None:
        self._places, self._shapes, self._here = places, shapes, here
        self._folder = tempfile.TemporaryDirectory(prefix="edgefl-training-")
        folder = Path(self._folder.name)
        save_data(folder, data)
        site = {"task": trade.task, "options": dict(trade.options), "seed": trade.seed, "places": dict(places)}
        (folder / SITE_FILE).write_text(json.dumps(site))
        self._workers = [Worker(folder) for _ in range(num_workers)]
        self._given = dict.fromkeys(self._workers, 0)
        self._bound: set[str] = set()
        self._begun: dict[Job, _Begun] = {}

    def begin(self, job: Job) -> None:
        question = {"do": "train", "order": order_json(job.order), "iterations": job.iterations}
        worker = self._worker_for(job)
        self._given[worker] += job.iterations
        ticket = worker.ask(question, job.sent, job.order.plan.inbox)
        self._begun[job] = _Begun(worker=worker, ticket=ticket, iterations=job.iterations)

    def finish(self, job: Job) -> Trained:
        begun = self._begun.pop(job)
        header, body = begun.worker.answer(begun.ticket)
        outbox, body = unpack_mail(header["mail"], body)
        product = Product(body=body, num_examples=header["num_examples"], loss=header["loss"], outbox=outbox)
        return trained(product, self._shapes)

    def cancel(self, job: Job) -> None:
        begun = self._begun.pop(job, None)
        if begun is None:
            return
        self._given[begun.worker] -= begun.iterations
        begun.worker.forget(begun.ticket)
        begun.worker.forget(begun.worker.ask({"do": "undo", "of": begun.ticket, "order": order_json(job.order)}))

    def evaluate(self, device_id: str | None, sent: Sent) -> Scores:
        if device_id is None:
            return self._here.evaluate(None, sent)
        worker = self._worker(device_id)
        header, _ = worker.answer(worker.ask({"do": "evaluate", "device": device_id}, sent))
        return Scores(**{name: header[name] for name in ("num_examples", "loss", "accuracy")})

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()

    def _worker_for(self, job: Job) -> Worker:
        device_id = job.order.device_id
        if leaves_something(job.order.plan, job.order.codec or "dense", self._shapes):
            self._bound.add(device_id)
        if device_id in self._bound:
            return self._worker(device_id)
        return min(self._workers, key=self._given.__getitem__)

    def _worker(self, device_id: str) -> Worker:
        return self._workers[self._places[device_id] % len(self._workers)]
