"""Writes pictures of Fashion-MNIST as class folders: five classes in `data/old`, the other five in `data/new`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from edgefl.tasks.datasets.array_files import read_image_set
from edgefl.tasks.images import FASHION_LABELS

PER_CLASS = 400


def main() -> None:
    pictures = read_image_set(Path(os.environ["EDGEFL_DATA"], "fashion-mnist"), "fashion-mnist", "train")
    for number, label in enumerate(FASHION_LABELS):
        folder = Path("data", "old" if number < len(FASHION_LABELS) // 2 else "new", label)
        folder.mkdir(parents=True, exist_ok=True)
        for row in np.flatnonzero(pictures.targets == number)[:PER_CLASS]:
            Image.fromarray(pictures.inputs[row]).save(folder / f"{row}.png")


if __name__ == "__main__":
    main()
