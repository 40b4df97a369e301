"""What a board is too small for: torch where there is little memory, all training in a 32-bit userland.

The figures are measured: a process that has imported torch 2.9 takes about 300 MB, one that trains in NumPy less
than 130 MB. They are asked for before a run, so that a board says why not instead of being killed in its middle.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.device.board.capabilities import probe
from edgefl.device.board.programs import no_program
from edgefl.device.board.vitals import memory_available_bytes
from edgefl.errors import EdgeflError, TaskError
from edgefl.tasks.backends import backends, needs_torch, numpy_models
from edgefl.tasks.registry import make_task
from edgefl.types import Json, Role, Scalar

TORCH_BYTES = 300_000_000
NUMPY_BYTES = 130_000_000
TORCH_BOARD_BYTES = 600_000_000
"""Less in all is too little for torch beside a system and an agent: a board of 512 MB shows its programs 430."""
BITS = 64
TAKES_PART = "it evaluates where it can and sends heartbeats"


def lacks(facts: Json) -> dict[str, str]:
    """Returns what this board cannot train with although it may be installed, and why: `numpy`, `torch`."""
    bits, memory = facts.get("userland_bits"), facts.get("memory_bytes")
    if bits is not None and bits < BITS:
        reason = (
            f"its userland has {bits} bits ({facts.get('architecture')}), for which there are no wheels of numpy, "
            f"torch and onnxruntime; {TAKES_PART} only; install a 64-bit system to train"
        )
        return {"numpy": reason, "torch": reason}
    if memory is not None and memory < TORCH_BOARD_BYTES:
        return {
            "torch": f"its {_mb(memory)} of memory are too few for torch, which takes {_mb(TORCH_BYTES)} by itself"
        }
    return {}


def usable_backends(facts: Json) -> list[str]:
    """Returns what is installed here and fits, smallest first."""
    return [name for name in backends() if name not in lacks(facts)]


def paths(tasks: Sequence[str], facts: Json) -> dict[str, str]:
    """Returns for each task the smallest path that fits this board: `numpy`, `torch`, or models that take less."""
    usable = usable_backends(facts)
    return {name: _path(name, usable) for name in tasks}


def other_models(name: str) -> str:
    """Returns what a task may be trained with in NumPy, for the end of a sentence; empty where it needs torch."""
    models = numpy_models(name)
    return f"model {', '.join(models[:-1])} or {models[-1]}" if models else ""


def role_that_fits(role: str, facts: Json) -> tuple[str, str]:
    """Returns the role that a board can have, and why it is not the one that was wished for; empty when it is."""
    reason = lacks(facts).get("numpy", "")
    if role == Role.TRAINER and reason:
        return str(Role.EVALUATOR), reason
    return role, ""


def check_fits(name: str, options: Mapping[str, Scalar], root: Path = Path("/")) -> None:
    """Checks before anything heavy is imported that this board can train a task.

    Raises:
        TaskError: it cannot, in words that say what would fit.
        ConfigError: the task does not have such options.
    """
    facts = probe(root, run=no_program)
    torch = needs_torch(make_task(name, options))
    reason = lacks(facts).get("torch" if torch else "numpy", "") or (_full(root) if torch else "")
    if reason:
        small = other_models(name) if torch and "numpy" in usable_backends(facts) else ""
        raise TaskError(f"{_what(name, options)}: {reason}" + (f"; with {small} it trains in NumPy" if small else ""))


def _full(root: Path) -> str:
    """Returns why torch would not fit now; once it is loaded its room is taken."""
    free = memory_available_bytes(root)
    if "torch" in sys.modules or free is None or free >= TORCH_BYTES:
        return ""
    return f"it has {_mb(free)} of memory free, and torch takes {_mb(TORCH_BYTES)} by itself"


def _what(name: str, options: Mapping[str, Any]) -> str:
    model = options.get("model")
    return f"cannot train {name}" + (f" with model {model}" if model else "")


def _path(name: str, usable: Sequence[str]) -> str:
    try:
        torch = needs_torch(make_task(name))
    except EdgeflError:  # the agent says what is wrong with a task that it cannot make
        return "unknown"
    if not torch:
        return "numpy" if "numpy" in usable else "none"
    if "torch" in usable:
        return "torch"
    small = other_models(name) if "numpy" in usable else ""
    return f"numpy, with {small}" if small else "none"


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
