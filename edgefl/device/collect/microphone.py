"""Microphone of ALSA: sounds of a fixed length, out of what a child process records.

`arecord` of alsa-utils is a program of a second's memory, is there on Raspberry Pi OS, and needs no package: those
that record by themselves have no wheels for aarch64 (miniaudio), or want PortAudio beside them (sounddevice).
"""

from __future__ import annotations

import contextlib
import io
import math
import operator
import os
import select
import subprocess
import threading
import wave
from array import array

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
        self._section, self._rest = section, b""
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

    def read(self, stopping: threading.Event) -> bytes:
        """Returns the next sound as a WAV file; empty where it is too quiet, or recording has to stop.

        Raises:
            OSError: the program has ended, or hangs.
        """
        silence_s = 0.0
        while len(self._rest) < max(self._clip_bytes, self._step_bytes):
            if stopping.is_set():
                return b""
            block = self._read_block()
            silence_s = 0.0 if block else silence_s + WAIT_S
            if silence_s >= SILENCE_S:
                raise OSError(f"{PROGRAM} has recorded nothing for {SILENCE_S:g} s")
            self._rest += block
        clip, self._rest = self._rest[: self._clip_bytes], self._rest[self._step_bytes :]
        return self._encode(clip) if compute_dbfs(clip) >= self._section.least_dbfs else b""

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _read_block(self) -> bytes:
        """Returns what came, after a wait at most; raises an `OSError` once the program has ended."""
        output, errors = self._process.stdout, self._process.stderr
        assert output is not None
        assert errors is not None
        if not select.select([output], [], [], WAIT_S)[0]:
            return b""
        if not (block := os.read(output.fileno(), BLOCK_BYTES)):
            has_reason = select.select([errors], [], [], WAIT_S)[0]
            reason = os.read(errors.fileno(), MAX_REASON_BYTES) if has_reason else b""
            text = " ".join(reason.decode(errors="replace").split())
            raise OSError(f"{PROGRAM} has ended: {text or 'it says nothing'}")
        return block

    def _encode(self, clip: bytes) -> bytes:
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setparams((self._section.channels, SAMPLE_BYTES, self._section.rate, 0, "NONE", ""))
            sound.writeframes(clip)
        return file.getvalue()


def compute_dbfs(clip: bytes) -> float:
    """Returns the effective level of 16-bit samples: 0 where all are the largest, `QUIETEST_DBFS` for silence."""
    samples = array("h", clip)
    power = sum(map(operator.mul, samples, samples)) / max(len(samples), 1) / 2.0**30
    return max(10 * math.log10(power), QUIETEST_DBFS) if power else QUIETEST_DBFS
