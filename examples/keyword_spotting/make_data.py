"""Synthesises speakers who say three words, other words and nothing: a folder of WAV files for each of these."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RATE, NUM_SAMPLES = 8000, 8000
NUM_SPEAKERS, NUM_NEW_SPEAKERS, REPEATS = 30, 6, 6
VOWELS = {"a": (750, 1200), "e": (550, 1850), "i": (300, 2250), "o": (500, 900), "u": (320, 700)}
"""The first two formants of a grown man, in Hz."""
WORDS = {"alo": "ao", "lumi": "ui", "rea": "ea"}
OTHERS = ("oa", "iu", "ae", "ei", "ou", "eo")


def say(vowels: str, speaker: np.random.Generator, pitch: float, tract: float) -> NDArray[np.float64]:
    """Returns a word of 0.35 to 0.6 s: harmonics of the pitch, loud near the formants, that glide between vowels."""
    count = int(RATE * speaker.uniform(0.35, 0.6))
    way = 1 / (1 + np.exp(-np.linspace(-8, 8, count)))
    first, last = (np.array(VOWELS[vowel]) * tract * speaker.uniform(0.96, 1.04, 2) for vowel in vowels)
    formants = first[:, None] * (1 - way) + last[:, None] * way
    hertz = pitch * speaker.uniform(0.92, 1.08) * np.linspace(1.1, 0.9, count)
    phase, sound = 2 * np.pi * np.cumsum(hertz) / RATE, np.zeros(count)
    for harmonic in range(1, int(RATE / 2 / hertz.max())):
        peaks = np.exp(-np.square((harmonic * hertz - formants) / np.array([[90.0], [140.0]])))
        sound += (peaks[0] + 0.6 * peaks[1] + 0.02) * np.sin(harmonic * phase)
    return sound * np.hanning(count) ** 0.5


def record(vowels: str, speaker: np.random.Generator, pitch: float, tract: float) -> NDArray[np.int16]:
    """Returns a second of a room's noise, with a word near its middle where there are vowels."""
    samples = speaker.normal(0, speaker.uniform(0.003, 0.03), NUM_SAMPLES)
    if vowels:
        sound = say(vowels, speaker, pitch, tract)
        start = (NUM_SAMPLES - len(sound)) // 2 + speaker.integers(-800, 800)
        samples[start : start + len(sound)] += speaker.uniform(0.1, 0.5) * sound / np.abs(sound).max()
    return (np.clip(samples, -1, 1) * 32767).astype("<i2")


def write_speaker(folder: Path, number: int) -> None:
    """Writes what a speaker says: each word `REPEATS` times, as often another one, and as often nothing."""
    speaker = np.random.default_rng(number)
    pitch, tract = speaker.uniform(95, 230), speaker.uniform(0.92, 1.18)
    for take in range(REPEATS):
        for label, vowels in (WORDS | {"unknown": str(speaker.choice(OTHERS)), "silence": ""}).items():
            path = folder / label / f"speaker{number}_{take}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                file.writeframes(record(vowels, speaker, pitch, tract).tobytes())


def main() -> None:
    for number in range(NUM_SPEAKERS + NUM_NEW_SPEAKERS):
        write_speaker(Path("data", "words" if number < NUM_SPEAKERS else "new"), number)


if __name__ == "__main__":
    main()
