"""Requests to a worker that trains, and its replies: a JSON header and a body, whatever carries them.

A worker is the same in a process of this machine and on a cluster: it is made from `make_setup`, and gives the reply
of `run_request`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields

from edgefl.core.config import AdaptSection, SplitSection, adapt_to_json
from edgefl.core.settings import from_mapping
from edgefl.core.types import Array, Json, PeerMessage, TrainConfig, TrainInstruction
from edgefl.simulation.backends.in_process import format_error
from edgefl.simulation.backends.partitioned_data import FleetData
from edgefl.simulation.backends.trainer import (
    EncodedModel,
    EncodedUpdate,
    EvaluationMetrics,
    SimulatedTrainer,
    TaskSpec,
    TrainingJob,
)
from edgefl.strategies.peer_algorithms.gossip_node import decode_messages, encode_messages

_INSTRUCTION_FIELDS = tuple(f.name for f in fields(TrainInstruction) if f.name not in {"plan", "used_assignments"})

SINGLE_THREAD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Of each worker: several share the machine, and with one thread a job gives the same bits in any of them."""


def make_setup(task_spec: TaskSpec, shard_indices: Mapping[str, int]) -> Json:
    """Returns what a worker's trainer is made of, as JSON, without the data and the base."""
    return {
        "task": task_spec.task,
        "options": dict(task_spec.options),
        "seed": task_spec.seed,
        "split": asdict(task_spec.split),
        "analysis": task_spec.analysis,
        "has_personal": task_spec.has_personal,
        "num_clusters": task_spec.num_clusters,
        "accelerator": task_spec.accelerator,
        "adapt": {name: item for name, item in adapt_to_json(task_spec.adapt).items() if item is not None},
        "places": dict(shard_indices),
    }


def make_trainer(setup: Json, data: FleetData, base: Mapping[str, Array]) -> SimulatedTrainer:
    """Returns the trainer of a worker."""
    task_spec = TaskSpec(
        task=setup["task"],
        options=setup["options"],
        seed=setup["seed"],
        split=SplitSection(**setup["split"]),
        analysis=setup["analysis"] and tuple(setup["analysis"]),
        adapt=from_mapping(AdaptSection, setup["adapt"], "adapt"),
        base=base,
        has_personal=setup["has_personal"],
        num_clusters=setup["num_clusters"],
        accelerator=setup["accelerator"],
    )
    return SimulatedTrainer(task_spec, data, setup["places"])


def instruction_to_json(instruction: TrainInstruction) -> Json:
    """Returns an instruction as JSON, without the bodies of its messages."""
    return {
        **{name: getattr(instruction, name) for name in _INSTRUCTION_FIELDS},
        "plan": instruction.plan.to_json(),
        "used_assignments": list(instruction.used_assignments),
    }


def instruction_from_json(value: Json, messages: tuple[PeerMessage, ...] = ()) -> TrainInstruction:
    plan = TrainConfig.from_json(value["plan"], messages)
    return TrainInstruction(
        **{name: value[name] for name in _INSTRUCTION_FIELDS},
        plan=plan,
        used_assignments=tuple(value["used_assignments"]),
    )


def make_training_request(job: TrainingJob) -> Json:
    """Returns the header of a request; the messages of the job's plan travel in the body."""
    return {"do": "train", "order": instruction_to_json(job.instruction), "iterations": job.iterations}


def run_request(
    trainer: SimulatedTrainer,
    header: Json,
    messages: tuple[PeerMessage, ...],
    model: EncodedModel,
    is_cancelled: Callable[[], bool],
) -> tuple[Json, bytes]:
    """Returns the header and the body of the reply; one that failed has the device's error as `error`."""
    try:
        return _run_request(trainer, header, messages, model, is_cancelled)
    except Exception as error:  # noqa: BLE001 the boundary of one job: the next must still run
        return {"error": format_error(error)}, b""


def _run_request(
    trainer: SimulatedTrainer,
    header: Json,
    messages: tuple[PeerMessage, ...],
    model: EncodedModel,
    is_cancelled: Callable[[], bool],
) -> tuple[Json, bytes]:
    match header["do"]:
        case "undo":
            trainer.rollback(instruction_from_json(header["order"]))
            return {}, b""
        case "evaluate":
            scores = trainer.evaluate(header["device"], model)
            return {**asdict(scores), "sums": None}, scores.sums
    if is_cancelled():
        return {}, b""
    instruction = instruction_from_json(header["order"], messages)
    update = trainer.train(instruction, model, header["iterations"], is_cancelled=is_cancelled)
    message_headers, packed = encode_messages(update.messages, update.body)
    return {
        "num_examples": update.num_examples,
        "loss": update.loss,
        "cluster": update.cluster,
        "epsilon": update.epsilon,
        "messages": message_headers,
        "num_bytes": update.num_bytes,
        "exchanged_bytes": update.exchanged_bytes,
    }, packed


def read_update(header: Json, body: bytes) -> EncodedUpdate:
    """Returns the update of a reply."""
    messages, body = decode_messages(header["messages"], body)
    return EncodedUpdate(
        body=body,
        num_examples=header["num_examples"],
        loss=header["loss"],
        cluster=header["cluster"],
        epsilon=header["epsilon"],
        messages=messages,
        num_bytes=header["num_bytes"],
        exchanged_bytes=tuple(header["exchanged_bytes"]),
    )


def read_scores(header: Json, body: bytes) -> EvaluationMetrics:
    """Returns the metrics of a reply."""
    names = ("num_examples", "loss", "accuracy", "values")
    return EvaluationMetrics(**{name: header[name] for name in names}, sums=body)
