"""Training in this process: one job after the other, each when its result is wanted."""

from __future__ import annotations

from edgefl.compression.decoding import decode_body
from edgefl.simulation.training import FailedJobError, Job, Scores, Sent, Trained
from edgefl.simulation.workbench import Product, Workbench
from edgefl.types import LazyTensors, Shapes


class InProcess:
    """Implements `Training` on a workbench. What is begun waits, so nothing that is cancelled was ever done."""

    def __init__(self, bench: Workbench, shapes: Shapes) -> None:
        self._bench, self._shapes = bench, shapes

    def begin(self, job: Job) -> None: ...

    def finish(self, job: Job) -> Trained:
        try:
            return trained(self._bench.train(job.order, job.sent, job.iterations), self._shapes)
        except Exception as error:  # the boundary of one assignment, as on a board
            raise FailedJobError(reason(error)) from error

    def cancel(self, job: Job) -> None: ...

    def evaluate(self, device_id: str | None, sent: Sent) -> Scores:
        try:
            return self._bench.evaluate(device_id, sent)
        except Exception as error:  # likewise
            raise FailedJobError(reason(error)) from error

    def close(self) -> None: ...


def trained(product: Product, shapes: Shapes) -> Trained:
    """Returns an update as the coordinator has it: encoded until somebody looks."""
    body = product.body
    return Trained(
        tensors=LazyTensors(lambda: decode_body(body, shapes)) if body else {},
        num_bytes=len(body) + sum(len(message.body) for message in product.outbox),
        num_examples=product.num_examples,
        loss=product.loss,
        outbox=product.outbox,
    )


def reason(error: Exception) -> str:
    """Returns what a board says when it fails."""
    return f"{type(error).__name__}: {error}"
