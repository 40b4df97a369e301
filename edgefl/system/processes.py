"""Processes: end on signals and with the parent, memory tuning, calls in a subprocess, notifications to systemd.

A call in a subprocess isolates this process from memory use and crashes: request and reply are one JSON object each.
A unit with Type=notify tells ready, watchdog and stopping; outside of systemd, where no `NOTIFY_SOCKET` is set,
nothing is sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from edgefl.core import errors
from edgefl.core.errors import EdgeflError
from edgefl.system.confinement import Confinement, make_command, make_environment

if TYPE_CHECKING:
    from edgefl.core.types import Json

log = logging.getLogger(__name__)
T = TypeVar("T")

PR_SET_PDEATHSIG = 1
LOWEST_NICE = 19
"""A thread of it gets 15 of 1039 parts of a core that one of nice 0 wants, too (Linux, sched(7))."""
MAX_LIBRARY_THREADS = 256
POLL_S, KILL_AFTER_S = 0.1, 2.0
# Looked up here: between fork and exec, dlopen could wait for a lock that another thread held at the fork.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

KEEPALIVES_PER_TIMEOUT = 4
"""Notifications per WatchdogSec; a loop has half of WatchdogSec to make progress."""
WORK_TIMEOUT_S = 1800.0
"""Time without computing or progress after which work counts as stuck, as at a disk or a lock that never answers."""
MIN_CPU_SHARE = 0.005
"""Minimum share of a core of a computing thread; waiting, even with short sleeps, takes less."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's `malloc.h`: how much may be free at the heap's end before it is given back, from which size on a block is
a mapping of its own, and how many heaps threads are spread over (otherwise eight for each core)."""
LARGE_BLOCK_BYTES = 1 << 20
_MADV_DONTNEED = 4
"""Linux's `mman.h`: pages are not needed; the next access reads them from their file."""
TRIM_THRESHOLD_BYTES = 16 << 20
MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's maximum, which it reaches by itself as blocks of that size are freed."""

ARROW_MEMORY_OPTIONS = {"MIMALLOC_ARENA_EAGER_COMMIT": "0", "MIMALLOC_PURGE_DELAY": "0"}
"""By which pyarrow's allocator gives freed memory back at once: 13 MB less while pages of Parquet are read."""

BLOCKED_MODULES = ("httpx._main",)
"""Optional imports of libraries: command lines and terminal output."""


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


class LowestPriorityThread:
    """Thread of nice 19 that works for another, whose own priority may not rise again (RLIMIT_NICE).

    The processes that it starts are ended with it, so it lasts as long as this process. Used by one thread.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(
            1, name, initializer=lambda: lower_priority(threading.get_native_id())
        )  # starts no thread yet
        self._former: dict[int, int] = {}

    def run(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns in that thread, or raises what it raises.

        Threads that a library has started, not Python, are lowered as well: those of BLAS compute for any thread.
        """
        for thread_id in list_library_threads():
            former = self._former.get(thread_id)
            with contextlib.suppress(OSError):
                self._former[thread_id] = os.getpriority(os.PRIO_PROCESS, thread_id) if former is None else former
            lower_priority(thread_id)
        return self._executor.submit(work).result()

    def restore_libraries(self) -> None:
        """Raises the libraries' threads to their former priority, where this process may."""
        for thread_id in set(list_library_threads() if self._former else ()) & self._former.keys():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread_id, self._former[thread_id])
        self._former = {}


def list_library_threads() -> list[int]:
    """Returns the ids of threads of this process that Python does not know, such as the workers of BLAS and OpenMP.

    At most `MAX_LIBRARY_THREADS`; none where there is no /proc, or while a thread of Python starts.
    """
    try:
        thread_ids = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    except (OSError, ValueError):
        return []
    known = {thread.native_id for thread in threading.enumerate()}  # afterwards, so that it has all of those listed
    return [] if None in known else sorted(set(thread_ids) - known)[:MAX_LIBRARY_THREADS]


def lower_priority(thread_id: int) -> None:
    """Lowers the priority of a thread, or of a process of one thread, to nice 19."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it, or the process has ended
        os.setpriority(os.PRIO_PROCESS, thread_id, LOWEST_NICE)


class StoppedCallError(EdgeflError):
    """A call in a subprocess was given up before its reply."""


def call_in_subprocess(
    module: str,
    request: Json,
    *,
    description: str,
    timeout_s: float | None = None,
    confinement: Confinement | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Json:
    """Returns the reply of `python -m MODULE`, which calls `serve_call`; errors name `description`.

    The child and what it started are ended when `timeout_s` is over, or `should_stop` returns True, which is asked
    every `POLL_S`: by SIGTERM, and `KILL_AFTER_S` later by SIGKILL.

    Raises:
        StoppedCallError: `should_stop` returned True.
        EdgeflError: the one that the child raised; or it timed out or crashed.
    """
    with subprocess.Popen(
        make_command(module, confinement),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us; a child must not answer it with a traceback
        preexec_fn=exit_with_parent,  # noqa: PLW1509 it takes no lock, see there
        env=make_environment(confinement),
    ) as process:
        try:
            output, errors_output = _exchange(
                process, json.dumps(request).encode(), description, timeout_s, should_stop
            )
        except BaseException:  # an interrupt too: no child outlives the call
            _end_group(process)
            raise
    try:
        reply: Json = json.loads(output)
        error = reply.pop("error", None)
    except (ValueError, AttributeError):
        error_lines = errors_output.decode(errors="replace").strip().splitlines()
        raise EdgeflError(
            f"{description} ended with code {process.returncode}: {error_lines[-1] if error_lines else 'no word'}"
        ) from None
    if error is None:
        return reply
    if error["trace"]:
        log.warning("%s: %s", description, error["trace"])
    raise getattr(errors, error["kind"])(error["message"])


def _exchange(
    process: subprocess.Popen[bytes],
    request: bytes,
    description: str,
    timeout_s: float | None,
    should_stop: Callable[[], bool],
) -> tuple[bytes, bytes]:
    """Returns what the child writes to standard output and error until it ends."""
    started_s, rest = time.monotonic(), request
    while True:
        try:
            return process.communicate(rest or None, timeout=POLL_S)
        except subprocess.TimeoutExpired:
            rest = b""  # `communicate` has it, and goes on with it
        if should_stop():
            raise StoppedCallError(f"{description} was stopped")
        if timeout_s is not None and time.monotonic() - started_s > timeout_s:
            raise EdgeflError(f"{description} took more than {timeout_s:g} s")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a child that leads a session of its own, and waits for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_AFTER_S)
            return


def serve_call(handle: Callable[[Json], Json]) -> None:
    """Answers the request on the standard input; an exception is encoded as reply.

    Output printed meanwhile goes to the standard error, since custom tasks may print.
    """
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        try:
            reply = handle(json.load(sys.stdin))
        except Exception as error:  # noqa: BLE001 the boundary of the process: the parent needs a reply in any case
            reply = {"error": _encode_error(error)}
        json.dump(reply, stdout)


def _encode_error(error: Exception) -> Json:
    if isinstance(error, EdgeflError):
        kind = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
        return {"kind": kind.__name__, "message": str(error), "trace": ""}
    trace = "".join(traceback.format_exception(error))
    return {"kind": EdgeflError.__name__, "message": f"{type(error).__name__}: {error}", "trace": trace}


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemdNotifier:
    """Sender of states to the service manager; `address` None means that there is none."""

    address: str | None = None
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> SystemdNotifier:
        """Returns the notifier, and removes its variables so that children cannot notify for us."""
        environment = os.environ if environment is None else environment
        address = environment.pop("NOTIFY_SOCKET", None)
        usec, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        is_for_us = usec.isdecimal() and (not pid or pid == str(os.getpid()))
        return cls(address=address, watchdog_s=int(usec) / 1e6 if is_for_us and int(usec) else None)

    def notify(self, state: str) -> None:
        """Sends lines such as `READY=1`; failures to send are ignored."""
        if not self.address:
            return
        # A leading @ denotes an abstract socket, whose name begins with a zero byte.
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(address)
                sender.sendall(state.encode())
        except OSError as error:
            log.warning("the service manager cannot be told %s: %s", state.splitlines()[0], error)


@dataclass(slots=True)
class LivenessMonitor:
    """Liveness of a loop and of the thread that it runs in.

    The loop calls `record_progress`, another thread `is_alive`. When idle, the loop must record progress in time.
    During tracked work it counts as alive while its thread uses the processor or records progress.
    """

    clock: Callable[[], float] = time.monotonic
    work_timeout_s: float = WORK_TIMEOUT_S
    _progress_at: float = field(init=False)
    _num_working: int = field(default=0, init=False)
    _thread_id: int = field(default_factory=threading.get_ident, init=False)
    _cpu_sample: tuple[float, float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._progress_at = self.clock()

    def record_progress(self) -> None:
        """Records an iteration of the loop, or progress of its work."""
        self._progress_at = self.clock()

    @contextlib.contextmanager
    def track_work(self) -> Iterator[None]:
        """Marks a block that may take minutes; the CPU time of the entering thread counts as progress."""
        self._thread_id = threading.get_ident()
        self.record_progress()
        self._num_working += 1
        try:
            yield
        finally:
            self._num_working -= 1
            self.record_progress()

    def is_alive(self, timeout_s: float) -> bool:
        """Returns whether the loop made progress within `timeout_s`, or works; call at regular intervals."""
        now, silence_s = self.clock(), self.clock() - self._progress_at
        is_computing = self._is_computing(now)
        if not self._num_working:
            return silence_s < timeout_s
        if is_computing:
            self._progress_at = now
        return is_computing or silence_s < max(timeout_s, self.work_timeout_s)

    def _is_computing(self, now: float) -> bool:
        """Returns whether the loop's thread has used the processor since the last call."""
        try:
            cpu_s = time.clock_gettime(time.pthread_getcpuclockid(self._thread_id))
        except (OSError, AttributeError):  # the thread is gone; a system without such clocks
            return False
        previous, self._cpu_sample = self._cpu_sample, (now, cpu_s)
        return previous is not None and cpu_s - previous[1] > MIN_CPU_SHARE * (now - previous[0])


@contextlib.contextmanager
def run_watchdog(notifier: SystemdNotifier, monitor: LivenessMonitor) -> Iterator[None]:
    """Notifies ready, then watchdog while the loop is alive, then stopping at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=_send_keepalives, args=(notifier, monitor, stop), name="watchdog", daemon=True)
    notifier.notify("READY=1")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        notifier.notify("STOPPING=1")


def _send_keepalives(notifier: SystemdNotifier, monitor: LivenessMonitor, stop: threading.Event) -> None:
    if notifier.watchdog_s is None:
        return
    was_alive = True
    while True:
        is_alive = monitor.is_alive(timeout_s=notifier.watchdog_s / 2)
        if is_alive:
            notifier.notify("WATCHDOG=1")
        elif was_alive:
            log.error("the main loop does not come round any more; the service manager will start this anew")
        was_alive = is_alive
        if stop.wait(notifier.watchdog_s / KEEPALIVES_PER_TIMEOUT):
            return


def map_large_blocks() -> None:
    """Makes each block of 1 MB or more a mapping of its own, which goes back when freed, until `reuse_large_blocks`.

    For work that is done once, such as the loading of a graph, where blocks of many sizes would leave gaps in the
    heap: 10 MB for a network of 1.7 MB. Work that is repeated would get new pages, filled with zeros, each time.
    """
    _set_heap_options({_M_MMAP_THRESHOLD: LARGE_BLOCK_BYTES})


def _set_heap_options(values: Mapping[int, int]) -> None:
    """Sets options of the C library's heap by number; other libraries than glibc have none."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, value in values.items():
            set_option(option, value)


def reuse_large_blocks() -> None:
    """Ends `map_large_blocks`, and gives back what is free in the heap until now."""
    _set_heap_options({_M_MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES})
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


def drop_code_pages(library: str) -> int:
    """Unmaps the pages of a loaded library's code that were touched; those that are in use come back by themselves.

    What ran once, such as the loading of a file, needs no memory afterwards: its pages are the file's, unchanged, and
    the kernel keeps them as cache while there is room.

    Args:
        library: part of the file's name.

    Returns:
        Bytes of the code, touched or not; 0 where this system does not do it.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    dropped = 0
    if advise is None:
        return dropped
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, mode, *_, path = line.split(maxsplit=5)
            if mode == "r-xp" and library in path.rpartition("/")[2]:  # of code alone: no page of it was ever written
                start, end = (int(number, 16) for number in place.split("-"))
                if not advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED):
                    dropped += end - start
    return dropped


def reduce_memory() -> None:
    """Reduces this process's memory; call before heavy imports and threads.

    A device's threads mostly wait, so that heaps of their own, each with freed memory, are of no use. Memory freed by
    a round is kept for the next one, up to a limit: with a model of 1 MB the kernel filled 5.7 MB of new pages with
    zeros in every round.
    """
    _set_heap_options(
        {_M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: TRIM_THRESHOLD_BYTES, _M_MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES}
    )
    for name, value in ARROW_MEMORY_OPTIONS.items():
        os.environ.setdefault(name, value)
    for name in BLOCKED_MODULES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # None means: not to be imported
