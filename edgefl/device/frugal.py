"""What keeps a device's process small: one heap for all of its threads, and no imports of which nothing is used."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's `malloc.h`: how much may be free at the heap's end before it is given back, from which size on a block is
a mapping of its own, and how many heaps threads are spread over (otherwise eight for each core)."""
KEPT_FREE_BYTES = 16 << 20
LARGEST_IN_HEAP_BYTES = 32 << 20
"""glibc's largest, which it comes to by itself as blocks of that size are freed."""

UNUSED = ("httpx._main",)
"""What libraries try to import and do without: a command line, with all that draws on terminals."""
STOOD_IN_FOR = ("flwr.server", "flwr.serverapp", "flwr.simulation", "flwr.supercore.grpc")
"""What `import flwr` imports as well: a device is no server, and speaks Flower's Fleet API over HTTP, not gRPC."""


class _StandIn(ModuleType):
    """A module that can be imported, and names from it too; whoever uses one learns that it is not there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: object, **__: object) -> None:
            raise RuntimeError(f"a device's process does without {self.__name__}, so there is no {name}")

        return absent


def be_frugal() -> None:
    """Makes this process take less memory; to be called before it imports what a device needs and starts threads.

    A device's threads mostly wait, so that they gain nothing by heaps of their own, which each keep what was freed in
    them. What a round frees stays for the next one, up to a point: with a model of 1 MB the kernel filled 5.7 MB
    of new pages with zeros in every round.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no such option
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)
        set_option(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)
        set_option(_M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # None means: not to be imported
    for name in STOOD_IN_FOR:
        sys.modules.setdefault(name, _StandIn(name))
