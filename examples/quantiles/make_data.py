"""Writes scikit-learn's 442 diabetes patients as one CSV file: ten measurements, and the progression a year later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes


def main() -> None:
    data = load_diabetes(scaled=False)
    rows = np.column_stack([data.data, data.target])
    Path("data").mkdir(exist_ok=True)
    np.savetxt(
        "data/patients.csv", rows, "%.6g", ",", header=",".join([*data.feature_names, "progression"]), comments=""
    )


if __name__ == "__main__":
    main()
