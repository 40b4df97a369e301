"""Training without torch: a compiled task's graphs, run by onnxruntime, behind the calls of `Learner`.

The graphs compute the loss and its gradient for a batch of a fixed size; all else is NumPy, so that every local
algorithm works on it. The graphs have been checked (`graph_check`) before they come here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import Array, Dataset, ModelSpec, TensorKind, TensorSpec
from edgefl.tasks.compiled.artefact import (
    BUFFER,
    GRADIENT,
    INPUTS,
    LOSS,
    NEW,
    NOISE,
    OUTPUTS,
    PARAMETER,
    TARGETS,
    WEIGHTS,
    CompiledTask,
)
from edgefl.tasks.compiled.board.bound_graph import CPU, MAX_ARENA_BYTES, Arena, BoundGraph, make_session
from edgefl.tasks.compiled.board.graph_check import check_constant
from edgefl.tasks.compiled.board.pruned_graph import remove_outputs
from edgefl.tasks.learners.numpy_learner import ArrayLearner, average_parts, evaluate_in_batches
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.registry import select_targets
from edgefl.tasks.preparation import Prepare

log = logging.getLogger(__name__)

OpenProvider = Callable[[], AbstractContextManager[str]]
"""Returns the name of a provider, for the time of its first session and step: `DataError` says that one failed."""


def open_cpu() -> AbstractContextManager[str]:
    """Returns the CPU's provider."""
    return nullcontext(CPU)


class OnnxLearner(ArrayLearner):
    """A `Learner` over float32 arrays, whose gradients the graph writes where they stay.

    Batches of more examples than the graph's B are cut into equal parts, each normalised by its own statistics where
    the network normalises over the batch. A shorter part is filled up with its own examples, of weight 0.
    """

    def __init__(  # noqa: PLR0913 all but three by name
        self,
        compiled: CompiledTask,
        prepare: Prepare,
        loss: Loss,
        *,
        threads: int | None = None,
        max_arena_bytes: int = MAX_ARENA_BYTES,
        open_provider: OpenProvider = open_cpu,
        falls_back: bool = True,
    ) -> None:
        """Starts at zero weights.

        Args:
            compiled: checked graphs and their manifest.
            prepare: turns a batch of a shard's raw inputs into the network's.
            loss: of the task: it checks targets and counts what is right; the graph computes it.
            threads: of the runtime; None for as many as there are cores.
            max_arena_bytes: of the graphs' own tensors; a graph that needs more is refused when it is run.
            open_provider: called at the first step, for the one of onnxruntime that runs the training graph;
                evaluation stays on the CPU.
            falls_back: goes on by the CPU's where that provider fails.

        Raises:
            TaskError: onnxruntime is missing.
            DataError: it cannot load the graph.
        """
        self._model: ModelSpec = compiled.manifest.model
        super().__init__(self._model, prepare, loss)
        self._compiled, self._threads = compiled, threads
        self._open_provider, self._provider, self._falls_back = open_provider, CPU, falls_back
        self._arena = Arena(max_arena_bytes, compiled.manifest.peak_bytes)
        self._batch = _Batch(compiled)
        self._noise = [np.zeros(shape, np.float32) for shape in compiled.manifest.noise]
        self._rng = np.random.default_rng(0)
        self._training: BoundGraph | None = None
        self._evaluation: BoundGraph | None = None

    @property
    def loss(self) -> Loss:
        """What it trains to make small."""
        return self._loss

    def freeze(self, names: Collection[str], *, needed: Collection[str] = ()) -> None:
        """Gives up the gradients of tensors that are not trained, except of those `needed` for something else.

        Raises:
            TaskError: the task was compiled for others, as of `check_constant`.
        """
        check_constant(self._compiled.manifest, {*names} - {*needed})
        super().freeze(names, needed=needed)
        self._training = None

    def reseed(self, seed: int) -> None:
        """Seeds the network's random layers (dropout): the same seed gives the same numbers on every machine."""
        self._rng = np.random.default_rng(seed)

    def logits(self, inputs: Array) -> Array:
        """Returns the model's outputs for raw inputs, [n, ...]."""
        features, size = self._compute_features(inputs), self._batch.size
        outputs = np.empty((len(features), *self._compiled.manifest.output_shape), np.float32)
        for start in range(0, len(features), size):
            part = features[start : start + size]
            self._batch.fill(part, None, None)
            outputs[start : start + size] = self._evaluate_filled()[: len(part)]
        return outputs

    def draw(self, graph: object, features: str, example: Array) -> str:  # noqa: ARG002 as all learners
        """Raises `TaskError`: what is exported is the network itself, by torch."""
        raise TaskError("a compiled task is exported where torch is: at the coordinator, edgefl model export")

    def gradient(self, batch: Dataset) -> float:
        features = self._compute_features(batch.inputs)
        targets = self._select_targets(batch, features)
        count = math.ceil(len(batch) / self._batch.size)
        if count == 1:
            return self._run_part(features, targets, batch.weights)

        def compute(rows: Array) -> float:
            weights = None if batch.weights is None else batch.weights[rows]
            return self._run_part(features[rows], targets[rows], weights)

        return average_parts(self._gradients, len(batch), count, compute)

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        return evaluate_in_batches(data, self._batch.size, self._evaluate_batch)

    def _run_part(self, features: Array, targets: Array, weights: Array | None) -> float:
        """Fills `gradients` from at most B examples, and returns the mean over them of weight times loss."""
        total = float(len(features)) if weights is None else float(weights.sum())
        self._batch.fill(features, targets, weights if total else None)
        for noise in self._noise:
            self._rng.random(dtype=np.float32, out=noise)
        outputs = self._run_training()
        if len(features) > 1:  # as in torch: one example has no variance of its own
            for spec in self._model:
                if f"{NEW}{spec.name}" in outputs:
                    self._tensors[spec.name][...] = outputs[f"{NEW}{spec.name}"]
        scale = total / len(features)  # the graph divides by the sum of the weights
        self._scale_gradients(scale)
        return scale * float(outputs[LOSS])

    def _run_training(self) -> Mapping[str, Array]:
        try:
            if self._training is not None:
                return self._training.run()
            with self._open_provider() as self._provider:
                self._training = self._make_training()
                return self._training.run()
        except DataError as error:
            if self._provider == CPU or not self._falls_back:
                raise
            log.warning("provider %s failed, the CPU goes on: %s", self._provider, error)
            self._open_provider, self._training = open_cpu, None
            return self._run_training()

    def _scale_gradients(self, factor: float) -> None:
        if factor != 1.0:
            for gradient in self._gradients.values():
                np.multiply(gradient, factor, out=gradient)

    def _evaluate_batch(self, batch: Dataset) -> tuple[float, float]:
        features = self._compute_features(batch.inputs)
        self._batch.fill(features, self._select_targets(batch, features), batch.weights)
        outputs = self._evaluate_filled()[: len(batch)]
        assert self._evaluation is not None
        return float(self._evaluation.outputs[LOSS]), self._loss.count_right(outputs, batch.targets)

    def _evaluate_filled(self) -> Array:
        if self._evaluation is None:
            outputs = {
                LOSS: np.zeros((), np.float32),
                OUTPUTS: np.zeros((self._batch.size, *self._compiled.manifest.output_shape), np.float32),
            }
            session = make_session(self._compiled.evaluate, self._threads, self._arena)
            self._evaluation = BoundGraph(session, self._list_inputs(), outputs)
        return self._evaluation.run()[OUTPUTS]

    def _make_training(self) -> BoundGraph:
        graph, constant = self._compiled.train, {*self._compiled.manifest.constant}
        if absent := constant & {*self._gradients}:
            raise TaskError(
                f"the compiled task freezes {min(absent)!r}, which is trained here; compile it for the run's [adapt]"
            )
        if frozen := {f"{GRADIENT}{name}" for name in {*self._parameters} - {*self._gradients} - constant}:
            graph = remove_outputs(graph, frozen)
        session = make_session(graph, self._threads, self._arena, self._provider)
        present = {output.name for output in session.get_outputs()}
        statistics = {
            f"{NEW}{spec.name}": np.zeros(spec.shape, spec.dtype)
            for spec in self._model
            if f"{NEW}{spec.name}" in present
        }
        gradients = {f"{GRADIENT}{name}": gradient for name, gradient in self._gradients.items()}
        noise = {f"{NOISE}{index}": numbers for index, numbers in enumerate(self._noise)}
        outputs = {LOSS: np.zeros((), np.float32), **gradients, **statistics}
        return BoundGraph(session, {**self._list_inputs(), **noise}, outputs)

    def _list_inputs(self) -> dict[str, Array]:
        tensors = {
            f"{PARAMETER if _is_parameter(spec) else BUFFER}{spec.name}": self._tensors[spec.name]
            for spec in self._model
        }
        return {**tensors, **self._batch.arrays}

    def _compute_features(self, inputs: Array) -> Array:
        features = np.ascontiguousarray(self._prepare(inputs), dtype=np.float32)
        expected = self._compiled.manifest.input_shape
        if features.shape[1:] != expected:
            raise TaskError(
                f"the compiled task takes examples of shape {list(expected)}, got {list(features.shape[1:])}"
            )
        return features

    def _select_targets(self, batch: Dataset, features: Array) -> Array:
        manifest = self._compiled.manifest
        targets = select_targets(self._loss, batch, features, (len(batch), *manifest.output_shape))
        if targets.shape[1:] != manifest.target_shape:
            raise TaskError(
                f"the compiled task takes targets of shape {list(manifest.target_shape)}, "
                f"got {list(targets.shape[1:])}"
            )
        return targets


class _Batch:
    """The arrays of one batch of B examples; the graphs read them where they are."""

    def __init__(self, compiled: CompiledTask) -> None:
        manifest = compiled.manifest
        self.size = manifest.batch_size
        self._inputs = np.zeros((self.size, *manifest.input_shape), np.float32)
        self._targets = np.zeros((self.size, *manifest.target_shape), manifest.target_dtype)
        self._weights = np.zeros(self.size, np.float32)
        self.arrays = {INPUTS: self._inputs, TARGETS: self._targets, WEIGHTS: self._weights}

    def fill(self, features: Array, targets: Array | None, weights: Array | None) -> None:
        """Sets the batch to at most B examples, filled up with the same ones of weight 0; no weights are 1 each."""
        count = len(features)
        for start in range(0, self.size, count):
            rows = slice(start, min(start + count, self.size))
            self._inputs[rows] = features[: rows.stop - start]
            self._targets[rows] = 0 if targets is None else targets[: rows.stop - start]
        self._weights[:count] = 1.0 if weights is None else weights
        self._weights[count:] = 0.0


def _is_parameter(spec: TensorSpec) -> bool:
    return spec.kind == TensorKind.PARAMETER
