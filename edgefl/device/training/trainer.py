"""Device trainer: decodes the model, trains or evaluates on a shard, encodes the result."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.delta import apply_delta
from edgefl.compression.error_feedback import has_error_feedback, require_stateless_training
from edgefl.core.analyses import ANALYSIS_KEY, DEFAULT_MIN_GROUP
from edgefl.core.clusters import (
    CLUSTER_FIGURE,
    add_cluster,
    load_best_cluster,
    make_stack_shapes,
    make_update_shapes,
    split_stack,
)
from edgefl.core.conditions import ConditionsEndedError
from edgefl.core.errors import DataError, EdgeflError, NetworkError, SplitSessionError, TaskError
from edgefl.core.extensions import ExtensionRefusedError
from edgefl.core.protocol import (
    ANSWER_TIMEOUT_S,
    BASE_TRAFFIC_KEY,
    EXAMPLE_UNIT,
    INSTRUCTION_VERSION,
    JOB_LIMITS,
    NEXT_MODEL_HASH_KEY,
    PRIVACY_KEY,
    SECURE_KEY,
    finite_or_none,
)
from edgefl.core.types import (
    EPSILON,
    NUM_REDUCTIONS,
    PEER_BYTES,
    ZERO_CONTROL_VARIATE,
    Algorithm,
    Array,
    CollectiveConfig,
    Dataset,
    Json,
    Learner,
    Role,
    SecureAggregationConfig,
    Tensors,
    derive_rng,
)
from edgefl.device.drift_watch import FOLDER as DRIFT_FOLDER
from edgefl.device.drift_watch import DriftWatch
from edgefl.device.hardware.health import HealthSampler, ThermalPacer
from edgefl.device.peers.peer_connection import MakePeerTransport
from edgefl.device.rollouts.bases import FOLDER as BASES_FOLDER
from edgefl.device.rollouts.bases import BaseFiles, LocalFolder
from edgefl.device.rollouts.download import DownloadSource
from edgefl.device.training.client_state import ClientState
from edgefl.device.training.collective_worker import CollectiveWorker
from edgefl.device.training.gossip_worker import GossipWorker
from edgefl.device.training.instruction import (
    FullModelRequiredError,
    ParsedInstruction,
    ReadinessHandler,
    parse_instruction,
)
from edgefl.device.training.job_worker import is_part, run_part
from edgefl.device.training.split_exchange import CoordinatorExchange, ExchangeLink
from edgefl.device.training.task_cache import PROVIDERS_FILE, CachedTask, TaskCache
from edgefl.strategies.peer_algorithms.gossip_node import decode_messages
from edgefl.tasks.augmentation import augment_batches
from edgefl.tasks.datasets.shards import drop_unlabelled, drop_weak
from edgefl.tasks.learners.torch_split import FrontLearner
from edgefl.tasks.local_algorithms.example_privacy import (
    ACCOUNT_FILE,
    ExampleAccount,
    RunAccount,
    make_augment_rng,
)
from edgefl.tasks.local_algorithms.local_training import LocalTrainingResult, train
from edgefl.tasks.local_algorithms.personal_training import make_personal_model
from edgefl.tasks.local_algorithms.scaffold import get_start_version
from edgefl.tasks.metrics.evaluation import evaluate, make_task_metrics

log = logging.getLogger(__name__)


MAX_FINISH_EARLY_IDS = 64
MAX_SESSIONS = 50
"""Sessions of one assignment of a split network; each is lost with a process at the coordinator."""
PROGRESS_INTERVAL_S = 0.1

ProgressCallback = Callable[[str, int, float], bool]
"""(assignment id, finished iterations, seconds per iteration); returns whether it was sent"""


class TrainingAbortedError(Exception):
    """Abort by the agent's stop: the current assignment ends without a reply."""


class DeviceTrainer:
    """Trainer of a device; used by one thread, observed and interrupted from others.

    Args:
        device_id: seeds this device's random streams.
        role: an evaluator evaluates on its whole shard, a trainer on its local test split.
        shards: task -> path, read at every instruction.
        accelerator: cpu or cuda.
        threads: how many cores to use, None for all.
        state_dir: of local tensors and the runs' state.
        on_progress: called after iterations of a plan that requests progress.
        incarnation: grows with every start of the device, 1 or more; nodes of a graph number their messages by it.
        make_transport: for nodes of a graph whose messages the coordinator does not relay.
        health_sampler: samples the board during work; None for no samples.
        thermal_pacer: pauses between iterations while the board is too hot; None for no limit.
        on_alive: called at every iteration and while waiting.
        get_source: returns the coordinator's address and our signature, for split networks and bases; None where
            there is none.
        bases_dir: of the files of bases; None for one in `state_dir`.
        get_min_group: returns the least number of examples that an analysis may be about.
        get_drift_references: returns by task what its data is compared with, as `DriftWatch`.
        get_max_epsilon: returns the most ε that a task may spend over all runs, at `LIMIT_DELTA`; None for no limit.
        get_only_masked: returns whether what this board trains may leave it in secure aggregation alone.
        check_conditions: called at every iteration; raises `ConditionsEndedError` where this board may not go on.
        charge_traffic: called with the bytes of a base before it is fetched; raises likewise.
        check_base_link: called while a base arrives; raises likewise.
        get_base_source: returns the folder, such as a USB stick, in which a base is looked for first; None for none.
        charge_copy: called with the bytes of a base before it is copied from there; raises likewise.
    """

    def __init__(  # noqa: PLR0913 a composition root hands over its parts by name
        self,
        *,
        device_id: str,
        role: str,
        shards: Callable[[], Mapping[str, str]],
        accelerator: str,
        threads: int | None,
        state_dir: Path,
        on_progress: ProgressCallback,
        incarnation: int = 1,
        make_transport: MakePeerTransport | None = None,
        health_sampler: HealthSampler | None = None,
        thermal_pacer: ThermalPacer | None = None,
        on_alive: Callable[[], None] = lambda: None,
        get_source: Callable[[], DownloadSource] | None = None,
        bases_dir: Path | None = None,
        get_min_group: Callable[[], int] = lambda: DEFAULT_MIN_GROUP,
        get_drift_references: Callable[[], Mapping[str, str]] = dict,
        get_max_epsilon: Callable[[], float | None] = lambda: None,
        get_only_masked: Callable[[], bool] = lambda: False,
        check_conditions: Callable[[], None] = lambda: None,
        charge_traffic: Callable[[int], None] = lambda _: None,
        check_base_link: Callable[[], None] = lambda: None,
        get_base_source: Callable[[], str | None] = lambda: None,
        charge_copy: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._check_conditions = check_conditions
        self._get_source, self._get_max_epsilon = get_source, get_max_epsilon
        self._get_only_masked = get_only_masked
        self._health_sampler, self._on_alive = health_sampler, on_alive
        self._thermal_pacer = thermal_pacer or ThermalPacer(lambda: None, lambda: None)
        self._device_id, self._role, self._state_dir = device_id, role, state_dir
        self._on_progress = on_progress
        self._bases = BaseFiles(
            bases_dir or state_dir / BASES_FOLDER,
            get_source,
            should_continue=self._should_continue_fetching,
            charge_traffic=charge_traffic,
            check_link=check_base_link,
            local=LocalFolder(get_path=get_base_source, charge=charge_copy),
        )
        self._task_cache = TaskCache(
            shards,
            accelerator=accelerator,
            threads=threads,
            bases=self._bases,
            get_min_group=get_min_group,
            drift=DriftWatch(state_dir / DRIFT_FOLDER, get_drift_references, get_min_group),
            # A confined process, which has no source, cannot start the trial of a provider.
            providers_file=None if get_source is None else state_dir / PROVIDERS_FILE,
            should_stop=lambda: not self._should_continue_fetching(),
        )
        self._client_state = ClientState(state_dir)
        self._training_lock = threading.Lock()
        self._gossip_worker = GossipWorker(
            device_id,
            state_dir,
            incarnation=incarnation,
            tasks=self._task_cache,
            make_transport=make_transport,
            training_lock=self._training_lock,
            pace=self._pace_node,
        )
        self._collective_worker = CollectiveWorker(device_id, make_transport)
        self._held: tuple[str, Json, bytes] | None = None
        self._readiness = ReadinessHandler(
            state_dir,
            self._task_cache,
            training_lock=self._training_lock,
            is_gossip_running=lambda run: self._gossip_worker.run_id == run,
        )
        self._finish_early_ids: OrderedDict[str, None] = OrderedDict()
        self._is_aborted = False
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._answered_query, self._reported_s = "", 0.0
        self._current: tuple[str, str, int] | None = None

    @property
    def current(self) -> tuple[str, str, int] | None:
        """Returns the current run, assignment ("" for none) and iteration."""
        current, gossip_progress = self._current, self._gossip_worker.run_progress
        return (
            current
            if current is not None or gossip_progress is None
            else (gossip_progress[0], "", gossip_progress[1])
        )

    @property
    def node_run(self) -> str:
        """Returns the run of an autonomous node, "" without one."""
        return self._gossip_worker.run_id

    @property
    def refuses_nodes(self) -> bool:
        """Returns whether the owner asks for a bound, or for masks: what a node of a graph sends has neither."""
        return self._get_max_epsilon() is not None or self._get_only_masked()

    def finish_early(self, assignment_id: str) -> None:
        """Ends an assignment after its current iteration; the partial update is sent."""
        with self._lock:
            self._finish_early_ids[assignment_id] = None
            # Ids of work that never comes, or came before, must not accumulate over months.
            while len(self._finish_early_ids) > MAX_FINISH_EARLY_IDS:
                self._finish_early_ids.popitem(last=False)
            self._answered.notify_all()

    def continue_training(self, query: str) -> None:
        """Answers a query, an assignment's id and an iteration: the assignment goes on after it."""
        with self._lock:
            self._answered_query = query
            self._answered.notify_all()

    def abort(self) -> None:
        """Aborts the current work without a reply, after the current iteration."""
        self._is_aborted = True

    def close(self) -> None:
        """Saves the runs' state; called by the training thread, when the agent stops."""
        self._client_state.save()
        self._gossip_worker.close()
        self._collective_worker.close()

    def resume(self) -> None:
        """Resumes the node of an earlier run of the agent; needs no coordinator."""
        if self.refuses_nodes:
            return
        self._gossip_worker.resume()

    def complete_run(self, run: str) -> None:
        """Completes or cancels a run: stops its autonomous node, drops its prefetched model."""
        self._readiness.remove(run)
        self._gossip_worker.complete_run(run)
        threading.Thread(target=self._collective_worker.close, args=(run,), name="end of links", daemon=True).start()

    def pause(self) -> None:
        """Pauses this board: an autonomous node stops until its next work."""
        self._gossip_worker.pause()

    def remove_expired(self) -> None:
        """Drops an expired prefetched model; called periodically by the training thread."""
        self._readiness.remove_expired()

    def compute_shard_fingerprint(self) -> object:
        """Returns a value that changes when any shard does."""
        return self._task_cache.compute_fingerprint()

    def train(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns metrics and the encoded displacement of an assignment; for a gossip node also its messages.

        For a readiness phase, returns whether this board is ready; see `ReadinessHandler`.
        """
        if (reason := self._refuse_unbounded(header)) is not None:
            return make_refusal(header, reason), b""
        if "phase" in header:
            self._gossip_worker.reopen_run(str(header.get("run")))
            reply, result = self._readiness.run_phase(header, body)
        else:
            reply, result = self._execute(header, body, self._train_with_health)
        return self._add_traffic(reply), result

    def evaluate(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns loss and accuracy of the model in `body`, and the sums of the metrics that its task declares."""
        if (reason := self._refuse_evaluation()) is not None:
            return make_refusal(header, reason), b""
        whole_header = {name: value for name, value in header.items() if name not in {"split", ANALYSIS_KEY}}
        reply, result = self._execute(whole_header, body, self._evaluate)
        return self._add_traffic(reply), result

    def count_examples(self) -> dict[str, int]:
        """Returns the example count of each readable shard."""
        return self._task_cache.count_examples()

    def get_shard_errors(self) -> dict[str, str]:
        """Returns the read errors of the last `count_examples`, by task."""
        return self._task_cache.get_shard_errors()

    def measure_drift(self) -> Json:
        """Returns how far the data has moved from its reference, by task."""
        return self._measure_drift()

    def _measure_drift(self, without: Collection[str] = ()) -> Json:
        # What the model makes of the examples has no noise and no mask, and the coordinator chose the model.
        has_features = self._get_max_epsilon() is None and not self._get_only_masked()
        return self._task_cache.measure_drift(
            without=without, training_lock=self._training_lock, has_features=has_features
        )

    def list_blocks(self) -> dict[str, list[int]]:
        """Returns the blocks of each redundant shard, by task; others are omitted."""
        return self._task_cache.list_blocks()

    def _add_traffic(self, reply: Json) -> Json:
        """Returns a reply with the bytes of a base that was fetched before it."""
        received = self._bases.pop_received_bytes()
        return {**reply, BASE_TRAFFIC_KEY: received} if received else reply

    def _should_continue_fetching(self) -> bool:
        self._on_alive()
        return not self._is_aborted

    def _execute(
        self, header: Json, body: bytes, run: Callable[[ParsedInstruction, CachedTask, bytes], tuple[Json, bytes]]
    ) -> tuple[Json, bytes]:
        reply: Json = {"v": INSTRUCTION_VERSION, "run": header.get("run"), "assignment": header.get("assignment")}
        try:
            instruction = parse_instruction(self._device_id, header)
            self._current = instruction.run, instruction.assignment_id, 0
            with self._training_lock:
                after = None if instruction.split is None else instruction.split.section.after
                cached_task = self._task_cache.get(
                    instruction.task,
                    instruction.options,
                    after=after,
                    analysis=instruction.analysis,
                    adapt=instruction.adapt,
                    compiled=instruction.compiled,
                )
                body = self._readiness.add_prefetched_model(instruction.run, instruction.prefetched_version, body)
                metrics, result = run(instruction, cached_task, body)
        except (TrainingAbortedError, ConditionsEndedError, ExtensionRefusedError):
            raise
        except FullModelRequiredError as error:
            log.info("assignment %s: %s", header.get("assignment"), error)
            return {**reply, "error": str(error), "requires_full_model": True}, b""
        except Exception as error:  # the boundary of one assignment: the board must survive for the next
            is_known = isinstance(error, EdgeflError)
            log.warning("assignment %s failed: %s", header.get("assignment"), error, exc_info=not is_known)
            return {**reply, "error": f"{type(error).__name__}: {error}"}, b""
        finally:
            self._current = None
            with self._lock:
                self._finish_early_ids.pop(str(header.get("assignment")), None)
        return {**reply, **metrics}, result

    def _train_with_health(
        self, instruction: ParsedInstruction, cached_task: CachedTask, body: bytes
    ) -> tuple[Json, bytes]:
        """Trains, and adds the board's health to the metrics."""
        if instruction.plan.privacy is not None:
            instruction.plan.check()  # before anything that is held goes out
            self._drop_exact_residual(instruction)
        self._thermal_pacer.start()
        if self._health_sampler is not None:
            self._health_sampler.start()
            self._health_sampler.sample()
        work = self._run_part if is_part(instruction.header, cached_task.task) else self._train
        if cached_task.analysis is not None:
            work = self._measure
        is_of_one_model = work == self._train and not instruction.num_clusters and instruction.split is None
        if instruction.plan.privacy is not None and not is_of_one_model:
            raise TaskError('privacy.unit = "example" goes with the training of one whole model, and nothing else')
        reply, result = work(instruction, cached_task, body)
        health = {
            **(self._health_sampler.stop() if self._health_sampler is not None else {}),
            **self._thermal_pacer.get_metrics(),
        }
        if "metrics" not in reply:  # a part of a job that failed
            return reply, result
        metrics = {**reply["metrics"], **({"health": health} if health else {})}
        if cached_task.num_examples is not None and cached_task.shard_version is not None:
            metrics["shard"] = {"version": cached_task.shard_version, "num_examples": cached_task.num_examples}
        return {**reply, "metrics": metrics}, result

    def _run_part(self, instruction: ParsedInstruction, cached_task: CachedTask, body: bytes) -> tuple[Json, bytes]:
        if instruction.has_stored_reply:
            raise FullModelRequiredError("the answer to it is not held here any more")
        self._gossip_worker.discard_other_runs(instruction.run)
        return run_part(
            cached_task.task,
            instruction.header,
            body,
            device_id=self._device_id,
            path=self._task_cache.get_shard_path(instruction.task),
            state_dir=self._state_dir,
            on_alive=self._on_alive,
        )

    def _measure(self, instruction: ParsedInstruction, cached_task: CachedTask, body: bytes) -> tuple[Json, bytes]:
        """Returns the sums of an analysis over this board's examples."""
        if instruction.has_stored_reply:
            raise FullModelRequiredError("the answer to it is not held here any more")
        assert cached_task.analysis is not None
        self._gossip_worker.discard_other_runs(instruction.run)
        analysis, started_s = cached_task.analysis, time.monotonic()
        data = drop_unlabelled(self._load_training_data(instruction, cached_task))
        sums = analysis.measure(self._decode_model(instruction, cached_task, body), data)
        metrics = {
            "iterations": 1, "num_examples": len(data), "loss": None, "compute_s": time.monotonic() - started_s
        }  # fmt: skip
        encoded = make_codec(instruction.codec_spec, analysis.sums_spec).encode(sums, derive_rng(0))
        return {"metrics": metrics}, encoded

    def _pace_node(self, should_stop: Callable[[], bool]) -> None:
        """Waits while the board is too hot; a node stops where it may not go on, until its next work."""
        self._thermal_pacer.wait_until_cool(should_stop)
        if self.refuses_nodes:
            log.info("the node stops: what it sends has neither masks nor a bound, which its owner asks for")
            self._gossip_worker.pause()
            return
        try:
            self._check_conditions()
        except ConditionsEndedError as error:
            log.info("the node stops: %s", error)
            self._gossip_worker.pause()

    def _check_aborted(self) -> None:
        self._sample_health()
        self._check_conditions()
        if self._is_aborted:
            raise TrainingAbortedError

    def _sample_health(self) -> None:
        self._on_alive()
        if self._health_sampler is not None:
            self._health_sampler.sample()

    def _train(self, instruction: ParsedInstruction, cached_task: CachedTask, body: bytes) -> tuple[Json, bytes]:
        if instruction.has_stored_reply:  # a held one would have been answered already
            raise FullModelRequiredError("the answer to it is not held here any more")
        self._gossip_worker.discard_other_runs(instruction.run)
        if not instruction.plan.has_training or (instruction.plan.secure is not None and instruction.num_clusters):
            raise TaskError("this step of secure aggregation is none to train in")
        if instruction.plan.collective is not None:
            return self._train_in_collective(instruction, instruction.plan.collective, cached_task, body)
        self._collective_worker.close()
        if instruction.plan.node is not None:
            return self._gossip_worker.run_instruction(
                instruction,
                cached_task,
                body,
                on_iteration=self._make_iteration_callback(instruction),
                should_finish_early=self._make_finish_early_check(instruction),
            )
        cluster, (messages, body) = None, decode_messages(instruction.messages, body)
        instruction = replace(instruction, plan=replace(instruction.plan, messages=messages))
        data = self._load_training_data(instruction, cached_task)
        split_header: Json = {}
        if instruction.split is None:
            learner, cluster = self._load_model(instruction, cached_task, body)
            result, extra = self._run_training(instruction, cached_task, learner, data)
            if cluster is not None:
                extra = {**extra, "extra": {CLUSTER_FIGURE: float(cluster)}}
        else:
            learner, result, extra, split_header = self._train_front(instruction, cached_task, body, data)
        if result.personal is None:
            self._client_state.update_local_tensors(instruction.run, cached_task.model_spec, learner)
        else:
            self._client_state.update_personal_copy(instruction.run, dict(result.personal))
        if instruction.plan.secure is None:
            encoded = self._encode_update(instruction, cached_task, add_cluster(result.displacement, cluster))
        else:
            encoded = _encode_words(instruction.plan.secure, cached_task, result)
        self._client_state.save(only_when_due=not instruction.is_durable)
        metrics = {
            "iterations": result.iterations,
            "num_examples": result.num_examples,
            "loss": finite_or_none(result.loss),
            "compute_s": result.compute_s,
            **extra,
        }
        return {"metrics": metrics, **split_header}, encoded

    def _train_front(
        self, instruction: ParsedInstruction, cached_task: CachedTask, body: bytes, data: Dataset
    ) -> tuple[Learner, LocalTrainingResult, Json, Json]:
        """Trains the first layers with the rest of them at the coordinator; begins again where that is lost there."""
        assert instruction.split is not None
        if self._get_source is None:
            raise TaskError("a split network needs the agent's connection; this process has none, as it is confined")

        def check_waiting() -> None:
            self._check_aborted()
            if instruction.assignment_id in self._finish_early_ids:
                raise TaskError("told to finish while the rest of the network was away")

        for _ in range(MAX_SESSIONS):
            learner, _ = self._load_model(instruction, cached_task, body)
            exchange = CoordinatorExchange(
                instruction.split,
                assignment_id=instruction.assignment_id,
                rng=derive_rng(*instruction.seed_key, "activations"),
                link=ExchangeLink(get_source=self._get_source, check_waiting=check_waiting),
            )
            assert isinstance(learner, FrontLearner)
            learner.exchange = exchange
            try:
                result, extra = self._run_training(instruction, cached_task, learner, data)
            except SplitSessionError as error:
                log.info("assignment %s: %s", instruction.assignment_id, error)
                continue
            finally:
                exchange.close()
            return learner, result, extra, {"split_session": exchange.session}
        raise TaskError(f"the rest of the network was lost {MAX_SESSIONS} times at the coordinator")

    def _train_in_collective(
        self, instruction: ParsedInstruction, config: CollectiveConfig, cached_task: CachedTask, body: bytes
    ) -> tuple[Json, bytes]:
        """Returns metrics, and the displacement where this member uploads it or its group broke."""
        if config.resend:
            if self._held is None or self._held[0] != config.resend:
                raise NetworkError(f"the displacement of {config.resend} is not held here any more")
            return self._held[1], self._held[2]
        self._held = None
        data = self._load_training_data(instruction, cached_task)
        model = _to_dense_model(self._decode_model(instruction, cached_task, body))

        def train_from(current: Mapping[str, Array], reduction: int) -> LocalTrainingResult:
            version = instruction.version * config.reductions + reduction
            seed_key = (instruction.seed, version, *instruction.seed_key[2:])
            learner = self._load_tensors(instruction, cached_task, current)
            result, _ = self._run_training(replace(instruction, seed_key=seed_key), cached_task, learner, data)
            self._client_state.update_local_tensors(instruction.run, cached_task.model_spec, learner)
            return result

        def should_finish() -> bool:
            self._check_aborted()
            return instruction.assignment_id in self._finish_early_ids

        result = self._collective_worker.run_round(
            instruction.run, config, model, train=train_from, should_finish=should_finish
        )
        self._client_state.save(only_when_due=not instruction.is_durable)
        encoded = self._encode_update(instruction, cached_task, result.displacement)
        reply: Json = {
            "metrics": {
                "iterations": result.iterations,
                "num_examples": result.num_examples,
                "loss": finite_or_none(result.loss_sum / max(1, result.iterations)),
                "compute_s": result.compute_s,
                "extra": {NUM_REDUCTIONS: float(result.num_reduced), PEER_BYTES: float(result.peer_bytes)},
            }
        }
        if result.num_reduced < config.reductions:
            return reply, encoded
        # As the coordinator moves its model, by what it decodes.
        step = _to_dense_model(decode_body(encoded, cached_task.model_spec))
        model = {name: (tensor + step[name]).astype(tensor.dtype) for name, tensor in model.items()}
        self._client_state.update_model(instruction.run, instruction.version + 1, model)
        whole = make_codec("dense", cached_task.model_spec).encode(model, derive_rng(0))
        reply[NEXT_MODEL_HASH_KEY] = hashlib.sha256(whole).hexdigest()
        self._held = instruction.assignment_id, {"metrics": {**reply["metrics"], "iterations": 0}}, encoded
        return reply, encoded if config.uploader == self._device_id else b""

    def _load_training_data(self, instruction: ParsedInstruction, cached_task: CachedTask) -> Dataset:
        if instruction.block is None and self._role != Role.EVALUATOR:
            return self._task_cache.load_training(cached_task, instruction.test_fraction, self._check_aborted)
        if instruction.block is None:
            return self._load_split(instruction, cached_task)[0]
        require_stateless_training(instruction.plan, instruction.codec_spec, cached_task.model_spec)
        return self._task_cache.load_block(cached_task, instruction.block)

    def _load_split(self, instruction: ParsedInstruction, cached_task: CachedTask) -> tuple[Dataset, Dataset]:
        """Returns the data to train and to evaluate on; an evaluator trains on few examples, or on none."""
        if self._role != Role.EVALUATOR:
            return self._task_cache.load_split(cached_task, instruction.test_fraction)
        if instruction.root_examples:
            test, root = self._task_cache.load_root_split(cached_task, instruction.root_examples)
            return root, test
        data = drop_weak(self._task_cache.load_data(cached_task))
        return data.take(np.arange(0)), data

    def _run_training(
        self, instruction: ParsedInstruction, cached_task: CachedTask, learner: Learner, data: Dataset
    ) -> tuple[LocalTrainingResult, Json]:
        """Trains and stores the client state; returns the result and extra metrics."""
        plan, variate, algorithm_state = instruction.plan, None, None
        plan.check()  # before its iterations are counted
        if plan.algorithm == Algorithm.SCAFFOLD:
            variate = self._client_state.get_variate(instruction.run).apply_used(
                get_start_version(plan), instruction.used_assignments
            )
            algorithm_state = variate.value
        elif plan.keeps_state:
            algorithm_state = self._client_state.get_step_state(instruction.run, plan.algorithm)
        result = train(
            learner,
            augment_batches(cached_task.task, data, make_augment_rng(plan, *instruction.seed_key)),
            plan,
            derive_rng(*instruction.seed_key),
            clock=time.monotonic,
            on_iteration=self._make_iteration_callback(instruction, last=plan.count_iterations(len(data))),
            algorithm_state=algorithm_state,
            local_names=[spec.name for spec in cached_task.model_spec if not spec.shared],
            personal=(
                self._client_state.get_personal_copy(instruction.run, cached_task.model_spec)
                if plan.has_personal
                else None
            ),
            account=self._open_account(instruction),
        )
        if variate is not None:
            variate = variate.add_move(instruction.assignment_id, result.algorithm_state or {})
            self._client_state.update_variate(instruction.run, variate)
            return result, {"extra": {ZERO_CONTROL_VARIATE: 1.0}} if variate.is_zero else {}
        if result.algorithm_state is not None:
            self._client_state.update_step_state(instruction.run, plan.algorithm, result.algorithm_state)
        return result, {} if result.epsilon is None else {"extra": {EPSILON: result.epsilon}}

    def _open_account(self, instruction: ParsedInstruction) -> RunAccount | None:
        """Returns the account of the examples' privacy, where the plan is charged to it.

        Raises:
            DataError: it cannot be read.
        """
        if instruction.plan.privacy is None:
            return None
        account = ExampleAccount.load(self._state_dir / ACCOUNT_FILE, max_epsilon=self._get_max_epsilon())
        return RunAccount(account=account, task=instruction.task, run=instruction.run)

    def _drop_exact_residual(self, instruction: ParsedInstruction) -> None:
        """Drops what a run left out of its updates before it was private: that has no noise."""
        account = self._open_account(instruction)
        if account is not None and account.run not in account.account.runs:
            self._client_state.drop_feedback(instruction.run)

    def _refuse_unbounded(self, header: Json) -> str | None:
        """Returns why this board may not take part in what a header is of; None where it may.

        Where the owner limits what examples lose of their privacy, work without a bound may not use them; where the
        owner asks for masks, none whose result leaves the board without them.
        """
        if self._get_only_masked() and not _is_masked(header):
            return (
                "its owner lets it send masked updates alone (--only-masked), and this run has no secure aggregation"
            )
        limit = self._get_max_epsilon()
        if limit is None:
            return None
        if "phase" not in header:
            plan = header.get("plan")
            is_bounded = isinstance(plan, Mapping) and plan.get(PRIVACY_KEY) is not None
        else:
            is_bounded = header.get(PRIVACY_KEY) == EXAMPLE_UNIT
        if not is_bounded:
            return (
                f"its owner lets a task spend at most epsilon = {limit:g} (--max-epsilon), and a run without "
                'privacy.unit = "example" has no bound'
            )
        try:
            ExampleAccount.load(self._state_dir / ACCOUNT_FILE, max_epsilon=limit).check_limit(
                str(header.get("task"))
            )
        except DataError as error:
            return str(error)
        return None

    def _refuse_evaluation(self) -> str | None:
        """Returns why this board may not evaluate; None where it may: losses and accuracies have no noise."""
        limit = self._get_max_epsilon()
        if limit is None:
            return None
        return (
            f"its owner lets a task spend at most epsilon = {limit:g} (--max-epsilon), and an evaluation has no bound"
            '; set run.evaluate_on = "coordinator", "evaluator" or "none"'
        )

    def _make_iteration_callback(
        self, instruction: ParsedInstruction, *, last: int | None = None
    ) -> Callable[[int, float], bool]:
        """Returns the per-iteration callback of an instruction, which returns whether to stop.

        After the iteration `last` there is no thermal pause.
        """
        plan, is_answered, is_away = instruction.plan, False, False
        until_s = math.inf if plan.seconds is None else time.monotonic() + plan.seconds

        def should_stop_waiting() -> bool:
            self._on_alive()  # a thermal pause may exceed the timeout for stuck work
            return (
                self._is_aborted or instruction.assignment_id in self._finish_early_ids or time.monotonic() >= until_s
            )

        def on_iteration(iteration: int, seconds_per_iteration: float) -> bool:
            nonlocal is_answered, is_away
            self._current = instruction.run, instruction.assignment_id, iteration
            self._sample_health()
            self._check_conditions()
            if iteration != last:
                self._thermal_pacer.wait_until_cool(should_stop_waiting)
            if self._is_aborted:
                raise TrainingAbortedError
            if plan.report_progress and time.monotonic() - self._reported_s >= PROGRESS_INTERVAL_S:
                is_sent = self._on_progress(instruction.assignment_id, iteration, seconds_per_iteration)
                if plan.fallback_iterations is not None and not is_away:
                    is_answered = is_sent and self._wait_for_answer(instruction.assignment_id, iteration)
                    is_away = is_sent and not is_answered
                self._reported_s = time.monotonic()  # after the answer: the agent sees intervals as long as here
            has_reached_fallback = plan.fallback_iterations is not None and iteration >= plan.fallback_iterations
            return (
                instruction.assignment_id in self._finish_early_ids
                or time.monotonic() >= until_s
                or (has_reached_fallback and not is_answered)
            )

        return on_iteration

    def _wait_for_answer(self, assignment_id: str, iteration: int) -> bool:
        """Returns whether a query was answered in time."""
        query = f"{assignment_id} {iteration}"
        with self._answered:
            return self._answered.wait_for(
                lambda: self._is_aborted or self._answered_query == query or assignment_id in self._finish_early_ids,
                ANSWER_TIMEOUT_S,
            )

    def _make_finish_early_check(self, instruction: ParsedInstruction) -> Callable[[int], bool]:
        """Returns a callback that maps a waiting node's iterations to whether it must report."""

        def should_finish_early(iterations: int) -> bool:
            self._current = instruction.run, instruction.assignment_id, iterations
            self._sample_health()
            self._check_conditions()
            if self._is_aborted:
                raise TrainingAbortedError
            return instruction.assignment_id in self._finish_early_ids

        return should_finish_early

    def _encode_update(
        self, instruction: ParsedInstruction, cached_task: CachedTask, delta: Mapping[str, Array]
    ) -> bytes:
        rng: Generator = derive_rng(*instruction.seed_key, "uplink")
        shapes = make_update_shapes(cached_task.model_spec) if instruction.num_clusters else cached_task.model_spec
        if not has_error_feedback(instruction.codec_spec):
            return make_codec(instruction.codec_spec, shapes).encode(delta, rng)
        feedback = self._client_state.get_feedback(instruction.run, instruction.codec_spec, cached_task.model_spec)
        feedback.record_used(instruction.used_assignments)
        return feedback.encode(instruction.assignment_id, delta, rng)

    def _evaluate(self, instruction: ParsedInstruction, cached_task: CachedTask, body: bytes) -> tuple[Json, bytes]:
        _, data = self._load_split(instruction, cached_task)
        if not len(data):
            raise DataError("the local test split holds no examples")
        learner, _ = self._load_model(instruction, cached_task, body)
        if not instruction.has_personal:
            found = evaluate(learner, data, cached_task.metrics)
        else:
            copy = self._client_state.get_personal_copy(instruction.run, cached_task.model_spec)
            own = make_personal_model(copy, learner.read())
            found = evaluate(learner, data, make_task_metrics(cached_task.task, has_personal=True), own)
        return {"metrics": {"num_examples": len(data), "loss": found.loss, "accuracy": found.accuracy}}, found.sums

    def _load_model(
        self, instruction: ParsedInstruction, cached_task: CachedTask, body: bytes
    ) -> tuple[Learner, int | None]:
        """Loads the global model and the local tensors; of several models the board's own, and returns which."""
        model = self._decode_model(instruction, cached_task, body)
        if not instruction.num_clusters:
            return self._load_tensors(instruction, cached_task, model), None
        data, learner = self._load_training_data(instruction, cached_task), cached_task.learner
        cached_task.has_model = True
        return learner, load_best_cluster(learner, split_stack(model), data, self._check_aborted)

    def _load_tensors(self, instruction: ParsedInstruction, cached_task: CachedTask, model: Tensors) -> Learner:
        if any(not spec.shared for spec in cached_task.model_spec):
            cached_task.learner.load(
                self._client_state.get_local_tensors(instruction.run, cached_task.model_spec)
                or cached_task.task.init(instruction.seed)
            )
        cached_task.learner.load(model)
        cached_task.has_model = instruction.split is None
        return cached_task.learner

    def _decode_model(self, instruction: ParsedInstruction, cached_task: CachedTask, body: bytes) -> Tensors:
        """Returns the global model, from a full body or a delta to the stored one."""
        shapes = make_stack_shapes(cached_task.model_spec, instruction.num_clusters)
        base_version = instruction.base_version
        if base_version is None:
            model = _to_dense_model(decode_body(body, shapes))
        else:
            held_version = self._client_state.get_model_version(instruction.run)
            if held_version != base_version:
                raise FullModelRequiredError(
                    f"needs the whole model: changes since version {base_version} came, it holds {held_version}"
                )
            model = apply_delta(self._client_state.get_model(instruction.run), body, shapes)
        if instruction.keeps_model:
            self._client_state.update_model(instruction.run, instruction.version, model)
        return model


def _is_masked(header: Json) -> bool:
    """Returns whether all that comes of an instruction's training is an update that the agent masks."""
    if "phase" in header:
        return header.get(SECURE_KEY) is True
    plan = header.get("plan")
    others = header.get("split"), header.get(ANALYSIS_KEY)
    return (
        isinstance(plan, Mapping)
        and plan.get(SECURE_KEY) is not None
        and JOB_LIMITS not in header
        and all(value is None for value in (*others, plan.get("node"), plan.get("collective")))
    )


def make_refusal(header: Json, reason: str) -> Json:
    """Returns the reply of a board that may not do what a header is of."""
    reply: Json = {"v": INSTRUCTION_VERSION, "run": header.get("run"), "assignment": header.get("assignment")}
    return {**reply, **({"ready": False, "reason": reason} if "phase" in header else {"error": reason})}


def _encode_words(config: SecureAggregationConfig, cached_task: CachedTask, result: LocalTrainingResult) -> bytes:
    """Returns an update as the words that the agent masks: it does not leave the board like this."""
    from edgefl.core.secure_aggregation.ring import encode_vector  # noqa: PLC0415 for secure runs alone

    update = {spec.name: result.displacement[spec.name] for spec in cached_task.model_spec if spec.shared}
    words = encode_vector(
        update,
        weight=result.num_examples,
        max_weight=config.max_examples,
        clip=config.clip,
        num_members=config.num_members,
    )
    return words.astype("<u4", copy=False).tobytes()


def _to_dense_model(tensors: Tensors) -> dict[str, Array]:
    return {name: tensor if isinstance(tensor, np.ndarray) else tensor.dense() for name, tensor in tensors.items()}
