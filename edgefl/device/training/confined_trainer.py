"""Trainer that runs code which is not built in beside the agent, in a confined process without the device's key.

Tasks, codec stages and local algorithms of packages are loaded there alone. The process stays from one assignment to
the next, for one task. Whatever it does, the agent lives: it is ended where it is silent for too long, and what it
says is bounded and checked. Only connections to neighbours are the agent's, and used by messages.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgefl.compression.registry import AUTO, RICE, STAGES, parse_spec
from edgefl.core.analyses import DEFAULT_MIN_GROUP
from edgefl.core.conditions import ConditionsEndedError
from edgefl.core.errors import CodecError, DataError, EdgeflError, NetworkError, TaskError
from edgefl.core.extensions import ExtensionRefusedError
from edgefl.core.protocol import ADAPT_KEY, COMPILED_KEY, INSTRUCTION_VERSION, JOB_LIMITS, PRIVACY_KEY, finite_or_none
from edgefl.core.safe_text import escape_text
from edgefl.core.types import GossipConfig, Json
from edgefl.device.drift_watch import FIRST
from edgefl.device.hardware.requirements import (
    CONFINED_FOLDER,
    TaskTraits,
    make_confinement,
    read_task_traits,
    should_run_graphs,
)
from edgefl.device.peers.peer_connection import MakePeerTransport, PeerTransport, get_peer_addresses
from edgefl.device.training.gossip_worker import INSTRUCTION_FILE, load_node_instruction
from edgefl.device.training.process_link import (
    SILENCE_S,
    ConfinedProcess,
    ProcessEndedError,
    TrainingSetup,
    parse_description,
    parse_reply,
)
from edgefl.device.training.trainer import DeviceTrainer, TrainingAbortedError, make_refusal
from edgefl.system.atomic_files import make_private_directory, write_atomic
from edgefl.system.confinement import find_gaps
from edgefl.tasks import registry as tasks
from edgefl.tasks.adaptation.base_file import AdaptPlan
from edgefl.tasks.compiled.plan import CompiledPlan
from edgefl.tasks.local_algorithms import registry as local_algorithms

log = logging.getLogger(__name__)

STOP_S = 3.0
IDLE_S = 900.0
"""Time after which a process without work gives its memory back."""
MAX_CONFINED_RUNS = 16
PROGRESS_INTERVAL_S = 0.1
BUILT_IN_STAGES = frozenset({*STAGES, AUTO, RICE, ""})


def is_built_in(header: Json) -> bool:
    """Returns whether an instruction names only what is built in; what makes no sense counts as that, and fails."""
    plan = header.get("plan")
    plan = plan if isinstance(plan, Mapping) else {}
    node = plan.get("node")
    codecs = [header.get("codec", ""), node.get("codec", "") if isinstance(node, Mapping) else ""]
    return (
        str(header.get("task")) in tasks.BUILT_IN
        and plan.get("algorithm", "sgd") in local_algorithms.BUILT_IN
        and all(_has_built_in_stages(str(codec)) for codec in codecs)
    )


def _get_part_deadline_s(header: Json) -> float | None:
    """Returns how long a part of a job may take; None for what is none."""
    limits = header.get(JOB_LIMITS)
    if not isinstance(limits, Mapping) or "phase" in header:
        return None
    deadline_s = finite_or_none(limits.get("deadline_s"))
    if deadline_s is None or deadline_s <= 0:
        raise DataError(f"the deadline of a part must be a number above 0, got {limits.get('deadline_s')!r:.40}")
    return deadline_s


def _has_built_in_stages(line: str) -> bool:
    try:
        spec = parse_spec(line)
    except CodecError:
        return True
    return all(name in BUILT_IN_STAGES for name, _ in spec.stages) and all(
        _has_built_in_stages(layer) for _, layer in spec.layers
    )


class ConfiningTrainer(DeviceTrainer):
    """Trainer of a device that lends what is not built in to a confined process; used as `DeviceTrainer`.

    Args:
        get_policy: `auto` confines what is not built in, `always` all, `never` nothing.
        next_incarnation: returns a number larger than every one before.
        get_temperature_limit_c: above which a process pauses.
        get_yields: whether a process has the lowest priority.
        silence_s: see `SILENCE_S`.
        options: of `DeviceTrainer`.
    """

    def __init__(
        self,
        *,
        get_policy: Callable[[], str],
        next_incarnation: Callable[[], int],
        get_temperature_limit_c: Callable[[], float | None] = lambda: None,
        get_yields: Callable[[], bool] = lambda: False,
        silence_s: float = SILENCE_S,
        **options: Any,
    ) -> None:
        super().__init__(**options, incarnation=next_incarnation())
        self._ended: ConditionsEndedError | None = None
        self._get_policy, self._next_incarnation, self._silence_s = get_policy, next_incarnation, silence_s
        self._get_temperature_limit_c, self._get_yields = get_temperature_limit_c, get_yields
        self._get_min_group: Callable[[], int] = options.get("get_min_group", lambda: DEFAULT_MIN_GROUP)
        self._get_drift_references: Callable[[], Mapping[str, str]] = options.get("get_drift_references", dict)
        self._shards: Callable[[], Mapping[str, str]] = options["shards"]
        self._accelerator, self._threads = str(options["accelerator"]), options.get("threads")
        self._make_transport: MakePeerTransport | None = options.get("make_transport")
        self._confined_runs: deque[str] = deque(maxlen=MAX_CONFINED_RUNS)
        self._process: ConfinedProcess | None = None
        self._process_key: tuple[object, ...] = ()
        self._transport: PeerTransport | None = None
        self._node: GossipConfig | None = None
        self._node_run = ""
        self._used_s, self._progress_s = time.monotonic(), 0.0
        self._traits: dict[str, tuple[object, Json]] = {}

    @functools.cached_property
    def confinement_gaps(self) -> list[str]:
        """What this machine lacks for a complete confinement."""
        return find_gaps()

    @property
    def site_facts(self) -> Json:
        """What the coordinator is told of the boards behind a gateway; empty for a board."""
        return {}

    def train(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        if (reason := self._refuse_unbounded(header)) is not None:
            return make_refusal(header, reason), b""
        return self._route("train", super().train, header, body)

    def evaluate(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        if (reason := self._refuse_evaluation()) is not None:
            return make_refusal(header, reason), b""
        return self._route("evaluate", super().evaluate, header, body)

    @property
    def node_run(self) -> str:
        return super().node_run or (self._node_run if self._process is not None else "")

    def finish_early(self, assignment_id: str) -> None:
        super().finish_early(assignment_id)
        self._notify("finish_early", assignment_id)

    def continue_training(self, query: str) -> None:
        super().continue_training(query)
        self._notify("continue", query)

    def abort(self) -> None:
        super().abort()
        self._notify("abort")

    def complete_run(self, run: str) -> None:
        super().complete_run(run)
        self._notify("complete_run", run)

    def pause(self) -> None:
        super().pause()
        self._notify("pause")

    def close(self) -> None:
        super().close()
        self._stop_process()

    def remove_expired(self) -> None:
        super().remove_expired()
        if self.node_run and self.refuses_nodes:
            self._stop_process()
        is_idle = self._process is not None and time.monotonic() - self._used_s > IDLE_S
        if is_idle and self._transport is None:
            self._stop_process()

    def can_work_offline(self, away_s: float) -> bool:  # noqa: ARG002 only a site gateway does
        """Returns whether there is work without the coordinator, which is away for `away_s` seconds."""
        return False

    def work_offline(self) -> bool:
        """Works on without the coordinator; returns whether it did."""
        return False

    def resume(self) -> None:
        super().resume()
        if self.refuses_nodes:
            return
        instruction = load_node_instruction(self._state_dir / CONFINED_FOLDER / INSTRUCTION_FILE) or {}
        task = str(instruction.get("task"))
        if self._get_policy() != "never" and (self._get_scratch(task) / INSTRUCTION_FILE).exists():
            with self._tolerate_end(task):
                self._update_node(instruction)
                self._call(task, "resume", {}, b"")

    def count_examples(self) -> dict[str, int]:
        """Returns the example count of each readable shard; those of tasks not built in as their process says."""
        confined_tasks = self._list_confined_tasks()
        counts = self._task_cache.count_examples(without=confined_tasks)
        for name in confined_tasks:
            if "num_examples" in (facts := self._describe(name)):
                counts[name] = facts["num_examples"]
        return counts

    def get_shard_errors(self) -> dict[str, str]:
        others = {name: self._describe(name).get("error") for name in self._list_confined_tasks()}
        return {**super().get_shard_errors(), **{name: error for name, error in others.items() if error}}

    def measure_drift(self) -> Json:
        confined_tasks = self._list_confined_tasks()
        drifts = self._measure_drift(confined_tasks)
        for name in confined_tasks:
            if (drift := self._describe(name).get("drift")) is not None:
                # A process does not know of the owner's limits.
                is_free = not self.refuses_nodes
                drifts[name] = {key: drift[key] for key in drift if is_free or not key.startswith("feature_")}
        return drifts

    def read_task_traits(self, name: str) -> TaskTraits:
        """Returns what a task (TASK or TASK/MODEL) needs; raises as `make_task`."""
        if name not in self._list_confined_tasks():
            return read_task_traits(name)
        facts = self._describe(name)
        if "needs_torch" not in facts:
            raise TaskError(facts.get("error") or f"task {name} cannot be made")
        return TaskTraits(
            needs_torch=facts["needs_torch"], has_shape=facts["has_shape"], is_job=facts.get("is_job", False)
        )

    def _list_confined_tasks(self) -> list[str]:
        policy = self._get_policy()
        if policy == "never":
            return []
        return [name for name in self._shards() if policy == "always" or name not in tasks.BUILT_IN]

    def _describe(self, task: str) -> Json:
        """Returns facts of a task and its shard, as they were when it last changed."""
        stamp = self._task_cache.compute_fingerprint(task)
        if task not in self._traits or self._traits[task][0] != stamp:
            facts: Json = {"error": "its process ended"}
            with self._tolerate_end(task) as errors:
                facts = parse_description(self._call(task, "describe", {"task": task}, b"")[0])
            self._traits[task] = stamp, {"error": errors[0]} if errors else facts
        return self._traits[task][1]

    def _route(
        self, name: str, run: Callable[[Json, bytes], tuple[Json, bytes]], header: Json, body: bytes
    ) -> tuple[Json, bytes]:
        policy, run_id = self._get_policy(), str(header.get("run"))
        if policy == "never":
            return run(header, body)
        if policy == "auto" and run_id not in self._confined_runs and is_built_in(header):
            try:
                return run(header, body)
            except ExtensionRefusedError:  # such as a codec stage in the body's own header
                log.info("run %s uses what is not built in: it trains confined", run_id)
        if run_id not in self._confined_runs:
            self._confined_runs.append(run_id)
        plan = header.get("plan")
        if header.get(PRIVACY_KEY) or (isinstance(plan, Mapping) and plan.get(PRIVACY_KEY)):
            reason = "a confined process keeps no account of the examples' privacy; edgefl device set --confine never"
            return make_refusal(header, reason), b""
        reply, result = self._run_confined(name, header, body)
        return self._add_traffic(reply), result

    def _run_confined(self, name: str, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns the reply of the confined process; its end fails this one instruction."""
        assignment = str(header.get("assignment"))
        reply: Json = {"v": INSTRUCTION_VERSION, "run": header.get("run"), "assignment": header.get("assignment")}
        plan = header.get("plan")
        if isinstance(plan, Mapping) and plan.get("collective"):
            return {**reply, "error": "a confined task sends no chunks: take part with a built-in task only"}, b""
        self._current = str(header.get("run")), assignment, 0
        sampler = self._health_sampler if name == "train" and "phase" not in header else None
        if sampler is not None:
            sampler.start()
        try:
            self._update_node(header)
            adapt = AdaptPlan.parse(header.get(ADAPT_KEY))
            compiled = CompiledPlan.parse(header.get(COMPILED_KEY))
            for plan in [adapt, compiled if should_run_graphs(compiled) else None]:
                if plan is not None:
                    self._task_cache.get_shard_path(str(header.get("task")))  # before much is fetched for nothing
                    self._bases.fetch(plan)  # here: the process has no connection
            answer, result = self._call(str(header.get("task")), name, header, body)
            if answer.get("is_aborted"):
                self._raise_abort()
            answer = parse_reply(answer)
        except ConditionsEndedError:
            raise
        except (EdgeflError, OSError) as error:
            if isinstance(error, ProcessEndedError) and self._is_aborted:
                raise TrainingAbortedError from None
            log.warning("assignment %s failed: %s", assignment, error)
            self._stop_process()
            text = f"{type(error).__name__}: {error}"
            return {**reply, **({"ready": False, "reason": text} if "phase" in header else {"error": text})}, b""
        finally:
            self._current = None
            with self._lock:
                self._finish_early_ids.pop(assignment, None)
        if sampler is not None and "metrics" in answer:
            health = {**answer["metrics"].get("health", {}), **sampler.stop()}
            answer["metrics"] = {**answer["metrics"], **({"health": health} if health else {})}
        return {**reply, **answer}, result

    def _raise_abort(self) -> None:
        """Raises why the process was told to abort, where it was."""
        if self._is_aborted:
            raise TrainingAbortedError
        if self._ended is not None:
            raise self._ended

    def _call(self, task: str, name: str, header: Json, body: bytes) -> tuple[Json, bytes]:
        deadline_s, started_s = _get_part_deadline_s(header), time.monotonic()
        self._ended, iteration = None, 0

        def on_tick() -> None:
            self._sample_health()
            is_cancelled = deadline_s is not None and str(header.get("assignment")) in self._finish_early_ids
            if deadline_s is not None and (is_cancelled or time.monotonic() - started_s > deadline_s):
                process.kill()
                raise TaskError("it was stopped" if is_cancelled else f"work took longer than {deadline_s:g} s")
            if self._is_aborted and time.monotonic() - self._used_s > STOP_S:
                process.kill()
            nonlocal iteration
            current = self._current
            is_between = current is not None and current[2] != iteration
            if self._ended is None and name == "train" and "phase" not in header and (is_between or deadline_s):
                iteration = current[2] if current is not None else 0
                self._interrupt_if_ended(process, is_part=deadline_s is not None)

        process = self._get_process(task)
        self._used_s = time.monotonic()
        try:
            return process.call(name, header, body, on_tick=on_tick)
        except ProcessEndedError:
            self._stop_process()
            raise
        finally:
            self._used_s = time.monotonic()

    def _interrupt_if_ended(self, process: ConfinedProcess, *, is_part: bool) -> None:
        """Tells the process to stop after its iteration where this board may not go on; a job's work is killed."""
        try:
            self._check_conditions()
        except ConditionsEndedError as error:
            self._ended = error
            if is_part:
                self._stop_process()
                raise
            process.send({"notice": "interrupt", "argument": ""})

    def _get_process(self, task: str) -> ConfinedProcess:
        """Returns the process of a task, started unless it runs with the same settings."""
        path = self._task_cache.get_shard_path(task)
        reference = self._get_drift_references().get(task)
        yields = self._get_yields()
        key = task, path, self._get_temperature_limit_c(), self._get_min_group(), reference, yields
        if self._process is not None and self._process_key == key:
            return self._process
        self._stop_process()
        if self._get_policy() == "always" and self.confinement_gaps:
            raise TaskError(f"this board cannot confine, and its settings say always: {self.confinement_gaps[0]}")
        make_private_directory(self._bases.folder)
        readable = [path, str(self._bases.folder), *([] if reference in {None, FIRST} else [str(reference)])]
        confinement = make_confinement(self._state_dir, self._get_scratch(task).name, readable, self._accelerator)
        setup = TrainingSetup(
            device_id=self._device_id,
            role=self._role,
            shards={task: path},
            accelerator=self._accelerator,
            threads=self._threads,
            scratch=str(self._get_scratch(task)),
            incarnation=self._next_incarnation(),
            max_temperature_c=self._get_temperature_limit_c(),
            bases=str(self._bases.folder),
            min_group=self._get_min_group(),
            drift_references={} if reference is None else {task: reference},
        )
        self._process_key = key
        self._process = ConfinedProcess(
            setup, confinement, on_message=self._on_message, silence_s=self._silence_s, yields=yields
        )
        return self._process

    def _get_scratch(self, task: str) -> Path:
        return self._state_dir / CONFINED_FOLDER / f"task-{re.sub(r'[^A-Za-z0-9_-]', '_', task)}"

    def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
        self._stop_transport()

    def _stop_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.stop()

    @contextlib.contextmanager
    def _tolerate_end(self, task: str) -> Iterator[list[str]]:
        errors: list[str] = []
        try:
            yield errors
        except (EdgeflError, OSError) as error:
            log.warning("task %s cannot be used: %s", task, error)
            errors.append(str(error))

    def _notify(self, notice: str, argument: str = "") -> None:
        process = self._process
        if process is not None:
            process.send({"notice": notice, "argument": argument})

    def _on_message(self, process: ConfinedProcess, message: Json, body: bytes) -> None:
        """Handles a notice or request of the process; raises `DataError` for a malformed one."""
        transport = self._transport
        match message.get("notice"):
            case "alive" | "progress" as notice if isinstance(message.get("iteration"), int):
                self._record_iteration(message, should_publish=notice == "progress")
            case "message" if transport is not None and isinstance(message.get("receiver"), str):
                with contextlib.suppress(EdgeflError):
                    transport.send(message["receiver"], body, is_reply=message.get("is_reply") is True)
            case "peers" if transport is not None and isinstance(message.get("peers"), list):
                transport.set_peers([name for name in self._list_neighbours() if name in message["peers"]])
            case "message" | "peers":
                pass  # of a transport that is not open
            case None:
                process.send({"answer": 1, **self._answer(process, message)})
            case _:
                raise DataError(f"an unknown notice {escape_text(str(message.get('notice'))[:40])}")

    def _record_iteration(self, message: Json, *, should_publish: bool) -> None:
        current = self._current
        if current is None:
            return
        self._current = current[0], current[1], message["iteration"]
        seconds = message.get("seconds")
        if not should_publish or not isinstance(seconds, int | float) or message.get("assignment") != current[1]:
            return
        if time.monotonic() - self._progress_s >= PROGRESS_INTERVAL_S:
            self._progress_s = time.monotonic()
            self._on_progress(current[1], message["iteration"], float(seconds))

    def _answer(self, process: ConfinedProcess, message: Json) -> Json:
        """Returns the answer to a request about the transport to neighbours."""
        match message.get("request"):
            case "is_drained":
                return {"is_drained": self._transport is None or self._transport.is_drained()}
            case "stop":
                self._stop_transport()
                return {}
            case "start":
                try:
                    self._start_transport(process)
                except EdgeflError as error:
                    return {"error": str(error)}
                return {}
            case _:
                raise DataError("an unknown request")

    def _start_transport(self, process: ConfinedProcess) -> None:
        self._stop_transport()
        if self._make_transport is None or self._node is None:
            raise NetworkError("this device cannot carry messages, only by relay")

        def receive(sender: str, payload: bytes) -> None:
            process.send({"notice": "message", "argument": sender}, payload)

        transport = self._make_transport(self._node, receive)
        transport.set_peers(self._list_neighbours())
        transport.start()
        self._transport = transport

    def _update_node(self, header: Json) -> None:
        """Takes over, and keeps, whom an instruction lets this device talk to: no process has a say in that."""
        plan = header.get("plan")
        node = plan.get("node") if isinstance(plan, Mapping) else None
        if not isinstance(node, Mapping):
            return
        try:
            self._node, self._node_run = GossipConfig.from_json(node), str(header.get("run"))
            addresses = get_peer_addresses(self._node)
        except (TypeError, ValueError) as error:
            raise DataError(f"malformed plan of a node: {error}") from None
        make_private_directory(self._state_dir / CONFINED_FOLDER)
        write_atomic(self._state_dir / CONFINED_FOLDER / INSTRUCTION_FILE, json.dumps(header).encode())
        if self._transport is not None:
            self._transport.set_addresses(addresses)
            self._transport.set_peers(self._list_neighbours())

    def _list_neighbours(self) -> list[str]:
        return [edge.neighbour for edge in self._node.edges] if self._node is not None else []
