"""What selecting and encoding the largest hundredth costs, beside `torch.topk`, which selects alone.

    python benchmarks/top_k_speed.py [--elements 11000000] [--repeats 15] [--json]

The numbers are drawn from a normal distribution and from one with heavy tails, as many as a ResNet-18 has. Ours takes
them to the body of a message (`topk:0.01|int8|rice`, places and values coded, checksum and all). Beside it are
`torch.topk` of the magnitudes, NumPy's partition of the magnitudes (what a simple codec would do), and a copy of the
magnitudes, the bound that memory sets. Times are CPU milliseconds of one thread, medians of interleaved repeats. The
exit code is 2 when ours takes more than half of torch's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
from harness import options

from edgefl.compression.codec import make_codec
from edgefl.core.types import Array, TensorSpec

SPEC, FRACTION = "topk:0.01|int8|rice", 0.01
AIM = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=11_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = options.parse(parser, elements=100_000, repeats=1)
    rng = np.random.default_rng(1)
    drawn = {
        "normal": rng.standard_normal(arguments.elements, dtype=np.float32),
        "heavy tails": rng.standard_t(3, arguments.elements).astype(np.float32),
    }
    results = {name: medians_ms(ways(values), arguments.repeats) for name, values in drawn.items()}
    ratios = {name: found["ours"] / found["torch.topk"] for name, found in results.items()}
    if arguments.json:
        print(json.dumps({"v": 1, "elements": arguments.elements, "ms": results, "ratios": ratios}))
    else:
        for name, found in results.items():
            print(f"{arguments.elements:,} numbers, {name}; to torch.topk {ratios[name]:.2f} (aim {AIM:g})")
            print("".join(f"  {way:22}{time_ms:9.1f} ms\n" for way, time_ms in found.items()), end="")
    return 0 if arguments.quick or max(ratios.values()) <= AIM else 2


def ways(values: Array) -> Mapping[str, Callable[[], object]]:
    import torch  # noqa: PLC0415 slow to import, after the arguments are known to be right

    torch.set_num_threads(1)
    tensor, count = torch.from_numpy(values), max(1, round(FRACTION * values.size))
    codec = make_codec(SPEC, (TensorSpec(name="w", shape=values.shape),))
    return {
        "ours": lambda: codec.encode({"w": values}, np.random.default_rng(1)),
        "torch.topk": lambda: torch.topk(tensor.abs(), count, sorted=False),
        "numpy.argpartition": lambda: np.argpartition(np.abs(values), values.size - count)[values.size - count :],
        "copy of the magnitudes": lambda: np.abs(values),
    }


def medians_ms(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            begun_s = time.process_time()
            run()
            times[name].append(1000 * (time.process_time() - begun_s))
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    sys.exit(main())
