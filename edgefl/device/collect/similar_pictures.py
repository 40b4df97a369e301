"""Near-duplicates among pictures: frames in which nothing has changed since one that is kept already.

A picture is a signature of 16 x 16 cells: their mean grey value, less that of the picture, and scaled so that
brighter or darker light leaves it as it is. Two are similar where no cell differs by more than a number of grey
levels. A hash of the signs of differences (dHash) is smaller, but blind to what covers a hundredth of the picture,
as a bird does; `benchmarks/similar_pictures.py` compares both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from edgefl.core.errors import EdgeflError
from edgefl.core.types import Array
from edgefl.device.collect.file_store import UNLABELLED, FileStore, KeptFile, list_files
from edgefl.tasks.datasets.class_folders import PICTURE_SUFFIXES, import_pillow, read_grey_picture

log = logging.getLogger(__name__)

NUM_CELLS = 16
MAX_PICTURES = 1000
"""With which a new one is compared: the newest of the store."""
MAX_PIXELS = 16_000_000
"""Of a picture that is decoded, in a process that is small otherwise."""
LOAD_S = 10.0
"""For which signatures of what is in the store are computed at a start."""
_USUAL_SPREAD, _LEAST_SPREAD = 40.0, 20.0
"""Standard deviation of a signature's grey levels; a picture with less is scaled no further."""


class SimilarPictures:
    """Signatures of the newest pictures of a store, at most `MAX_PICTURES`.

    Args:
        store: of the pictures; those that are in it now are read, the newest first, for `LOAD_S` at most.
        max_levels: of 255, by which a cell of similar pictures may differ.
        monotonic: seconds.

    Raises:
        TaskError: Pillow is not installed.
    """

    def __init__(self, store: FileStore, max_levels: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store, self._max_levels = store, max_levels
        self._signatures = np.full((MAX_PICTURES, NUM_CELLS * NUM_CELLS), np.inf, np.float32)
        self._files: list[tuple[str, str]] = [("", "")] * MAX_PICTURES
        self._next = 0
        import_pillow()
        self._load(monotonic)

    def compute_signature(self, content: bytes, suffix: str, name: str) -> Array | None:
        """Returns that of a file with this suffix, as `compute_signature`; None of one that is no picture."""
        return compute_signature(content, name) if suffix in PICTURE_SUFFIXES else None

    def find(self, signature: Array, label: str) -> bool:
        """Returns whether a similar picture is in the store; of one that has a class, one of the same class."""
        distances = np.abs(self._signatures - signature).max(axis=1)
        for place in np.flatnonzero(distances <= self._max_levels):
            digest, other = self._files[place]
            if label in {UNLABELLED, other} and self._store.has_digest(digest):
                return True
        return False

    def add(self, signature: Array, digest: str, label: str) -> None:
        """Adds a picture, in place of the one that was added first."""
        self._signatures[self._next], self._files[self._next] = signature, (digest, label)
        self._next = (self._next + 1) % MAX_PICTURES

    def _load(self, monotonic: Callable[[], float]) -> None:
        files = sorted(
            (file for file in list_files(self._store.folder) if file.name.endswith(PICTURE_SUFFIXES)), reverse=True
        )
        found, end_s = list[tuple[Array, KeptFile]](), monotonic() + LOAD_S
        for file in files[:MAX_PICTURES]:
            if monotonic() > end_s:
                log.info("new pictures are compared with the newest %d of %d", len(found), len(files))
                break
            try:
                content = (self._store.folder / file.label / file.name).read_bytes()
                found.append((compute_signature(content, file.name), file))
            except (OSError, EdgeflError, MemoryError) as error:
                log.debug("%s is compared with nothing: %r", file.name, error)
        for signature, file in reversed(found):
            self.add(signature, file.digest, file.label)


def compute_signature(content: bytes, name: str) -> Array:
    """Returns [256] float32 of a PNG or JPEG file of a name.

    Raises:
        DataError: it cannot be decoded, or has more than `MAX_PIXELS`.
        MemoryError: there is too little for it.
        TaskError: Pillow is not installed.
    """
    return level_cells(read_grey_picture(content, name, size=NUM_CELLS, max_pixels=MAX_PIXELS)).ravel()


def level_cells(grey: Array) -> Array:
    """Returns float32 grey values of cells without the level and spread of their light."""
    cells = grey.astype(np.float32)
    signature: Array = (cells - cells.mean()) * (_USUAL_SPREAD / max(float(cells.std()), _LEAST_SPREAD))
    return signature
