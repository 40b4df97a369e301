"""Any torch module as a task's model: `module:factory` in a run file, such as `torchvision.models:resnet18`.

The name may come from another machine, so what it names is called only if it is a class of modules, or a function
that says in its annotation that it returns one; nothing of Python's own library is even imported. The factory is
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

from edgefl.errors import ConfigError, TaskError
from edgefl.tasks.accelerators import import_torch
from edgefl.tasks.onnx_steps import Graph, drawn_as, steps_of
from edgefl.tasks.torch_learner import TorchLearner, module_shapes
from edgefl.types import Array, Shapes, derived_seed

if TYPE_CHECKING:
    import torch

EVALUATED_VALUES = 2_000_000
"""A batch of evaluation holds about so many input values, so that a large model fits a small board."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleModel:
    """A model whose tensors only torch can tell, on the coordinator as on a board.

    `input_shape` is that of one example after `prepare`. Its first weights are the module's own, drawn with torch's
    generator: the same for the same seed and release of torch.
    """

    target: str
    num_classes: int
    input_shape: tuple[int, ...]
    prepare: Callable[[Array], Array]

    def shapes(self) -> Shapes:
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
            evaluation_batch=max(8, EVALUATED_VALUES // int(np.prod(self.input_shape))),
        )

    def build(self, *, seed: int) -> torch.nn.Module:
        """Returns the module with its first weights, after a trial that it maps this task's inputs to its classes.

        Raises:
            TaskError: torch or the module is missing, or what is named makes no model for this task.
        """
        backend = import_torch()
        factory = _factory(self.target)
        options = {"num_classes": self.num_classes} if _takes(factory, "num_classes") else {}
        with _own_random_numbers(backend, seed):
            try:
                made = factory(**options)
            except Exception as error:  # a factory of the user's own may raise anything
                raise TaskError(f"model {self.target!r} cannot be made: {type(error).__name__}: {error}") from error
            if not isinstance(made, backend.nn.Module):
                raise TaskError(f"model {self.target!r} makes a {type(made).__name__}, no torch module")
            module: torch.nn.Module = made
            self._try(module, backend)
        return module

    def _try(self, module: torch.nn.Module, backend: Any) -> None:
        wanted = (2, self.num_classes)
        try:
            with backend.no_grad():
                logits = module.eval()(backend.zeros(2, *self.input_shape))
        except Exception as error:  # whatever a module raises on inputs that it was not made for
            raise TaskError(
                f"model {self.target!r} does not take inputs of {list(self.input_shape)}: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{self._hint()}"
            ) from error
        found = tuple(getattr(logits, "shape", ()))
        if found != wanted:
            raise TaskError(
                f"model {self.target!r} answers two examples with {list(found) or type(logits).__name__}, "
                f"it must be {list(wanted)}: one number for each class; let its factory take num_classes"
            )

    def _hint(self) -> str:
        is_image = len(self.input_shape) == 3
        return "; set channels = 3, and size where it needs larger images, in [task]" if is_image else ""


def is_module_name(model: object) -> bool:
    """Returns whether a task's `model` names a factory rather than a built-in model."""
    return isinstance(model, str) and ":" in model


def resized_images(prepare: Callable[[Array], Array], *, channels: int, size: int) -> Callable[[Array], Array]:
    """Returns `prepare`, whose result is [n, 1, h, w], followed by a resize to `size` and a copy for each channel."""

    def draw(graph: Graph, images: str) -> str:
        before = steps_of(prepare)
        if before is None:
            raise TaskError("the task's prepare function cannot be drawn as ONNX nodes")
        pixels = before(graph, images)
        sizes = graph.constant([size, size], dtype="int64")
        resized = graph.add("Resize", pixels, "", "", sizes, mode="linear", axes=[2, 3])
        return graph.add("Concat", *[resized] * channels, axis=1)

    @drawn_as(draw)
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


def _factory(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names or not attribute:
        raise ConfigError(f"model must be module:factory of a package that makes torch modules, got {target!r}")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing what the user installed may raise anything
        fits = f"; install the torchvision that goes with torch {import_torch().__version__}"
        raise TaskError(
            f"model {target!r} cannot be loaded: {error}{fits if module.startswith('torchvision') else ''}"
        ) from error
    if not _makes_modules(found):
        raise TaskError(
            f"model {target!r} is called only if it is a class of torch modules, or a function that says "
            "'-> torch.nn.Module' (or a class of those)"
        )
    factory: Callable[..., Any] = found
    return factory


def _makes_modules(found: Any) -> bool:
    module_class = import_torch().nn.Module
    made: Any = found
    if inspect.isfunction(found):
        try:
            made = typing.get_type_hints(found).get("return")
        except Exception:  # noqa: BLE001 an annotation of the user's own may raise anything: then it says nothing
            return False
    return inspect.isclass(made) and issubclass(made, module_class)


def _takes(factory: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(factory).parameters
    return name in parameters or any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())


@contextmanager
def _own_random_numbers(backend: Any, seed: int) -> Iterator[None]:
    """Seeds torch's only generator, and leaves it behind as it was."""
    with backend.random.fork_rng(devices=[]):
        backend.manual_seed(derived_seed(seed, "initial-weights") % 2**63)
        yield
