"""Runs the three jobs, each on a coordinator and devices that are processes of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import edgefl

TEXTS = ("the rain in the garden", "the sun in spring", "rain and sun", "a garden in the rain")


def main() -> None:
    hello = edgefl.run("hello_world.toml", devices=2, root="fleet/hello", allow_modules=["three_jobs"])
    print(hello.result.read_text(encoding="utf-8"), end="")

    product = edgefl.run("matrix_product.toml", devices=4, root="fleet/product", allow_modules=["three_jobs"])
    left, right = (np.random.default_rng(seed).standard_normal((200, 200)) for seed in (1, 2))
    difference = np.abs(np.load(product.result) - left @ right).max()
    print(f"largest difference to the product in one piece: {difference:.1e}")

    folders = [Path(f"texts/board-{number}") for number in range(1, 5)]
    for folder, text in zip(folders, TEXTS, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "diary.txt").write_text(text, encoding="utf-8")
    count = edgefl.run("word_count.toml", devices=folders, root="fleet/words", allow_modules=["three_jobs"])
    counts = json.loads(count.result.read_bytes())
    print(f"rain {counts['rain']} times, garden {counts['garden']} times, on {len(folders)} boards")


if __name__ == "__main__":
    main()
