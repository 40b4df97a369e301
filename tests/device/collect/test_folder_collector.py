import io
import itertools
import os
import time
import wave
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from peer_boards import eventually

from edgefl.core.errors import ConfigError
from edgefl.device.collect import file_store, folder_collector
from edgefl.device.collect.file_store import UNLABELLED, check_example, open_file_store
from edgefl.device.collect.folder_collector import FolderCollector
from edgefl.device.collect.forgetting import FORGET_NAME
from edgefl.device.collect.recorder import Recorder
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.device.collect.settings import FolderSection
from edgefl.tasks.datasets.class_folders import survey_sounds

SETTLE_S = 2.0


def _wav(number):
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(number.to_bytes(2, "little") * 40)
    return file.getvalue()


def _png():
    chunks = [(b"IHDR", b"\0" * 13), (b"IDAT", b"abc"), (b"IEND", b"")]
    parts = [
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class Site:
    """A folder that something fills, and the collector of it, some time after the last file settled."""

    def __init__(self, root, store, **settings):
        self.source, self.store = root / "in", store
        self.source.mkdir(exist_ok=True)
        self.counts = Counter(store.state.counts)
        section = FolderSection(path=str(self.source), settle_s=SETTLE_S, **settings)
        self.later_s = SETTLE_S + 1.0
        self.collector = FolderCollector(
            {"camera": section}, store, self.counts, flush_s=0, clock=lambda: time.time() + self.later_s
        )

    def put(self, name, content, at_s=None):
        path = self.source / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        if at_s is not None:
            os.utime(path, (at_s, at_s))
        return path


@contextmanager
def _site(root, *, max_bytes=10**6, max_age_s=0.0, evicted="oldest", **settings):
    limits = StoreLimits(max_bytes=max_bytes, max_age_s=max_age_s)
    with open_file_store(root / "shard", limits, evicted) as store:
        yield Site(root, store, **settings)


def _names(root, label):
    return sorted(path.name[:19] for path in (root / "shard" / label).iterdir())


def test_files_of_class_folders_become_examples_and_others_lie_apart(tmp_path):
    with _site(tmp_path) as site:
        site.put("yes/a.wav", _wav(1), at_s=0.5)
        site.put("no/b.WAV", _wav(2))
        site.put("c.wav", _wav(3))
        site.put("yes/.half.wav", _wav(4))
        site.put("yes/notes.txt", b"x")
        (site.source / "yes/link.wav").symlink_to(site.source / "c.wav")
        site.collector.step()
        assert site.store.count_classes() == {UNLABELLED: 1, "no": 1, "yes": 1}
    assert _names(tmp_path, "yes") == ["19700101T000000.500"]
    assert survey_sounds(tmp_path / "shard", "audio", is_detailed=True).details == ("no: 1", "yes: 1")


def test_a_file_that_still_changes_is_left_for_later(tmp_path):
    with _site(tmp_path) as site:
        site.later_s = 0.0
        site.put("yes/a.wav", _wav(1))
        site.collector.step()
        assert site.store.num_files == 0
        site.later_s = SETTLE_S + 1.0
        site.collector.step()
        assert site.store.num_files == 1


def test_the_same_content_is_kept_once_and_a_restart_takes_nothing_twice(tmp_path):
    with _site(tmp_path) as site:
        site.put("yes/a.wav", _wav(1), at_s=10)
        site.put("yes/b.wav", _wav(1), at_s=20)
        site.collector.step()
        assert site.counts["camera.duplicates"] == 1
    with _site(tmp_path) as site:
        site.put("yes/c.wav", _wav(2))
        site.collector.step()
        assert site.store.num_files == 2
        assert site.counts["camera.duplicates"] == 1
        site.store.state = type(site.store.state)(columns=())  # as after a crash before the commit
        site.collector = FolderCollector(
            {"camera": FolderSection(path=str(site.source))},
            site.store,
            site.counts,
            flush_s=0,
            clock=lambda: time.time() + 9,
        )
        site.collector.step()
        assert site.store.num_files == 2


def test_what_is_damaged_too_large_or_without_a_usable_class_is_counted_and_stays_out(tmp_path):
    with _site(tmp_path, max_file_mb=0.001) as site:
        site.put("yes/a.wav", _wav(1)[:-1])
        site.put("yes/b.wav", _wav(1) * 20)
        site.put("a\u202eb/c.wav", _wav(1))
        site.put("yes/d.wav", _wav(2))
        site.collector.step()
        assert site.store.count_classes() == {"yes": 1}
        assert site.counts == {"camera.refused": 2, "camera.too_large": 1}


def test_taken_files_are_removed_where_the_owner_says_so_and_bad_ones_stay(tmp_path):
    with _site(tmp_path, remove=True) as site:
        site.put("yes/a.wav", _wav(1))
        bad = site.put("yes/b.wav", b"RIFF")
        site.collector.step()
        assert [path for path in site.source.rglob("*") if path.is_file()] == [bad]


def test_where_nothing_may_be_removed_files_are_taken_once_and_that_is_counted(tmp_path, monkeypatch):
    def refuse(path, *, missing_ok=False):
        raise OSError(30, "Read-only file system", str(path))

    with _site(tmp_path, remove=True) as site:
        site.put("yes/a.wav", _wav(1))
        site.put("yes/b.wav", _wav(2))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            assert [site.collector.step() for _ in range(2)] == [folder_collector.POLL_S] * 2
        assert site.store.num_files == 2
        assert site.store.state.counts == {"camera.not_removed": 2}


def test_files_that_come_fast_do_not_fill_the_card_before_the_next_commit(tmp_path):
    with _site(tmp_path, max_bytes=2 * len(_wav(0))) as site:
        for number in range(5):
            assert site.store.add(_wav(number), "yes", ".wav", float(number))
        assert site.store.num_files == 2
    assert _names(tmp_path, "yes") == ["19700101T000003.000", "19700101T000004.000"]


def test_files_that_are_too_old_go_where_nothing_new_comes_and_on_a_full_card(tmp_path, monkeypatch):
    with _site(tmp_path, max_age_s=100.0) as site:
        site.collector.step()
        site.store.add(_wav(1), "yes", ".wav", time.time() - 200)
        site.collector.step()
        assert site.store.num_files == 0
        site.store.add(_wav(2), "yes", ".wav", time.time() - 200)
        site.put("yes/a.wav", _wav(3))
        with monkeypatch.context() as patch:
            patch.setattr(file_store, "open_atomic", _full)
            assert site.collector.step() == folder_collector.RETRY_S
        assert site.store.num_files == 0


@pytest.mark.parametrize(("evicted", "left"), [("oldest", {"no": 2}), ("balanced", {"no": 1, "yes": 1})])
def test_above_the_limit_the_oldest_go_or_those_of_the_class_that_has_most(tmp_path, evicted, left):
    size = len(_wav(0))
    with _site(tmp_path, max_bytes=2 * size, evicted=evicted) as site:
        for number, label in enumerate(["yes", "no", "no", "no"]):
            site.put(f"{label}/{number}.wav", _wav(number), at_s=number)
        site.collector.step()
        assert site.store.count_classes() == left
        assert site.store.num_bytes == 2 * size
    assert _names(tmp_path, "no")[-1] == "19700101T000003.000"


def test_many_files_come_in_turns_and_none_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_collector, "MAX_FILES_AT_ONCE", 3)
    with _site(tmp_path) as site:
        for number in range(10):
            site.put(f"yes/{number}.wav", _wav(number))
        for _ in range(10):
            site.collector.step()
        assert site.store.num_files == 10


def test_a_class_folder_that_is_removed_stops_nothing(tmp_path):
    with _site(tmp_path) as site:
        site.put("yes/a.wav", _wav(1)).unlink()
        site.collector.step()
        (site.source / "yes").rmdir()
        site.put("no/b.wav", _wav(2))
        site.collector.step()
        assert site.store.count_classes() == {"no": 1}


def test_a_full_card_leaves_files_for_later(tmp_path, monkeypatch):
    with _site(tmp_path) as site:
        site.put("yes/a.wav", _wav(1))
        with monkeypatch.context() as patch:
            patch.setattr(file_store, "open_atomic", _full)
            assert site.collector.step() == folder_collector.RETRY_S
        assert list((tmp_path / "shard" / "yes").iterdir()) == []
        site.collector.step()
        assert site.store.num_files == 1


class Clips:
    """A device that has three sounds."""

    def __init__(self):
        self.waiting = [_wav(1), _wav(2), _wav(3)]

    def read(self, stopping):
        if self.waiting:
            return self.waiting.pop()
        stopping.wait(60)
        return b""

    def accept(self):
        pass

    close = accept


def test_a_full_card_leaves_recordings_for_later_in_their_order(tmp_path, monkeypatch):
    with _site(tmp_path) as site:
        source = Recorder("room", ".wav", Clips, site.counts, clock=itertools.count().__next__)
        site.collector = FolderCollector({}, site.store, site.counts, flush_s=0, recorders={"room": source})
        source.start()
        with monkeypatch.context() as patch:
            patch.setattr(file_store, "open_atomic", _full)
            eventually(source.read)
            assert [site.collector.step() for _ in range(3)] == [folder_collector.RETRY_S] * 3
        eventually(lambda: site.collector.step() and site.store.num_files == 3)
        source.close()
        assert not +site.counts
    assert _names(tmp_path, UNLABELLED) == [f"19700101T00000{number}.000" for number in range(3)]


def _full(path, **_mode):
    raise OSError(28, "No space left on device", str(path))


def test_a_clock_that_was_set_back_takes_new_files_all_the_same(tmp_path):
    with _site(tmp_path) as site:
        site.put("yes/a.wav", _wav(1))
        site.collector.step()
        site.later_s = -1000.0
        site.collector.step()
        site.put("yes/b.wav", _wav(2))
        site.later_s = SETTLE_S + 1.0
        site.collector.step()
        assert site.store.num_files == 2


def test_a_folder_of_rows_takes_no_files_and_the_other_way_round(tmp_path):
    limits = StoreLimits(max_bytes=1000)
    with open_row_store(tmp_path / "rows", ("a",), limits) as store:
        store.commit([], {"x": "1"}, {}, 0.0)
    with pytest.raises(ConfigError, match="holds rows of a"), open_file_store(tmp_path / "rows", limits, "oldest"):
        pass


def test_a_file_is_whole_where_its_end_is_there():
    jpeg = b"\xff\xd8\xff\xe0abc\xff\xd9"
    for content, suffix in ((_wav(1), ".wav"), (_png(), ".png"), (jpeg, ".jpg")):
        check_example(content, suffix)
        for damaged in (content[:-1], content[1:], b"", content[:20] + b"\x01" + content[21:-1]):
            with pytest.raises(ValueError):
                check_example(damaged, suffix)
    with pytest.raises(ValueError):
        check_example(_png().replace(b"abc", b"abd"), ".png")


def test_a_request_that_cannot_be_read_stops_no_collecting(tmp_path):
    with _site(tmp_path) as site:
        (site.store.folder / FORGET_NAME).write_bytes(b"{")
        site.put("yes/a.wav", _wav(1))
        assert site.collector.step() == folder_collector.POLL_S
        assert len(_names(tmp_path, "yes")) == 1
