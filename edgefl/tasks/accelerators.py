"""Names of accelerators that a learner may be asked to run on."""

from __future__ import annotations

import re

from edgefl.errors import TaskError

_KNOWN = re.compile(r"(cpu|cuda(:\d+)?)\Z")


def checked_accelerator(name: str) -> str:
    """Returns `name` if it is `cpu`, `cuda` or `cuda:N`.

    Raises:
        TaskError: it is something else.
    """
    if not _KNOWN.match(name):
        raise TaskError(f"accelerator must be cpu, cuda or cuda:N, got {name!r}")
    return name
