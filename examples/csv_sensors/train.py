"""Trains on a coordinator and four devices that are processes of this machine, then tests on a fifth greenhouse."""

from __future__ import annotations

from pathlib import Path

from greenhouse import Greenhouse

import edgefl
from edgefl.storage.checkpoints import load_model_file


def main() -> None:
    houses = sorted(Path("data").glob("house-*"))
    result = edgefl.run("run.toml", devices=houses, root="fleet", allow_modules=["greenhouse"])
    learner = Greenhouse().learner(threads=1)
    learner.load(load_model_file(result.model))
    _, accuracy = learner.evaluate(Greenhouse().read("data/test"))
    print(result)
    print(f"accuracy {accuracy:.3f} in a greenhouse that no board has seen")


if __name__ == "__main__":
    main()
