"""Lets Flower's SuperNode and ServerApp ask again after 10 ms instead of 3 s.

A Python that has this folder on its path imports this when it starts, and so do the processes that it starts. Nothing
else changes: the other sleeps of the two modules, and those of all others, stay as long as they are.
"""

import sys
import time

from shortened_polls import POLLS, SHORT_S

_sleep = time.sleep


def _sleep_less(seconds: float, /) -> None:
    caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 the one way to know who sleeps
    _sleep(SHORT_S if POLLS.get(caller) == seconds else seconds)


time.sleep = _sleep_less
