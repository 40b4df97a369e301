"""Reader of a board's files, below a replaceable root, and of its vendor's programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edgefl.device.hardware.programs import RunProgram, run_program
from edgefl.device.hardware.sysfs import find_paths, read_int, read_text

PATH_CACHE_S = 60.0
"""Interval of sensor searches: drivers may load late, and a search takes longer than all readings."""
OUTPUT_CACHE_S = 30.0
"""Minimum interval of program runs: heartbeats read the cached output."""


class BoardReader:
    """Board reader that caches sensor paths for a minute and program outputs for half a minute."""

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        clock: Callable[[], float] = time.monotonic,
        run: RunProgram = run_program,
    ) -> None:
        self.root, self._clock, self._run = root, clock, run
        self._path_cache: dict[str, tuple[float, list[Path]]] = {}
        self._output_cache: dict[tuple[str, ...], tuple[float, str | None]] = {}

    def find_paths(self, pattern: str) -> list[Path]:
        """Returns sorted matches below the root, cached for a minute."""
        now_s = self._clock()
        cached = self._path_cache.get(pattern)
        if cached is None or now_s - cached[0] >= PATH_CACHE_S:
            cached = self._path_cache[pattern] = now_s, find_paths(self.root, pattern)
        return cached[1]

    def get_program_output(self, arguments: Sequence[str], timeout_s: float) -> str | None:
        """Returns the output of a board program, cached for half a minute."""
        now_s, key = self._clock(), tuple(arguments)
        cached = self._output_cache.get(key)
        if cached is None or now_s - cached[0] >= OUTPUT_CACHE_S:
            cached = self._output_cache[key] = now_s, self._run(arguments, timeout_s)
        return cached[1]

    def list_hwmons(self, name: str) -> list[Path]:
        """Returns the folders of the hardware monitors of that name."""
        return [path for path in self.find_paths("sys/class/hwmon/*") if read_text(path / "name") == name]

    def read_rails(self) -> Iterator[tuple[str, float]]:
        """Yields label and power in watts of each rail of a Jetson."""
        for hwmon in self.list_hwmons("ina3221"):
            for label_path in find_paths(hwmon, "in?_label"):
                channel, label = label_path.name[2], read_text(label_path)
                millivolts, milliamperes = (
                    read_int(hwmon / f"in{channel}_input"),
                    read_int(hwmon / f"curr{channel}_input"),
                )
                if label and label != "NC" and millivolts is not None and milliamperes is not None:
                    yield label, millivolts * milliamperes / 1e6
