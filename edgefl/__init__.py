"""Federated learning for fleets of single-board computers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl.client.fleet import connect
    from edgefl.compression.codec import Codec
    from edgefl.core.metrics import Metric
    from edgefl.core.types import Strategy, Task
    from edgefl.simulation.local_fleet import run
    from edgefl.simulation.simulated_run import simulate
    from edgefl.tasks.job import Job, JobContext

__version__ = "0.2.0"
DISTRIBUTION = "edgefl-fleet"
"""What package indexes call this. Another project is called `edgefl` there, and it is never asked for."""
__all__ = ["Codec", "Job", "JobContext", "Metric", "Strategy", "Task", "__version__", "connect", "run", "simulate"]

_MODULES = {
    "Codec": "edgefl.compression.codec",
    "Job": "edgefl.tasks.job",
    "JobContext": "edgefl.tasks.job",
    "Metric": "edgefl.core.metrics",
    "Strategy": "edgefl.core.types",
    "Task": "edgefl.core.types",
    "connect": "edgefl.client.fleet",
    "run": "edgefl.simulation.local_fleet",
    "simulate": "edgefl.simulation.simulated_run",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: a device that imports edgefl pays for none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
