"""Selection of the training accelerator."""

from __future__ import annotations

import importlib.util

from edgefl.device.hardware.capabilities import probe
from edgefl.device.hardware.programs import no_program


def select_accelerator(requested: str) -> str:
    """Returns cpu or cuda; `auto` selects the GPU when torch is installed and finds one."""
    if requested != "auto":
        return requested
    if importlib.util.find_spec("torch") is None or not _has_nvidia_gpu():
        return "cpu"
    import torch  # noqa: PLC0415 only where there is a GPU: it costs a small board 200 MB

    return "cuda" if torch.cuda.is_available() else "cpu"


def _has_nvidia_gpu() -> bool:
    return any(fact.get("kind") == "cuda" for fact in probe(run=no_program).get("accelerators", ()))
