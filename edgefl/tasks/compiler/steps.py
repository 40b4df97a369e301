"""A network's training step and evaluation as functions of tensors by name: those of the artefact's graphs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, grad_and_value

from edgefl.core.types import Array
from edgefl.tasks.compiled.artefact import (
    BUFFER,
    GRADIENT,
    INPUTS,
    LOSS,
    NEW,
    NOISE,
    OUTPUTS,
    PARAMETER,
    TARGETS,
    WEIGHTS,
)
from edgefl.tasks.compiler.substitutes import list_noise_shapes, use_noise, use_pure_functions
from edgefl.tasks.learners.torch_learner import list_saved_buffers, list_still_layers
from edgefl.tasks.learners.torch_losses import TorchLoss
from edgefl.tasks.losses.loss import Loss

Tensors = dict[str, torch.Tensor]

_SMALLEST_WEIGHT = 1e-12
"""Of a batch, so that one whose examples all have weight 0 has gradients of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A network, its loss, and the shapes of the random numbers that a batch of the inputs draws.

    What is `constant`, by name, has neither a gradient nor new values.
    """

    module: torch.nn.Module
    loss: Loss
    noise: tuple[tuple[int, ...], ...]
    constant: frozenset[str] = frozenset()

    def train(self, tensors: Mapping[str, torch.Tensor], *, is_pure: bool = True) -> Tensors:
        """Returns `loss`, a `grad:` of each trained parameter, and a `new:` of each buffer.

        Args:
            tensors: by the names of the artefact's inputs, of one type of floating-point numbers.
            is_pure: in functions that a graph can have; else as torch itself computes.
        """
        module = _start_training(self.module, self.constant)
        parameters, first = _select(tensors, PARAMETER), _select(tensors, BUFFER)
        noise = [*_select(tensors, NOISE).values()]

        def compute_loss(changing: Tensors) -> tuple[torch.Tensor, Tensors]:
            # The module changes its buffers in place, or puts others in their places: both are seen here.
            state = {**parameters, **changing, **{name: buffer.clone() for name, buffer in first.items()}}
            with use_pure_functions(noise) if is_pure else use_noise(noise):
                outputs = functional_call(module, state, (tensors[INPUTS],))
                loss = self._compute_mean(outputs, tensors[TARGETS], tensors[WEIGHTS])
            return loss, {name: state[name].detach() for name in first if name not in self.constant}

        changing = {name: tensor for name, tensor in parameters.items() if name not in self.constant}
        gradients, (loss, buffers) = grad_and_value(compute_loss, has_aux=True)(changing)
        return {
            LOSS: loss,
            **{f"{GRADIENT}{name}": gradients[name] for name in changing},
            **{f"{NEW}{name}": buffer for name, buffer in buffers.items()},
        }

    def evaluate(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Returns `outputs` in evaluation mode, and the weighted sum of the losses."""
        state = {**_select(tensors, PARAMETER), **_select(tensors, BUFFER)}
        with torch.no_grad(), use_pure_functions([]):
            outputs = functional_call(self.module.eval(), state, (tensors[INPUTS],))
            values = self._compute_losses(outputs, tensors[TARGETS])
            return {OUTPUTS: outputs, LOSS: (values * tensors[WEIGHTS]).sum()}

    def _compute_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return TorchLoss(self.loss, torch.device("cpu")).compute_from(outputs, targets)

    def _compute_mean(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = weights.sum().clamp(min=_SMALLEST_WEIGHT)
        return (self._compute_losses(outputs, targets) * weights).sum() / total


def make_step(module: torch.nn.Module, loss: Loss, inputs: Array, constant: Collection[str] = ()) -> Step:
    """Returns the step of a module on batches like `inputs`; the tensors named `constant` stay as they are."""
    module = copy.deepcopy(module).cpu()
    training = _start_training(copy.deepcopy(module), constant)
    noise = list_noise_shapes(lambda: training(torch.from_numpy(inputs)))
    return Step(module=module, loss=loss, noise=noise, constant=frozenset(constant))


def get_state(module: torch.nn.Module) -> dict[str, Array]:
    """Returns copies of a module's parameters and saved buffers, by the names of the artefact's inputs."""
    parameters = {f"{PARAMETER}{name}": tensor for name, tensor in module.named_parameters()}
    buffers = {f"{BUFFER}{name}": tensor for name, tensor in list_saved_buffers(module)}
    return {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in {**parameters, **buffers}.items()}


def to_torch(arrays: Mapping[str, Array], dtype: Any = torch.float32) -> Tensors:
    """Returns arrays as tensors of their own; those of floating-point numbers get the type."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _start_training(module: torch.nn.Module, constant: Collection[str]) -> torch.nn.Module:
    module.train()
    for layer in list_still_layers(module, constant):
        layer.eval()
    return module


def _select(tensors: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
