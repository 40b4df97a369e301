"""Draws 700 scenes of 32x32 grey values with one to three ellipses and rectangles in each: `data/scenes.npz`."""

from pathlib import Path

import numpy as np
from boxes import CELL, MAX_OBJECTS, SIDE

rng = np.random.default_rng(7)


def draw_scene() -> tuple[np.ndarray, np.ndarray]:
    """Returns [32, 32] bytes, and [3, 5] numbers: class, centre x and y, width and height; class -1 for none."""
    scene, boxes = np.full((SIDE, SIDE), rng.uniform(30.0, 120.0)), np.full((MAX_OBJECTS, 5), -1.0)
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    for number in range(rng.integers(1, MAX_OBJECTS, endpoint=True)):
        label, (width, height), middle = rng.integers(2), rng.uniform(7, 14, 2), rng.uniform(7, SIDE - 7, 2)
        if (np.abs(boxes[:number, 1:3] - middle).max(axis=1) < 2 * CELL).any():
            continue  # two centres in neighbouring cells would be one
        across, down = np.abs(x - middle[0]) * 2 / width, np.abs(y - middle[1]) * 2 / height
        scene[(across**2 + down**2 if label == 0 else np.maximum(across, down)) < 1] = rng.uniform(140, 240)
        boxes[number] = label, *middle, width, height
    return np.clip(scene + rng.normal(0.0, 20.0, scene.shape), 0, 255).astype(np.uint8), boxes


scenes, boxes = zip(*(draw_scene() for _ in range(700)), strict=True)
Path("data").mkdir(exist_ok=True)
np.savez("data/scenes.npz", scenes=np.stack(scenes), boxes=np.stack(boxes).astype(np.float32))
