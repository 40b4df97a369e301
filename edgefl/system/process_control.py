"""Process termination: orderly on signals, and no later than the parent."""

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
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_stop_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` in a separate thread after a stop signal.

    The signal handler may interrupt any code, even one that holds a lock `stop` needs, so it only writes a byte.
    """
    reader, writer = os.pipe()

    def handle_signal(_number: int, _frame: object) -> None:
        os.write(writer, b"s")

    def wait_for_signal() -> None:
        if os.read(reader, 1) == b"s":
            stop()

    thread = threading.Thread(target=wait_for_signal, name="signals", daemon=True)
    thread.start()
    previous_handlers = {number: signal.signal(number, handle_signal) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        os.write(writer, b"e")
        thread.join()
        os.close(reader)
        os.close(writer)


def raise_file_limit() -> int:
    """Raises the open-file limit to the system's maximum and returns it.

    Most systems default to 1,024, for programs that use select(). A coordinator has two connections for each device,
    its broker has one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a limit of its own, such as fs.nr_open
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def exit_with_parent() -> None:
    """Sets SIGTERM as the parent-death signal of this process; for `preexec_fn`.

    Nothing is loaded or looked up, so that it takes no lock of the C library's; where there is no prctl, it does
    nothing.
    """
    if _PRCTL is not None:
        _PRCTL(PR_SET_PDEATHSIG, int(signal.SIGTERM))
