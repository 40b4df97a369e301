"""How our processes end: in order on a signal, and never later than who started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator

PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec, dlopen could wait for a lock that another thread held at the fork.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_stop_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` once a signal has come, in a thread of its own.

    A handler runs in the middle of anything, also inside the lock that `stop` would take: it only writes a byte.
    """
    reader, writer = os.pipe()

    def note(_number: int, _frame: object) -> None:
        os.write(writer, b"s")

    def watch() -> None:
        if os.read(reader, 1) == b"s":
            stop()

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(writer, b"e")
        watcher.join()
        os.close(reader)
        os.close(writer)


def open_many_files() -> int:
    """Returns how many files this process and its children may have open: as many as the system lets it.

    Most systems let a process have 1,024 unless it asks for more, for the sake of programs that use select(). A
    coordinator has two connections for each device, its broker has one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a limit of its own, such as fs.nr_open
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def end_with_parent() -> None:
    """Makes this process get SIGTERM when the thread that started it ends; for `preexec_fn`.

    Nothing is loaded or looked up, so that it takes no lock of the C library's; where there is no prctl, it does
    nothing.
    """
    if _PRCTL is not None:
        _PRCTL(PR_SET_PDEATHSIG, int(signal.SIGTERM))
