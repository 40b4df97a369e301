"""Trainer of a site gateway: it has no data of its own, and passes its work on to the boards of its site."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgefl import __version__
from edgefl.compression.codec import make_codec
from edgefl.core.errors import EdgeflError, TaskError
from edgefl.core.extensions import ExtensionRefusedError
from edgefl.core.metrics import NO_METRICS
from edgefl.core.protocol import (
    ADAPT_KEY,
    COMPILED_KEY,
    INSTRUCTION_VERSION,
    ReadinessPhase,
    check_version,
    model_fingerprint,
)
from edgefl.core.sites import PARTIAL_SUMS_KEY, SITE_KEY, SiteTask
from edgefl.core.types import DeviceInfo, Json, derive_rng
from edgefl.device.training.confined_trainer import ConfiningTrainer
from edgefl.device.training.instruction import FullModelRequiredError, ParsedInstruction, check_instruction_version
from edgefl.device.training.task_cache import CachedTask
from edgefl.device.training.trainer import make_refusal
from edgefl.tasks.adaptation.base_file import AdaptPlan
from edgefl.tasks.compiled.plan import CompiledPlan
from edgefl.tasks.registry import is_torch_task

log = logging.getLogger(__name__)

OnAlive = Callable[[], None]
"""Called every so often while the boards work."""
NO_SUMS = (
    "it is a site gateway, which answers with the mean of its boards' updates, and this run needs the update of each "
    "board; runs with fedavg or fedprox, without [privacy], [secure_aggregation], [split], guard.max_norm, "
    "strategy.seconds and selection by utility do not"
)
OUTAGE_AFTER_S = 30.0
"""An uplink that is away for less is waited for: a coordinator starts again in that time."""
NOT_BUILT_IN = (
    "the gateway loads no task that is not built in; edgefl gateway start --confine never does, with the "
    "--allow-module of its package"
)


class Site(Protocol):
    """The boards of a gateway; `coordinator.execution.site_rounds.SiteRounds` implements it."""

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]: ...
    def list_boards(self) -> Sequence[DeviceInfo]: ...
    def count_online(self) -> int: ...
    def count_examples(self) -> Mapping[str, int]: ...
    def check_ready(self, header: Json, task: SiteTask, on_alive: OnAlive) -> None: ...
    def load_reply(self, header: Json) -> tuple[Json, bytes] | None: ...
    def run_round(self, header: Json, body: bytes, task: SiteTask, on_alive: OnAlive) -> tuple[Json, bytes]: ...
    def evaluate(self, header: Json, body: bytes, task: SiteTask, on_alive: OnAlive) -> tuple[Json, bytes]: ...
    def run_offline_round(self, on_alive: OnAlive) -> bool: ...
    def finish_early(self, assignment: str) -> None: ...
    def complete_run(self, run_id: str) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteConnection:
    """A gateway's boards, and the folder from which they fetch bases and compiled tasks."""

    site: Site
    bases_dir: Path


class SiteTrainer(ConfiningTrainer):
    """Trainer whose work is done by the boards of a site; used as `DeviceTrainer`.

    It has a shard of every task that a board has one of. Only the model's layout is made here, of what is built in,
    or allowed by the owner; no code of a task is run on data.

    Args:
        site: the boards.
        options: of `ConfiningTrainer`.
    """

    def __init__(self, site: Site, **options: Any) -> None:
        self._site = site
        super().__init__(**{**options, "shards": self._list_shards, "get_policy": lambda: "never"})

    @property
    def site_facts(self) -> Json:
        return {SITE_KEY: {"boards": len(self._site.list_boards()), "online": self._site.count_online()}}

    def train(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        if (refusal := self._refuse(header)) is not None:
            return refusal, b""
        if "phase" in header:
            return self._check_phase(header, body), b""
        try:
            reply, result = self._execute(header, body, self._relay)
        except ExtensionRefusedError:
            return make_refusal(header, NOT_BUILT_IN), b""
        return self._add_traffic(reply), result

    def evaluate(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        if (refusal := self._refuse(header)) is not None:
            return refusal, b""
        try:
            return self._execute(header, body, self._relay_evaluation)
        except ExtensionRefusedError:
            return make_refusal(header, NOT_BUILT_IN), b""

    def can_work_offline(self, away_s: float) -> bool:
        return away_s >= OUTAGE_AFTER_S

    def work_offline(self) -> bool:
        try:
            with self._training_lock:
                return self._site.run_offline_round(self._on_alive)
        except EdgeflError as error:
            self._check_aborted()
            log.warning("no round of the site without the coordinator: %s", error)
            return False

    def finish_early(self, assignment_id: str) -> None:
        super().finish_early(assignment_id)
        self._site.finish_early(assignment_id)

    def complete_run(self, run: str) -> None:
        super().complete_run(run)
        self._site.complete_run(run)

    def abort(self) -> None:
        super().abort()
        self._site.stop()

    def resume(self) -> None:
        """There is no node of a graph to resume."""

    def compute_shard_fingerprint(self) -> object:
        return tuple(sorted(self._site.count_examples().items())), self._site.count_online()

    def count_examples(self) -> dict[str, int]:
        return dict(self._site.count_examples())

    def get_shard_errors(self) -> dict[str, str]:
        return {}

    def measure_drift(self) -> Json:
        return {}

    def list_blocks(self) -> dict[str, list[int]]:
        return {}

    def _list_shards(self) -> dict[str, str]:
        """Returns the tasks of the site's boards; there is no file here."""
        return dict.fromkeys(self._site.count_examples(), "")

    def _refuse(self, header: Json) -> Json | None:
        """Returns the reply to work that a gateway cannot pass on; None where it can."""
        if header.get(PARTIAL_SUMS_KEY) is True:
            return None
        log.warning("run %s: %s", header.get("run"), NO_SUMS)
        return make_refusal(header, NO_SUMS)

    def _check_phase(self, header: Json, body: bytes) -> Json:
        """Returns whether the site is ready for a run, or why it is not."""
        reply: Json = {"v": INSTRUCTION_VERSION, "run": header.get("run"), "assignment": header.get("assignment")}
        try:
            check_instruction_version(header)
            with self._training_lock:
                task = self._get_task(header)
                if header["phase"] == ReadinessPhase.PREPARE:
                    self._readiness.prefetch(header, task, body)
                else:
                    self._check_eligible(header, task)
        except ExtensionRefusedError:
            return {**reply, "ready": False, "reason": NOT_BUILT_IN}
        except Exception as error:  # the boundary of one request: the gateway must survive for the next
            self._check_aborted()
            is_known = isinstance(error, EdgeflError)
            log.warning("cannot take part in run %s: %s", header.get("run"), error, exc_info=not is_known)
            return {**reply, "ready": False, "reason": str(error) if is_known else f"{type(error).__name__}: {error}"}
        return {**reply, "ready": True}

    def _get_task(self, header: Json) -> CachedTask:
        name = str(header["task"])
        if name not in self._list_shards():
            self._site.check_ready(header, SiteTask(spec=(), metrics=NO_METRICS), self._on_alive)  # says why
        return self._task_cache.get(
            name,
            dict(header.get("options", {})),
            adapt=AdaptPlan.parse(header.get(ADAPT_KEY)),
            compiled=CompiledPlan.parse(header.get(COMPILED_KEY)),
        )

    def _check_eligible(self, header: Json, task: CachedTask) -> None:
        check_version(__version__, str(header["edgefl"]))
        fingerprint = model_fingerprint(task.model_spec)
        if fingerprint != header["layout"]:
            raise TaskError(
                f"its task {task.name} has another model ({fingerprint}) than the coordinator's "
                f"({header['layout']}); update edgefl, or the package that the task comes from, on the gateway"
            )
        self._site.check_ready(header, _describe_task(task), self._on_alive)

    def _relay(self, instruction: ParsedInstruction, task: CachedTask, body: bytes) -> tuple[Json, bytes]:
        """Returns the update of the site's boards."""
        if (reply := self._site.load_reply(instruction.header)) is not None:
            return reply
        if instruction.has_stored_reply:
            raise FullModelRequiredError("the answer to it is not held here any more")
        model = self._make_whole(instruction, task, body)
        return self._pass_on(self._site.run_round, instruction, task, model)

    def _relay_evaluation(self, instruction: ParsedInstruction, task: CachedTask, body: bytes) -> tuple[Json, bytes]:
        return self._pass_on(self._site.evaluate, instruction, task, body)

    def _pass_on(
        self,
        work: Callable[[Json, bytes, SiteTask, OnAlive], tuple[Json, bytes]],
        instruction: ParsedInstruction,
        task: CachedTask,
        model: bytes,
    ) -> tuple[Json, bytes]:
        try:
            return work(instruction.header, model, _describe_task(task), self._on_alive)
        except EdgeflError:
            self._check_aborted()
            raise

    def _make_whole(self, instruction: ParsedInstruction, task: CachedTask, body: bytes) -> bytes:
        """Returns the whole model, encoded: as it came, or what the changes make of the one that is held here."""
        if not instruction.keeps_model and instruction.base_version is None:
            return body
        model = self._decode_model(instruction, task, body)
        self._client_state.save(only_when_due=not instruction.is_durable)
        if instruction.base_version is None:
            return body
        return make_codec("dense", task.model_spec).encode(model, derive_rng(0))


def _describe_task(task: CachedTask) -> SiteTask:
    shared = tuple(spec for spec in task.model_spec if spec.shared)
    return SiteTask(
        spec=shared,
        metrics=task.metrics,
        needs_torch=is_torch_task(task.task),
        has_local_tensors=len(shared) < len(task.model_spec),
    )
