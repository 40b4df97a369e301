"""`mnist` and `fashion-mnist`: 28x28 grey images, with torch networks or fully connected ones in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgefl.errors import ConfigError
from edgefl.tasks import layout, networks
from edgefl.tasks.classification import ClassificationTask, Model, checked_choice
from edgefl.tasks.module_models import ModuleModel, is_module_name, resized_images
from edgefl.tasks.numpy_learner import DenseModel
from edgefl.tasks.onnx_steps import Graph, deviation, drawn_as, reduced, reshaped, scaled
from edgefl.tasks.torch_learner import TorchModel
from edgefl.types import Array, Scalar

SIDE = 28
NUM_PIXELS = SIDE * SIDE
MAX_PIXEL = 255.0
FASHION_MEAN, FASHION_STD = 0.2860, 0.3530
FASHION_LABELS = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot",
)  # fmt: skip

MODELS = ("cnn", "cnn-small", "cnn-large", "lenet", "resnet18-gn", "2nn", "mlp", "logistic")
"""Those that are built in; `module:factory` names any other torch model."""
HIDDEN = {"2nn": (200, 200), "mlp": (128, 128), "logistic": ()}
"""Sizes of the hidden layers of those that are learned in NumPy."""
DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.05, "batch_size": 32, "epochs": 1.0}
DEEP_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.02, "batch_size": 64, "epochs": 1.0}
INITS = {"torch": layout.uniform_weights, "adacomp": layout.adacomp_weights}
MAX_CHANNELS, MIN_SIZE, MAX_SIZE = 4, 8, 512


def mnist(*, model: str = "cnn", init: str = "torch", channels: int = 1, size: int = SIDE) -> ClassificationTask:
    """Returns the task; its images are standardised one by one for the torch models.

    Args:
        model: cnn (421,642 parameters), another of `MODELS`, or `module:factory`.
        init: first weights of the cnn models and lenet: as torch draws them, or as in the AdaComp paper.
        channels: of a `module:factory` model: the grey image is given to it so many times.
        size: of a `module:factory` model: images are resized to so many pixels a side.
    """
    options = _Options(task="mnist", model=model, init=init, channels=channels, size=size)
    return _task(options, standardised_images, tuple("0123456789"))


def fashion_mnist(
    *, model: str = "cnn-small", init: str = "torch", channels: int = 1, size: int = SIDE
) -> ClassificationTask:
    """Returns the task, with the options of `mnist`."""
    options = _Options(task="fashion-mnist", model=model, init=init, channels=channels, size=size)
    return _task(options, _fashion_pixels, FASHION_LABELS)


def _draw_standardised(graph: Graph, images: str) -> str:
    pixels = scaled(1.0 / MAX_PIXEL, shape=(NUM_PIXELS,))(graph, images)
    centred = graph.add("Sub", pixels, reduced(graph, "ReduceMean", pixels, 1))
    floor = graph.constant(np.float32(1.0 / np.sqrt(NUM_PIXELS)))
    spread = graph.add("Max", deviation(graph, centred, 1), floor)
    return reshaped(graph, graph.add("Div", centred, spread), (1, SIDE, SIDE))


@drawn_as(_draw_standardised)
def standardised_images(images: Array) -> Array:
    """Returns [n, 1, 28, 28] float32, each image with mean 0 and variance 1 (an empty one stays 0)."""
    pixels: Array = images.astype(np.float32).reshape(len(images), -1) / MAX_PIXEL
    pixels -= pixels.mean(axis=1, keepdims=True)
    # Without this floor, that of one white pixel, a blank image would divide by zero.
    pixels /= np.maximum(pixels.std(axis=1, keepdims=True), 1.0 / np.sqrt(NUM_PIXELS))
    return pixels.reshape(-1, 1, SIDE, SIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What a run file says of the model; the names are those of the task's options."""

    task: str
    model: str
    init: str
    channels: int
    size: int


def _task(options: _Options, prepare: Callable[[Array], Array], labels: tuple[str, ...]) -> ClassificationTask:
    is_module = is_module_name(options.model)
    return ClassificationTask(
        name=options.task,
        model=_module_model(options, prepare, len(labels)) if is_module else _built_in(options, prepare),
        input_shape=(SIDE, SIDE),
        labels=labels,
        defaults=DEEP_DEFAULTS if is_module or options.model == "resnet18-gn" else DEFAULTS,
    )


def _module_model(options: _Options, prepare: Callable[[Array], Array], num_classes: int) -> ModuleModel:
    _refuse_init(options)
    channels = _whole(options.task, "channels", options.channels, 1, MAX_CHANNELS)
    size = _whole(options.task, "size", options.size, MIN_SIZE, MAX_SIZE)
    return ModuleModel(
        target=options.model,
        num_classes=num_classes,
        input_shape=(channels, size, size),
        prepare=resized_images(prepare, channels=channels, size=size),
    )


def _built_in(options: _Options, prepare: Callable[[Array], Array]) -> Model:
    model = checked_choice(options.task, "model", options.model, MODELS, other="module:factory")
    if (options.channels, options.size) != (1, SIDE):
        raise ConfigError(
            f"channels and size of task {options.task} are for a model of module:factory; {model} takes the images "
            "as they are"
        )
    if model in HIDDEN:
        _refuse_init(options)
        return DenseModel(sizes=(NUM_PIXELS, *HIDDEN[model], 10), prepare=_unit_pixels)
    if model == "resnet18-gn":
        _refuse_init(options)
        tensors, build = networks.resnet18_layout(), networks.resnet18_gn
    else:
        tensors, build = {
            "cnn": (networks.CNN, networks.cnn),
            "cnn-small": (networks.CNN_SMALL, networks.cnn_small),
            "cnn-large": (networks.CNN_LARGE, networks.cnn_large),
            "lenet": (networks.LENET, networks.lenet),
        }[model]
    first_weights = INITS[checked_choice(options.task, "init", options.init, tuple(INITS))]
    return TorchModel(tensors=tensors, build=build, first_weights=first_weights, prepare=prepare)


def _refuse_init(options: _Options) -> None:
    if options.init != "torch":
        raise ConfigError(
            f"init of task {options.task} is for the cnn models and lenet, got {options.init!r} for {options.model}"
        )


def _whole(task: str, option: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{option} of task {task} must be a whole number from {least} to {most}, got {value!r}")
    return value


@drawn_as(scaled(1.0 / MAX_PIXEL))
def _unit_pixels(images: Array) -> Array:
    scaled: Array = images.astype(np.float32)
    scaled /= MAX_PIXEL
    return scaled


def _draw_fashion(graph: Graph, images: str) -> str:
    pixels = scaled(1.0 / MAX_PIXEL, shape=(1, SIDE, SIDE))(graph, images)
    centred = graph.add("Sub", pixels, graph.constant(np.float32(FASHION_MEAN)))
    return graph.add("Div", centred, graph.constant(np.float32(FASHION_STD)))


@drawn_as(_draw_fashion)
def _fashion_pixels(images: Array) -> Array:
    pixels = _unit_pixels(images).reshape(-1, 1, SIDE, SIDE)
    pixels -= FASHION_MEAN
    pixels /= FASHION_STD
    return pixels
