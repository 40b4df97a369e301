"""FedAvg whose devices have models of their own: the first has the average, the others one that knows nothing.

Imported as `apart_strategy:Apart`, here and in other processes; see `TESTS` for their PYTHONPATH.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.types import Tensors
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.fedavg import FedAvgConfig

NAME = "apart_strategy:Apart"
TESTS = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Apart(FedAvgConfig):
    """The settings of `fedavg`, and how many devices there are."""

    nodes: int = 2

    def build(self, rules: RoundRules) -> Any:
        return ApartRun(FedAvgConfig.build(self, rules), self.nodes)


class ApartRun:
    def __init__(self, inner: Any, num_nodes: int) -> None:
        self.inner, self.num_nodes = inner, num_nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def node_models(self, state: Any) -> Mapping[str, Tensors]:
        average = self.inner.model(state)
        nothing = {name: np.zeros_like(tensor) for name, tensor in average.items()}
        return {f"device-{number:02}": nothing if number > 1 else average for number in range(1, 1 + self.num_nodes)}

    def facts(self, state: Any) -> Mapping[str, float]:
        return {"disagreement": 0.25 * self.inner.version(state)}
