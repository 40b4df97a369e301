"""Memory and time of a deployed model on a board: a process of its own for each, as `edgefl device infer` runs it.

    python benchmarks/device_inference.py [--task mnist] [--model cnn] [--rows 500] [--threads 1] [--json]

The model has its first weights: what it answers is worth nothing, what it costs is the same. `RSS` is the peak of the
process and `PSS` what it takes at the end (pages that are shared count in parts); `ms` is the median of one row at a
time. The rows `server` are `edgefl device serve`, asked over HTTP. int8 is dynamic quantisation of the weights.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import options

from edgefl.tasks.export.model_export import export_onnx
from edgefl.tasks.registry import make_task

CHILD = """
import json, sys, time
from pathlib import Path
import numpy as np
from edgefl.device.inference.onnx_model import OnnxModel

model = OnnxModel(Path(sys.argv[1]), threads=int(sys.argv[3]))
rows = np.load(sys.argv[2])
model.predict(rows[:10])
seconds = []
for number in range(len(rows)):
    began_s = time.perf_counter()
    model.predict(rows[number : number + 1])
    seconds.append(time.perf_counter() - began_s)
assert "torch" not in sys.modules
told = Path("/proc/self/status").read_text(), Path("/proc/self/smaps_rollup").read_text()
print(json.dumps({"seconds": seconds, "status": told[0], "smaps": told[1]}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    numbers: str
    where: str
    file_bytes: int
    rss_mib: float
    pss_mib: float
    ms_median: float
    ms_p95: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = options.parse(parser, rows=20)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), args.task, args.model, num_rows=args.rows, threads=args.threads)
    if args.json:
        sys.stdout.write(json.dumps({"v": 1, "rows": [asdict(row) for row in found]}) + "\n")
        return 0
    sys.stdout.write(f"{'numbers':9}{'where':9}{'file kB':>9}{'RSS MiB':>9}{'PSS MiB':>9}{'ms':>8}{'p95':>8}\n")
    for row in found:
        sys.stdout.write(
            f"{row.numbers:9}{row.where:9}{row.file_bytes / 1000:9.1f}{row.rss_mib:9.1f}{row.pss_mib:9.1f}"
            f"{row.ms_median:8.3f}{row.ms_p95:8.3f}\n"
        )
    return 0


def measured(folder: Path, task_name: str, model: str, *, num_rows: int, threads: int) -> list[Row]:
    """Returns one row for each kind of numbers and place."""
    options = {"model": model}
    task: Any = make_task(task_name, options)
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 256, (num_rows, *task.input_shape)).astype(np.float32)
    np.save(folder / "rows.npy", rows)
    found = []
    for numbers in ("float32", "int8"):
        path = folder / f"{numbers}.onnx"
        export_onnx(task, task.init(7), path, quantise=numbers == "int8", options=options)
        size = path.stat().st_size
        found += [
            _row(numbers, "process", size, *_in_a_process(path, folder / "rows.npy", threads)),
            _row(numbers, "server", size, *_over_http(path, rows, threads)),
        ]
    return found


def _row(numbers: str, where: str, size: int, seconds: Sequence[float], status: str, smaps: str) -> Row:
    return Row(
        numbers=numbers,
        where=where,
        file_bytes=size,
        rss_mib=_kib(status, "VmHWM") / 1024,
        pss_mib=_kib(smaps, "Pss") / 1024,
        ms_median=1000 * float(np.median(seconds)),
        ms_p95=1000 * float(np.quantile(seconds, 0.95)),
    )


def _kib(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _in_a_process(path: Path, rows: Path, threads: int) -> tuple[list[float], str, str]:
    command = [sys.executable, "-c", CHILD, str(path), str(rows), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment(threads))
    told = json.loads(done.stdout)
    return told["seconds"], told["status"], told["smaps"]


def _over_http(path: Path, rows: np.ndarray, threads: int) -> tuple[list[float], str, str]:
    command = [sys.executable, "-m", "edgefl.cli.main", "-q", "device", "serve", "--model", str(path), "--port", "0",
               "--threads", str(threads)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(threads)) as server:
        assert server.stdout is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(server.stdout.readline().rsplit(":", 1)[1]))
        bodies = [json.dumps({"rows": [row.tolist()]}) for row in rows]
        seconds = []
        for body in bodies:
            began_s = time.perf_counter()
            connection.request("POST", "/predict", body=body)
            assert connection.getresponse().read()
            seconds.append(time.perf_counter() - began_s)
        connection.close()
        status, smaps = (Path(f"/proc/{server.pid}/{name}").read_text() for name in ("status", "smaps_rollup"))
        server.terminate()
    return seconds[10:], status, smaps


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}


if __name__ == "__main__":
    sys.exit(main())
