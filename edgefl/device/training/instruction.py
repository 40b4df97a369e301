"""Instructions to this board: parsing and validation of their headers, and the readiness phases before a run."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgefl import __version__
from edgefl.compression.codec import decode_body
from edgefl.core.clusters import make_stack_shapes, parse_num_clusters
from edgefl.core.conditions import ConditionsEndedError
from edgefl.core.errors import DataError, EdgeflError, NetworkError, TaskError
from edgefl.core.extensions import ExtensionRefusedError
from edgefl.core.protocol import (
    ADAPT_KEY,
    COMPILED_KEY,
    EXAMPLE_UNIT,
    INSTRUCTION_VERSION,
    PERSONAL_KEY,
    PRIVACY_KEY,
    ReadinessPhase,
    check_version,
    model_fingerprint,
)
from edgefl.core.types import Json, Scalar, TrainConfig
from edgefl.device.hardware.health import read_available_memory_bytes
from edgefl.device.hardware.requirements import check_requirements
from edgefl.device.training.split_exchange import SplitPlan
from edgefl.device.training.task_cache import AnalysisRequest, CachedTask, TaskCache
from edgefl.tasks.adaptation.base_file import AdaptPlan
from edgefl.tasks.analyses.registry import parse_analysis
from edgefl.tasks.compiled.plan import CompiledPlan
from edgefl.tasks.job import Job
from edgefl.tasks.local_algorithms.example_privacy import try_example_gradients

log = logging.getLogger(__name__)

MAX_RUN_CHARS = 256
LEASE_S = 600.0
"""Lifetime of a prefetched model; a run that starts later sends it again."""


class FullModelRequiredError(NetworkError):
    """Missing base model: this device lacks the model that the instruction builds on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedInstruction:
    """Validated header of an assignment or evaluation.

    Attributes:
        seed_key: seeds its random streams.
        used_assignments: the device's newest used assignments, reported by the coordinator.
        is_held: the coordinator believes that its update is still on this board.
        keeps_model: the next model may come as a delta to this one.
        root_examples: number of its examples that an evaluator trains on, 0 for none; it evaluates on the others.
        base_version: of the stored model that the body is a delta to; None for a full body.
        prefetched_version: of the model fetched ahead, which the body lacks.
        is_durable: its state is stored on disk at once.
        messages: index of the neighbours' messages in the body.
        split: where the network is cut; None where this board trains all of it.
        analysis: what is to be summed; None of a training.
        adapt: what of the model is trained, and its base; None where all is trained.
        compiled: the file by which a board without torch trains; None where the task was not compiled.
        num_clusters: how many models the body has, of which this board takes its own; 0 for one.
        has_personal: this board has a personal copy of the model, which is evaluated beside it.
        header: as received, stored for a reboot.
    """

    run: str
    assignment_id: str
    version: int
    seed: int
    task: str
    options: Mapping[str, Scalar]
    test_fraction: float
    root_examples: int
    plan: TrainConfig
    codec_spec: str
    block: int | None
    seed_key: tuple[int | str, ...]
    used_assignments: tuple[str, ...]
    has_stored_reply: bool
    keeps_model: bool
    base_version: int | None
    prefetched_version: int | None
    is_durable: bool
    messages: list[Json]
    split: SplitPlan | None
    analysis: AnalysisRequest | None
    adapt: AdaptPlan | None
    compiled: CompiledPlan | None
    num_clusters: int
    has_personal: bool
    header: Json


def parse_instruction(device_id: str, header: Json) -> ParsedInstruction:
    """Returns the instruction in a header.

    Raises:
        NetworkError: it has another version.
        TaskError: it is of an analysis that is malformed.
        KeyError, TypeError, ValueError: an entry is missing or malformed.
    """
    check_instruction_version(header)
    block = _parse_optional_int(header.get("block"))
    seed, version = _parse_int(header["seed"]), _parse_int(header["version"])
    # Without the run's id, which is new for every submission: the same seed gives the same run. All devices with a
    # block use the same random numbers for it.
    source: tuple[int | str, ...] = (device_id,) if block is None else ("block", block)
    return ParsedInstruction(
        run=_parse_run(header["run"]),
        assignment_id=str(header["assignment"]),
        version=version,
        seed=seed,
        task=str(header["task"]),
        options=dict(header.get("options", {})),
        test_fraction=float(header["test_fraction"]),
        root_examples=max(0, _parse_int(header.get("root_examples", 0))),
        plan=TrainConfig.from_json(header.get("plan", {})),
        codec_spec=str(header.get("codec", "dense")),
        block=block,
        seed_key=(seed, version, *source),
        used_assignments=tuple(map(str, header.get("used_assignments", ()))),
        has_stored_reply=bool(header.get("has_stored_reply")),
        keeps_model=bool(header.get("keeps_model")),
        base_version=_parse_optional_int(header.get("base_version")),
        prefetched_version=_parse_optional_int(header.get("prefetched_version")),
        is_durable=header.get("residuals") == "durable",
        messages=header.get("messages", []),
        split=SplitPlan.parse(header.get("split")),
        analysis=parse_analysis(header),
        adapt=AdaptPlan.parse(header.get(ADAPT_KEY)),
        compiled=CompiledPlan.parse(header.get(COMPILED_KEY)),
        num_clusters=parse_num_clusters(header),
        has_personal=header.get(PERSONAL_KEY) is True,
        header=header,
    )


def check_instruction_version(header: Json) -> None:
    """Checks that a header has this agent's version.

    Raises:
        NetworkError: it has another.
    """
    if header.get("v") != INSTRUCTION_VERSION:
        raise NetworkError(
            f"instruction of version {header.get('v')!r}, this agent reads {INSTRUCTION_VERSION}: update it"
        )


def _parse_run(value: object) -> str:
    run = str(value)
    if len(run) > MAX_RUN_CHARS:
        raise NetworkError(f"the id of a run may have {MAX_RUN_CHARS} characters, got {len(run)}")
    return run


def _parse_optional_int(value: object) -> int | None:
    return None if value is None else _parse_int(value)


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"must be a whole number, got {value!r:.40}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefetchedModel:
    run: str
    version: int
    body: bytes
    expires_s: float


class ReadinessHandler:
    """Handler of readiness phases; used by the training thread, `remove` by any.

    Args:
        state_dir: of the runs' state.
        task_cache: trainable tasks of this board.
        training_lock: guards the learner.
        is_gossip_running: returns whether an autonomous node of this run is running; then the board is ready.
        clock: seconds, monotone.
        root: of the board's files.
    """

    def __init__(
        self,
        state_dir: Path,
        task_cache: TaskCache,
        *,
        training_lock: threading.Lock,
        is_gossip_running: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
    ) -> None:
        self._root = root
        self._state_dir, self._task_cache, self._training_lock = state_dir, task_cache, training_lock
        self._is_gossip_running, self._clock = is_gossip_running, clock
        self._prefetched: _PrefetchedModel | None = None

    def run_phase(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns the reply to a phase: `ready`, or the `reason` why not."""
        reply: Json = {"v": INSTRUCTION_VERSION, "run": header.get("run"), "assignment": header.get("assignment")}
        try:
            check_instruction_version(header)
            if not self._is_gossip_running(str(header["run"])):
                with self._training_lock:
                    (self._prepare if header["phase"] == ReadinessPhase.PREPARE else self._check_eligible)(
                        header, body
                    )
        except (ConditionsEndedError, ExtensionRefusedError):  # it is asked again once it is free
            raise
        except Exception as error:  # the boundary of one request: the board must survive for the next
            is_known = isinstance(error, EdgeflError)
            log.warning("cannot take part in run %s: %s", header.get("run"), error, exc_info=not is_known)
            return {
                **reply,
                "ready": False,
                "reason": str(error) if is_known else f"{type(error).__name__}: {error}",
            }, b""
        return {**reply, "ready": True}, b""

    def prefetch(self, header: Json, cached_task: CachedTask, body: bytes) -> None:
        """Keeps the model that came with a phase for a while, if one came.

        Raises:
            CodecError: it is no model of this task.
        """
        if body:
            decode_body(body, make_stack_shapes(cached_task.model_spec, parse_num_clusters(header)))
            expires_s = self._clock() + LEASE_S
            self._prefetched = _PrefetchedModel(
                run=str(header["run"]), version=int(header["version"]), body=body, expires_s=expires_s
            )

    def add_prefetched_model(self, run: str, version: int | None, body: bytes) -> bytes:
        """Returns the body of an instruction, with the prefetched model of this version appended, if any.

        Raises:
            FullModelRequiredError: it is not available any more.
        """
        prefetched = self._prefetched
        if version is None:
            return body
        if prefetched is None or (prefetched.run, prefetched.version) != (run, version):
            raise FullModelRequiredError(f"needs the whole model: version {version} was to be here, and is not")
        self._prefetched = None
        return body + prefetched.body

    def remove(self, run: str) -> None:
        """Drops the model prefetched for a run."""
        prefetched = self._prefetched
        if prefetched is not None and prefetched.run == run:
            self._prefetched = None
            log.info("run %s does not begin here; forgot its model", run)

    def remove_expired(self) -> None:
        """Drops an expired prefetched model."""
        prefetched = self._prefetched
        if prefetched is not None and self._clock() >= prefetched.expires_s:
            self.remove(prefetched.run)

    def _check_eligible(self, header: Json, _body: bytes) -> None:
        check_version(__version__, str(header["edgefl"]))
        name, options, requirements = str(header["task"]), dict(header.get("options", {})), header.get("needs", {})
        self._task_cache.get_shard_path(name)
        compiled = CompiledPlan.parse(header.get(COMPILED_KEY))
        check_requirements(name, options, self._root, compiled=compiled)
        _check_free("memory", read_available_memory_bytes(self._root), int(requirements.get("memory_bytes", 0)))
        _check_free("disk", shutil.disk_usage(self._state_dir).free, int(requirements.get("disk_bytes", 0)))
        cached_task = self._task_cache.get(
            name,
            options,
            after=_get_cut(header),
            analysis=parse_analysis(header),
            adapt=AdaptPlan.parse(header.get(ADAPT_KEY)),
            compiled=CompiledPlan.parse(header.get(COMPILED_KEY)),
        )
        fingerprint = model_fingerprint(cached_task.model_spec)
        if fingerprint != header["layout"]:
            raise TaskError(
                f"its task {name} has another model ({fingerprint}) than the coordinator's ({header['layout']}); "
                "update the package that it comes from"
            )
        self._task_cache.check_data(cached_task)
        if header.get(PRIVACY_KEY) == EXAMPLE_UNIT:
            try_example_gradients(cached_task.learner, self._task_cache.get_examples(cached_task))

    def _prepare(self, header: Json, body: bytes) -> None:
        self._prefetched = None
        cached_task = self._task_cache.get(
            str(header["task"]),
            dict(header.get("options", {})),
            after=_get_cut(header),
            analysis=parse_analysis(header),
            adapt=AdaptPlan.parse(header.get(ADAPT_KEY)),
            compiled=CompiledPlan.parse(header.get(COMPILED_KEY)),
        )
        if isinstance(cached_task.task, Job):  # it has no model, and its shard holds no examples
            cached_task.task.load()
            return
        training, _ = self._task_cache.load_split(cached_task, float(header["test_fraction"]))
        if not len(training):
            raise DataError(f"the shard of task {cached_task.name} holds no example to train on")
        self.prefetch(header, cached_task, body)


def _get_cut(header: Json) -> str | None:
    plan = SplitPlan.parse(header.get("split"))
    return None if plan is None else plan.section.after


def _check_free(what: str, free_bytes: int | None, needed_bytes: int) -> None:
    if free_bytes is not None and free_bytes < needed_bytes:
        raise DataError(f"it has {free_bytes / 1e6:.0f} MB of {what} free, the run needs {needed_bytes / 1e6:.0f} MB")
