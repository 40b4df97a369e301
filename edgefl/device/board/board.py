"""A board to ask: its files below a root, so that any board can stand in for this one, and its maker's programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edgefl.device.board.board_files import below, number, text
from edgefl.device.board.programs import RunProgram, run_program

LOOK_AGAIN_S = 60.0
"""Sensors are searched for so often: their drivers may come late, and a search takes longer than all readings."""
ASK_AGAIN_S = 30.0
"""A program is run so often at the most: the heartbeat reads what it said last."""


class Board:
    """Remembers for a minute where its sensors are, and for half a minute what programs said."""

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        clock: Callable[[], float] = time.monotonic,
        run: RunProgram = run_program,
    ) -> None:
        self.root, self._clock, self._run = root, clock, run
        self._found: dict[str, tuple[float, list[Path]]] = {}
        self._said: dict[tuple[str, ...], tuple[float, str | None]] = {}

    def paths(self, pattern: str) -> list[Path]:
        """Returns what matches below the root, sorted, as it was at most a minute ago."""
        now_s = self._clock()
        known = self._found.get(pattern)
        if known is None or now_s - known[0] >= LOOK_AGAIN_S:
            known = self._found[pattern] = now_s, below(self.root, pattern)
        return known[1]

    def program_output(self, arguments: Sequence[str], timeout_s: float) -> str | None:
        """Returns what a program of the board said, at most half a minute ago."""
        now_s, key = self._clock(), tuple(arguments)
        known = self._said.get(key)
        if known is None or now_s - known[0] >= ASK_AGAIN_S:
            known = self._said[key] = now_s, self._run(arguments, timeout_s)
        return known[1]

    def hwmons(self, name: str) -> list[Path]:
        """Returns the folders of the hardware monitors of that name."""
        return [path for path in self.paths("sys/class/hwmon/*") if text(path / "name") == name]

    def rails(self) -> Iterator[tuple[str, float]]:
        """Yields what the rails of a Jetson draw, in watts, by their labels."""
        for hwmon in self.hwmons("ina3221"):
            for label_path in below(hwmon, "in?_label"):
                channel, label = label_path.name[2], text(label_path)
                millivolts, milliamperes = (
                    number(hwmon / f"in{channel}_input"),
                    number(hwmon / f"curr{channel}_input"),
                )
                if label and label != "NC" and millivolts is not None and milliamperes is not None:
                    yield label, millivolts * milliamperes / 1e6
