"""Training with torch: any module with any loss behind the `Learner` calls. Imports torch when first used.

A module may come from a task, or from `module:factory` in a run file, such as `torchvision.models:resnet18`, where
the operator allowed that module. Its object is called only if it is a class of modules, or a function annotated to
return one; Python's own library is not even imported. The factory is called with `num_classes` if it takes that, else
without arguments. `torchvision:resnet18` and `timm:resnet18` need no permission: only networks that these list are
built.
"""

from __future__ import annotations

import inspect
import logging
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from edgefl.core.errors import ConfigError, TaskError, format_install_command
from edgefl.core.named_arrays import unwrap_inputs
from edgefl.core.settings import find_similar
from edgefl.core.types import Array, Dataset, Inputs, ModelSpec, TensorKind, Tensors, TensorSpec, derive_seed
from edgefl.tasks.learners import networks
from edgefl.tasks.learners.numpy_learner import compute_clip_factors, evaluate_in_batches, find_target
from edgefl.tasks.learners.torch_losses import TorchLoss
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.multi_task import MultiTask
from edgefl.tasks.losses.registry import LossLike, make_loss, select_targets
from edgefl.tasks.losses.torch_only_losses import Contrastive
from edgefl.tasks.losses.value_losses import Reconstruction
from edgefl.tasks.onnx_graph import (
    OnnxGraph,
    add_torch_module,
    get_first_line,
    get_node_builder,
    register_node_builder,
)
from edgefl.tasks.preparation import Prepare, prepare_inputs, to_features
from edgefl.tasks.registry import import_extra, import_torch, load_object, validate_accelerator

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

EVALUATION_BATCH_SIZE = 256
NUM_CHECKED = 2
"""Examples that a module is tried with; of one a module may squeeze the batch away."""

FIRST_LOSS_SCALE = 1024.0
"""Of float16: gradients down to 6e-8 of the loss are numbers then, where those below 6e-5 lose digits."""

LIBRARIES = ("torchvision:", "timm:")
"""Prefixes of the names of a library's models."""
MAX_LIBRARY_PARAMETERS = 700_000_000
"""Most parameters of a library's model, counted before it takes memory; all of torchvision's have fewer."""
_WITH_AUXILIARY_LOGITS = ("googlenet", "inception_v3")
"""Models of torchvision that have more outputs, unless they are told to have one."""

MAX_GRADIENT_VALUES = 8_000_000
"""Numbers in the gradients of the examples that are differentiated at once, for small devices.

They take 32 MB, and while those of a layer are summed, its own in double precision take twice theirs more. What the
layers compute comes on top.
"""
MAX_EVALUATION_VALUES = 2_000_000
"""Approximate number of input values per evaluation batch, so that a large model fits a small device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchModel:
    """A torch module as a model.

    `build` makes the module. `tensors` are known without torch where they are given, in the order of the module's
    parameters followed by its buffers, and `first_weights` samples them; without it the first weights are the
    module's own, the same for the same seed and release of torch. `loss` is as of `make_loss`; a task's own goes
    before it. The module gets one array as its only argument, arrays by name as arguments of these names.
    """

    needs_torch: ClassVar[bool] = True

    build: Callable[[], torch.nn.Module]
    prepare: Prepare = to_features
    tensors: ModelSpec | None = None
    first_weights: Callable[[ModelSpec, int], dict[str, Array]] | None = None
    loss: LossLike = "cross-entropy"

    def shapes(self) -> ModelSpec:
        return module_shapes(self._build(0)) if self.tensors is None else self.tensors

    def init(self, seed: int) -> dict[str, Array]:
        if self.first_weights is not None:
            return self.first_weights(self.shapes(), seed)
        module = self._build(seed)
        first = TorchLearner(module).read()
        return {spec.name: first[spec.name] for spec in module_shapes(module)}

    def learner(
        self, *, accelerator: str = "cpu", threads: int | None = None, loss: LossLike | None = None
    ) -> TorchLearner:
        import_torch()
        return TorchLearner(
            self.build(), prepare=self.prepare, accelerator=accelerator, threads=threads, loss=loss or self.loss
        )

    def _build(self, seed: int) -> torch.nn.Module:
        with _fork_torch_rng(import_torch(), seed):
            return self.build()


def make_chain_model(
    chain: networks.Chain,
    prepare: Callable[[Array], Array],
    first_weights: Callable[[ModelSpec, int], dict[str, Array]] = networks.make_uniform_weights,
) -> TorchModel:
    """Returns a chain of layers as a model whose tensors are known without torch."""
    return TorchModel(
        tensors=networks.list_chain_specs(chain),
        build=partial(networks.build_chain, chain),
        first_weights=first_weights,
        prepare=prepare,
    )


class TorchLearner:
    """A `Learner` over a module: `parameters` and `gradients` share their storage with it."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        prepare: Prepare | None = None,
        accelerator: str = "cpu",
        threads: int | None = None,
        evaluation_batch_size: int = EVALUATION_BATCH_SIZE,
        loss: LossLike = "cross-entropy",
    ) -> None:
        """Moves the module to the accelerator.

        Args:
            module: maps a float32 batch to outputs [n, ...], such as logits [n, classes]. Inputs by name are its
                keyword arguments, of which whole numbers are int64 and truth values bool. For losses by name it
                returns a dict of outputs with their names, or these side by side.
            prepare: turns a batch of a shard's raw inputs into the module's input; None leaves it unchanged.
            accelerator: cpu, cuda or cuda:N.
            threads: torch threads of this whole process; None leaves torch's choice.
            evaluation_batch_size: maximum number of examples per evaluated batch.
            loss: a name, a `Loss`, or a function of (outputs, targets) that returns one number for each example.

        Raises:
            TaskError: torch or the accelerator is missing.
            ConfigError: there is no such loss.
        """
        self._torch = import_torch()
        if threads is not None:
            self._torch.set_num_threads(threads)
        self._device = _select_device(accelerator)
        self._module = module.to(self._device)
        self._prepare = prepare or (lambda inputs: inputs)
        self._loss = make_loss(loss)
        self._torch_loss = TorchLoss(self._loss, self._device)
        self._evaluation_batch_size = min(evaluation_batch_size, EVALUATION_BATCH_SIZE)
        self._normalisations = [layer for layer in module.modules() if _is_batch_normalisation(layer)]
        self._still_layers: list[torch.nn.Module] = []
        self._checked_form = ""
        self._half: torch.dtype | None = None
        self._loss_scale = 1.0
        named_parameters = list(module.named_parameters())
        for _, parameter in named_parameters:
            # Backpropagation adds into an existing gradient, so the returned tensors stay the module's.
            parameter.grad = self._torch.zeros_like(parameter)
        self._parameters = {name: parameter.detach() for name, parameter in named_parameters}
        self._gradients: dict[str, Any] = {name: parameter.grad for name, parameter in named_parameters}
        self._tensors = self._parameters | {name: buffer.detach() for name, buffer in list_saved_buffers(module)}

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._parameters

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        return self._gradients

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            target, dense = find_target(name, tensor, self._tensors)
            # A body from the network is a read-only view, which torch takes only as a copy.
            target.copy_(self._torch.from_numpy(np.array(dense)))

    def read(self) -> dict[str, Array]:
        return {name: np.array(tensor.cpu().numpy()) for name, tensor in self._tensors.items()}

    def freeze(self, names: Collection[str], *, needed: Collection[str] = ()) -> None:
        """Gives up the gradients of tensors that are not trained, except of those `needed` for something else.

        Layers all of whose tensors are frozen, and normalisations over the batch whose running statistics are, work
        as in an evaluation from now on. A tensor that is `needed` changes, by the adapter on it: its layer trains.
        """
        frozen = {*names}
        for name, parameter in self._module.named_parameters():
            if name in frozen and name not in needed:
                parameter.requires_grad_(False)
                parameter.grad = None
        self._gradients = {
            name: gradient for name, gradient in self._gradients.items() if name in needed or name not in frozen
        }
        self._still_layers = list_still_layers(self._module, frozen - {*needed})

    def set_precision(self, precision: str) -> None:
        """Makes later gradients those of activations in `float32`, `bfloat16` or `float16`.

        Weights and gradients stay float32 (mixed precision). With float16 the loss is scaled. Where a gradient
        overflows it is computed again from the same outputs, by half the scale each time, which later batches keep;
        one that is not finite without a scale stays as it is, as in float32.

        Raises:
            TaskError: the accelerator does not have it.

        Source: Micikevicius et al., Mixed Precision Training, ICLR 2018. Differs: no step is left out, and the scale
        does not grow again until this is called anew.
        """
        cuda = self._torch.cuda
        if precision == "bfloat16" and self._device.type == "cuda" and not cuda.is_bf16_supported(False):
            raise TaskError(f"{cuda.get_device_name(self._device)} has no bfloat16; take precision = float16")
        self._half = None if precision == "float32" else getattr(self._torch, precision)
        self._loss_scale = FIRST_LOSS_SCALE if precision == "float16" else 1.0

    @property
    def module(self) -> torch.nn.Module:
        """The trained module itself."""
        return self._module

    @property
    def prepare(self) -> Prepare:
        """The function from raw inputs to the module's input."""
        return self._prepare

    @property
    def loss(self) -> Loss:
        """What it trains to make small."""
        return self._loss

    def check_inputs(self, inputs: Inputs) -> None:
        """Checks that the module takes inputs of these names, shapes and types, on the first of them.

        Inputs of the same names, shapes and types as those before are not tried again.

        Raises:
            TaskError: it takes others, or the loss needs one array.
        """
        form = _format_arrays(unwrap_inputs(inputs))
        if not len(inputs) or form == self._checked_form:
            return
        features = self._compute_features(inputs[:NUM_CHECKED])
        if isinstance(features, Mapping):
            self._check_names(features)
        self._module.eval()
        try:
            with self._torch.no_grad():
                self.apply(self._module, features)
        except (MemoryError, self._torch.OutOfMemoryError, TaskError):  # says nothing of the inputs
            raise
        except Exception as error:  # a module of the user's own may raise anything
            name = type(self._module).__name__
            log.warning("%s failed on the first inputs", name, exc_info=True)
            raise TaskError(
                f"{name} does not take inputs {_format_arrays(features)}: {type(error).__name__}: "
                f"{get_first_line(error)}"
            ) from error
        self._checked_form = form

    def _check_names(self, features: Mapping[str, Array]) -> None:
        if isinstance(self._loss, Reconstruction):
            raise TaskError(f"loss {self._loss.name} needs one array of inputs, got {', '.join(features)}")
        try:
            signature = inspect.signature(self._module.forward)
        except (TypeError, ValueError):  # a compiled module says nothing of it
            return
        try:
            signature.bind(**features)
        except TypeError:
            raise TaskError(
                f"inputs are named {', '.join(features)}, and forward of {type(self._module).__name__} takes "
                f"({', '.join(signature.parameters)}); give both the same names"
            ) from None

    def logits(self, inputs: Inputs) -> Array:
        """Returns the model's outputs for raw inputs, [n, ...]."""
        self._module.eval()
        with self._torch.no_grad():
            return np.array(self._logits(inputs).cpu().numpy())

    def draw(self, graph: OnnxGraph, features: str, example: Array) -> str:
        """Adds the model to an ONNX graph and returns the name of its logits; raises as `add_torch_module`."""
        joining = self._module.register_forward_hook(lambda _module, _inputs, outputs: self.join_outputs(outputs))
        try:
            return add_torch_module(self._module, graph, features, example)
        finally:
            joining.remove()

    def reseed(self, seed: int) -> None:
        """Seeds the module's random layers (dropout), via torch's only generator, that of the process."""
        if self._device.type == "cpu":
            # `torch.manual_seed` also seeds all accelerators, and records a stack trace each time if there is none.
            self._torch.default_generator.manual_seed(seed)
        else:
            self._torch.manual_seed(seed)

    def gradient(self, batch: Dataset) -> float:
        return self.compute_gradient(batch, self._module, self._compute_features(batch.inputs))

    def compute_gradient(self, batch: Dataset, part: torch.nn.Module, inputs: Inputs) -> float:
        """Does what `gradient` does by a part of the network, such as its end, which gets other inputs."""
        self.start_training(len(batch))
        half = nullcontext() if self._half is None else self._torch.autocast(self._device.type, self._half)
        with half:
            outputs = self.apply(part, inputs)
        outputs = outputs if self._half is None else outputs.float()
        targets = select_targets(self._loss, batch, inputs, tuple(outputs.shape))
        loss = self._torch_loss.compute_mean(outputs, targets, batch.weights)
        if self._half == self._torch.float16:
            self._propagate_scaled(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item())

    def _propagate_scaled(self, loss: torch.Tensor) -> None:
        """Fills `gradients` by the largest scale, of the present one and its halves, at which they are finite."""
        gradients = [*self._gradients.values()]
        scale = self._loss_scale if bool(self._torch.isfinite(loss)) else 1.0
        while True:
            # The outputs are kept for a smaller scale: computed again, dropout would differ, statistics count twice.
            (loss * scale).backward(retain_graph=scale > 1.0)  # type: ignore[no-untyped-call]
            is_finite = all(bool(self._torch.isfinite(gradient).all()) for gradient in gradients)
            if is_finite or scale <= 1.0:
                break
            scale = max(1.0, scale / 2)
            for gradient in gradients:
                gradient.zero_()
        if is_finite:
            self._loss_scale = scale
            for gradient in gradients:
                gradient /= scale  # noqa: PLW2901 in place: the module's own

    def sum_clipped_gradients(self, batch: Dataset, clip: float) -> float:
        """Fills `gradients` with the sum of the examples' clipped gradients; see `ExampleGradients`.

        Each example goes through the network by itself, many of them at a time (`torch.func.vmap`): layers that
        normalise over the batch are refused, since alone it has none.

        Raises:
            TaskError: the network or the loss mixes examples, or torch cannot differentiate by example.
        """
        self.check_examples_apart()
        features = self._compute_features(batch.inputs) if len(batch) else batch.inputs
        targets = self._convert_targets(batch, features) if len(batch) else batch.targets
        self.start_training(len(batch))
        if not len(batch):
            return 0.0
        weights = np.ones(len(batch), np.float32) if batch.weights is None else batch.weights.astype(np.float32)
        inputs = {name: self._to_tensor(array) for name, array in _name_inputs(features).items()}
        size = max(1, MAX_GRADIENT_VALUES // max(1, sum(value.numel() for value in self._gradients.values())))
        total = 0.0
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            total += self._add_clipped(
                {name: value[rows] for name, value in inputs.items()},
                self._to_tensor(targets[rows]),
                self._to_tensor(weights[rows]),
                clip,
            )
        return total

    def check_examples_apart(self) -> None:
        """Raises a `TaskError` where the network or the loss mixes the examples of a batch, or keeps some of them."""
        if self._normalisations:
            name = type(self._normalisations[0]).__name__
            raise TaskError(
                f'{name} mixes the examples of a batch, which privacy.unit = "example" does not allow; take a model '
                "with GroupNorm or LayerNorm"
            )
        buffers = [name for name in self._tensors if name not in self._parameters]
        if buffers:
            raise TaskError(
                f"{type(self._module).__name__} has a buffer, {buffers[0]}, which may keep what examples are, and "
                'privacy.unit = "example" needs parameters alone; take a model without running statistics'
            )
        if isinstance(self._loss, Contrastive | MultiTask):
            raise TaskError(
                f'privacy.unit = "example" needs a loss of one target of an example by itself, got {self._loss.name}'
            )

    def _convert_targets(self, batch: Dataset, features: Inputs) -> Array:
        """Returns the batch's targets for outputs of the shape that those of an example of zeros have."""
        zeros = {name: np.zeros_like(array[:1]) for name, array in _name_inputs(features).items()}
        self._module.eval()
        with self._torch.no_grad():
            outputs = self.apply(self._module, zeros if isinstance(features, Mapping) else zeros[""])
        return select_targets(self._loss, batch, features, (len(batch), *outputs.shape[1:]))

    def _add_clipped(
        self, inputs: Mapping[str, torch.Tensor], targets: torch.Tensor, weights: torch.Tensor, clip: float
    ) -> float:
        """Adds the clipped gradients of some examples to `gradients`, and returns the sum of their losses."""
        trained = {name: self._parameters[name] for name in self._gradients}
        others = {name: value for name, value in self._tensors.items() if name not in trained}

        def compute_loss(
            parameters: Mapping[str, Any], example: Mapping[str, Any], target: Any, weight: Any
        ) -> tuple[Any, Any]:
            alone = {name: value.unsqueeze(0) for name, value in example.items()}
            arguments: Any = ((alone.pop(""),), alone) if "" in alone else ((), alone)
            outputs = self._torch.func.functional_call(self._module, ({**parameters, **others},), *arguments)
            loss = weight * self._torch_loss.compute_from(outputs, target.unsqueeze(0))[0]
            return loss, loss.detach()

        by_example = self._torch.func.vmap(
            self._torch.func.grad(compute_loss, has_aux=True), in_dims=(None, 0, 0, 0), randomness="different"
        )
        try:
            gradients, losses = by_example(trained, dict(inputs), targets, weights)
        except (MemoryError, self._torch.OutOfMemoryError, TaskError):
            raise
        except Exception as error:  # a module of the user's own may raise anything
            raise TaskError(
                f"torch cannot differentiate {type(self._module).__name__} by example, which privacy.unit = "
                f'"example" needs: {type(error).__name__}: {get_first_line(error)}'
            ) from error
        flat = {name: value.reshape(len(weights), -1) for name, value in gradients.items()}
        norm, double = self._torch.linalg.vector_norm, self._torch.float64
        squares = sum(norm(value, dim=1, dtype=double).square() for value in flat.values())
        norms = self._torch.as_tensor(squares).sqrt()
        factors = self._torch.from_numpy(compute_clip_factors(norms.cpu().numpy(), clip)).to(self._device)
        is_kept = factors > 0.0
        for name, gradient in self._gradients.items():
            # Not by a factor of 0: a NaN would stay.
            rows, kept = flat[name][is_kept], factors[is_kept].to(gradient.dtype)
            gradient += (kept @ rows).reshape(gradient.shape)  # noqa: PLW2901 in place: the module's own
        return float(losses[is_kept].sum())

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        self._module.eval()
        with self._torch.no_grad():
            return evaluate_in_batches(data, self._evaluation_batch_size, self._evaluate_batch)

    def apply(self, part: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """Returns what a part of the network makes of prepared inputs, a dict of which are keyword arguments."""
        if isinstance(inputs, Mapping):
            return self.join_outputs(part(**{name: self._to_tensor(array) for name, array in inputs.items()}))
        return self.join_outputs(part(self._to_tensor(inputs)))

    def join_outputs(self, outputs: Any) -> torch.Tensor:
        """Returns what a module returned as one tensor: outputs by name side by side, in the order of the losses.

        Raises:
            TaskError: they have other names than the losses, or a loss needs another number of them.
        """
        joined: torch.Tensor
        if not isinstance(self._loss, MultiTask) or not isinstance(outputs, Mapping):
            joined = outputs
            return joined
        self._loss.check_outputs({name: tuple(output.shape) for name, output in outputs.items()})
        parts = [outputs[head.name].reshape(-1, head.num_outputs) for head in self._loss.heads]
        joined = self._torch.cat(parts, dim=1)
        return joined

    def _to_tensor(self, array: Array) -> torch.Tensor:
        tensor: torch.Tensor = self._torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
        return tensor

    def start_training(self, num_examples: int) -> None:
        """Puts the network into the mode of a training step on so many examples, with gradients of 0."""
        self._module.train()
        for layer in self._still_layers:
            layer.eval()
        if num_examples == 1:
            # The last batch of an epoch may hold one example, which has no variance of its own.
            for layer in self._normalisations:
                layer.eval()
        for gradient in self._gradients.values():
            gradient.zero_()

    def _evaluate_batch(self, batch: Dataset) -> tuple[float, float]:
        outputs, targets = self._forward(batch)
        loss = float(self._torch_loss.compute_sum(outputs, targets, batch.weights).item())
        return loss, self._loss.count_right(outputs.cpu().numpy(), batch.targets)

    def _forward(self, batch: Dataset) -> tuple[torch.Tensor, Array]:
        """Returns the module's outputs, and the targets for them: checked here, since a GPU would end the process."""
        features = self._compute_features(batch.inputs)
        outputs = self.apply(self._module, features)
        return outputs, select_targets(self._loss, batch, features, tuple(outputs.shape))

    def _logits(self, inputs: Inputs) -> torch.Tensor:
        return self.apply(self._module, self._compute_features(inputs))

    def _compute_features(self, inputs: Inputs) -> Inputs:
        return prepare_inputs(self._prepare, inputs)


def module_shapes(module: torch.nn.Module) -> ModelSpec:
    """Returns the shapes of a module's tensors for `Task.shapes`: parameters, then buffers, each in its own order."""
    parameters = [_make_spec(name, tensor, TensorKind.PARAMETER) for name, tensor in module.named_parameters()]
    buffers = [_make_spec(name, tensor, TensorKind.BUFFER) for name, tensor in list_saved_buffers(module)]
    return (*parameters, *buffers)


def _name_inputs(features: Inputs) -> Mapping[str, Array]:
    """Returns inputs by name; one array alone has the name ""."""
    return features if isinstance(features, Mapping) else {"": features}


def _format_arrays(arrays: Inputs) -> str:
    """Returns types and shapes of one example, such as `float32 [8, 8]`, or `age int64 [], image float32 [8, 8]`."""
    return ", ".join(
        f"{name} {array.dtype} {[*array.shape[1:]]}".strip() for name, array in _name_inputs(arrays).items()
    )


def _select_device(accelerator: str) -> torch.device:
    backend = import_torch()
    name = validate_accelerator(accelerator)
    if name != "cpu":
        count = backend.cuda.device_count() if backend.cuda.is_available() else 0
        if int(name.partition(":")[2] or 0) >= count:
            raise TaskError(f"accelerator {name} is not here: torch sees {count} CUDA device(s); use cpu")
    device: torch.device = backend.device(name)
    return device


def list_saved_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the buffers that belong to a saved model; the others are caches that the module can rebuild."""
    saved = module.state_dict()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


def list_still_layers(module: torch.nn.Module, constant: Collection[str]) -> list[torch.nn.Module]:
    """Returns the layers that work as in an evaluation where these tensors of a network stay as they are."""
    if not constant:
        return []
    return [layer for name, layer in module.named_modules() if _is_still(layer, f"{name}." if name else "", constant)]


def _is_batch_normalisation(layer: torch.nn.Module) -> bool:
    """Returns whether a layer normalises over the batch."""
    return isinstance(layer, import_torch().nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 torch's name for all of them


def _is_still(layer: torch.nn.Module, prefix: str, frozen: Collection[str]) -> bool:
    """Returns whether a layer of a network with frozen tensors has none that change."""
    names = [f"{prefix}{name}" for name, _ in layer.named_parameters()]
    buffers = [f"{prefix}{name}" for name, _ in list_saved_buffers(layer)]
    if _is_batch_normalisation(layer) and buffers:
        return any(name in frozen for name in buffers)
    return bool(names) and all(name in frozen for name in (*names, *buffers))


def _make_spec(name: str, tensor: torch.Tensor, kind: TensorKind) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, kind=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFactoryModel:
    """A model with tensors known only to torch, on the coordinator as on a device.

    `input_shape` is that of one example after `prepare`. Its first weights are the module's own, sampled with torch's
    generator: the same for the same seed and release of torch.
    """

    needs_torch: ClassVar[bool] = True
    loss: ClassVar[str] = "cross-entropy"

    target: str
    num_classes: int
    input_shape: tuple[int, ...]
    prepare: Callable[[Array], Array]

    def shapes(self) -> ModelSpec:
        return module_shapes(self.build(seed=0))

    def init(self, seed: int) -> dict[str, Array]:
        learner = TorchLearner(self.build(seed=seed))
        first = learner.read()
        return {spec.name: first[spec.name] for spec in self.shapes()}

    def learner(
        self, *, accelerator: str = "cpu", threads: int | None = None, loss: LossLike | None = None
    ) -> TorchLearner:
        return TorchLearner(
            self.build(seed=0),
            prepare=self.prepare,
            loss=loss or self.loss,
            accelerator=accelerator,
            threads=threads,
            evaluation_batch_size=max(8, MAX_EVALUATION_VALUES // int(np.prod(self.input_shape))),
        )

    def build(self, *, seed: int) -> torch.nn.Module:
        """Returns the module with its first weights, after a test that it maps inputs to classes.

        Raises:
            TaskError: torch or the module is missing, or the factory makes no model for this task.
        """
        backend = import_torch()
        factory = _load_factory(self.target)
        options = {"num_classes": self.num_classes} if _has_parameter(factory, "num_classes") else {}
        with _fork_torch_rng(backend, seed):
            try:
                candidate = factory(**options)
            except Exception as error:  # a factory of the user's own may raise anything
                raise TaskError(f"model {self.target!r} cannot be made: {type(error).__name__}: {error}") from error
            if not isinstance(candidate, backend.nn.Module):
                raise TaskError(f"model {self.target!r} makes a {type(candidate).__name__}, no torch module")
            module: torch.nn.Module = candidate
            self._validate_module(module, backend)
        return module

    def _validate_module(self, module: torch.nn.Module, backend: Any) -> None:
        expected_shape = (2, self.num_classes)
        try:
            with backend.no_grad():
                logits = module.eval()(backend.zeros(2, *self.input_shape))
        except Exception as error:  # a module may raise anything on inputs of another task
            raise TaskError(
                f"model {self.target!r} does not take inputs of {list(self.input_shape)}: "
                f"{get_first_line(error)}{self._format_hint()}"
            ) from error
        shape = tuple(getattr(logits, "shape", ()))
        if shape != expected_shape:
            raise TaskError(
                f"model {self.target!r} answers two examples with {list(shape) or type(logits).__name__}, "
                f"it must be {list(expected_shape)}: one number for each class; let its factory take num_classes"
            )

    def _format_hint(self) -> str:
        is_image = len(self.input_shape) == 3
        return "; set channels = 3, and size where it needs larger images, in [task]" if is_image else ""


def is_factory_name(model: object) -> bool:
    """Returns whether a task's `model` names a factory rather than a built-in model."""
    return isinstance(model, str) and ":" in model


def make_resizing_prepare(prepare: Callable[[Array], Array], *, channels: int, size: int) -> Callable[[Array], Array]:
    """Returns `prepare` ([n, 1, h, w]) followed by a resize to `size` and a copy per channel."""

    def draw(graph: OnnxGraph, images: str) -> str:
        inner_builder = get_node_builder(prepare)
        if inner_builder is None:
            raise TaskError("the task's prepare function cannot be drawn as ONNX nodes")
        pixels = inner_builder(graph, images)
        sizes = graph.add_constant([size, size], dtype="int64")
        resized = graph.add("Resize", pixels, "", "", sizes, mode="linear", axes=[2, 3])
        return graph.add("Concat", *[resized] * channels, axis=1)

    @register_node_builder(draw)
    def prepared(images: Array) -> Array:
        backend = import_torch()
        pixels = prepare(images)
        if pixels.shape[-1] != size:
            resized = backend.nn.functional.interpolate(
                backend.from_numpy(np.ascontiguousarray(pixels)), (size, size), mode="bilinear", align_corners=False
            )
            pixels = resized.numpy()
        return np.repeat(pixels, channels, axis=1) if channels > 1 else pixels

    return prepared


def find_library_network(target: str, *, may_have_tag: bool = False) -> tuple[Any, str]:
    """Returns the module of `LIBRARIES` that builds a classification network, and the name that it has there.

    Args:
        target: its name, such as `timm:resnet18`.
        may_have_tag: whether that of weights may be behind a name of timm, as in `resnet18.a1_in1k`.

    Raises:
        ConfigError: the library has no such network.
        TaskError: it is missing.
    """
    backend = import_torch()
    library, _, name = target.partition(":")
    is_timm = library == "timm"
    module = library if is_timm else "torchvision.models"
    purpose = f"model {target:.100} needs the {library} of torch {backend.__version__}"
    models = import_extra(module, purpose, format_install_command(library))
    known = models.list_models() if is_timm else models.list_models(module=models)
    if (name.partition(".")[0] if is_timm and may_have_tag else name) not in known:
        similar = find_similar(name, known)
        listing = f"did you mean {similar}?" if similar else f"{module}.list_models() has those that there are"
        raise ConfigError(f"model {target:.100}: {library} has no such network; {listing}")
    return models, name


def _load_library_builder(target: str) -> Callable[..., Any]:
    """Returns the builder of a classification network of `LIBRARIES`; no weights are downloaded."""
    backend, is_timm = import_torch(), target.startswith("timm:")
    models, name = find_library_network(target)
    create: Callable[..., Any] = models.create_model if is_timm else models.get_model
    options: dict[str, Any] = {"pretrained": False} if is_timm else {"weights": None}
    if not is_timm and name in _WITH_AUXILIARY_LOGITS:
        options |= {"aux_logits": False, "init_weights": True}

    def build(num_classes: int) -> Any:
        with backend.device("meta"):  # shapes alone
            outline = create(name, num_classes=num_classes, **options)
        count = sum(parameter.numel() for parameter in outline.parameters())
        if count > MAX_LIBRARY_PARAMETERS:
            raise ValueError(f"it has {count:,} parameters, at most are {MAX_LIBRARY_PARAMETERS:,}")
        return create(name, num_classes=num_classes, **options)

    return build


def _load_factory(target: str) -> Callable[..., Any]:
    if target.startswith(LIBRARIES):
        return _load_library_builder(target)
    module, _, attribute = target.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names or not attribute:
        raise ConfigError(f"model must be module:factory of a package that makes torch modules, got {target!r}")
    try:
        target_object = load_object(target)
    except Exception as error:  # importing a user's package may raise anything
        hint = f"; install the torchvision that goes with torch {import_torch().__version__}"
        raise TaskError(
            f"model {target!r} cannot be loaded: {error}{hint if module.startswith('torchvision') else ''}"
        ) from error
    if not _is_module_factory(target_object):
        raise TaskError(
            f"model {target!r} is called only if it is a class of torch modules, or a function that says "
            "'-> torch.nn.Module' (or a class of those)"
        )
    factory: Callable[..., Any] = target_object
    return factory


def _is_module_factory(found: Any) -> bool:
    module_class = import_torch().nn.Module
    return_type: Any = found
    if inspect.isfunction(found):
        try:
            # Unwrapped first: a function that wraps itself would be followed for ever.
            return_type = typing.get_type_hints(inspect.unwrap(found)).get("return")
        except Exception:  # noqa: BLE001 a user's annotation may raise anything: then it counts as absent
            return False
    return inspect.isclass(return_type) and issubclass(return_type, module_class)


def _has_parameter(factory: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(factory).parameters
    return name in parameters or any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())


@contextmanager
def _fork_torch_rng(backend: Any, seed: int) -> Iterator[None]:
    """Seeds torch's only generator for the block, and restores it afterwards."""
    with backend.random.fork_rng(devices=[]):
        backend.manual_seed(derive_seed(seed, "initial-weights") % 2**63)
        yield
