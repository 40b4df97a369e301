"""Draws pictures of discs, squares and crosses: `data/camera-1.npz` to `data/camera-4.npz`, and `data/test.npz`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from shapes import LABELS, SIDE


def picture(rng: np.random.Generator, label: int, light: float) -> np.ndarray:
    """Returns [16, 16] bytes: one shape at a random place and of a random size, under noise."""
    row, column, radius = rng.uniform(5.0, 10.0), rng.uniform(5.0, 10.0), rng.uniform(2.5, 4.5)
    y, x = np.abs(np.mgrid[0:SIDE, 0:SIDE] - np.array([row, column])[:, None, None])
    inside = {
        "disc": y**2 + x**2 < radius**2,
        "square": np.maximum(y, x) < radius * 0.85,
        "cross": (np.minimum(y, x) < 1.0) & (np.maximum(y, x) < radius),
    }[LABELS[label]]
    values = 40.0 + light * inside + rng.normal(0.0, 15.0, (SIDE, SIDE))
    return np.clip(values, 0, 255).astype(np.uint8)


def main() -> None:
    rng = np.random.default_rng(7)
    Path("data").mkdir(exist_ok=True)
    lights = {"camera-1": 90.0, "camera-2": 120.0, "camera-3": 150.0, "camera-4": 180.0, "test": 135.0}
    for name, light in lights.items():
        labels = rng.integers(0, len(LABELS), 300)
        np.savez(
            Path("data") / f"{name}.npz",
            inputs=np.stack([picture(rng, label, light) for label in labels]), labels=labels,
        )  # fmt: skip


if __name__ == "__main__":
    main()
