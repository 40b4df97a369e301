"""What a training step costs by a compiled graph and by torch: time, memory, compiling, and the gradient's error.

    python benchmarks/compiled_steps.py [--batch-size 32] [--turns 9] [--threads 1,2] [--only mnist-cnn,gru] [--json]
    python benchmarks/compiled_steps.py --only U-Net --graph-batch 8     # a batch in four parts

All architectures of `compiled_architectures.py` can be named too. Both sides are learners as a board has them
(`OnnxLearner`, `TorchLearner`; `AdaptedLearner` around either), with a step of SGD, in processes of their own.
They take turns, so that what slows one turn down slows both; the ratio is the median of the turns'. With one thread
the time is the processor's, with more the clock's. Data is random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import options
from harness.architectures import ARCHITECTURES
from harness.compiled_networks import ADAPTERS, NETWORKS

from edgefl.core.types import Array, Dataset, ModelSpec, TensorKind
from edgefl.tasks.adaptation.adapted_learner import AdaptedLearner
from edgefl.tasks.adaptation.parts import select_parts
from edgefl.tasks.compiled.artefact import CompiledManifest
from edgefl.tasks.compiled.board.graph_check import load_compiled_task
from edgefl.tasks.losses.registry import make_loss
from edgefl.tasks.preparation import to_features

TASKS = {**ARCHITECTURES, **NETWORKS, "vit-lora": ARCHITECTURES["ViT-tiny"]}
MEASURED = (*NETWORKS, "vit-lora")
SIDES = ("graph", "torch")
LEARNING_RATE = 0.001


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--graph-batch", type=int, help="examples that a graph takes at once [the batch size]")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--turn-s", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--only", default=",".join(MEASURED))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    parsed = options.parse(parser, batch_size=4, turns=2, turn_s=0.05, threads="1", only="mlp")
    if parsed.work:
        side, name, path, threads = parsed.work
        work(side, name, Path(path), int(threads), parsed.batch_size)
    elif parsed.compile:
        name, path = parsed.compile
        compile_network(name, Path(path), parsed.graph_batch or parsed.batch_size)
    else:
        if unknown := sorted({*parsed.only.split(",")} - {*TASKS}):
            parser.error(f"unknown networks {', '.join(unknown)}; known: {', '.join(TASKS)}")
        rows = [
            row
            for name in parsed.only.split(",")
            for row in measure(name, parsed, [*map(int, parsed.threads.split(","))])
        ]
        print(json.dumps(rows, indent=2) if parsed.json else render(rows))


def measure(name: str, parsed: argparse.Namespace, all_threads: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a row for each number of threads."""
    with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
        path, common = Path(folder) / "network.compiled", ["--batch-size", str(parsed.batch_size)]
        if parsed.graph_batch:
            common += ["--graph-batch", str(parsed.graph_batch)]
        started_s = time.perf_counter()
        command = [sys.executable, __file__, "--compile", name, str(path), *common]
        compiled = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        compiled["compile_s"] = time.perf_counter() - started_s
        return [{**compiled, **_take_turns(name, path, threads, parsed, common)} for threads in all_threads]


def _take_turns(
    name: str, path: Path, threads: int, parsed: argparse.Namespace, common: Sequence[str]
) -> dict[str, Any]:
    processes = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--work", side, name, str(path), str(threads), *common],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for side in SIDES
    }  # fmt: skip
    answers: dict[str, list[Mapping[str, float]]] = {side: [] for side in SIDES}
    try:
        for turn in range(parsed.turns + 1):
            for side in SIDES if turn % 2 else reversed(SIDES):
                answer = _ask(processes[side], parsed.turn_s)
                if turn:  # the first one warms up
                    answers[side].append(answer)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    ours, others = ([answer["step_s"] for answer in answers[side]] for side in SIDES)
    ratios = sorted(other / own for own, other in zip(ours, others, strict=True))
    return {
        "network": name,
        "threads": threads,
        "graph_ms": 1e3 * statistics.median(ours),
        "torch_ms": 1e3 * statistics.median(others),
        "speed": statistics.median(ratios),
        "speed_range": [ratios[0], ratios[-1]],
        "graph_mb": max(answer["pss_bytes"] for answer in answers["graph"]) / 1e6,
        "torch_mb": max(answer["pss_bytes"] for answer in answers["torch"]) / 1e6,
    }


def _ask(process: subprocess.Popen[str], turn_s: float) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{turn_s}\n")
    process.stdin.flush()
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


def work(side: str, name: str, path: Path, threads: int, batch_size: int) -> None:
    """Takes a turn for each line: trains for so many seconds, and answers with a step's time and the memory."""
    clock: Callable[[], float] = time.process_time if threads == 1 else time.perf_counter
    step = _make_step(side, name, path, threads, batch_size)
    peak_bytes = 0
    for line in sys.stdin:
        times: list[float] = []
        ends_s = time.perf_counter() + float(line)
        while not times or time.perf_counter() < ends_s:
            begun_s = clock()
            step()
            times.append(clock() - begun_s)
        peak_bytes = max(peak_bytes, _read_pss())
        print(json.dumps({"step_s": statistics.median(times), "pss_bytes": peak_bytes}), flush=True)


def _make_step(side: str, name: str, path: Path, threads: int, batch_size: int) -> Callable[[], None]:
    """Returns a step of SGD; torch is imported where it trains alone."""
    compiled = load_compiled_task(path)
    batch, learner = _make_batch(compiled.manifest, batch_size), _make_learner(side, name, path, threads)
    weights = _make_weights(compiled.manifest.model)
    if name in ADAPTERS:
        parts = select_parts(ADAPTERS[name], compiled.manifest.model)
        learner = AdaptedLearner(learner, parts, weights)
        weights = _make_weights(parts.shapes)
    learner.load(weights)

    def step() -> None:
        learner.gradient(batch)
        parameters = learner.parameters
        for key, gradient in learner.gradients.items():
            parameters[key][...] -= LEARNING_RATE * gradient

    return step


def _make_learner(side: str, name: str, path: Path, threads: int) -> Any:
    compiled = load_compiled_task(path)
    loss = make_loss(compiled.manifest.loss)
    if side == "graph":
        from edgefl.tasks.compiled.board.onnx_learner import OnnxLearner  # noqa: PLC0415 this side's alone

        return OnnxLearner(compiled, to_features, loss, threads=threads)
    from edgefl.tasks.learners.torch_learner import TorchLearner  # noqa: PLC0415 likewise

    return TorchLearner(TASKS[name]().learner().module, threads=threads, loss=loss)


def _make_batch(manifest: CompiledManifest, size: int) -> Dataset:
    rng = np.random.default_rng(0)
    targets: Array = rng.standard_normal((size, *manifest.target_shape), np.float32)
    if manifest.target_dtype == "int64":
        targets = rng.integers(manifest.output_shape[0], size=(size, *manifest.target_shape))
    return Dataset(inputs=rng.standard_normal((size, *manifest.input_shape), np.float32), targets=targets)


def _make_weights(model: ModelSpec) -> dict[str, Array]:
    rng, found = np.random.default_rng(1), {}
    for spec in model:
        fan_in = max(1, spec.size // max(1, spec.shape[0] if spec.shape else 1))
        values = rng.standard_normal(spec.shape) / np.sqrt(fan_in)
        found[spec.name] = (np.ones(spec.shape) if spec.kind == TensorKind.BUFFER else values).astype(spec.dtype)
    return found


def compile_network(name: str, path: Path, batch_size: int) -> None:
    from edgefl.tasks.compiled.artefact import encode_artefact  # noqa: PLC0415 with torch
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 likewise

    compiled, report = compile_task(TASKS[name](), name=name, batch_size=batch_size)
    path.write_bytes(encode_artefact(compiled))
    facts = {
        "gradient_error": max(report.check.median.values()),
        "worst_error": max(report.check.worst.values()),
        "nodes": report.num_nodes,
        "file_kb": path.stat().st_size / 1e3,
        "mflop": compiled.manifest.flops / 1e6,
        "estimated_mb": compiled.manifest.peak_bytes / 1e6,
    }
    print(json.dumps(facts))


def _read_pss() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as a table of Markdown."""
    lines = [
        "| network | threads | graph, ms | torch, ms | speed | graph, MB | torch, MB | compile, s | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["speed_range"]
        lines.append(
            f"| {row['network']} | {row['threads']} | {row['graph_ms']:.2f} | {row['torch_ms']:.2f} | "
            f"{row['speed']:.2f} ({low:.2f} to {high:.2f}) | {row['graph_mb']:.0f} | {row['torch_mb']:.0f} | "
            f"{row['compile_s']:.0f} | {row['gradient_error']:.0e}, {row['worst_error']:.0e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
