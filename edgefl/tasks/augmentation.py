"""Augmentation: random changes to the examples of a training batch, by a task's hook or a configured task's options.

A task's `augment(inputs, targets, rng)` returns both for one batch. It is called for batches that are trained on
alone, never for an evaluation or the test split. `rng` follows from the run's seed, the version and the device, so a
run that is repeated or resumed sees the same changes. Where examples are private, nobody knows `rng`, and a batch is
one example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.random import Generator

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.named_arrays import NamedArrays, format_row_shape, unwrap_inputs, wrap_inputs
from edgefl.core.types import Array, Dataset, Inputs, Task

Augment = Callable[[Inputs, Array, Generator], tuple[Inputs, Array]]
"""(inputs [n, ...] or a dict of those, targets [n, ...], rng) -> both, changed; the arrays are the batch's own."""
Change = Callable[[Array, Generator], Array]
"""(inputs [n, ...], rng) -> inputs of the same shape and type."""

AUGMENT = "augment"
"""Last part of the key from which the stream of an assignment's changes is derived."""
NUM_ARGUMENTS = 3
FLIP_PROBABILITY = 0.5
SOUND_AXES, SIGNAL_AXES, PICTURE_AXES = 2, 3, 4
"""Of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentedDataset(Dataset):
    """Examples to train on, each batch of which is changed when it is taken."""

    task: str
    augment: Augment
    rng: Generator

    def take(self, rows: Array | slice) -> Dataset:
        """Returns a batch, changed.

        Raises:
            TaskError: the hook failed, or returned what is no batch of this size.
        """
        batch = Dataset.take(self, rows)
        shape = f"{len(batch)} of {format_row_shape(batch.inputs)}"
        try:
            found: object = self.augment(unwrap_inputs(batch.inputs), batch.targets, self.rng)
        except Exception as error:  # a hook of the user's own may raise anything
            raise TaskError(f"augment of task {self.task} raised {type(error).__name__}: {error}") from error
        kinds = [dict if isinstance(batch.inputs, NamedArrays) else np.ndarray, np.ndarray]
        if not (isinstance(found, tuple) and [type(part) for part in found] == kinds):
            what = "a dict of arrays and an array" if kinds[0] is dict else "two arrays"
            raise TaskError(
                f"augment of task {self.task} must return {what}, inputs and targets, got {_format_type(found)}"
            )
        inputs, targets = self._wrap(found[0]), found[1]
        found_shape = f"{len(inputs)} of {format_row_shape(inputs)}"
        if found_shape != shape or len(targets) != len(batch):
            raise TaskError(
                f"augment of task {self.task} must return inputs of the same shape, {shape}, and as many targets, "
                f"got {found_shape} and {len(targets)}"
            )
        return Dataset(inputs=inputs, targets=targets, weights=batch.weights, groups=batch.groups)

    def _wrap(self, inputs: Inputs) -> Inputs:
        try:
            return wrap_inputs(inputs)
        except DataError as error:
            raise TaskError(f"augment of task {self.task}: {error}") from None


def find_augment(task: Task) -> Augment | None:
    """Returns a task's hook; None where it has none.

    Raises:
        ConfigError: it is no function of inputs, targets and rng.
    """
    hook = getattr(task, "augment", None)
    if hook is None:
        return None
    # A function that is a class's attribute has become a method, with one parameter too few.
    if inspect.ismethod(hook) and not _takes_arguments(hook):
        hook = hook.__func__
    if not callable(hook) or not _takes_arguments(hook):
        raise ConfigError(f"augment of a task must be a function of inputs, targets and rng, got {hook!r:.100}")
    found: Augment = hook
    return found


def augment_batches(task: Task, data: Dataset, rng: Generator) -> Dataset:
    """Returns data to train on once: its batches are changed by the task's hook, where it has one."""
    hook = find_augment(task)
    if hook is None:
        return data
    return AugmentedDataset(
        inputs=data.inputs,
        targets=data.targets,
        weights=data.weights,
        groups=data.groups,
        weak=data.weak,
        task=task.name,
        augment=hook,
        rng=rng,
    )


def make_picture_augment(*, flip: bool, shift: int, brightness: float) -> Augment | None:
    """Returns the hook for pictures [n, channels, height, width] of 0 to 255; None without a change.

    Args:
        flip: mirrors each second picture, left and right.
        shift: most pixels by which a picture is moved, in each direction; its edge fills what is left free.
        brightness: pixels are multiplied by a factor from 1 - brightness to 1 + brightness, one for each picture.
    """
    return _chain(
        [
            *([_flip] if flip else []),
            *([partial(_shift_pictures, most=shift)] if shift else []),
            *([partial(_change_brightness, most=brightness)] if brightness else []),
        ]
    )


def make_mirroring(*, negated: Sequence[int] = ()) -> Augment:
    """Returns the hook of a task of one's own that mirrors half of the pictures of a batch, and their maps with them.

    Args:
        negated: channels of the targets that a mirror makes negative, such as how far to the right a thing lies.

    Pictures and targets have their width last: targets are [n, height, width] classes of pixels, or [n, channels,
    height, width] values. It raises an `IndexError` where targets have no such axes or channels.
    """

    def mirror(pictures: Array, targets: Array, rng: Generator) -> tuple[Array, Array]:
        if targets.ndim < SIGNAL_AXES or (negated and targets.ndim < PICTURE_AXES):
            raise IndexError(f"it mirrors targets [n, (channels,) height, width], got {list(targets.shape)}")
        is_mirrored = rng.random(len(pictures)) < FLIP_PROBABILITY
        pictures[is_mirrored], targets[is_mirrored] = (
            pictures[is_mirrored, ..., ::-1],
            targets[is_mirrored, ..., ::-1],
        )
        for channel in negated:
            targets[is_mirrored, channel] *= -1
        return pictures, targets

    return mirror


def make_signal_augment(*, time_shift: int, jitter: float, is_sound: bool = False) -> Augment | None:
    """Returns the hook for signals [n, ..., samples]; None without a change.

    Args:
        time_shift: most samples by which a signal is moved, earlier or later; its first or last one fills what is
            left free, silence that of a sound.
        jitter: standard deviation of normal noise, as a part of that of the signal over its samples.
        is_sound: whether samples are whole numbers of 16 bits.

    Source: Um et al., Data Augmentation of Wearable Sensor Data, ICMI 2017, section 3: jittering; a shift moves what
    their cropped windows do.
    """
    return _chain(
        [
            *([partial(_shift_time, most=time_shift, is_sound=is_sound)] if time_shift else []),
            *([partial(_add_jitter, part=jitter)] if jitter else []),
        ]
    )


def augment_strongly(inputs: Inputs, rng: Generator) -> Array:
    """Returns pictures [n, (channels,) height, width], series [n, channels, samples] or sounds [n, samples], changed.

    They are moved by up to an eighth, and a quarter of each side or of the time becomes the example's mean (DeVries,
    Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, 2017). Pixels, which are unsigned or
    have four axes, get another brightness of up to a half, signals noise of a quarter of their deviation.

    Raises:
        TaskError: inputs are none of these.
    """
    if isinstance(inputs, np.ndarray):
        axes, kind = inputs.ndim, inputs.dtype.kind
        if (axes, kind) == (SIGNAL_AXES, "u"):
            return augment_strongly(inputs[:, None], rng)[:, 0]
        if axes == PICTURE_AXES:
            moved = _shift_pictures(inputs, rng, most=inputs.shape[-1] // 8)
            return _cut_out(_change_brightness(moved, rng, most=0.5) if kind == "u" else moved, rng, num_axes=2)
        if axes == SIGNAL_AXES or (axes, kind) == (SOUND_AXES, "i"):
            moved = _shift_time(inputs, rng, most=inputs.shape[-1] // 8, is_sound=axes == SOUND_AXES)
            return _cut_out(_add_jitter(moved, rng, part=0.25), rng, num_axes=1)
    raise TaskError("consistency_weight is for pictures, sounds and series; this task's inputs are others")


def _cut_out(inputs: Array, rng: Generator, *, num_axes: int) -> Array:
    """Returns inputs with a block of each example along the last axes as the mean of that example."""
    found = inputs.copy()
    means = inputs.mean(axis=tuple(range(1, inputs.ndim)))
    if inputs.dtype.kind in "iu":
        means = np.rint(means)
    for example, mean in zip(found, means, strict=True):
        starts = [int(rng.integers(size)) for size in example.shape[-num_axes:]]
        block = [
            slice(start, start + -(-size // 4)) for start, size in zip(starts, example.shape[-num_axes:], strict=True)
        ]
        example[(..., *block)] = mean
    return found


def _chain(changes: Sequence[Change]) -> Augment | None:
    if not changes:
        return None

    def augment(inputs: Array, targets: Array, rng: Generator) -> tuple[Array, Array]:
        for change in changes:
            inputs = change(inputs, rng)
        return inputs, targets

    return augment


def _flip(pictures: Array, rng: Generator) -> Array:
    is_mirrored = rng.random(len(pictures)) < FLIP_PROBABILITY
    return np.where(is_mirrored[:, None, None, None], pictures[..., ::-1], pictures)


def _shift_pictures(pictures: Array, rng: Generator, *, most: int) -> Array:
    down, right = rng.integers(-most, most, (2, len(pictures)), endpoint=True)
    rows, columns = (
        _move(size, steps) for size, steps in zip(pictures.shape[2:], (down, right), strict=True)
    )  # [n, height], [n, width]
    moved = np.take_along_axis(pictures, rows[:, None, :, None], axis=2)
    return np.take_along_axis(moved, columns[:, None, None, :], axis=3)


def _change_brightness(pictures: Array, rng: Generator, *, most: float) -> Array:
    factors = 1.0 + most * rng.uniform(-1.0, 1.0, len(pictures)).reshape(-1, 1, 1, 1)
    return np.clip(np.rint(pictures * factors), 0, 255).astype(pictures.dtype)


def _shift_time(signals: Array, rng: Generator, *, most: int, is_sound: bool) -> Array:
    later = rng.integers(-most, most, len(signals), endpoint=True)
    samples = _move(signals.shape[-1], later).reshape(len(signals), *[1] * (signals.ndim - 2), -1)
    moved = np.take_along_axis(signals, samples, axis=-1)
    if is_sound:
        places = np.arange(signals.shape[-1]) - later[:, None]
        moved[(places < 0) | (places >= signals.shape[-1])] = 0
    return moved


def _add_jitter(signals: Array, rng: Generator, *, part: float) -> Array:
    deviations = part * signals.std(axis=-1, keepdims=True, dtype=np.float64)
    noisy: Array = signals + deviations * rng.standard_normal(signals.shape)
    if signals.dtype.kind in "iu":
        limits = np.iinfo(signals.dtype)
        noisy = np.clip(np.rint(noisy), limits.min, limits.max)
    found: Array = noisy.astype(signals.dtype)
    return found


def _move(size: int, steps: Array) -> Array:
    """Returns [n, size] places that the values of a moved axis come from, within the axis."""
    places: Array = np.clip(np.arange(size) - steps[:, None], 0, size - 1)
    return places


def _takes_arguments(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(*[None] * NUM_ARGUMENTS)
    except (TypeError, ValueError):  # a built-in function has no signature
        return False
    return True


def _format_type(found: object) -> str:
    return f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
