"""Flower apps for tests: folders with a `pyproject.toml` and the modules of both sides."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from edgefl.flower.app_folder import AppFolder
from edgefl.flower.app_job import PATH_KEYS, load_component
from edgefl.flower.internals import ensure_identity
from edgefl.flower.server_process import run_app
from edgefl.simulation.local_fleet import LocalFleet

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
num-nodes = 2
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
    limits = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
    strategy = FedAvg(**dict.fromkeys(limits, context.run_config["num-nodes"]))
    arrays = ArrayRecord([np.zeros(context.run_config["model.size"])])
    result = strategy.start(
        grid, arrays, num_rounds=context.run_config["num-server-rounds"], train_config=ConfigRecord({"lr": 0.5})
    )
    np.savez("final_model", *result.arrays.to_numpy_ndarrays())
"""
CLIENT = """from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .data import count_call, load_target, pass_gate

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    pass_gate(message, context)
    (model,) = message.content["arrays"].to_numpy_ndarrays()
    target, count = load_target(context, model.shape)
    model = model + message.content["config"]["lr"] * (target - model)
    loss = float(((target - model) ** 2).mean())
    metrics = MetricRecord({"num-examples": count, "train_loss": loss, "calls": count_call(context)})
    return Message(RecordDict({"arrays": ArrayRecord([model]), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    (model,) = message.content["arrays"].to_numpy_ndarrays()
    target, count = load_target(context, model.shape)
    loss = float(((target - model) ** 2).mean())
    metrics = MetricRecord({"num-examples": count, "eval_loss": loss, "calls": count_call(context)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""
DATA = """import time
from pathlib import Path

import numpy as np
from flwr.app import MetricRecord


def load_target(context, shape):
    number = context.node_config["partition-id"]
    return np.random.default_rng(number).standard_normal(shape), 10 * (number + 1)


def count_call(context):
    calls = 1 + context.state["calls"]["n"] if "calls" in context.state else 1
    context.state["calls"] = MetricRecord({"n": calls})
    return calls


def pass_gate(message, context):
    folder, number = Path(context.node_config["dataset-path"]), message.content["config"]["server-round"]
    assert context.node_config["data-path"] == str(folder)
    wait_at_gate(context, number)
    if (folder / f"broken-{number}").exists():
        raise ValueError("broken on purpose")


def wait_at_gate(context, name):
    Path(f"arrived-{name}").touch()
    while (Path(context.node_config["data-path"]) / f"closed-{name}").exists():
        time.sleep(0.05)
"""
FILES = {
    "pyproject.toml": PROJECT,
    "mean_app/__init__.py": "",
    "mean_app/server_app.py": SERVER,
    "mean_app/client_app.py": CLIENT,
    "mean_app/data.py": DATA,
}
"""Each node moves the model half of the way to its own target, and counts its messages in its state.

`closed-ROUND` among a board's files holds its training up, and `broken-ROUND` makes it fail.
"""


PRIVATE_CLIENT = """from functools import partial

import numpy as np
from flwr.client import NumPyClient
from flwr.client.mod import LocalDpMod, fixedclipping_mod, secaggplus_mod
from flwr.clientapp import ClientApp

from .data import wait_at_gate

MODS = {"secagg": secaggplus_mod, "clipping": fixedclipping_mod, "local": LocalDpMod(1.0, 1e-6, 1e6, 0.5)}


class Mean(NumPyClient):
    def __init__(self, context):
        self.context = context

    def fit(self, parameters, config):
        wait_at_gate(self.context, "fit")
        return [np.full(4, float(self.context.node_config["partition-id"] + 1))], 1, {}

    def evaluate(self, parameters, config):
        return float(np.abs(parameters[0]).sum()), 1, {}


def protect(message, context, call_next):
    for name in reversed(context.run_config.get("privacy", "none").split()):
        call_next = partial(MODS[name], call_next=call_next) if name in MODS else call_next
    return call_next(message, context)


app = ClientApp(client_fn=lambda context: Mean(context).to_client(), mods=[protect])
"""
PRIVATE_SERVER = """import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

app = ServerApp()


@app.main()
def main(grid, context):
    options, workflow = context.run_config, None
    initial = ndarrays_to_parameters([np.zeros(4)])
    strategy = FedAvg(min_available_clients=3, fraction_evaluate=0.0, initial_parameters=initial)
    if "clipping" in options["privacy"]:
        strategy = DifferentialPrivacyClientSideFixedClipping(strategy, 1e-9, 1.0, 3)
    if "secagg" in options["privacy"]:
        workflow = SecAggPlusWorkflow(3, 2, timeout=options["timeout"] or None)
    context = LegacyContext(
        context=context, config=ServerConfig(num_rounds=options["num-server-rounds"]), strategy=strategy
    )
    DefaultWorkflow(fit_workflow=workflow)(grid, context)
    np.savez("final_model", *context.state.array_records["parameters"].to_numpy_ndarrays())
"""
PRIVATE_APP = {
    "pyproject.toml": PROJECT.replace("mean-app", "private-app").replace(
        "num-server-rounds = 3", 'num-server-rounds = 2\nprivacy = "none"\ntimeout = 0.0'
    ),
    "mean_app/client_app.py": PRIVATE_CLIENT,
    "mean_app/server_app.py": PRIVATE_SERVER,
}
"""Changes to an app of Flower's older interface, each of whose boards says its number from 1 on.

`privacy` of its configuration names the mods, in their order, among secagg, clipping and local.
"""


def write_app(root: Path, changes: Mapping[str, str] | None = None) -> Path:
    """Returns a folder with the app; `changes` are other contents of its files, or further ones."""
    for name, text in {**FILES, **(changes or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def build_bundle(root: Path, out: Path) -> Path:
    """Returns the bundle that `flwr build` makes of an app, in a folder of its own."""
    out.mkdir(exist_ok=True)
    environment = {**os.environ, "FLWR_HOME": str(out / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
    command = [Path(sys.executable).parent / "flwr", "build", "--app", root]
    subprocess.run(command, cwd=out, env=environment, check=True, capture_output=True, timeout=60)
    (path,) = out.glob("*.fab")
    return path


@contextmanager
def imported_app(app: AppFolder) -> Iterator[None]:
    """Lets this process import the app's modules, and forgets them and their folder at the end."""
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry != str(app.root)]
        forget_modules()


def forget_modules() -> None:
    """Lets the app's modules be imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mean_app"]:
        del sys.modules[name]


class HereGrid(Grid):
    """Flower's grid as a call of the ClientApp in this process, one node for each path.

    Args:
        app: whose ClientApp answers.
        paths: of the nodes, in the order of their partitions.
        is_away: (number of the node, type of message, round) -> whether it is gone.
    """

    def __init__(self, app: AppFolder, paths: list[Path], is_away: Callable[[int, str, int], bool]) -> None:
        self._client, self._is_away, self._phase = load_component(app.root, app.client), is_away, ("train", 1)
        self._contexts = [
            Context(
                run_id=1,
                node_id=number,
                node_config={
                    "partition-id": number,
                    "num-partitions": len(paths),
                    **dict.fromkeys(PATH_KEYS, str(path)),
                },
                state=RecordDict(),
                run_config=dict(app.config),
            )
            for number, path in enumerate(paths)
        ]

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number + 1 for number in range(len(self._contexts)) if not self._is_away(number, *self._phase)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        ensure_identity()
        replies = []
        for message in messages:
            number, phase = message.metadata.dst_node_id - 1, self._phase
            if self._is_away(number, phase[0] + " under way", phase[1]):
                replies.append(Message(error=Error(code=5, reason="away"), reply_to=message))
            else:
                replies.append(self._client(message, self._contexts[number]))
        kind, round_number = self._phase
        self._phase = ("evaluate", round_number) if kind == "train" else ("train", round_number + 1)
        return replies


def submit(fleet: LocalFleet, app: AppFolder, tools: Any, *options: str) -> str:
    """Submits the app as a run of three nodes at least, and returns its id."""
    ended = tools.as_operator(fleet, "run", "flower-app", app.root, "--min", "3", *options)
    assert ended.code == 0, ended.err
    return str(ended.out.strip())


def read_model(fleet: LocalFleet, tools: Any, run_id: str, path: Path) -> Any:
    """Returns the model in the result of a run, which is written to `path`."""
    ended = tools.as_operator(fleet, "run", "result", run_id, "--out", path)
    assert ended.code == 0, ended.err
    with zipfile.ZipFile(path) as archive, np.load(io.BytesIO(archive.read("final_model.npz"))) as arrays:
        return arrays["arr_0"]


def compute_model(
    app: AppFolder,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_away: Any = None,
    **config: Any,
) -> Any:
    """Returns the model of Flower's own strategy over the same ClientApp in this process, on three nodes."""
    monkeypatch.chdir(folder)
    run_config = {**app.config, **config}
    setup = {"root": str(app.root), "server": app.server, "run_config": run_config, "run_id": 1, "seed": 7}
    with imported_app(app):
        run_app(setup, HereGrid(app, [folder] * 3, is_away or (lambda *_: False)))
    with np.load(folder / "final_model.npz") as arrays:
        return arrays["arr_0"]
