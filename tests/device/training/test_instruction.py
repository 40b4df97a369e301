"""What a device answers before a run, with the real trainer and a real shard."""

import hashlib
import threading
from functools import partial

import numpy as np
import pytest
from digit_shards import digit_shard
from gated_jobs import Greeting

from edgefl import __version__
from edgefl.compression.codec import make_codec
from edgefl.core.conditions import ConditionsEndedError
from edgefl.core.config import AdaptSection
from edgefl.core.errors import TaskError
from edgefl.core.protocol import COMPILED_KEY, model_fingerprint
from edgefl.core.types import BASE_SUFFIX, derive_rng
from edgefl.device.hardware import providers
from edgefl.device.training.instruction import LEASE_S, FullModelRequiredError, ReadinessHandler
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.system.processes import StoppedCallError
from edgefl.tasks.adaptation.base_file import AdaptPlan
from edgefl.tasks.compiled.board import graph_task
from edgefl.tasks.compiled.board.bound_graph import CPU
from edgefl.tasks.compiled.plan import CompiledPlan
from edgefl.tasks.registry import make_task

RUN = {"v": 2, "run": "r", "task": "digits", "options": {}, "seed": 7, "test_fraction": 0.1, "residuals": "periodic"}
TASK = make_task("digits")
MODEL = TASK.init(7)


@pytest.fixture
def shards(tmp_path):
    return {"digits": str(digit_shard(tmp_path / "digits.npz", 64))}


def make_trainer(tmp_path, shards, **options):
    return DeviceTrainer(
        device_id="pi",
        role="trainer",
        shards=lambda: shards,
        accelerator="cpu",
        threads=1,
        state_dir=tmp_path,
        on_progress=lambda *_: None,
        **options,
    )


@pytest.fixture
def trainer(tmp_path, shards):
    return make_trainer(tmp_path, shards)


def can(**changes):
    asked = {"assignment": "r/can", "phase": "can", "edgefl": __version__, "layout": model_fingerprint(TASK.shapes())}
    return {**RUN, **asked, "needs": {"memory_bytes": 1, "disk_bytes": 1}, **changes}


def prepare(version=0):
    return {**RUN, "assignment": "r/prepare", "phase": "prepare", "version": version}


def body():
    return make_codec("dense", TASK.shapes()).encode(MODEL, derive_rng(0))


@pytest.mark.parametrize("is_confined", [False, True])
def test_providers_are_tried_at_the_first_step_not_by_the_question_and_never_where_confined(
    tmp_path, shards, monkeypatch, is_confined
):
    opened, stops = [], []

    def load(task, *_, open_provider, **_options):
        opened.append(open_provider)
        return task

    def call(_module, _request, *, should_stop, **_options):
        stops.append(should_stop)
        raise StoppedCallError("stopped")

    present = ["XnnpackExecutionProvider", CPU]
    choice = partial(providers.ProviderChoice, available=lambda: present, call=call)
    monkeypatch.setattr(providers, "ProviderChoice", choice)
    monkeypatch.setattr(graph_task, "load_graph_task", load)
    trainer = make_trainer(tmp_path, shards, get_source=None if is_confined else lambda: None)
    content = b"a compiled task"
    plan = CompiledPlan(hashlib.sha256(content).hexdigest(), len(content), is_for_all=True)
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / f"{plan.sha256}{BASE_SUFFIX}").write_bytes(content)
    reply, _ = trainer.train(can(**{COMPILED_KEY: plan.to_json()}), b"")
    assert (reply["ready"], len(opened), stops) == (True, 1, [])
    with opened[0]() as provider:
        assert provider == CPU
    assert len(stops) == (0 if is_confined else 1)
    assert [stop() for stop in stops] == [False] * len(stops)
    trainer.abort()
    assert [stop() for stop in stops] == [True] * len(stops)


def training(**changes):
    plan = {"algorithm": "sgd", "iterations": 3, "batch_size": 8, "learning_rate": 0.1}
    return {
        **RUN,
        "assignment": "r/a",
        "version": 0,
        "plan": plan,
        "codec": "dense",
        "used_assignments": [],
        **changes,
    }


def test_a_device_with_shard_task_memory_and_disk_can(trainer):
    assert trainer.train(can(), b"") == ({"v": 2, "run": "r", "assignment": "r/can", "ready": True}, b"")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "noop"}, "no shard for task 'noop'"),
        ({"edgefl": "9.9.0"}, "update the device"),
        ({"layout": "0123456789abcdef"}, "has another model"),
        ({"needs": {"memory_bytes": 10**15}}, "MB of memory free, the run needs 1000000000 MB"),
        ({"needs": {"disk_bytes": 10**15}}, "MB of disk free, the run needs 1000000000 MB"),
        ({"v": 1}, "instruction of version 1"),
        ({"options": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_a_device_that_cannot_says_why(trainer, changes, reason):
    header, _ = trainer.train(can(**changes), b"")
    assert header["ready"] is False
    assert reason in header["reason"]


def test_a_question_whose_base_may_not_come_now_is_handed_back_so_that_it_is_asked_again(tmp_path, shards):
    def refuse(_num_bytes):
        raise ConditionsEndedError("its connection is metered")

    trainer = make_trainer(tmp_path, shards, charge_traffic=refuse, get_source=lambda: None)
    plan = AdaptPlan(AdaptSection(method="lora", rank=2), "a" * 64, 1000)
    with pytest.raises(ConditionsEndedError):
        trainer.train(can(adapt=plan.to_json()), b"")


def test_a_shard_that_is_gone_is_found_out_before_the_run(trainer, shards):
    shards["digits"] = "/nowhere/device-01.npz"
    header, _ = trainer.train(can(), b"")
    assert (header["ready"], "/nowhere/device-01.npz" in header["reason"]) == (False, True)


def test_the_first_work_uses_the_model_that_was_fetched_ahead_and_one_that_is_not_held_is_asked_for_whole(trainer):
    assert trainer.train(prepare(), body()[:-3])[0]["ready"] is False
    assert trainer.train(training(prefetched_version=0), b"")[0]["requires_full_model"] is True
    assert trainer.train(prepare(), body())[0]["ready"] is True
    assert trainer.train(training(prefetched_version=1), b"")[0]["requires_full_model"] is True
    ahead, displacement = trainer.train(training(prefetched_version=0), b"")
    assert ahead["metrics"]["iterations"] == 3
    _, again = trainer.train(training(), body())
    assert displacement == again, "the same as if the model had come with it"


def test_a_run_that_does_not_begin_is_forgotten(trainer):
    trainer.train(prepare(), body())
    trainer.complete_run("another")
    trainer.complete_run("r")
    assert trainer.train(training(prefetched_version=0), b"")[0]["requires_full_model"] is True


class Tasks:
    def __init__(self, task=TASK):
        self.task = task

    def get(self, name, options, *, after=None, analysis=None, adapt=None, compiled=None):
        return type("Warm", (), {"name": "digits", "task": self.task, "model_spec": TASK.shapes()})

    def load_split(self, cached_task, test_fraction):
        return np.zeros(3), np.zeros(1)


def make_readiness(tmp_path, tasks, clock=lambda: 0.0):
    return ReadinessHandler(
        tmp_path, tasks, training_lock=threading.Lock(), is_gossip_running=lambda _: False, clock=clock
    )


@pytest.mark.parametrize("reason", ["", "there is no such library"])
def test_a_board_is_ready_for_a_job_once_that_has_loaded_what_its_parts_need(tmp_path, reason):
    class Loading(Greeting):
        is_loaded = False

        def load(self):
            self.is_loaded = True
            if reason:
                raise TaskError(reason)

    job = Loading()
    reply, _ = make_readiness(tmp_path, Tasks(job)).run_phase(prepare(), b"")
    assert (reply["ready"], reply.get("reason", ""), job.is_loaded) == (not reason, reason, True)


def test_a_model_that_nobody_asks_for_is_let_go_after_its_lease(tmp_path):
    now = [0.0]
    readiness = make_readiness(tmp_path, Tasks(), lambda: now[0])
    readiness.run_phase(prepare(), body())
    now[0] = LEASE_S - 1
    readiness.remove_expired()
    assert readiness._prefetched is not None
    now[0] = LEASE_S
    readiness.remove_expired()
    with pytest.raises(FullModelRequiredError):
        readiness.add_prefetched_model("r", 0, b"")
