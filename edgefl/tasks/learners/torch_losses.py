"""Losses in torch, which differentiates them: the same numbers as `Loss.compute`, on any accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Array
from edgefl.tasks.losses.class_losses import IGNORED_CLASS, CrossEntropy
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.multi_task import LossHead, MultiTask
from edgefl.tasks.losses.registry import FunctionLoss
from edgefl.tasks.losses.torch_only_losses import BLANK, NUM_VIEWS, Contrastive, Ctc
from edgefl.tasks.losses.value_losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    Huber,
    Poisson,
    Quantile,
    Reconstruction,
    SquaredError,
)
from edgefl.tasks.registry import import_torch

if TYPE_CHECKING:
    import torch


_FUNCTIONS: Mapping[type[Loss], str] = MappingProxyType(
    {
        SquaredError: "mse_loss",
        AbsoluteError: "l1_loss",
        BinaryCrossEntropy: "binary_cross_entropy_with_logits",
    }
)
"""Functions of torch that take nothing but outputs and targets."""


class TorchLoss:
    """A loss over a module's outputs; targets are NumPy arrays as `Loss.convert_targets` returns them."""

    def __init__(self, loss: Loss, device: torch.device) -> None:
        self._loss, self._device, self._torch = loss, device, import_torch()
        self._functional = self._torch.nn.functional
        self._heads: list[tuple[LossHead, TorchLoss]] = [
            (head, TorchLoss(head.loss, device)) for head in (loss.heads if isinstance(loss, MultiTask) else ())
        ]

    def compute_mean(self, outputs: torch.Tensor, targets: Array, weights: Array | None = None) -> torch.Tensor:
        """Returns the mean of weight times loss over the examples."""
        if weights is None and self._is_plain(targets):
            # The one kernel that classifiers have always been trained with, to the last bit.
            mean: torch.Tensor = self._functional.cross_entropy(outputs, self._to_tensor(targets))
            return mean
        return self._compute_weighted(outputs, targets, weights).mean()

    def compute_sum(self, outputs: torch.Tensor, targets: Array, weights: Array | None = None) -> torch.Tensor:
        """Returns the sum of weight times loss over the examples."""
        if weights is None and self._is_plain(targets):
            total: torch.Tensor = self._functional.cross_entropy(outputs, self._to_tensor(targets), reduction="sum")
            return total
        return self._compute_weighted(outputs, targets, weights).sum()

    def compute(self, outputs: torch.Tensor, targets: Array) -> torch.Tensor:
        """Returns the loss of each example, [n].

        Raises:
            TaskError: a user's function returns something else.
        """
        if self._heads:
            return self._compute_heads(outputs, targets)
        return self.compute_from(outputs, self._to_tensor(targets))

    def compute_from(self, outputs: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Returns the loss of each example, [n], of targets in torch; raises as `compute`."""
        loss = self._loss
        if isinstance(loss, FunctionLoss):
            return self._call_function(loss.function, outputs, expected)
        if isinstance(loss, Ctc):
            return self._compute_ctc(outputs, expected)
        if isinstance(loss, Contrastive):
            return self._compute_contrastive(loss, outputs)
        if isinstance(loss, CrossEntropy):
            return self._compute_cross_entropy(loss, outputs, expected)
        elements: torch.Tensor = self._compute_elements(loss, outputs, expected)
        return elements.reshape(len(outputs), -1).mean(dim=1)

    def _is_plain(self, targets: Array) -> bool:
        return isinstance(self._loss, CrossEntropy) and self._loss.is_plain and targets.ndim == 1

    def _to_tensor(self, array: Array) -> torch.Tensor:
        tensor: torch.Tensor = self._torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
        return tensor

    def _compute_weighted(self, outputs: torch.Tensor, targets: Array, weights: Array | None) -> torch.Tensor:
        values = self.compute(outputs, targets)
        return values if weights is None else values * self._to_tensor(weights.astype(np.float32))

    def _compute_heads(self, outputs: torch.Tensor, targets: Array) -> torch.Tensor:
        total = outputs.new_zeros(len(outputs))
        for head, loss in self._heads:
            # A copy, for torch takes no field of one example in the midst of others.
            of_head, expected = outputs[:, head.columns], targets[head.name].copy()
            if isinstance(head.loss, FunctionLoss) and head.num_outputs == expected.ndim == 1:
                of_head = of_head[:, 0]  # the shape of the targets: a user's function would broadcast to [n, n]
            total = total + head.weight * loss.compute(of_head, expected)
        return total

    def _compute_cross_entropy(
        self, loss: CrossEntropy, outputs: torch.Tensor, classes: torch.Tensor
    ) -> torch.Tensor:
        weights = self._to_tensor(np.array(loss.class_weights, np.float32)) if loss.class_weights else None
        values: torch.Tensor = self._functional.cross_entropy(
            outputs,
            classes,
            weight=None if weights is None else weights.to(outputs.dtype),
            label_smoothing=loss.label_smoothing,
            ignore_index=IGNORED_CLASS,
            reduction="none",
        )
        counts = (classes != IGNORED_CLASS).reshape(len(outputs), -1).sum(dim=1).clamp(min=1)
        return values.reshape(len(outputs), -1).sum(dim=1) / counts

    def _compute_ctc(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        is_label = labels != IGNORED_CLASS
        lengths = is_label.sum(dim=1)
        values: torch.Tensor = self._functional.ctc_loss(
            outputs.log_softmax(dim=1).permute(2, 0, 1),
            labels.where(is_label, labels.new_tensor(BLANK + 1)),
            lengths.new_full((len(outputs),), outputs.shape[2]),
            lengths,
            blank=BLANK,
            reduction="none",
        )
        return values / lengths.clamp(min=1)

    def _compute_contrastive(self, loss: Contrastive, outputs: torch.Tensor) -> torch.Tensor:
        count = len(outputs)
        views = self._functional.normalize(outputs.transpose(0, 1).reshape(NUM_VIEWS * count, -1), dim=1)
        cosines = views @ views.T / loss.temperature
        numbers = self._torch.arange(len(views), device=views.device)
        cosines = cosines.masked_fill(numbers == numbers[:, None], -np.inf)
        other_views = numbers.roll(count)
        values: torch.Tensor = self._functional.cross_entropy(cosines, other_views, reduction="none")
        return values.reshape(NUM_VIEWS, count).mean(dim=0)

    def _compute_elements(self, loss: Loss, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if isinstance(loss, Reconstruction):
            return self._compute_elements(loss.of, outputs, targets)
        if isinstance(loss, Quantile):
            levels, missing = (
                self._to_tensor(np.array(loss.quantiles, np.float32)).to(outputs.dtype),
                targets - outputs,
            )
            return self._torch.maximum(levels * missing, (levels - 1.0) * missing)
        if isinstance(loss, Poisson):
            return outputs.exp() - targets * outputs + self._torch.xlogy(targets, targets) - targets
        if isinstance(loss, Huber):
            return self._functional.huber_loss(outputs, targets, delta=loss.delta, reduction="none")
        if type(loss) not in _FUNCTIONS:
            raise TaskError(f"loss {loss.name} has no form for torch")
        return getattr(self._functional, _FUNCTIONS[type(loss)])(outputs, targets, reduction="none")

    def _call_function(
        self, function: Callable[[Any, Any], Any], outputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        try:
            values = function(outputs, targets)
        except Exception as error:  # a user's function may raise anything
            raise TaskError(f"the task's loss raised {type(error).__name__}: {error}") from error
        shape = tuple(getattr(values, "shape", ())) if self._torch.is_tensor(values) else None
        if shape != (len(outputs),):
            found = type(values).__name__ if shape is None else f"a tensor {list(shape)}"
            raise TaskError(f"the task's loss must return one number for each example, [{len(outputs)}], got {found}")
        result: torch.Tensor = values
        return result
