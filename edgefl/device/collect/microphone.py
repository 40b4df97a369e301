"""Microphone of ALSA: sounds of a fixed length, out of what a child process records.

`arecord` of alsa-utils is a program of a second's memory, is there on Raspberry Pi OS, and needs no package: those
that record by themselves have no wheels for aarch64 (miniaudio), or want PortAudio beside them (sounddevice).
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import subprocess
import threading
import time
import wave

import numpy as np

from edgefl.device.collect.settings import MicrophoneSection
from edgefl.system.processes import exit_with_parent

PROGRAM = "arecord"
SAMPLE_BYTES, BLOCK_BYTES, MAX_REASON_BYTES = 2, 65_536, 500
WAIT_S, SILENCE_S, END_TIMEOUT_S = 0.5, 10.0, 1.0
"""A program that writes nothing for `SILENCE_S` hangs: a quiet room is zeros."""
QUIETEST_DBFS = -120.0


class Microphone:
    """An open microphone: a running `arecord`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, section: MicrophoneSection) -> None:
        self._section, self._rest, self._message = section, bytearray(), b""
        frame_bytes = section.channels * SAMPLE_BYTES
        self._clip_bytes = round(section.seconds * section.rate) * frame_bytes
        self._step_bytes = round((section.step_s or section.seconds) * section.rate) * frame_bytes
        format_options = ["-t", "raw", "-f", "S16_LE", "-r", str(section.rate), "-c", str(section.channels)]
        self._process = subprocess.Popen(
            [PROGRAM, "-q", *format_options, "-D", section.device],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=exit_with_parent,  # noqa: PLW1509 it takes no lock
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._output, self._errors = self._process.stdout, self._process.stderr
        self._pipes = [self._output, self._errors]

    def read(self, stopping: threading.Event) -> bytes:
        """Returns the next sound as a WAV file; empty where it is too quiet, or recording has to stop.

        Raises:
            OSError: the program has ended, or hangs.
        """
        received_s = time.monotonic()
        while len(self._rest) < max(self._clip_bytes, self._step_bytes):
            if stopping.is_set():
                return b""
            if block := self._read_block():
                received_s = time.monotonic()
            elif time.monotonic() - received_s >= SILENCE_S:
                raise OSError(f"{PROGRAM} has recorded nothing for {SILENCE_S:g} s")
            self._rest += block
        clip, least_dbfs = bytes(self._rest[: self._clip_bytes]), self._section.least_dbfs
        del self._rest[: self._step_bytes]
        return self._encode(clip) if least_dbfs <= QUIETEST_DBFS or compute_dbfs(clip) >= least_dbfs else b""

    def accept(self) -> None:
        """Notes nothing: no sound depends on the one before."""

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        self._output.close()
        self._errors.close()

    def _read_block(self) -> bytes:
        """Returns what came, after a wait at most; raises an `OSError` once the program has ended."""
        ready = select.select(self._pipes, [], [], WAIT_S)[0]
        if self._errors in ready:
            self._read_errors()
        if self._output not in ready:
            return b""
        if not (block := os.read(self._output.fileno(), BLOCK_BYTES)):
            if self._errors in self._pipes and select.select([self._errors], [], [], WAIT_S)[0]:
                self._read_errors()
            text = " ".join(self._message.decode(errors="replace").split())
            raise OSError(f"{PROGRAM} has ended: {text or 'it says nothing'}")
        return block

    def _read_errors(self) -> None:
        """Reads what the program says, which waits once the pipe is full, and keeps the end of it."""
        text = os.read(self._errors.fileno(), BLOCK_BYTES)
        if not text:
            self._pipes.remove(self._errors)
        self._message = (self._message + text)[-MAX_REASON_BYTES:]

    def _encode(self, clip: bytes) -> bytes:
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setparams((self._section.channels, SAMPLE_BYTES, self._section.rate, 0, "NONE", ""))
            sound.writeframes(clip)
        return file.getvalue()


def compute_dbfs(clip: bytes) -> float:
    """Returns the effective level of 16-bit samples: 0 where all are the largest, `QUIETEST_DBFS` for silence."""
    samples = np.frombuffer(clip, "<i2")
    power = float(np.einsum("i,i", samples, samples, dtype=np.float64)) / max(len(samples), 1) / 2.0**30
    return max(10 * math.log10(power), QUIETEST_DBFS) if power else QUIETEST_DBFS
