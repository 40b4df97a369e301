"""The built-in networks for small images, by name: chains of layers for one or three channels and any side.

Their normalisation is a setting: GroupNorm by default, since statistics of batches of skewed shards do not average
well; BatchNorm's running statistics travel as buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from edgefl.tasks.learners.image_layers import NORMS, ImageFormat, Norm, make_conv, make_head
from edgefl.tasks.learners.networks import IDENTITY, Chain, Layer
from edgefl.tasks.learners.residual_networks import make_narrow_resnet, make_preactivated_resnet, make_wide_resnet

VGG_SIDE = 32
"""Pixels a side that five halvings need; the first convolution of VGG pads smaller images."""


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
        "fc3": ("Linear", 84, image.classes),
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
        "fc1": ("Linear", channels[1] * image.quarters, hidden),
        "relu3": ("ReLU",),
        "fc2": ("Linear", hidden, image.classes),
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
        "fc1": ("Linear", 64 * image.quarters, 384),
        "relu3": ("ReLU",),
        "fc2": ("Linear", 384, 192),
        "relu4": ("ReLU",),
        "fc3": ("Linear", 192, image.classes),
    }


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
    return chain | {"flat": ("Flatten",), "fc": ("Linear", inputs, image.classes)}


def make_mobilenet_v1(image: ImageFormat, norm: Norm) -> Chain:
    """Returns MobileNet of width 1, with a stem that keeps the image's size.

    Source: Howard et al., MobileNets, 2017, table 1.
    """
    chain = _make_conv_layers("stem", make_conv(image.channels, 32, 3), norm(32))
    inputs = 32
    plan = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    for block, (outputs, stride) in enumerate(plan, 1):
        chain |= _make_conv_layers(f"depthwise{block}", _depthwise_conv(inputs, stride), norm(inputs))
        chain |= _make_conv_layers(f"pointwise{block}", make_conv(inputs, outputs, 1), norm(outputs))
        inputs = outputs
    return chain | make_head(image, inputs)


def make_mobilenet_v2(image: ImageFormat, norm: Norm) -> Chain:
    """Returns MobileNetV2 of width 1, with a stem and a second stage that keep the image's size.

    Source: Sandler et al., MobileNetV2, CVPR 2018, table 2.
    """
    chain = _make_conv_layers("stem", make_conv(image.channels, 32, 3), norm(32), "ReLU6")
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
    chain |= _make_conv_layers("last", make_conv(inputs, 1280, 1), norm(1280), "ReLU6")
    return chain | make_head(image, 1280)


def make_inception_small(image: ImageFormat, norm: Norm) -> Chain:
    """Returns a small Inception: in colour 1,649,402 parameters, and 1,712 scales that its own normalisations lack.

    Source: Zhang et al., Understanding Deep Learning Requires Rethinking Generalization, ICLR 2017, appendix A.
    """

    def make_module(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Chain:
        return {"conv": make_conv(inputs, outputs, kernel, stride), "norm": norm(outputs), "relu": ("ReLU",)}

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
    return chain | make_head(image, inputs)


def _depthwise_conv(channels: int, stride: int) -> Layer:
    return ("Conv2d", channels, channels, 3, stride, 1, 1, channels, False)


def _make_conv_layers(name: str, conv: Layer, norm: Layer, activation: str = "ReLU") -> dict[str, Layer]:
    return {name: conv, f"{name}_norm": norm, f"{name}_relu": (activation,)}


def _make_inverted_body(inputs: int, width: int, outputs: int, stride: int, norm: Norm) -> Chain:
    expansion = (
        _make_conv_layers("expand", make_conv(inputs, width, 1), norm(width), "ReLU6") if width != inputs else {}
    )
    depthwise = _make_conv_layers("depthwise", _depthwise_conv(width, stride), norm(width), "ReLU6")
    return {**expansion, **depthwise, "project": make_conv(width, outputs, 1), "project_norm": norm(outputs)}


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
        "resnet18-v2": partial(make_preactivated_resnet, num_blocks=(2, 2, 2, 2), is_bottleneck=False),
        "resnet50-v2": partial(make_preactivated_resnet, num_blocks=(3, 4, 6, 3), is_bottleneck=True),
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
