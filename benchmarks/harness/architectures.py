"""Architectures that `compiled_architectures.py` compiles, as tasks; torch is imported when one is built."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from edgefl.core.types import Task
from edgefl.tasks.registry import make_task
from harness.compiled_networks import OwnNetwork

IMAGE = (3, 32, 32)
WINDOW = (6, 64)
"""Channels and steps of a sequence."""
TOKENS, VOCABULARY = 24, 100
TORCHVISION = (
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "efficientnet_b0",
    "mnasnet0_5", "regnet_y_400mf",
)  # fmt: skip
COLUMNS = {"columns": "a,b,c,d,e,f", "window": 64, "target": "y", "labels": "walk,sit,stand"}


def _make_zoo_task(name: str, options: Mapping[str, Any]) -> Task:
    return make_task(name, options)


def _build_residual_tcn() -> Any:
    """Two residual blocks of dilated causal convolutions (Bai et al., 2018)."""
    from torch import nn  # noqa: PLC0415 see the first line
    from torch.nn import functional  # noqa: PLC0415 likewise

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
            super().__init__()
            self.first = nn.utils.parametrizations.weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))
            self.second = nn.utils.parametrizations.weight_norm(nn.Conv1d(outputs, outputs, 3, dilation=dilation))
            self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
            self.drop, self.padding = nn.Dropout(0.1), 2 * dilation

        def forward(self, x: Any) -> Any:
            y = self.drop(functional.relu(self.first(functional.pad(x, (self.padding, 0)))))
            y = self.drop(functional.relu(self.second(functional.pad(y, (self.padding, 0)))))
            return functional.relu(y + self.skip(x))

    blocks = [Block(WINDOW[0], 24, 1), Block(24, 24, 2), Block(24, 24, 4)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, 10))


def _build_recurrent(kind: str, **options: Any) -> Any:
    from torch import nn  # noqa: PLC0415 see the first line

    class LastStep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = getattr(nn, kind)(WINDOW[0], 32, batch_first=True, **options)
            self.head = nn.Linear(64 if options.get("bidirectional") else 32, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.layer(x.transpose(1, 2))[0][:, -1])

    return LastStep()


def _build_vit_tiny() -> Any:
    """A vision transformer (Dosovitskiy et al., 2021): patches of 4 by 4, width 192, three heads, four layers."""
    import torch  # noqa: PLC0415 see the first line
    from torch import nn  # noqa: PLC0415 likewise

    class VisionTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 192, 4, stride=4)
            self.token = nn.Parameter(torch.zeros(1, 1, 192))
            self.places = nn.Parameter(torch.randn(1, 65, 192) * 0.02)
            layers = [
                nn.TransformerEncoderLayer(192, 3, 384, 0.1, "gelu", batch_first=True, norm_first=True)
                for _ in range(4)
            ]
            self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(192), nn.Linear(192, 10)

        def forward(self, x: Any) -> Any:
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
            return self.head(self.norm(self.layers(x)[:, 0]))

    return VisionTransformer()


def _build_unet() -> Any:
    """A U-Net (Ronneberger et al., 2015) of three levels, with a class for each pixel."""
    import torch  # noqa: PLC0415 see the first line
    from torch import nn  # noqa: PLC0415 likewise

    def convolve(inputs: int, outputs: int) -> Any:
        layers: list[Any] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([convolve(3, 8), convolve(8, 16), convolve(16, 32)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
            self.join = nn.ModuleList([convolve(32, 16), convolve(16, 8)])
            self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)

        def forward(self, x: Any) -> Any:
            first = self.down[0](x)
            second = self.down[1](self.pool(first))
            x = self.down[2](self.pool(second))
            for up, join, kept in zip(self.up, self.join, (second, first), strict=True):
                x = join(torch.cat([up(x), kept], dim=1))
            return self.head(x)

    return Unet()


def _build_autoencoder() -> Any:
    from torch import nn  # noqa: PLC0415 see the first line

    down = [nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    code = [nn.Linear(2048, 32), nn.Linear(32, 2048), nn.ReLU(), nn.Unflatten(1, (32, 8, 8))]
    up = [nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)]
    return nn.Sequential(*down, *code, *up)


def _build_ssdlite_head() -> Any:
    """SSDLite's class scores of six boxes a place, on two maps (Sandler et al., 2018), behind a small backbone."""
    import torch  # noqa: PLC0415 see the first line
    from torch import nn  # noqa: PLC0415 likewise

    def separate(inputs: int, outputs: int, stride: int = 1) -> Any:
        return nn.Sequential(
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), nn.BatchNorm2d(inputs), nn.ReLU6(),
            nn.Conv2d(inputs, outputs, 1),
        )  # fmt: skip

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
            self.maps = nn.ModuleList([separate(16, 32, 2), separate(32, 64, 2)])
            self.heads = nn.ModuleList([separate(32, 6 * 5), separate(64, 6 * 5)])

        def forward(self, x: Any) -> Any:
            x, scores = self.stem(x), []
            for step, head in zip(self.maps, self.heads, strict=True):
                x = step(x)
                scores.append(head(x).reshape(x.shape[0], 6, 5, -1).transpose(1, 2).flatten(2))
            return torch.cat(scores, dim=2)

    return Head()


def _build_mixer() -> Any:
    """MLP-Mixer (Tolstikhin et al., 2021): two blocks on 16 patches."""
    from torch import nn  # noqa: PLC0415 see the first line

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
            self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.channels = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

        def forward(self, x: Any) -> Any:
            x = x + self.places(self.first(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.second(x))

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.blocks = nn.Conv2d(3, 64, 8, stride=8), nn.Sequential(Block(), Block())
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))

    return Mixer()


def _build_text_encoder() -> Any:
    from torch import nn  # noqa: PLC0415 see the first line

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 48)
            self.encode = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
            self.head = nn.Linear(48, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.encode(self.embed(x.abs().mul(20).clamp(max=VOCABULARY - 1).long())).mean(1))

    return Encoder()


def _make_own(build: Callable[[], Any], shape: tuple[int, ...], **options: Any) -> Callable[[], Task]:
    return functools.partial(OwnNetwork, build, shape, **options)


def _make_zoo(name: str, **options: Any) -> Callable[[], Task]:
    return functools.partial(_make_zoo_task, name, options)


ARCHITECTURES: Mapping[str, Callable[[], Task]] = {
    **{name: _make_zoo("cifar-10", model=f"torchvision:{name}", size=32) for name in TORCHVISION},
    "TCN": _make_own(_build_residual_tcn, WINDOW),
    "GRU": _make_own(functools.partial(_build_recurrent, "GRU", num_layers=2, dropout=0.1), WINDOW),
    "LSTM": _make_own(functools.partial(_build_recurrent, "LSTM", bidirectional=True), WINDOW),
    "ViT-tiny": _make_own(_build_vit_tiny, IMAGE),
    "U-Net": _make_own(_build_unet, IMAGE),
    "autoencoder": _make_own(_build_autoencoder, IMAGE, loss="reconstruction:mse", labels=()),
    "SSDLite head": _make_own(_build_ssdlite_head, IMAGE),
    "MLP-Mixer": _make_own(_build_mixer, IMAGE),
    "text transformer": _make_own(_build_text_encoder, (TOKENS,)),
    "mnist cnn": _make_zoo("mnist"),
    "fashion-mnist cnn-small": _make_zoo("fashion-mnist", model="cnn-small"),
    "cifar-10 cnn": _make_zoo("cifar-10", model="cnn"),
    "cifar-10 resnet18-gn": _make_zoo("cifar-10", model="resnet18-gn"),
    "cifar-10 resnet32": _make_zoo("cifar-10", model="resnet32", norm="batch"),
    "cifar-10 resnet18-v2": _make_zoo("cifar-10", model="resnet18-v2"),
    "cifar-10 mobilenet-v1": _make_zoo("cifar-10", model="mobilenet-v1"),
    "cifar-10 mobilenet-v2": _make_zoo("cifar-10", model="mobilenet-v2", norm="batch"),
    "motionsense cnn": _make_zoo("motionsense"),
    "series cnn": _make_zoo("series", model="cnn", **COLUMNS),
    "series gru": _make_zoo("series", model="gru", **COLUMNS),
    "pictures cnn": _make_zoo("pictures", labels="cat,dog,fox", size=32, channels=3, model="cnn"),
    "audio cnn-small": _make_zoo("audio", labels="yes,no,stop", model="cnn-small"),
}
