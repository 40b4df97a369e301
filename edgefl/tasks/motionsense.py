"""`motionsense`: what a person does, from 2.56 s of phone motion; each person is a natural shard."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from edgefl.tasks import layout, networks
from edgefl.tasks.classification import ClassificationTask, Model, checked_choice
from edgefl.tasks.module_models import ModuleModel, is_module_name
from edgefl.tasks.motion_windows import CHANNELS, WINDOW
from edgefl.tasks.numpy_learner import DenseModel
from edgefl.tasks.onnx_steps import Graph, deviation, drawn_as, reduced, reshaped
from edgefl.tasks.torch_learner import TorchModel
from edgefl.types import Array, Scalar

LABELS = ("downstairs", "upstairs", "walking", "jogging", "sitting", "standing")
# Mean and standard deviation of each channel over the training trials, fixed here: a board that sees one
# person cannot know them.
MEAN = np.array([0.0375, 0.7839, -0.1245, 0.0042, 0.0167, 0.0139, -0.0051, 0.0455, 0.0378], np.float32)
STD = np.array([0.3326, 0.2970, 0.4120, 1.3193, 1.2437, 0.8208, 0.3289, 0.5360, 0.3804], np.float32)
BAND_EDGES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 20, 33)
"""Edges of the frequency bands, in steps of 50/128 Hz; what lies above 13 Hz is mostly noise."""
NUM_FEATURES = CHANNELS * (5 + len(BAND_EDGES) - 1)

MODELS = ("cnn", "mlp", "logistic")
CNN_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.05, "batch_size": 16, "epochs": 1.0}
FEATURE_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.05, "batch_size": 16, "epochs": 1.0}


def motionsense(*, model: str = "cnn") -> ClassificationTask:
    """Returns the task.

    `model` is cnn or `module:factory` (torch, on raw windows [9, 128]), mlp or logistic (NumPy, on features of a
    window).
    """
    if not is_module_name(model):
        checked_choice("motionsense", "model", model, MODELS, other="module:factory")
    return ClassificationTask(
        name="motionsense",
        model=_model(model),
        input_shape=(CHANNELS, WINDOW),
        labels=LABELS,
        defaults=FEATURE_DEFAULTS if model in ("mlp", "logistic") else CNN_DEFAULTS,
    )


def _draw_standardised(graph: Graph, windows: str) -> str:
    centred = graph.add("Sub", windows, graph.constant(MEAN[:, None]))
    return graph.add("Div", centred, graph.constant(STD[:, None]))


def _draw_features(graph: Graph, windows: str) -> str:
    value = _draw_standardised(graph, windows)
    mean = reduced(graph, "ReduceMean", value, 2)
    parts = [
        mean,
        deviation(graph, graph.add("Sub", value, mean), 2),
        reduced(graph, "ReduceMin", value, 2),
        reduced(graph, "ReduceMax", value, 2),
        _draw_roughness(graph, value),
        _draw_energies(graph, value),
    ]
    return reshaped(graph, graph.add("Concat", *parts, axis=2), (NUM_FEATURES,))


def _draw_roughness(graph: Graph, value: str) -> str:
    def part(start: int, stop: int) -> str:
        bounds = (graph.constant([number], dtype="int64") for number in (start, stop, 2))
        return graph.add("Slice", value, *bounds)

    steps = graph.add("Abs", graph.add("Sub", part(1, WINDOW), part(0, WINDOW - 1)))
    return reduced(graph, "ReduceMean", steps, 2)


def _draw_energies(graph: Graph, value: str) -> str:
    """Adds the Fourier transform as two matrix products: onnxruntime has none that every board can run."""
    angles = 2.0 * np.pi * np.outer(np.arange(WINDOW), np.arange(BAND_EDGES[-1])) / WINDOW
    waves = [graph.add("MatMul", value, graph.constant(wave)) for wave in (np.cos(angles), np.sin(angles))]
    power = graph.add("Add", *(graph.add("Mul", wave, wave) for wave in waves))
    steps = np.arange(BAND_EDGES[-1])
    in_band = np.stack([(start <= steps) & (steps < stop) for start, stop in pairwise(BAND_EDGES)], axis=1)
    bands = graph.add("MatMul", power, graph.constant(in_band / WINDOW))
    logs = graph.add("Log", graph.add("Add", bands, graph.constant(np.float32(1e-3))))
    return graph.add("Mul", logs, graph.constant(np.float32(0.25)))


@drawn_as(_draw_standardised)
def standardised_windows(windows: Array) -> Array:
    """Returns [n, 9, 128] float32, each channel at mean 0 and variance 1 over the training trials."""
    scaled: Array = windows.astype(np.float32)
    scaled -= MEAN[:, None]
    scaled /= STD[:, None]
    return scaled


@drawn_as(_draw_features)
def window_features(windows: Array) -> Array:
    """Returns [n, 135] float32: per channel mean, deviation, extremes, roughness and log energies by frequency."""
    scaled = standardised_windows(windows)
    mean, deviation = scaled.mean(axis=2), scaled.std(axis=2)
    roughness = np.abs(np.diff(scaled, axis=2)).mean(axis=2)
    power = np.abs(np.fft.rfft(scaled, axis=2)).astype(np.float32) ** 2 / WINDOW
    bands = np.add.reduceat(power[:, :, : BAND_EDGES[-1]], BAND_EDGES[:-1], axis=2)
    energies = 0.25 * np.log(bands + 1e-3)
    simple = np.stack([mean, deviation, scaled.min(axis=2), scaled.max(axis=2), roughness], axis=2)
    features: Array = np.concatenate([simple, energies], axis=2).reshape(len(windows), -1)
    return features.astype(np.float32)


def _model(model: str) -> Model:
    if is_module_name(model):
        return ModuleModel(
            target=model, num_classes=len(LABELS), input_shape=(CHANNELS, WINDOW), prepare=standardised_windows
        )
    if model == "cnn":
        return TorchModel(
            tensors=networks.motion_layout(CHANNELS, len(LABELS)),
            build=partial(networks.motion_cnn, CHANNELS, len(LABELS)),
            first_weights=layout.uniform_weights,
            prepare=standardised_windows,
        )
    hidden = (64,) if model == "mlp" else ()
    return DenseModel(sizes=(NUM_FEATURES, *hidden, len(LABELS)), prepare=window_features)
