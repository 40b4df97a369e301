"""Training on a Ray cluster: a worker is an actor, on this machine or another.

The fleet's data and each model version are put into Ray's object store once, from where a node copies them at most
once. A worker keeps nothing between two jobs: the client state of a device travels with its job and comes back with
the result. So any worker can do any job, and what a lost one had is done again by another from the same state.

Source: Moritz et al., Ray: A Distributed Framework for Emerging AI Applications, OSDI 2018.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import itertools
import logging
import os
import platform
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgefl import __version__
from edgefl.compression.error_feedback import is_stateful_training
from edgefl.core.errors import MissingPackageError, NetworkError, RunFailedError, VersionError, format_install_command
from edgefl.core.extensions import ALLOW_VARIABLE
from edgefl.core.types import Array, Json, ModelSpec
from edgefl.simulation.backends.in_process import InProcessBackend, make_result
from edgefl.simulation.backends.partitioned_data import FleetData, pack_data, unpack_data
from edgefl.simulation.backends.trainer import (
    DeviceState,
    EncodedModel,
    EvaluationMetrics,
    TaskSpec,
    TrainingFailedError,
    TrainingJob,
    TrainingResult,
)
from edgefl.simulation.backends.training_requests import (
    SINGLE_THREAD_ENVIRONMENT,
    make_setup,
    make_trainer,
    make_training_request,
    read_scores,
    read_update,
    run_request,
)
from edgefl.strategies.peer_algorithms.gossip_node import decode_messages, encode_messages

log = logging.getLogger(__name__)

MAX_WORKERS = 256
MAX_PENDING_PER_WORKER = 2
"""Jobs sent to a worker and not yet done: the one that it trains, and the next."""
MAX_LOSSES_OF_JOB = 5
"""Workers that one job may be training on when they are lost; more is the job's own fault."""
MAX_LOSSES_IN_A_ROW = 20
"""Workers lost without any result in between, after which the run fails."""
MAX_KEPT_MODELS = 8
"""Model versions in the object store beside those of jobs that wait."""
CONNECT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 300.0
"""Time without any worker and without any event, after which the run fails."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4
_CONTROL = "control"
"""Concurrency group of calls that a worker takes while it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Where the workers run.

    Attributes:
        address: HOST:PORT of a cluster of which this machine is a node; None starts one here for the run alone.
        num_workers: None for one for each core of the cluster, or for each `worker_gpus` of its GPUs.
        worker_gpus: GPUs of a worker, such as 0.25 where four share one.
    """

    address: str | None = None
    num_workers: int | None = None
    worker_gpus: float = 0.0


def list_versions() -> dict[str, str]:
    """Returns the versions on which the bits of a result depend, by name."""
    return {"edgefl": __version__, "python": platform.python_version(), "numpy": np.__version__, **_find_torch()}


def _find_torch() -> dict[str, str]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {"torch": importlib.metadata.version("torch")}
    return {}


class RayTrainer:
    """What a worker does; its actor calls it.

    Args:
        setup: of `make_setup`.
        packed: the fleet's data, of `pack_data`.
        base: what each device gets once.
    """

    def __init__(self, setup: Json, packed: Mapping[str, Array], base: Mapping[str, Array]) -> None:
        # What Ray hands over lies in its store, and cannot be written.
        self._trainer = make_trainer(setup, unpack_data(packed), copy.deepcopy(dict(base)))
        self._cancelled_ids: set[int] = set()

    def run(
        self, header: Json, messages: bytes, model: bytes, state: DeviceState | None
    ) -> tuple[Json, bytes, DeviceState | None]:
        """Returns the reply to a request, and the device's state after it."""
        ticket, device_id = header["ticket"], header["device"]
        self._trainer.restore_state(device_id, copy.deepcopy(state))
        encoded = EncodedModel(version=header["version"], body=model, owner=header["subject"])
        peer_messages, _ = decode_messages(header["messages"], messages)
        reply = run_request(self._trainer, header, peer_messages, encoded, lambda: ticket in self._cancelled_ids)
        self._cancelled_ids.discard(ticket)
        return *reply, self._trainer.remove_state(device_id)

    def cancel(self, ticket: int) -> None:
        """Ends a request early, whether it is under way or still waits."""
        self._cancelled_ids.add(ticket)


def _make_actor_class() -> type[Any]:
    """Returns the class of a worker's actor.

    Ray carries a class of a function by value, so it also starts where another edgefl is installed, or none.
    """
    name = __name__

    class TrainingActor:
        def start(self, expected: Mapping[str, str], *parts: Any) -> str:
            """Makes the trainer; returns what differs from the driver's versions, empty for nothing."""
            import importlib  # noqa: PLC0415 carried by value: it has only what it imports
            import socket  # noqa: PLC0415 likewise

            try:
                import edgefl  # noqa: PLC0415 likewise

                found = {**expected, "edgefl": edgefl.__version__}
                if found == expected:
                    module = importlib.import_module(name)
                    found = module.list_versions()
            except ImportError as error:
                return f"{socket.gethostname()} cannot import edgefl: {error}"
            wrong = [
                f"{package} {found.get(package, 'none')} instead of {version}"
                for package, version in expected.items()
                if found.get(package) != version
            ]
            if wrong:
                return f"{socket.gethostname()} has {', '.join(wrong)}"
            self._trainer = module.RayTrainer(*parts)
            return ""

        def run(self, *request: Any) -> Any:
            return self._trainer.run(*request)

        def cancel(self, ticket: int) -> None:
            self._trainer.cancel(ticket)

    return TrainingActor


@dataclass(slots=True, eq=False, kw_only=True)
class _Request:
    """A request until its reply is fetched; `state_after` is the device's with the reply."""

    header: Json
    messages: bytes
    model: Any
    device_id: str
    reply: tuple[Json, bytes] | None = None
    state_after: DeviceState | None = None
    num_losses: int = 0
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Worker:
    """An actor and what it was asked, oldest first; None for its start."""

    actor: Any
    pending: dict[Any, _Request | None] = field(default_factory=dict)
    is_ready: bool = False


class RayBackend:
    """Implements `TrainingBackend` on a Ray cluster.

    A device has at most one job at a time, as in a fleet: the next one starts from the state after it.

    Args:
        task_spec: the task to train.
        data: the fleet's data.
        shard_indices: device id -> its shard's place in the data.
        model_spec: of the task.
        options: where the workers run.
        in_process: evaluates on the coordinator's data while the workers train.

    Raises:
        MissingPackageError: Ray is not installed.
        NetworkError: the address does not answer as a Ray cluster.
    """

    def __init__(
        self,
        task_spec: TaskSpec,
        data: FleetData,
        *,
        shard_indices: Mapping[str, int],
        model_spec: ModelSpec,
        options: RayOptions,
        in_process: InProcessBackend,
    ) -> None:
        self._ray, self._options = import_ray(), options
        self._model_spec, self._in_process = model_spec, in_process
        self._is_own = _connect(self._ray, options)
        self._workers: list[_Worker] = []
        self._queue: deque[_Request] = deque()
        self._requests: dict[TrainingJob, _Request] = {}
        self._states: dict[str, DeviceState] = {}
        self._models: OrderedDict[tuple[int, str], Any] = OrderedDict()
        self._tickets = itertools.count(1)
        self._num_lost_in_a_row = 0
        try:
            self._parts = [
                self._ray.put(part)
                for part in (make_setup(task_spec, shard_indices), pack_data(data), dict(task_spec.base))
            ]
            num_workers = options.num_workers or min(self._count_workers(), len(shard_indices))
            self._actor_class = self._ray.remote(
                num_cpus=1,
                num_gpus=options.worker_gpus,
                max_restarts=0,
                max_task_retries=0,
                concurrency_groups={_CONTROL: 1},
                runtime_env={"env_vars": self._make_environment()},
            )(_make_actor_class())
            log.info("%d workers train on Ray", num_workers)
            for _ in range(num_workers):
                self._start_worker()
        except BaseException:
            self.close()
            raise

    def start(self, job: TrainingJob) -> None:
        plan, device_id = job.instruction.plan, job.instruction.device_id
        if is_stateful_training(plan, job.instruction.codec or "dense", self._model_spec) and any(
            request.device_id == device_id for request in self._requests.values()
        ):
            raise ValueError(f"{device_id} has a job already")
        message_headers, messages = encode_messages(plan.messages, b"")
        header = {**make_training_request(job), "messages": message_headers}
        request = self._requests[job] = self._make_request(header, device_id, job.model, messages)
        self._queue.append(request)
        self._receive(timeout_s=0.0)
        self._dispatch()

    def get_result(self, job: TrainingJob) -> TrainingResult:
        request = self._requests[job]
        try:
            header, body = self._wait(request)
        finally:
            del self._requests[job]
            if request.reply is not None:
                self._save_state(request)
        return make_result(read_update(header, body), self._model_spec)

    def cancel(self, job: TrainingJob) -> None:
        request = self._requests.pop(job, None)
        if request is None:
            return
        request.is_cancelled = True
        if request in self._queue:
            self._queue.remove(request)
            return
        for worker in self._workers:
            if request in worker.pending.values():
                worker.actor.cancel.options(concurrency_group=_CONTROL).remote(request.header["ticket"])

    def evaluate(self, device_id: str | None, model: EncodedModel) -> EvaluationMetrics:
        if device_id is None:
            return self._in_process.evaluate(None, model)
        request = self._make_request({"do": "evaluate", "messages": []}, device_id, model)
        self._queue.appendleft(request)
        self._dispatch()
        return read_scores(*self._wait(request))

    def close(self) -> None:
        for worker in self._workers:
            self._end_worker(worker)
        self._workers.clear()
        if self._is_own:
            self._ray.shutdown()

    def _make_environment(self) -> dict[str, str]:
        """Returns the workers' variables; on this machine they import what this process can."""
        environment = {**SINGLE_THREAD_ENVIRONMENT, ALLOW_VARIABLE: os.environ.get(ALLOW_VARIABLE, "")}
        if self._options.address is None:
            environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        return environment

    def _count_workers(self) -> int:
        found, gpus = self._ray.cluster_resources(), self._options.worker_gpus
        count = found.get("GPU", 0.0) / gpus if gpus else found.get("CPU", 1.0)
        return max(1, min(int(count), MAX_WORKERS))

    def _make_request(self, header: Json, device_id: str, model: EncodedModel, messages: bytes = b"") -> _Request:
        header = {**header, "device": device_id, "version": model.version, "subject": model.owner}
        return _Request(
            header={**header, "ticket": next(self._tickets)},
            messages=messages,
            model=self._put_model(model),
            device_id=device_id,
        )

    def _put_model(self, model: EncodedModel) -> Any:
        if model.key not in self._models:
            self._models[model.key] = self._ray.put(model.body)
            if len(self._models) > MAX_KEPT_MODELS:
                self._models.popitem(last=False)
        return self._models[model.key]

    def _save_state(self, request: _Request) -> None:
        if request.state_after is not None:
            self._states[request.device_id] = request.state_after
        else:
            self._states.pop(request.device_id, None)

    def _start_worker(self) -> None:
        worker = _Worker(self._actor_class.remote())
        worker.pending[worker.actor.start.remote(list_versions(), *self._parts)] = None
        self._workers.append(worker)

    def _end_worker(self, worker: _Worker) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # it may have ended
            self._ray.kill(worker.actor)

    def _dispatch(self) -> None:
        """Sends waiting requests to the workers that have the least to do."""
        while self._queue:
            free = [one for one in self._workers if one.is_ready and len(one.pending) < MAX_PENDING_PER_WORKER]
            if not free:
                return
            worker, request = min(free, key=lambda one: len(one.pending)), self._queue.popleft()
            state = self._states.get(request.device_id)
            ref = worker.actor.run.remote(request.header, request.messages, request.model, state)
            worker.pending[ref] = request

    def _wait(self, request: _Request) -> tuple[Json, bytes]:
        """Returns the reply to a request.

        Raises:
            TrainingFailedError: the request failed.
            RunFailedError: there are no workers any more.
        """
        while request.reply is None:
            self._receive()
            self._dispatch()
        header, body = request.reply
        if "error" in header:
            raise TrainingFailedError(header["error"])
        return header, body

    def _receive(self, timeout_s: float | None = None) -> None:
        """Receives what workers have to say, at least one message unless there is a time-out."""
        refs = {ref: worker for worker in self._workers for ref in worker.pending}
        can_wait = timeout_s is None and any(worker.is_ready for worker in self._workers)
        waits_s = None if can_wait else START_TIMEOUT_S if timeout_s is None else timeout_s
        ready, _ = self._ray.wait([*refs], num_returns=len(refs) if timeout_s == 0.0 else 1, timeout=waits_s)
        if not ready and timeout_s is None:
            raise RunFailedError(
                f"no worker started on Ray within {START_TIMEOUT_S:.0f} s; each asks for 1 CPU and "
                f"{self._options.worker_gpus:g} GPUs of {_format_resources(self._ray.available_resources())} free"
            )
        for ref in ready:
            if refs[ref] in self._workers:  # it was not lost meanwhile
                self._receive_reply(refs[ref], ref)

    def _receive_reply(self, worker: _Worker, ref: Any) -> None:
        errors = self._ray.exceptions
        try:
            reply = self._ray.get(ref)
        except errors.RayTaskError as error:  # the start alone can raise
            raise RunFailedError(f"a worker on Ray cannot start: {error.cause or error}") from None
        except errors.RayError as error:
            self._replace_worker(worker, error)
            return
        request = worker.pending.pop(ref)
        if request is None:
            if reply:
                raise VersionError(f"Ray node {reply}; all nodes need the versions of the driver")
            worker.is_ready = True
            return
        self._num_lost_in_a_row = 0
        if not request.is_cancelled:
            header, body, state = reply
            # Ray's copy would stay in its store for as long as one array of it is used.
            request.reply, request.state_after = (header, body), copy.deepcopy(state)

    def _replace_worker(self, worker: _Worker, error: Exception) -> None:
        """Starts another worker in place of a lost one, whose requests are the next to be sent."""
        self._workers.remove(worker)
        self._end_worker(worker)
        self._num_lost_in_a_row += 1
        requests = [one for one in worker.pending.values() if one is not None and not one.is_cancelled]
        log.warning("a worker on Ray was lost; %d jobs are done again: %s", len(requests), _get_first_line(error))
        for request in requests[:1]:
            request.num_losses += 1
            if request.num_losses >= MAX_LOSSES_OF_JOB:
                raise RunFailedError(
                    f"{request.num_losses} workers on Ray were lost with a job of {request.device_id}: "
                    f"{_get_first_line(error)}"
                )
        if self._num_lost_in_a_row >= MAX_LOSSES_IN_A_ROW:
            raise RunFailedError(
                f"{self._num_lost_in_a_row} workers on Ray were lost in a row: {_get_first_line(error)}"
            )
        self._queue.extendleft(reversed(requests))
        self._start_worker()


def import_ray() -> Any:
    """Returns Ray.

    Raises:
        MissingPackageError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a simulation tells nobody that it runs
    try:
        import ray  # noqa: PLC0415 an extra
    except ModuleNotFoundError:
        raise MissingPackageError(f"the engine ray needs Ray: {format_install_command('ray')}") from None
    return ray


def _connect(ray: Any, options: RayOptions) -> bool:
    """Connects this process to a cluster; returns whether to disconnect it at the end."""
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    if options.address is None:
        system = {"worker_niceness": 0}  # Ray's own would let them wait for all else on this machine
        ray.init(
            address="local", num_cpus=options.num_workers, include_dashboard=False, _system_config=system, **quiet
        )
        return True
    check_address(options.address)
    try:
        ray.init(address=options.address, **quiet)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise NetworkError(f"Ray at {options.address} cannot be used: {_get_first_line(error)}") from None
    return True


def check_address(address: str) -> None:
    """Checks that a server of gRPC answers, as Ray itself would wait for minutes.

    Raises:
        NetworkError: none does in time.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "1":
                return
            connection.sendall(_HTTP2_PREFACE)
            answer = connection.recv(9)
    except OSError as error:
        raise NetworkError(
            f"no Ray cluster answers at {address}: {error.strerror or error}; start one with: ray start --head"
        ) from None
    if len(answer) < 4 or answer[3] != _HTTP2_SETTINGS:
        raise NetworkError(f"no Ray cluster answers at {address}: something else listens there")


def _get_first_line(error: Exception) -> str:
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def _format_resources(found: Mapping[str, float]) -> str:
    return f"{found.get('CPU', 0.0):g} CPUs and {found.get('GPU', 0.0):g} GPUs"
