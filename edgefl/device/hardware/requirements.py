"""Training requirements, memory for torch and a 64-bit userland, and what a board therefore trains.

The figures are measured: a process that has imported torch 2.9 takes about 300 MB, one that trains in NumPy less
than 130 MB. They are checked before a run, so that a board reports the reason instead of being killed during it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import EdgeflError, TaskError
from edgefl.core.protocol import ONNX, TORCH, select_backend
from edgefl.core.types import Json, Role, Scalar, Task
from edgefl.device.hardware.board_reader import no_program
from edgefl.device.hardware.capabilities import probe
from edgefl.device.hardware.health import read_available_memory_bytes
from edgefl.system.atomic_files import make_private_directory
from edgefl.system.confinement import Confinement
from edgefl.tasks.compiled.plan import CompiledPlan
from edgefl.tasks.datasets.shards import get_metadata_path
from edgefl.tasks.job import Job
from edgefl.tasks.registry import CONFIGURED, is_torch_task, list_backends, list_numpy_models, make_task

TORCH_BYTES = 300_000_000
NUMPY_BYTES = 130_000_000
MIN_TORCH_BOARD_BYTES = 600_000_000
"""Minimum total memory for torch beside a system and an agent: a board of 512 MB has 430 MB available."""
MIN_CONFINED_BYTES = 512 * 1024 * 1024
"""Least limit of a confined process's own data, of which much is never used."""
CONFINED_FOLDER, TEMPORARY_FOLDER = "confined", "tmp"
"""In the state directory: what confined processes may write, by name."""
MIN_USERLAND_BITS = 64
EVALUATE_ONLY_NOTE = "it evaluates where it can and sends heartbeats"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTraits:
    """What a board must know of a task before it loads its data: backend, input shape, whether it is a job.

    A job is never trained, so its speed is not measured.
    """

    needs_torch: bool
    has_shape: bool
    is_job: bool = False


def read_task_traits(name: str) -> TaskTraits:
    """Returns the traits of TASK or TASK/MODEL; raises as `make_task`."""
    if name in CONFIGURED:  # its model stands in a run file; the usual one is in NumPy
        return TaskTraits(needs_torch=False, has_shape=False)
    task = make_measurable_task(name)
    return TaskTraits(
        needs_torch=is_torch_task(task),
        has_shape=getattr(task, "input_shape", None) is not None,
        is_job=isinstance(task, Job),
    )


def make_confinement(state_dir: Path, name: str, readable: Sequence[str], accelerator: str) -> Confinement:
    """Returns the confinement of a process that reads some files, such as a shard, and writes in a folder of its own.

    Args:
        state_dir: of the device, closed but for these.
        name: of the folder, which is made here.
        readable: with the card beside each.
        accelerator: cpu or cuda.
    """
    scratch, has_gpu = state_dir / CONFINED_FOLDER / name, accelerator != "cpu"
    shutil.rmtree(scratch / TEMPORARY_FOLDER, ignore_errors=True)
    for folder in (scratch, scratch / TEMPORARY_FOLDER):
        make_private_directory(folder)
    cards = [str(get_metadata_path(Path(path))) for path in readable if Path(path).name]
    return Confinement(
        secret=str(state_dir),
        readable=(*readable, *cards),
        writable=(str(scratch / TEMPORARY_FOLDER), str(scratch)),
        memory_bytes=None if has_gpu else max(read_available_memory_bytes() or 0, MIN_CONFINED_BYTES),
        has_gpu=has_gpu,
    )


def find_unsupported_backends(facts: Json) -> dict[str, str]:
    """Returns the backends (`numpy`, `onnx`, `torch`) that this board cannot train with, and why."""
    bits, memory = facts.get("userland_bits"), facts.get("memory_bytes")
    if bits is not None and bits < MIN_USERLAND_BITS:
        reason = (
            f"its userland has {bits} bits ({facts.get('architecture')}), for which there are no wheels of numpy, "
            f"torch and onnxruntime; {EVALUATE_ONLY_NOTE} only; install a 64-bit system to train"
        )
        return {"numpy": reason, "onnx": reason, "torch": reason}
    if memory is not None and memory < MIN_TORCH_BOARD_BYTES:
        return {
            "torch": f"its {_format_mb(memory)} of memory are too few for torch, "
            f"which takes {_format_mb(TORCH_BYTES)} by itself"
        }
    return {}


def list_usable_backends(facts: Json) -> list[str]:
    """Returns installed backends that fit, smallest first."""
    return [name for name in list_backends() if name not in find_unsupported_backends(facts)]


def select_training_paths(
    tasks: Sequence[str], facts: Json, read_traits: Callable[[str], TaskTraits] = read_task_traits
) -> dict[str, str]:
    """Returns for each task the smallest backend that fits this board, or the smaller models."""
    usable = list_usable_backends(facts)
    return {name: _select_training_path(name, usable, read_traits) for name in tasks}


def format_numpy_models(name: str) -> str:
    """Returns a task's NumPy models, as text for messages; empty where it needs torch."""
    models = list_numpy_models(name)
    return f"model {', '.join(models[:-1])} or {models[-1]}" if models else ""


def make_measurable_task(name: str) -> Task:
    """Returns the task of TASK or TASK/MODEL."""
    task, _, model = name.partition("/")
    return make_task(task, {"model": model} if model else {})


def should_run_graphs(plan: CompiledPlan | None, root: Path = Path("/")) -> bool:
    """Returns whether this board trains by a compiled task: it has no torch, or all boards do."""
    if plan is None:
        return False
    usable = list_usable_backends(probe(root, run=no_program))
    return select_backend(usable, plan.to_json(), needs_torch=True) == ONNX


def check_requirements(
    name: str, options: Mapping[str, Scalar], root: Path = Path("/"), *, compiled: CompiledPlan | None = None
) -> None:
    """Checks, before heavy imports, that this board can train a task, by its compiled form where there is one.

    Raises:
        TaskError: it cannot; the message suggests an alternative.
        ConfigError: the task does not have such options.
    """
    facts = probe(root, run=no_program)
    needs_torch = is_torch_task(make_task(name, options))
    if needs_torch and should_run_graphs(compiled, root):
        return
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


def _select_training_path(name: str, usable: Sequence[str], read_traits: Callable[[str], TaskTraits]) -> str:
    try:
        needs_torch = read_traits(name).needs_torch
    except EdgeflError:  # the agent reports the error of a task that it cannot make
        return "unknown"
    if not needs_torch:
        return "numpy" if "numpy" in usable else "none"
    if "torch" in usable:
        return "torch"
    numpy_models = format_numpy_models(name) if "numpy" in usable else ""
    small = f"numpy, with {numpy_models}" if numpy_models else "none"
    if ONNX not in usable:
        return small
    return f"onnx, once compiled, or {small}" if numpy_models else "onnx, once compiled"


def _format_mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def get_training_facts(
    role: str,
    tasks: Iterable[str],
    board_facts: Json | None = None,
    read_traits: Callable[[str], TaskTraits] = read_task_traits,
) -> Json:
    """Returns the training part of the board's capabilities.

    That is `backends`, `trains`, where that is false `trains_reason`, `backend_reasons` of those that do not fit this
    board, and in `paths` the smallest backend for each task here.

    Args:
        role: of the enrolment.
        tasks: with shards on the board, evaluated with their default options.
        board_facts: result of `capabilities.probe`; its memory and word size are used.
        read_traits: returns what a task needs.
    """
    facts, names = board_facts or {}, sorted(tasks)
    usable, missing = list_usable_backends(facts), find_unsupported_backends(facts)
    reason = _find_training_blocker(role, names, usable, missing, read_traits)
    training_facts: Json = {"backends": usable, "trains": reason is None}
    if reason is not None:
        training_facts["trains_reason"] = reason
    if missing:
        training_facts["backend_reasons"] = missing
    return {**training_facts, "paths": select_training_paths(names, facts, read_traits)} if names else training_facts


def _find_training_blocker(
    role: str,
    names: list[str],
    usable: list[str],
    missing: dict[str, str],
    read_traits: Callable[[str], TaskTraits],
) -> str | None:
    if role == Role.EVALUATOR:
        return "its role is evaluator"
    if "numpy" in missing:
        return missing["numpy"]
    if (
        not names
        or not {ONNX, TORCH}.isdisjoint(usable)
        or not all(_needs_torch(name, read_traits) for name in names)
    ):
        return None
    torch_reason = missing.get("torch", "torch is not installed")
    numpy_models = {name: format_numpy_models(name) for name in names}
    alternatives = "".join(
        f"; it trains {name} with {models} in NumPy" for name, models in numpy_models.items() if models
    )
    return f"{torch_reason}, and {', '.join(names)} needs it; it evaluates and runs deployed models{alternatives}"


def _needs_torch(task: str, read_traits: Callable[[str], TaskTraits]) -> bool:
    try:
        return read_traits(task).needs_torch
    except EdgeflError:  # the agent says what is wrong with a shard that it cannot use
        return False
