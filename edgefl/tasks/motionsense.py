"""`motionsense`: a person's activity, from 2.56 s of phone motion; each person is a natural shard."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from edgefl.core.types import Array, Scalar
from edgefl.tasks.classification import ClassificationTask, TrainableModel, validate_choice
from edgefl.tasks.datasets.motionsense_windows import CHANNELS, WINDOW_SAMPLES
from edgefl.tasks.export.onnx_graph import (
    OnnxGraph,
    add_reduction,
    add_reshape,
    add_standard_deviation,
    register_node_builder,
)
from edgefl.tasks.learners import layer_specs, torch_networks
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_factory import TorchFactoryModel, is_factory_name
from edgefl.tasks.learners.torch_learner import TorchModel

LABELS = ("downstairs", "upstairs", "walking", "jogging", "sitting", "standing")
# Mean and standard deviation of each channel over the training trials, fixed here: a device with data of
# one person cannot know them.
MEAN = np.array([0.0375, 0.7839, -0.1245, 0.0042, 0.0167, 0.0139, -0.0051, 0.0455, 0.0378], np.float32)
STD = np.array([0.3326, 0.2970, 0.4120, 1.3193, 1.2437, 0.8208, 0.3289, 0.5360, 0.3804], np.float32)
BAND_EDGES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 20, 33)
"""Edges of the frequency bands, in steps of 50/128 Hz; above 13 Hz there is mostly noise."""
NUM_FEATURES = CHANNELS * (5 + len(BAND_EDGES) - 1)

MODELS = ("cnn", "mlp", "logistic")
CNN_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.05, "batch_size": 16, "epochs": 1.0}
FEATURE_DEFAULTS: dict[str, Scalar] = {"learning_rate": 0.05, "batch_size": 16, "epochs": 1.0}


def motionsense(*, model: str = "cnn") -> ClassificationTask:
    """Returns the task.

    `model` is cnn or `module:factory` (torch, on raw windows [9, 128]), mlp or logistic (NumPy, on features of a
    window).
    """
    if not is_factory_name(model):
        validate_choice("motionsense", "model", model, MODELS, extra_choice="module:factory")
    return ClassificationTask(
        name="motionsense",
        model=_make_model(model),
        input_shape=(CHANNELS, WINDOW_SAMPLES),
        labels=LABELS,
        defaults=FEATURE_DEFAULTS if model in ("mlp", "logistic") else CNN_DEFAULTS,
    )


def _add_standardisation(graph: OnnxGraph, windows: str) -> str:
    centred = graph.add("Sub", windows, graph.add_constant(MEAN[:, None]))
    return graph.add("Div", centred, graph.add_constant(STD[:, None]))


def _add_features(graph: OnnxGraph, windows: str) -> str:
    value = _add_standardisation(graph, windows)
    mean = add_reduction(graph, "ReduceMean", value, 2)
    parts = [
        mean,
        add_standard_deviation(graph, graph.add("Sub", value, mean), 2),
        add_reduction(graph, "ReduceMin", value, 2),
        add_reduction(graph, "ReduceMax", value, 2),
        _add_roughness(graph, value),
        _add_energies(graph, value),
    ]
    return add_reshape(graph, graph.add("Concat", *parts, axis=2), (NUM_FEATURES,))


def _add_roughness(graph: OnnxGraph, value: str) -> str:
    def part(start: int, stop: int) -> str:
        bounds = (graph.add_constant([number], dtype="int64") for number in (start, stop, 2))
        return graph.add("Slice", value, *bounds)

    steps = graph.add("Abs", graph.add("Sub", part(1, WINDOW_SAMPLES), part(0, WINDOW_SAMPLES - 1)))
    return add_reduction(graph, "ReduceMean", steps, 2)


def _add_energies(graph: OnnxGraph, value: str) -> str:
    """Adds the Fourier transform as two matrix products: onnxruntime has none for every device."""
    angles = 2.0 * np.pi * np.outer(np.arange(WINDOW_SAMPLES), np.arange(BAND_EDGES[-1])) / WINDOW_SAMPLES
    waves = [graph.add("MatMul", value, graph.add_constant(wave)) for wave in (np.cos(angles), np.sin(angles))]
    power = graph.add("Add", *(graph.add("Mul", wave, wave) for wave in waves))
    steps = np.arange(BAND_EDGES[-1])
    in_band = np.stack([(start <= steps) & (steps < stop) for start, stop in pairwise(BAND_EDGES)], axis=1)
    bands = graph.add("MatMul", power, graph.add_constant(in_band / WINDOW_SAMPLES))
    logs = graph.add("Log", graph.add("Add", bands, graph.add_constant(np.float32(1e-3))))
    return graph.add("Mul", logs, graph.add_constant(np.float32(0.25)))


@register_node_builder(_add_standardisation)
def standardise_windows(windows: Array) -> Array:
    """Returns [n, 9, 128] float32, each channel at mean 0 and variance 1 over the training trials."""
    scaled: Array = windows.astype(np.float32)
    scaled -= MEAN[:, None]
    scaled /= STD[:, None]
    return scaled


@register_node_builder(_add_features)
def compute_window_features(windows: Array) -> Array:
    """Returns [n, 135] float32: per channel mean, deviation, extremes, roughness and log energies by frequency."""
    scaled = standardise_windows(windows)
    mean, deviation = scaled.mean(axis=2), scaled.std(axis=2)
    roughness = np.abs(np.diff(scaled, axis=2)).mean(axis=2)
    power = np.abs(np.fft.rfft(scaled, axis=2)).astype(np.float32) ** 2 / WINDOW_SAMPLES
    bands = np.add.reduceat(power[:, :, : BAND_EDGES[-1]], BAND_EDGES[:-1], axis=2)
    energies = 0.25 * np.log(bands + 1e-3)
    simple = np.stack([mean, deviation, scaled.min(axis=2), scaled.max(axis=2), roughness], axis=2)
    features: Array = np.concatenate([simple, energies], axis=2).reshape(len(windows), -1)
    return features.astype(np.float32)


def _make_model(model: str) -> TrainableModel:
    if is_factory_name(model):
        return TorchFactoryModel(
            target=model, num_classes=len(LABELS), input_shape=(CHANNELS, WINDOW_SAMPLES), prepare=standardise_windows
        )
    if model == "cnn":
        return TorchModel(
            tensors=torch_networks.motion_specs(CHANNELS, len(LABELS)),
            build=partial(torch_networks.motion_cnn, CHANNELS, len(LABELS)),
            first_weights=layer_specs.make_uniform_weights,
            prepare=standardise_windows,
        )
    hidden = (64,) if model == "mlp" else ()
    return DenseModel(sizes=(NUM_FEATURES, *hidden, len(LABELS)), prepare=compute_window_features)
