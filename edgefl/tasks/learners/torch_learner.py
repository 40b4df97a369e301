"""Training with torch: any module with cross-entropy behind the `Learner` calls. Imports torch when first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Array, Dataset, ModelSpec, TensorKind, Tensors, TensorSpec
from edgefl.tasks.export.onnx_graph import OnnxGraph
from edgefl.tasks.export.onnx_torch import add_torch_module
from edgefl.tasks.learners.accelerators import import_torch, validate_accelerator

if TYPE_CHECKING:
    import torch

EVALUATION_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchModel:
    """A module with tensors known without torch.

    `tensors` has the order of the module's parameters followed by its buffers; `first_weights` samples them.
    """

    tensors: ModelSpec
    build: Callable[[], torch.nn.Module]
    first_weights: Callable[[ModelSpec, int], dict[str, Array]]
    prepare: Callable[[Array], Array]

    def shapes(self) -> ModelSpec:
        return self.tensors

    def init(self, seed: int) -> dict[str, Array]:
        return self.first_weights(self.tensors, seed)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> TorchLearner:
        import_torch()
        return TorchLearner(self.build(), prepare=self.prepare, accelerator=accelerator, threads=threads)


class TorchLearner:
    """A `Learner` over a module: `parameters` and `gradients` share their storage with it."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        prepare: Callable[[Array], Array] | None = None,
        accelerator: str = "cpu",
        threads: int | None = None,
        evaluation_batch_size: int = EVALUATION_BATCH_SIZE,
    ) -> None:
        """Moves the module to the accelerator.

        Args:
            module: maps a float32 batch to logits [n, classes].
            prepare: turns a batch of a shard's raw inputs into the module's input; None leaves it unchanged.
            accelerator: cpu, cuda or cuda:N.
            threads: torch threads of this whole process; None leaves torch's choice.
            evaluation_batch_size: maximum number of examples per evaluated batch.

        Raises:
            TaskError: torch or the accelerator is missing.
        """
        self._torch = import_torch()
        if threads is not None:
            self._torch.set_num_threads(threads)
        self._device = _select_device(accelerator)
        self._module = module.to(self._device)
        self._prepare = prepare or (lambda inputs: inputs)
        self._evaluation_batch_size = min(evaluation_batch_size, EVALUATION_BATCH_SIZE)
        self._normalisations = [layer for layer in module.modules() if _is_batch_normalisation(layer)]
        named_parameters = list(module.named_parameters())
        for _, parameter in named_parameters:
            # Backpropagation adds into an existing gradient, so the returned tensors stay the module's.
            parameter.grad = self._torch.zeros_like(parameter)
        self._parameters = {name: parameter.detach() for name, parameter in named_parameters}
        self._gradients: dict[str, Any] = {name: parameter.grad for name, parameter in named_parameters}
        self._tensors = self._parameters | {name: buffer.detach() for name, buffer in _list_saved_buffers(module)}

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._parameters

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        return self._gradients

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            dense = tensor if isinstance(tensor, np.ndarray) else tensor.dense()
            if name not in self._tensors:
                raise TaskError(f"the model has no tensor {name!r}, only {', '.join(self._tensors)}")
            target = self._tensors[name]
            if tuple(target.shape) != dense.shape:
                raise TaskError(f"tensor {name} has shape {dense.shape}, the model needs {tuple(target.shape)}")
            # A body from the network is a read-only view, which torch takes only as a copy.
            target.copy_(self._torch.from_numpy(np.array(dense)))

    def read(self) -> dict[str, Array]:
        return {name: np.array(tensor.cpu().numpy()) for name, tensor in self._tensors.items()}

    @property
    def prepare(self) -> Callable[[Array], Array]:
        """The function from raw inputs to the module's input."""
        return self._prepare

    def logits(self, inputs: Array) -> Array:
        """Returns the model's logits of raw inputs, [n, classes]."""
        self._module.eval()
        with self._torch.no_grad():
            return np.array(self._logits(inputs).cpu().numpy())

    def draw(self, graph: OnnxGraph, features: str, example: Array) -> str:
        """Adds the model to an ONNX graph and returns the name of its logits; raises as `add_torch_module`."""
        return add_torch_module(self._module, graph, features, example)

    def reseed(self, seed: int) -> None:
        """Seeds the module's random layers (dropout), via torch's only generator, that of the process."""
        if self._device.type == "cpu":
            # `torch.manual_seed` also seeds all accelerators, and records a stack trace each time if there is none.
            self._torch.default_generator.manual_seed(seed)
        else:
            self._torch.manual_seed(seed)

    def gradient(self, batch: Dataset) -> float:
        self._module.train()
        if len(batch) == 1:
            # The last batch of an epoch may hold one example, which has no variance of its own.
            for layer in self._normalisations:
                layer.eval()
        for gradient in self._gradients.values():
            gradient.zero_()
        loss = self._torch.nn.functional.cross_entropy(self._logits(batch.inputs), self._labels(batch.labels))
        loss.backward()
        return float(loss.item())

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        self._module.eval()
        loss, correct = 0.0, 0
        with self._torch.no_grad():
            for start in range(0, len(data), self._evaluation_batch_size):
                rows = slice(start, start + self._evaluation_batch_size)
                logits, labels = self._logits(data.inputs[rows]), self._labels(data.labels[rows])
                loss += float(self._torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item())
                correct += int((logits.argmax(dim=1) == labels).sum().item())
        return loss / max(1, len(data)), correct / max(1, len(data))

    def _logits(self, inputs: Array) -> torch.Tensor:
        prepared = np.ascontiguousarray(self._prepare(inputs), dtype=np.float32)
        logits: torch.Tensor = self._module(self._torch.from_numpy(prepared).to(self._device))
        return logits

    def _labels(self, labels: Array) -> torch.Tensor:
        classes: torch.Tensor = self._torch.from_numpy(labels.astype(np.int64)).to(self._device)
        return classes


def module_shapes(module: torch.nn.Module) -> ModelSpec:
    """Returns the shapes of a module's tensors for `Task.shapes`: parameters, then buffers, each in its own order."""
    parameters = [_make_spec(name, tensor, TensorKind.PARAMETER) for name, tensor in module.named_parameters()]
    buffers = [_make_spec(name, tensor, TensorKind.BUFFER) for name, tensor in _list_saved_buffers(module)]
    return (*parameters, *buffers)


def _select_device(accelerator: str) -> torch.device:
    backend = import_torch()
    name = validate_accelerator(accelerator)
    if name != "cpu":
        count = backend.cuda.device_count() if backend.cuda.is_available() else 0
        if int(name.partition(":")[2] or 0) >= count:
            raise TaskError(f"accelerator {name} is not here: torch sees {count} CUDA device(s); use cpu")
    device: torch.device = backend.device(name)
    return device


def _list_saved_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the buffers that belong to a saved model; the others are caches that the module can rebuild."""
    saved = module.state_dict()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


def _is_batch_normalisation(layer: torch.nn.Module) -> bool:
    """Returns whether a layer normalises over the batch."""
    return isinstance(layer, import_torch().nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 torch's name for all of them


def _make_spec(name: str, tensor: torch.Tensor, kind: TensorKind) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, kind=kind)
