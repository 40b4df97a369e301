"""Several losses at once: each of an example's targets has outputs and a loss of its own (multi-task learning)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.heads import Head, is_target, join_targets
from edgefl.core.named_arrays import MAX_NAME_LENGTH
from edgefl.core.types import Array
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.torch_only_losses import Contrastive, Ctc
from edgefl.tasks.losses.value_losses import Quantile, Reconstruction

_MIN_CLASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """One of several losses, and whose it is.

    Attributes:
        name: of the target.
        loss: of it alone.
        weight: of this loss in the sum.
        columns: of the model's outputs [n, columns] that are for it.
    """

    name: str
    loss: Loss
    weight: float
    columns: slice

    @property
    def num_outputs(self) -> int:
        """Outputs of an example."""
        return int(self.columns.stop - self.columns.start)

    def convert(self, targets: Array) -> Array:
        """Returns its targets as its loss takes them; raises as `Loss.convert_targets`."""
        try:
            return self.loss.convert_targets(targets, (len(targets), self.num_outputs))
        except TaskError as error:
            raise TaskError(f"targets {self.name!r}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTask(Loss):
    """The weighted sum of an example's losses, of outputs [n, columns] and targets by name as `join_targets` does."""

    name = "multi-task"

    heads: tuple[LossHead, ...]

    @property
    def needs_torch(self) -> bool:
        return any(head.loss.needs_torch for head in self.heads)

    @property
    def num_outputs(self) -> int:
        """Outputs of an example in all."""
        return int(self.heads[-1].columns.stop)

    def list_names(self) -> str:
        """Returns the names of its targets for messages."""
        return ", ".join(head.name for head in self.heads)

    def find_head(self, name: str) -> LossHead | None:
        """Returns the head of that name; None where there is none."""
        return next((head for head in self.heads if head.name == name), None)

    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:
        found = targets.dtype.names or ()
        if set(found) != {head.name for head in self.heads} or targets.ndim != 1:
            names = ", ".join(found) or f"{targets.dtype} {list(targets.shape)}"
            raise TaskError(f"targets must be a dict of arrays, one for each loss ({self.list_names()}), got {names}")
        if shape is not None and shape != (len(targets), self.num_outputs):
            raise TaskError(
                f"the losses of {self.list_names()} need outputs [n, {self.num_outputs}], the model's are "
                f"[{', '.join(map(str, ('n', *shape[1:])))}]; num_outputs of the task says how many each has"
            )
        return join_targets({head.name: head.convert(targets[head.name]) for head in self.heads})

    def compute(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        values, slopes = np.zeros(len(outputs), outputs.dtype), np.empty_like(outputs)
        for head in self.heads:
            of_head, slope = head.loss.compute(outputs[:, head.columns], targets[head.name])
            values += head.weight * of_head
            slopes[:, head.columns] = head.weight * slope
        return values, slopes

    def check_outputs(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks the shapes of a model's outputs by name.

        Raises:
            TaskError: a name is missing or unknown, or a shape is not [n, outputs], or [n] for one.
        """
        if set(shapes) != {head.name for head in self.heads}:
            raise TaskError(
                f"the model must return outputs by the names of the losses ({self.list_names()}), got "
                f"{', '.join(map(str, shapes)) or 'none'}"
            )
        for head in self.heads:
            shape = shapes[head.name]
            if shape[1:] != (head.num_outputs,) and not (len(shape) == head.num_outputs == 1):
                raise TaskError(
                    f"outputs {head.name!r} of the model must be [n, {head.num_outputs}], got "
                    f"[{', '.join(map(str, ('n', *shape[1:])))}]; num_outputs of the task says how many there are"
                )


def make_head(name: object, loss: Loss, head: Head, start: int) -> LossHead:
    """Returns the head of a target, whose outputs begin at column `start`.

    Raises:
        ConfigError: the name is none of a parameter of Python, the loss is none for it, or needs other outputs.
    """
    if not isinstance(name, str) or not is_target(name):
        raise ConfigError(
            f"a target needs the name of a parameter of Python, such as age, of at most {MAX_NAME_LENGTH} letters in "
            f"ASCII, got {name!r:.70}"
        )
    if isinstance(loss, MultiTask | Ctc | Contrastive | Reconstruction):
        raise ConfigError(f"{loss.name} cannot be one of several; give the task that loss alone")
    usual = len(loss.quantiles) if isinstance(loss, Quantile) else 1
    num_outputs = usual if head.num_outputs is None else head.num_outputs
    if isinstance(loss, CrossEntropy) and num_outputs < _MIN_CLASSES:
        raise ConfigError(
            f"cross-entropy needs two outputs or more, got {num_outputs}; say the number of classes: "
            f'num_outputs = {{"{name}": 6}}'
        )
    if usual > 1 and num_outputs != usual:
        raise ConfigError(f"{usual} quantiles need {usual} outputs, got num_outputs = {num_outputs}")
    return LossHead(name=name, loss=loss, weight=head.weight, columns=slice(start, start + num_outputs))
