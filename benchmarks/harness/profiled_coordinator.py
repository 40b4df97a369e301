"""`edgefl`, which notes where its CPU time goes: by thread, and by the functions that threads are in.

    python -m harness.profiled_coordinator OUT coordinator start …

A sampler looks at all threads a hundred times a second, and gives what a thread has computed since the last look to
the place where it is now. On SIGUSR1 it begins anew; at the end, and on SIGUSR2, it writes OUT.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_S = 0.01
DEEPEST = 40


class Sampler:
    """Counts CPU seconds; `own` by the innermost function, `within` by all functions of ours on the stack."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[int, float] = {}
        self.begin()

    def begin(self) -> None:
        with self._lock:
            self.threads: Counter[str] = Counter()
            self.own: Counter[str] = Counter()
            self.within: Counter[str] = Counter()

    def run(self) -> None:
        """Samples for ever."""
        while True:
            time.sleep(EVERY_S)
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            with self._lock:
                for ident, frame in sys._current_frames().items():  # noqa: SLF001 the one way to see other threads
                    self._look(ident, names.get(ident, "?"), frame)

    def _look(self, ident: int, name: str, frame: FrameType) -> None:
        try:
            now_s = time.clock_gettime(time.pthread_getcpuclockid(ident))
        except (OSError, OverflowError):  # it has ended just now
            return
        spent_s = now_s - self._before.get(ident, now_s)
        self._before[ident] = now_s
        if spent_s <= 0 or ident == threading.get_ident():
            return
        self.threads[name.rstrip("0123456789-_ ")] += spent_s
        self.own[_place(frame)] += spent_s
        seen: set[str] = set()
        at: FrameType | None = frame
        while at is not None and len(seen) < DEEPEST:
            seen.add(_place(at))
            at = at.f_back
        for place in seen:
            self.within[place] += spent_s

    def text(self) -> str:
        with self._lock:
            tables = {"threads": self.threads, "own": self.own, "within": self.within}
            return json.dumps(
                {
                    name: {key: round(value, 3) for key, value in found.most_common(60)}
                    for name, found in tables.items()
                }
            )


def _place(frame: FrameType) -> str:
    code = frame.f_code
    path = code.co_filename.rpartition("site-packages/")[2]
    return f"{path}:{code.co_qualname}"


def _write(out: Path, text: str) -> None:
    """Writes all of a file before it is there: somebody waits for it."""
    part = out.with_suffix(".part")
    part.write_text(text)
    part.replace(out)


def main() -> None:
    out, sampler = Path(sys.argv.pop(1)), Sampler()
    signal.signal(signal.SIGUSR1, lambda *_: sampler.begin())
    signal.signal(signal.SIGUSR2, lambda *_: _write(out, sampler.text()))
    threading.Thread(target=sampler.run, name="sampler", daemon=True).start()

    from edgefl.cli.main import main as edgefl  # noqa: PLC0415 what it imports is looked at, too

    edgefl()


if __name__ == "__main__":
    main()
