"""Stock FedAvg without evaluation; writes down when each round closed."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class TimedFedAvg(FedAvg):
    """FedAvg as it is, and the Unix times at which it had aggregated."""

    def __init__(self, num_devices: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=num_devices, min_available_nodes=num_devices)
        self.closed_at: list[float] = []
        self.num_updates: list[int] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        kept = list(replies)
        result = super().aggregate_train(server_round, kept)
        self.num_updates.append(sum(not reply.has_error() for reply in kept))
        self.closed_at.append(time.time())
        return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    model = np.random.default_rng(7).standard_normal(int(config["size-bytes"]) // 4).astype(np.float32)
    strategy = TimedFedAvg(int(config["num-devices"]))
    started_at = time.time()
    strategy.start(grid=grid, initial_arrays=ArrayRecord([model]), num_rounds=int(config["num-rounds"]))
    measured = {"started_at": started_at, "closed_at": strategy.closed_at, "num_updates": strategy.num_updates}
    result = Path(str(config["result"]))
    unfinished = result.with_suffix(".part")
    unfinished.write_text(json.dumps(measured))
    unfinished.rename(result)
