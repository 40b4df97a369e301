"""What a model and an update weigh on their way, beside the model's own bytes; counted by a real fleet."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

from edgefl.compression.codec_benchmark import compute_expected_bytes
from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet
from edgefl.tasks.registry import make_task
from harness.cost_rows import Row

MODEL_BYTES, NUM_ROUNDS = 1_000_000, 20
MOST_MORE = 0.002
SPECS = ("dense|fp16", "topk:0.01|int8|rice")


def rows() -> list[Row]:
    """Returns the bytes of messages, all that HTTP carries of a message and its pieces, and of codecs alone."""
    up, down = _counted()
    shapes = make_task("mnist", {}).shapes()
    own = sum(spec.nbytes for spec in shapes)
    return [
        Row(part="wire", what=f"a dense update of {MODEL_BYTES:,} bytes, messages and all, beyond its own bytes",
            value=up / MODEL_BYTES - 1, unit="of them", aim=MOST_MORE),
        Row(part="wire", what="the model on its way down, likewise", value=down / MODEL_BYTES - 1, unit="of them",
            aim=MOST_MORE),
        Row(part="wire", what="the codec `dense` alone, MNIST CNN, beyond the model's own bytes",
            value=compute_expected_bytes("dense", shapes) / own - 1, unit="of them", aim=MOST_MORE),
        *(Row(part="wire", what=f"`{spec}` of the MNIST CNN, the model's own bytes to it",
              value=own / compute_expected_bytes(spec, shapes), unit="times less") for spec in SPECS),
    ]  # fmt: skip


def _counted() -> tuple[float, float]:
    """Returns the median bytes up and down of an update, without the first round, from the history of a run."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "no-data").mkdir()
        config = parse_run(
            {
                "run": {"task": "noop", "rounds": NUM_ROUNDS, "evaluate_on": "none"},
                "task": {"size_bytes": MODEL_BYTES},
                "devices": {"min": 1},
            }
        )
        device = LocalDeviceSpec(name="device-1", shards={"noop": str(root / "no-data")})
        with LocalFleet(root=root / "fleet", devices=[device], broker="auto") as fleet:
            run_id = fleet.submit(config)
            fleet.wait_for_run(run_id)
            with sqlite3.connect(f"file:{fleet.database}?mode=ro", uri=True) as store:
                found = store.execute(
                    "SELECT bytes_up, bytes_down FROM updates WHERE run_id = ? AND round > 1 ORDER BY bytes_up",
                    (run_id,),
                ).fetchall()
            store.close()
    middle = len(found) // 2
    return sorted(up for up, _ in found)[middle], sorted(down for _, down in found)[middle]
