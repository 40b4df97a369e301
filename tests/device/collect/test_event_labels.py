"""Labels from events: by time, with a default where none came, of rows and files, from files and a real broker."""

import json
import signal
import time
from collections import Counter

import pytest
from collector_process import count_kept_rows, run_collector_process
from device.collect.test_collector import Clock, Site, _mosquitto, _publisher
from peer_boards import eventually
from requirements import needs
from table_parts import read_table

from edgefl.core.errors import ConfigError, StoreError
from edgefl.device.collect import event_labels as module
from edgefl.device.collect import folder_collector
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.collector import run_collector
from edgefl.device.collect.event_labels import EventLabeller
from edgefl.device.collect.file_store import UNLABELLED, open_file_store
from edgefl.device.collect.folder_collector import FolderCollector
from edgefl.device.collect.line_source import LinesSource
from edgefl.device.collect.readings import Reading
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.device.collect.settings import LabelsSection, LinesSection, check_label_columns, load_collect_file
from edgefl.system.row_labels import LabelKind, LabelLine, append_row_labels, read_row_labels
from edgefl.tasks.configured.series import series
from edgefl.tasks.configured.table import table
from edgefl.tasks.datasets import table_files

pytestmark = pytest.mark.timeout(60)
LIMITS = StoreLimits(max_bytes=10**7)


class Source:
    columns = ("a", "state")

    def __init__(self):
        self.pending, self.received_since_s = [], 0.0

    def read(self):
        found, self.pending = self.pending, []
        return found

    def close(self):
        pass


class Resumable(Source):
    """A source whose position is how often it was read."""

    end_s = float("inf")

    def __init__(self):
        super().__init__()
        self.num_reads = 0

    @property
    def position(self):
        return str(self.num_reads)

    def read(self):
        self.num_reads += 1
        return super().read()

    def resume(self, position):
        pass


def _section(**settings):
    return LabelsSection(column="state", **{"before_s": 3.0, "default": "calm", **settings})


def _labeller(folder, source, now_s=1000.0, **settings):
    return EventLabeller(_section(**settings), folder, "one", source, Counter(), flush_s=0.0, now_s=now_s)


def _flush(labeller, now_s, *readings):
    labeller.take_events(readings, now_s)
    labeller.flush()


def _event(label, time_s):
    return Reading(values={"state": label}, time_s=time_s)


def test_rows_near_an_event_get_its_label_others_the_default_once_no_event_can_come(tmp_path):
    source = Source()
    with open_row_store(tmp_path, ("a",), LIMITS) as store:
        labeller = _labeller(tmp_path, source, late_s=5.0)
        site = Site(tmp_path, store, {"one": source}, every_s=0, flush_s=0)
        site.collector._labeller = labeller
        for second in range(30):
            source.pending.append(Reading(values={"a": float(second)}, time_s=1000.0 + second))
            if second == 14:
                source.pending.append(_event("failed", 1012.0))
            site.wait(1)
    parts = read_table(tmp_path, "table", ("a",), ("label",))
    found = {int(a): label for part in parts for (a,), label in zip(part.numbers, part.texts[0], strict=True)}
    assert [second for second, label in found.items() if label == "failed"] == [9, 10, 11, 12]
    assert {found[second] for second in (0, 8, 13, 20)} == {"calm"}
    assert set(range(23, 30)).isdisjoint(found)  # an event may still come
    data = table(columns=["a"], target="label", labels=["calm", "failed"]).read(str(tmp_path))
    assert (len(data), int(data.targets.sum())) == (len(found), 4)


def test_a_window_whose_last_row_has_no_label_is_no_example_and_none_lies_over_a_gap(tmp_path):
    with open_row_store(tmp_path, ("a",), LIMITS) as store:
        store.commit([Row(float(time), (float(time),), 1) for time in range(20)], {}, {}, 0.0)
    source = Source()
    labeller = _labeller(tmp_path, source, default="", before_s=2.0)
    _flush(labeller, 1000.0, _event("up", 9.0), _event("down", 15.0))
    task = series(columns=["a"], window=4, step=1, target="label", labels=["up", "down"], group="span")
    data = task.read(str(tmp_path))
    assert data.inputs[:, 0, -1].tolist() == [7, 8, 9, 13, 14, 15]
    assert data.inputs[0, 0].tolist() == [4, 5, 6, 7]
    assert data.targets.tolist() == [0, 0, 0, 1, 1, 1]


def test_no_default_is_said_of_a_time_in_which_events_were_not_heard(tmp_path):
    source = Source()
    labeller = _labeller(tmp_path, source, after_s=1.0)
    _flush(labeller, 1010.0)
    source.received_since_s = float("inf")
    _flush(labeller, 1020.0)
    source.received_since_s = 1030.0
    _flush(labeller, 1050.0)
    found = read_row_labels(tmp_path).find([1000.0, 1002.0, 1006.9, 1008.0, 1030.0, 1031.5, 1046.9, 1047.5])
    assert found == ["", "calm", "calm", "", "", "calm", "calm", ""]


def test_the_default_is_said_again_after_a_clock_that_was_far_ahead(tmp_path):
    labeller = _labeller(tmp_path, Source(), now_s=9e8)
    _flush(labeller, 9e8 + 50)
    _flush(labeller, 2000.0)
    _flush(labeller, 2050.0)
    assert read_row_labels(tmp_path).find([1990.0, 2010.0, 2048.0]) == ["", "calm", ""]


def test_a_file_that_cannot_be_moved_stays_in_the_store(tmp_path):
    with open_file_store(tmp_path, LIMITS, "oldest") as store:
        store.add(b"1", UNLABELLED, ".png", 5.0)
        (tmp_path / "robin").write_bytes(b"no folder")
        with pytest.raises(StoreError):
            store.move(store.list_class(UNLABELLED)[0], "robin")
        assert (store.num_files, store.num_bytes, store.count_classes()) == (1, 1, {UNLABELLED: 1})
        assert not store.add(b"1", UNLABELLED, ".png", 5.0)


def test_rows_with_a_label_that_the_task_does_not_have_are_left_out_and_counted(tmp_path, caplog):
    with open_row_store(tmp_path, ("a",), LIMITS) as store:
        store.commit([Row(float(time), (float(time),), 1) for time in range(12)], {}, {}, 0.0)
    labeller = _labeller(tmp_path, Source(), default="", before_s=3.0)
    _flush(labeller, 1000.0, _event("up", 3.0), _event("dwon", 7.0), _event("down", 11.0))
    data = table(columns=["a"], target="label", labels=["up", "down"]).read(str(tmp_path))
    assert sorted(data.inputs[:, 0].tolist()) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert "4 rows" in caplog.text
    assert "dwon" not in caplog.text
    windows = series(columns=["a"], window=4, step=1, target="label", labels=["up", "down"], group="span")
    assert windows.read(str(tmp_path)).inputs[:, 0, -1].tolist() == [3, 8, 9, 10, 11]
    numbers = table(columns=["a"], target="label", labels=["calm", "up", "down"])  # a label may be its number
    _flush(labeller, 1000.0, _event("2", 7.0))
    assert sorted(numbers.read(str(tmp_path)).targets.tolist()) == [1] * 4 + [2] * 8


def test_the_labels_of_a_shard_are_read_once(tmp_path, monkeypatch):
    with open_row_store(tmp_path, ("a",), StoreLimits(max_bytes=2000)) as store:
        for time in range(12):
            store.commit([Row(float(time), (float(time),), 1)], {}, {}, 0.0)
        assert len(store.state.segments) > 1
    _flush(_labeller(tmp_path, Source(), default="", before_s=30.0), 1000.0, _event("up", 11.0))
    reads, read = [], table_files.read_row_labels
    monkeypatch.setattr(table_files, "read_row_labels", lambda folder: reads.append(folder) or read(folder))
    assert len(table(columns=["a"], target="label", labels=["up", "down"]).read(str(tmp_path))) == 12
    assert reads == [tmp_path]


def test_no_default_is_said_over_a_jump_of_the_clock_nor_where_an_event_was_lost(tmp_path):
    source = Source()
    with open_row_store(tmp_path, ("a",), LIMITS) as store:
        site = Site(tmp_path, store, {"one": source}, every_s=0, flush_s=0)
        labeller = site.collector._labeller = _labeller(tmp_path, source)
        site.wait(10)
        for jump_s in (1e6, -1e6 + 100):
            site.wall.now_s += jump_s
            site.wait(1)
            site.wait(9)
    # 1000 to 1010, a million later 1 000 010 to 1 000 020, and back at 1120.
    found = read_row_labels(tmp_path)
    assert found.find([1006.9, 1007.5, 1e6, 1e6 + 1010.5]) == ["calm", "", "", ""]
    assert found.find([1e6 + 1012, 1e6 + 1016.9, 1120.5, 1121.5]) == ["calm", "calm", "", "calm"]
    for loss in ("one.too_fast", "one.unread", "one.refused", "labels.refused", "labels.too_fast"):
        start_s = labeller._taken_s
        labeller._counts[loss] += 1
        _flush(labeller, start_s + 10)
        _flush(labeller, start_s + 20)
        found = read_row_labels(tmp_path).find([start_s + second for second in (-4, 0, 9, 11, 16.9)])
        assert found == ["calm", "", "", "calm", "calm"], loss


def test_no_default_is_said_while_events_wait_unread(tmp_path):
    labeller = _labeller(tmp_path, Source())
    _flush(labeller, 1010.0)
    labeller.flush()  # a full card: nothing was read meanwhile
    assert [line.until_s for line in read_row_labels(tmp_path).lines] == [1007.0]


def _lines_labeller(folder, path, counts, now_s, **settings):
    section = LinesSection(path=str(path), columns={"state": "/s"}, time="/t")
    source = LinesSource("one", section, ["state"], counts, clock=lambda: now_s)
    return source, EventLabeller(
        _section(before_s=10.0, **settings), folder, "one", source, counts, flush_s=0.0, now_s=now_s
    )


def test_the_default_of_lines_begins_at_the_first_one_and_goes_on_at_the_last_default(tmp_path):
    path, counts, position, spans = tmp_path / "e.jsonl", Counter(), "", []
    for now_s, text in (
        (100_140.0, '{"t": 100000, "s": "up"}\n'),
        (100_200.0, ""),  # from where the last process was
        (100_300.0, "no line\n"),
        (100_400.0, ""),  # from the loss on, in another process too
        (50_000.0, ""),  # the clock was set back: from now on
        (50_100.0, ""),
    ):
        with path.open("a") as file:
            file.write(text)
        source, labeller = _lines_labeller(tmp_path, path, counts, now_s)
        source.resume(position)
        _flush(labeller, now_s, *source.read())
        if now_s == 50_000.0:
            _flush(labeller, now_s + 20)
        position = source.position
        lines = [line for line in read_row_labels(tmp_path).lines if line.label == "calm"]
        spans, num_known = [(line.since_s, line.until_s) for line in lines], len(spans)
        assert len(spans) <= num_known + 1
        source.close()
    assert spans == [
        (100_000, 100_130), (100_130, 100_190), (100_300, 100_390), (50_000, 50_010), (50_010, 50_090)
    ]  # fmt: skip


def test_the_row_of_an_events_own_message_gets_its_label_and_none_a_time_to_come(tmp_path):
    with open_row_store(tmp_path, ("a",), LIMITS) as store:
        store.commit([Row(time_s, (1.0,), 1) for time_s in (999.8, 1000.0006, 1000.1)], {}, {}, 0.0)
    labeller = _labeller(tmp_path, Source(), default="", before_s=0.1)
    _flush(labeller, 1000.0006, _event("up", 1000.0006 + 3600))
    (part,) = read_table(tmp_path, "table", ("a",), ("time", "label"))
    assert part.texts == (("1000.001",), ("up",))


def test_what_is_no_label_is_refused_and_a_flood_is_bounded(tmp_path):
    labeller = _labeller(tmp_path, Source(), default="")
    labeller.take_events(
        [_event(label, 1.0) for label in (None, "", "../x", ".hidden", "a\nb", "x" * 81, "\U0001f600" * 64, 3.0)], 1.0
    )
    assert labeller._counts == {"labels.refused": 7}
    labeller.take_events([_event("on", 10.0 + number / 10) for number in range(5000)], 9000.0)
    labeller.take_events([_event(f"s{number}", 5000.0) for number in range(2000)], 9000.0)
    assert labeller._counts["labels.too_fast"] == 1001
    labeller.flush()
    assert len(read_row_labels(tmp_path).lines) == 1000
    assert read_row_labels(tmp_path).find([8.0, 509.0]) == ["on", "on"]


def test_a_full_file_of_labels_takes_no_more_until_old_ones_are_trimmed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1_030_000)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 5000)
    labeller = _labeller(tmp_path, Source(), default="")
    for turn in range(200):
        _flush(labeller, 100.0 * turn, _event(f"s{turn}", 100.0 * turn))
    num_kept = len(read_row_labels(tmp_path).lines)
    assert labeller._counts["labels.too_many"] == 200 - num_kept > 0
    labeller.trim(3000.0)
    assert read_row_labels(tmp_path).find([2900.0, 3000.0, 3100.0]) == ["", "s30", "s31"]
    assert len(read_row_labels(tmp_path).lines) == num_kept - 30


def test_labels_go_with_the_oldest_segment_and_no_label_of_a_row_that_is_still_there_does(tmp_path):
    with open_row_store(tmp_path, ("a",), StoreLimits(max_bytes=1200)) as store:
        for time in (100, 101, 50, 51, 102, 103):  # the clock was set back
            store.commit([Row(float(time), (1.0,), 1)], {}, {}, 0.0)
        assert store.state.segments[-1].first_s > min(segment.first_s for segment in store.state.segments) == 50.0
        labels = [
            LabelLine(since_s=at, until_s=at, label=str(at), kind=LabelKind.PERSON) for at in (40.0, 50.0, 100.0)
        ]
        append_row_labels(tmp_path, labels)
        store.trim_labels()
        assert read_row_labels(tmp_path).find([40.0, 50.0, 100.0]) == ["", "50.0", "100.0"]
        while store.state.segments[0].first_s <= 103:
            store.commit([Row(104.0, (1.0,), 1)], {}, {}, 0.0)
        assert read_row_labels(tmp_path).lines == ()
        store.commit([Row(200.0, (1.0,), 1), Row(90.0, (1.0,), 2)], {}, {}, 0.0)
        assert store.state.segments[-1].first_s == 90.0


def test_labels_count_in_the_limit_of_bytes_and_half_of_it_stays_for_rows_and_files(tmp_path):
    limits = StoreLimits(max_bytes=4000)
    with open_row_store(tmp_path / "rows", ("a",), limits) as store:
        for at in range(200):
            store.commit([Row(1000.0 + at, (1.0,), 1)], {}, {}, 0.0)
        labels = [LabelLine(since_s=2e3, until_s=3e3, label="x" * 50, kind=LabelKind.PERSON)]
        for num, most in ((10, 3200), (60, 2000)):
            append_row_labels(tmp_path / "rows", labels * num)
            store.commit([Row(2000.0, (1.0,), 1)], {}, {}, 0.0)
            assert most - 300 < store.state.num_bytes <= most
    with open_file_store(tmp_path / "files", limits, "oldest") as store:
        for at in range(40):
            store.add(b"%0100d" % at, UNLABELLED, ".png", float(at))
        assert store.num_files == 40
        append_row_labels(tmp_path / "files", labels * 10)
        store.commit(store.state, 0.0)
        assert 31 <= store.num_files <= 33
        append_row_labels(tmp_path / "files", labels * 100)
        assert store.has_excess(0.0)
        store.commit(store.state, 0.0)
        assert store.num_files == 20


def test_a_full_card_keeps_events_for_later_and_removes_what_is_too_old_all_the_same(tmp_path, monkeypatch):
    def fail(*_values):
        raise OSError(28, "No space left on device")

    source = Resumable()
    with open_row_store(tmp_path / "rows", ("a",), StoreLimits(max_bytes=10**7, max_age_s=100.0)) as store:
        site = Site(tmp_path / "rows", store, {"one": source}, every_s=0, flush_s=0)
        site.collector._labeller = _labeller(tmp_path / "rows", source)
        source.pending = [Reading(values={"a": 1.0}, time_s=1000.0)]
        site.wait(1)
        assert (store.state.num_rows, store.state.positions) == (1, {"one": "1"})
        with monkeypatch.context() as full:
            full.setattr(module, "append_row_labels", fail)
            source.pending = [_event("up", 1150.0)]
            site.wait(200)
            assert (store.state.num_rows, store.state.positions) == (0, {"one": "1"})
        site.wait(20)
        assert store.state.positions == {"one": "3"}
    limits = StoreLimits(max_bytes=10**7, max_age_s=100.0)
    with open_file_store(tmp_path / "files", limits, "oldest") as store:
        store.add(b"1", "robin", ".png", 1000.0)
        clock, mono = Clock(), Clock()
        collector = FolderCollector(
            {}, store, Counter(), flush_s=0, events={"one": source},
            labeller=_labeller(tmp_path / "files", source), clock=clock, monotonic=mono,
        )  # fmt: skip
        collector.step()
        assert store.num_files == 1
        position = dict(store.state.positions)
        assert position
        clock.now_s = mono.now_s = 1200.0
        monkeypatch.setattr(module, "append_row_labels", fail)
        source.pending = [_event("up", 1150.0)]
        collector.step()
        assert (store.num_files, dict(store.state.positions)) == (0, position)


def test_labels_of_files_are_read_again_only_where_files_or_labels_are_new(tmp_path, monkeypatch):
    reads, source = [], Source()
    monkeypatch.setattr(
        folder_collector, "read_row_labels", lambda folder: reads.append(1) or read_row_labels(folder)
    )
    with open_file_store(tmp_path, LIMITS, "oldest") as store:
        store.add(b"1", UNLABELLED, ".png", 1000.0)
        labeller = _labeller(tmp_path, source, default="", before_s=6.0)
        collector = FolderCollector(
            {}, store, Counter(), flush_s=0, events={"one": source}, labeller=labeller, clock=lambda: 1030.0
        )
        for _ in range(5):
            collector.step()
        assert len(reads) == 1
        source.pending = [_event("wren", 1020.0)]
        collector.step()
        store.add(b"2", UNLABELLED, ".png", 1018.0)
        collector.step()
        assert store.count_classes() == {UNLABELLED: 1, "wren": 1}


def test_a_class_folder_goes_with_its_last_file(tmp_path):
    with open_file_store(tmp_path, LIMITS, "oldest") as store:
        for number in range(2):
            store.add(b"%d" % number, "robbin", ".png", 5.0)
        for file in store.list_class("robbin"):
            assert (tmp_path / "robbin").is_dir()
            store.move(file, UNLABELLED)
        assert not (tmp_path / "robbin").exists()


def test_files_without_a_class_are_moved_to_that_of_an_event(tmp_path):
    source, names = Source(), {}
    with open_file_store(tmp_path, LIMITS, "oldest") as store:
        for second in range(0, 40, 5):
            store.add(bytes([second]), UNLABELLED, ".png", 1000.0 + second)
        store.add(b"own", "robin", ".png", 1010.0)
        collector = FolderCollector(
            {}, store, Counter(), flush_s=0, events={"one": source},
            labeller=_labeller(tmp_path, source, before_s=6.0), clock=lambda: 1030.0, monotonic=lambda: 0.0,
        )  # fmt: skip
        source.pending = [_event("wren", 1016.0)]
        collector.step()
        assert store.count_classes() == {UNLABELLED: 3, "calm": 3, "robin": 1, "wren": 2}
        assert collector.flush()
    names = {path.parent.name: path.name[9:15] for path in sorted(tmp_path.glob("wren/*"))}
    assert names == {"wren": "001655"}


def _write(path, folder, sources, **labels):
    lines = ["[collect]", f'folder = "{folder}"', "every_s = 0", "flush_s = 0.05", "[labels]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in labels.items()]
    path.write_text("\n".join([*lines, *sources]) + "\n")
    return path


def test_settings_of_labels_that_make_no_sense_are_refused(tmp_path):
    source = ["[sources.one]", 'kind = "lines"', f'path = "{tmp_path}/l.jsonl"']
    source += ['columns = { state = "/s", label = "/l" }']
    path = tmp_path / "c.toml"
    for labels, message in (
        ({"column": "stat"}, "is no column; did you mean"),
        ({"column": "state"}, "must not be called 'label'"),
        ({"column": "state", "before_s": 0}, "must not both be 0"),
        ({"column": "state", "default": "a/b"}, "without a slash"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_collector(_write(path, tmp_path / "shard", source, **labels))
    alone = [*source[:3], 'columns = { state = "/s" }']
    with pytest.raises(ConfigError, match="the only column"):
        run_collector(_write(path, tmp_path / "shard", alone, column="state"))
    assert load_collect_file(path).event_sources == {"one"}


def test_a_source_of_another_author_may_have_the_events_of_files_and_two_sources_may_not(tmp_path):
    (tmp_path / "in").mkdir()
    source = ["[sources.pictures]", 'kind = "folder"', f'path = "{tmp_path}/in"']
    own = ["[sources.own]", f'kind = "{__name__}:OwnEvents"']
    path = _write(tmp_path / "c.toml", tmp_path / "shard", [*source, *own], column="state")
    settings = load_collect_file(path)
    check_label_columns(settings, {"own": ["state"]})
    for columns, message in (
        ({"own": ["state", "a"]}, "the only one that makes no files"),
        ({"own": ["state"], "other": ["state"]}, "must be of one source, it is of 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_label_columns(settings, columns)
    lines = [f'[sources.{name}]\nkind = "lines"\npath = "/x"\ncolumns = {{ state = "/s" }}' for name in ("x", "y")]
    with pytest.raises(ConfigError, match="must be of one source, it is of 2"):
        run_collector(_write(path, tmp_path / "shard", [*source, *lines], column="state"))


@pytest.mark.extended
def test_labels_of_lines_that_come_late_are_whole_through_kills(tmp_path):
    folder, rows, events = tmp_path / "shard", tmp_path / "rows.jsonl", tmp_path / "events.jsonl"
    sources = [
        "[sources.rows]", 'kind = "lines"', f'path = "{rows}"', 'time = "/t"', 'columns = { a = "/a" }',
        "[sources.events]", 'kind = "lines"', f'path = "{events}"', 'time = "/t"', 'columns = { state = "/s" }',
    ]  # fmt: skip
    path = _write(
        tmp_path / "c.toml", folder, sources, column="state", before_s=2.5, after_s=0, late_s=20, default="calm"
    )
    events.touch()
    for turn in range(6):
        with rows.open("a") as file:
            file.writelines(f'{{"t": {turn * 100 + second}, "a": {second}}}\n' for second in range(100))
        with events.open("a") as file:
            file.write(f'{{"t": {turn * 100 + 50}, "s": "failed"}}\n{{"t": {turn * 100 + 70}, "s": "fai')
        with run_collector_process(path) as process:
            eventually(lambda: count_kept_rows(folder) == (turn + 1) * 100, timeout_s=30)  # noqa: B023 within this turn
            if turn < 5:
                process.send_signal(signal.SIGKILL)
            with events.open("a") as file:
                file.write('led"}\n')
            if turn == 5:
                eventually(lambda: read_row_labels(folder).find([570.0, 577.0]) == ["failed", "calm"], timeout_s=30)
                process.terminate()
                assert process.wait(20) == 0
    parts = read_table(folder, "table", ("time",), ("label",))
    found = [(int(row[0]), label) for part in parts for row, label in zip(part.numbers, part.texts[0], strict=True)]
    assert [time_s for time_s, _ in found] == list(range(48, 600))  # no label before the first event
    failed = {turn * 100 + second for turn in range(6) for second in (48, 49, 50, 68, 69, 70)}
    assert {time_s for time_s, label in found if label == "failed"} == failed


@pytest.mark.extended
@needs("mosquitto")
def test_an_event_of_a_real_broker_labels_the_rows_before_it(tmp_path):
    folder = tmp_path / "shard"
    with _mosquitto(tmp_path) as port, _publisher(port) as client:
        broker = ['kind = "mqtt"', 'host = "127.0.0.1"', f"port = {port}"]
        sources = ["[sources.t]", *broker, 'columns = { t = "room#/t" }', "[sources.w]", *broker]
        sources += ['columns = { open = "window#/contact" }']
        path = _write(tmp_path / "c.toml", folder, sources, column="open", before_s=0.6, default="quiet")
        with run_collector_process(path) as process:

            def says(num_rows):
                client.publish("room", json.dumps({"t": 21.5}), qos=1).wait_for_publish(5)
                return count_kept_rows(folder) >= num_rows

            eventually(lambda: says(5), timeout_s=30)
            client.publish("window", json.dumps({"contact": False}), qos=1).wait_for_publish(5)
            event_s = time.time()

            def has_both():
                says(0)
                return {line.label for line in read_row_labels(folder).lines} == {"false", "quiet"}

            eventually(has_both, timeout_s=30)
            process.send_signal(signal.SIGKILL)
    parts = read_table(folder, "table", ("t",), ("label", "time"))
    labels = [(float(at), label) for part in parts for label, at in zip(*part.texts, strict=True)]
    assert all(event_s - 0.8 <= at <= event_s + 0.2 for at, label in labels if label == "false")
    assert any(label == "false" for _, label in labels)
