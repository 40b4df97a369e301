"""Boards of a site that answer at once, and what `fedavg` makes of their updates."""

import itertools
import time

import numpy as np
from small_fleet import SmallFleet

from edgefl.compression.codec import make_codec
from edgefl.coordinator.execution.site_outage import OutageLimits
from edgefl.coordinator.execution.site_rounds import SiteRounds
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.metrics import NO_METRICS
from edgefl.core.protocol import Heartbeat, StatusMessage
from edgefl.core.sites import SiteTask
from edgefl.core.types import (
    TensorSpec,
    TrainConfig,
    Update,
    UpdateMetrics,
    derive_rng,
)
from edgefl.strategies.aggregation import StreamingMean

SPEC = (
    TensorSpec(name="w", shape=(40, 3)),
    TensorSpec(name="b", shape=(3,)),
    TensorSpec(name="n", shape=(), dtype="int64"),
)
TASK = SiteTask(spec=SPEC, metrics=NO_METRICS)
RUN = "run-7"
EXAMPLES = {"pi-1": 31, "pi-2": 40, "pi-3": 37, "pi-4": 52, "pi-5": 29}


def displacement(seed, *, share=1.0):
    rng = np.random.default_rng(seed)
    tensors = {"w": rng.normal(size=(40, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    tensors["n"] = np.array(seed, np.int64)
    if share < 1:
        tensors["w"] *= rng.random((40, 3)) < share
    return tensors


MOVES = {name: displacement(number + 1) for number, name in enumerate(EXAMPLES)}


def make_header(assignment=f"{RUN}/v3-a1-site", **more):
    plan = TrainConfig(iterations=4).to_json()
    return {
        "v": 2, "run": RUN, "task": "digits", "options": {}, "seed": 1, "test_fraction": 0.0, "version": 3,
        "assignment": assignment, "plan": plan, "codec": "dense", "used_assignments": [], "lineage": "line-1",
        "model_sha256": "ab", "newest_record": 9, "partial_sums": True,
        "site_limits": {"has_plain_step": True}, **more,
    }  # fmt: skip


class SomeBoards:
    """Boards that answer at once what they are asked, or not: mail, bell and registry of a gateway."""

    def __init__(self, folder, *names, moves=MOVES, outage=OutageLimits()):  # noqa: B008 frozen
        self.outage = outage
        self.folder, self.moves, self.names = folder, moves, names
        self.asked, self.silent, self.told = [], set(), []
        self.registry, self._number, self._beats = None, itertools.count(1), itertools.count(1)
        self.codec, self.on_asked = "dense", lambda _name: None
        self.jumped_s, self.events = 0.0, []
        self.restart()

    def restart(self):
        """A gateway that begins anew in the same folder, whose boards are there."""
        self.registry = SmallFleet(clock=time.monotonic).registry
        for number, name in enumerate(self.names):
            examples = {"digits": EXAMPLES[name]}
            self.registry.add(name, node_id=101 + number, role="trainer", groups=(), examples=examples)
            self.say(name, "online")
        self.rounds = SiteRounds(
            self.folder / "rounds",
            registry=self.registry,
            notifier=self,
            open_transport=lambda: self,
            clock=self.read_clock,
            record_event=lambda *event: self.events.append(event),
            outage=self.outage,
        )

    def read_clock(self):
        return time.monotonic() + self.jumped_s

    def say(self, name, state):
        self.registry.record_status(name, StatusMessage(state=state, boot_id="boot-1", session_no=1, will=False))

    def send(self, node_id, *, kind, header, body):
        name, message = self.names[node_id - 101], f"message-{next(self._number)}"
        self.asked.append((name, kind, header, body.inline))
        if name not in self.silent:
            self.answer(name, header, message)
        self.on_asked(name)
        return message

    def answer(self, name, header, message="", **metrics):
        figures = {"iterations": 4, "num_examples": EXAMPLES[name], "loss": 0.5, "compute_s": 0.0, **metrics}
        reply = {"v": 2, "run": RUN, "assignment": header["assignment"], "metrics": figures}
        body = make_codec(self.codec, SPEC).encode(self.moves[name], derive_rng(0))
        node_id = 101 + self.names.index(name)
        self.rounds.post(
            Reply(node_id=node_id, instruction_id=message, header=reply, body=body, bytes_up=1, bytes_down=1)
        )

    def notify(self, device_id):
        """A wake-up."""

    def send_command(self, device_id, command):
        self.told.append((device_id, str(command.kind), command.argument))
        if str(command.kind) == "heartbeat":
            beat = Heartbeat(seq=next(self._beats), session_no=1, uptime_s=1.0, holding=[])
            self.registry.record_heartbeat(device_id, beat)

    def is_known(self, _name):
        return True

    def is_delivered(self, _name):
        return False

    def cancel(self, name):
        """A message."""

    def close(self):
        """The end of a round."""

    def run(self, header=None):
        return self.rounds.run_round(header or make_header(), b"the model", TASK, lambda: None)


def mean_of(names, moves=MOVES):
    """What `fedavg` makes of these boards in one fleet."""
    mean = StreamingMean(expected=list(names))
    like = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in SPEC}
    for name in names:
        metrics = UpdateMetrics(num_examples=EXAMPLES[name])
        update = Update(assignment_id=name, device_id=name, base_version=3, tensors=moves[name], metrics=metrics)
        mean.add_update(name, update, weight=float(EXAMPLES[name]))
    return mean.compute_mean(like)
