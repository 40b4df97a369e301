"""Interface of a training backend: takes jobs, returns their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgefl.core.types import PeerMessage, Tensors, TrainInstruction


class TrainingFailedError(Exception):
    """A device failed an instruction; the text is the device's error reply."""


@dataclass(slots=True, kw_only=True, eq=False)
class EncodedModel:
    """One encoded model version, shared by all jobs that start from it.

    `owner` is the device whose own model it is, empty for the global one.
    """

    version: int
    body: bytes
    owner: str = ""

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the model within the run."""
        return self.version, self.owner


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingJob:
    """The training of one instruction. `iterations` may shrink until `start` is called, never after."""

    instruction: TrainInstruction
    model: EncodedModel
    iterations: int = 0
    is_started: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a job. `num_bytes` covers its encoded update and the peer messages."""

    tensors: Tensors
    num_bytes: int
    num_examples: int
    loss: float | None = None
    messages: tuple[PeerMessage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """Metrics of one evaluated model."""

    num_examples: int
    loss: float
    accuracy: float


class TrainingBackend(Protocol):
    """Trains, here or in other processes. A result depends on its job alone, not on worker or time."""

    def start(self, job: TrainingJob) -> None:
        """Announces a job whose result will be requested; may start it."""

    def get_result(self, job: TrainingJob) -> TrainingResult:
        """Returns the job's result; blocks until it is available.

        Raises:
            TrainingFailedError: the device failed the instruction.
        """

    def cancel(self, job: TrainingJob) -> None:
        """Cancels a started job; the device's state is as before the job."""

    def evaluate(self, device_id: str | None, model: EncodedModel) -> EvaluationMetrics:
        """Evaluates a model on a device's own test split, or on the coordinator's data for None.

        Raises:
            TrainingFailedError: there is nothing to test on, or the model has diverged.
        """

    def close(self) -> None: ...
