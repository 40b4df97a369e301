"""Near-duplicates: frames in which nothing has changed are left out, and one in which anything has is kept."""

import io
import itertools
import os
import struct
import time
import wave
import zlib
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from edgefl.core.errors import DataError, TaskError
from edgefl.device.collect import similar_pictures
from edgefl.device.collect.file_store import UNLABELLED, list_files, open_file_store
from edgefl.device.collect.folder_collector import FolderCollector
from edgefl.device.collect.row_store import StoreLimits
from edgefl.device.collect.settings import FolderSection
from edgefl.device.collect.similar_pictures import SimilarPictures

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install edgefl[pictures]")
LIMITS = StoreLimits(max_bytes=10**7)
NUMBERS = itertools.count()


def _scene(seed):
    """Returns [120, 160] grey values of a scene: blocks of random brightness."""
    return np.kron(np.random.default_rng(seed).uniform(40, 200, (6, 8)), np.ones((20, 20)))


def _encode(scene, noise_seed=0, form="JPEG"):
    noise = np.random.default_rng(noise_seed).normal(0, 3, scene.shape)
    file = io.BytesIO()
    image.fromarray(np.clip(scene + noise, 0, 255).astype(np.uint8)).save(file, form)
    return file.getvalue()


def _with_bird(scene):
    """Returns the scene with an object of a hundredth of it."""
    scene = scene.copy()
    scene[50:64, 70:84] += 55 if scene[50:64, 70:84].mean() < 120 else -55
    return scene


def _damaged_png():
    """Returns a file whose parts have their checksums, and whose pixels cannot be decoded."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 0, 0, 0, 0)), (b"IDAT", b"abc"), (b"IEND", b"")]
    parts = [struct.pack(">I", len(data)) + kind + data for kind, data in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(part + struct.pack(">I", zlib.crc32(part[4:])) for part in parts)


def _sound(number):
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(number.to_bytes(2, "little") * 40)
    return file.getvalue()


class Site:
    """A folder, and a collector that leaves out what is similar."""

    def __init__(self, root, store, max_levels):
        self.source, self.counts = root / "in", Counter(store.state.counts)
        self.source.mkdir(exist_ok=True)
        similar = SimilarPictures(store, max_levels)
        section = FolderSection(path=str(self.source), settle_s=0.1, remove=True)
        self.collector = FolderCollector(
            {"camera": section}, store, self.counts, flush_s=0, similar=similar, clock=lambda: time.time() + 60
        )

    def take(self, *contents, folder="", suffix=".jpg"):
        """Puts files there, and takes each; returns how many were kept."""
        before = self.collector._store.num_files
        for content in contents:
            number = next(NUMBERS)
            path = self.source / folder / f"{number}{suffix}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            os.utime(path, (1000 + number, 1000 + number))
            self.collector.step()
        return self.collector._store.num_files - before


@contextmanager
def _site(root, max_levels=8.0):
    with open_file_store(root / "shard", LIMITS, "oldest") as store:
        yield Site(root, store, max_levels)


def test_a_frame_in_which_only_noise_and_light_differ_is_left_out_and_counted(tmp_path):
    scene = _scene(1)
    with _site(tmp_path) as site:
        assert site.take(_encode(scene), _encode(scene, 1), _encode(scene * 0.8, 2), _encode(scene * 1.1, 3)) == 1
        assert site.take(_encode(_with_bird(scene)), _encode(_scene(2)), _encode(scene[:, ::-1])) == 3
        assert site.take(_encode(scene)) == 0
        assert (site.counts["camera.similar"], site.counts["camera.duplicates"]) == (3, 1)
        assert not list(site.source.iterdir())
        site.collector.flush()
        assert site.collector._store.state.counts["camera.similar"] == 3


def test_a_dark_picture_is_not_taken_for_another_by_its_noise_and_changes_of_dim_light_count(tmp_path):
    dark = np.full((120, 160), 12.0)
    with _site(tmp_path) as site:
        assert site.take(_encode(dark, 1), _encode(dark, 2)) == 1
        lamp = dark.copy()
        lamp[50:64, 70:84] += 60
        assert site.take(_encode(lamp)) == 1


def test_what_is_similar_is_known_again_after_a_restart_and_no_more_once_it_is_gone(tmp_path, monkeypatch):
    with _site(tmp_path) as site:
        site.take(_encode(_scene(1)), _encode(_scene(2)))
    with _site(tmp_path) as site:
        assert site.take(_encode(_scene(1), 5), _encode(_scene(2), 5)) == 0
        for file in list(list_files(tmp_path / "shard")):
            (tmp_path / "shard" / file.label / file.name).unlink()
        site.collector._store.refresh()
        assert site.take(_encode(_scene(1), 6)) == 1
    monkeypatch.setattr(similar_pictures, "LOAD_S", -1.0)
    with _site(tmp_path) as site:
        assert site.take(_encode(_scene(1), 7)) == 1, "a start takes no longer than it may"


def test_only_so_many_of_the_newest_are_compared_with(tmp_path, monkeypatch):
    monkeypatch.setattr(similar_pictures, "MAX_PICTURES", 2)
    for number, (seed, kept) in enumerate(((1, 1), (2, 1), (3, 1), (2, 0), (1, 1))):
        with _site(tmp_path) as site:
            assert site.take(_encode(_scene(seed), number)) == kept
    with _site(tmp_path) as site:
        assert site.take(*(_encode(_scene(seed), number) for number, seed in enumerate((4, 5, 6, 5, 4)))) == 4


def test_a_picture_with_a_class_is_similar_to_none_of_another(tmp_path):
    scene = _scene(1)
    with _site(tmp_path) as site:
        assert site.take(_encode(scene, 1)) == 1
        assert site.take(_encode(scene, 2), _encode(scene, 3), folder="robin") == 1
        assert site.take(_encode(scene, 4), folder="wren") == 1
        assert site.take(_encode(scene, 5)) == 0
        assert sorted(file.label for file in list_files(tmp_path / "shard")) == [UNLABELLED, "robin", "wren"]


def test_a_picture_that_cannot_be_decoded_is_refused_and_sounds_are_all_kept(tmp_path):
    with _site(tmp_path) as site:
        assert site.take(_damaged_png(), suffix=".png") == 0
        assert site.counts["camera.refused"] == 1
        assert site.take(_sound(1), _sound(2), suffix=".wav") == 2


def test_a_picture_that_takes_too_much_memory_is_refused_and_the_next_one_kept(tmp_path, monkeypatch, caplog):
    large = io.BytesIO()
    image.new("L", (4001, 4000)).save(large, "PNG")
    with _site(tmp_path) as site:
        with monkeypatch.context() as patch:
            patch.setattr(image.Image, "convert", _lack_memory)
            with pytest.raises(DataError, match="4001 x 4000 pixels, at most 16,000,000"):
                similar_pictures.compute_signature(large.getvalue(), "large.png")
            assert site.take(_encode(_scene(2)), _encode(_scene(2))) == 0
            assert "is left out: too little memory" in caplog.text
        assert site.counts["camera.refused"] == 2
        assert site.take(_encode(_scene(3))) == 1
    monkeypatch.setattr(image.Image, "convert", _lack_memory)
    with _site(tmp_path):
        pass


def _lack_memory(*_):
    raise MemoryError


def test_without_pillow_the_start_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(TaskError, match="pictures"), _site(tmp_path):
        pass
