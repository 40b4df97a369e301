"""Real updates to measure codecs on: those of two networks that have learnt for a while, or of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from edgefl.errors import DataError
from edgefl.tasks.local_training import train
from edgefl.tasks.npz import read_npz
from edgefl.tasks.registry import make_task
from edgefl.tasks.sources import central_data
from edgefl.types import Array, LocalPlan, Scalar, Shapes, Tensor, TensorSpec, derived_rng

# What damaged headers raise, and types that NumPy has not.
_UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, SafetensorError)

SEED = 7
LEARNING_RATE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """An update; `source` says in a phrase where it is from."""

    tensors: Mapping[str, Tensor]
    shapes: Shapes
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A network on MNIST images: so many iterations of `batch_size` before the one that is measured."""

    options: Mapping[str, Scalar]
    warm_up: int
    batch_size: int
    what: str


SETTINGS: Mapping[str, _Setting] = MappingProxyType(
    {
        "mnist-cnn": _Setting(options={}, warm_up=300, batch_size=10, what="AdaComp's CNN, 421,642 parameters"),
        "resnet-18": _Setting(
            options={"model": "resnet18-gn"}, warm_up=8, batch_size=32, what="ResNet-18, 11,172,810 parameters"
        ),
    }
)
"""The ResNet-18 is the one for small images (3x3 stem, no pooling before the blocks), with GroupNorm."""


def network_shapes(name: str) -> Shapes:
    """Returns the tensors of the network of a setting; needs no torch."""
    return make_task("mnist", SETTINGS[name].options).shapes()


def measured_gradient(name: str, folder: Path | None = None) -> Gradient:
    """Returns the displacement of one iteration on MNIST images, after some iterations before it.

    Args:
        name: one of `SETTINGS`.
        folder: where the images lie; None means `mnist` in `$EDGEFL_DATA`.

    Raises:
        EdgeflError: the images or torch are missing.
    """
    setting = SETTINGS[name]
    task = make_task("mnist", setting.options)
    data = central_data("mnist", folder).train
    learner = task.learner(threads=1)
    learner.load(task.init(SEED))
    for phase, iterations in enumerate((setting.warm_up, 1)):
        result = train(
            learner,
            data,
            LocalPlan(iterations=iterations, batch_size=setting.batch_size, learning_rate=LEARNING_RATE),
            derived_rng(SEED, name, phase),
            clock=lambda: 0.0,
            on_iteration=lambda _iteration, _seconds: False,
        )
    return Gradient(
        tensors=result.displacement,
        shapes=task.shapes(),
        source=f"{setting.what}: one batch of {setting.batch_size} MNIST images after {setting.warm_up} iterations",
    )


def read_gradient(path: Path) -> Gradient:
    """Returns the arrays of an `.npz` or `.safetensors` file; those of other types than float32 travel exactly.

    Raises:
        DataError: the file is missing, damaged, of another kind, or holds what is no number.
    """
    if path.suffix not in (".npz", ".safetensors"):
        raise DataError(f"a gradient's file is .npz or .safetensors, got {path}")
    try:
        found = _read_npz(path) if path.suffix == ".npz" else load_file(path)
    except OSError as error:
        raise DataError(f"gradient {path} cannot be read: {error.strerror or error}") from None
    except MemoryError as error:
        raise DataError(f"gradient {path} is damaged, or larger than the memory: {error}") from None
    except _UNREADABLE as error:
        raise DataError(
            f"gradient {path} is damaged, or holds objects or types that NumPy has not (bfloat16, float8): {error}"
        ) from None
    # A library that adds types to NumPy may have been imported: then bfloat16 and float8 can be read, but not used.
    types = {name: getattr(array, "dtype", np.dtype("O")) for name, array in found.items()}
    strange = [f"{name} of {dtype}" for name, dtype in types.items() if dtype.kind not in "fiub"]
    if strange or not found:
        raise DataError(f"gradient {path} must hold arrays of numbers of NumPy's, got {', '.join(strange) or 'none'}")
    arrays = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in found.items()}
    shapes = tuple(TensorSpec(name=name, shape=array.shape, dtype=str(array.dtype)) for name, array in arrays.items())
    return Gradient(tensors=arrays, shapes=shapes, source=path.name)


def _read_npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        return read_npz(file)
