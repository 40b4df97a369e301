"""`mnist` and `fashion-mnist`: 28x28 grey images, with torch networks or a logistic regression in NumPy."""

from __future__ import annotations

import numpy as np

from edgefl.tasks import layout, networks
from edgefl.tasks.classification import ClassificationTask, Model, checked_choice
from edgefl.tasks.numpy_learner import DenseModel
from edgefl.tasks.torch_learner import TorchModel
from edgefl.types import Array, Scalar

SIDE = 28
NUM_PIXELS = SIDE * SIDE
MAX_PIXEL = 255.0
FASHION_MEAN, FASHION_STD = 0.2860, 0.3530
FASHION_LABELS = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot",
)  # fmt: skip

CNN_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.05, "batch_size": 32, "epochs": 1.0}
LOGISTIC_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.05, "batch_size": 32, "epochs": 1.0}
RESNET_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.02, "batch_size": 64, "epochs": 1.0}
INITS = {"torch": layout.uniform_weights, "paper": layout.paper_weights}


def mnist(*, model: str = "cnn", init: str = "torch") -> ClassificationTask:
    """Returns the task.

    Args:
        model: cnn (421,642 parameters, images standardised one by one) or logistic.
        init: first weights of the cnn: torch's default, or as in the AdaComp paper.
    """
    checked_choice("mnist", "model", model, ("cnn", "logistic"))
    first_weights = INITS[checked_choice("mnist", "init", init, tuple(INITS))]
    cnn = TorchModel(
        tensors=networks.CNN, build=networks.cnn, first_weights=first_weights, prepare=standardised_images
    )
    return ClassificationTask(
        name="mnist",
        model=cnn if model == "cnn" else _logistic(),
        input_shape=(SIDE, SIDE),
        labels=tuple("0123456789"),
        defaults=CNN_DEFAULTS if model == "cnn" else LOGISTIC_DEFAULTS,
    )


def fashion_mnist(*, model: str = "cnn-small") -> ClassificationTask:
    """Returns the task; `model` is cnn-small, cnn, logistic or resnet18-gn."""
    choices = ("cnn-small", "cnn", "logistic", "resnet18-gn")
    checked_choice("fashion-mnist", "model", model, choices)
    defaults = {"logistic": LOGISTIC_DEFAULTS, "resnet18-gn": RESNET_DEFAULTS}.get(model, CNN_DEFAULTS)
    return ClassificationTask(
        name="fashion-mnist",
        model=_fashion_model(model),
        input_shape=(SIDE, SIDE),
        labels=FASHION_LABELS,
        defaults=defaults,
    )


def standardised_images(images: Array) -> Array:
    """Returns [n, 1, 28, 28] float32, each image with mean 0 and variance 1 (an empty one stays 0)."""
    pixels: Array = images.astype(np.float32).reshape(len(images), -1) / MAX_PIXEL
    pixels -= pixels.mean(axis=1, keepdims=True)
    # Without this floor, that of one white pixel, a blank image would divide by zero.
    pixels /= np.maximum(pixels.std(axis=1, keepdims=True), 1.0 / np.sqrt(NUM_PIXELS))
    return pixels.reshape(-1, 1, SIDE, SIDE)


def _fashion_model(model: str) -> Model:
    if model == "logistic":
        return _logistic()
    tensors, build = {
        "cnn-small": (networks.CNN_SMALL, networks.cnn_small),
        "cnn": (networks.CNN, networks.cnn),
        "resnet18-gn": (networks.resnet18_layout(), networks.resnet18_gn),
    }[model]
    return TorchModel(tensors=tensors, build=build, first_weights=layout.uniform_weights, prepare=_fashion_pixels)


def _logistic() -> DenseModel:
    return DenseModel(sizes=(NUM_PIXELS, 10), prepare=_unit_pixels)


def _unit_pixels(images: Array) -> Array:
    scaled: Array = images.astype(np.float32)
    scaled /= MAX_PIXEL
    return scaled


def _fashion_pixels(images: Array) -> Array:
    pixels = _unit_pixels(images).reshape(-1, 1, SIDE, SIDE)
    pixels -= FASHION_MEAN
    pixels /= FASHION_STD
    return pixels
