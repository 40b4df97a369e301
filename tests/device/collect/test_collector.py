"""The collector with real files, a real broker and, as a process, with signals that no process can answer."""

import json
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager
from random import Random

import paho.mqtt.client as mqtt
import pytest
from collector_process import count_kept_rows, run_collector_process
from paho.mqtt.enums import CallbackAPIVersion
from peer_boards import eventually
from requirements import PARTS, needs
from table_parts import read_table

from edgefl.core.errors import ConfigError, StoreFullError
from edgefl.device.collect import collector as module
from edgefl.device.collect import forgetting, line_source
from edgefl.device.collect.collector import Collector, OwnSource
from edgefl.device.collect.forgetting import FORGET_NAME, ForgetRequest, write_forget_request
from edgefl.device.collect.line_source import LinesSource
from edgefl.device.collect.readings import Reading, Source
from edgefl.device.collect.row_store import StoreLimits, count_whole_rows, open_row_store
from edgefl.device.collect.settings import CollectFile, CollectSection, LinesSection, load_collect_file
from edgefl.device.collect.store_state import read_store_state
from edgefl.simulation.local_fleet import find_free_port

pytestmark = pytest.mark.timeout(60)
LIMITS = StoreLimits(max_bytes=10**7)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


class Sensor:
    """A source that says what it is told to."""

    columns = ("a",)

    def __init__(self):
        self.pending, self.is_broken = [], False

    def read(self):
        if self.is_broken:
            raise RuntimeError("no sensor")
        found, self.pending = self.pending, []
        return found

    def close(self):
        pass


class Site:
    """A collector of one sensor, with clocks that are set by hand."""

    def __init__(self, folder, store, sources, **settings):
        self.wall, self.mono, self.counts, self.store = Clock(), Clock(), Counter(), store
        section = CollectSection(folder=str(folder), **settings)
        self.collector = Collector(
            CollectFile(collect=section, sources=()),
            sources,
            store,
            self.counts,
            clock=self.wall,
            monotonic=self.mono,
        )

    def wait(self, seconds):
        self.wall.now_s += seconds
        self.mono.now_s += seconds
        return self.collector.step()


@contextmanager
def _site(folder, sensor, **settings):
    with open_row_store(folder, sensor.columns, LIMITS) as store:
        yield Site(folder, store, {"sensor": sensor}, **settings)


def _times(folder, column="time"):
    return [float(time) for part in read_table(folder, "table", (column,)) for time in part.numbers[:, 0]]


def test_rows_are_written_together_and_what_is_pending_at_a_stop_too(tmp_path):
    sensor = Sensor()
    with _site(tmp_path, sensor, every_s=1, flush_s=10) as site:
        site.wait(0)
        sensor.pending = [Reading(values={"a": 5.0}, time_s=1000.2)]
        site.wait(3)
        assert site.store.state.num_rows == 0
        site.wait(7)
        assert site.store.state.num_rows == 10
        site.wait(2)
        stopping = threading.Event()
        stopping.set()
        site.collector.run(stopping)
    assert _times(tmp_path) == list(range(1001, 1013))


def test_rows_in_which_nothing_has_moved_since_the_last_that_was_kept_are_left_out(tmp_path):
    sensor = Sensor()
    sensor.columns = ("a", "b")
    with _site(tmp_path, sensor, every_s=1, flush_s=0, similar={"a": 0.5}) as site:
        site.wait(0)
        for a, b in ((5.0, 1.0), (5.4, 1.0), (5.6, 1.0), (5.1, 1.0), (5.1, 2.0), (5.1, 2.0)):
            sensor.pending = [Reading(values={"a": a, "b": b}, time_s=site.wall.now_s + 0.5)]
            site.wait(1)
        assert site.counts["similar"] == 3
    assert _times(tmp_path, "a") == pytest.approx([5.0, 5.6, 5.1])
    assert _times(tmp_path, "b") == [1.0, 1.0, 2.0]


def test_each_span_begins_with_a_row_though_nothing_has_moved(tmp_path):
    sensor = Sensor()
    with _site(tmp_path, sensor, every_s=1, flush_s=0, hold_s=1.5, similar={"a": 1}) as site:
        site.wait(0)
        for pause_s in (1, 1, 5, 1):
            site.wait(pause_s - 1)
            sensor.pending = [Reading(values={"a": 1.0}, time_s=site.wall.now_s + 0.5)]
            site.wait(1)
        assert site.store.state.num_rows == 2


def test_a_source_that_fails_is_counted_and_the_collector_goes_on(tmp_path):
    sensor, other = Sensor(), Sensor()
    other.columns = ("b",)
    with open_row_store(tmp_path, ("a", "b"), LIMITS) as store:
        site = Site(tmp_path, store, {"sensor": sensor, "other": other}, every_s=1, flush_s=0, missing="keep")
        sensor.is_broken = True
        site.wait(0)
        other.pending = [Reading(values={"b": 1.0}, time_s=1000.5)]
        site.wait(1)
        assert site.counts["sensor.errors"] == 2
        assert store.state.num_rows == 1


def test_a_jump_of_the_clock_begins_a_span_and_doubles_no_row(tmp_path):
    sensor = Sensor()
    with _site(tmp_path, sensor, every_s=1, flush_s=0) as site:
        for jump_s in (0, -50, 100_000):
            site.wall.now_s += jump_s
            site.wait(0.5)
            sensor.pending = [Reading(values={"a": 1.0}, time_s=site.wall.now_s)]
            site.wait(2)
        assert site.counts["clock_jumps"] == 2
    assert list(zip(_times(tmp_path), _times(tmp_path, "span"), strict=True)) == [
        (1001.0, 1.0), (1002.0, 1.0), (954.0, 2.0), (955.0, 2.0), (100956.0, 3.0), (100957.0, 3.0),
    ]  # fmt: skip


def test_rows_wait_for_room_on_a_full_card_and_sources_are_not_read_when_too_many_wait(tmp_path, monkeypatch):
    sensor = Sensor()
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    with _site(tmp_path, sensor, every_s=0, flush_s=0) as site:
        commit, is_full = site.store.commit, [True]

        def commit_if_room(*values):
            if is_full[0]:
                raise StoreFullError("no room")
            commit(*values)

        monkeypatch.setattr(site.store, "commit", commit_if_room)
        for number in range(5):
            sensor.pending.append(Reading(values={"a": float(number)}, time_s=site.wall.now_s))
            site.wait(1)
        assert len(sensor.pending) == 2
        is_full[0] = False
        for _ in range(3):
            site.wait(20)
        assert not sensor.pending
    assert _times(tmp_path, "a") == [0, 1, 2, 3, 4]


def test_rows_go_at_their_age_where_nothing_new_comes(tmp_path):
    sensor = Sensor()
    with open_row_store(tmp_path, sensor.columns, StoreLimits(max_bytes=10**7, max_age_s=100.0)) as store:
        site = Site(tmp_path, store, {"sensor": sensor}, every_s=0, flush_s=0)
        sensor.pending = [Reading(values={"a": 1.0}, time_s=1000.0)]
        site.wait(0)
        site.wait(90)
        assert store.state.num_rows == 1
        site.wait(20)
        assert store.state.num_rows == 0
        assert not list(tmp_path.glob("*.csv"))
        sensor.pending = [Reading(values={"a": 2.0}, time_s=1110.0)]
        site.wait(0)
    assert _times(tmp_path) == [1110.0]


def test_lines_of_a_downtime_make_the_rows_of_their_times_once_through_a_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(line_source, "BLOCK_BYTES", 100)
    log, counts = tmp_path / "app.csv", Counter()
    section = LinesSection(path=str(log), columns={"a": "A"}, time="T")

    def collect(lines, num_turns):
        with log.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        source = LinesSource("tail", section, (), counts)
        with open_row_store(tmp_path / "shard", ("a",), LIMITS) as store:
            site = Site(tmp_path, store, {"tail": source}, every_s=1, hold_s=2, flush_s=0.5)
            site.wait(5000)
            for _ in range(num_turns):
                site.wait(0.3)  # every other turn is committed, and the end is a crash
        source.close()

    collect(["T,A", *(f"{time}.5,{time}" for time in range(100, 150))], 3)
    collect([f"{time}.5,{time}" for time in range(150, 200)], 30)
    times = _times(tmp_path / "shard")
    assert times == sorted(set(times))
    assert len({*range(101, 202)} - {*times}) <= 1  # no value is held over a restart
    assert _times(tmp_path / "shard", "a") == [min(time - 1, 199) for time in times]
    assert set(_times(tmp_path / "shard", "span")) == {1, 2}


def test_what_cannot_be_forgotten_now_loses_no_row_and_is_tried_again(tmp_path, monkeypatch):
    sensor = Sensor()
    with _site(tmp_path, sensor, every_s=0, flush_s=0, hold_s=100) as site:
        for number in range(4):
            sensor.pending = [Reading(values={"a": float(number)}, time_s=site.wall.now_s)]
            site.wait(1)
        write_forget_request(tmp_path, ForgetRequest(since_s=1001.0, until_s=1001.0))
        save, num_tries, num_bytes = forgetting.save_store_state, [], site.store.state.num_bytes

        def fail_at_the_end(folder, state):
            num_tries.append(1)
            if state.num_bytes < num_bytes:
                raise StoreFullError("no room")
            save(folder, state)

        monkeypatch.setattr(forgetting, "save_store_state", fail_at_the_end)
        for number in range(4, 8):
            sensor.pending = [Reading(values={"a": float(number)}, time_s=site.wall.now_s)]
            site.wait(1)
        assert len(num_tries) == 2
        assert _times(tmp_path, "a") == [0, 2, 3, 4, 5, 6, 7]
        monkeypatch.setattr(forgetting, "save_store_state", save)
        site.wait(20)
        assert not (tmp_path / FORGET_NAME).exists()
        sensor.pending = [Reading(values={"a": 8.0}, time_s=site.wall.now_s)]
        site.wait(1)
    assert _times(tmp_path, "a") == [0, 2, 3, 4, 5, 6, 7, 8]
    spans = _times(tmp_path, "span")
    assert len({*spans[:1]} | {*spans[1:3]} | {*spans[3:7]} | {*spans[7:]}) == 4
    (segment,) = read_store_state(tmp_path).segments
    assert count_whole_rows(tmp_path / segment.name) == (8, segment.num_bytes)


def test_a_request_that_is_damaged_makes_a_collector_write_no_more_often(tmp_path, caplog):
    sensor = Sensor()
    with _site(tmp_path, sensor, every_s=0, flush_s=10) as site:
        (tmp_path / FORGET_NAME).write_bytes(b"{")
        site.wait(0)
        for _ in range(5):
            sensor.pending = [Reading(values={"a": 1.0}, time_s=site.wall.now_s)]
            site.wait(1)
        assert site.store.state.num_rows == 0
    assert caplog.text.count("nothing is forgotten") == 1


def test_values_of_another_author_s_source_are_checked():
    class Own(Source):
        columns = ("a", "word")

        def read(self):
            yield {"a": 1, "word": "x\ny"}
            yield {"a": "2.5", "b": 3}
            yield {"a": float("nan")}

    counts = Counter()
    found = OwnSource("own", Own(), ("word",), counts).read()
    assert [reading.values for reading in found] == [{"a": 1.0}, {"a": 2.5}]
    assert counts == {"own.refused": 3}


def _write_file(file, folder, kind, **tables):
    settings = {"folder": str(folder), "flush_s": 0.05, **tables.pop("collect", {})}
    lines = ["[collect]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    lines += [
        "[sources.one]",
        f'kind = "{kind}"',
        *(f"{key} = {json.dumps(value)}" for key, value in tables.items() if key != "columns"),
    ]
    lines += ["[sources.one.columns]", *(f"{key} = {json.dumps(value)}" for key, value in tables["columns"].items())]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_no_line_is_torn_lost_or_there_twice_through_twenty_kills_and_rotations(tmp_path):
    folder, log, luck = tmp_path / "shard", tmp_path / "app.jsonl", Random(7)
    path = _write_file(
        tmp_path / "c.toml", folder, "lines", path=str(log), columns={"a": "/n"}, collect={"every_s": 0, "max_mb": 50}
    )
    ledger, stopping = [], threading.Event()

    def write():
        while not stopping.wait(0.002):
            with log.open("a") as file:
                for _ in range(5):
                    file.write(json.dumps({"n": len(ledger)}) + "\n")
                    ledger.append(len(ledger))
            if len(ledger) % 4000 == 0:
                log.rename(tmp_path / f"app.jsonl.{len(ledger)}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            before = count_kept_rows(folder)
            with run_collector_process(path) as process:
                eventually(lambda: count_kept_rows(folder) > before, timeout_s=30)  # noqa: B023 within this turn
                time.sleep(luck.uniform(0.0, 0.2))
                process.send_signal(signal.SIGKILL)
    finally:
        stopping.set()
        writer.join()
    with run_collector_process(path) as process:
        eventually(lambda: count_kept_rows(folder) >= len(ledger), timeout_s=30)
        process.terminate()
        assert process.wait(20) == 0
    assert _times(folder, "a") == ledger
    assert sum(count_whole_rows(segment)[0] for segment in folder.glob("*.csv")) == len(ledger)


@contextmanager
def _mosquitto(folder, *settings):
    port = find_free_port()
    config = folder / "mosquitto.conf"
    config.write_text("\n".join([f"listener {port} 127.0.0.1", *(settings or ["allow_anonymous true"])]) + "\n")
    process = subprocess.Popen([PARTS["mosquitto"].path(), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _publisher(port):
    client = mqtt.Client(CallbackAPIVersion.VERSION2)

    def is_connected():
        try:
            return client.connect("127.0.0.1", port) == mqtt.MQTT_ERR_SUCCESS
        except OSError:
            return False

    eventually(is_connected)
    client.loop_start()
    yield client
    client.disconnect()
    client.loop_stop()


@needs("mosquitto")
def test_messages_of_a_real_broker_become_rows_and_bad_ones_are_counted(tmp_path):
    columns = {"t": "zigbee2mqtt/Living room#/temperature", "power": "shelly/power"}
    with _mosquitto(tmp_path) as port, _publisher(port) as client:
        client.publish("shelly/power", b"99", qos=1, retain=True).wait_for_publish(5)
        path = _write_file(
            tmp_path / "c.toml", tmp_path / "shard", "mqtt", host="127.0.0.1", port=port, columns=columns,
            max_message_bytes=100, collect={"every_s": 0.05},
        )  # fmt: skip
        with run_collector_process(path) as process:

            def says():
                client.publish("zigbee2mqtt/Living room", json.dumps({"temperature": 21.5, "battery": 3}))
                client.publish("zigbee2mqtt/Living room", b"{" * 50)
                client.publish("zigbee2mqtt/Living room", b"1" * 101)
                client.publish("shelly/power", b"7", qos=1).wait_for_publish(5)
                return count_kept_rows(tmp_path / "shard") > 5

            eventually(says, timeout_s=30)
            process.terminate()
            assert process.wait(20) == 0
    (part, *_) = read_table(tmp_path / "shard", "table", ("t", "power"))
    assert {tuple(row) for row in part.numbers.tolist()} == {(21.5, 7.0)}
    counts = read_store_state(tmp_path / "shard").counts
    assert set(counts) >= {"one.retained", "one.too_large", "one.refused"}


def test_a_module_that_is_not_allowed_is_no_source(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(f'[collect]\nfolder = "{tmp_path}"\n[sources.own]\nkind = "my_sensors:Cpu"\nport = 3\n')
    (settings,) = load_collect_file(path).sources
    with pytest.raises(ConfigError, match="my_sensors"):
        module.make_source(settings, (), Counter())
