"""Admission requirements of a run, from its run file and its model."""

from __future__ import annotations

from typing import Any, Protocol

from edgefl.coordinator.execution.admission import AdmissionRequirements
from edgefl.core.config import RunConfig
from edgefl.core.types import Strategy, Tensors

MODEL_COPIES_IN_MEMORY = 4
"""Weights, gradients, the encoded update, and the state of a local algorithm."""
MODEL_COPIES_ON_DISK = 2
"""The codec's residual, and moments or local tensors of the device."""


class AdmissibleRun(Protocol):
    """The part of an assembled run that admission needs."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def model(self) -> Tensors: ...
    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def layout(self) -> str: ...


def create_admission_requirements(
    run: AdmissibleRun, previous_devices: tuple[str, ...] = (), *, is_resumed: bool = False
) -> AdmissionRequirements:
    """Returns the admission requirements of a run.

    `previous_devices` took part before it was resumed; with `is_resumed` it goes on where it was.

    The first model is prefetched only where every device will use it: nodes of a graph may have their own, and
    where a sample is drawn for each round the other devices would fetch it for nothing.
    """
    devices, model_bytes = run.config.devices, count_model_bytes(run.model)
    has_nodes = bool(getattr(run.strategy, "has_nodes", False))
    return AdmissionRequirements(
        require=devices.require,
        ready_s=devices.ready_s,
        model_fingerprint=run.layout,
        memory_bytes=MODEL_COPIES_IN_MEMORY * model_bytes,
        disk_bytes=MODEL_COPIES_ON_DISK * model_bytes,
        previous_devices=previous_devices,
        is_resumed=is_resumed,
        should_prefetch_model=not has_nodes and devices.count is None and devices.fraction is None,
    )


def count_model_bytes(model: Tensors) -> int:
    """Returns the bytes of a model in memory."""
    return sum(getattr(tensor, "nbytes", 0) for tensor in model.values())
