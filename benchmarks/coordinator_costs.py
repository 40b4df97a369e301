"""What the coordinator's own work costs, each figure beside a bound or a simpler way that is measured with it.

    python benchmarks/coordinator_costs.py [--parts fold,memory,adacomp,heartbeats,wire] [--repeats 9] [--json]

fold        an update of 11 million numbers into the round's weighted sum, beside `np.add`; and all of its way
memory      the most that rounds of FedAvg take, beside the model, however many devices answer
adacomp     updates of 200 devices of `adacomp`, MNIST CNN, decoded and applied, beside slower ways to count staleness
heartbeats  from MQTT payloads to rows in SQLite, beside one transaction each, and beside SQLite alone
wire        bytes of an update and of a model as they travel, beside the model's own

Times are CPU seconds, medians over turns in which every way has its turn; rates of heartbeats are by the clock. The
exit code is 2 when an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from harness import adacomp_costs, fold_costs, heartbeat_costs, options, wire_costs
from harness.cost_rows import Row

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ELEMENTS = 11_000_000
FLEETS = (2, 10, 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="fold,memory,robust,adacomp,heartbeats,wire")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--json", action="store_true")
    asked = options.parse(parser, repeats=1, elements=100_000)
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # read when NumPy is loaded, so we begin again
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **dict.fromkeys(ONE_THREAD, "1")})
    parts: dict[str, Callable[[], Sequence[Row]]] = {
        "fold": lambda: fold_costs.time_rows(asked.elements, asked.repeats),
        "memory": lambda: fold_costs.memory_rows(asked.elements, FLEETS),
        "robust": lambda: fold_costs.robust_rows(asked.elements),
        "adacomp": lambda: adacomp_costs.rows(asked.repeats),
        "heartbeats": heartbeat_costs.rows,
        "wire": wire_costs.rows,
    }
    names = asked.parts.split(",")
    if unknown := [name for name in names if name not in parts]:
        parser.error(f"there is no part {unknown[0]!r}, only {', '.join(parts)}")
    found: list[Row] = []
    for name in names:
        found += (rows := parts[name]())
        if not asked.json:
            print(name, *rows, sep="\n", flush=True)
    if asked.json:
        print(json.dumps({"v": 1, "rows": [row.as_json() for row in found]}))
    return 0 if asked.quick or all(row.is_met for row in found) else 2


if __name__ == "__main__":
    sys.exit(main())
