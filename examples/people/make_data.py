"""Cuts MotionSense's recordings of walking into windows, with sex, age and height of who walks.

`data/walks.csv` has two walks of each person, `data/later.csv` a third; `data/known.csv` has all walks of 18 people,
`data/strangers.csv` those of the other six.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

from edgefl.tasks.motionsense import compute_window_features, split_windows

WALKING, LATER_TRIAL = 2, 15
LIMIT = 4.0
"""Most of a feature, in deviations of its channel: one fall of the phone would drown all steps."""


def read_people(path: Path) -> dict[int, list[int]]:
    """Returns number, sex (0 or 1), age in years and height in cm of each person."""
    with path.open(encoding="utf-8-sig") as file:
        return {
            int(row["code"]): [int(row["code"]), int(row["gender"]), int(row["age"]), int(row["height"])]
            for row in csv.DictReader(file)
        }


def main() -> None:
    folder = Path(os.environ["EDGEFL_DATA"], "motionsense")
    people, recordings = read_people(folder / "data_subjects_info.csv"), np.load(folder / "motionsense.npz")
    samples, stops, trials, rows = recordings["q"], np.cumsum(recordings["length"]), [], []
    for place in np.flatnonzero(recordings["activity"] == WALKING):
        part = samples[:, stops[place] - recordings["length"][place] : stops[place]] * recordings["scale"]
        features = compute_window_features(split_windows(part)[::2])  # no two windows share a sample
        known = np.tile(people[int(recordings["subject"][place])], (len(features), 1))
        rows.append(np.column_stack([known, np.clip(features, -LIMIT, LIMIT)]))
        trials.append(np.full(len(features), recordings["trial"][place]))
    table, is_later = np.concatenate(rows), np.concatenate(trials) == LATER_TRIAL
    is_stranger = table[:, 0] % 4 == 0
    chosen = {"walks": ~is_later, "later": is_later, "known": ~is_stranger, "strangers": is_stranger}
    names = ["person", "sex", "age", "height"]
    header = ",".join([*names, *(f"f{number}" for number in range(table.shape[1] - len(names)))])
    Path("data").mkdir(exist_ok=True)
    for name, is_in in chosen.items():
        np.savetxt(f"data/{name}.csv", table[is_in], "%.4g", ",", header=header, comments="")


if __name__ == "__main__":
    main()
