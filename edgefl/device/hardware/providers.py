"""The execution provider of onnxruntime by which a board trains a compiled task: the fastest one that is right.

Providers that run on this machine are tried one by one on the training graph, each in a process of its own with a
time limit: one may crash, or compile for minutes. The CPU's is always there, and where it is alone nothing is tried.
`python -m edgefl.device.hardware.providers` reads one request to measure and writes one reply.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from edgefl.core.errors import EdgeflError
from edgefl.core.types import Array, Dataset, Json, ModelSpec, TensorKind, derive_rng
from edgefl.system.processes import call_in_subprocess, serve_call
from edgefl.tasks.compiled.artefact import CompiledTask
from edgefl.tasks.compiled.board.bound_graph import CPU, list_providers
from edgefl.tasks.compiled.board.graph_check import load_compiled_task
from edgefl.tasks.compiled.board.onnx_learner import OnnxLearner
from edgefl.tasks.losses.registry import make_loss
from edgefl.tasks.preparation import to_features

log = logging.getLogger(__name__)

ON_PROCESSOR = ("XnnpackExecutionProvider", "ACLExecutionProvider", "DnnlExecutionProvider")
ON_GPU = ("TensorrtExecutionProvider", "CUDAExecutionProvider")
"""Those that are tried. Others compute on other machines, or need settings."""
TIMEOUT_S = 90.0
"""Of one provider, the CPU's measurement beside it included."""
MEASURE_S, MIN_STEPS = 1.5, 3
MAX_DEVIATION = 1e-3
"""Largest one of a gradient, relative to its length, or to 1 % of the whole one's if that is more."""
SMALL_PART = 0.01
GAIN = 1.1
"""A provider must be so many times as fast as the CPU's, or it is not worth its memory."""


def choose_provider(
    path: Path,
    *,
    accelerator: str,
    threads: int | None,
    available: Callable[[], Collection[str]] = list_providers,
    call: Callable[..., Json] = call_in_subprocess,
) -> str:
    """Returns the name of the provider to train a compiled task by; that of the CPU where no other is better.

    Args:
        path: of the task's file.
        accelerator: of the board, cpu or cuda; only with cuda the GPU is tried.
        threads: of the runtime.
        available: lists the runtime's providers.
        call: runs this module in a process of its own.
    """
    allowed = (*(ON_GPU if accelerator == "cuda" else ()), *ON_PROCESSOR)
    present = available()
    best, best_speed = CPU, GAIN
    for provider in [name for name in allowed if name in present]:
        request: Json = {"path": str(path), "provider": provider, "threads": threads}
        try:
            found = call("edgefl.device.hardware.providers", request, description=provider, timeout_s=TIMEOUT_S)
            speed, deviation = found["cpu_s"] / found["provider_s"], found["deviation"]
        except (EdgeflError, OSError) as failure:
            log.warning("provider %s is not used for %s: %s", provider, path.name, failure)
            continue
        is_right = deviation <= MAX_DEVIATION  # a NaN is not
        log.info("provider %s: %.2f times as fast as the CPU, deviation %.1e", provider, speed, deviation)
        if is_right and speed >= best_speed:
            best, best_speed = provider, speed
    return best


def measure_provider(compiled: CompiledTask, provider: str, threads: int | None) -> Json:
    """Returns the seconds of a step by the CPU's provider and by another one, and how far a gradient is off.

    Raises:
        DataError: the provider cannot load the graph, or run it.
    """
    own, reference = _Side(compiled, provider, threads), _Side(compiled, CPU, threads)
    deviation = _compare(own.compute(), reference.compute())
    return {"provider_s": own.measure_s(), "cpu_s": reference.measure_s(), "deviation": deviation}


class _Side:
    """A learner of one provider, with the same weights and batch as any other."""

    def __init__(self, compiled: CompiledTask, provider: str, threads: int | None) -> None:
        manifest, rng = compiled.manifest, derive_rng(0, "providers")
        self._learner = OnnxLearner(
            compiled, to_features, make_loss(manifest.loss), threads=threads, provider=provider, falls_back=False
        )
        self._learner.load(_draw_weights(manifest.model))
        shape = (manifest.batch_size, *manifest.target_shape)
        is_class = manifest.target_dtype == "int64"
        targets: Array = rng.integers(manifest.output_shape[0], size=shape) if is_class else rng.random(shape)
        inputs = rng.standard_normal((manifest.batch_size, *manifest.input_shape)).astype(np.float32)
        self._batch = Dataset(inputs=inputs, targets=targets if is_class else targets.astype(np.float32))

    def compute(self) -> Mapping[str, Array]:
        self._learner.gradient(self._batch)
        return {name: gradient.copy() for name, gradient in self._learner.gradients.items()}

    def measure_s(self) -> float:
        times: list[float] = []
        started_s = time.perf_counter()
        while len(times) < MIN_STEPS or time.perf_counter() - started_s < MEASURE_S:
            step_s = time.perf_counter()
            self._learner.gradient(self._batch)
            times.append(time.perf_counter() - step_s)
        return max(float(np.median(times)), 1e-9)


def _draw_weights(model: ModelSpec) -> dict[str, Array]:
    rng, found = derive_rng(0, "weights"), {}
    for spec in model:
        inputs = max(1, spec.size // max(1, spec.shape[0] if spec.shape else 1))
        values = rng.standard_normal(spec.shape) / np.sqrt(inputs)
        found[spec.name] = (np.ones(spec.shape) if spec.kind == TensorKind.BUFFER else values).astype(spec.dtype)
    return found


def _compare(found: Mapping[str, Array], right: Mapping[str, Array]) -> float:
    whole = np.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in right.values()))
    errors = (
        np.linalg.norm(found[name] - value) / max(float(np.linalg.norm(value)), SMALL_PART * whole, 1e-30)
        for name, value in right.items()
    )
    return float(np.max([*errors]))


def _run_request(request: Json) -> Json:
    threads = request.get("threads")
    return measure_provider(load_compiled_task(Path(request["path"])), str(request["provider"]), threads)


if __name__ == "__main__":
    serve_call(_run_request)
