"""Tasks of grey images: `digits` (8x8) in NumPy; `mnist` and `fashion-mnist` (28x28) with torch or NumPy networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.extensions import check_allowed
from edgefl.core.types import Array, Scalar
from edgefl.tasks.classification import ClassificationTask, TrainableModel, validate_choice
from edgefl.tasks.export.onnx_graph import (
    OnnxGraph,
    add_reduction,
    add_reshape,
    add_standard_deviation,
    make_scaling,
    register_node_builder,
)
from edgefl.tasks.learners import networks
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_learner import TorchFactoryModel, TorchModel, is_factory_name, make_resizing_prepare

DIGITS_LAYER_SIZES = {"mlp": (64, 64, 10), "logistic": (64, 10)}
DIGITS_MAX_PIXEL = 16.0
SIDE = 28
NUM_PIXELS = SIDE * SIDE
MAX_PIXEL = 255.0
FASHION_MEAN, FASHION_STD = 0.2860, 0.3530
FASHION_LABELS = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot",
)  # fmt: skip

MODELS = ("cnn", "cnn-small", "cnn-large", "lenet", "resnet18-gn", "2nn", "mlp", "logistic")
"""Built-in models; `module:factory` names any other torch model."""
HIDDEN_SIZES = {"2nn": (200, 200), "mlp": (128, 128), "logistic": ()}
"""Sizes of the hidden layers of the NumPy models."""
DEFAULTS: dict[str, Scalar] = {}
DEEP_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.02, "batch_size": 64}
WEIGHT_INITIALISERS = {"torch": networks.make_uniform_weights, "adacomp": networks.make_adacomp_weights}
CHAINS: Mapping[str, networks.Chain] = {
    "cnn": networks.CNN, "cnn-small": networks.CNN_SMALL, "cnn-large": networks.CNN_LARGE, "lenet": networks.LENET,
}  # fmt: skip
MAX_CHANNELS, MIN_SIZE, MAX_SIZE = 4, 8, 512


def digits(*, model: str = "mlp") -> ClassificationTask:
    """Returns the task; `model` is mlp (64-64-10) or logistic."""
    return ClassificationTask(
        name="digits",
        model=DenseModel(
            sizes=DIGITS_LAYER_SIZES[validate_choice("digits", "model", model, tuple(DIGITS_LAYER_SIZES))],
            prepare=_make_pixel_scaling(DIGITS_MAX_PIXEL),
        ),
        input_shape=(8, 8),
        labels=tuple("0123456789"),
        defaults={"learning_rate": 0.5, "batch_size": 8, "epochs": 2.0},
    )


def mnist(*, model: str = "cnn", init: str = "torch", channels: int = 1, size: int = SIDE) -> ClassificationTask:
    """Returns the task; its images are standardised one by one for the torch models.

    Args:
        model: cnn (421,642 parameters), another of `MODELS`, or `module:factory`.
        init: first weights of the cnn models and lenet: as torch draws them, or as in the AdaComp paper.
        channels: of a `module:factory` model: number of copies of the grey image.
        size: of a `module:factory` model: pixels a side after resizing.
    """
    options = _ImageOptions(task="mnist", model=model, init=init, channels=channels, size=size)
    return _make_task(options, standardise_images, tuple("0123456789"))


def fashion_mnist(
    *, model: str = "cnn-small", init: str = "torch", channels: int = 1, size: int = SIDE
) -> ClassificationTask:
    """Returns the task, with the options of `mnist`."""
    options = _ImageOptions(task="fashion-mnist", model=model, init=init, channels=channels, size=size)
    return _make_task(options, _normalise_fashion_pixels, FASHION_LABELS)


def _make_pixel_scaling(max_pixel: float) -> Callable[[Array], Array]:
    """Returns a `prepare` that maps pixels to 0 to 1."""

    @register_node_builder(make_scaling(1.0 / max_pixel))
    def scale(images: Array) -> Array:
        scaled: Array = images.astype(np.float32)
        scaled /= max_pixel
        return scaled

    return scale


def _add_standardisation(graph: OnnxGraph, images: str) -> str:
    pixels = make_scaling(1.0 / MAX_PIXEL, shape=(NUM_PIXELS,))(graph, images)
    centred = graph.add("Sub", pixels, add_reduction(graph, "ReduceMean", pixels, 1))
    floor = graph.add_constant(np.float32(1.0 / np.sqrt(NUM_PIXELS)))
    spread = graph.add("Max", add_standard_deviation(graph, centred, 1), floor)
    return add_reshape(graph, graph.add("Div", centred, spread), (1, SIDE, SIDE))


@register_node_builder(_add_standardisation)
def standardise_images(images: Array) -> Array:
    """Returns [n, 1, 28, 28] float32, each image with mean 0 and variance 1 (an empty one stays 0)."""
    pixels: Array = images.astype(np.float32).reshape(len(images), -1) / MAX_PIXEL
    pixels -= pixels.mean(axis=1, keepdims=True)
    # Without this floor, that of one white pixel, a blank image would divide by zero.
    pixels /= np.maximum(pixels.std(axis=1, keepdims=True), 1.0 / np.sqrt(NUM_PIXELS))
    return pixels.reshape(-1, 1, SIDE, SIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageOptions:
    """Model options of a run file; the names are those of the task's options."""

    task: str
    model: str
    init: str
    channels: int
    size: int


def _make_task(
    options: _ImageOptions, prepare: Callable[[Array], Array], labels: tuple[str, ...]
) -> ClassificationTask:
    is_module = is_factory_name(options.model)
    return ClassificationTask(
        name=options.task,
        model=_make_factory_model(options, prepare, len(labels))
        if is_module
        else _make_built_in_model(options, prepare),
        input_shape=(SIDE, SIDE),
        labels=labels,
        defaults=DEEP_DEFAULTS if is_module or options.model == "resnet18-gn" else DEFAULTS,
    )


def _make_factory_model(
    options: _ImageOptions, prepare: Callable[[Array], Array], num_classes: int
) -> TorchFactoryModel:
    check_allowed(options.model, "model", ConfigError)
    _reject_init(options)
    channels = _validate_int(options.task, "channels", options.channels, 1, MAX_CHANNELS)
    size = _validate_int(options.task, "size", options.size, MIN_SIZE, MAX_SIZE)
    return TorchFactoryModel(
        target=options.model,
        num_classes=num_classes,
        input_shape=(channels, size, size),
        prepare=make_resizing_prepare(prepare, channels=channels, size=size),
    )


def _make_built_in_model(options: _ImageOptions, prepare: Callable[[Array], Array]) -> TrainableModel:
    model = validate_choice(options.task, "model", options.model, MODELS, extra_choice="module:factory")
    if (options.channels, options.size) != (1, SIDE):
        raise ConfigError(
            f"channels and size of task {options.task} are for a model of module:factory; {model} takes the images "
            "as they are"
        )
    if model not in CHAINS:
        _reject_init(options)
    if model in HIDDEN_SIZES:
        return DenseModel(sizes=(NUM_PIXELS, *HIDDEN_SIZES[model], 10), prepare=_make_pixel_scaling(MAX_PIXEL))
    if model == "resnet18-gn":
        tensors, build = networks.resnet18_specs(), networks.resnet18_gn
    else:
        tensors, build = networks.list_chain_specs(CHAINS[model]), partial(networks.build_chain, CHAINS[model])
    first_weights = WEIGHT_INITIALISERS[
        validate_choice(options.task, "init", options.init, tuple(WEIGHT_INITIALISERS))
    ]
    return TorchModel(tensors=tensors, build=build, first_weights=first_weights, prepare=prepare)


def _reject_init(options: _ImageOptions) -> None:
    if options.init != "torch":
        raise ConfigError(
            f"init of task {options.task} is for the cnn models and lenet, got {options.init!r} for {options.model}"
        )


def _validate_int(task: str, option: str, value: object, minimum: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ConfigError(
            f"{option} of task {task} must be a whole number from {minimum} to {maximum}, got {value!r}"
        )
    return value


def _add_fashion_normalisation(graph: OnnxGraph, images: str) -> str:
    pixels = make_scaling(1.0 / MAX_PIXEL, shape=(1, SIDE, SIDE))(graph, images)
    centred = graph.add("Sub", pixels, graph.add_constant(np.float32(FASHION_MEAN)))
    return graph.add("Div", centred, graph.add_constant(np.float32(FASHION_STD)))


@register_node_builder(_add_fashion_normalisation)
def _normalise_fashion_pixels(images: Array) -> Array:
    pixels = _make_pixel_scaling(MAX_PIXEL)(images).reshape(-1, 1, SIDE, SIDE)
    pixels -= FASHION_MEAN
    pixels /= FASHION_STD
    return pixels
