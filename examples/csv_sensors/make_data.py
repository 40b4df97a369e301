"""Writes readings of four greenhouses, `data/house-1` to `data/house-4`, and of a fifth one for testing.

Each stands somewhere else: warmer or colder, with its own gardener's habits, so that what one board measures differs
from what the others do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from greenhouse import COLUMNS

DAYS, READINGS_A_DAY = 20, 48


def readings(rng: np.random.Generator, climate_c: float) -> np.ndarray:
    """Returns [n, 5] readings of one greenhouse in a climate of this mean temperature."""
    hour = np.tile(np.arange(READINGS_A_DAY) / 2.0, DAYS)
    sun = np.clip(np.sin((hour - 6.0) / 12.0 * np.pi), 0.0, None) * rng.uniform(0.5, 1.0, hour.size)
    outdoor = climate_c + 6.0 * sun + rng.normal(0.0, 2.0, hour.size)
    indoor = outdoor + 4.0 + 8.0 * sun + rng.normal(0.0, 1.0, hour.size)
    humidity = np.clip(80.0 - 1.5 * (indoor - 18.0) + rng.normal(0.0, 5.0, hour.size), 20.0, 100.0)
    # Gardeners open when it is hot or damp inside, and not when it is cold outside; now and then they forget.
    is_open = ((indoor > 25.0) | (humidity > 85.0)) & (outdoor > 8.0)
    is_open ^= rng.random(hour.size) < 0.02
    return np.column_stack([indoor, outdoor, humidity, 50_000.0 * sun, is_open])


def main() -> None:
    rng = np.random.default_rng(7)
    for name, climate_c in {"house-1": 6.0, "house-2": 12.0, "house-3": 16.0, "house-4": 22.0, "test": 14.0}.items():
        folder = Path("data") / name
        folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(
            folder / "readings.csv", readings(rng, climate_c), "%.2f", delimiter=",", header=",".join(COLUMNS),
            comments="",
        )  # fmt: skip


if __name__ == "__main__":
    main()
