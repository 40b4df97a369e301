"""The execution provider of onnxruntime by which a board trains a compiled task: the fastest one that is right.

Providers that run on this machine are tried one by one on the training graph, each in a process of its own with a
time limit: one may crash, or compile for minutes. The CPU's is always there, and where it is alone nothing is tried.
That is done when a file first trains, and the choice is kept on the card.
`python -m edgefl.device.hardware.providers` reads one request to measure and writes one reply.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from edgefl.core.errors import EdgeflError
from edgefl.core.protocol import ONNX
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Array, Dataset, Json, ModelSpec, TensorKind, derive_rng
from edgefl.device.hardware.health import read_available_memory_bytes
from edgefl.system.atomic_files import write_atomic
from edgefl.system.processes import StoppedCallError, call_in_subprocess, serve_call
from edgefl.tasks.compiled.artefact import GRADIENT, LOSS, NEW, CompiledTask
from edgefl.tasks.compiled.board.bound_graph import CPU, MAX_ARENA_BYTES, get_runtime_version, list_providers
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
"""Largest one of the loss, a gradient or a statistic, relative to its length; of a gradient to a share `SMALL_PART`
of the whole one's, if that is more."""
SMALL_PART = 0.01
GAIN = 1.1
"""A provider must be so many times as fast as the CPU's, or it is not worth its memory."""
MAX_CHOICES, MAX_CHOICES_BYTES = 16, 16_384
"""Choices that are kept, and the size of their file."""


class ProviderChoice:
    """The choice of the provider by which one compiled task trains, kept in a file.

    Args:
        path: of the task's file, whose name is its SHA-256.
        choices_path: of the file of choices, by the task's SHA-256, onnxruntime's version and what can be tried.
        accelerator: of the board, cpu or cuda; only with cuda the GPU is tried.
        threads: of the runtime.
        should_stop: ends a trial; training then goes on by the CPU's, and nothing is kept.
        available: lists the runtime's providers.
        call: runs this module in a process of its own.
    """

    def __init__(  # noqa: PLR0913 all but two by name
        self,
        path: Path,
        choices_path: Path,
        *,
        accelerator: str,
        threads: int | None,
        should_stop: Callable[[], bool] = lambda: False,
        available: Callable[[], Collection[str]] = list_providers,
        call: Callable[..., Json] = call_in_subprocess,
    ) -> None:
        self._path, self._choices_path, self._threads = path, choices_path, threads
        self._allowed = (*(ON_GPU if accelerator == "cuda" else ()), *ON_PROCESSOR)
        self._should_stop, self._available, self._call = should_stop, available, call

    @contextlib.contextmanager
    def open(self) -> Iterator[str]:
        """Yields the name of the provider, tried before where that was not done yet.

        Until the block, the first session and step, has ended well, the file says CPU: one that ends this process, or
        never returns, is not taken again.
        """
        present = self._available()
        providers = [name for name in self._allowed if name in present]
        with self._choose(providers) if providers else nullcontext(CPU) as provider:
            yield provider

    @contextlib.contextmanager
    def _choose(self, providers: Sequence[str]) -> Iterator[str]:
        choices, key = self._read(), " ".join([self._path.stem, get_runtime_version(), *providers])
        provider = choices.pop(key, None)
        if provider != CPU and not self._write({**choices, key: CPU}):
            provider = CPU
        try:
            provider = provider or choose_provider(
                self._path, providers, threads=self._threads, should_stop=self._should_stop, call=self._call
            )
        except StoppedCallError:
            self._write(choices)
            provider = CPU
        provider = provider if provider in providers else CPU
        log.info("the compiled task %s trains by %s", self._path.stem[:12], provider)
        yield provider
        if provider != CPU:
            self._write({**choices, key: provider})

    def _read(self) -> dict[str, str]:
        try:
            with self._choices_path.open("rb") as file:
                found = parse_json(file.read(MAX_CHOICES_BYTES))
            return {str(key): str(name) for key, name in found.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def _write(self, choices: Mapping[str, str]) -> bool:
        try:
            write_atomic(self._choices_path, json.dumps(dict([*choices.items()][-MAX_CHOICES:])).encode())
        except EdgeflError as error:
            log.warning("a provider cannot be kept: %s", error)
            return False
        return True


def choose_provider(
    path: Path,
    providers: Sequence[str],
    *,
    threads: int | None,
    should_stop: Callable[[], bool] = lambda: False,
    call: Callable[..., Json] = call_in_subprocess,
) -> str:
    """Returns the name of the provider to train a compiled task by; that of the CPU where no other is better.

    Args:
        path: of the task's file.
        providers: to try.
        threads: of the runtime.
        should_stop: ends the trial.
        call: runs this module in a process of its own.

    Raises:
        StoppedCallError: `should_stop` returned True.
    """
    best, best_speed = CPU, GAIN
    for provider in providers:
        limit = (read_available_memory_bytes() or MAX_ARENA_BYTES) // 2  # this process goes on to use the other half
        request: Json = {"path": str(path), "provider": provider, "threads": threads, "max_arena_bytes": limit}
        try:
            found = call(
                "edgefl.device.hardware.providers",
                request,
                description=provider,
                timeout_s=TIMEOUT_S,
                should_stop=should_stop,
            )
            speed, deviation = found["cpu_s"] / found["provider_s"], found["deviation"]
        except StoppedCallError:
            raise
        except (EdgeflError, OSError) as failure:
            log.warning("provider %s is not used for %s: %s", provider, path.name, failure)
            continue
        is_right = deviation <= MAX_DEVIATION  # a NaN is not
        log.info("provider %s: %.2f times as fast as the CPU, deviation %.1e", provider, speed, deviation)
        if is_right and speed >= best_speed:
            best, best_speed = provider, speed
    return best


def measure_provider(
    compiled: CompiledTask, provider: str, threads: int | None, *, max_arena_bytes: int = MAX_ARENA_BYTES
) -> Json:
    """Returns the seconds of a step by the CPU's provider and by another one, and how far an output is off.

    Raises:
        DataError: the provider cannot load the graph, or run it.
    """
    sides = []
    for name in (provider, CPU):
        side = _Side(compiled, name, threads, max_arena_bytes)
        sides.append((side.compute(), side.measure_s()))
        del side  # before the next one, so that both have the whole of the memory
    (found, provider_s), (right, cpu_s) = sides
    return {"provider_s": provider_s, "cpu_s": cpu_s, "deviation": _compare(found, right)}


def measure_compiled_task(path: Path, threads: int | None) -> Json:
    """Returns `steps_per_s` of a compiled task by the CPU's provider, at its `batch_size`, with `backend`.

    Raises:
        DataError: the file cannot be read or run, or asks for something that it should not need.
    """
    compiled = load_compiled_task(path)
    limit = read_available_memory_bytes() or MAX_ARENA_BYTES
    seconds = _Side(compiled, CPU, threads, limit).measure_s()
    return {
        "steps_per_s": float(f"{1 / seconds:.4g}"), "batch_size": compiled.manifest.batch_size, "backend": ONNX
    }  # fmt: skip


class _Side:
    """A learner of one provider, with the same weights and batch as any other."""

    def __init__(self, compiled: CompiledTask, provider: str, threads: int | None, max_arena_bytes: int) -> None:
        self._model = compiled.manifest.model
        manifest, rng = compiled.manifest, derive_rng(0, "providers")
        self._learner = OnnxLearner(
            compiled,
            to_features,
            make_loss(manifest.loss),
            threads=threads,
            max_arena_bytes=max_arena_bytes,
            open_provider=lambda: nullcontext(provider),
            falls_back=False,
        )
        self._learner.load(_draw_weights(manifest.model))
        self._learner.freeze(manifest.constant)
        shape = (manifest.batch_size, *manifest.target_shape)
        is_class = manifest.target_dtype == "int64"
        targets: Array = rng.integers(manifest.output_shape[0], size=shape) if is_class else rng.random(shape)
        inputs = rng.standard_normal((manifest.batch_size, *manifest.input_shape)).astype(np.float32)
        self._batch = Dataset(inputs=inputs, targets=targets if is_class else targets.astype(np.float32))

    def compute(self) -> Mapping[str, Array]:
        """Returns the outputs of a step: loss, gradients and statistics."""
        loss, tensors = self._learner.gradient(self._batch), self._learner.read()
        gradients = {f"{GRADIENT}{name}": gradient.copy() for name, gradient in self._learner.gradients.items()}
        statistics = {
            f"{NEW}{spec.name}": tensors[spec.name] for spec in self._model if spec.kind == TensorKind.BUFFER
        }
        return {LOSS: np.array(loss), **gradients, **statistics}

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
    lengths = {name: float(np.linalg.norm(value.astype(np.float64))) for name, value in right.items()}
    whole = float(np.linalg.norm([length for name, length in lengths.items() if name.startswith(GRADIENT)]))
    least = {name: SMALL_PART * whole if name.startswith(GRADIENT) else 0.0 for name in right}
    errors = (
        np.linalg.norm(found[name].astype(np.float64) - value) / max(lengths[name], least[name], 1e-30)
        for name, value in right.items()
    )
    return float(np.max([*errors]))


def _run_request(request: Json) -> Json:
    compiled = load_compiled_task(Path(request["path"]))
    return measure_provider(
        compiled, str(request["provider"]), request.get("threads"), max_arena_bytes=int(request["max_arena_bytes"])
    )


if __name__ == "__main__":
    serve_call(_run_request)
