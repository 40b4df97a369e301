"""Any torch module as a task's model: `module:factory` in a run file, such as `torchvision.models:resnet18`.

The name may come from another machine, so its object is called only if it is a class of modules, or a function
annotated to return one; Python's own library is not even imported. The factory is
called with `num_classes` if it takes that, else without arguments.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Array, ModelSpec, derive_seed
from edgefl.tasks.export.onnx_graph import OnnxGraph, get_node_builder, register_node_builder
from edgefl.tasks.learners.accelerators import import_torch
from edgefl.tasks.learners.torch_learner import TorchLearner, module_shapes

if TYPE_CHECKING:
    import torch

MAX_EVALUATION_VALUES = 2_000_000
"""Approximate number of input values per evaluation batch, so that a large model fits a small device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFactoryModel:
    """A model with tensors known only to torch, on the coordinator as on a device.

    `input_shape` is that of one example after `prepare`. Its first weights are the module's own, sampled with torch's
    generator: the same for the same seed and release of torch.
    """

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

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> TorchLearner:
        return TorchLearner(
            self.build(seed=0),
            prepare=self.prepare,
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
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{self._format_hint()}"
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


def _load_factory(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names or not attribute:
        raise ConfigError(f"model must be module:factory of a package that makes torch modules, got {target!r}")
    try:
        target_object: Any = importlib.import_module(module)
        for part in attribute.split("."):
            target_object = getattr(target_object, part)
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
            return_type = typing.get_type_hints(found).get("return")
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
