"""How many near-identical frames the collector leaves out, and how many of those with something new it keeps.

    python benchmarks/similar_pictures.py [--scenes 40] [--levels 8] [--json]

Frames of 320 x 240 are made of scenes with the spectrum of natural pictures (1/f), as JPEG files of quality 85, with
the noise of a sensor (4 grey levels). For each scene a frame is kept; then come others of the same scene: with new
noise, in light that is up to a fifth darker or brighter, moved by a pixel, and with a disc of another brightness that
covers 0.2 to 2 % of it. The last are frames of other scenes. Beside the collector's cells stands a difference hash of
256 bits, at the Hamming distance at which it leaves out as many of the first two kinds. `ms` is CPU time to decode
and compare.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from harness import options
from PIL import Image

from edgefl.core.types import Array
from edgefl.device.collect.similar_pictures import MAX_PICTURES, compute_signature

HEIGHT, WIDTH, NOISE, QUALITY = 240, 320, 4.0, 85
FRAMES = 5
"""Of each kind and scene."""
SHARES = (0.002, 0.005, 0.01, 0.02)
HASH_SIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    kind: str
    num: int
    left_out: float
    left_out_by_hash: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=40)
    parser.add_argument("--levels", type=float, default=8.0, help="similar_levels [%(default)s]")
    parser.add_argument("--json", action="store_true")
    args = options.parse(parser, scenes=2)
    cells, bits, seconds = _measure(args.scenes)
    usual = np.concatenate([bits[kind] for kind in ("noise", "light")])
    share = np.mean(np.concatenate([cells[kind] for kind in ("noise", "light")]) <= args.levels)
    most_bits = np.quantile(usual, share, method="higher")
    results = [
        Result(
            kind=kind,
            num=len(cells[kind]),
            left_out=float(np.mean(np.array(cells[kind]) <= args.levels)),
            left_out_by_hash=float(np.mean(np.array(bits[kind]) <= most_bits)),
        )
        for kind in cells
    ]
    if args.json:
        facts = {"levels": args.levels, "hash_bits": int(most_bits), "ms": seconds * 1000}
        sys.stdout.write(json.dumps({"v": 1, "results": [asdict(one) for one in results], **facts}) + "\n")
        return 0
    sys.stdout.write(f"{'':16}{'frames':>8}{'left out':>10}{f'hash, {int(most_bits)} bits':>16}\n")
    for one in results:
        sys.stdout.write(f"{one.kind:16}{one.num:8}{one.left_out:10.3f}{one.left_out_by_hash:16.3f}\n")
    sys.stdout.write(f"{seconds * 1000:.1f} ms a picture, compared with {MAX_PICTURES}\n")
    return 0


def _measure(num_scenes: int) -> tuple[dict[str, list[float]], dict[str, list[int]], float]:
    """Returns distances by kind: of the cells, of the hash; and the CPU seconds of a picture."""
    cells, bits = dict[str, list[float]](), dict[str, list[int]]()
    known, spent_s, num = np.zeros((MAX_PICTURES, 256), np.float32), 0.0, 0
    for seed in range(num_scenes):
        rng = np.random.default_rng(seed)
        scene, other = _make_scene(rng), _make_scene(rng)
        first = _encode(scene, rng)
        signature, number = compute_signature(first, "first"), _hash(first)
        for kind, frame in _list_frames(scene, other, rng):
            content = _encode(frame, rng)
            begin_s = time.process_time()
            found = compute_signature(content, kind)
            np.abs(known - found).max(axis=1)
            spent_s, num = spent_s + time.process_time() - begin_s, num + 1
            cells.setdefault(kind, []).append(float(np.abs(signature - found).max()))
            bits.setdefault(kind, []).append((number ^ _hash(content)).bit_count())
    return cells, bits, spent_s / num


def _list_frames(scene: Array, other: Array, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    for _ in range(FRAMES):
        yield "noise", scene
        yield "light", scene * rng.uniform(0.8, 1.2)
        yield "moved by 1 px", np.roll(scene, 1, axis=1)
        for share in SHARES:
            yield f"disc of {share:.1%}", _add_disc(scene, share, rng)
        yield "other scene", other


def _make_scene(rng: np.random.Generator) -> Array:
    """Returns grey values with a spectrum that falls with the frequency, of mean 110 and deviation 35."""
    rows, columns = np.meshgrid(np.fft.fftfreq(HEIGHT), np.fft.fftfreq(WIDTH), indexing="ij")
    frequencies = np.hypot(rows, columns)
    frequencies[0, 0] = 1.0
    spectrum = rng.normal(size=(HEIGHT, WIDTH)) + 1j * rng.normal(size=(HEIGHT, WIDTH))
    waves = np.fft.ifft2(spectrum / frequencies**1.2).real
    return 110 + 35 * (waves - waves.mean()) / waves.std()


def _add_disc(scene: Array, share: float, rng: np.random.Generator) -> Array:
    """Returns a scene with a disc that covers a share of it, 40 grey levels off what is behind."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    middle_y, middle_x = rng.uniform(40, HEIGHT - 40), rng.uniform(40, WIDTH - 40)
    is_disc = (y - middle_y) ** 2 + (x - middle_x) ** 2 < share * HEIGHT * WIDTH / np.pi
    return np.where(is_disc, scene[is_disc].mean() + 40 * rng.choice([-1, 1]), scene)


def _encode(scene: Array, rng: np.random.Generator) -> bytes:
    file = io.BytesIO()
    pixels = np.clip(scene + rng.normal(0.0, NOISE, scene.shape), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def _hash(content: bytes) -> int:
    """Returns a difference hash: whether each of 16 x 16 cells is brighter than the one on its left."""
    with Image.open(io.BytesIO(content)) as picture:
        size = (HASH_SIDE + 1, HASH_SIDE)
        grey = np.asarray(picture.convert("L").resize(size, Image.Resampling.BOX), np.int16)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes(), "big")


if __name__ == "__main__":
    sys.exit(main())
