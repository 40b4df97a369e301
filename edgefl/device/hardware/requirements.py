"""Training requirements: memory for torch, a 64-bit userland for any training.

The figures are measured: a process that has imported torch 2.9 takes about 300 MB, one that trains in NumPy less
than 130 MB. They are checked before a run, so that a board reports the reason instead of being killed during it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.core.errors import EdgeflError, TaskError
from edgefl.core.types import Json, Role, Scalar
from edgefl.device.hardware.capabilities import probe
from edgefl.device.hardware.health import read_available_memory_bytes
from edgefl.device.hardware.programs import no_program
from edgefl.tasks.backends import is_torch_task, list_backends, list_numpy_models
from edgefl.tasks.registry import make_task

TORCH_BYTES = 300_000_000
NUMPY_BYTES = 130_000_000
MIN_TORCH_BOARD_BYTES = 600_000_000
"""Minimum total memory for torch beside a system and an agent: a board of 512 MB has 430 MB available."""
MIN_USERLAND_BITS = 64
EVALUATE_ONLY_NOTE = "it evaluates where it can and sends heartbeats"


def find_unsupported_backends(facts: Json) -> dict[str, str]:
    """Returns the backends (`numpy`, `torch`) that this board cannot train with, and why."""
    bits, memory = facts.get("userland_bits"), facts.get("memory_bytes")
    if bits is not None and bits < MIN_USERLAND_BITS:
        reason = (
            f"its userland has {bits} bits ({facts.get('architecture')}), for which there are no wheels of numpy, "
            f"torch and onnxruntime; {EVALUATE_ONLY_NOTE} only; install a 64-bit system to train"
        )
        return {"numpy": reason, "torch": reason}
    if memory is not None and memory < MIN_TORCH_BOARD_BYTES:
        return {
            "torch": f"its {_format_mb(memory)} of memory are too few for torch, "
            f"which takes {_format_mb(TORCH_BYTES)} by itself"
        }
    return {}


def list_usable_backends(facts: Json) -> list[str]:
    """Returns installed backends that fit, smallest first."""
    return [name for name in list_backends() if name not in find_unsupported_backends(facts)]


def select_training_paths(tasks: Sequence[str], facts: Json) -> dict[str, str]:
    """Returns for each task the smallest backend that fits this board, or the smaller models."""
    usable = list_usable_backends(facts)
    return {name: _select_training_path(name, usable) for name in tasks}


def format_numpy_models(name: str) -> str:
    """Returns a task's NumPy models, as text for messages; empty where it needs torch."""
    models = list_numpy_models(name)
    return f"model {', '.join(models[:-1])} or {models[-1]}" if models else ""


def select_role(role: str, facts: Json) -> tuple[str, str]:
    """Returns the supported role, and why it is not the requested one; empty when it is."""
    reason = find_unsupported_backends(facts).get("numpy", "")
    if role == Role.TRAINER and reason:
        return str(Role.EVALUATOR), reason
    return role, ""


def check_requirements(name: str, options: Mapping[str, Scalar], root: Path = Path("/")) -> None:
    """Checks, before heavy imports, that this board can train a task.

    Raises:
        TaskError: it cannot; the message suggests an alternative.
        ConfigError: the task does not have such options.
    """
    facts = probe(root, run=no_program)
    needs_torch = is_torch_task(make_task(name, options))
    reason = find_unsupported_backends(facts).get("torch" if needs_torch else "numpy", "") or (
        _find_torch_memory_shortage(root) if needs_torch else ""
    )
    if reason:
        numpy_models = format_numpy_models(name) if needs_torch and "numpy" in list_usable_backends(facts) else ""
        raise TaskError(
            f"{_format_failure(name, options)}: {reason}"
            + (f"; with {numpy_models} it trains in NumPy" if numpy_models else "")
        )


def _find_torch_memory_shortage(root: Path) -> str:
    """Returns why torch would not fit into free memory; empty once it is loaded."""
    free_bytes = read_available_memory_bytes(root)
    if "torch" in sys.modules or free_bytes is None or free_bytes >= TORCH_BYTES:
        return ""
    return f"it has {_format_mb(free_bytes)} of memory free, and torch takes {_format_mb(TORCH_BYTES)} by itself"


def _format_failure(name: str, options: Mapping[str, Any]) -> str:
    model = options.get("model")
    return f"cannot train {name}" + (f" with model {model}" if model else "")


def _select_training_path(name: str, usable: Sequence[str]) -> str:
    try:
        needs_torch = is_torch_task(make_task(name))
    except EdgeflError:  # the agent reports the error of a task that it cannot make
        return "unknown"
    if not needs_torch:
        return "numpy" if "numpy" in usable else "none"
    if "torch" in usable:
        return "torch"
    numpy_models = format_numpy_models(name) if "numpy" in usable else ""
    return f"numpy, with {numpy_models}" if numpy_models else "none"


def _format_mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
