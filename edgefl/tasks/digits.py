"""`digits`: scikit-learn's 8x8 handwritten digits, learned in NumPy."""

from __future__ import annotations

import numpy as np

from edgefl.tasks.classification import ClassificationTask, checked_choice
from edgefl.tasks.numpy_learner import DenseModel
from edgefl.tasks.onnx_steps import drawn_as, scaled
from edgefl.types import Array

SIZES = {"mlp": (64, 64, 10), "logistic": (64, 10)}
MAX_PIXEL = 16.0


def digits(*, model: str = "mlp") -> ClassificationTask:
    """Returns the task; `model` is mlp (64-64-10) or logistic."""
    return ClassificationTask(
        name="digits",
        model=DenseModel(sizes=SIZES[checked_choice("digits", "model", model, tuple(SIZES))], prepare=_unit_pixels),
        input_shape=(8, 8),
        labels=tuple("0123456789"),
        defaults={"learning_rate": 0.5, "batch_size": 8, "epochs": 2.0},
    )


@drawn_as(scaled(1.0 / MAX_PIXEL))
def _unit_pixels(images: Array) -> Array:
    scaled: Array = images.astype(np.float32)
    scaled /= MAX_PIXEL
    return scaled
