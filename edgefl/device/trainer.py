"""Does the work of an instruction: decodes the model, trains or evaluates on its shard, encodes the result."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import make_codec
from edgefl.compression.decoding import decode_body
from edgefl.compression.delta import apply_delta
from edgefl.compression.feedback import uses_feedback
from edgefl.compression.leftovers import check_leaves_nothing
from edgefl.decentralised.mailbag import unpack_mail
from edgefl.device.board.assignment_vitals import AssignmentVitals
from edgefl.device.board.pacing import Pacer
from edgefl.device.jobs import Job, job_of
from edgefl.device.neighbours.node_runner import MakeCarrier
from edgefl.device.neighbours.node_work import NeedsDenseError, NodeWork
from edgefl.device.readiness import NotHeldError, Readiness
from edgefl.device.residents import Residents
from edgefl.device.run_memory import RunMemory
from edgefl.device.warm_tasks import WarmTask, WarmTasks
from edgefl.errors import DataError, EdgeflError
from edgefl.protocol import finite
from edgefl.tasks.local_training import LocalResult, iteration_limit, train
from edgefl.tasks.variates import began_in
from edgefl.types import (
    BLANK_VARIATE,
    Algorithm,
    Array,
    Dataset,
    Json,
    Learner,
    Role,
    Tensor,
    Tensors,
    derived_rng,
)

log = logging.getLogger(__name__)


KEPT_RECALLS = 64
REPORT_EVERY_S = 0.1


class AbandonedError(Exception):
    """The agent stops: the assignment under way ends without an answer."""


ProgressSink = Callable[[str, int, float], None]
"""(assignment id, finished iterations, seconds per iteration)"""


class Trainer:
    """The working half of a device; used by one thread, watched and recalled from others.

    Args:
        device_id: names this device's random streams.
        role: an evaluator evaluates on its whole shard, a trainer on its local test split.
        shards: task -> path, asked again at every instruction.
        accelerator: cpu or cuda.
        threads: how many cores to use, None for all.
        state_dir: where tensors that stay on the board, and what a run is to remember, are kept.
        on_progress: told after every iteration of a plan that asks for it.
        life: grows with every start of the device, 1 or more; nodes of a graph number their messages by it.
        make_carrier: for nodes of a graph whose messages the coordinator does not carry.
        board: looks at the board while it works; None does not.
        pacer: lets it rest between iterations while it is too hot; None does not.
        on_life: told that the work goes on, at every iteration and while it waits.
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
        on_progress: ProgressSink,
        life: int = 1,
        make_carrier: MakeCarrier | None = None,
        board: AssignmentVitals | None = None,
        pacer: Pacer | None = None,
        on_life: Callable[[], None] = lambda: None,
    ) -> None:
        self._board, self._on_life = board, on_life
        self._pacer = pacer or Pacer(lambda: None, lambda: None)
        self._device_id, self._role, self._state_dir = device_id, role, state_dir
        self._on_progress = on_progress
        self._tasks = WarmTasks(shards, accelerator=accelerator, threads=threads)
        self._memory, self._residents = RunMemory(state_dir), Residents(state_dir)
        self._working = threading.Lock()
        self._nodes = NodeWork(
            device_id,
            state_dir,
            life=life,
            tasks=self._tasks,
            make_carrier=make_carrier,
            working=self._working,
            pace=self._pacer.rest,
        )
        self._readiness = Readiness(
            state_dir, self._tasks, working=self._working, is_at=lambda run: (self._nodes.now or ("", 0))[0] == run
        )
        self._recalled: OrderedDict[str, None] = OrderedDict()
        self._abandoned = False
        self._lock = threading.Lock()
        self._now: tuple[str, str, int] | None = None

    @property
    def now(self) -> tuple[str, str, int] | None:
        """Returns run, assignment ("" for none) and iteration that are being worked on."""
        now, alone = self._now, self._nodes.now
        return now if now is not None or alone is None else (alone[0], "", alone[1])

    def recall(self, assignment_id: str) -> None:
        """Ends an assignment after its current iteration; what has been learnt is sent."""
        with self._lock:
            self._recalled[assignment_id] = None
            # Recalls of work that never comes, or came before, must not gather over months.
            while len(self._recalled) > KEPT_RECALLS:
                self._recalled.popitem(last=False)

    def abandon(self) -> None:
        """Ends whatever is under way without an answer, after the current iteration."""
        self._abandoned = True

    def close(self) -> None:
        """Writes what runs are to remember; called by the thread that trains, when the agent stops."""
        self._memory.save()
        self._residents.save()
        self._nodes.close()

    def go_on(self) -> None:
        """Takes up the node that an earlier life of this device was; the coordinator may be away."""
        self._nodes.go_on()

    def end_run(self, run: str) -> None:
        """Says that a run is over, or does not begin: a node that goes on by itself stops, a model is forgotten."""
        self._readiness.forget(run)
        self._nodes.end_run(run)

    def rest(self) -> None:
        """Says that this board is to be left alone: a node that goes on by itself stops until it gets work again."""
        self._nodes.rest()

    def tidy(self) -> None:
        """Lets go of what nobody has asked for in time; called now and then by the thread that trains."""
        self._readiness.tidy()

    def shard_stamps(self) -> object:
        """Returns a value that changes when any shard does."""
        return self._tasks.stamps()

    def train(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns metrics and the encoded displacement for one assignment; of a node of a graph its messages, too.

        To a question that comes before a run, whether this board is ready; see `Readiness`.
        """
        if "phase" in header:
            self._nodes.expect(str(header.get("run")))
            return self._readiness.answer(header, body)
        return self._answer(header, body, self._felt)

    def evaluate(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns loss and accuracy of the model in `body`."""
        return self._answer(header, body, self._evaluate)

    def examples(self) -> dict[str, int]:
        """Returns how many examples each shard holds now; a shard that cannot be read counts as absent."""
        return self._tasks.examples()

    def shard_faults(self) -> dict[str, str]:
        """Returns why shards could not be read when `examples` was last asked, by task."""
        return self._tasks.faults()

    def blocks(self) -> dict[str, list[int]]:
        """Returns the blocks of each redundant shard, by task; other shards are left out."""
        return self._tasks.blocks()

    def _answer(
        self, header: Json, body: bytes, work: Callable[[Job, WarmTask, bytes], tuple[Json, bytes]]
    ) -> tuple[Json, bytes]:
        reply: Json = {"v": 1, "run": header.get("run"), "assignment": header.get("assignment")}
        try:
            job = job_of(self._device_id, header)
            self._now = job.run, job.assignment_id, 0
            with self._working:
                metrics, result = work(job, self._tasks.of(header), self._readiness.completed(header, body))
        except AbandonedError:
            raise
        except (NeedsDenseError, NotHeldError) as error:
            log.info("assignment %s: %s", header.get("assignment"), error)
            return {**reply, "error": str(error), "needs_dense": True}, b""
        except Exception as error:  # the boundary of one assignment: the board must be there for the next
            ours = isinstance(error, EdgeflError)
            log.warning("assignment %s failed: %s", header.get("assignment"), error, exc_info=not ours)
            return {**reply, "error": f"{type(error).__name__}: {error}"}, b""
        finally:
            self._now = None
            with self._lock:
                self._recalled.pop(str(header.get("assignment")), None)
        return {**reply, **metrics}, result

    def _felt(self, job: Job, warm: WarmTask, body: bytes) -> tuple[Json, bytes]:
        """Trains, and tells beside the other metrics how the board was meanwhile."""
        self._pacer.begin()
        if self._board is not None:
            self._board.begin()
            self._board.look()
        reply, result = self._train(job, warm, body)
        vitals = {**(self._board.end() if self._board is not None else {}), **self._pacer.told()}
        return {**reply, "metrics": {**reply["metrics"], **({"vitals": vitals} if vitals else {})}}, result

    def _look(self) -> None:
        self._on_life()
        if self._board is not None:
            self._board.look()

    def _train(self, job: Job, warm: WarmTask, body: bytes) -> tuple[Json, bytes]:
        if job.header.get("held"):  # or it would have been answered already
            raise NeedsDenseError("the answer to it is not held here any more")
        self._nodes.begin_run(job.run)
        if job.plan.node is not None:
            return self._nodes.work(job, warm, body, watch=self._watch(job), is_recalled=self._recall_of(job))
        inbox, body = unpack_mail(job.header.get("mail", []), body)
        job = replace(job, plan=replace(job.plan, inbox=inbox))
        data = self._training_data(job, warm)
        learner = self._loaded(job, warm, body)
        result, extra = self._trained(job, learner, data)
        self._residents.keep(job.run, warm.shapes, learner)
        encoded = self._encoded(job, warm, result.displacement)
        self._memory.save(only_when_due=job.header.get("residuals") != "durable")
        metrics = {
            "iterations": result.iterations,
            "num_examples": result.num_examples,
            "loss": finite(result.loss),
            "compute_s": result.compute_s,
            **extra,
        }
        return {"metrics": metrics}, encoded

    def _training_data(self, job: Job, warm: WarmTask) -> Dataset:
        if job.block is None:
            return self._tasks.split(warm, float(job.header["test_fraction"]))[0]
        check_leaves_nothing(job.plan, job.spec, warm.shapes)
        return self._tasks.block(warm, job.block)

    def _trained(self, job: Job, learner: Learner, data: Dataset) -> tuple[LocalResult, Json]:
        """Trains, and keeps what the next assignment goes on from; returns what is to be told of that, too."""
        plan, variate, before = job.plan, None, None
        if plan.algorithm == Algorithm.SCAFFOLD:
            variate = self._memory.variate(job.run).at(began_in(plan), _used(job))
            before = variate.own
        elif plan.keeps_state:
            before = self._memory.step_state(job.run, plan.algorithm)
        result = train(
            learner,
            data,
            plan,
            derived_rng(*job.origin),
            clock=time.monotonic,
            on_iteration=self._watch(job, last=iteration_limit(plan, len(data))),
            step_state=before,
        )
        if variate is not None:
            variate = variate.moved(job.assignment_id, result.step_state or {})
            self._memory.keep_variate(job.run, variate)
            return result, {"extra": {BLANK_VARIATE: 1.0}} if variate.is_blank else {}
        if result.step_state is not None:
            self._memory.keep_step_state(job.run, plan.algorithm, result.step_state)
        return result, {}

    def _watch(self, job: Job, *, last: int | None = None) -> Callable[[int, float], bool]:
        """Returns what is told of every iteration of a job, and says whether it was the last.

        After the iteration `last` nothing is left to rest for.
        """
        plan, reported_s = job.plan, 0.0
        until_s = math.inf if plan.seconds is None else time.monotonic() + plan.seconds

        def is_over() -> bool:
            self._on_life()  # a board may have to rest for longer than stuck work would be waited for
            return self._abandoned or job.assignment_id in self._recalled or time.monotonic() >= until_s

        def on_iteration(iteration: int, seconds_per_iteration: float) -> bool:
            nonlocal reported_s
            self._now = job.run, job.assignment_id, iteration
            self._look()
            if iteration != last:
                self._pacer.rest(is_over)
            if self._abandoned:
                raise AbandonedError
            if plan.report_progress and time.monotonic() - reported_s >= REPORT_EVERY_S:
                reported_s = time.monotonic()
                self._on_progress(job.assignment_id, iteration, seconds_per_iteration)
            return job.assignment_id in self._recalled or time.monotonic() >= until_s

        return on_iteration

    def _recall_of(self, job: Job) -> Callable[[int], bool]:
        """Returns what is told of a waiting node's iterations, and says whether it is to tell what it has."""

        def is_recalled(iterations: int) -> bool:
            self._now = job.run, job.assignment_id, iterations
            self._look()
            if self._abandoned:
                raise AbandonedError
            return job.assignment_id in self._recalled

        return is_recalled

    def _encoded(self, job: Job, warm: WarmTask, displacement: Mapping[str, Array]) -> bytes:
        rng: Generator = derived_rng(*job.origin, "uplink")
        if not uses_feedback(job.spec):
            return make_codec(job.spec, warm.shapes).encode(displacement, rng)
        feedback = self._memory.feedback(job.run, job.spec, warm.shapes)
        feedback.settle(_used(job))
        return feedback.encode(job.assignment_id, displacement, rng)

    def _evaluate(self, job: Job, warm: WarmTask, body: bytes) -> tuple[Json, bytes]:
        data = self._tasks.data(warm)
        if self._role != Role.EVALUATOR:
            data = self._tasks.split(warm, float(job.header["test_fraction"]))[1]
        if not len(data):
            raise DataError("the local test split holds no examples")
        loss, accuracy = self._loaded(job, warm, body).evaluate(data)
        if not (np.isfinite(loss) and np.isfinite(accuracy)):
            raise DataError(f"the model's loss on the test data is {loss}: it has diverged")
        scores = {"num_examples": len(data), "loss": float(loss), "accuracy": float(accuracy)}
        return {"metrics": scores}, b""

    def _loaded(self, job: Job, warm: WarmTask, body: bytes) -> Learner:
        """Puts the global model into the learner, and what this board keeps for itself beside it."""
        if any(not spec.shared for spec in warm.shapes):
            warm.learner.load(self._residents.load(job.run, warm.shapes) or warm.task.init(job.seed))
        warm.learner.load(self._received(job, warm, body))
        return warm.learner

    def _received(self, job: Job, warm: WarmTask, body: bytes) -> Tensors:
        """Returns the global model, whether all of it came or only what changed since the one that is held."""
        base = job.header.get("base")
        if base is None:
            model = {name: _dense(tensor) for name, tensor in decode_body(body, warm.shapes).items()}
        else:
            held = self._memory.model_version(job.run)
            if held is None or held != int(base):
                raise NeedsDenseError(f"needs the whole model: changes since version {base} came, it holds {held}")
            model = apply_delta(self._memory.model(job.run), body, warm.shapes)
        if job.header.get("keep"):
            self._memory.keep_model(job.run, job.version, model)
        return model


def _used(job: Job) -> list[str]:
    """Returns the device's newest used assignments, as the coordinator tells them."""
    return [str(used) for used in job.header.get("settled", ())]


def _dense(tensor: Tensor) -> Array:
    return tensor if isinstance(tensor, np.ndarray) else tensor.dense()
