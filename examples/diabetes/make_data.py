"""Deals scikit-learn's 442 patients: three quarters to the clinics in `data/clinics`, the rest to `data/test`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes


def main() -> None:
    inputs, progression = load_diabetes(return_X_y=True)
    rows = np.random.default_rng(7).permutation(np.column_stack([inputs, progression]))
    parts = dict(zip(["clinics/1", "clinics/2", "clinics/3", "test"], np.array_split(rows, 4), strict=True))
    for name, part in parts.items():
        folder = Path("data") / name
        folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(folder / "patients.csv", part, "%.6f", delimiter=",")


if __name__ == "__main__":
    main()
