"""Real updates to measure codecs on: of two partly trained networks, or of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from edgefl.core.errors import DataError
from edgefl.core.types import Array, ModelSpec, Scalar, Tensor, TensorSpec, TrainConfig, derive_rng
from edgefl.tasks.datasets.array_files import read_npz
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

# Raised for damaged headers, and for types unknown to NumPy.
_READ_ERRORS = (ValueError, TypeError, AttributeError, KeyError, SafetensorError)

SEED = 7
SAMPLE_LEARNING_RATE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleUpdate:
    """An update; `source` is a phrase with its origin."""

    tensors: Mapping[str, Tensor]
    shapes: ModelSpec
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampleSetting:
    """A network on MNIST images, with a number of iterations before the measured one."""

    options: Mapping[str, Scalar]
    warm_up_iterations: int
    batch_size: int
    description: str


SAMPLE_SETTINGS: Mapping[str, _SampleSetting] = MappingProxyType(
    {
        "mnist-cnn": _SampleSetting(
            options={}, warm_up_iterations=300, batch_size=10, description="AdaComp's CNN, 421,642 parameters"
        ),
        "resnet-18": _SampleSetting(
            options={"model": "resnet18-gn"},
            warm_up_iterations=8,
            batch_size=32,
            description="ResNet-18, 11,172,810 parameters",
        ),
    }
)
"""The ResNet-18 is the one for small images (3x3 stem, no pooling before the blocks), with GroupNorm."""


def get_network_shapes(name: str) -> ModelSpec:
    """Returns the tensors of a setting's network; needs no torch."""
    return make_task("mnist", SAMPLE_SETTINGS[name].options).shapes()


def compute_sample_update(name: str, folder: Path | None = None) -> SampleUpdate:
    """Returns the displacement of one iteration on MNIST images, after some iterations before it.

    Args:
        name: one of `SAMPLE_SETTINGS`.
        folder: of the images; None means `mnist` in `$EDGEFL_DATA`.

    Raises:
        EdgeflError: the images or torch are missing.
    """
    setting = SAMPLE_SETTINGS[name]
    task = make_task("mnist", setting.options)
    data = load_central_data("mnist", folder).train
    learner = task.learner(threads=1)
    learner.load(task.init(SEED))
    for phase, iterations in enumerate((setting.warm_up_iterations, 1)):
        result = train(
            learner,
            data,
            TrainConfig(iterations=iterations, batch_size=setting.batch_size, learning_rate=SAMPLE_LEARNING_RATE),
            derive_rng(SEED, name, phase),
            clock=lambda: 0.0,
            on_iteration=lambda _iteration, _seconds: False,
        )
    return SampleUpdate(
        tensors=result.displacement,
        shapes=task.shapes(),
        source=f"{setting.description}: one batch of {setting.batch_size} MNIST images "
        f"after {setting.warm_up_iterations} iterations",
    )


def read_sample_update(path: Path) -> SampleUpdate:
    """Returns the arrays of an `.npz` or `.safetensors` file; types other than float32 travel exactly.

    Raises:
        DataError: the file is missing, damaged, of another kind, or holds something other than numbers.
    """
    if path.suffix not in (".npz", ".safetensors"):
        raise DataError(f"a gradient's file is .npz or .safetensors, got {path}")
    try:
        loaded = _read_npz(path) if path.suffix == ".npz" else load_file(path)
    except OSError as error:
        raise DataError(f"gradient {path} cannot be read: {error.strerror or error}") from None
    except MemoryError as error:
        raise DataError(f"gradient {path} is damaged, or larger than the memory: {error}") from None
    except _READ_ERRORS as error:
        raise DataError(
            f"gradient {path} is damaged, or holds objects or types that NumPy has not (bfloat16, float8): {error}"
        ) from None
    # Another library may have added types to NumPy: then bfloat16 and float8 can be read, but not used.
    types = {name: getattr(array, "dtype", np.dtype("O")) for name, array in loaded.items()}
    unsupported = [f"{name} of {dtype}" for name, dtype in types.items() if dtype.kind not in "fiub"]
    if unsupported or not loaded:
        raise DataError(
            f"gradient {path} must hold arrays of numbers of NumPy's, got {', '.join(unsupported) or 'none'}"
        )
    arrays = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in loaded.items()}
    shapes = tuple(TensorSpec(name=name, shape=array.shape, dtype=str(array.dtype)) for name, array in arrays.items())
    return SampleUpdate(tensors=arrays, shapes=shapes, source=path.name)


def _read_npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        return read_npz(file)
