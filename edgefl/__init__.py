"""Federated learning for fleets of single-board computers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl.core.config import RunConfig
    from edgefl.simulation.local_run import RunResult
    from edgefl.simulation.simulated_run import SimulationResult

__version__ = "0.2.0"
DISTRIBUTION = "edgefl-fleet"
"""What package indexes call this. Another project is called `edgefl` there, and it is never asked for."""
__all__ = ["__version__", "run", "simulate"]


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    devices: int | Sequence[str | Path] = 4,
    data: str | Path | None = None,
    scheme: str | None = None,
    root: str | Path | None = None,
) -> RunResult:
    """Trains on a coordinator and devices as processes of this machine; see `edgefl.simulation.local_run.run`."""
    # A device that imports edgefl pays nothing for this.
    from edgefl.simulation.local_run import run as run_here  # noqa: PLC0415

    return run_here(config, devices=devices, data=data, scheme=scheme, root=root)


def simulate(  # noqa: PLR0913 as `edgefl.simulation.simulated_run.simulate`
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    devices: int | Sequence[str | Path] | None = None,
    profiles: Sequence[str] = (),
    data: str | Path | None = None,
    scheme: str | None = None,
    root: str | Path | None = None,
    bookkeeping_only: bool = False,
) -> SimulationResult:
    """Trains on a virtual fleet, in virtual time; see `edgefl.simulation.simulated_run.simulate`."""
    from edgefl.simulation.simulated_run import simulate as simulate_here  # noqa: PLC0415 likewise

    return simulate_here(
        config,
        devices=devices,
        profiles=profiles,
        data=data,
        scheme=scheme,
        root=root,
        bookkeeping_only=bookkeeping_only,
    )
