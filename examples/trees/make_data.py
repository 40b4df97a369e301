"""Deals scikit-learn's 569 samples of breast tissue: four fifths for the hospitals, the rest for testing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer


def main() -> None:
    inputs, classes = load_breast_cancer(return_X_y=True)
    rows = np.random.default_rng(7).permutation(np.column_stack([inputs, classes]))
    header = ",".join([*(f"m{column}" for column in range(inputs.shape[1])), "is_benign"])
    Path("data").mkdir(exist_ok=True)
    for name, part in {"samples": rows[:455], "test": rows[455:]}.items():
        np.savetxt(f"data/{name}.csv", part, "%.6g", ",", header=header, comments="")


if __name__ == "__main__":
    main()
