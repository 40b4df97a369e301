"""The assignments of a device that is a node of a graph: one exchange at a time, or a node that goes on by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgefl.compression.codec import make_codec
from edgefl.compression.decoding import decode_body
from edgefl.decentralised.engine import Engine
from edgefl.decentralised.mailbag import pack_mail, unpack_mail
from edgefl.device.jobs import Job, job_of
from edgefl.device.neighbours.node_runner import MakeCarrier, NodeRunner
from edgefl.device.neighbours.nodes import Nodes
from edgefl.device.warm_tasks import WarmTask, WarmTasks
from edgefl.errors import EdgeflError, NetworkError
from edgefl.protocol import finite
from edgefl.tasks.node_training import train_node, work_as_node
from edgefl.types import Dataset, Json, LocalPlan, NodePlan, derived_rng

log = logging.getLogger(__name__)

RELAY = "relay"
LOOK_EVERY_S = 0.1


class NeedsDenseError(NetworkError):
    """This device does not have the model that the instruction builds on."""


class NodeWork:
    """Used by the thread that trains; `end_run` and `rest` by any.

    Args:
        device_id: whose node it is.
        state_dir: the device's state directory.
        life: grows with every start of the device, 1 or more.
        tasks: what this board trains.
        make_carrier: for nodes whose messages the coordinator does not carry.
        working: held by whoever uses the learner; `work` is called with it.
        pace: called between iterations of a node that goes on by itself; waits, until what it is given says so.
    """

    def __init__(  # noqa: PLR0913 a composition root hands over its parts by name
        self,
        device_id: str,
        state_dir: Path,
        *,
        life: int,
        tasks: WarmTasks,
        make_carrier: MakeCarrier | None,
        working: threading.Lock,
        pace: Callable[[Callable[[], bool]], None] = lambda _: None,
    ) -> None:
        self._pace = pace
        self._device_id, self._tasks, self._working = device_id, tasks, working
        self._nodes = Nodes(device_id, state_dir, life=life)
        self._runner = NodeRunner(device_id, state_dir, make_carrier)

    def work(
        self,
        job: Job,
        warm: WarmTask,
        body: bytes,
        *,
        watch: Callable[[int, float], bool],
        is_recalled: Callable[[int], bool],
    ) -> tuple[Json, bytes]:
        """Returns what the reply says, and its body: messages, and the node's model where it is to report.

        Args:
            job: with a plan for a node.
            warm: its task.
            body: messages of neighbours, and a model for a node that has none.
            watch: as `local_training.train` has it.
            is_recalled: told the iterations of a node that goes on by itself; whether it is to report now.

        Raises:
            NeedsDenseError: there is no node yet, and no model came.
        """
        assert job.plan.node is not None
        inbox, model = unpack_mail(job.header.get("mail", []), body)
        if job.plan.node.carrier != RELAY:
            return self._report(job, warm, model, job.plan.node, is_recalled)
        engine = self._engine(job, warm, model, job.plan.node)
        origin = (*job.origin, engine.node.iterations)
        result = work_as_node(
            engine,
            warm.learner,
            self._data(job, warm),
            replace(job.plan, inbox=inbox),
            derived_rng(*origin),
            clock=time.monotonic,
            on_iteration=watch,
        )
        self._save(job)
        report = b""
        if result.model is not None:
            report = make_codec(job.spec, warm.shapes).encode(result.model, derived_rng(*origin, "uplink"))
        told, packed = pack_mail(result.outbox, report)
        metrics = {
            "iterations": result.iterations,
            "num_examples": result.num_examples,
            "loss": finite(result.loss),
            "compute_s": result.compute_s,
            "extra": {"dropped_messages": engine.num_dropped},
        }
        return {"metrics": metrics, "mail": told}, packed

    def go_on(self) -> None:
        """Takes up the node that an earlier life of this device was, if there was one."""
        header = self._runner.kept_order()
        if header is None:
            return
        try:
            job = job_of(self._device_id, header)
            with self._working:
                if job.plan.node is not None:
                    self._begin(job, self._tasks.of(header), b"", job.plan.node)
        except NeedsDenseError:
            self._runner.give_up()
        except Exception as error:  # the boundary of one run: the board must be there for the next
            ours = isinstance(error, EdgeflError)
            log.warning("cannot go on as node of run %s: %s", header.get("run"), error, exc_info=not ours)

    def end_run(self, run: str) -> None:
        """Says that a run is over: a node that goes on by itself stops soon."""
        threading.Thread(target=self._runner.end, args=(run,), name="end of run", daemon=True).start()

    def expect(self, run: str) -> None:
        """Says that a run begins, or goes on after it was over."""
        self._runner.expect(run)

    def rest(self) -> None:
        """Stops a node that goes on by itself until there is an assignment for it again."""
        threading.Thread(target=self._runner.pause, name="rest", daemon=True).start()

    def begin_run(self, run: str) -> None:
        """Says that there is work of a run: a node of any other one has nothing more to do."""
        if self._runner.run not in {"", run}:
            self._runner.give_up()

    @property
    def now(self) -> tuple[str, int] | None:
        """Returns the run of a node that goes on by itself, and its iterations."""
        return (self._runner.run, self._runner.iterations()) if self._runner.run else None

    def close(self) -> None:
        """Stops for now; what the node is lies on disk afterwards."""
        self._runner.pause()
        self._nodes.save()

    def _report(
        self, job: Job, warm: WarmTask, model: bytes, plan: NodePlan, is_recalled: Callable[[int], bool]
    ) -> tuple[Json, bytes]:
        """Lets the node go on by itself, and tells what it has once it is far enough.

        One that diverges asks for a model to begin anew from; if it did begin with one, that it has diverged is told.
        """
        if self._nodes.has_diverged(job.run):
            self._runner.give_up(job.run)
        if self._runner.run == job.run:
            self._runner.follow(job.plan, job.header)
        else:
            self._begin(job, warm, model, plan)
        self._working.release()  # the node trains, and this thread only waits
        try:
            report = self._runner.report(plan.until, lambda: is_recalled(self._runner.iterations()))
            if not model and self._nodes.has_diverged(job.run):
                raise NeedsDenseError("needs the model: its training has diverged")
        except EdgeflError:
            if self._runner.run == job.run:  # one that rests is taken up again
                self._runner.give_up(job.run)
            raise
        finally:
            self._working.acquire()
        rng = derived_rng(*job.origin, report.total, "uplink")
        told, packed = pack_mail([], make_codec(job.spec, warm.shapes).encode(report.model, rng))
        metrics = {
            "iterations": report.iterations,
            "num_examples": len(self._data(job, warm)),
            "loss": finite(report.loss),
            "compute_s": report.compute_s,
            "extra": {
                "messages": report.num_messages,
                "message_bytes": report.num_bytes,
                "dropped_messages": report.dropped,
                "iterations_in_all": report.total,
            },
        }
        return {"metrics": metrics, "mail": told}, packed

    def _begin(self, job: Job, warm: WarmTask, model: bytes, plan: NodePlan) -> None:
        def train(engine: Engine, burst: LocalPlan, is_leaving: Callable[[], bool]) -> tuple[int, float]:
            # Whoever ends this session may hold the learner while it waits for us.
            while not self._working.acquire(timeout=LOOK_EVERY_S):
                if is_leaving():
                    return 0, 0.0

            def rested(*_: object) -> bool:
                self._pace(is_leaving)
                return is_leaving()

            try:
                rng = derived_rng(job.seed, self._device_id, engine.node.iterations)
                done, loss, _ = train_node(
                    engine,
                    warm.learner,
                    self._data(job, warm),
                    burst,
                    rng,
                    clock=time.monotonic,
                    on_iteration=rested,
                )
            finally:
                self._working.release()
            return done, loss

        self._runner.begin(
            job.run,
            self._engine(job, warm, model, plan),
            job.plan,
            train=train,
            save=lambda _: self._save(job),
            order=job.header,
        )

    def _engine(self, job: Job, warm: WarmTask, model: bytes, plan: NodePlan) -> Engine:
        """Returns the node that this device is, which begins from the model that came where there is none yet."""
        engine = self._nodes.engine(job.run, plan, warm.learner, warm.shapes)
        if engine is not None:
            return engine
        if not model:
            raise NeedsDenseError("needs the model: it holds no node of this run")
        warm.learner.load(decode_body(model, warm.shapes))
        return self._nodes.begin(job.run, plan, warm.learner, warm.shapes)

    def _data(self, job: Job, warm: WarmTask) -> Dataset:
        return self._tasks.split(warm, float(job.header["test_fraction"]))[0]

    def _save(self, job: Job) -> None:
        self._nodes.save(only_when_due=job.header.get("residuals") != "durable")
