"""`pictures`: class folders of PNG and JPEG files, or rows with them, by a run file alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Dataset, Scalar
from edgefl.tasks.augmentation import make_picture_augment
from edgefl.tasks.configured.image_models import make_image_model
from edgefl.tasks.configured.options import (
    ConfiguredTask,
    Names,
    Numbers,
    check_range,
    format_options,
    make_goal,
    split_numbers,
)
from edgefl.tasks.configured.table import DEFAULT_HIDDEN, make_standardisation
from edgefl.tasks.datasets.class_folders import (
    PICTURE_SUFFIXES,
    FolderRules,
    decode_picture,
    list_picture_tables,
    read_class_folders,
    read_picture,
    read_picture_tables,
)
from edgefl.tasks.learners.image_layers import ImageFormat

NAME = "pictures"
MIN_SIZE, MAX_SIZE = 8, 512
DEFAULT_SIZE = 32
MAX_PIXEL = 255.0
DEFAULTS: Mapping[str, Scalar] = {"learning_rate": 0.05, "batch_size": 16, "epochs": 1.0}


def pictures(  # noqa: PLR0913 one keyword for each option of a run file
    *,
    labels: Names,
    size: int = DEFAULT_SIZE,
    channels: int = 3,
    model: str = "mlp",
    hidden: Numbers = DEFAULT_HIDDEN,
    activation: str = "relu",
    loss: str = "",
    metrics: Names = "",
    means: Numbers = 0.5,
    scales: Numbers = 0.25,
    others: str = "",
    group_before: str = "",
    unlabelled: bool = False,
    column: str = "image",
    target: str = "label",
    flip: bool = False,
    shift: int = 0,
    brightness: float = 0.0,
) -> ConfiguredTask:
    """Returns the task.

    Args:
        labels: names of the classes, which are those of the folders.
        size: pixels a side to which a picture is stretched.
        channels: 3 for colours, 1 for grey.
        model: mlp or linear in NumPy; one of `image_models.NETWORKS`, `torchvision:NAME` or `timm:NAME` in torch.
        hidden: sizes of the hidden layers of mlp.
        activation: between layers of mlp: relu, tanh, sigmoid or gelu.
        loss: cross-entropy or mse.
        metrics: by name.
        means: a pixel, 0 to 1, becomes (pixel - mean) / scale; a number for each channel, or one for all.
        scales: above 0, likewise.
        others: label of files in folders of any other name; without it such folders are refused.
        group_before: text in files' names before which stands whom they are from, for natural shards.
        unlabelled: whether files that a collector keeps without a class are read, too, for `consistency_weight`.
        column: name of the pictures' column, where the data is Parquet or Arrow files and no class folders.
        target: of that of their classes.
        flip: mirrors each second picture that is trained on, left and right.
        shift: most pixels by which such a picture is moved in each direction, up to half of `size`.
        brightness: such a picture's pixels are multiplied by a factor within 1 ± brightness, 0 to 1.
    """
    check_range("size", size, MIN_SIZE, MAX_SIZE)
    check_range("shift", shift, 0, size // 2)
    check_range("brightness", brightness, 0.0, 1.0)
    if channels not in {1, 3}:
        raise ConfigError(f"task.channels must be 1 for grey or 3 for colours, got {channels}")
    goal = make_goal(NAME, labels=labels, loss=loss, metrics=metrics)
    image = ImageFormat(channels, size, goal.total_outputs)
    prepare = make_standardisation(
        np.float32(MAX_PIXEL) * split_numbers(NAME, "means", means, count=channels).reshape(-1, 1, 1),
        np.float32(MAX_PIXEL) * split_numbers(NAME, "scales", scales, count=channels, above=0.0).reshape(-1, 1, 1),
    )
    read = partial(read_picture, size=size, channels=channels)
    decode = partial(decode_picture, size=size, channels=channels)
    rules = FolderRules(labels=goal.labels, others=others, group_before=group_before)

    def read_data(path: Path) -> Dataset:
        if list_picture_tables(path):
            return read_picture_tables(path, NAME, rules, decode, (column, target), has_unlabelled=unlabelled)
        return read_class_folders(path, NAME, rules, PICTURE_SUFFIXES, read, has_unlabelled=unlabelled)

    return ConfiguredTask(
        name=NAME,
        model=make_image_model(NAME, model, image, prepare, hidden=hidden, activation=activation),
        input_shape=image.shape,
        goal=goal,
        reader=read_data,
        input_reader=lambda path: read(path)[None],
        input_suffixes=PICTURE_SUFFIXES,
        augment=make_picture_augment(flip=flip, shift=shift, brightness=brightness),
        defaults=DEFAULTS,
        shard_options=format_options(
            labels=goal.labels, **({"others": others} if others else {}), size=size, channels=channels
        ),
    )
