"""The workbench trains as a board does, bit for bit; and so do workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.core.errors import RunFailedError
from edgefl.core.types import ExamplePrivacy, TrainConfig, TrainInstruction, derive_rng
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.simulation.backends.in_process import AutoBackend, InProcessBackend
from edgefl.simulation.backends.partitioned_data import FleetData, partition_in_memory
from edgefl.simulation.backends.process_pool import ProcessPoolBackend
from edgefl.simulation.backends.trainer import (
    EncodedModel,
    SimulatedTrainer,
    TaskSpec,
    TrainingBackend,
    TrainingFailedError,
    TrainingJob,
)
from edgefl.tasks.classification import ClassificationTask
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.registry import make_task

TRADE = TaskSpec(task="digits", options={"model": "logistic"}, seed=5)
TASK = make_task(TRADE.task, TRADE.options)
SHAPES = TASK.shapes()
NAMES = ["device-01", "device-02"]
PLACES = {name: place for place, name in enumerate(NAMES)}


def sent(version: int = 0, subject: str = "") -> EncodedModel:
    """A model that is another one for each version, and zero for each device's own."""
    model = {name: 0 * tensor if subject else tensor for name, tensor in TASK.init(version).items()}
    body = make_codec("dense", SHAPES).encode(model, derive_rng(0))
    return EncodedModel(version=version, body=body, owner=subject)


def order(name: str, device: str = "device-01", version: int = 0, **more: Any) -> TrainInstruction:
    plan = more.pop("plan", TrainConfig(iterations=3, batch_size=8, learning_rate=0.3))
    return TrainInstruction(assignment_id=name, device_id=device, base_version=version, plan=plan, **more)


def cut(scheme: str = "iid") -> FleetData:
    return partition_in_memory("digits", scheme, 2, data=None, seed=TRADE.seed, test_fraction=0.1)


def bench(scheme: str = "iid") -> SimulatedTrainer:
    return SimulatedTrainer(TRADE, cut(scheme), PLACES)


KEPT = TrainConfig(iterations=3, batch_size=8, learning_rate=0.01, algorithm="adam", keeps_state=True)
WAYS: dict[str, list[TrainInstruction]] = {
    "plain": [order("a"), order("b", version=1)],
    "random rounding": [order("a", codec="qsgd:4"), order("b", version=1, codec="qsgd:4")],
    "error feedback": [
        order("a", codec="ef|topk:0.05"),
        order("b", version=1, codec="ef|topk:0.05"),
        order("c", version=2, codec="ef|topk:0.05", used_assignments=("b",)),
        order("d", version=3, codec="ef|topk:0.05", used_assignments=("b", "c")),
    ],
    "kept optimiser": [order("a", plan=KEPT), order("b", version=1, plan=KEPT)],
    "another codec": [
        order("a", codec="ef|topk:0.05"),
        order("b", version=1, codec="ef|int8", used_assignments=("a",)),
    ],
}


def real_trainer(tmp_path: Path, device_id: str, scheme: str = "iid") -> DeviceTrainer:
    paths = create_shards("digits", scheme, 2, tmp_path / "shards", None, TRADE.seed)
    return DeviceTrainer(
        device_id=device_id,
        role="trainer",
        shards=lambda: {"digits": str(paths[PLACES[device_id]])},
        accelerator="cpu",
        threads=1,
        state_dir=tmp_path / "state",
        on_progress=lambda *_: None,
    )


@pytest.mark.parametrize("way", WAYS)
def test_an_update_has_the_bytes_that_a_board_would_send(way: str, tmp_path: Path) -> None:
    trainer, virtual = real_trainer(tmp_path, "device-01"), bench()
    for assigned in WAYS[way]:
        product = virtual.train(assigned, sent(assigned.base_version), 3)
        metrics, body = trainer.train(header(assigned), sent(assigned.base_version).body)
        assert body == product.body, metrics
        assert metrics["metrics"]["num_examples"] == product.num_examples
        assert metrics["metrics"]["loss"] == product.loss


def test_a_block_gives_the_bytes_that_every_holder_sends(tmp_path: Path) -> None:
    trainer, virtual = real_trainer(tmp_path, "device-02", "duplicate:2"), bench("duplicate:2")
    bodies = {virtual.train(order("a", name, block=0), sent(), 3).body for name in NAMES}
    _, body = trainer.train(header(order("a", "device-02", block=0)), sent().body)
    assert bodies == {body}


def test_nobody_knows_the_changes_of_augment_under_a_private_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def record(_task: object, inputs: Any, targets: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        seen.append(rng.random())
        return inputs, targets

    monkeypatch.setattr(ClassificationTask, "augment", record, raising=False)
    privacy = ExamplePrivacy(optimizer="sgd", clip=1.0, epsilon=1000.0, delta=1e-5, noise=1.0)
    private = TrainConfig(algorithm="dp-sgd", iterations=1, batch_size=10_000, privacy=privacy)
    for _ in range(2):
        bench().train(order("a", plan=private), sent(), 1)
    assert len({*seen}) == len(seen) > 100


def header(assigned: TrainInstruction) -> dict[str, Any]:
    plan = {name: value for name, value in asdict(assigned.plan).items() if value is not None and name != "messages"}
    return {
        "v": 2, "run": "r", "task": TRADE.task, "options": dict(TRADE.options), "seed": TRADE.seed,
        "test_fraction": 0.1, "assignment": assigned.assignment_id, "version": assigned.base_version, "plan": plan,
        "codec": assigned.codec or "dense", "used_assignments": list(assigned.used_assignments),
        **({} if assigned.block is None else {"block": assigned.block}),
    }  # fmt: skip


def test_evaluating_for_the_coordinator_and_for_a_board_uses_their_own_data() -> None:
    virtual, data = bench(), cut()
    assert data.test is not None
    assert virtual.evaluate(None, sent()).num_examples == len(data.test)
    assert virtual.evaluate("device-02", sent()).num_examples == len(data.shards[1].test)


def as_pool(data: FleetData) -> ProcessPoolBackend:
    here = InProcessBackend(SimulatedTrainer(TRADE, data, PLACES), SHAPES)
    return ProcessPoolBackend(TRADE, data, shard_indices=PLACES, model_spec=SHAPES, num_workers=2, in_process=here)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolBackend]:
    started = as_pool(cut())
    yield started
    started.close()


def results(training: TrainingBackend, orders: list[TrainInstruction]) -> list[Any]:
    """What the coordinator gets of jobs that are begun, changed and cancelled as a simulation does it."""
    found = []
    for number, assigned in enumerate(orders):
        job = TrainingJob(instruction=assigned, model=sent(assigned.base_version), iterations=5)
        training.start(job)
        if number % 2:  # recalled: it ends earlier than it was begun for
            training.cancel(job)
            job.iterations = 3
            training.start(job)
        trained = training.get_result(job)
        tensors = {name: np.array(_dense(tensor)) for name, tensor in trained.tensors.items()}
        found.append((trained.num_bytes, trained.num_examples, trained.loss, tensors))
    return found


def _dense(tensor: Any) -> Any:
    return tensor if isinstance(tensor, np.ndarray) else tensor.dense()


def test_several_processes_give_what_one_gives(pool: ProcessPoolBackend) -> None:
    alone = InProcessBackend(bench(), SHAPES)
    for orders in WAYS.values():
        # Both boards, so that both workers have work, and one whose memory must not get into the other's.
        both = [replace(assigned, device_id=name) for assigned in orders for name in NAMES]
        here, there = results(alone, both), results(pool, both)
        for own, other in zip(here, there, strict=True):
            assert own[:3] == other[:3]
            for name, tensor in own[3].items():
                np.testing.assert_array_equal(tensor, other[3][name])


def test_only_a_board_that_leaves_something_is_bound_to_a_worker_and_what_was_cancelled_keeps_none() -> None:
    pool = as_pool(cut())

    def begin(name: str, plan: TrainConfig, iterations: int = 3) -> TrainingJob:
        job = TrainingJob(instruction=order(name, plan=plan), model=sent(), iterations=iterations)
        pool.start(job)
        return job

    plain = TrainConfig(iterations=3, batch_size=8, learning_rate=0.3)
    cancelled = begin("long", plain, 10**6)
    worker = pool._pending_jobs[cancelled].worker
    pool.cancel(cancelled)
    for plan, num_workers in ((plain, 2), (KEPT, 1)):
        jobs = [begin(name, plan) for name in "abcd"]
        workers = [pool._pending_jobs[job].worker for job in jobs]
        assert len(set(workers)) == num_workers
        assert plan is KEPT or workers.count(worker) == 2
        for job in jobs:
            pool.get_result(job)
    pool.close()


def test_what_a_worker_cannot_do_is_said_as_a_board_says_it(pool: ProcessPoolBackend) -> None:
    for training in (pool, InProcessBackend(bench(), SHAPES)):
        job = TrainingJob(
            instruction=order("a", plan=TrainConfig(iterations=1, algorithm="none")), model=sent(), iterations=1
        )
        training.start(job)
        with pytest.raises(TrainingFailedError, match=r"ConfigError: local algorithm 'none'"):
            training.get_result(job)
    assert pool.evaluate("device-02", sent()) == bench().evaluate("device-02", sent())
    assert pool.evaluate(None, sent()) == bench().evaluate(None, sent())


@pytest.mark.parametrize("device", ["device-01", None])
def test_whatever_a_task_raises_fails_one_evaluation_and_not_the_run(device: str | None) -> None:
    virtual = bench()
    virtual._learner = object()  # type: ignore[assignment]  # no task would make such a learner
    with pytest.raises(TrainingFailedError, match="AttributeError: 'object' object has no attribute 'load'"):
        InProcessBackend(virtual, SHAPES).evaluate(device, sent())


def test_a_worker_that_dies_ends_the_run_and_the_pool_ends_whole() -> None:
    pool = as_pool(cut())
    first, second = (worker._process for worker in pool._workers)
    job = TrainingJob(instruction=order("a"), model=sent(), iterations=10**8)
    pool.start(job)
    first.kill()
    with pytest.raises(RunFailedError, match="training process ended with code -9"):
        pool.get_result(job)
    with pytest.raises(RunFailedError, match="cannot be reached any more"):
        pool.start(TrainingJob(instruction=order("b", plan=KEPT), model=sent(), iterations=1))
    pool.close()
    assert second.poll() is not None
    assert not Path(pool._folder.name).exists()


class PoolError(Exception):
    pass


def choosing(waves: int, now: list[float], cores: int = 2) -> AutoBackend:
    def refuse(num_workers: int) -> TrainingBackend:
        raise PoolError(num_workers)

    virtual = bench()
    now.append(0.0)

    def clock() -> float:
        now[0] += 1.0  # every look at the clock is a second later
        return now[0]

    return AutoBackend(
        InProcessBackend(virtual, SHAPES), virtual, refuse, num_cores=cores, expected_rounds=waves, clock=clock
    )


@pytest.mark.parametrize(("waves", "devices", "cores"), [(1, 2, 2), (1000, 1, 2), (1000, 2, 1)])
def test_short_or_lonely_work_stays_in_this_process(waves: int, devices: int, cores: int) -> None:
    training = choosing(waves, [], cores)
    jobs = [TrainingJob(instruction=order(name, name), model=sent(), iterations=1) for name in NAMES[:devices]]
    for job in jobs:
        training.start(job)
    expected = InProcessBackend(bench(), SHAPES).get_result(jobs[0])
    assert training.get_result(jobs[0]).loss == expected.loss


def test_long_work_of_several_boards_gets_processes() -> None:
    training = choosing(1000, [])
    jobs = [TrainingJob(instruction=order(name, name), model=sent(), iterations=3) for name in NAMES]
    for job in jobs:
        training.start(job)
    with pytest.raises(PoolError):
        training.get_result(jobs[0])


def test_what_was_cancelled_before_the_choice_is_not_begun() -> None:
    training = choosing(1000, [])
    jobs = [TrainingJob(instruction=order(name, name), model=sent(), iterations=3) for name in NAMES]
    for job in jobs:
        training.start(job)
    training.cancel(jobs[1])
    assert training.get_result(jobs[0]).num_bytes > 0


def test_a_device_s_own_model_is_not_taken_for_the_global_one_of_the_same_version(pool: ProcessPoolBackend) -> None:
    expected = {subject: bench().evaluate("device-02", sent(1, subject)) for subject in ("", "device-02")}
    assert expected[""] != expected["device-02"]
    for training in (pool, InProcessBackend(bench(), SHAPES)):
        for subject in ("", "device-02", ""):
            assert training.evaluate("device-02", sent(1, subject)) == expected[subject], subject
    job = TrainingJob(instruction=order("own", "device-02", version=1), model=sent(1), iterations=3)
    pool.evaluate("device-02", sent(1, "device-02"))
    pool.start(job)
    assert pool.get_result(job).loss == bench().train(job.instruction, sent(1), 3).loss, (
        "it starts from the global model"
    )
