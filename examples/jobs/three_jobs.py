"""Three jobs: a greeting, a matrix product in parts, and a word count over files that stay on their boards."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from edgefl import Job, JobContext


class HelloWorld(Job):
    """One line from each part."""

    def work(self, context: JobContext) -> bytes:
        context.log("saying hello")
        return f"Hello from {context.device_id}, part {context.part}\n".encode()


class MatrixProduct(Job):
    """Product of two matrices; a part has some rows of the first one, and the second.

    Args:
        left, right: .npy files at the coordinator; random matrices where they are not given.
        size: rows and columns of random matrices.
    """

    def __init__(self, *, left: str = "", right: str = "", size: int = 200) -> None:
        self._left, self._right, self._size = left, right, size

    def make_input(self, part: int, num_parts: int) -> bytes:
        left, right = self._load(self._left, 1), self._load(self._right, 2)
        buffer = io.BytesIO()
        np.savez(buffer, rows=np.array_split(left, num_parts)[part], right=right)
        return buffer.getvalue()

    def work(self, context: JobContext) -> bytes:
        with np.load(io.BytesIO(context.input)) as matrices:
            return _save(matrices["rows"] @ matrices["right"])

    def combine(self, parts: Sequence[bytes]) -> bytes:
        return _save(np.concatenate([np.load(io.BytesIO(part)) for part in parts]))

    def _load(self, path: str, seed: int) -> np.ndarray:
        return np.load(path) if path else np.random.default_rng(seed).standard_normal((self._size, self._size))


def _save(matrix: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, matrix)
    return buffer.getvalue()


class WordCount(Job):
    """How often each word is in the text files of all boards' folders; the files stay where they are."""

    def work(self, context: JobContext) -> bytes:
        counts: Counter[str] = Counter()
        for path in sorted(context.path.rglob("*.txt")):
            counts.update(re.findall(r"\w+", path.read_text(encoding="utf-8").lower()))
        context.log(f"{counts.total()} words")
        return json.dumps(counts).encode()

    def combine(self, parts: Sequence[bytes]) -> bytes:
        counts: Counter[str] = Counter()
        for part in parts:
            counts.update(json.loads(part))
        return json.dumps(dict(counts.most_common()), indent=1).encode()
