"""The training behind a virtual board, as the fleet sees it: somebody who is given a job and asked for its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgefl.types import Assignment, EdgeMessage, Tensors


class FailedJobError(Exception):
    """A board could not do what it was asked; the text is what it would answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sent:
    """One version of the model as it travels; shared by all jobs that start from it.

    `subject` is the device whose own model it is, empty for the global one.
    """

    version: int
    body: bytes
    subject: str = ""

    @property
    def key(self) -> tuple[int, str]:
        """Which model of the run it is."""
        return self.version, self.subject


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One assignment's training. `iterations` may shrink until `begin` is called, and never after."""

    order: Assignment
    sent: Sent
    iterations: int = 0
    has_begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a job brought. `num_bytes` are those of its encoded update, and of the messages in the outbox."""

    tensors: Tensors
    num_bytes: int
    num_examples: int
    loss: float | None = None
    outbox: tuple[EdgeMessage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How good a model is."""

    num_examples: int
    loss: float
    accuracy: float


class Training(Protocol):
    """Trains, here or in other processes. The result depends on the job alone, never on who trains or when."""

    def begin(self, job: Job) -> None:
        """Learns that a job will be wanted; may start on it."""

    def finish(self, job: Job) -> Trained:
        """Returns the job's result, as soon as it is there.

        Raises:
            FailedJobError: the board cannot do it.
        """

    def cancel(self, job: Job) -> None:
        """Learns that a job that was begun is not wanted; the board's state is as if it had never been asked."""

    def evaluate(self, device_id: str | None, sent: Sent) -> Scores:
        """Returns how good a model is on a board's own test split, or on the coordinator's data for None.

        Raises:
            FailedJobError: there is nothing to test on, or the model has diverged.
        """

    def close(self) -> None: ...
