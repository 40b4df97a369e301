from __future__ import annotations

from edgefl.device.board.accelerator import chosen_accelerator
from edgefl.device.board.capabilities import probe


def test_a_wish_is_taken_as_it_is() -> None:
    assert chosen_accelerator("cpu") == "cpu"
    assert chosen_accelerator("cuda") == "cuda"


def test_without_a_gpu_auto_is_the_cpu() -> None:
    has_gpu = any(fact.get("kind") == "cuda" for fact in probe().get("accelerators", ()))
    assert has_gpu or chosen_accelerator("auto") == "cpu"
