"""The built-in networks for small images, by name: chains of layers for one or three channels and any side.

Their normalisation is a setting: GroupNorm by default, since statistics of batches of skewed shards do not average
well; BatchNorm's running statistics travel as buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from edgefl.tasks.learners.networks import IDENTITY, Chain, Layer

NUM_CLASSES = 10
MAX_GROUPS = 32
VGG_SIDE = 32
"""Pixels a side that five halvings need; the first convolution of VGG pads smaller images."""


class ImageFormat(NamedTuple):
    """Number of channels, and of pixels a side."""

    channels: int
    side: int


Norm = Callable[[int], Layer]
"""Number of channels -> the layer that normalises them."""


def make_group_norm(channels: int) -> Layer:
    """Returns a normalisation over groups of two channels or more, 32 at most (Wu, He, ECCV 2018)."""
    return ("GroupNorm", math.gcd(MAX_GROUPS, channels // 2), channels)


NORMS: Mapping[str, Norm] = MappingProxyType(
    {"group": make_group_norm, "batch": lambda channels: ("BatchNorm2d", channels)}
)


def make_lenet(image: ImageFormat) -> Chain:
    """Returns LeNet-5 with ReLU and maxima in place of its squashing and subsampling: 61,706 parameters for 28x28.

    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998.
    """
    return {
        "conv1": ("Conv2d", image.channels, 6, 5, 1, (32 - image.side) // 2),
        "relu1": ("ReLU",),
        "pool1": ("MaxPool2d", 2),
        "conv2": ("Conv2d", 6, 16, 5),
        "relu2": ("ReLU",),
        "pool2": ("MaxPool2d", 2),
        "flat": ("Flatten",),
        "fc1": ("Linear", 400, 120),
        "relu3": ("ReLU",),
        "fc2": ("Linear", 120, 84),
        "relu4": ("ReLU",),
        "fc3": ("Linear", 84, NUM_CLASSES),
    }


def make_two_layer_cnn(image: ImageFormat, channels: tuple[int, int], kernel: int, hidden: int) -> Chain:
    """Returns two convolutions and two fully connected layers."""
    return {
        "conv1": ("Conv2d", image.channels, channels[0], kernel, 1, "same"),
        "relu1": ("ReLU",),
        "pool1": ("MaxPool2d", 2),
        "conv2": ("Conv2d", channels[0], channels[1], kernel, 1, "same"),
        "relu2": ("ReLU",),
        "pool2": ("MaxPool2d", 2),
        "flat": ("Flatten",),
        "fc1": ("Linear", channels[1] * (image.side // 4) ** 2, hidden),
        "relu3": ("ReLU",),
        "fc2": ("Linear", hidden, NUM_CLASSES),
    }


def make_cnn(image: ImageFormat) -> Chain:
    """Returns the network of AdaComp's MNIST experiments: 421,642 parameters for 28x28.

    Source: Hardy et al., AdaComp, NCA 2017.
    """
    return make_two_layer_cnn(image, (32, 64), 3, 128)


def make_alexnet_small(image: ImageFormat) -> Chain:
    """Returns a small AlexNet: 1,387,786 parameters for 28x28 pixels in colour.

    Source: Zhang et al., Understanding Deep Learning Requires Rethinking Generalization, ICLR 2017, appendix A.
    """
    response = ("LocalResponseNorm", 9, 0.001, 0.75, 1.0)
    return {
        "conv1": ("Conv2d", image.channels, 64, 5, 1, 2),
        "relu1": ("ReLU",),
        "pool1": ("MaxPool2d", 3, 2, 1),
        "response1": response,
        "conv2": ("Conv2d", 64, 64, 5, 1, 2),
        "relu2": ("ReLU",),
        "pool2": ("MaxPool2d", 3, 2, 1),
        "response2": response,
        "flat": ("Flatten",),
        "fc1": ("Linear", 64 * (image.side // 4) ** 2, 384),
        "relu3": ("ReLU",),
        "fc2": ("Linear", 384, 192),
        "relu4": ("ReLU",),
        "fc3": ("Linear", 192, NUM_CLASSES),
    }


def make_wide_resnet(image: ImageFormat, norm: Norm, num_blocks: tuple[int, ...], *, is_bottleneck: bool) -> Chain:
    """Returns a ResNet of four stages from 64 channels on, with a 3x3 stem and no pooling before the blocks.

    Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, table 1.
    """
    make_body, factor = (_make_bottleneck, 4) if is_bottleneck else (_make_basic_body, 1)
    chain: dict[str, Layer] = {
        "stem": _conv(image.channels, 64, 3),
        "stem_norm": norm(64),
        "stem_relu": ("ReLU",),
    }
    inputs = 64
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), num_blocks, strict=True), 1):
        for block in range(1, count + 1):
            stride, outputs = 2 if block == 1 and stage > 1 else 1, factor * width
            projection = {"0": _conv(inputs, outputs, 1, stride), "1": norm(outputs)}
            shortcut = projection if inputs != outputs else IDENTITY
            name = f"stage{stage}_block{block}"
            chain |= {name: ("Residual", make_body(inputs, width, stride, norm), shortcut), f"{name}_relu": ("ReLU",)}
            inputs = outputs
    return chain | _make_head(inputs)


def make_narrow_resnet(image: ImageFormat, norm: Norm, num_blocks: int) -> Chain:
    """Returns the ResNet of 6n+2 layers, in stages of 16, 32 and 64 channels with shortcuts without parameters.

    Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2.
    """
    chain: dict[str, Layer] = {
        "stem": _conv(image.channels, 16, 3),
        "stem_norm": norm(16),
        "stem_relu": ("ReLU",),
    }
    inputs = 16
    for stage, width in enumerate((16, 32, 64), 1):
        for block in range(1, num_blocks + 1):
            stride, name = 2 if block == 1 and stage > 1 else 1, f"stage{stage}_block{block}"
            shortcut = IDENTITY if inputs == width else {"0": ("Subsample", stride, width - inputs)}
            body = _make_basic_body(inputs, width, stride, norm)
            chain |= {name: ("Residual", body, shortcut), f"{name}_relu": ("ReLU",)}
            inputs = width
    return chain | _make_head(inputs)


def make_vgg(image: ImageFormat, norm: Norm, num_layers: tuple[int, ...]) -> Chain:
    """Returns the convolutions of VGG, each with a normalisation, and one fully connected layer.

    Source: Simonyan, Zisserman, Very Deep Convolutional Networks, ICLR 2015, table 1, A and D; with one layer in
    place of three after the convolutions, as is usual for images of 32x32.
    """
    chain: dict[str, Layer] = {}
    inputs, padding = image.channels, 1 + (VGG_SIDE - image.side) // 2
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512, 512), num_layers, strict=True), 1):
        for layer in range(1, count + 1):
            name = f"{stage}_{layer}"
            chain |= {
                f"conv{name}": ("Conv2d", inputs, width, 3, 1, padding),
                f"norm{name}": norm(width),
                f"relu{name}": ("ReLU",),
            }
            inputs, padding = width, 1
        chain[f"pool{stage}"] = ("MaxPool2d", 2)
    return chain | {"flat": ("Flatten",), "fc": ("Linear", inputs, NUM_CLASSES)}


def make_mobilenet_v1(image: ImageFormat, norm: Norm) -> Chain:
    """Returns MobileNet of width 1, with a stem that keeps the image's size.

    Source: Howard et al., MobileNets, 2017, table 1.
    """
    chain = _make_conv_layers("stem", _conv(image.channels, 32, 3), norm(32))
    inputs = 32
    plan = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    for block, (outputs, stride) in enumerate(plan, 1):
        chain |= _make_conv_layers(f"depthwise{block}", _depthwise_conv(inputs, stride), norm(inputs))
        chain |= _make_conv_layers(f"pointwise{block}", _conv(inputs, outputs, 1), norm(outputs))
        inputs = outputs
    return chain | _make_head(inputs)


def make_mobilenet_v2(image: ImageFormat, norm: Norm) -> Chain:
    """Returns MobileNetV2 of width 1, with a stem and a second stage that keep the image's size.

    Source: Sandler et al., MobileNetV2, CVPR 2018, table 2.
    """
    chain = _make_conv_layers("stem", _conv(image.channels, 32, 3), norm(32), "ReLU6")
    inputs, block = 32, 0
    plan = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, outputs, count, first_stride in plan:
        for position in range(count):
            block, stride = block + 1, first_stride if position == 0 else 1
            body = _make_inverted_body(inputs, expansion * inputs, outputs, stride, norm)
            if inputs == outputs and stride == 1:
                chain[f"block{block}"] = ("Residual", body, IDENTITY)
            else:
                chain |= {f"block{block}_{name}": layer for name, layer in body.items()}
            inputs = outputs
    chain |= _make_conv_layers("last", _conv(inputs, 1280, 1), norm(1280), "ReLU6")
    return chain | _make_head(1280)


def make_inception_small(image: ImageFormat, norm: Norm) -> Chain:
    """Returns a small Inception: in colour 1,649,402 parameters, and 1,712 scales that its own normalisations lack.

    Source: Zhang et al., Understanding Deep Learning Requires Rethinking Generalization, ICLR 2017, appendix A.
    """

    def make_module(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Chain:
        return {"conv": _conv(inputs, outputs, kernel, stride), "norm": norm(outputs), "relu": ("ReLU",)}

    chain: dict[str, Layer] = {f"stem_{name}": layer for name, layer in make_module(image.channels, 96, 3).items()}
    inputs = 96
    plan = ((32, 32), (32, 48), (0, 80), (112, 48), (96, 64), (80, 80), (48, 96), (0, 96), (176, 160), (176, 160))
    for block, (narrow, wide) in enumerate(plan, 1):
        if narrow:
            branches: tuple[Chain, ...] = (make_module(inputs, narrow, 1), make_module(inputs, wide, 3))
            inputs = narrow + wide
        else:
            branches = (make_module(inputs, wide, 3, 2), {"pool": ("MaxPool2d", 3, 2, 1)})
            inputs += wide
        chain[f"block{block}"] = ("Concat", *branches)
    return chain | _make_head(inputs)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Layer:
    """Returns a convolution without bias, which the normalisation after it has."""
    return ("Conv2d", inputs, outputs, kernel, stride, kernel // 2, 1, 1, False)


def _depthwise_conv(channels: int, stride: int) -> Layer:
    return ("Conv2d", channels, channels, 3, stride, 1, 1, channels, False)


def _make_conv_layers(name: str, conv: Layer, norm: Layer, activation: str = "ReLU") -> dict[str, Layer]:
    return {name: conv, f"{name}_norm": norm, f"{name}_relu": (activation,)}


def _make_basic_body(inputs: int, width: int, stride: int, norm: Norm) -> Chain:
    layers = (_conv(inputs, width, 3, stride), norm(width), ("ReLU",), _conv(width, width, 3), norm(width))
    return {str(position): layer for position, layer in enumerate(layers)}


def _make_bottleneck(inputs: int, width: int, stride: int, norm: Norm) -> Chain:
    # The stride is at the 3x3 convolution, as in torchvision ("ResNet 1.5").
    layers = (
        *(_conv(inputs, width, 1), norm(width), ("ReLU",)),
        *(_conv(width, width, 3, stride), norm(width), ("ReLU",)),
        *(_conv(width, 4 * width, 1), norm(4 * width)),
    )
    return {str(position): layer for position, layer in enumerate(layers)}


def _make_inverted_body(inputs: int, width: int, outputs: int, stride: int, norm: Norm) -> Chain:
    expansion = _make_conv_layers("expand", _conv(inputs, width, 1), norm(width), "ReLU6") if width != inputs else {}
    depthwise = _make_conv_layers("depthwise", _depthwise_conv(width, stride), norm(width), "ReLU6")
    return {**expansion, **depthwise, "project": _conv(width, outputs, 1), "project_norm": norm(outputs)}


def _make_head(channels: int) -> dict[str, Layer]:
    return {"mean": ("AdaptiveAvgPool2d", 1), "flat": ("Flatten",), "fc": ("Linear", channels, NUM_CLASSES)}


PLAIN_NETWORKS: Mapping[str, Callable[[ImageFormat], Chain]] = MappingProxyType(
    {
        "cnn": make_cnn,
        "cnn-small": partial(make_two_layer_cnn, channels=(16, 32), kernel=5, hidden=64),
        # The MNIST network of McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017.
        "cnn-large": partial(make_two_layer_cnn, channels=(32, 64), kernel=5, hidden=512),
        "lenet": make_lenet,
        "alexnet-small": make_alexnet_small,
    }
)
"""Networks without normalisation."""
NORMALISED_NETWORKS: Mapping[str, Callable[[ImageFormat, Norm], Chain]] = MappingProxyType(
    {
        "resnet18": partial(make_wide_resnet, num_blocks=(2, 2, 2, 2), is_bottleneck=False),
        "resnet50": partial(make_wide_resnet, num_blocks=(3, 4, 6, 3), is_bottleneck=True),
        "resnet152": partial(make_wide_resnet, num_blocks=(3, 8, 36, 3), is_bottleneck=True),
        "resnet32": partial(make_narrow_resnet, num_blocks=5),
        "resnet110": partial(make_narrow_resnet, num_blocks=18),
        "vgg11": partial(make_vgg, num_layers=(1, 1, 2, 2, 2)),
        "vgg16": partial(make_vgg, num_layers=(2, 2, 3, 3, 3)),
        "mobilenet-v1": make_mobilenet_v1,
        "mobilenet-v2": make_mobilenet_v2,
        "inception-small": make_inception_small,
    }
)
"""Networks whose normalisation is a setting."""


def make_chain(name: str, image: ImageFormat, norm: str = "group") -> Chain:
    """Returns the layers of a network of the two tables above."""
    if name in PLAIN_NETWORKS:
        return PLAIN_NETWORKS[name](image)
    return NORMALISED_NETWORKS[name](image, NORMS[norm])
