"""Description of a network's cut, found where torch is: in a process of its own unless this one has it loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Json, ModelSpec, Scalar, Task
from edgefl.system.processes import call_in_subprocess, serve_call
from edgefl.tasks.learners.torch_split import cut_learner
from edgefl.tasks.registry import make_task

TIMEOUT_S = 300.0
"""Importing torch takes a Pi half a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCut:
    """What a cut gives: the tensors before it, the shape of one example's activations, and the number of outputs."""

    front_names: frozenset[str]
    activation_shape: tuple[int, ...]
    num_outputs: int

    def select_front(self, model_spec: ModelSpec) -> ModelSpec:
        """Returns those of a network's tensors that are before the cut."""
        return tuple(spec for spec in model_spec if spec.name in self.front_names)

    def select_rest(self, model_spec: ModelSpec) -> ModelSpec:
        """Returns the others."""
        return tuple(spec for spec in model_spec if spec.name not in self.front_names)


def describe_cut(task: str, options: Mapping[str, Scalar], after: str) -> NetworkCut:
    """Returns the cut of a task's network after a module.

    Raises:
        ConfigError: the network cannot be cut there.
        TaskError: torch is missing, or the task cannot be made.
    """
    return _describe_cut(task, tuple(sorted(options.items())), after)


@lru_cache(maxsize=16)
def _describe_cut(task: str, options: tuple[tuple[str, Scalar], ...], after: str) -> NetworkCut:
    request: Json = {"task": task, "options": dict(options), "after": after}
    # A coordinator promises to stay small, and torch would stay loaded for good.
    found = (
        _find_cut(request)
        if "torch" in sys.modules
        else call_in_subprocess(__name__, request, description="cutting the network", timeout_s=TIMEOUT_S)
    )
    return NetworkCut(
        front_names=frozenset(found["front_names"]),
        activation_shape=tuple(found["activation_shape"]),
        num_outputs=found["num_outputs"],
    )


def _find_cut(request: Json) -> Json:
    task = make_task(request["task"], request["options"])
    learner = task.learner(threads=1)
    front, rest = cut_learner(learner, request["after"])
    activations = front.logits(np.zeros((1, *get_input_shape(task)), np.float32))
    return {
        "front_names": sorted(front.read()),
        "activation_shape": list(activations.shape[1:]),
        "num_outputs": int(rest.logits(activations).shape[1]),
    }


def get_input_shape(task: Task) -> tuple[int, ...]:
    """Returns the shape of one example of a task.

    Raises:
        ConfigError: the task does not say it.
    """
    shape = getattr(task, "input_shape", None)
    if shape is None:
        raise ConfigError(f"split.after: task {task.name} must say the shape of one example: input_shape = (8, 8)")
    return tuple(shape)


if __name__ == "__main__":
    serve_call(_find_cut)
