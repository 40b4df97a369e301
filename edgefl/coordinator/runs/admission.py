"""What a run asks of its devices before they get work, as its run file and its model say."""

from __future__ import annotations

from typing import Any, Protocol

from edgefl.config import RunConfig
from edgefl.coordinator.dispatch.door import Terms
from edgefl.types import Strategy, Tensors

MODELS_IN_MEMORY = 4
"""Weights, gradients, what is encoded, and what a local algorithm keeps."""
MODELS_ON_DISK = 2
"""What the codec leaves out, and kept moments or tensors of the board's own."""


class Admitting(Protocol):
    """The part of an assembled run that its door looks at."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def model(self) -> Tensors: ...
    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def layout(self) -> str: ...


def terms_of(run: Admitting, expected: tuple[str, ...] = (), *, has_begun: bool = False) -> Terms:
    """Returns the terms of a run; `expected` are the devices that took part before it was taken up again.

    With `has_begun` it goes on where it was.

    The first model is sent ahead only where every device is going to use it: nodes of a graph may have one of their
    own, and where some are drawn for each round the others would fetch it for nothing.
    """
    devices, model_bytes = run.config.devices, model_size(run.model)
    has_nodes = bool(getattr(run.strategy, "has_nodes", False))
    return Terms(
        require=devices.require,
        ready_s=devices.ready_s,
        layout=run.layout,
        memory_bytes=MODELS_IN_MEMORY * model_bytes,
        disk_bytes=MODELS_ON_DISK * model_bytes,
        expected=expected,
        has_begun=has_begun,
        sends_model=not has_nodes and devices.count is None and devices.fraction is None,
    )


def model_size(model: Tensors) -> int:
    """Returns the bytes of a model in memory."""
    return sum(getattr(tensor, "nbytes", 0) for tensor in model.values())
