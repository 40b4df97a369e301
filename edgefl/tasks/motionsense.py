"""`motionsense`: a person's activity, from 2.56 s of phone motion; each person is a natural shard.

The recordings (phones of 24 people at 50 Hz) are cut into windows.
Source: Malekzadeh et al., Mobile Sensor Data Anonymization, IoTDI 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.extensions import check_allowed
from edgefl.core.types import Array, Dataset, Scalar
from edgefl.tasks.classification import ClassificationTask, TrainableModel, validate_choice
from edgefl.tasks.datasets.array_files import read_npz
from edgefl.tasks.learners import networks
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_learner import TorchFactoryModel, is_factory_name, make_chain_model
from edgefl.tasks.onnx_graph import (
    OnnxGraph,
    add_reduction,
    add_reshape,
    add_standard_deviation,
    register_node_builder,
)

WINDOW_SAMPLES = 128
STRIDE_SAMPLES = 64
FIRST_TEST_TRIAL = 11
CHANNELS = 9
FILE_NAME = "motionsense.npz"
_RECORDING_ARRAYS = ("length", "subject", "activity", "trial")
_ARRAYS = ("q", "scale", *_RECORDING_ARRAYS)

LABELS = ("downstairs", "upstairs", "walking", "jogging", "sitting", "standing")
# Mean and standard deviation of each channel over the training trials, fixed here: a device with data of
# one person cannot know them.
MEAN = np.array([0.0375, 0.7839, -0.1245, 0.0042, 0.0167, 0.0139, -0.0051, 0.0455, 0.0378], np.float32)
STD = np.array([0.3326, 0.2970, 0.4120, 1.3193, 1.2437, 0.8208, 0.3289, 0.5360, 0.3804], np.float32)
BAND_EDGES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 20, 33)
"""Edges of the frequency bands, in steps of 50/128 Hz; above 13 Hz there is mostly noise."""
NUM_FEATURES = CHANNELS * (5 + len(BAND_EDGES) - 1)

MODELS = ("cnn", "mlp", "logistic")
DEFAULTS: dict[str, Scalar] = {"batch_size": 16}


def read_motion_windows(path: Path) -> tuple[Dataset, Dataset, Array]:
    """Returns training and test windows with their activities, and the people of the training windows.

    Windows are [n, 9, 128] float32: gravity and acceleration in g, rotation in rad/s. Test recordings are whole, from
    trial 11 on.

    Raises:
        DataError: the file is missing, damaged or inconsistent.
    """
    arrays = _load_arrays(path)
    stops = np.cumsum(arrays["length"])
    parts: dict[bool, list[int]] = {False: [], True: []}
    for recording, trial in enumerate(arrays["trial"]):
        parts[bool(trial >= FIRST_TEST_TRIAL)].append(recording)
    (train, subjects), (test, _) = (_select_windows(arrays, stops, parts[is_test]) for is_test in (False, True))
    return train, test, subjects


def split_windows(recording: Array) -> Array:
    """Returns [n, channels, 128] windows that start every 64 samples; a shorter remainder is dropped."""
    if recording.shape[1] < WINDOW_SAMPLES:
        return np.empty((0, recording.shape[0], WINDOW_SAMPLES), recording.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(recording, WINDOW_SAMPLES, axis=1)[:, ::STRIDE_SAMPLES]
    return windows.transpose(1, 0, 2)


def _select_windows(arrays: dict[str, Array], stops: Array, recordings: list[int]) -> tuple[Dataset, Array]:
    inputs, labels, subjects = [], [], []
    for recording in recordings:
        stop = int(stops[recording])
        windows = split_windows(arrays["q"][:, stop - int(arrays["length"][recording]) : stop])
        inputs.append(windows)
        labels.append(np.full(len(windows), arrays["activity"][recording], np.int64))
        subjects.append(np.full(len(windows), arrays["subject"][recording], np.int64))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.concatenate(inputs).astype(np.float32) * arrays["scale"].astype(np.float32)
    if not np.all(np.isfinite(scaled)):
        raise DataError(f"{FILE_NAME} holds samples that are no finite float32; download it again")
    return Dataset(inputs=scaled, targets=np.concatenate(labels)), np.concatenate(subjects)


def _load_arrays(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; --data names the folder that holds {FILE_NAME}")
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, _ARRAYS)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); download it again") from None
    _check_arrays(arrays, path)
    return arrays


def _check_arrays(arrays: Mapping[str, Array], path: Path) -> None:
    """Checks that each array has one integer per recording, and that lengths match the samples."""
    lengths, shape = arrays["length"], arrays["q"].shape
    for name in _RECORDING_ARRAYS:
        array = arrays[name]
        if not np.issubdtype(array.dtype, np.integer) or array.ndim != 1 or array.shape != lengths.shape:
            raise DataError(f"{path}: {name} must be whole numbers, one a recording; download it again")
    is_number = np.issubdtype(arrays["q"].dtype, np.number) and np.issubdtype(arrays["scale"].dtype, np.floating)
    if not len(lengths) or lengths.min() < 0 or not is_number or arrays["scale"].ndim:
        raise DataError(f"{path} holds no recordings, or samples that are no numbers; download it again")
    total = sum(map(int, lengths))
    if shape != (CHANNELS, total):
        raise DataError(f"{path} holds samples {list(shape)}, its recordings add up to {[CHANNELS, total]}")
    is_test = arrays["trial"] >= FIRST_TEST_TRIAL
    if is_test.all() or not is_test.any():
        raise DataError(
            f"{path} must hold recordings of trials before {FIRST_TEST_TRIAL} and later; download it again"
        )


def motionsense(*, model: str = "cnn") -> ClassificationTask:
    """Returns the task.

    `model` is cnn or `module:factory` (torch, on raw windows [9, 128]), mlp or logistic (NumPy, on features of a
    window).
    """
    if is_factory_name(model):
        check_allowed(model, "model", ConfigError)
    else:
        validate_choice("motionsense", "model", model, MODELS, extra_choice="module:factory")
    return ClassificationTask(
        name="motionsense",
        model=_make_model(model),
        input_shape=(CHANNELS, WINDOW_SAMPLES),
        labels=LABELS,
        defaults=DEFAULTS,
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
        chain = networks.make_motion_cnn(CHANNELS, len(LABELS))
        return make_chain_model(chain, standardise_windows)
    hidden = (64,) if model == "mlp" else ()
    return DenseModel(sizes=(NUM_FEATURES, *hidden, len(LABELS)), prepare=compute_window_features)
