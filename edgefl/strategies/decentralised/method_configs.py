"""Configurations of the methods on graphs; the methods are in `edgefl.decentralised`.

`pdmm-isvr`, `admm-isvr`: Niwa et al., ICML 2021, whose authors hold patents: check whether they apply to you.
`dsgd`, `ad-psgd`: Lian et al., 2017 and 2018. `d2`: Tang et al., 2018. `gradient-tracking`: Di Lorenzo and Scutari,
2016. `k-gt`: Liu et al., 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edgefl.decentralised.edge_schedule import EdgeScheduleKind
from edgefl.strategies.decentralised.strategy import DecentralisedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PdmmIsvrConfig(DecentralisedConfig):
    """Settings of a run with `pdmm-isvr`."""

    exchange: str = EdgeScheduleKind.POISSON
    method: ClassVar[str] = "pdmm-isvr"
    summary: ClassVar[str] = "Edge variables carry what a node's gradients lack (Niwa et al., 2021)."


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmmIsvrConfig(DecentralisedConfig):
    """Settings of a run with `admm-isvr`."""

    exchange: str = EdgeScheduleKind.POISSON
    method: ClassVar[str] = "admm-isvr"
    summary: ClassVar[str] = "As pdmm-isvr, half as fast; for lossy codecs (Niwa et al., 2021)."


@dataclass(frozen=True, slots=True, kw_only=True)
class DsgdConfig(DecentralisedConfig):
    """Settings of a run with `dsgd`; with `iterations = 1` it is D-PSGD."""

    method: ClassVar[str] = "dsgd"
    summary: ClassVar[str] = "Local SGD steps, then the mean with the neighbours (Lian et al., NeurIPS 2017)."


@dataclass(frozen=True, slots=True, kw_only=True)
class AdPsgdConfig(DecentralisedConfig):
    """Settings of a run with `ad-psgd`."""

    exchange: str = EdgeScheduleKind.POISSON
    method: ClassVar[str] = "ad-psgd"
    summary: ClassVar[str] = "Two neighbours at a time take the mean of their models (Lian et al., ICML 2018)."


@dataclass(frozen=True, slots=True, kw_only=True)
class KGradientTrackingConfig(DecentralisedConfig):
    """Settings of a run with `k-gt`."""

    method: ClassVar[str] = "k-gt"
    summary: ClassVar[str] = "Gradient tracking with local steps (Liu et al., 2023)."
    is_lockstep: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTrackingConfig(DecentralisedConfig):
    """Settings of a run with `gradient-tracking`."""

    iterations: int | None = 1
    method: ClassVar[str] = "gradient-tracking"
    summary: ClassVar[str] = "Every node follows an estimate of the mean gradient (Di Lorenzo and Scutari, 2016)."
    is_lockstep: ClassVar[bool] = True
    has_single_iteration: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class D2Config(DecentralisedConfig):
    """Settings of a run with `d2`."""

    iterations: int | None = 1
    method: ClassVar[str] = "d2"
    summary: ClassVar[str] = "DSGD with one step, corrected by the step before (Tang et al., ICML 2018)."
    is_lockstep: ClassVar[bool] = True
    has_single_iteration: ClassVar[bool] = True
