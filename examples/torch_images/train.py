"""Simulates four boards with cameras in virtual time, with real training, and tests on pictures in other light."""

from __future__ import annotations

from pathlib import Path

from shapes import Shapes

import edgefl
from edgefl.storage.checkpoints import load_model_file


def main() -> None:
    cameras = sorted(Path("data").glob("camera-*.npz"))
    result = edgefl.simulate("run.toml", devices=cameras, root="history", allow_modules=["shapes"])
    learner = Shapes().learner(threads=1)
    learner.load(load_model_file(result.model))
    _, accuracy = learner.evaluate(Shapes().read("data/test.npz"))
    print(result)
    print(f"accuracy {accuracy:.3f} on pictures of a camera that no board has")


if __name__ == "__main__":
    main()
