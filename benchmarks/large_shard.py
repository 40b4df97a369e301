"""A shard larger than a board's memory: what a device process takes that trains on it.

    python benchmarks/large_shard.py [--kinds npz packed csv parquet arrow table pictures] [--models mlp cnn]
        [--megabytes 2048] [--packed-megabytes 128] [--iterations 300] [--only-measure] [--json]

One real device process of a real fleet (TLS, Mosquitto) trains on noise: PSS of its whole process tree, looked at
every 50 ms from its start to the end of the run, first counts of its shard, split and evaluation on its test part
included; once with the model in NumPy and once in torch. Then, where that is below the bound, the same in a control
group that kills the process above it, page cache included. The kinds:

- `npz`: windows of `motionsense`, read in place. Beside it `packed`, fewer rows of the same and once more as
  `np.savez_compressed`, which are read whole.
- `csv`, `parquet` (float64), `arrow` (float64, as of `save_to_disk`): rows of `series`, cut into windows of 50.
- `table`: CSV rows of 64 columns, hence many examples; in NumPy alone.
- `pictures`: a folder for each class, of PNG files of 160x160 pixels in colour, read as 64x64.

The shards lie in a temporary folder that is removed afterwards: it needs room for the largest, and /var/tmp for half.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from harness import options
from harness.memory_limit import NoLimitError, limited
from harness.process_trees import Meter, adopt_orphans, end_descendants
from harness.round_report import machine
from PIL import Image
from pyarrow.parquet import ParquetWriter

from edgefl.core.config import parse_run
from edgefl.core.errors import EdgeflError, RunFailedError
from edgefl.core.types import Array
from edgefl.simulation.local_fleet import EDGEFL_COMMAND, TERMINAL_STATUSES, LocalDeviceSpec, LocalFleet
from edgefl.tasks.motionsense import CHANNELS, LABELS, WINDOW_SAMPLES

BOUNDS_MB = {"mlp": 150, "cnn": 330}
"""By model: the first is trained in NumPy, the second in torch."""
ROW_BYTES = 4 * CHANNELS * WINDOW_SAMPLES
BLOCK_ROWS = 4096
FILE_BYTES = 256_000_000
"""Of each file of rows, about."""
LOOK_S = 0.05
WINDOW, SERIES_COLUMNS, TABLE_COLUMNS = 50, 6, 64
PICTURE_SIDE, EXAMPLE_SIDE = 160, 64
KINDS = ("npz", "packed", "csv", "parquet", "arrow", "table", "pictures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A folder of files, and the task with its options that reads it."""

    folder: Path
    kind: str
    task: str
    options: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a device process took: bytes of PSS, and seconds from its start to the end of the run."""

    kind: str
    model: str
    shard_bytes: int
    peak_bytes: int
    bound_bytes: int
    seconds: float
    fits: bool | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2048, help="of the large shard [%(default)s]")
    parser.add_argument("--packed-megabytes", type=int, default=128, help="of that read whole [%(default)s]")
    parser.add_argument("--iterations", type=int, default=300, help="of the device [%(default)s]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="[all]")
    parser.add_argument("--models", nargs="+", choices=tuple(BOUNDS_MB), default=tuple(BOUNDS_MB))
    parser.add_argument("--only-measure", action="store_true", help="no second run in a control group")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    quick = {"kinds": ("npz", "packed"), "models": ("mlp",)}
    args = options.parse(parser, megabytes=48, packed_megabytes=40, iterations=20, **quick)
    adopt_orphans()
    rows: list[Row] = []
    try:
        for kind in args.kinds:
            models = [model for model in args.models if kind != "table" or model == "mlp"]
            if kind == "packed":  # beside as much that is not
                rows += measure_all("npz", args.packed_megabytes, models, args.iterations, has_limit=False)
            megabytes = args.packed_megabytes if kind == "packed" else args.megabytes
            has_limit = kind != "packed" and not args.only_measure
            rows += measure_all(kind, megabytes, models, args.iterations, has_limit=has_limit)
    except EdgeflError as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    finally:
        end_descendants()
    found = {"v": 1, **machine(), "rows": [asdict(row) for row in rows]}
    print(json.dumps(found) if args.json else render(rows))
    return 0


def measure_all(kind: str, megabytes: int, models: Sequence[str], iterations: int, *, has_limit: bool) -> list[Row]:
    """Returns a row of the table for each model; raises `EdgeflError` if a run fails."""
    with tempfile.TemporaryDirectory(prefix="edgefl-large-shard-") as folder:
        _say(f"write {megabytes} MB of {kind}")
        shard = write_shard(Path(folder), kind, megabytes * 2**20)
        return [measure(shard, model, iterations, has_limit=has_limit) for model in models]


def write_shard(folder: Path, kind: str, num_bytes: int) -> Shard:
    """Writes files of about that many bytes together, a block at a time."""
    if kind in {"npz", "packed"}:
        _write_windows(folder / "windows.npz", num_bytes // ROW_BYTES, is_packed=kind == "packed")
        return Shard(folder=folder, kind=kind, task="motionsense", options={})
    if kind == "pictures":
        _write_pictures(folder, num_bytes)
        options = {"labels": list(LABELS), "size": EXAMPLE_SIDE}
        return Shard(folder=folder, kind=kind, task="pictures", options=options)
    columns = [f"c{number}" for number in range(TABLE_COLUMNS if kind == "table" else SERIES_COLUMNS)]
    rng, written = np.random.default_rng(7), 0
    while written < num_bytes:
        path = folder / f"rows-{written:012}.{'csv' if kind == 'table' else kind}"
        blocks = _iterate_rows(rng, len(columns))
        write = _write_csv if path.suffix == ".csv" else _write_arrow
        write(path, columns, blocks, min(FILE_BYTES, num_bytes - written))
        written += path.stat().st_size
    task = {"columns": columns, "target": "label", "labels": list(LABELS)}
    if kind == "table":
        return Shard(folder=folder, kind=kind, task="table", options=task)
    return Shard(folder=folder, kind=kind, task="series", options={**task, "window": WINDOW})


def _write_windows(path: Path, num_rows: int, *, is_packed: bool) -> None:
    rng = np.random.default_rng(7)
    labels = rng.integers(0, len(LABELS), num_rows)
    method = zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method, compresslevel=1) as archive:
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


def _write_pictures(folder: Path, num_bytes: int) -> None:
    """Writes noise, hence files of about as many bytes as pixels have; the classes in turn."""
    rng, written, count = np.random.default_rng(7), 0, 0
    for label in LABELS:
        (folder / label).mkdir()
    while written < num_bytes:
        path = folder / LABELS[count % len(LABELS)] / f"{count:07}.png"
        pixels = rng.integers(0, 256, (PICTURE_SIDE, PICTURE_SIDE, 3), np.uint8)
        Image.fromarray(pixels).save(path, compress_level=0)
        written, count = written + path.stat().st_size, count + 1


def _iterate_rows(rng: np.random.Generator, num_columns: int) -> Iterator[tuple[Array, Array]]:
    """Yields values [n, columns] and labels [n], the same label for as many rows as a window has."""
    while True:
        labels = np.repeat(rng.integers(0, len(LABELS), BLOCK_ROWS // WINDOW), WINDOW)
        yield rng.standard_normal((len(labels), num_columns)) + labels[:, None], labels


def _write_csv(path: Path, columns: Sequence[str], blocks: Iterator[tuple[Array, Array]], num_bytes: int) -> None:
    form = ",".join(["%.6f"] * len(columns)) + ",%d\n"
    with path.open("w") as file:
        file.write(",".join([*columns, "label"]) + "\n")
        while file.tell() < num_bytes:
            values, labels = next(blocks)
            rows = np.column_stack([values, labels])
            file.write(form * len(rows) % tuple(rows.ravel().tolist()))


def _write_arrow(path: Path, columns: Sequence[str], blocks: Iterator[tuple[Array, Array]], num_bytes: int) -> None:
    """Writes Parquet, or a stream of Arrow as `save_to_disk` does; groups of so many rows as pandas writes."""
    schema = pa.schema([*((name, pa.float64()) for name in columns), ("label", pa.int64())])
    with path.open("wb") as file:
        is_parquet = path.suffix == ".parquet"
        make = ParquetWriter if is_parquet else pa.ipc.new_stream
        with make(file, schema) as writer:
            while file.tell() < num_bytes:
                parts = [next(blocks) for _ in range(2**18 // BLOCK_ROWS if is_parquet else 1)]
                values, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
                writer.write_table(pa.table([*values.T, labels], schema=schema))


def measure(shard: Shard, model: str, iterations: int, *, has_limit: bool) -> Row:
    """Returns a row of the table; raises `EdgeflError` if the run fails."""
    _say(f"{model} on {shard.kind}")
    peak_bytes, seconds = run_device(shard, model, iterations)
    bound_bytes = BOUNDS_MB[model] * 1_000_000
    _say(f"{peak_bytes / 1e6:.0f} MB, {seconds:.0f} s")
    fits = None
    if has_limit:
        fits = peak_bytes <= bound_bytes and lives_within(shard, model, iterations, bound_bytes)
    return Row(
        kind=shard.kind,
        model=model,
        shard_bytes=shard.num_bytes,
        peak_bytes=peak_bytes,
        bound_bytes=bound_bytes,
        seconds=seconds,
        fits=fits,
    )


def run_device(shard: Shard, model: str, iterations: int, prefix: Sequence[str] = ()) -> tuple[int, float]:
    """Returns the highest PSS of a device's process tree, and its seconds, from its start to the end of a run."""
    run = {"task": shard.task, "rounds": 1, "evaluate_on": "devices"}
    steps = {"name": "fedavg", "learning_rate": 0.01, "batch_size": 32, "iterations": iterations}
    task = {**shard.options, "model": model}
    config = parse_run({"run": run, "task": task, "strategy": steps, "devices": {"min": 1}})
    shards = {shard.task: str(shard.folder)}
    device = LocalDeviceSpec(name="device-1", shards=shards, program=(*prefix, *EDGEFL_COMMAND))
    with tempfile.TemporaryDirectory(prefix="edgefl-large-shard-fleet-") as root:
        started_at = time.time()
        with (
            LocalFleet(root=Path(root) / "fleet", devices=[device]) as fleet,
            Meter({device.name: fleet.processes[device.name].pid}, interval_s=LOOK_S) as meter,
        ):
            run_id = fleet.submit(config)
            while fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["status"] not in TERMINAL_STATUSES:
                if fleet.processes[device.name].poll() is not None:
                    raise RunFailedError(f"{device.name} ended: {fleet.read_log_tail(device.name)}")
                time.sleep(LOOK_S)
            fleet.wait_for_run(run_id)
            ended_at = time.time()
    return meter.cost(device.name, 0.0, ended_at).peak_bytes, ended_at - started_at


def lives_within(shard: Shard, model: str, iterations: int, bound_bytes: int) -> bool | None:
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
    lines = [f"{'kind':9}{'model':7}{'shard':>9}{'peak PSS':>10}{'bound':>8}{'time':>8}  lives within"]
    for row in rows:
        fits = {None: "", True: "yes", False: "no"}[row.fits]
        lines.append(
            f"{row.kind:9}{row.model:7}{row.shard_bytes / 1e6:6.0f} MB"
            f"{row.peak_bytes / 1e6:7.0f} MB{row.bound_bytes / 1e6:5.0f} MB{row.seconds:6.0f} s  {fits}"
        )
    largest = {(row.kind, row.model): row for row in sorted(rows, key=lambda row: row.shard_bytes)}
    for model in dict.fromkeys(row.model for row in rows if row.kind == "packed"):
        packed, in_file = largest["packed", model], largest["npz", model]
        lines.append(
            f"{model}: {packed.peak_bytes / in_file.peak_bytes:.1f} times the memory for "
            f"{packed.shard_bytes / 1e6:.0f} MB read whole as for {in_file.shard_bytes / 1e6:.0f} MB in their file"
        )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
