"""Rounds in Flower's simulation engine, for a Python that has `flwr[simulation]`; prints a line of JSON.

    python -m harness.stock_simulation '{"devices": 100, "fraction": 0.1, "rounds": 10, "iterations": 1, ...}'

Every device does what a simulated board of edgefl does: the same task, learner, shard and local steps, in actors that
stay warm, each of which has the data in memory. Only what is around the training differs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from edgefl.core.types import TrainConfig, derive_rng
from edgefl.simulation.backends.partitioned_data import FleetData, partition_in_memory
from edgefl.tasks.local_algorithms.local_training import train as train_locally
from edgefl.tasks.registry import make_task
from harness.process_trees import tree_cpu_s

PLAN = "EDGEFL_BENCHMARK_PLAN"
client_app, server_app = ClientApp(), ServerApp()


def _plan() -> Any:
    return json.loads(os.environ[PLAN])


@cache
def _learner() -> Any:
    return make_task(_plan()["task"], {}).learner(accelerator="cpu", threads=1)


@cache
def _data() -> FleetData:
    plan = _plan()
    return partition_in_memory(
        plan["task"], "iid", plan["devices"], data=None, seed=7, test_fraction=plan["test_fraction"]
    )


@client_app.train()
def train(message: Message, context: Context) -> Message:
    plan, learner, place = _plan(), _learner(), int(context.node_config["partition-id"])
    names = [spec.name for spec in make_task(plan["task"], {}).shapes()]
    arrays = message.content["arrays"].to_numpy_ndarrays()
    start = dict(zip(names, arrays, strict=True))
    learner.load(start)
    result = train_locally(
        learner,
        _data().pool.take(_data().shards[place].train),
        TrainConfig(iterations=plan["iterations"], batch_size=plan["batch_size"], learning_rate=0.05),
        derive_rng(7, place),
        clock=time.perf_counter,
        on_iteration=lambda *_: False,
    )
    moved = ArrayRecord([start[name] + result.displacement[name] for name in names])
    metrics = MetricRecord({"num-examples": result.num_examples})
    return Message(content=RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)


class _Timed(FedAvg):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.closed_s: list[float] = []
        self.cpu_s: list[float] = []
        self.num_updates: list[int] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        kept = list(replies)
        result = super().aggregate_train(server_round, kept)
        self.num_updates.append(sum(not reply.has_error() for reply in kept))
        self.closed_s.append(time.perf_counter())
        if server_round in {1, _plan()["rounds"]}:
            self.cpu_s.append(tree_cpu_s())
        return result


@server_app.main()
def serve(grid: Grid, context: Context) -> None:  # noqa: ARG001 Flower's signature
    plan = _plan()
    strategy = _Timed(
        fraction_train=plan["fraction"], fraction_evaluate=0.0, min_available_nodes=plan["devices"],
    )  # fmt: skip
    model = make_task(plan["task"], {}).init(7)
    strategy.start(
        grid=grid, initial_arrays=ArrayRecord([np.array(each) for each in model.values()]), num_rounds=plan["rounds"]
    )
    found = {"closed_s": strategy.closed_s, "cpu_s": strategy.cpu_s, "num_updates": strategy.num_updates}
    Path(plan["result"]).write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ[PLAN] = sys.argv[1]
    here = import_module("harness.stock_simulation")  # its actors find the apps by this name
    run_simulation(
        server_app=here.server_app,
        client_app=here.client_app,
        num_supernodes=_plan()["devices"],
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
