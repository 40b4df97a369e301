"""Jobs of the tests: greetings that wait at a gate, and words that are counted where they lie.

A part with a `mark` says that it began by a file of that name and its number in its process's scratch folder, with
the numbers of the process and of its agent, and waits until its board's shard has a file of the same name.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from edgefl import Job, JobContext


class Greeting(Job):
    def __init__(self, *, mark: str = "", bad_part: int = -1, bad_device: str = "", result_bytes: int = 0) -> None:
        self._mark = mark
        self._bad_part, self._bad_device, self._result_bytes = bad_part, bad_device, result_bytes

    def make_input(self, part: int, num_parts: int) -> bytes:
        return f"{part}/{num_parts}".encode()

    def work(self, context: JobContext) -> bytes:
        context.log(f"input {context.input.decode()}")
        if context.part == self._bad_part or context.device_id == self._bad_device:
            raise RuntimeError("broken on purpose")
        if self._mark:
            Path(f"{self._mark}-{context.part}").write_text(f"{os.getpid()} {os.getppid()}")
            while not (context.path / self._mark).exists():
                time.sleep(0.02)
        return context.input + b"\n" + b"x" * self._result_bytes


class Words(Job):
    def work(self, context: JobContext) -> bytes:
        counts = Counter(word for path in context.path.glob("*.txt") for word in path.read_text().split())
        return json.dumps(counts).encode()

    def combine(self, parts: Sequence[bytes]) -> bytes:
        counts: Counter[str] = Counter()
        for part in parts:
            counts.update(json.loads(part))
        return json.dumps(counts, sort_keys=True).encode()


class Uncombined(Greeting):
    def combine(self, parts: Sequence[bytes]) -> NoReturn:
        raise ValueError(f"of {len(parts)} parts")
