"""A task that trains by its compiled file: its data and metrics are the task's own, its learner runs the graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgefl.core.errors import TaskError
from edgefl.core.types import Array, Dataset, ModelSpec, Scalar, Task
from edgefl.tasks.compiled.artefact import CompiledTask
from edgefl.tasks.compiled.board.bound_graph import MAX_ARENA_BYTES
from edgefl.tasks.compiled.board.graph_check import check_model, check_origin, load_compiled_task
from edgefl.tasks.compiled.board.onnx_learner import OnnxLearner, OpenProvider, open_cpu
from edgefl.tasks.losses.registry import find_loss
from edgefl.tasks.preparation import Prepare, to_features


class GraphTask(Task):
    """A task with a learner that needs no torch.

    Args:
        task: as it was made from the run's options.
        compiled: its checked file.
        max_arena_bytes: of the graphs' own tensors.
        open_provider: of onnxruntime, that runs the training graph.

    Raises:
        TaskError: the file is of another model.
    """

    def __init__(
        self,
        task: Task,
        compiled: CompiledTask,
        *,
        max_arena_bytes: int = MAX_ARENA_BYTES,
        open_provider: OpenProvider = open_cpu,
    ) -> None:
        self._task, self._compiled = task, compiled
        self._max_arena_bytes, self._open_provider = max_arena_bytes, open_provider
        self._shapes = _find_shapes(task, compiled)
        check_model(compiled.manifest, self._shapes, task.name)

    def __getattr__(self, name: str) -> Any:
        # Labels, metrics, loss and whatever else a task may declare.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._task, name)

    @property
    def name(self) -> str:
        return self._task.name

    def shapes(self) -> ModelSpec:
        return self._shapes

    def init(self, seed: int) -> dict[str, Array]:
        return self._task.init(seed)

    def read(self, path: str) -> Dataset:
        return self._task.read(path)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> OnnxLearner:  # noqa: ARG002 a provider says it
        """Returns a learner.

        Raises:
            TaskError: only the task's own learner knows its loss, or onnxruntime is missing.
        """
        loss = find_loss(self._task)
        if loss is None:
            raise TaskError(f"task {self.name} has no loss that a compiled task could count with; give it one")
        return OnnxLearner(
            self._compiled,
            get_prepare(self._task),
            loss,
            threads=threads,
            max_arena_bytes=self._max_arena_bytes,
            open_provider=self._open_provider,
        )


def load_graph_task(
    task: Task,
    path: Path,
    *,
    name: str,
    options: Mapping[str, Scalar],
    max_arena_bytes: int = MAX_ARENA_BYTES,
    open_provider: OpenProvider = open_cpu,
) -> GraphTask:
    """Returns a task that trains by the compiled one in a file; `name` and `options` are those of the run file.

    Raises:
        DataError: the file cannot be read, or asks for something that it should not need.
        TaskError: it is of another task, or of another model.
    """
    compiled = load_compiled_task(path)
    check_origin(compiled.manifest, name, options)
    return GraphTask(task, compiled, max_arena_bytes=max_arena_bytes, open_provider=open_provider)


def get_prepare(task: Task) -> Prepare:
    """Returns the function from a shard's raw inputs to the network's, without making a learner."""
    owner = getattr(task, "model", None) or task
    prepare: Prepare = getattr(owner, "prepare", None) or to_features
    return prepare


def _find_shapes(task: Task, compiled: CompiledTask) -> ModelSpec:
    """Returns the task's own tensors; those of the file where only torch knows them, which this machine lacks."""
    try:
        return task.shapes()
    except TaskError:
        return compiled.manifest.model
