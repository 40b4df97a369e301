"""Tasks of images: `digits` (8x8) in NumPy; `mnist`, `fashion-mnist` (28x28, grey) and `cifar-10` (32x32, colour)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.extensions import check_allowed
from edgefl.core.types import Array, Scalar
from edgefl.tasks.classification import ClassificationTask, TrainableModel, validate_choice
from edgefl.tasks.learners import networks
from edgefl.tasks.learners.image_layers import NORMS, NUM_CLASSES, ImageFormat
from edgefl.tasks.learners.image_networks import NORMALISED_NETWORKS, PLAIN_NETWORKS, make_chain
from edgefl.tasks.learners.numpy_learner import ACTIVATIONS, DenseModel
from edgefl.tasks.learners.torch_learner import (
    LIBRARIES,
    TorchFactoryModel,
    is_factory_name,
    make_chain_model,
    make_resizing_prepare,
)
from edgefl.tasks.losses.registry import CLASS_LOSSES
from edgefl.tasks.onnx_graph import (
    OnnxGraph,
    add_reduction,
    add_reshape,
    add_standard_deviation,
    make_scaling,
    register_node_builder,
)

DIGITS_LAYER_SIZES = {"mlp": (64, 64, 10), "logistic": (64, 10)}
DIGITS_MAX_PIXEL = 16.0
SIDE = 28
NUM_PIXELS = SIDE * SIDE
MAX_PIXEL = 255.0
FASHION_MEAN, FASHION_STD = 0.2860, 0.3530
FASHION_LABELS = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot",
)  # fmt: skip

CIFAR_SIDE = 32
CIFAR_MEANS = np.array([0.4914, 0.4822, 0.4465], np.float32).reshape(3, 1, 1)
CIFAR_STDS = np.array([0.2470, 0.2435, 0.2616], np.float32).reshape(3, 1, 1)
CIFAR_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

HIDDEN_SIZES = {"2nn": (200, 200), "mlp": (128, 128), "mlp-tanh": (128, 128), "logistic": ()}
"""Sizes of the hidden layers of the NumPy models; mlp-tanh is the network of Parallel-SGD's example."""
MODELS = (*PLAIN_NETWORKS, *NORMALISED_NETWORKS, "resnet18-gn", *HIDDEN_SIZES)
"""Built-in models; `torchvision:NAME`, `timm:NAME` and `module:factory` name other torch models."""
MODEL_OPTIONS: Mapping[str, tuple[str, Collection[str]]] = {
    "init": ("torch", PLAIN_NETWORKS),
    "norm": ("group", NORMALISED_NETWORKS),
    "activation": ("relu", ("2nn", "mlp")),
    "loss": ("cross-entropy", HIDDEN_SIZES),
}
"""Options that only some models have: the default, and the models."""
OTHER_MODELS = "torchvision:NAME or timm:NAME or module:factory"
DEFAULTS: dict[str, Scalar] = {}
DEEP_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.02, "batch_size": 64}
WEIGHT_INITIALISERS = {"torch": networks.make_uniform_weights, "adacomp": networks.make_adacomp_weights}
MAX_CHANNELS, MIN_SIZE, MAX_SIZE = 4, 8, 512
_GREY = ImageFormat(1, SIDE)


def digits(*, model: str = "mlp", activation: str = "relu", loss: str = "cross-entropy") -> ClassificationTask:
    """Returns the task; `model` is mlp (64-64-10) or logistic, `activation` and `loss` as of `mnist`."""
    return ClassificationTask(
        name="digits",
        model=DenseModel(
            sizes=DIGITS_LAYER_SIZES[validate_choice("digits", "model", model, tuple(DIGITS_LAYER_SIZES))],
            prepare=_make_pixel_scaling(DIGITS_MAX_PIXEL),
            activation=validate_choice("digits", "activation", activation, tuple(ACTIVATIONS)),
            loss=validate_choice("digits", "loss", loss, CLASS_LOSSES),
        ),
        input_shape=(8, 8),
        labels=tuple("0123456789"),
        defaults={"learning_rate": 0.5, "batch_size": 8, "epochs": 2.0},
    )


def mnist(  # noqa: PLR0913 one keyword for each option of a run file
    *,
    model: str = "cnn",
    init: str = "torch",
    norm: str = "group",
    activation: str = "relu",
    loss: str = "cross-entropy",
    channels: int = 1,
    size: int = SIDE,
) -> ClassificationTask:
    """Returns the task; its images are standardised one by one for the torch models.

    Args:
        model: cnn (421,642 parameters), another of `MODELS`, `torchvision:NAME`, `timm:NAME`, or `module:factory`.
        init: first weights of the models without normalisation: as torch draws them, or as in the AdaComp paper.
        norm: normalisation of the others: group, or batch with running statistics as buffers.
        activation: of the NumPy models: relu, tanh, sigmoid or gelu.
        loss: of the NumPy models: cross-entropy, or mse, the squared distance to 1 for the class and 0 for others.
        channels: of a `module:factory` model: number of copies of the grey image; 3 for a library's.
        size: of a `module:factory` or a library's model: pixels a side after resizing.
    """
    options = _ImageOptions(
        task="mnist",
        model=model,
        init=init,
        norm=norm,
        activation=activation,
        loss=loss,
        channels=channels,
        size=size,
    )
    return _make_task(options, _GREY, standardise_images, tuple("0123456789"))


def fashion_mnist(  # noqa: PLR0913 one keyword for each option of a run file
    *,
    model: str = "cnn-small",
    init: str = "torch",
    norm: str = "group",
    activation: str = "relu",
    loss: str = "cross-entropy",
    channels: int = 1,
    size: int = SIDE,
) -> ClassificationTask:
    """Returns the task, with the options of `mnist`."""
    options = _ImageOptions(
        task="fashion-mnist",
        model=model,
        init=init,
        norm=norm,
        activation=activation,
        loss=loss,
        channels=channels,
        size=size,
    )
    return _make_task(options, _GREY, _normalise_fashion_pixels, FASHION_LABELS)


def cifar10(
    *,
    model: str = "cnn",
    init: str = "torch",
    norm: str = "group",
    activation: str = "relu",
    loss: str = "cross-entropy",
    size: int = CIFAR_SIDE,
) -> ClassificationTask:
    """Returns the task of small photographs, [n, 3, 32, 32], with the options of `mnist` but `channels`."""
    options = _ImageOptions(
        task="cifar-10",
        model=model,
        init=init,
        norm=norm,
        activation=activation,
        loss=loss,
        channels=1,
        size=size,
    )
    return _make_task(options, ImageFormat(3, CIFAR_SIDE), _normalise_cifar_pixels, CIFAR_LABELS)


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
    norm: str
    activation: str
    loss: str
    channels: int
    size: int


def _make_task(
    options: _ImageOptions, image: ImageFormat, prepare: Callable[[Array], Array], labels: tuple[str, ...]
) -> ClassificationTask:
    is_factory = is_factory_name(options.model)
    is_deep = is_factory or options.model not in (*PLAIN_NETWORKS, *HIDDEN_SIZES)
    make_model = _make_factory_model if is_factory else _make_built_in_model
    return ClassificationTask(
        name=options.task,
        model=make_model(options, image, prepare),
        input_shape=(image.side, image.side) if image == _GREY else (image.channels, image.side, image.side),
        labels=labels,
        defaults=DEEP_DEFAULTS if is_deep else DEFAULTS,
    )


def _make_factory_model(
    options: _ImageOptions, image: ImageFormat, prepare: Callable[[Array], Array]
) -> TorchFactoryModel:
    is_of_library = options.model.startswith(LIBRARIES)
    if not is_of_library:
        check_allowed(options.model, "model", ConfigError)
    _reject_options(options)
    copies = _validate_int(options.task, "channels", options.channels, 1, MAX_CHANNELS)
    if is_of_library and image.channels == 1:
        copies = 3
    size = _validate_int(options.task, "size", options.size, MIN_SIZE, MAX_SIZE)
    return TorchFactoryModel(
        target=options.model,
        num_classes=NUM_CLASSES,
        input_shape=(copies * image.channels, size, size),
        prepare=make_resizing_prepare(prepare, channels=copies, size=size),
    )


def _make_built_in_model(
    options: _ImageOptions, image: ImageFormat, prepare: Callable[[Array], Array]
) -> TrainableModel:
    model = validate_choice(options.task, "model", options.model, MODELS, extra_choice=OTHER_MODELS)
    if (options.channels, options.size) != (1, image.side):
        raise ConfigError(
            f"channels and size of task {options.task} are for a model of torchvision, timm or module:factory; "
            f"{model} takes the images as they are"
        )
    _reject_options(options)
    if model in HIDDEN_SIZES:
        activation = "tanh" if model == "mlp-tanh" else options.activation
        return DenseModel(
            sizes=(image.channels * image.side**2, *HIDDEN_SIZES[model], NUM_CLASSES),
            prepare=_make_pixel_scaling(MAX_PIXEL),
            activation=validate_choice(options.task, "activation", activation, tuple(ACTIVATIONS)),
            loss=validate_choice(options.task, "loss", options.loss, CLASS_LOSSES),
        )
    norm = validate_choice(options.task, "norm", options.norm, tuple(NORMS))
    first_weights = WEIGHT_INITIALISERS[
        validate_choice(options.task, "init", options.init, tuple(WEIGHT_INITIALISERS))
    ]
    chain = make_chain(model.removesuffix("-gn"), image, norm)
    return make_chain_model(chain, prepare, first_weights)


def _reject_options(options: _ImageOptions) -> None:
    """Rejects an option of other models."""
    for name, (usual, models) in MODEL_OPTIONS.items():
        value = getattr(options, name)
        if value != usual and options.model not in models:
            raise ConfigError(
                f"{name} of task {options.task} is for {', '.join(models)}, got {value!r} for {options.model}"
            )


def _validate_int(task: str, option: str, value: object, minimum: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ConfigError(
            f"{option} of task {task} must be a whole number from {minimum} to {maximum}, got {value!r}"
        )
    return value


def _make_normalisation(image: ImageFormat, means: Array | float, stds: Array | float) -> Callable[[Array], Array]:
    """Returns a `prepare` to [n, channels, side, side] float32 of these means and deviations of pixels."""
    shape = (image.channels, image.side, image.side)

    def draw(graph: OnnxGraph, images: str) -> str:
        pixels = make_scaling(1.0 / MAX_PIXEL, shape=shape)(graph, images)
        centred = graph.add("Sub", pixels, graph.add_constant(np.float32(means)))
        return graph.add("Div", centred, graph.add_constant(np.float32(stds)))

    @register_node_builder(draw)
    def normalise(images: Array) -> Array:
        pixels = images.astype(np.float32).reshape(-1, *shape)
        pixels /= MAX_PIXEL
        pixels -= means
        pixels /= stds
        return pixels

    return normalise


_normalise_fashion_pixels = _make_normalisation(_GREY, FASHION_MEAN, FASHION_STD)
_normalise_cifar_pixels = _make_normalisation(ImageFormat(3, CIFAR_SIDE), CIFAR_MEANS, CIFAR_STDS)
