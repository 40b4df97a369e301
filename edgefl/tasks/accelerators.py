"""What a learner runs on: torch, where it is installed, and the names of accelerators."""

from __future__ import annotations

import re
from typing import Any

from edgefl.errors import TaskError, install_line

_KNOWN = re.compile(r"(cpu|cuda(:\d+)?)\Z")


def checked_accelerator(name: str) -> str:
    """Returns `name` if it is `cpu`, `cuda` or `cuda:N`.

    Raises:
        TaskError: it is something else.
    """
    if not _KNOWN.match(name):
        raise TaskError(f"accelerator must be cpu, cuda or cuda:N, got {name!r}")
    return name


def import_torch() -> Any:
    """Returns torch.

    Raises:
        TaskError: it is not installed.
    """
    try:
        import torch  # noqa: PLC0415 seconds to import, and absent on small boards
    except ImportError as error:
        raise TaskError(
            f"this task trains with torch, which cannot be imported ({error}); "
            f"install it with: {install_line('torch')}"
        ) from None
    return torch
