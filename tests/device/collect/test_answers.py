"""Answers beside collecting: the windows of training, models that change, servers and brokers that are away."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import paho.mqtt.client as mqtt
import pytest
from collector_process import count_kept_rows, run_collector_process
from device.collect.test_collector import LIMITS, Clock, Sensor, _mosquitto
from device.collect.test_collector import _publisher as _connected
from paho.mqtt.enums import CallbackAPIVersion
from peer_boards import eventually
from requirements import PARTS, needs

from edgefl.core.errors import ConfigError, NetworkError, StoreBusyError
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.answer_publisher import (
    AnswerPublisher,
    list_entity_topics,
    make_entities,
    withdraw_entities,
)
from edgefl.device.collect.answers import (
    JOIN_TIMEOUT_S,
    Answerer,
    InferenceClient,
    parse_model,
    parse_prediction,
)
from edgefl.device.collect.collector import REPORT_S, Collector, withdraw_answers
from edgefl.device.collect.forgetting import ForgetRequest, write_forget_request
from edgefl.device.collect.label_guesses import NotedGuesser
from edgefl.device.collect.label_queue import LabelQueue, open_target
from edgefl.device.collect.newest_input import MAX_CELLS, MAX_ROWS, NewestRows
from edgefl.device.collect.readings import Reading
from edgefl.device.collect.row_store import encode_lines, open_row_store
from edgefl.device.collect.settings import MAX_COLUMNS, AnswerSection, CollectFile, CollectSection
from edgefl.device.collect.store_state import lock_folder
from edgefl.device.collect.uncertain_times import (
    UNCERTAIN_NAME,
    UncertainTime,
    add_uncertain,
    read_uncertain_times,
    save_uncertain_times,
)
from edgefl.device.inference.deployments import DeployedModel, ModelStore
from edgefl.device.inference.onnx_model import OnnxModel
from edgefl.device.inference.server import InferenceServer, ServedModel, open_listener
from edgefl.device.inference.table_rows import parse_lines
from edgefl.device.rollouts.client import RolloutReport
from edgefl.simulation.local_fleet import find_free_port
from edgefl.system.atomic_files import compute_sha256
from edgefl.tasks.export.model_export import export_onnx
from edgefl.tasks.registry import make_task

pytestmark = pytest.mark.timeout(60)
SERIES = {
    "columns": "a,b", "window": 4, "step": 1, "target": "label", "labels": "shut,open", "group": "span",
    "model": "linear", "means": "3,-1", "scales": "2,4",
}  # fmt: skip
TABLE = {"columns": "a", "target": "label", "labels": "shut,open", "model": "linear"}
FORECAST = {"columns": "a,b", "window": 5, "ahead": 2, "horizon": 3, "target": "b", "model": "linear"}


def _export(path, name, options, seed=1):
    task = make_task(name, options)
    model = task.init(seed)
    luck = np.random.default_rng(seed)
    for values in model.values():
        values[...] = luck.normal(size=values.shape)
    export_onnx(task, model, path, options=options)
    return path


class Board:
    """A model store with a server of it, as `edgefl device serve` runs it."""

    def __init__(self, root):
        self.store, self._root, self._num = ModelStore(root / "pi"), root, 0
        (root / "pi").mkdir()
        self.store.save(self.store.load())
        self._server = InferenceServer(ServedModel(store=self.store), open_listener("127.0.0.1", 0))
        self._server.start()
        self.client = InferenceClient(self._server.port)

    def deploy(self, name, options, seed=1):
        """Deploys a model and waits until it is served; returns it."""
        self._num += 1
        path = _export(self._root / f"{self._num}.onnx", name, options, seed)
        made = OnnxModel(path)
        new = DeployedModel(
            deployment=f"d{self._num}", sha256=compute_sha256(path), model=made.model or "m", task=name
        )  # fmt: skip
        self.store.path(new).write_bytes(path.read_bytes())
        self.store.activate(self.store.load(), new, RolloutReport(id=new.deployment, state="running"))
        eventually(lambda: (self._server.served_model.current or (None, None))[1] == new)
        return made

    def stop(self):
        self._server.stop()


@pytest.fixture
def board(tmp_path):
    made = Board(tmp_path)
    yield made
    made.stop()


class Heard:
    """A publisher that keeps what it is given."""

    def __init__(self):
        self.answers, self.classes, self.is_available = [], (), False

    def start(self):
        pass

    def publish(self, answer, classes):
        self.answers.append(answer)
        self.classes, self.is_available = classes, True
        return True

    def set_available(self, *, is_available):
        self.is_available = is_available

    def close(self):
        self.is_available = False


class Site:
    """A collector of two columns with an answerer, whose thread is this one, and clocks set by hand."""

    def __init__(self, store, client, every_s=1.0, **settings):
        self.clock, self.counts, self.heard, self.sensor = Clock(), Counter(), Heard(), Sensor()
        self.sensor.columns = ("a", "b")
        section = AnswerSection(host="h", topic="edgefl/room", **settings)
        self.answerer = Answerer(
            section, store.folder, NewestRows(("a", "b")), every_s=every_s, client=client, publisher=self.heard,
            counts=self.counts, clock=self.clock,
        )  # fmt: skip
        collect = CollectSection(folder=str(store.folder), every_s=every_s, hold_s=1.5, flush_s=0)
        self.collector = Collector(
            CollectFile(collect=collect, sources=()), {"sensor": self.sensor}, store, self.counts,
            answerer=self.answerer, clock=self.clock, monotonic=self.clock,
        )  # fmt: skip
        self.collector.step()

    def wait(self, *values):
        """Lets a second pass, with a reading or without one."""
        self.clock.now_s += 1
        if values:
            by_name = dict(zip(("a", "b"), values, strict=True))
            self.sensor.pending = [Reading(values=by_name, time_s=self.clock.now_s - 0.3)]
        self.collector.step()
        self.answerer.step()


@contextmanager
def _site(folder, client, **settings):
    with open_row_store(folder, ("a", "b"), LIMITS) as store:
        yield Site(store, client, **settings)


def test_what_is_asked_about_are_the_windows_that_training_reads_also_beside_gaps(tmp_path, board):
    model, luck = board.deploy("series", SERIES), np.random.default_rng(3)
    with _site(tmp_path / "shard", board.client) as site:
        for second in range(30):
            site.wait(*([] if second in {9, 10, 11, 20, 21} else luck.normal(size=2) * 3))
        times = [answer["time"] for answer in site.heard.answers]
        (tmp_path / "shard" / ".labels.csv").touch()
        shard = tmp_path / "labelled.csv"
        (segment,) = (tmp_path / "shard").glob("rows-*.csv")
        head, *rows = segment.read_text().splitlines()
        shard.write_text("\n".join([f"{head},label", *(f"{row},open" for row in rows)]) + "\n")
    inputs = make_task("series", SERIES).read(str(shard)).inputs
    expected = model.predict(inputs)
    assert len(expected) == len(times) == 18
    assert times[0] == 1004.0
    assert 1013.0 not in times
    assert 1016.0 in times
    for answer, trained in zip(site.heard.answers, expected, strict=True):
        assert {name: answer[name] for name in ("class", "probability", "margin")} == {
            name: trained[name] for name in ("class", "probability", "margin")
        }
    assert len({answer["probability"] for answer in site.heard.answers}) == 18
    assert not site.counts["answer.errors"]


def test_a_table_and_a_forecast_answer_too(tmp_path, board):
    model = board.deploy("table", TABLE)
    with _site(tmp_path / "shard", board.client) as site:
        site.wait(0.25, 7.0)
        (answer,) = site.heard.answers
        assert answer["probability"] == model.predict(np.array([[0.25]], np.float32))[0]["probability"]
        assert site.heard.classes == ("shut", "open")
        model = board.deploy("series", FORECAST)
        for value in range(6):
            site.wait(float(value), -value)
        rows = [0.25, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0][-5:], [7.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0][-5:]
        values = model.predict(np.array([rows], np.float32))[0]["values"]
        assert site.heard.answers[-1]["values"] == pytest.approx(values)


def test_a_model_that_is_deployed_meanwhile_is_taken_up_with_its_own_window(tmp_path, board):
    board.deploy("series", SERIES)
    with _site(tmp_path / "shard", board.client) as site:
        for second in range(6):
            site.wait(float(second), 1.0)
        assert {answer["deployment"] for answer in site.heard.answers} == {"d1"}
        model = board.deploy("series", {**SERIES, "window": 6}, seed=2)
        for second in range(6, 12):
            site.wait(float(second), 1.0)
        newest = site.heard.answers[-1]
        inputs = np.array([[[6, 7, 8, 9, 10, 11], [1] * 6]], np.float32)
        assert (newest["deployment"], newest["time"]) == ("d2", 1012.0)
        assert newest["probability"] == model.predict(inputs)[0]["probability"]
        board.deploy("series", {**SERIES, "window": 6}, seed=3)
        for second in range(12, 15):
            site.wait(float(second), 1.0)
    assert [(answer["deployment"], answer["time"]) for answer in site.heard.answers[-2:]] == [
        ("d3", 1014.0), ("d3", 1015.0),
    ]  # fmt: skip


def test_without_a_server_or_a_model_rows_are_kept_and_answers_are_unavailable_until_there_are_some(tmp_path, board):
    with _site(tmp_path / "shard", InferenceClient(find_free_port())) as site:
        site.heard.is_available = True
        for second in range(5):
            site.wait(float(second), 1.0)
        assert (site.counts["answer.errors"], site.heard.answers, site.heard.is_available) == (5, [], False)
        site.answerer._client = board.client
        site.wait(5.0, 1.0)
        assert site.counts["answer.errors"] == 6
        board.deploy("table", TABLE)
        site.wait(6.0, 1.0)
        assert (len(site.heard.answers), site.heard.is_available) == (1, True)
        for _ in range(62):
            site.wait()
        assert not site.heard.is_available
    assert count_kept_rows(tmp_path / "shard") >= 7


@pytest.mark.extended
def test_a_model_that_hangs_holds_up_no_row_and_no_end(tmp_path):
    with (
        open_listener("127.0.0.1", 0) as listener,
        _site(tmp_path / "shard", InferenceClient(listener.getsockname()[1])) as site,
    ):
        listener.settimeout(20)
        site.answerer.start()

        def collect(second):
            site.clock.now_s += 1
            site.sensor.pending = [Reading(values={"a": float(second), "b": 1.0}, time_s=site.clock.now_s - 0.3)]
            site.collector.step()

        collect(0)
        connection, _ = listener.accept()  # it asks, and gets no word
        with connection:
            for second in range(1, 31):
                collect(second)
            assert count_kept_rows(tmp_path / "shard") >= 30
            assert not site.counts["answer.errors"]  # all of that while it waited
            before_s = time.monotonic()
            site.answerer.close()
            assert time.monotonic() - before_s < JOIN_TIMEOUT_S
            assert site.counts["answer.errors"] == 1


def test_old_rows_that_are_read_late_are_not_answered_as_if_they_were_new(tmp_path, board):
    board.deploy("table", TABLE)
    with _site(tmp_path / "shard", board.client) as site:
        site.answerer.add([Row(site.clock.now_s - 61, (1.0, 1.0), 1)])
        site.answerer.step()
        assert not site.heard.answers
        site.answerer.add([Row(site.clock.now_s - 59, (1.0, 1.0), 1)])
        site.answerer.step()
        assert len(site.heard.answers) == 1


def test_uncertain_times_are_kept_bounded_and_asked_about_first_until_they_are_forgotten(tmp_path, board):
    model, folder = board.deploy("table", TABLE), tmp_path / "shard"
    with _site(folder, board.client, uncertain_below=1.0, max_uncertain=3) as site:
        for value in (3.0, 0.1, -2.0, 0.4, 1.0, -5.0):
            site.wait(value, 1.0)
        site.answerer.close()
        margins = {answer["time"]: answer["margin"] for answer in site.heard.answers}
        least = sorted(margins, key=margins.get)[:3]
        times = read_uncertain_times(folder)
        assert {time.since_s for time in times} == set(least)
        queue = LabelQueue(open_target(folder, 1.0, times), (), NotedGuesser(times))
        assert [queue.current.since_s, queue.num_left] == [least[0], 3]
        assert queue.guess.margin == margins[least[0]]
        assert queue.guess.label in model.classes
        write_forget_request(folder, ForgetRequest(since_s=0, until_s=1001.5, where={}))
        site.wait(1.0, 1.0)
        assert not (folder / UNCERTAIN_NAME).exists()
        site.clock.now_s += 601
        site.wait(0.1, 1.0)
        assert [time.since_s for time in read_uncertain_times(folder)] != least
    with pytest.raises(ConfigError, match="no times of which a model was uncertain"):
        open_target(folder, 1.0, [])


def test_rows_whose_times_have_microseconds_are_asked_about_too(tmp_path, board):
    board.deploy("table", TABLE)
    folder = tmp_path / "shard"
    with _site(folder, board.client, every_s=0, uncertain_below=1.0) as site:
        for value in range(5):
            site.clock.now_s += 0.000_203
            site.wait(value / 10, 1.0)
        site.collector._monotonic = lambda: REPORT_S + 1e6  # an hour later, when times before the oldest row go
        site.collector.step()
        site.answerer.close()
        assert len(site.heard.answers) == 5
    times = read_uncertain_times(folder)
    queue = LabelQueue(open_target(folder, 1.0, times), (), NotedGuesser(times))
    assert (len(times), queue.num_left, queue.guess is not None) == (5, 5, True)


def test_times_that_cannot_be_read_stop_no_collecting(tmp_path, board, caplog):
    board.deploy("table", TABLE)
    (tmp_path / "shard" / UNCERTAIN_NAME).mkdir(parents=True)
    with _site(tmp_path / "shard", board.client, uncertain_below=1.0) as site:
        site.wait(1.0, 1.0)
        site.answerer.close()
        assert len(site.heard.answers) == 1
    assert "cannot be read: Is a directory" in caplog.text


def test_as_many_times_as_may_be_are_read_back_with_long_labels_and_less_where_less_are_wanted(tmp_path, board):
    longest = ("字" * 80, "😀" * 63, '"' * 80)
    times = [
        UncertainTime(since_s=1.7e9 + at + 1 / 3, until_s=1.7e9 + at + 2 / 3, label=longest[at % 3],
                      probability=1 / 3, margin=at / 3e6)
        for at in range(1000)
    ]  # fmt: skip
    save_uncertain_times(tmp_path, times)
    assert read_uncertain_times(tmp_path) == times
    (tmp_path / UNCERTAIN_NAME).write_text(json.dumps({"v": 1, "times": [asdict(time) for time in times]}))
    assert read_uncertain_times(tmp_path) == times
    board.deploy("table", TABLE)
    with open_row_store(tmp_path, ("a", "b"), LIMITS) as store:
        site = Site(store, board.client, uncertain_below=1.0, max_uncertain=20)
        site.wait(1.0, 1.0)
        site.answerer.close()
    assert read_uncertain_times(tmp_path) == times[:20]


def test_of_overlapping_times_the_least_certain_stays_and_a_damaged_file_is_none(tmp_path):
    def time(since_s, margin):
        return UncertainTime(since_s=since_s, until_s=since_s + 5, label="open", probability=0.5, margin=margin)

    times = []
    for since_s, margin in ((0, 0.5), (3, 0.2), (6, 0.4), (20, 0.1), (40, 0.9), (60, 0.3)):
        times = add_uncertain(times, time(since_s, margin), 3)
    assert [(one.since_s, one.margin) for one in times] == [(3, 0.2), (20, 0.1), (60, 0.3)]
    save_uncertain_times(tmp_path, times)
    assert read_uncertain_times(tmp_path) == times
    for damage in (b"{", b'{"v": 1, "times": 3}', b'{"v": 1, "times": [{"since_s": "a"}, 4, null]}'):
        (tmp_path / UNCERTAIN_NAME).write_bytes(damage)
        assert read_uncertain_times(tmp_path) == []


@pytest.mark.parametrize(
    "reply",
    [
        b"[]",
        b'{"rows": []}',
        b'{"rows": [{"class": "a", "probability": 1, "margin": 1}, {"class": "a", "probability": 1, "margin": 1}]}',
        b'{"rows": [{"class": "a\\nb", "probability": 0.5, "margin": 0.1}]}',
        b'{"rows": [{"class": "a", "probability": 7, "margin": 0.1}]}',
        b'{"rows": [{"class": "a", "probability": true, "margin": 0.1}]}',
        b'{"rows": [{"values": ["1"]}]}',
        b'{"rows": [{"values": [1]}], "model": 7}',
        b'{"rows": [{"values": [1]}], "deployment": "a\\nb"}',
        json.dumps({"rows": [{"values": [1]}], "deployment": "d" * 101}).encode(),
        json.dumps({"rows": [{"class": "a" * 101, "probability": 1, "margin": 1}]}).encode(),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(reply):
    with pytest.raises(ValueError, match=r"answer|probability"):
        parse_prediction(reply)


def test_a_model_of_a_file_has_no_deployment(tmp_path):
    model = ServedModel(file=_export(tmp_path / "model.onnx", "table", TABLE))
    server = InferenceServer(model, open_listener("127.0.0.1", 0))
    server.start()
    with _site(tmp_path / "shard", InferenceClient(server.port)) as site:
        site.wait(1.0, 1.0)
        (answer,) = site.heard.answers
    server.stop()
    assert (answer["model"], answer["deployment"]) == (model.current[0].model[:12], None)


@pytest.mark.parametrize("num_columns", [1, 2, 48, MAX_COLUMNS])
def test_the_server_takes_as_many_rows_as_are_held(num_columns):
    num_rows = min(MAX_ROWS, MAX_CELLS // num_columns)
    rows = [Row(float(at), (1.0,) * num_columns, 1) for at in range(num_rows)]
    assert len(parse_lines(encode_lines([f"c{at}" for at in range(num_columns)], rows))) == num_rows + 1


@pytest.mark.parametrize("rows", [None, 0, True, "3"])
def test_a_model_that_takes_no_rows_is_refused(rows):
    with pytest.raises(ValueError, match="deploy one of the task series or table"):
        parse_model(json.dumps({"classes": ["a"], "rows": rows}).encode())


def test_entities_are_those_of_the_model_and_others_are_taken_back():
    section = AnswerSection(host="h", topic="edgefl/room", name="Room")
    topics = list_entity_topics(section)
    of_classes, of_values = make_entities(section, ("shut", "open"), 0), make_entities(section, (), 2)
    assert list(of_classes) == topics[:2]
    assert list(of_values) == topics[2:4]
    sensor = json.loads(of_classes[topics[0]])
    assert (sensor["device_class"], sensor["options"]) == ("enum", ["shut", "open"])
    assert sensor["availability_topic"] == "edgefl/room/available"
    assert "options" not in json.loads(make_entities(section, ["x"] * 101, 0)[topics[0]])
    identities = [json.loads(text)["unique_id"] for text in (*of_classes.values(), *of_values.values())]
    assert len(set(identities)) == 4
    other = AnswerSection(host="h", topic="edgefl/hall")
    assert not set(topics) & set(list_entity_topics(other))


@contextmanager
def _listener(port, user, password):
    """Yields the newest message of each topic, and the number of messages of each."""
    client = mqtt.Client(CallbackAPIVersion.VERSION2)
    client.username_pw_set(user, password)
    newest, counts = {}, Counter()

    def on_message(_client, _data, message):
        newest[message.topic] = message.payload.decode()
        counts[message.topic] += 1

    client.on_message = on_message
    client.on_connect = lambda *_: client.subscribe("#", qos=1)
    client.connect("127.0.0.1", port)
    client.loop_start()
    yield newest, counts
    client.disconnect()
    client.loop_stop()


@contextmanager
def _publisher(port, **settings):
    """Yields a publisher that has published an answer, and its section."""
    section = AnswerSection(host="127.0.0.1", port=port, topic="edgefl/room")
    publisher = AnswerPublisher(section, **settings)
    publisher.start()
    eventually(lambda: publisher.publish({"class": "open"}, ("open",)))
    yield publisher, section
    publisher.close()


@needs("mosquitto")
def test_the_will_of_a_connection_that_was_cut_off_comes_before_the_next_one_is_online(tmp_path):
    with _mosquitto(tmp_path) as port:
        eventually(lambda: _can_connect(port))
        with _listener(port, "any", "any") as (newest, counts), _publisher(port) as (former, _):
            eventually(lambda: newest.get("edgefl/room/available") == "online")
            former._client.loop_stop()  # without power: the broker waits one and a half times the keep-alive
            with _publisher(port), former._client.socket() as connection:
                connection.settimeout(20)
                while connection.recv(100):  # until the broker ends it
                    pass
                eventually(lambda: counts["edgefl/room/answer"] == 2)
                eventually(lambda: newest["edgefl/room/available"] == "online")


@needs("mosquitto")
def test_an_availability_that_somebody_overwrites_is_right_again_a_minute_later(tmp_path):
    clock = Clock()
    with _mosquitto(tmp_path) as port:
        eventually(lambda: _can_connect(port))
        with (
            _listener(port, "any", "any") as (newest, counts),
            _publisher(port, monotonic=clock) as (publisher, _),
            _connected(port) as other,
        ):
            eventually(lambda: newest.get("edgefl/room/available") == "online")
            other.publish("edgefl/room/available", "offline", qos=1, retain=True)
            eventually(lambda: newest["edgefl/room/available"] == "offline")
            num = counts["edgefl/room/available"]
            clock.now_s += 59
            publisher.publish({"class": "open"}, ("open",))
            eventually(lambda: counts["edgefl/room/answer"] == 2)
            assert counts["edgefl/room/available"] == num
            clock.now_s += 2
            publisher.publish({"class": "open"}, ("open",))
            eventually(lambda: newest["edgefl/room/available"] == "online")


@needs("mosquitto")
def test_what_the_rules_of_the_broker_forbid_is_logged_and_withdraws_nothing(tmp_path, caplog):
    rules = tmp_path / "rules"
    rules.write_text("topic read #\ntopic write edgefl/room/#\n")
    with _mosquitto(tmp_path, "allow_anonymous true", f"acl_file {rules}", "user root") as port:
        eventually(lambda: _can_connect(port))
        with _publisher(port) as (_, section):
            eventually(lambda: "refuses a message (Not authorized): its rules must let" in caplog.text)
        with pytest.raises(NetworkError, match=r"10 of 11 messages \(Not authorized\): .* edgefl/room and homeassi"):
            withdraw_entities(section)


def test_what_a_running_collector_would_announce_again_is_not_withdrawn(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        f'[collect]\nfolder = "{tmp_path}"\n[answer]\nhost = "127.0.0.1"\nport = {find_free_port()}\n'
        f'topic = "t"\n[sources.one]\nkind = "lines"\npath = "{tmp_path / "log"}.jsonl"\ncolumns = {{ a = "/a" }}\n'
    )
    with lock_folder(tmp_path), pytest.raises(StoreBusyError, match="stop it first"):
        withdraw_answers(path)
    with pytest.raises(NetworkError, match="cannot be reached"):
        withdraw_answers(path)


@needs("mosquitto")
@pytest.mark.extended
@pytest.mark.timeout(180)
def test_a_collector_publishes_answers_under_its_own_login_and_is_offline_when_it_was_killed(tmp_path):
    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o600)
    tool = PARTS["mosquitto"].path().replace("/mosquitto", "/mosquitto_passwd").replace("sbin", "bin")
    for user in ("answers", "sensors"):
        subprocess.run([tool, "-b", str(passwords), user, f"{user}-word"], check=True, capture_output=True)
    login, log = tmp_path / "login", tmp_path / "app.jsonl"
    login.write_text("answers\nanswers-word\n")
    model, web_port = _export(tmp_path / "model.onnx", "table", TABLE), find_free_port()
    serve = [sys.executable, "-m", "edgefl", "device", "serve", "--model", str(model), "--port", str(web_port)]
    with (
        _mosquitto(tmp_path, "allow_anonymous false", f"password_file {passwords}", "user root") as port,
        _ended(subprocess.Popen([*serve, "--state", str(tmp_path / "pi")], stdout=subprocess.DEVNULL)),
    ):
        path = tmp_path / "c.toml"
        path.write_text(
            f'[collect]\nfolder = "{tmp_path / "shard"}"\nevery_s = 0.05\nhold_s = 100\nflush_s = 0.1\n'
            f'[answer]\nhost = "127.0.0.1"\nport = {port}\nlogin_file = "{login}"\ntopic = "edgefl/room"\n'
            f"every_s = 0.5\nserver_port = {web_port}\n"
            f'[sources.one]\nkind = "lines"\npath = "{log}"\ncolumns = {{ a = "/a" }}\n'
        )
        log.write_text('{"a": 1}\n')
        eventually(lambda: _can_connect(port), timeout_s=20)
        with _listener(port, "sensors", "sensors-word") as (newest, counts):
            section = AnswerSection(host="127.0.0.1", topic="edgefl/room")
            topics = list_entity_topics(section)
            with run_collector_process(path) as process:
                eventually(lambda: counts["edgefl/room/answer"] >= 3, timeout_s=60)
                assert newest["edgefl/room/available"] == "online"
                assert json.loads(newest["edgefl/room/answer"])["class"] in {"shut", "open"}
                assert json.loads(newest[topics[0]])["options"] == ["shut", "open"]
                num_rows, before = count_kept_rows(tmp_path / "shard"), counts["edgefl/room/answer"]
                eventually(lambda: count_kept_rows(tmp_path / "shard") >= num_rows + 40, timeout_s=30)
                assert counts["edgefl/room/answer"] - before <= 15  # of 40 or more rows
                process.send_signal(signal.SIGKILL)
                eventually(lambda: newest["edgefl/room/available"] == "offline", timeout_s=60)
            with log.open("a") as file:
                file.write('{"a": 2}\n')
            with run_collector_process(path) as process:
                eventually(lambda: newest["edgefl/room/available"] == "online", timeout_s=60)
                process.terminate()
                assert process.wait(20) == 0
                eventually(lambda: newest["edgefl/room/available"] == "offline", timeout_s=10)
            words = [sys.executable, "-m", "edgefl", "device", "collect", str(path), "--withdraw"]
            subprocess.run(words, check=True, timeout=30)
            eventually(lambda: not any(newest[topic] for topic in (*topics, "edgefl/room/available")), timeout_s=10)


@contextmanager
def _ended(process):
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def _can_connect(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
