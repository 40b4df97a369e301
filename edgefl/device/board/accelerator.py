"""Which accelerator a board trains on."""

from __future__ import annotations

import importlib.util

from edgefl.device.board.capabilities import probe
from edgefl.device.board.programs import no_program


def chosen_accelerator(wish: str) -> str:
    """Returns cpu or cuda; `auto` takes the GPU when torch is installed and sees one."""
    if wish != "auto":
        return wish
    if importlib.util.find_spec("torch") is None or not _has_nvidia():
        return "cpu"
    import torch  # noqa: PLC0415 only where there is a GPU: it costs a small board 200 MB

    return "cuda" if torch.cuda.is_available() else "cpu"


def _has_nvidia() -> bool:
    return any(fact.get("kind") == "cuda" for fact in probe(run=no_program).get("accelerators", ()))
