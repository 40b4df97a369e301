"""Interface of a training backend, and the trainer behind all: it trains for any device as a real one's does.

One warm learner serves all; each device's client state (kept optimiser state, error-feedback residual, local tensors)
is swapped in and out with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from edgefl.compression.codec import Codec, decode_body, make_codec
from edgefl.compression.error_feedback import (
    ErrorFeedback,
    has_error_feedback,
    is_stateful_training,
    require_stateless_training,
)
from edgefl.compression.peer_codec import PeerCodec, select_peer_tensors
from edgefl.core.clusters import (
    add_cluster,
    load_best_cluster,
    make_stack_shapes,
    make_update_shapes,
    split_stack,
)
from edgefl.core.config import AdaptSection, SplitSection
from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import (
    Algorithm,
    Array,
    Dataset,
    GossipConfig,
    PeerMessage,
    Scalar,
    Tensors,
    TrainConfig,
    TrainInstruction,
    derive_rng,
)
from edgefl.simulation.backends.partitioned_data import FleetData, ShardRows
from edgefl.simulation.backends.split_training import SimulatedSplit
from edgefl.strategies.peer_algorithms.gossip_node import GossipNode, make_configured_algorithm
from edgefl.tasks.adaptation.adapted_learner import AdaptedLearner
from edgefl.tasks.adaptation.adapted_task import AdaptedTask
from edgefl.tasks.analyses.analysis import Analysis
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.augmentation import AUGMENT, augment_batches, find_augment
from edgefl.tasks.datasets.shards import drop_unlabelled
from edgefl.tasks.local_algorithms.example_privacy import ExampleAccount, RunAccount, make_augment_rng
from edgefl.tasks.local_algorithms.local_training import (
    LocalTrainingResult,
    is_finite,
    run_gossip_instruction,
    start_node,
    train,
)
from edgefl.tasks.local_algorithms.personal_training import make_personal_model
from edgefl.tasks.local_algorithms.scaffold import ClientControlVariate, get_start_version
from edgefl.tasks.metrics.evaluation import evaluate, make_task_metrics
from edgefl.tasks.noop import NoopLearner
from edgefl.tasks.preparation import check_inputs
from edgefl.tasks.registry import make_task

MAX_CACHE_BYTES = 512 * 1024 * 1024
"""Maximum size of the cache of devices' examples; others are taken from the pool for every job."""


class TrainingFailedError(Exception):
    """A device failed an instruction; the text is the device's error reply."""


@dataclass(slots=True, kw_only=True, eq=False)
class EncodedModel:
    """One encoded model version, shared by all jobs that start from it.

    `owner` is the device whose own model it is, empty for the global one.
    """

    version: int
    body: bytes
    owner: str = ""

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the model within the run."""
        return self.version, self.owner


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingJob:
    """The training of one instruction. `iterations` may shrink until `start` is called, never after."""

    instruction: TrainInstruction
    model: EncodedModel
    iterations: int = 0
    is_started: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a job.

    `num_bytes` covers its encoded update and the peer messages, `exchanged_bytes` the batches, up and down, of a
    network that is cut. `cluster` is the one of several models that was trained. `epsilon` is what the run has spent
    of the privacy of the device's examples.
    """

    tensors: Tensors
    num_bytes: int
    num_examples: int
    loss: float | None = None
    messages: tuple[PeerMessage, ...] = ()
    exchanged_bytes: tuple[int, int] = (0, 0)
    cluster: int | None = None
    epsilon: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """Metrics of one evaluated model; `sums` of those that its task declares, encoded, and their `values`."""

    num_examples: int
    loss: float
    accuracy: float | None
    sums: bytes = b""
    values: Mapping[str, float] = field(default_factory=dict)


class TrainingBackend(Protocol):
    """Trains, here or in other processes. A result depends on its job alone, not on worker or time."""

    def start(self, job: TrainingJob) -> None:
        """Announces a job whose result will be requested; may start it."""

    def get_result(self, job: TrainingJob) -> TrainingResult:
        """Returns the job's result; blocks until it is available.

        Raises:
            TrainingFailedError: the device failed the instruction.
        """

    def cancel(self, job: TrainingJob) -> None:
        """Cancels a started job; the device's state is as before the job."""

    def evaluate(self, device_id: str | None, model: EncodedModel) -> EvaluationMetrics:
        """Evaluates a model on a device's own test split, or on the coordinator's data for None.

        Raises:
            TrainingFailedError: there is nothing to test on, or the model has diverged.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """The task to train, its options, the seed of the run, where its network is cut, and what is analysed, if so.

    `analysis` has the name and the options of an analysis, in place of a training. `adapt` says what is trained, and
    `base` holds what each device gets once for that. With `has_personal` devices have personal copies of the model,
    and with `num_clusters` they take one of so many.
    `accelerator` is what trains: cpu, cuda or cuda:N.
    """

    task: str
    options: Mapping[str, Scalar]
    seed: int
    split: SplitSection = field(default_factory=SplitSection)
    analysis: tuple[str, Mapping[str, Scalar]] | None = None
    adapt: AdaptSection = field(default_factory=AdaptSection)
    base: Mapping[str, Array] = field(default_factory=dict)
    has_personal: bool = False
    num_clusters: int = 0
    accelerator: str = "cpu"


@dataclass(slots=True)
class _LocalState:
    """Client state of one device in the run."""

    algorithm: str = ""
    step_state: Mapping[str, Array] | None = None
    variate: ClientControlVariate = field(default_factory=ClientControlVariate)
    codec_spec: str = ""
    error_feedback: ErrorFeedback | None = None
    local_tensors: dict[str, Array] = field(default_factory=dict)
    personal_copy: dict[str, Array] | None = None
    account: ExampleAccount = field(default_factory=ExampleAccount)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """What one device keeps from one instruction to the next, so that another trainer can go on."""

    local: _LocalState | None = None
    node: GossipNode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUpdate:
    """The encoded update of one job.

    Of a network that is cut, `body` holds both sides, `num_bytes` is the size of the device's own, and
    `exchanged_bytes` that of the batches, up and down.
    """

    body: bytes
    num_examples: int
    loss: float | None
    messages: tuple[PeerMessage, ...] = ()
    num_bytes: int | None = None
    exchanged_bytes: tuple[int, int] = (0, 0)
    cluster: int | None = None
    epsilon: float | None = None


class SimulatedTrainer:
    """Runs jobs.

    Args:
        task_spec: the task to train.
        data: the fleet's data.
        shard_indices: device id -> its shard's place in the data.
    """

    def __init__(self, task_spec: TaskSpec, data: FleetData, shard_indices: Mapping[str, int]) -> None:
        task = make_task(task_spec.task, task_spec.options)
        if task_spec.adapt.is_used:
            task = AdaptedTask(task, task_spec.adapt, task_spec.base)
        self._task_spec, self._data, self._shard_indices = task_spec, data, shard_indices
        self._model_spec = task.shapes()
        self._body_spec = make_stack_shapes(self._model_spec, task_spec.num_clusters)
        self._update_spec = make_update_shapes(self._model_spec) if task_spec.num_clusters else self._model_spec
        self._task, self._metrics = task, make_task_metrics(task, has_personal=task_spec.has_personal)
        self._analysis = None if task_spec.analysis is None else make_analysis(task, *task_spec.analysis)
        # One thread, so that the same job gives the same bits in any process.
        has_model = self._analysis is None or self._analysis.has_task_model
        self._learner = task.learner(accelerator=task_spec.accelerator, threads=1) if has_model else NoopLearner(())
        check_inputs(self._learner, data.pool.inputs)
        self._split = (
            None
            if task_spec.split.after is None
            else SimulatedSplit(task, self._learner, task_spec.split, task_spec.seed)
        )
        self._local_tensor_names = [spec.name for spec in self._model_spec if not spec.shared]
        self._states: dict[str, _LocalState] = {}
        self._snapshots: dict[str, tuple[str, _LocalState, Mapping[str, Array] | None]] = {}
        self._engines: dict[str, GossipNode] = {}
        self._datasets: OrderedDict[str, Dataset] = OrderedDict()
        self._dataset_bytes = 0
        self._codecs: dict[str, Codec] = {}
        self._decoded_model: tuple[tuple[int, str], Tensors] | None = None

    def train(
        self,
        instruction: TrainInstruction,
        model: EncodedModel,
        iterations: int,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> EncodedUpdate:
        """Returns the update of an instruction that ends after `iterations`, or when it is cancelled.

        Raises:
            EdgeflError: the device failed the instruction.
        """
        if self._analysis is not None:
            return self._measure(self._analysis, instruction, model)
        if instruction.plan.node is not None:
            return self._train_node(instruction, instruction.plan.node, model, iterations)
        data, plan, spec = self._get_training_data(instruction), instruction.plan, instruction.codec or "dense"
        memory = self._prepare_state(instruction)
        source: tuple[int | str, ...] = (
            (instruction.device_id,) if instruction.block is None else ("block", instruction.block)
        )
        origin = self._task_spec.seed, instruction.base_version, *source
        cluster = self._load_model(memory, model, instruction.device_id)
        if plan.algorithm == Algorithm.SCAFFOLD:
            memory.variate = memory.variate.apply_used(get_start_version(plan), instruction.used_assignments)
        exchange = None if self._split is None else self._split.start(instruction, source)
        result = train(
            self._learner if self._split is None else self._split.front,
            augment_batches(self._task, data, make_augment_rng(plan, *origin)),
            plan,
            derive_rng(*origin),
            clock=lambda: 0.0,
            on_iteration=lambda num_done, _: num_done >= iterations or is_cancelled(),
            algorithm_state=_get_step_state(memory, plan),
            local_names=self._local_tensor_names,
            personal=memory.personal_copy,
            account=self._open_account(memory, instruction),
        )
        self._save_state(memory, instruction, result)
        rng, displacement = derive_rng(*origin, "uplink"), self.change_displacement(instruction, result.displacement)
        if has_error_feedback(spec):
            feedback = self._get_error_feedback(memory, spec)
            feedback.record_used(instruction.used_assignments)
            body = feedback.encode(instruction.assignment_id, displacement, rng)
        else:
            body = self._get_codec(spec).encode(add_cluster(displacement, cluster), rng)
        if self._split is None or exchange is None:
            return EncodedUpdate(
                body=body,
                num_examples=result.num_examples,
                loss=result.loss,
                cluster=cluster,
                epsilon=result.epsilon,
            )
        return EncodedUpdate(
            body=self._split.join(body, exchange),
            num_examples=result.num_examples,
            loss=result.loss,
            num_bytes=len(body),
            exchanged_bytes=(exchange.bytes_up, exchange.bytes_down),
        )

    def change_displacement(self, _instruction: TrainInstruction, displacement: dict[str, Array]) -> dict[str, Array]:
        """Returns what a device sends in place of its displacement: that itself, but in trainers of other kinds."""
        return displacement

    def _measure(self, analysis: Analysis, instruction: TrainInstruction, model: EncodedModel) -> EncodedUpdate:
        """Returns the sums of an analysis over a device's examples."""
        shard = self._get_shard(instruction.device_id)
        data = drop_unlabelled(self._data.pool.take(shard.rows if analysis.is_of_whole_shard else shard.train))
        sums = analysis.measure(decode_body(model.body, analysis.request_spec), data)
        body = make_codec(instruction.codec or "dense", analysis.sums_spec).encode(sums, derive_rng(0))
        return EncodedUpdate(body=body, num_examples=len(data), loss=None)

    def _train_node(
        self, instruction: TrainInstruction, config: GossipConfig, model: EncodedModel, iterations: int
    ) -> EncodedUpdate:
        """Runs an instruction of a node; it cannot be rolled back, as on a device."""
        data = self._get_training_data(instruction)
        engine = self._engines.get(instruction.device_id) or self._create_engine(instruction.device_id, config, model)
        origin = self._task_spec.seed, instruction.base_version, instruction.device_id, engine.algorithm.iterations
        result = run_gossip_instruction(
            engine,
            self._learner,
            augment_batches(self._task, data, derive_rng(*origin, AUGMENT)),
            replace(instruction.plan, iterations=iterations),
            derive_rng(*origin),
            clock=lambda: 0.0,
            on_iteration=lambda num_done, _: num_done >= iterations,
        )
        body = b""
        if result.model is not None:
            body = self._get_codec(instruction.codec or "dense").encode(result.model, derive_rng(*origin, "uplink"))
        return EncodedUpdate(body=body, num_examples=result.num_examples, loss=result.loss, messages=result.messages)

    def _create_engine(self, device_id: str, config: GossipConfig, model: EncodedModel) -> GossipNode:
        self._load_model(_LocalState(), model)
        codec = PeerCodec(config.codec, select_peer_tensors(self._model_spec), epoch=1)
        engine = GossipNode(
            make_configured_algorithm(config, device_id), codec, derive_rng(self._task_spec.seed, "edges", device_id)
        )
        start_node(engine, self._learner, self._model_spec)
        self._engines[device_id] = engine
        return engine

    def rollback(self, instruction: TrainInstruction) -> None:
        """Restores a device's state from before a cancelled instruction; its newest one only."""
        snapshot = self._snapshots.get(instruction.device_id)
        if snapshot is None or snapshot[0] != instruction.assignment_id:
            return
        _, memory, residual = snapshot
        if memory.error_feedback is not None and residual is not None:
            memory.error_feedback.restore(residual)
        self._states[instruction.device_id] = memory
        del self._snapshots[instruction.device_id]

    def remove_state(self, device_id: str) -> DeviceState | None:
        """Returns a device's state, which is here no longer; None where it keeps nothing."""
        self._snapshots.pop(device_id, None)
        local, node = self._states.pop(device_id, None), self._engines.pop(device_id, None)
        return None if local is None and node is None else DeviceState(local=local, node=node)

    def restore_state(self, device_id: str, state: DeviceState | None) -> None:
        """Gives a device the state that `remove_state` returned, in this trainer or another."""
        if state is not None and state.local is not None:
            self._states[device_id] = state.local
        if state is not None and state.node is not None:
            self._engines[device_id] = state.node

    def evaluate(self, device_id: str | None, model: EncodedModel) -> EvaluationMetrics:
        """Evaluates a model on a device's test split; on the coordinator's data for None.

        Raises:
            DataError: there are no examples, or the model has diverged.
        """
        data = self._data.test if device_id is None else self._data.pool.take(self._get_shard(device_id).test)
        if data is None or not len(data):
            raise DataError("the local test split holds no examples")
        memory = self._states.get(device_id or "", _LocalState())
        self._load_model(memory, model, device_id)
        has_personal = self._task_spec.has_personal
        own = make_personal_model(memory.personal_copy, self._learner.read()) if has_personal else None
        found = evaluate(self._learner, data, self._metrics, own)
        return EvaluationMetrics(
            num_examples=len(data), loss=found.loss, accuracy=found.accuracy, sums=found.sums,
            values=self._metrics.combine([found.sums]),
        )  # fmt: skip

    def _get_shard(self, device_id: str) -> ShardRows:
        return self._data.shards[self._shard_indices[device_id]]

    def _get_training_data(self, instruction: TrainInstruction) -> Dataset:
        shard = self._get_shard(instruction.device_id)
        if instruction.block is None:
            return self._get_dataset(instruction.device_id, shard.train)
        require_stateless_training(instruction.plan, instruction.codec or "dense", self._model_spec)
        if instruction.block not in shard.blocks:
            raise TaskError(f"this device holds no block {instruction.block} of task {self._task_spec.task}")
        start, stop = shard.blocks[instruction.block]
        return self._data.pool.take(shard.rows[start:stop])

    def _get_dataset(self, device_id: str, rows: Array) -> Dataset:
        """Returns a device's training examples, cached while there is room."""
        if device_id not in self._datasets:
            dataset = self._data.pool.take(rows)
            if isinstance(self._learner, AdaptedLearner) and find_augment(self._task) is None:
                dataset = self._learner.make_features(dataset)
            self._datasets[device_id] = dataset
            self._dataset_bytes += dataset.inputs.nbytes
            while self._dataset_bytes > MAX_CACHE_BYTES and len(self._datasets) > 1:
                self._dataset_bytes -= self._datasets.popitem(last=False)[1].inputs.nbytes
        self._datasets.move_to_end(device_id)
        return self._datasets[device_id]

    def _prepare_state(self, instruction: TrainInstruction) -> _LocalState:
        """Returns the device's state; a snapshot is kept until its next instruction is done."""
        memory = self._states.get(instruction.device_id)
        if not is_stateful_training(instruction.plan, instruction.codec or "dense", self._model_spec):
            return memory or _LocalState()
        previous = memory or _LocalState()
        residual = None if previous.error_feedback is None else previous.error_feedback.state()
        self._snapshots[instruction.device_id] = instruction.assignment_id, previous, residual
        self._states[instruction.device_id] = replace(previous)
        return self._states[instruction.device_id]

    def _open_account(self, state: _LocalState, instruction: TrainInstruction) -> RunAccount | None:
        """Returns the device's account; the snapshot keeps the one before."""
        if instruction.plan.privacy is None:
            return None
        state.account = state.account.copy()
        return RunAccount(account=state.account, task=self._task.name, run="")

    def _save_state(self, state: _LocalState, instruction: TrainInstruction, result: LocalTrainingResult) -> None:
        if instruction.plan.algorithm == Algorithm.SCAFFOLD:
            state.variate = state.variate.add_move(instruction.assignment_id, result.algorithm_state or {})
        elif result.algorithm_state is not None:
            state.algorithm = instruction.plan.algorithm
            state.step_state = {name: np.array(array) for name, array in result.algorithm_state.items()}
        if result.personal is not None:
            state.personal_copy = dict(result.personal) if is_finite(result.personal) else state.personal_copy
        elif self._local_tensor_names:
            values = self._learner.read()
            local_tensors = {name: values[name] for name in self._local_tensor_names}
            state.local_tensors = local_tensors if is_finite(local_tensors) else state.local_tensors

    def _get_error_feedback(self, state: _LocalState, spec: str) -> ErrorFeedback:
        if state.error_feedback is None or state.codec_spec != spec:
            error_feedback = ErrorFeedback(self._get_codec(spec))
            if state.error_feedback is not None:
                error_feedback.restore(state.error_feedback.state())
            state.codec_spec, state.error_feedback = spec, error_feedback
        return state.error_feedback

    def _load_model(self, state: _LocalState, model: EncodedModel, device_id: str | None = None) -> int | None:
        """Loads the global model and the local tensors; of several models the device's own, and returns which."""
        if self._local_tensor_names:
            self._learner.load(state.local_tensors or self._create_local_tensors())
        if self._decoded_model is None or self._decoded_model[0] != model.key:
            self._decoded_model = model.key, decode_body(model.body, self._body_spec)
        if self._task_spec.num_clusters and device_id is not None:
            data = self._get_dataset(device_id, self._get_shard(device_id).train)
            return load_best_cluster(self._learner, split_stack(self._decoded_model[1]), data)
        self._learner.load(self._decoded_model[1])
        return None

    def _create_local_tensors(self) -> dict[str, Array]:
        first = self._task.init(self._task_spec.seed)
        return {name: first[name] for name in self._local_tensor_names}

    def _get_codec(self, spec: str) -> Codec:
        if spec not in self._codecs:
            self._codecs[spec] = make_codec(
                spec, self._update_spec if self._split is None else self._split.front_spec
            )
        return self._codecs[spec]


def _get_step_state(state: _LocalState, config: TrainConfig) -> Mapping[str, Array] | None:
    """Returns the local algorithm's state at the start of the instruction."""
    if config.algorithm == Algorithm.SCAFFOLD:
        return state.variate.value
    return state.step_state if state.algorithm == config.algorithm else None
