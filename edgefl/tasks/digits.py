"""`digits`: scikit-learn's 8x8 handwritten digits, learned in NumPy."""

from __future__ import annotations

import numpy as np

from edgefl.core.types import Array
from edgefl.tasks.classification import ClassificationTask, validate_choice
from edgefl.tasks.export.onnx_graph import make_scaling, register_node_builder
from edgefl.tasks.learners.numpy_learner import DenseModel

LAYER_SIZES = {"mlp": (64, 64, 10), "logistic": (64, 10)}
MAX_PIXEL = 16.0


def digits(*, model: str = "mlp") -> ClassificationTask:
    """Returns the task; `model` is mlp (64-64-10) or logistic."""
    return ClassificationTask(
        name="digits",
        model=DenseModel(
            sizes=LAYER_SIZES[validate_choice("digits", "model", model, tuple(LAYER_SIZES))], prepare=_scale_pixels
        ),
        input_shape=(8, 8),
        labels=tuple("0123456789"),
        defaults={"learning_rate": 0.5, "batch_size": 8, "epochs": 2.0},
    )


@register_node_builder(make_scaling(1.0 / MAX_PIXEL))
def _scale_pixels(images: Array) -> Array:
    scaled: Array = images.astype(np.float32)
    scaled /= MAX_PIXEL
    return scaled
