"""Writes scikit-learn's 1,797 handwritten digits as one CSV file: 64 pixels, and four things that hold or do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

LABELS = {
    "is_even": {0, 2, 4, 6, 8},
    "is_above_4": {5, 6, 7, 8, 9},
    "is_prime": {2, 3, 5, 7},
    "has_loop": {0, 6, 8, 9},
}


def main() -> None:
    pixels, digits = load_digits(return_X_y=True)
    labels = np.column_stack([np.isin(digits, [*chosen]) for chosen in LABELS.values()])
    header = ",".join([*(f"p{place}" for place in range(64)), *LABELS])
    Path("data").mkdir(exist_ok=True)
    np.savetxt("data/digits.csv", np.column_stack([pixels, labels]), "%d", ",", header=header, comments="")


if __name__ == "__main__":
    main()
