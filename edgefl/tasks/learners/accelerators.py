"""Backend of a learner: torch, where installed, and names of accelerators."""

from __future__ import annotations

import re
from typing import Any

from edgefl.core.errors import TaskError, format_install_command

_ACCELERATOR_PATTERN = re.compile(r"(cpu|cuda(:\d+)?)\Z")


def validate_accelerator(name: str) -> str:
    """Returns `name` if it is `cpu`, `cuda` or `cuda:N`.

    Raises:
        TaskError: it is something else.
    """
    if not _ACCELERATOR_PATTERN.match(name):
        raise TaskError(f"accelerator must be cpu, cuda or cuda:N, got {name!r}")
    return name


def import_torch() -> Any:
    """Returns torch.

    Raises:
        TaskError: it is not installed.
    """
    try:
        import torch  # noqa: PLC0415 seconds to import, and absent on small devices
    except ImportError as error:
        raise TaskError(
            f"this task trains with torch, which cannot be imported ({error}); "
            f"install it with: {format_install_command('torch')}"
        ) from None
    return torch
