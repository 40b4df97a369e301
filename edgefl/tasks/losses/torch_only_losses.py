"""Losses that only torch computes: of sequences that no position is known of, and of views of the same example."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Array
from edgefl.tasks.losses.class_losses import IGNORED_CLASS
from edgefl.tasks.losses.loss import Loss

BLANK = 0
"""Class of a position that says nothing."""
NUM_VIEWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOnlyLoss(Loss):
    """A loss without a form in NumPy."""

    @property
    def needs_torch(self) -> bool:
        return True

    def compute(self, outputs: Array, targets: Array) -> tuple[Array, Array]:  # noqa: ARG002 torch computes it
        raise ConfigError(f"loss {self.name} needs a model of torch; one in NumPy takes another loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ctc(TorchOnlyLoss):
    """Connectionist temporal classification: -log p of a sequence of classes, whatever positions they are at.

    Outputs are logits [n, classes, positions], of which class 0 is the blank. Targets are whole numbers from 1,
    [n, labels], and a shorter sequence is filled up with -100. The loss of an example is divided by the length of its
    sequence, as `torch.nn.CTCLoss` does.

    Source: Graves et al., Connectionist Temporal Classification, ICML 2006, equations 3 to 8.
    """

    name = "ctc"

    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:
        if targets.ndim != 2 or targets.dtype.kind not in "iu":
            raise TaskError(
                f"targets of {self.name} must be whole numbers [n, labels], shorter sequences filled up with "
                f"{IGNORED_CLASS}, got {targets.dtype} {list(targets.shape)}"
            )
        labels = targets.astype(np.int64, copy=False)
        is_label = labels != IGNORED_CLASS
        if wrong := np.argwhere(is_label & (labels <= BLANK)).tolist():
            row, place = wrong[0]
            raise TaskError(
                f"targets of {self.name} must be classes from 1 ({BLANK} is the blank), or {IGNORED_CLASS} behind "
                f"the last one, got {labels[row, place]} in row {row}"
            )
        if (is_label[:, 1:] > is_label[:, :-1]).any():
            row = int(np.argmax((is_label[:, 1:] > is_label[:, :-1]).any(axis=1)))
            raise TaskError(
                f"targets of {self.name} may have {IGNORED_CLASS} only behind the last label, row {row} has one "
                "after it"
            )
        if shape is not None:
            self._check_shape(labels, is_label, shape)
        return labels

    def _check_shape(self, labels: Array, is_label: Array, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or shape[0] != len(labels):
            found = ", ".join(map(str, ("n", *shape[1:])))
            raise TaskError(f"with {self.name} the model's outputs must be [n, classes, positions], got [{found}]")
        if labels.size and int(labels.max()) >= shape[1]:
            raise TaskError(f"a target of {self.name} is {labels.max()}, the model has classes 0 to {shape[1] - 1}")
        # Between two labels that are the same there must be a blank.
        repeats = (labels[:, 1:] == labels[:, :-1]) & is_label[:, 1:]
        needed = is_label.sum(axis=1) + repeats.sum(axis=1)
        if len(needed) and int(needed.max()) > shape[2]:
            raise TaskError(
                f"a target of {self.name} needs {needed.max()} positions, the model's outputs have {shape[2]}; give "
                "it more, or shorter sequences"
            )

    def count_right(self, outputs: Array, targets: Array) -> float:
        """An example is right where the best class of each position, without repeats and blanks, is its sequence."""
        best = outputs.argmax(axis=1)
        is_label = best != BLANK
        is_label[:, 1:] &= best[:, 1:] != best[:, :-1]
        return float(
            sum(
                np.array_equal(found[counts], expected[expected != IGNORED_CLASS])
                for found, counts, expected in zip(best, is_label, targets, strict=True)
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrastive(TorchOnlyLoss):
    """Normalised temperature-scaled cross-entropy (NT-Xent) between two views of each example and all others' views.

    Outputs are [n, 2, size]: what the network makes of both views. The targets of the data set are not used. Only the
    direction of an output counts; the other views of the batch are what a view is told apart from.

    Source: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020, equation 1.

    Attributes:
        temperature: above 0; cosines are divided by it.
    """

    name = "contrastive"

    temperature: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature < np.inf:
            raise ConfigError(f"temperature of contrastive must be finite and above 0, got {self.temperature:g}")

    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:
        if shape is not None and (len(shape) != 3 or shape[1] != NUM_VIEWS):
            raise TaskError(
                f"with {self.name} the model's outputs must be [n, {NUM_VIEWS}, size], both views of each example, "
                f"got [{', '.join(map(str, ('n', *shape[1:])))}]"
            )
        return np.zeros(len(targets), np.int64)
