"""ResNets for small images: wide ones, in their first and second version, and narrow ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edgefl.tasks.learners.image_layers import ImageFormat, Norm, make_conv, make_head
from edgefl.tasks.learners.networks import IDENTITY, Chain, Layer


def make_wide_resnet(image: ImageFormat, norm: Norm, num_blocks: tuple[int, ...], *, is_bottleneck: bool) -> Chain:
    """Returns a ResNet of four stages from 64 channels on, with a 3x3 stem and no pooling before the blocks.

    Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, table 1.
    """
    make_body, factor = (_make_bottleneck, 4) if is_bottleneck else (_make_basic_body, 1)
    chain: dict[str, Layer] = {
        "stem": make_conv(image.channels, 64, 3),
        "stem_norm": norm(64),
        "stem_relu": ("ReLU",),
    }
    inputs = 64
    for name, width, stride in _iterate_blocks(num_blocks):
        outputs = factor * width
        projection = {"0": make_conv(inputs, outputs, 1, stride), "1": norm(outputs)}
        shortcut = projection if inputs != outputs else IDENTITY
        chain |= {name: ("Residual", make_body(inputs, width, stride, norm), shortcut), f"{name}_relu": ("ReLU",)}
        inputs = outputs
    return chain | make_head(image, inputs)


def make_preactivated_resnet(
    image: ImageFormat, norm: Norm, num_blocks: tuple[int, ...], *, is_bottleneck: bool
) -> Chain:
    """Returns `make_wide_resnet` with normalisation and ReLU before each convolution, and none after the sum.

    A block that changes the channels does so from what its first normalisation and ReLU make of its input.

    Source: He et al., Identity Mappings in Deep Residual Networks, ECCV 2016, figure 4 e and appendix.
    """
    make_body, factor = (_make_bottleneck, 4) if is_bottleneck else (_make_basic_body, 1)
    chain: dict[str, Layer] = {"stem": make_conv(image.channels, 64, 3)}
    inputs = 64
    for name, width, stride in _iterate_blocks(num_blocks):
        outputs, (*layers, _last_norm) = factor * width, make_body(inputs, width, stride, norm).values()
        before: tuple[Layer, ...] = (norm(inputs), ("ReLU",))
        if inputs == outputs:
            chain[name] = ("Residual", _number((*before, *layers)), IDENTITY)
        else:
            shortcut = {"0": make_conv(inputs, outputs, 1, stride)}
            chain |= {f"{name}_norm": before[0], f"{name}_relu": before[1]}
            chain[name] = ("Residual", _number(layers), shortcut)
        inputs = outputs
    return chain | {"last_norm": norm(inputs), "last_relu": ("ReLU",)} | make_head(image, inputs)


def make_narrow_resnet(image: ImageFormat, norm: Norm, num_blocks: int) -> Chain:
    """Returns the ResNet of 6n+2 layers, in stages of 16, 32 and 64 channels with shortcuts without parameters.

    Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2.
    """
    chain: dict[str, Layer] = {
        "stem": make_conv(image.channels, 16, 3),
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
    return chain | make_head(image, inputs)


def _iterate_blocks(num_blocks: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Yields name, width and stride of each block of four stages; all but the first halve the side."""
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), num_blocks, strict=True), 1):
        for block in range(1, count + 1):
            yield f"stage{stage}_block{block}", width, 2 if block == 1 and stage > 1 else 1


def _make_basic_body(inputs: int, width: int, stride: int, norm: Norm) -> Chain:
    layers = (make_conv(inputs, width, 3, stride), norm(width), ("ReLU",), make_conv(width, width, 3), norm(width))
    return _number(layers)


def _make_bottleneck(inputs: int, width: int, stride: int, norm: Norm) -> Chain:
    # The stride is at the 3x3 convolution, as in torchvision ("ResNet 1.5").
    layers = (
        *(make_conv(inputs, width, 1), norm(width), ("ReLU",)),
        *(make_conv(width, width, 3, stride), norm(width), ("ReLU",)),
        *(make_conv(width, 4 * width, 1), norm(4 * width)),
    )
    return _number(layers)


def _number(layers: Iterable[Layer]) -> Chain:
    return {str(position): layer for position, layer in enumerate(layers)}
