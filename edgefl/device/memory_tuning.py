"""Memory tuning of a device's process: a single heap for all threads, and stubs for unused imports."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's `malloc.h`: how much may be free at the heap's end before it is given back, from which size on a block is
a mapping of its own, and how many heaps threads are spread over (otherwise eight for each core)."""
TRIM_THRESHOLD_BYTES = 16 << 20
MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's maximum, which it reaches by itself as blocks of that size are freed."""

BLOCKED_MODULES = ("httpx._main",)
"""Optional imports of libraries: command lines and terminal output."""
STUBBED_MODULES = (
    "flwr.client", "flwr.clientapp", "flwr.server", "flwr.serverapp", "flwr.simulation", "flwr.supercore.grpc",
)  # fmt: skip
"""Unused imports of `flwr`: a device runs no Flower app and no server, and uses the Fleet API over HTTP, not gRPC."""


class _StubModule(ModuleType):
    """Stub module: imports of it and its names succeed, their use raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def raise_unavailable(*_: object, **__: object) -> None:
            raise RuntimeError(f"a device's process does without {self.__name__}, so there is no {name}")

        return raise_unavailable


def reduce_memory() -> None:
    """Reduces this process's memory; call before heavy imports and threads.

    A device's threads mostly wait, so that heaps of their own, each with freed memory, are of no use. Memory freed by
    a round is kept for the next one, up to a limit: with a model of 1 MB the kernel filled 5.7 MB of new pages with
    zeros in every round.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no such option
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)
        set_option(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
        set_option(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    for name in BLOCKED_MODULES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # None means: not to be imported
    for name in STUBBED_MODULES:
        sys.modules.setdefault(name, _StubModule(name))
