"""`audio`: class folders of WAV files, learned from log-mel spectrograms; a run file has the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Scalar
from edgefl.tasks.augmentation import make_signal_augment
from edgefl.tasks.configured.image_models import make_image_model
from edgefl.tasks.configured.options import ConfiguredTask, Names, Numbers, check_range, format_options, make_goal
from edgefl.tasks.configured.table import DEFAULT_HIDDEN
from edgefl.tasks.datasets.class_folders import SOUND_SUFFIXES, FolderRules, read_class_folders, read_sound
from edgefl.tasks.learners.image_layers import ImageFormat
from edgefl.tasks.onnx_graph import (
    OnnxGraph,
    add_reduction,
    add_reshape,
    add_standard_deviation,
    register_node_builder,
)
from edgefl.tasks.preparation import Prepare

NAME = "audio"
MIN_RATE, MAX_RATE = 4000, 48_000
MIN_SECONDS, MAX_SECONDS = 0.1, 30.0
MIN_BANDS, MAX_BANDS = 8, 128
FRAME_S, HOP_S = 0.025, 0.010
FLOOR = 1e-6
"""Energy of samples from -1 to 1 whose logarithm, log(1 + energy / FLOOR), is log 2: that of silence is 0."""
MIN_DEVIATION = 1e-3
"""Least divisor of a spectrogram: one of silence stays 0."""
MAX_SAMPLE = 2.0**15
MAX_FFT_VALUES = 1_000_000
"""Numbers in frames that are transformed at once, so that a small board holds them."""
DEFAULTS: Mapping[str, Scalar] = {"learning_rate": 0.05, "batch_size": 16, "epochs": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMel:
    """Log-mel spectrograms: energies of short frames in bands that are equally wide on the mel scale, as logarithms.

    A frame of 25 ms begins every 10 ms, and has a Hann window. A band is a triangle over the power spectrum whose
    corners are equidistant in mel(f) = 2595 log10(1 + f / 700).

    Source: Davis and Mermelstein, Comparison of Parametric Representations for Monosyllabic Word Recognition, 1980;
    mel(f) by O'Shaughnessy, Speech Communication, 1987.
    """

    sample_rate: int
    num_samples: int
    bands: int

    @property
    def frame_samples(self) -> int:
        return round(FRAME_S * self.sample_rate)

    @property
    def fft_samples(self) -> int:
        """The next power of two from a frame on."""
        return 1 << (self.frame_samples - 1).bit_length()

    @property
    def frames(self) -> int:
        return 1 + (self.num_samples - self.frame_samples) // round(HOP_S * self.sample_rate)

    def list_rows(self) -> Array:
        """Returns [frames, frame_samples] places of samples."""
        starts = np.arange(self.frames) * round(HOP_S * self.sample_rate)
        rows: Array = starts[:, None] + np.arange(self.frame_samples)
        return rows

    def make_window(self) -> Array:
        """Returns [frame_samples] float32."""
        angles = 2.0 * np.pi * np.arange(self.frame_samples) / self.frame_samples
        return (0.5 - 0.5 * np.cos(angles)).astype(np.float32)

    def make_filters(self) -> Array:
        """Returns [fft_samples / 2 + 1, bands] float32 heights of the triangles.

        Raises:
            ConfigError: a band is so narrow that no step of the spectrum lies in it.
        """
        top = _to_mel(self.sample_rate / 2.0)
        corners = 700.0 * (10.0 ** (np.linspace(0.0, top, self.bands + 2) / 2595.0) - 1.0)
        steps = np.arange(self.fft_samples // 2 + 1) * self.sample_rate / self.fft_samples
        left, middle, right = (corners[start : start + self.bands] for start in range(3))
        rising = (steps[:, None] - left) / (middle - left)
        falling = (right - steps[:, None]) / (right - middle)
        filters: Array = np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)
        if not filters.any(axis=0).all():
            raise ConfigError(
                f"task.mel_bands = {self.bands} are too many at sample_rate = {self.sample_rate}: a band is narrower "
                "than a step of the spectrum"
            )
        return filters

    def make_prepare(self) -> Prepare:
        """Returns a `prepare` from [n, num_samples] int16 to [n, 1, bands, frames], each standardised."""
        rows, window, filters = self.list_rows(), self.make_window(), self.make_filters()
        at_once = max(1, MAX_FFT_VALUES // (self.frames * self.fft_samples))

        def compute_some(samples: Array) -> Array:
            frames = (samples.astype(np.float32) / MAX_SAMPLE)[:, rows] * window
            power = np.square(np.abs(np.fft.rfft(frames, self.fft_samples, axis=2))).astype(np.float32)
            logs: Array = np.log(power @ filters / np.float32(FLOOR) + np.float32(1.0)).transpose(0, 2, 1)
            logs -= logs.mean(axis=(1, 2), keepdims=True)
            logs /= np.maximum(logs.std(axis=(1, 2), keepdims=True), MIN_DEVIATION)
            return logs

        @register_node_builder(self._draw)
        def compute(samples: Array) -> Array:
            spectrograms = np.empty((len(samples), 1, self.bands, self.frames), np.float32)
            for start in range(0, len(samples), at_once):
                spectrograms[start : start + at_once, 0] = compute_some(samples[start : start + at_once])
            return spectrograms

        return compute

    def _draw(self, graph: OnnxGraph, samples: str) -> str:
        """Adds the Fourier transform as two matrix products: onnxruntime has none for every device."""
        turns = np.outer(np.arange(self.frame_samples), np.arange(self.fft_samples // 2 + 1)) / self.fft_samples
        angles = 2.0 * np.pi * turns
        scaled = graph.add("Mul", samples, graph.add_constant(np.float32(1.0 / MAX_SAMPLE)))
        frames = graph.add("Gather", scaled, graph.add_constant(self.list_rows(), dtype="int64"), axis=1)
        frames = graph.add("Mul", frames, graph.add_constant(self.make_window()))
        waves = [graph.add("MatMul", frames, graph.add_constant(wave)) for wave in (np.cos(angles), np.sin(angles))]
        power = graph.add("Add", *(graph.add("Mul", wave, wave) for wave in waves))
        energies = graph.add("MatMul", power, graph.add_constant(self.make_filters()))
        ratios = graph.add("Div", energies, graph.add_constant(np.float32(FLOOR)))
        logs = graph.add("Log", graph.add("Add", ratios, graph.add_constant(np.float32(1.0))))
        flat = add_reshape(graph, graph.add("Transpose", logs, perm=[0, 2, 1]), (self.bands * self.frames,))
        centred = graph.add("Sub", flat, add_reduction(graph, "ReduceMean", flat, 1))
        floor = graph.add_constant(np.float32(MIN_DEVIATION))
        spread = graph.add("Max", add_standard_deviation(graph, centred, 1), floor)
        return add_reshape(graph, graph.add("Div", centred, spread), (1, self.bands, self.frames))


def audio(  # noqa: PLR0913 one keyword for each option of a run file
    *,
    labels: Names,
    sample_rate: int = 16_000,
    seconds: float = 1.0,
    mel_bands: int = 40,
    model: str = "mlp",
    hidden: Numbers = DEFAULT_HIDDEN,
    activation: str = "relu",
    loss: str = "",
    metrics: Names = "",
    others: str = "",
    group_before: str = "",
    unlabelled: bool = False,
    time_shift: float = 0.0,
    jitter: float = 0.0,
) -> ConfiguredTask:
    """Returns the task.

    Args:
        labels: names of the classes, which are those of the folders.
        sample_rate: samples a second of the files.
        seconds: from the beginning of a file; zeros follow a shorter one.
        mel_bands: bands of the spectrogram.
        model: as of `pictures`, but no network of torchvision or timm.
        hidden: sizes of the hidden layers of mlp.
        activation: between layers of mlp: relu, tanh, sigmoid or gelu.
        loss: cross-entropy or mse.
        metrics: by name.
        others: label of files in folders of any other name; without it such folders are refused.
        group_before: text in files' names before which stands whom they are from, for natural shards.
        unlabelled: whether files that a collector keeps without a class are read, too, for `consistency_weight`.
        time_shift: most seconds by which a recording that is trained on is moved, up to half of `seconds`.
        jitter: noise in it, as a part of its standard deviation, 0 to 1.
    """
    check_range("sample_rate", sample_rate, MIN_RATE, MAX_RATE)
    check_range("seconds", seconds, MIN_SECONDS, MAX_SECONDS)
    check_range("mel_bands", mel_bands, MIN_BANDS, MAX_BANDS)
    check_range("time_shift", time_shift, 0.0, seconds / 2.0)
    check_range("jitter", jitter, 0.0, 1.0)
    if ":" in model:
        raise ConfigError(f"model of task {NAME} must be one for spectrograms, such as cnn-small, got {model!r}")
    goal = make_goal(NAME, labels=labels, loss=loss, metrics=metrics)
    spectrogram = LogMel(sample_rate=sample_rate, num_samples=round(seconds * sample_rate), bands=mel_bands)
    image = ImageFormat(1, mel_bands, goal.total_outputs, spectrogram.frames)
    prepare = spectrogram.make_prepare()
    read = partial(read_sound, sample_rate=sample_rate, num_samples=spectrogram.num_samples)
    rules = FolderRules(labels=goal.labels, others=others, group_before=group_before)
    return ConfiguredTask(
        name=NAME,
        model=make_image_model(NAME, model, image, prepare, hidden=hidden, activation=activation),
        input_shape=(spectrogram.num_samples,),
        goal=goal,
        reader=lambda path: read_class_folders(path, NAME, rules, SOUND_SUFFIXES, read, has_unlabelled=unlabelled),
        input_reader=lambda path: read(path)[None],
        input_suffixes=SOUND_SUFFIXES,
        augment=make_signal_augment(time_shift=round(time_shift * sample_rate), jitter=jitter, is_sound=True),
        defaults=DEFAULTS,
        shard_options=format_options(
            labels=goal.labels,
            **({"others": others} if others else {}),
            sample_rate=sample_rate,
            seconds=float(seconds),
        ),
    )


def _to_mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))
