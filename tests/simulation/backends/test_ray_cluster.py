"""Training on Ray: real clusters of several nodes on this machine, each node a raylet of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import edgefl
from edgefl.compression.codec import make_codec
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, MissingPackageError, NetworkError, RunFailedError, VersionError
from edgefl.core.types import TrainConfig, TrainInstruction, derive_rng
from edgefl.simulation.backends import ray_cluster
from edgefl.simulation.backends.in_process import InProcessBackend
from edgefl.simulation.backends.partitioned_data import pack_data, partition_in_memory, unpack_data
from edgefl.simulation.backends.ray_cluster import MAX_PENDING_PER_WORKER, RayBackend, RayOptions, check_address
from edgefl.simulation.backends.trainer import (
    EncodedModel,
    SimulatedTrainer,
    TaskSpec,
    TrainingFailedError,
    TrainingJob,
)
from edgefl.simulation.history_recorder import SimulationHistory
from edgefl.storage.store import Store
from edgefl.tasks.registry import make_task

try:
    import ray
except ModuleNotFoundError:
    ray = None
ON_RAY = (
    pytest.mark.skipif(ray is None, reason="needs Ray: make test-ray"),
    pytest.mark.extended,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
)


def on_ray(test: Any) -> Any:
    """Marks a test that starts a cluster."""
    for mark in ON_RAY:
        test = mark(test)
    return test


ROOT = Path(__file__).parents[3]
SPEC = TaskSpec(task="digits", options={"model": "logistic"}, seed=5)
TASK = make_task(SPEC.task, SPEC.options)
NAMES = ["device-01", "device-02"]
PLACES = {name: place for place, name in enumerate(NAMES)}
HEAD = {"num_cpus": 1, "include_dashboard": False}

MakeCluster = Callable[..., Any]
SETTINGS = (
    ({"engine": "process", "address": "a:1"}, "simulation.address is for engine = \"ray\", got 'a:1'"),
    ({"engine": "process", "worker_gpus": 0.5}, 'simulation.worker_gpus is for engine = "ray", got 0.5'),
    ({"workers": 0}, 'simulation.workers must be at least 1 with engine = "ray", got 0'),
    ({"address": "ray://head:10001"}, "simulation.address must be HOST:PORT of a Ray cluster"),
    ({"address": "head"}, "simulation.address must be HOST:PORT of a Ray cluster"),
    ({"accelerator": "cuda:1", "worker_gpus": 1.0}, "simulation.accelerator must be cpu or cuda on Ray"),
    ({"accelerator": "cuda"}, "simulation.worker_gpus must be above 0 on Ray with accelerator cuda"),
    ({"worker_gpus": 0.5}, "simulation.worker_gpus must be above 0 on Ray with accelerator cuda"),
)


@pytest.mark.parametrize(("section", "message"), SETTINGS)
def test_settings_that_do_not_go_together_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_run({"run": {"task": "digits"}, "simulation": {"engine": "ray", **section}})


def test_where_a_run_trains_is_no_part_of_it(tmp_path: Path) -> None:
    ids = []
    with Store.open(tmp_path / "edgefl.db") as store:
        for section in ({}, {"engine": "ray", "address": "[::1]:6379", "workers": 3}):
            config = parse_run({"run": {"task": "digits"}, "simulation": section})
            history = SimulationHistory(store, config, [], clock=lambda: 0.0)
            assert not {"engine", "address", "workers"} & {*store.get_run(history.run_id).config["simulation"]}
            ids.append(history.run_id)
    assert ids[1] == f"{ids[0]}-2"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=re.escape("pip install 'edgefl-fleet[ray]' -c constraints.txt")):
        make_backend()


@pytest.mark.parametrize(("answer", "message"), [(b"", "timed out"), (b"HTTP/1.1 400 Bad", "something else listens")])
def test_an_address_where_no_cluster_answers_is_said_in_bounded_time(
    answer: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            connection, _ = server.accept()
            connection.sendall(answer)
            is_over.wait(30)
            connection.close()

        is_over = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NetworkError, match=f"no Ray cluster answers at {address}: {message}"):
            check_address(address)
        is_over.set()
        thread.join()
    with pytest.raises(NetworkError, match="Connection refused; start one with: ray start --head"):
        check_address(address)


@pytest.mark.parametrize("scheme", ["iid", "duplicate:2"])
def test_a_fleet_s_data_comes_whole_out_of_what_is_sent(scheme: str) -> None:
    data = partition_in_memory("digits", scheme, 4, data=None, seed=1, test_fraction=0.1)
    found = unpack_data(pack_data(data))
    assert found.test is None
    assert np.array_equal(found.pool.inputs, data.pool.inputs)
    for own, other in zip(data.shards, found.shards, strict=True):
        assert own.blocks == other.blocks
        for name in ("rows", "train", "test"):
            assert np.array_equal(getattr(own, name), getattr(other, name))


@pytest.fixture(scope="module", autouse=True)
def _home() -> Iterator[None]:
    """Ray writes a token into the home folder, and its sockets need a short path."""
    folder = tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_worker_niceness", "0")  # as these are the only thing that the tests wait for
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    """Starts the head of a cluster, and ends all of it afterwards."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 only where Ray is there

    clusters = []

    def make(**head: Any) -> Any:
        clusters.append(Cluster(initialize_head=True, head_node_args={**HEAD, **head}))
        return clusters[-1]

    yield make
    ray.shutdown()
    for cluster in clusters:
        cluster.shutdown()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster of two nodes that several tests use."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 only where Ray is there

    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def make_run(**sections: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "run": {"task": "digits", "rounds": 3, "seed": 7},
        "task": {"model": "logistic"},
        "simulation": {"profiles": ["pi-5", "pi-zero-2w"]},
    }
    return {name: {**tables.get(name, {}), **sections.get(name, {})} for name in {**tables, **sections}}


def simulate(root: Path, tables: dict[str, Any], devices: int = 4, **simulation: Any) -> tuple[bytes, str]:
    """Returns the model and every row of the history."""
    tables = {**tables, "simulation": {**tables["simulation"], **simulation}}
    result = edgefl.simulate(tables, devices=devices, root=root)
    assert result.model is not None
    with sqlite3.connect(root / "edgefl.db") as database:
        return result.model.read_bytes(), "\n".join(database.iterdump())


STATEFUL = {
    "compression": {"up": "ef|topk:0.05|int8"},
    "strategy": {"name": "asgd", "iterations": 5, "optimizer": "adam", "keep_optimizer": True},
}
FAULTS = """
[[fault]]
device = "device-02"
at_s = 5.0
kind = "kill"
for_s = 10
"""
RUNS: dict[str, dict[str, Any]] = {
    "asynchronous, error feedback, kept optimiser": STATEFUL,
    "random rounding": {"compression": {"up": "qsgd:4"}},
    "memory of a codec": {"compression": {"up": "ef|powersgd:2"}},
    "control variates": {"strategy": {"name": "scaffold"}},
    "nodes that exchange": {"strategy": {"name": "pdmm-isvr"}},
    "work that is cancelled": {
        "strategy": {"name": "asgd", "iterations": 20},
        "compression": {"up": "ef|topk:0.05"},
        "simulation": {"iteration_s": 0.5, "detect_s": 1.0},
    },
}


@on_ray
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_two_nodes_gives_the_history_of_one_process_byte_for_byte(
    address: str, tmp_path: Path, name: str
) -> None:
    tables = make_run(**RUNS[name])
    if name == "work that is cancelled":
        (tmp_path / "faults.toml").write_text(FAULTS)
        tables["simulation"]["faults"] = str(tmp_path / "faults.toml")
    here = simulate(tmp_path / "here", tables, workers=0)
    there = simulate(tmp_path / "there", tables, engine="ray", workers=2, address=address)
    assert here == there


@on_ray
def test_a_node_killed_in_the_middle_changes_not_a_byte(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster()
    node = cluster.add_node(num_cpus=1)
    tables = make_run(**STATEFUL, run={"rounds": 30})
    here = simulate(tmp_path / "here", tables, workers=0)
    killed, replaced = list[int](), list[Exception]()
    dispatch, replace_worker = RayBackend._dispatch, RayBackend._replace_worker

    def kill_once(backend: RayBackend) -> None:
        """Kills the node as soon as both workers have work under way, and some of the run is done."""
        dispatch(backend)
        is_busy = len(backend._workers) == 2 and all(one.is_ready and one.pending for one in backend._workers)
        if not killed and is_busy and len(backend._states) == 4:
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            for process in [raylet, *raylet.children(recursive=True)]:
                process.kill()
                killed.append(process.pid)

    def note(backend: RayBackend, worker: Any, error: Exception) -> None:
        replaced.append(error)
        replace_worker(backend, worker, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayBackend, "_dispatch", kill_once)
        patch.setattr(RayBackend, "_replace_worker", note)
        there = simulate(tmp_path / "there", tables, engine="ray", workers=2, address=cluster.address)
    assert len(killed) > 1, "the raylet and its worker"
    assert len(replaced) == 1
    assert here == there


def make_backend(**options: Any) -> RayBackend:
    data = partition_in_memory("digits", "iid", 2, data=None, seed=SPEC.seed, test_fraction=0.1)
    here = InProcessBackend(SimulatedTrainer(SPEC, data, PLACES), TASK.shapes())
    return RayBackend(
        SPEC, data, shard_indices=PLACES, model_spec=TASK.shapes(), options=RayOptions(**options), in_process=here
    )


def make_job(name: str, iterations: int = 3, **plan: Any) -> TrainingJob:
    config = TrainConfig(**{"iterations": iterations, "batch_size": 8, "learning_rate": 0.3, **plan})
    instruction = TrainInstruction(assignment_id=name, device_id=NAMES[0], base_version=0, plan=config)
    body = make_codec("dense", TASK.shapes()).encode(TASK.init(0), derive_rng(0))
    return TrainingJob(instruction=instruction, model=EncodedModel(version=0, body=body), iterations=iterations)


@on_ray
def test_jobs_wait_here_while_workers_have_enough_and_cancelled_ones_are_not_done(address: str) -> None:
    backend = make_backend(num_workers=2, address=address)
    long = [make_job(f"long-{number}", 10**8) for number in range(4)]
    jobs = [make_job(str(number)) for number in range(20)]
    for job in [*long, *jobs]:
        backend.start(job)
    assert len(backend._queue) == 24 - sum(len(worker.pending) for worker in backend._workers if worker.is_ready)
    for job in [*long, *jobs[1:19]]:
        backend.cancel(job)
    losses = [backend.get_result(job).loss for job in (jobs[0], jobs[19])]
    assert losses[0] == losses[1] is not None, "the same job"
    assert all(len(worker.pending) <= MAX_PENDING_PER_WORKER for worker in backend._workers)
    assert not backend._queue
    assert not backend._requests
    backend.close()


@on_ray
def test_what_a_device_cannot_do_is_said_as_a_board_says_it(address: str) -> None:
    backend = make_backend(num_workers=1, address=address)
    job = make_job("a", algorithm="none")
    backend.start(job)
    with pytest.raises(TrainingFailedError, match="ConfigError: local algorithm 'none'"):
        backend.get_result(job)
    here = backend._in_process._trainer
    for device_id in (NAMES[1], None):
        assert backend.evaluate(device_id, job.model) == here.evaluate(device_id, job.model)
    backend.close()


@on_ray
def test_a_job_with_which_workers_are_lost_again_and_again_ends_the_run(address: str) -> None:
    backend = make_backend(num_workers=1, address=address)
    job, is_over = make_job("a", 10**8), threading.Event()

    def kill() -> None:
        while not is_over.wait(0.2):
            for worker in list(backend._workers):
                if worker.pending and worker.is_ready:
                    ray.kill(worker.actor)

    backend.start(job)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(RunFailedError, match=r"5 workers on Ray were lost with a job of device-01: \w+"):
            backend.get_result(job)
    finally:
        is_over.set()
        killer.join()
        backend.close()


@on_ray
def test_a_node_with_another_release_is_refused(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray lets workers on this machine import what is in the driver's folder
    (tmp_path / "edgefl").mkdir()
    (tmp_path / "edgefl" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    cluster = make_cluster(num_cpus=0)
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    backend = make_backend(num_workers=1, address=cluster.address)
    backend.start(job := make_job("a"))
    with pytest.raises(VersionError, match=rf"has edgefl 0\.0\.1 instead of {edgefl.__version__}; all nodes need"):
        backend.get_result(job)
    backend.close()


@on_ray
def test_a_cluster_without_room_for_a_worker_is_said(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "START_TIMEOUT_S", 1.0)
    cluster = make_cluster(num_cpus=1, num_gpus=1)
    backend = make_backend(num_workers=1, address=cluster.address, worker_gpus=2.0)
    backend.start(job := make_job("a"))
    with pytest.raises(RunFailedError, match=r"each asks for 1 CPU and 2 GPUs of 1 CPUs and 1 GPUs free"):
        backend.get_result(job)
    backend.close()


@on_ray
def test_four_workers_share_a_gpu_where_each_asks_for_a_quarter(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_cpus=8, num_gpus=1)
    backend = make_backend(address=cluster.address, worker_gpus=0.5)
    assert len(backend._workers) == 2
    backend.start(job := make_job("a"))
    assert backend.get_result(job).loss is not None
    backend.close()
