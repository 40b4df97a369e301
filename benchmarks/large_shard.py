"""A shard larger than a board's memory: what a device process takes that trains on it.

    python benchmarks/large_shard.py [--megabytes 2048] [--packed-megabytes 128] [--iterations 300] [--json]

One real device process of a real fleet (TLS, Mosquitto) trains `motionsense` on windows of noise: PSS of its whole
process tree, looked at every 50 ms from its start to the end of the run, first counts of its shard, split and
evaluation on its test part included; once with the model in NumPy and once in torch. Beside it, in the same run, a
smaller shard of the same kind, and the same rows packed (`np.savez_compressed`), which are read whole. Then the same
in a control group that kills the process above the bound, page cache included.

The shards lie in a temporary folder that is removed afterwards: it needs room for all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from harness import options
from harness.memory_limit import NoLimitError, limited
from harness.process_trees import Meter, adopt_orphans, end_descendants
from harness.round_report import machine

from edgefl.core.config import parse_run
from edgefl.core.errors import EdgeflError
from edgefl.simulation.local_fleet import EDGEFL_COMMAND, LocalDeviceSpec, LocalFleet
from edgefl.tasks.motionsense import CHANNELS, LABELS, WINDOW_SAMPLES

BOUNDS_MB = {"mlp": 150, "cnn": 330}
"""By model: the first is trained in NumPy, the second in torch."""
ROW_BYTES = 4 * CHANNELS * WINDOW_SAMPLES
BLOCK_ROWS = 4096
LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a device process took: bytes of PSS, and seconds from its start to the end of the run."""

    model: str
    shard_bytes: int
    is_packed: bool
    peak_bytes: int
    bound_bytes: int
    seconds: float
    fits: bool | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2048, help="of the large shard [%(default)s]")
    parser.add_argument("--packed-megabytes", type=int, default=128, help="of that read whole [%(default)s]")
    parser.add_argument("--iterations", type=int, default=300, help="of the device [%(default)s]")
    parser.add_argument("--models", nargs="+", choices=tuple(BOUNDS_MB), default=tuple(BOUNDS_MB))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = options.parse(parser, megabytes=48, packed_megabytes=40, iterations=20, models=("mlp",))
    adopt_orphans()
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="edgefl-large-shard-") as folder:
            sizes = ((args.megabytes, False), (args.packed_megabytes, False), (args.packed_megabytes, True))
            for megabytes, is_packed in sizes:
                shard = write_shard(Path(folder), megabytes, is_packed=is_packed)
                is_largest = (megabytes, is_packed) == sizes[0]
                rows += [measure(shard, model, args.iterations, has_limit=is_largest) for model in args.models]
                (shard / "windows.npz").unlink()
    except EdgeflError as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    finally:
        end_descendants()
    found = {"v": 1, **machine(), "rows": [asdict(row) for row in rows]}
    print(json.dumps(found) if args.json else render(rows))
    return 0


def write_shard(folder: Path, megabytes: int, *, is_packed: bool) -> Path:
    """Writes a folder of one file of about that size, a block at a time; returns it."""
    _say(f"write {megabytes} MB{', packed' if is_packed else ''}")
    shard = folder / f"shard-{megabytes}-{is_packed}"
    shard.mkdir()
    rng, num_rows = np.random.default_rng(7), megabytes * 2**20 // ROW_BYTES
    labels = rng.integers(0, len(LABELS), num_rows)
    method = zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(shard / "windows.npz", "w", method, compresslevel=1) as archive:
        with archive.open("inputs.npy", "w", force_zip64=True) as file:
            shape = (num_rows, CHANNELS, WINDOW_SAMPLES)
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, num_rows, BLOCK_ROWS):
                of_block = labels[start : start + BLOCK_ROWS]
                noise = rng.standard_normal((len(of_block), *shape[1:]), np.float32)
                file.write((noise + of_block[:, None, None].astype(np.float32)).tobytes())
        with archive.open("labels.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, labels)
    return shard


def measure(shard: Path, model: str, iterations: int, *, has_limit: bool) -> Row:
    """Returns a row of the table; raises `EdgeflError` if the run fails."""
    _say(f"{model} on {shard.name}")
    peak_bytes, seconds = run_device(shard, model, iterations)
    bound_bytes = BOUNDS_MB[model] * 1_000_000
    return Row(
        model=model,
        shard_bytes=(shard / "windows.npz").stat().st_size,
        is_packed=shard.name.endswith("True"),
        peak_bytes=peak_bytes,
        bound_bytes=bound_bytes,
        seconds=seconds,
        fits=lives_within(shard, model, iterations, bound_bytes) if has_limit else None,
    )


def run_device(shard: Path, model: str, iterations: int, prefix: Sequence[str] = ()) -> tuple[int, float]:
    """Returns the highest PSS of a device's process tree, and its seconds, from its start to the end of a run."""
    run = {"task": "motionsense", "rounds": 1, "evaluate_on": "devices"}
    steps = {"name": "fedavg", "learning_rate": 0.01, "batch_size": 32, "iterations": iterations}
    config = parse_run({"run": run, "task": {"model": model}, "strategy": steps, "devices": {"min": 1}})
    device = LocalDeviceSpec(name="device-1", shards={"motionsense": str(shard)}, program=(*prefix, *EDGEFL_COMMAND))
    with tempfile.TemporaryDirectory(prefix="edgefl-large-shard-fleet-") as root:
        started_at = time.time()
        with (
            LocalFleet(root=Path(root) / "fleet", devices=[device]) as fleet,
            Meter({device.name: fleet.processes[device.name].pid}, interval_s=LOOK_S) as meter,
        ):
            fleet.wait_for_run(fleet.submit(config))
            ended_at = time.time()
    return meter.cost(device.name, 0.0, ended_at).peak_bytes, ended_at - started_at


def lives_within(shard: Path, model: str, iterations: int, bound_bytes: int) -> bool | None:
    """Returns whether the same work ends well in a control group of the bound; None where there are none."""
    try:
        with limited(bound_bytes) as group:
            try:
                run_device(shard, model, iterations, group.prefix)
            except EdgeflError as error:
                _say(f"{model}, {bound_bytes} bytes: {error}")
                return False
            return group.num_kills == 0
    except NoLimitError as error:
        _say(f"no limits here: {error}")
        return None


def render(rows: Sequence[Row]) -> str:
    """Returns the table, and by model how many times a packed shard of less takes the memory of a large one."""
    lines = [f"{'model':7}{'shard':>9}{'read':>10}{'peak PSS':>10}{'bound':>8}{'time':>8}  lives within"]
    for row in rows:
        fits = {None: "", True: "yes", False: "no"}[row.fits]
        lines.append(
            f"{row.model:7}{row.shard_bytes / 1e6:6.0f} MB{'whole' if row.is_packed else 'in place':>10}"
            f"{row.peak_bytes / 1e6:7.0f} MB{row.bound_bytes / 1e6:5.0f} MB{row.seconds:6.0f} s  {fits}"
        )
    for model in dict.fromkeys(row.model for row in rows):
        peaks = {(row.is_packed, row.shard_bytes): row.peak_bytes for row in rows if row.model == model}
        large, packed = peaks[max(key for key in peaks if not key[0])], peaks[max(key for key in peaks if key[0])]
        lines.append(f"{model}: {packed / large:.1f} times the memory for the small shard read whole")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
