"""Camera of Video4Linux, or a video file in its place: frames as pictures, at a rate or where something moves."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.errors import format_install_command
from edgefl.core.types import Array
from edgefl.device.collect.settings import CameraSection
from edgefl.device.collect.similar_pictures import NUM_CELLS, level_cells
from edgefl.tasks.registry import import_extra


def import_opencv() -> Any:
    """Returns `cv2`, with one thread and a silent log; raises a `TaskError` where OpenCV is not installed."""
    opencv = import_extra("cv2", "a camera is read with OpenCV", format_install_command("cv2"))
    opencv.setNumThreads(1)
    opencv.utils.logging.setLogLevel(opencv.utils.logging.LOG_LEVEL_SILENT)
    return opencv


class Camera:
    """An open camera.

    Args:
        section: its settings; what does not lie below /dev is a video file or an image sequence.
        opencv: module `cv2`.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, section: CameraSection, opencv: Any) -> None:
        self._section, self._opencv = section, opencv
        self._is_live = section.path.startswith("/dev/")
        if self._is_live:
            Path(section.path).stat()  # whose error says more
        self._capture = opencv.VideoCapture(section.path, opencv.CAP_V4L2 if self._is_live else opencv.CAP_ANY)
        if not self._capture.isOpened():
            raise OSError(f"{section.path} cannot be opened as a camera or a video")
        if self._is_live and section.capture_size:
            width, height = section.capture_size
            self._capture.set(opencv.CAP_PROP_FRAME_WIDTH, width)
            self._capture.set(opencv.CAP_PROP_FRAME_HEIGHT, height)
        self._due_s = time.monotonic()
        self._signature: Array | None = None
        self._kept: Array | None = None

    def read(self, stopping: threading.Event) -> bytes:
        """Returns the frame that is due as a file, empty where it looks like the last one that was kept.

        Raises:
            OSError: there is none, or it cannot be decoded.
        """
        if not self._is_live:
            stopping.wait(self._due_s - time.monotonic())
        self._grab()
        # A camera's own buffers hold old frames: all are taken, and the one that is due is decoded.
        while self._is_live and time.monotonic() < self._due_s and not stopping.is_set():
            self._grab()
        if stopping.is_set():
            return b""
        self._due_s = max(self._due_s + self._section.every_s, time.monotonic())
        try:
            is_there, frame = self._capture.retrieve()
            if not is_there:
                raise OSError(f"{self._section.path} gave a frame that cannot be decoded")
            return self._encode(frame)
        except self._opencv.error as error:
            raise OSError(f"a frame of {self._section.path} cannot be used: {error.err}") from None

    def accept(self) -> None:
        self._kept = self._signature

    def close(self) -> None:
        self._capture.release()

    def _grab(self) -> None:
        if not self._capture.grab():
            raise OSError(f"{self._section.path} gives no more frames")

    def _encode(self, frame: Array) -> bytes:
        opencv, section = self._opencv, self._section
        if section.crop:
            frame = _crop(frame, section.crop)
        if section.size:
            frame = opencv.resize(frame, tuple(map(int, section.size)), interpolation=opencv.INTER_AREA)
        if not section.colour and frame.ndim == 3:
            frame = opencv.cvtColor(frame, opencv.COLOR_BGR2GRAY)
        if section.motion_levels and not self._has_moved(frame):
            return b""
        quality = [opencv.IMWRITE_JPEG_QUALITY, section.quality] if section.format == "jpeg" else []
        return bytes(opencv.imencode(section.suffix, frame, quality)[1])

    def _has_moved(self, frame: Array) -> bool:
        """Returns whether a cell of the frame differs from the last one that was kept."""
        cells = self._opencv.resize(frame, (NUM_CELLS, NUM_CELLS), interpolation=self._opencv.INTER_AREA)
        self._signature = level_cells(cells if cells.ndim == 2 else cells.mean(axis=2))
        return self._kept is None or np.abs(self._signature - self._kept).max() > self._section.motion_levels


def _crop(frame: Array, parts: tuple[float, ...]) -> Array:
    """Returns left, top, width and height of a frame, as parts of it; at least a pixel."""
    left, top, width, height = parts
    rows, columns = frame.shape[:2]
    first_row, first_column = min(int(top * rows), rows - 1), min(int(left * columns), columns - 1)
    end_row = max(first_row + 1, round((top + height) * rows))
    end_column = max(first_column + 1, round((left + width) * columns))
    return frame[first_row:end_row, first_column:end_column]
