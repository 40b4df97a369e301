"""What keeps a device's process small: one heap for all of its threads, and no imports of which nothing is used."""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8
"""Of glibc's `malloc.h`: how many heaps threads are spread over, otherwise eight for each core."""

UNUSED = ("httpx._main", "rich.traceback", "typer.rich_utils")
"""What libraries try to import and do without: command lines and their colours, with all that draws on terminals."""


def be_frugal() -> None:
    """Makes this process take less memory; to be called before it imports what a device needs and starts threads.

    A device's threads mostly wait, so that they gain nothing by heaps of their own, which each keep what was freed in
    them.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no such option
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # None means: not to be imported
