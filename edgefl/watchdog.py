"""What systemd is told of a unit with Type=notify: that it is ready, that it lives, that it stops.

Outside of systemd, where no `NOTIFY_SOCKET` is set, all of it does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

BEATS_PER_LIMIT = 4
"""systemd hears from us so often within its WatchdogSec, and a loop has half of it to come round."""
QUIET_WORK_S = 1800.0
"""Work whose thread neither computes nor says a word for so long is stuck: a disk or a lock that never answers."""
COMPUTING_SHARE = 0.005
"""A thread that gets this share of a core computes; waiting, even with short sleeps, takes less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notifier:
    """Sends states to the service manager; `address` None means that there is none."""

    address: str | None = None
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> Notifier:
        """Returns who is to be told, and takes it out of the environment: a child must not speak for us."""
        environment = os.environ if environment is None else environment
        address = environment.pop("NOTIFY_SOCKET", None)
        usec, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        is_for_us = usec.isdecimal() and (not pid or pid == str(os.getpid()))
        return cls(address=address, watchdog_s=int(usec) / 1e6 if is_for_us and int(usec) else None)

    def tell(self, state: str) -> None:
        """Sends lines such as `READY=1`; a manager that does not listen is no reason to stop."""
        if not self.address:
            return
        # A leading @ stands for an abstract socket, whose name begins with a zero byte.
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(address)
                sender.sendall(state.encode())
        except OSError as error:
            log.warning("the service manager cannot be told %s: %s", state.splitlines()[0], error)


@dataclass(slots=True)
class LoopLife:
    """Whether a loop, and the thread that it runs in, is alive; `beat` is called by it, `is_alive` by another thread.

    At leisure it must come round. At work it may take as long as it likes while its thread computes or beats.
    """

    clock: Callable[[], float] = time.monotonic
    quiet_work_s: float = QUIET_WORK_S
    _beat_at: float = field(init=False)
    _works: int = field(default=0, init=False)
    _thread: int = field(default_factory=threading.get_ident, init=False)
    _computed: tuple[float, float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._beat_at = self.clock()

    def beat(self) -> None:
        """Says that the loop has come round, or that its work goes on."""
        self._beat_at = self.clock()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around what may rightly take minutes; the thread that enters is the one whose computing counts."""
        self._thread = threading.get_ident()
        self.beat()
        self._works += 1
        try:
            yield
        finally:
            self._works -= 1
            self.beat()

    def is_alive(self, within_s: float) -> bool:
        """Returns whether it came round within so many seconds, or works; asked at regular intervals."""
        now, quiet_s = self.clock(), self.clock() - self._beat_at
        computes = self._computes(now)
        if not self._works:
            return quiet_s < within_s
        if computes:
            self._beat_at = now
        return computes or quiet_s < max(within_s, self.quiet_work_s)

    def _computes(self, now: float) -> bool:
        """Returns whether the loop's thread has used the processor since this was last asked."""
        try:
            spent = time.clock_gettime(time.pthread_getcpuclockid(self._thread))
        except (OSError, AttributeError):  # the thread is gone; a system without such clocks
            return False
        before, self._computed = self._computed, (now, spent)
        return before is not None and spent - before[1] > COMPUTING_SHARE * (now - before[0])


@contextlib.contextmanager
def watched(notifier: Notifier, life: LoopLife) -> Iterator[None]:
    """Says that this process is ready, that it lives for as long as the loop does, and that it stops at the end."""
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(notifier, life, ended), name="watchdog", daemon=True)
    notifier.tell("READY=1")
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()
        notifier.tell("STOPPING=1")


def _beat(notifier: Notifier, life: LoopLife, ended: threading.Event) -> None:
    if notifier.watchdog_s is None:
        return
    was_alive = True
    while True:
        is_alive = life.is_alive(within_s=notifier.watchdog_s / 2)
        if is_alive:
            notifier.tell("WATCHDOG=1")
        elif was_alive:
            log.error("the main loop does not come round any more; the service manager will start this anew")
        was_alive = is_alive
        if ended.wait(notifier.watchdog_s / BEATS_PER_LIMIT):
            return
