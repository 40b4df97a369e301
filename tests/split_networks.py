"""A cut network for tests of both sides: its run, and its rest within this process."""

from types import SimpleNamespace

import numpy as np

from edgefl.coordinator.split.rest_process import RestServer
from edgefl.coordinator.split.service import SplitRun
from edgefl.core.config import parse_run
from edgefl.core.errors import SplitSessionError
from edgefl.core.types import Dataset, TrainConfig, TrainInstruction
from edgefl.engine.assembly.build import build_run

WIRE_ID, DEVICE, BATCH, EXAMPLES = "r1/v0-a1-pi", "pi", 4, 10
PLAN = TrainConfig(epochs=1, batch_size=BATCH, learning_rate=0.05)
SEED_KEY = (7, 0, DEVICE)


class RestHere:
    """Does what `RestProcess` does, within this process; `lose` is its kill."""

    def __init__(self, setup):
        self.server, self.is_lost, self.calls = RestServer(setup), False, []

    def call(self, header, body=b""):
        self.calls.append(header["do"])
        if self.is_lost:
            raise SplitSessionError("lost")
        return self.server.handle(header, body)[1]

    def lose(self):
        self.is_lost = True

    def close(self):
        self.is_lost = True


class SplitSite:
    """One run of a cut CNN with one assignment out."""

    def __init__(self, **split):
        tables = {
            "run": {"task": "mnist", "seed": SEED_KEY[0]},
            "task": {"model": "cnn-small"},
            "split": {"after": "pool2", **split},
        }
        self.components = build_run(parse_run(tables), "r1")
        self.processes = []
        self.run = SplitRun(
            self.components.split, self.components.header, self.components.shapes, start_process=self.start
        )
        self.source = SimpleNamespace(version=0, model=lambda: self.components.model)
        self.dispatch()

    def start(self, setup):
        self.processes.append(RestHere(setup))
        return self.processes[-1]

    def dispatch(self, wire_id=WIRE_ID, num_examples=None, **values):
        known = {"assignment_id": "v0-a1-pi", "device_id": DEVICE, "base_version": 0, "plan": PLAN}
        self.run.add(wire_id, TrainInstruction(**{**known, **values}), self.source, num_examples=num_examples)


def some_images():
    rng = np.random.default_rng(2)
    return Dataset(
        inputs=rng.integers(0, 255, (EXAMPLES, 28, 28)).astype(np.uint8), targets=rng.integers(0, 10, EXAMPLES)
    )
