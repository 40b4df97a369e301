"""Parts of a model by `[adapt]`: which tensors are frozen, which travel, and which stay on the device.

Sources: Arivazhagan et al., Federated Learning with Personalization Layers, 2019 (`local`); Ben Zaken et al., BitFit,
ACL 2022, section 2 (`bitfit`); Hu et al., LoRA, ICLR 2022, section 4.1 (`lora`; arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from edgefl.core.errors import ConfigError
from edgefl.core.types import ModelSpec, TensorKind, TensorSpec

if TYPE_CHECKING:
    from edgefl.core.config import AdaptSection

FACTOR_A, FACTOR_B = ".lora_a", ".lora_b"
"""Suffixes of the names of an adapter's two factors, after the name of their tensor."""
MAX_LISTED_NAMES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankAdapter:
    """Adapter of one tensor W [outputs, ...]: W + scale·B·A, with A [rank, inputs] and B [outputs, rank].

    A tensor of more than two dimensions, such as a convolution's, counts as a matrix [outputs, all others].

    Source: Hu et al., section 4.1; the scale is alpha/rank.
    """

    target: TensorSpec
    rank: int
    scale: float

    @property
    def a(self) -> TensorSpec:
        """The factor that is drawn at first."""
        inputs = self.target.size // self.target.shape[0]
        return TensorSpec(name=f"{self.target.name}{FACTOR_A}", shape=(self.rank, inputs))

    @property
    def b(self) -> TensorSpec:
        """The factor that is 0 at first, so that nothing has changed yet."""
        return TensorSpec(name=f"{self.target.name}{FACTOR_B}", shape=(self.target.shape[0], self.rank))

    @property
    def is_smaller(self) -> bool:
        """Whether both factors are smaller than their tensor."""
        return self.a.size + self.b.size < self.target.size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Parts of a model.

    Attributes:
        trained: tensors of the model that are trained, in its order; local ones with `shared=False`.
        frozen: the others.
        adapters: of frozen tensors.
    """

    trained: ModelSpec
    frozen: ModelSpec
    adapters: tuple[LowRankAdapter, ...] = ()

    @property
    def frozen_names(self) -> frozenset[str]:
        """The names of the frozen tensors."""
        return frozenset(spec.name for spec in self.frozen)

    @property
    def constant_names(self) -> frozenset[str]:
        """The names of the frozen tensors that no adapter is added to: they stay as they are."""
        return self.frozen_names - {adapter.target.name for adapter in self.adapters}

    @property
    def base_names(self) -> list[str]:
        """The names of what a device gets once: frozen tensors, and local ones as they are at first."""
        local = (spec for spec in self.trained if not spec.shared)
        return [spec.name for spec in (*self.frozen, *local)]

    @property
    def shapes(self) -> ModelSpec:
        """The tensors that a learner trains, factors last."""
        return (*self.trained, *(spec for adapter in self.adapters for spec in (adapter.a, adapter.b)))


def select_parts(section: AdaptSection, shapes: ModelSpec) -> ModelParts:
    """Returns the parts of a model with these tensors.

    Raises:
        ConfigError: a pattern matches nothing or what another one names, or nothing is left to train or to send.
    """
    is_local = _make_matcher("local", section.local, shapes)
    is_shared = _make_matcher("shared", section.shared, shapes)
    is_frozen = _make_frozen_rule(section, shapes)
    if both := next((spec.name for spec in shapes if is_local(spec) and is_shared(spec)), None):
        raise ConfigError(f"adapt.local and adapt.shared both name tensor {both!r}: it can only do one of the two")
    trained, frozen = list[TensorSpec](), list[TensorSpec]()
    for spec in shapes:
        if is_local(spec):
            trained.append(replace(spec, shared=False))
        elif is_shared(spec) or not is_frozen(spec):
            trained.append(spec)
        else:
            frozen.append(spec)
    adapters = _make_adapters(section, frozen) if section.method == "lora" else ()
    parts = ModelParts(trained=tuple(trained), frozen=tuple(frozen), adapters=adapters)
    _check_parts(section, parts, shapes)
    return parts


def _check_parts(section: AdaptSection, parts: ModelParts, shapes: ModelSpec) -> None:
    if not any(spec.shared for spec in parts.shapes):
        raise ConfigError(
            f"adapt leaves no tensor that is trained and sent; the model has {_list_names(shapes)}; "
            "freeze fewer, or name some in adapt.shared"
        )
    if not any(spec.kind == TensorKind.PARAMETER for spec in parts.shapes):
        raise ConfigError(f"adapt leaves only buffers, which are not trained: {_list_names(parts.trained)}")
    if section.method != "none" and not parts.frozen:
        raise ConfigError(f"adapt.method = {section.method!r} freezes nothing of this model; leave it out")


def _make_matcher(setting: str, patterns: Sequence[str], shapes: ModelSpec) -> Callable[[TensorSpec], bool]:
    for pattern in patterns:
        if not any(fnmatchcase(spec.name, pattern) for spec in shapes):
            raise ConfigError(
                f"adapt.{setting}: no tensor of the model matches {pattern[:100]!r}; it has {_list_names(shapes)}"
            )
    return lambda spec: any(fnmatchcase(spec.name, pattern) for pattern in patterns)


def _make_frozen_rule(section: AdaptSection, shapes: ModelSpec) -> Callable[[TensorSpec], bool]:
    """Returns whether a tensor is frozen that neither `local` nor `shared` names."""
    if section.method == "none":
        return _make_matcher("frozen", section.frozen, shapes)
    if section.method == "lora":
        return lambda _spec: True
    if section.method == "bitfit":
        return lambda spec: spec.kind != TensorKind.PARAMETER or not is_bias(spec.name)
    layer = find_last_layer(shapes)
    return lambda spec: spec.kind != TensorKind.PARAMETER or get_layer(spec.name) != layer


def is_bias(name: str) -> bool:
    """Returns whether a tensor is a bias, by its name."""
    return name.rpartition(".")[2] == "bias"


def get_layer(name: str) -> str:
    """Returns the name of the layer that a tensor belongs to."""
    return name.rpartition(".")[0]


def find_last_layer(shapes: ModelSpec) -> str:
    """Returns the name of the layer with the last parameter; raises `ConfigError` where names have no layers."""
    layers = [get_layer(spec.name) for spec in shapes if spec.kind == TensorKind.PARAMETER]
    if not layers or not layers[-1]:
        raise ConfigError(
            "adapt.method = 'head': the names of this model's tensors do not say which are the last layer "
            f"({_list_names(shapes)}); name them in adapt.shared with adapt.frozen = ['*']"
        )
    return layers[-1]


def _make_adapters(section: AdaptSection, frozen: Sequence[TensorSpec]) -> tuple[LowRankAdapter, ...]:
    matrices = [spec for spec in frozen if spec.kind == TensorKind.PARAMETER and len(spec.shape) >= 2]
    patterns = section.targets or ("*",)
    is_target = _make_matcher("targets", patterns, tuple(matrices))
    scale = 1.0 if section.alpha is None else section.alpha / section.rank
    adapters = [LowRankAdapter(target=spec, rank=section.rank, scale=scale) for spec in matrices if is_target(spec)]
    smaller = tuple(adapter for adapter in adapters if adapter.is_smaller)
    if not smaller:
        raise ConfigError(
            f"adapt.rank = {section.rank}: an adapter would be as large as its tensor ({_list_names(matrices)}); "
            "take a lower rank, or train these tensors themselves"
        )
    return smaller


def _list_names(shapes: Sequence[TensorSpec]) -> str:
    names = [spec.name for spec in shapes]
    more = [f"and {len(names) - MAX_LISTED_NAMES} more"] if len(names) > MAX_LISTED_NAMES else []
    return ", ".join([*names[:MAX_LISTED_NAMES], *more]) or "none"
