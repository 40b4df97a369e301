"""Deals scikit-learn's samples of breast tissue: benign ones to train on, and others and malignant ones to test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

BENIGN = 1


def main() -> None:
    inputs, classes = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(7)
    benign, malignant = rng.permutation(inputs[classes == BENIGN]), inputs[classes != BENIGN]
    names = ",".join(f"m{column}" for column in range(inputs.shape[1]))
    Path("data").mkdir(exist_ok=True)
    for name, rows in {"benign": benign[:300], "new": benign[300:], "malignant": malignant}.items():
        np.savetxt(f"data/{name}.csv", rows, "%.6g", ",", header=names, comments="")


if __name__ == "__main__":
    main()
