"""Which of 30 architectures compile, in what time, and with what error of the gradient.

    python benchmarks/compiled_architectures.py [--batch-size 16] [--jobs 2] [--only GRU,U-Net] [--json]

Each is compiled in a process of its own with one thread, which is ended after `--timeout-s` of the clock. Those of
torchvision are left out where it is not installed (`pip install '.[torchvision]'`). Data is random.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import options
from harness.architectures import ARCHITECTURES, TORCHVISION

MAX_ERROR_CHARS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=1, help="compilations at once")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--only", default=",".join(ARCHITECTURES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parsed = options.parse(parser, batch_size=4, only="autoencoder,resnet18")
    if parsed.compile:
        print(json.dumps(compile_architecture(parsed.compile, parsed.batch_size)))
        return
    names = parsed.only.split(",")
    if unknown := sorted({*names} - {*ARCHITECTURES}):
        parser.error(f"unknown architectures {', '.join(unknown)}; known: {', '.join(ARCHITECTURES)}")
    with ThreadPoolExecutor(parsed.jobs) as pool:
        rows = list(pool.map(lambda name: measure(name, parsed.batch_size, parsed.timeout_s), names))
    print(json.dumps(rows, indent=2) if parsed.json else render(rows))


def measure(name: str, batch_size: int, timeout_s: float) -> dict[str, Any]:
    """Returns the facts of a compilation, or why there are none."""
    if name in TORCHVISION and importlib.util.find_spec("torchvision") is None:
        return {"network": name, "skipped": "torchvision is not installed"}
    command = [sys.executable, __file__, "--compile", name, "--batch-size", str(batch_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started_s = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, text=True, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"network": name, "failure": f"not compiled within {timeout_s:.0f} s"}
    seconds = time.perf_counter() - started_s
    if done.returncode:
        failure = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1][:MAX_ERROR_CHARS]
        return {"network": name, "compile_s": seconds, "failure": failure}
    return {"network": name, "compile_s": seconds, **json.loads(done.stdout)}


def compile_architecture(name: str, batch_size: int) -> dict[str, Any]:
    """Returns the size of the graph, and the errors of its gradients: of the median tensor, and of the worst one."""
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 with torch

    compiled, report = compile_task(ARCHITECTURES[name](), name=name, batch_size=batch_size)
    median, worst, own = (
        {key: value for key, value in errors.items() if key.startswith("grad:")}
        for errors in (report.check.median, report.check.worst, report.check.torch)
    )
    return {
        "processor_s": time.process_time(),
        "nodes": report.num_nodes,
        "parameters": report.parameters,
        "file_kb": (len(compiled.train) + len(compiled.evaluate)) / 1e3,
        "median_error": statistics.median(median.values()),
        "largest_median_error": max(median.values()),
        "worst_error": max(worst.values()),
        "torch_error": max(own.values()),
    }


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as a table of Markdown, and how many compile."""
    lines = [
        "| network | parameters | nodes | processor, clock | error: median tensor, worst tensor, one step | torch |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if (reason := row.get("failure") or row.get("skipped")) is not None:
            lines.append(f"| {row['network']} | {'not compiled' if 'failure' in row else 'left out'}: {reason} |||||")
            continue
        lines.append(
            f"| {row['network']} | {row['parameters']:,} | {row['nodes']:,} | "
            f"{row['processor_s']:.0f}, {row['compile_s']:.0f} s | "
            f"{row['median_error']:.0e}, {row['largest_median_error']:.0e}, {row['worst_error']:.0e} | "
            f"{row['torch_error']:.0e} |"
        )
    done = [row for row in rows if "skipped" not in row]
    failed = [row["network"] for row in done if "failure" in row]
    lines += ["", f"{len(done) - len(failed)} of {len(done)} compile" + (f"; not {', '.join(failed)}" * bool(failed))]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
