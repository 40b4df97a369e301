"""Compiles a task of torch into the artefact that boards train from without torch, and checks it."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import torch
from numpy.random import Generator

from edgefl import __version__
from edgefl.core.errors import TaskError
from edgefl.core.named_arrays import NamedArrays
from edgefl.core.types import Array, Dataset, ModelSpec, Scalar, Task, derive_rng
from edgefl.tasks.compiled.artefact import (
    BUFFER,
    INPUTS,
    MAX_BATCH_SIZE,
    PARAMETER,
    TARGETS,
    TENSOR_TYPES,
    CompiledManifest,
    CompiledTask,
)
from edgefl.tasks.compiled.board.graph_check import check_compiled_task
from edgefl.tasks.compiler.batches import Batch, BatchSource, draw_noise
from edgefl.tasks.compiler.gradient_check import NUM_STEPS, CheckReport, check_evaluation, check_training
from edgefl.tasks.compiler.onnx_files import estimate_flops, estimate_peak_bytes, export_graph, list_operators
from edgefl.tasks.compiler.steps import Step, get_state, make_step, to_torch
from edgefl.tasks.compiler.tracing import name_layers, trace
from edgefl.tasks.compiler.translations.registry import TRANSLATIONS
from edgefl.tasks.learners.torch_learner import TorchLearner
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.multi_task import MultiTask
from edgefl.tasks.losses.registry import find_loss
from edgefl.tasks.losses.torch_only_losses import Contrastive, Ctc
from edgefl.tasks.losses.value_losses import Huber, Quantile, Reconstruction

SEED = 1
"""Of the first weights and of random examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """Facts about a compilation that are no part of the artefact.

    Attributes:
        check: the gradient check's.
        num_nodes: of the training graph.
        parameters: values that are trained.
    """

    check: CheckReport
    num_nodes: int
    parameters: int


def compile_task(
    task: Task,
    *,
    name: str,
    options: Mapping[str, Scalar] | None = None,
    batch_size: int = 16,
    data: Dataset | None = None,
    constant: Collection[str] = (),
) -> tuple[CompiledTask, CompileReport]:
    """Returns a task as ONNX graphs, after the check of its gradients.

    Args:
        task: whose learner is one of torch.
        name: of the task, as a run file has it.
        options: of the task, likewise.
        batch_size: fixed for both graphs.
        data: real examples to check on besides random ones.
        constant: names of tensors that stay as they are: they get no gradient, and layers of nothing else work as in
            an evaluation.

    Raises:
        TaskError: it cannot be compiled, or the graph does not compute what torch does.
        DataError: a board would refuse the graph.
    """
    learner = _make_learner(task, batch_size, data)
    source = BatchSource(task=task, learner=learner, size=batch_size, data=data)
    rng = derive_rng(SEED, "compile", name)
    first = source.make_random(rng)
    outputs = source.compute_output_shape(first[INPUTS])
    state, step = get_state(learner.module), make_step(learner.module, learner.loss, first[INPUTS], constant)
    with name_layers(step.module, first[INPUTS]):
        train, evaluate = _export(step, state, {**first, **draw_noise(step.noise, rng)})
    batches = _draw_batches(source, step, rng)
    content, evaluation = train.SerializeToString(deterministic=True), evaluate.SerializeToString(deterministic=True)
    check = check_training(step, content, state, batches, num_real=0 if data is None else NUM_STEPS // 2)
    errors = check_evaluation(step, evaluation, state, batches[-1])
    manifest = CompiledManifest(
        task=name,
        options=dict(options or {}),
        model=_list_specs(task, state),
        batch_size=batch_size,
        input_shape=first[INPUTS].shape[1:],
        output_shape=outputs[1:],
        target_shape=first[TARGETS].shape[1:],
        target_dtype=str(first[TARGETS].dtype),
        loss=format_loss(learner.loss),
        noise=step.noise,
        constant=tuple(sorted(constant)),
        versions=_list_versions(),
        operators=tuple(sorted({*list_operators(train), *list_operators(evaluate)})),
        source=_hash_source(task, learner, options, batch_size, step.constant),
        check={**check.worst, **errors},
        flops=estimate_flops(train),
        peak_bytes=estimate_peak_bytes(train),
    )
    report = CompileReport(
        check=replace(check, worst={**check.worst, **errors}, median={**check.median, **errors}),
        num_nodes=len(train.graph.node),
        parameters=sum(
            value.size
            for name, value in state.items()
            if name.startswith(PARAMETER) and name.removeprefix(PARAMETER) not in step.constant
        ),
    )
    compiled = CompiledTask(train=content, evaluate=evaluation, manifest=manifest)
    check_compiled_task(compiled)  # as a board does
    return compiled, report


def format_loss(loss: Loss) -> str:
    """Returns a loss as `make_loss` takes it, without class weights and smoothing."""
    if isinstance(loss, Huber):
        return f"{loss.name}:{loss.delta:g}"
    if isinstance(loss, Quantile):
        return f"{loss.name}:{','.join(f'{level:g}' for level in loss.quantiles)}"
    if isinstance(loss, Reconstruction):
        return f"{loss.name}:{format_loss(loss.of)}"
    return loss.name


def _make_learner(task: Task, batch_size: int, data: Dataset | None) -> TorchLearner:
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise TaskError(f"the batch size must be 1 to {MAX_BATCH_SIZE}, got {batch_size}")
    if data is not None and not len(data):
        raise TaskError(f"the data hold no example to check task {task.name} on; give a shard that has some")
    learner = task.learner()
    if type(learner) is not TorchLearner:
        raise TaskError(
            f"task {task.name} trains with a {type(learner).__name__}: only tasks of a torch model (TorchLearner) "
            "are compiled; one in NumPy needs no torch as it is"
        )
    if (data is not None and isinstance(data.inputs, NamedArrays)) or not _takes_one_input(learner):
        raise TaskError(
            f"task {task.name} has inputs by name, and a compiled task takes one array; boards train it with torch"
        )
    if isinstance(learner.loss, MultiTask):
        raise TaskError(
            f"task {task.name} has losses of {learner.loss.list_names()}, and a compiled task has one; boards train "
            "it with torch, or in NumPy by a DenseModel"
        )
    if isinstance(learner.loss, Ctc | Contrastive):
        raise TaskError(f"loss {learner.loss.name} of task {task.name} has no form for boards without torch")
    if still := [name for name, parameter in learner.module.named_parameters() if not parameter.requires_grad]:
        raise TaskError(
            f"parameter {still[0]} of task {task.name} takes no gradient (requires_grad = False); compiled are "
            "networks all of whose parameters do: freeze by [adapt] of the run file"
        )
    own = find_loss(task)
    if own is None or _describe_loss(own) != _describe_loss(learner.loss):
        raise TaskError(
            f"task {task.name} declares the loss {own!r:.200}, its learner trains with {learner.loss!r:.200}; boards "
            "count with the task's, so give it the same"
        )
    learner.load(task.init(SEED))
    return learner


def _describe_loss(loss: Loss) -> tuple[str, object, object]:
    return format_loss(loss), getattr(loss, "class_weights", ()), getattr(loss, "label_smoothing", 0.0)


def _export(step: Step, state: Mapping[str, Array], batch: Batch) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    inputs = to_torch({**state, **batch})
    train = trace(step.train, inputs, kept=TRANSLATIONS)
    evaluate = trace(step.evaluate, inputs, kept=TRANSLATIONS)
    return export_graph(train), export_graph(evaluate)


def _draw_batches(source: BatchSource, step: Step, rng: Generator) -> list[Batch]:
    """Returns a batch for each step of the check; every second one is of real examples where there are some."""
    batches: list[Batch] = []
    for index in range(NUM_STEPS):
        real = source.select_real(rng) if index % 2 else None
        batches.append({**(real or source.make_random(rng)), **draw_noise(step.noise, rng)})
    return batches


def _list_specs(task: Task, state: Mapping[str, Array]) -> ModelSpec:
    specs = tuple(task.shapes())
    names = {name.removeprefix(PARAMETER).removeprefix(BUFFER) for name in state}
    if names != {spec.name for spec in specs}:
        raise TaskError(
            f"task {task.name} lists other tensors than its network has: "
            f"{', '.join(sorted(names ^ {spec.name for spec in specs}))[:200]}"
        )
    if wrong := [spec for spec in specs if spec.dtype not in TENSOR_TYPES]:
        raise TaskError(f"tensor {wrong[0].name} is {wrong[0].dtype}; compiled are {', '.join(TENSOR_TYPES)}")
    return specs


def _list_versions() -> dict[str, str]:
    return {"torch": torch.__version__, "onnx": onnx.__version__, "edgefl": __version__}


def _takes_one_input(learner: TorchLearner) -> bool:
    try:
        inspect.signature(learner.module.forward).bind(None)
    except TypeError:
        return False
    return True


def _hash_source(
    task: Task,
    learner: TorchLearner,
    options: Mapping[str, Scalar] | None,
    batch_size: int,
    constant: Collection[str],
) -> str:
    """Returns the SHA-256 of the sources of the task and of its network's classes, of options and of versions."""
    classes = {type(task), type(learner.loss), *(type(layer) for layer in learner.module.modules())}
    files = {inspect.getmodule(found) for found in classes}
    texts = sorted(
        hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for module in files
        if module is not None and not module.__name__.startswith("torch.")
        for file in [getattr(module, "__file__", None)]
        if file and Path(file).is_file()
    )
    value = {
        "sources": texts,
        "options": dict(options or {}),
        "batch_size": batch_size,
        "constant": sorted(constant),
        "versions": _list_versions(),
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
