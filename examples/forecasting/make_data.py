"""Writes the tilt of MotionSense's phones in moving people's pockets: a CSV file a recording, 25 rows a second."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

LAST_MOVING, FIRST_TEST_TRIAL = 3, 11
ROWS_OF_50_HZ = 2


def main() -> None:
    with np.load(Path(os.environ["EDGEFL_DATA"], "motionsense", "motionsense.npz")) as data:
        tilt, lengths = data["q"][:3] * float(data["scale"]), data["length"]
        recordings = list(zip(data["subject"], data["activity"], data["trial"], strict=True))
    for (person, activity, trial), values in zip(recordings, np.split(tilt, np.cumsum(lengths)[:-1], 1), strict=True):
        if activity > LAST_MOVING:
            continue
        num_rows = values.shape[1] // ROWS_OF_50_HZ
        rows = values[:, : num_rows * ROWS_OF_50_HZ].reshape(3, num_rows, ROWS_OF_50_HZ).mean(axis=2).T
        folder = Path("data", "test" if trial >= FIRST_TEST_TRIAL else "train")
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{x:.4f},{y:.4f},{z:.4f},p{person}" for x, y, z in rows]
        (folder / f"p{person}-{trial}.csv").write_text("\n".join(["x,y,z,person", *lines, ""]))


if __name__ == "__main__":
    main()
