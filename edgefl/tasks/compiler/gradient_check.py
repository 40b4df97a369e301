"""The check that is part of compiling: ONNX graphs against torch in double precision, tensor by tensor.

The graph trains for some steps. At each of them torch computes the same step from the same state in float64, so that
errors do not add up; then both train by themselves, and their losses are compared.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime
import torch

from edgefl.core.errors import TaskError
from edgefl.core.types import Array
from edgefl.tasks.compiled.artefact import BUFFER, GRADIENT, LOSS, NEW, OUTPUTS, PARAMETER
from edgefl.tasks.compiler.batches import Batch
from edgefl.tasks.compiler.steps import Step, to_torch

NUM_STEPS, TORCH_EVERY, NUM_CURVE_STEPS, NUM_LAST_STEPS = 20, 7, 20, 5
LEARNING_RATE = 0.02
MEDIAN_BOUND, WORST_BOUND = 1e-4, 5e-2
"""Largest relative errors of an output over the steps. The worst one is larger than the median where a value lies on
the edge of a ReLU, or two that are pooled are equal but for the last digit: float32 torch has such steps too."""
TIMES_TORCH = 10.0
"""An error so many times that of torch's own float32 is allowed, where that is larger."""
CURVE_BOUND = 0.05
NUM_NEAR, TIMES_SPREAD = 3, 2.0
"""Trainings of torch that begin with weights which differ in their last digit. Where they end further apart than
`CURVE_BOUND`, as those of deep networks with normalisation over few values, so many times that is allowed."""
SMALL_PART = 1e-2
"""A gradient with a smaller part of the whole one is measured by that part of it: some are 0, such as that of a bias
before batch normalisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Result of a check.

    Attributes:
        worst, median: relative error by output, over the steps.
        torch: that of torch's own float32, the worst of its steps.
        losses: mean of the last losses of a training by itself, of the graph and of torch.
        num_steps: of the check.
        num_real: how many of them were on real examples.
    """

    worst: Mapping[str, float]
    median: Mapping[str, float]
    torch: Mapping[str, float]
    losses: tuple[float, float]
    num_steps: int
    num_real: int


class GraphRunner:
    """A session of a graph, fed by name with what it takes."""

    def __init__(self, content: bytes, *, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        try:
            self._session: Any = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no common base class
            raise TaskError(f"onnxruntime cannot load the compiled graph: {error}") from error
        self._inputs = [entry.name for entry in self._session.get_inputs()]
        self._outputs = [entry.name for entry in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        found = self._session.run(None, {name: feeds[name] for name in self._inputs})
        return dict(zip(self._outputs, found, strict=True))


def check_training(
    step: Step, content: bytes, state: Mapping[str, Array], batches: Sequence[Batch], *, num_real: int
) -> CheckReport:
    """Returns the report of a training graph.

    Args:
        step: that was compiled.
        content: of the graph.
        state: first parameters and buffers.
        batches: with noise, one a step.
        num_real: how many of them are of real examples.

    Raises:
        TaskError: an output is further from torch's than the bound, or the two trainings end at different losses.
    """
    runner, exact = GraphRunner(content), _make_double(step)
    errors: dict[str, list[float]] = defaultdict(list)
    own_errors: dict[str, float] = defaultdict(float)
    current: Mapping[str, Array] = state
    for index, batch in enumerate(batches):
        feeds = {**current, **batch}
        found, right = runner.run(feeds), _run_torch(exact, feeds, torch.float64)
        for name, error in _compare(found, right).items():
            errors[name].append(error)
        if index % TORCH_EVERY == 0:
            for name, error in _compare(_run_torch(step, feeds, torch.float32), right).items():
                own_errors[name] = max(own_errors[name], error)
        current = _descend(current, found)
    worst, median = ({name: float(f(found)) for name, found in errors.items()} for f in (np.max, np.median))
    _check_bounds(worst, median, own_errors)
    losses = _train_both(step, runner, state, batches)
    return CheckReport(
        worst=worst, median=median, torch=dict(own_errors), losses=losses, num_steps=len(batches), num_real=num_real
    )


def check_evaluation(step: Step, content: bytes, state: Mapping[str, Array], batch: Batch) -> dict[str, float]:
    """Returns the relative errors of an evaluation graph; raises as `check_training`."""
    feeds = {**state, **batch}
    right = {
        name: tensor.numpy() for name, tensor in _make_double(step).evaluate(to_torch(feeds, torch.float64)).items()
    }
    found = GraphRunner(content).run(feeds)
    errors = {name: _measure_distance(found[name], right[name]) for name in (OUTPUTS, LOSS)}
    named = {f"evaluation's {name}": error for name, error in errors.items()}
    _check_bounds(named, named, {})
    return named


def _make_double(step: Step) -> Step:
    return replace(step, module=copy.deepcopy(step.module).double())


def _run_torch(step: Step, feeds: Mapping[str, Array], dtype: torch.dtype) -> dict[str, Array]:
    found = step.train(to_torch(feeds, dtype), is_pure=False)
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def _compare(found: Mapping[str, Array], right: Mapping[str, Array]) -> dict[str, float]:
    whole = np.sqrt(sum(_measure_norm(value) ** 2 for name, value in right.items() if name.startswith(GRADIENT)))
    return {
        name: _measure_distance(found[name], value, SMALL_PART * whole if name.startswith(GRADIENT) else 0.0)
        for name, value in right.items()
    }


def _measure_distance(found: Array, right: Array, at_least: float = 0.0) -> float:
    distance = _measure_norm(np.asarray(found, np.float64) - right)
    size = max(_measure_norm(right), at_least)
    return distance / size if size else distance


def _measure_norm(value: Array) -> float:
    return float(np.linalg.norm(np.asarray(value, np.float64)))


def _check_bounds(worst: Mapping[str, float], median: Mapping[str, float], own: Mapping[str, float]) -> None:
    for name, error in worst.items():
        factor = TIMES_TORCH * own.get(name, 0.0)
        for what, value, bound in (("median", median[name], MEDIAN_BOUND), ("largest", error, WORST_BOUND)):
            if not value <= max(bound, factor):
                raise TaskError(
                    f"the compiled graph does not compute what torch computes: the {what} relative error of {name} "
                    f"is {value:.1e}, {max(bound, factor):.1e} would be allowed; nothing was written"
                )


def _descend(state: Mapping[str, Array], found: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the state after a step of stochastic gradient descent."""
    new = dict(state)
    for name, value in found.items():
        if name.startswith(GRADIENT):
            key = f"{PARAMETER}{name.removeprefix(GRADIENT)}"
            new[key] = (state[key] - LEARNING_RATE * value).astype(state[key].dtype)
        elif name.startswith(NEW):
            new[f"{BUFFER}{name.removeprefix(NEW)}"] = value
    return new


def _train_both(
    step: Step, runner: GraphRunner, state: Mapping[str, Array], batches: Sequence[Batch]
) -> tuple[float, float]:
    """Trains the graph and torch by themselves on the same few batches, and compares where they end."""
    few = batches[-4:]

    def run_torch(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return _run_torch(step, feeds, torch.float32)

    (_, by_graph), (first, by_torch) = (_train(run, state, few) for run in (runner.run, run_torch))
    allowed = CURVE_BOUND * max(abs(first), abs(by_torch))
    if not abs(by_graph - by_torch) <= allowed:
        ends = [_train(run_torch, near, few)[1] for near in _list_near(state)]
        allowed = max(allowed, TIMES_SPREAD * (max(*ends, by_torch) - min(*ends, by_torch)))
    if not abs(by_graph - by_torch) <= allowed:
        raise TaskError(
            f"the compiled graph trains to a loss of {by_graph:.4g}, torch to {by_torch:.4g} after {NUM_CURVE_STEPS} "
            f"steps; {allowed:.2g} would be allowed between them; nothing was written"
        )
    return by_graph, by_torch


def _train(
    run: Callable[[Mapping[str, Array]], Mapping[str, Array]], state: Mapping[str, Array], batches: Sequence[Batch]
) -> tuple[float, float]:
    """Returns the loss of the first step of a training, and the mean of the last ones."""
    losses: list[float] = []
    for index in range(NUM_CURVE_STEPS):
        found = run({**state, **batches[index % len(batches)]})
        losses.append(float(found[LOSS]))
        state = _descend(state, found)
    return losses[0], float(np.mean(losses[-NUM_LAST_STEPS:]))


def _list_near(state: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Yields states whose parameters differ from these in their last digit."""
    for seed in range(NUM_NEAR):
        rng, epsilon = np.random.default_rng(seed), np.finfo(np.float32).eps
        yield {
            name: (value * (1 + epsilon * rng.choice([-1, 1], value.shape))).astype(value.dtype)
            if name.startswith(PARAMETER)
            else value
            for name, value in state.items()
        }
