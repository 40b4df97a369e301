"""Flower apps for tests: folders with a `pyproject.toml` and the modules of both sides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PROJECT = """[project]
name = "mean-app"
version = "1.2.0"
dependencies = ["flwr[simulation]>=1.30", "numpy>=1.26"]
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "mean_app.server_app:app"
clientapp = "mean_app.client_app:app"
[tool.flwr.app.config]
num-server-rounds = 3
[tool.flwr.app.config.model]
size = 4
"""
SERVER = """import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(min_available_nodes=2)
    arrays = ArrayRecord([np.zeros(context.run_config["model.size"])])
    result = strategy.start(
        grid, arrays, num_rounds=context.run_config["num-server-rounds"], train_config=ConfigRecord({"lr": 0.5})
    )
    np.savez("final_model", *result.arrays.to_numpy_ndarrays())
"""
CLIENT = """from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .data import load_target

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    (model,) = message.content["arrays"].to_numpy_ndarrays()
    target, count = load_target(context, model.shape)
    model = model + message.content["config"]["lr"] * (target - model)
    loss = float(((target - model) ** 2).mean())
    metrics = MetricRecord({"num-examples": count, "train_loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord([model]), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    (model,) = message.content["arrays"].to_numpy_ndarrays()
    target, count = load_target(context, model.shape)
    loss = float(((target - model) ** 2).mean())
    metrics = MetricRecord({"num-examples": count, "eval_loss": loss})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""
DATA = """import numpy as np


def load_target(context, shape):
    number = context.node_config["partition-id"]
    return np.random.default_rng(number).standard_normal(shape), 10 * (number + 1)
"""
FILES = {
    "pyproject.toml": PROJECT,
    "mean_app/__init__.py": "",
    "mean_app/server_app.py": SERVER,
    "mean_app/client_app.py": CLIENT,
    "mean_app/data.py": DATA,
}
"""Each node moves the model half of the way to its own target."""


def write_app(root: Path, changes: Mapping[str, str] | None = None) -> Path:
    """Returns a folder with the app; `changes` are other contents of its files, or further ones."""
    for name, text in {**FILES, **(changes or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
