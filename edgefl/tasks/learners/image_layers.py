"""What the built-in networks for images are made of: their format, normalisations, convolutions and last layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from edgefl.tasks.learners.networks import Layer

NUM_CLASSES = 10
MAX_GROUPS = 32


class ImageFormat(NamedTuple):
    """Number of channels, of pixels a side, and of classes; `width` is another width than the side, 0 for none."""

    channels: int
    side: int
    classes: int = NUM_CLASSES
    width: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.channels, self.side, self.width or self.side

    @property
    def quarters(self) -> int:
        """Pixels after two halvings."""
        return (self.side // 4) * ((self.width or self.side) // 4)


Norm = Callable[[int], Layer]
"""Number of channels -> the layer that normalises them."""


def make_group_norm(channels: int) -> Layer:
    """Returns a normalisation over groups of two channels or more, 32 at most (Wu, He, ECCV 2018)."""
    return ("GroupNorm", math.gcd(MAX_GROUPS, channels // 2), channels)


NORMS: Mapping[str, Norm] = MappingProxyType(
    {"group": make_group_norm, "batch": lambda channels: ("BatchNorm2d", channels)}
)


def make_conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Layer:
    """Returns a convolution without bias, which the normalisation after it has."""
    return ("Conv2d", inputs, outputs, kernel, stride, kernel // 2, 1, 1, False)


def make_head(image: ImageFormat, channels: int) -> dict[str, Layer]:
    """Returns the mean of each channel, and a fully connected layer."""
    return {"mean": ("AdaptiveAvgPool2d", 1), "flat": ("Flatten",), "fc": ("Linear", channels, image.classes)}
