"""What a collector reads: its file, messages of any broker, lines of any program, and what a crash left."""

from __future__ import annotations

import io
import wave
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import paho.mqtt.client as mqtt
from fuzz.reader import Form, Reader, Seed

from edgefl.device.collect.alignment import Row
from edgefl.device.collect.answers import parse_model, parse_prediction
from edgefl.device.collect.file_store import check_example
from edgefl.device.collect.forgetting import FORGET_NAME, ForgetRequest, forget_here, write_forget_request
from edgefl.device.collect.label_files import CLASSES_NAME, read_label_file
from edgefl.device.collect.line_source import LinesSource
from edgefl.device.collect.mqtt_source import MqttSource
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.device.collect.serial_source import SerialSource
from edgefl.device.collect.settings import LinesSection, MqttSection, SerialSection, load_collect_file
from edgefl.device.collect.store_state import STATE_NAME, read_store_state
from edgefl.device.collect.uncertain_times import (
    UNCERTAIN_NAME,
    UncertainTime,
    read_uncertain_times,
    save_uncertain_times,
)
from edgefl.device.training.shard_uses import USES_NAME, ShardUses
from edgefl.system.row_labels import LABELS_NAME, LabelKind, LabelLine, append_row_labels, cut_row_labels
from edgefl.tasks.datasets.table_files import iterate_table

FILE = b"""[collect]
folder = "/srv/room"
every_s = 10
texts = ["door"]
[sources.zigbee]
kind = "mqtt"
host = "127.0.0.1"
columns.temperature = "zigbee2mqtt/Living room#/temperature"
[sources.log]
kind = "lines"
path = "/var/log/app.csv"
time = "at"
columns.door = "state"
[sources.own]
kind = "my_sensors:Cpu"
port = 3
"""
MESSAGES = (b'{"t":21.5,"x":[{"y":"ON"}],"door":"open","u":"\\u00e9"}', b"21.5", b"ON", b"unavailable", b'{"t":null}')
CSV = b'at;A;word\n2026-01-01T10:00:00+01:00;1,5;open\n1700000000;2;"a;b"\n'
NAME, ROWS_NAME = b"20260301T140000.000-0123456789abcdef", b"rows-1772373600.000-1772373660.000"
LABEL_TASKS = (
    b'[{"data":{"image":"/data/upload/1/ab-%b.png"},"annotations":[{"was_cancelled":false,"ground_truth":true,"result":'
    b'[{"type":"choices","value":{"choices":["robin"]}}]}]},{"data":{"rows":"%b.csv"},"annotations":[{"result":[{"value":'
    b'{"start":1772373601,"end":1772373602.5,"timeserieslabels":["open"]}}]}]}]' % (NAME, ROWS_NAME),
    b'[{"image":"%b.png","label":"robin"},{"rows":"%b","label":[{"start":1,"end":2,"timeserieslabels":["open"]}]}]'
    % (NAME, ROWS_NAME),
)
LABEL_CELLS = b'example,label\n%b,"{""choices"": [""robin""]}"\n%b,\'=open\n' % (NAME, ROWS_NAME)
JSON_LINES = b'{"at":1700000000.5,"a":{"b":1},"word":"open"}\n{"at":"2026-01-01","a":{"b":null}}\n'


def collect_files(folder: Path) -> Reader:
    path = folder / "collect.toml"

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        load_collect_file(path)

    return Reader(feed=feed, seeds=(Seed(content=FILE, form=Form.TOML),))


def messages(_folder: Path) -> Reader:
    columns = {"t": "room#/t", "switch": "room#/x/0/y", "door": "room#/door", "plain": "room"}
    source = MqttSource("mqtt", MqttSection(host="h", columns=columns), ("door",), Counter())

    def feed(data: bytes) -> None:
        message = mqtt.MQTTMessage(topic=b"room")
        message.payload = data
        source._on_message(None, None, message)
        source.read()

    return Reader(feed=feed, seeds=tuple(Seed(content=content, form=Form.JSON) for content in MESSAGES))


def csv_lines(folder: Path) -> Reader:
    section = LinesSection(path=str(folder / "app.csv"), columns={"a": "A", "word": "word"}, time="at")
    return _lines(section, Seed(content=CSV, form=Form.TEXT))


def json_lines(folder: Path) -> Reader:
    section = LinesSection(path=str(folder / "app.jsonl"), columns={"a": "/a/b", "word": "/word"}, time="/at")
    return _lines(section, Seed(content=JSON_LINES, form=Form.TEXT))


def _lines(section: LinesSection, seed: Seed) -> Reader:
    def feed(data: bytes) -> None:
        Path(section.path).write_bytes(data)
        source = LinesSource("lines", section, ("word",), Counter())
        source.read()
        source.close()

    return Reader(feed=feed, seeds=(seed,))


def serial_lines(_folder: Path) -> Reader:
    columns = {"a": "#/0", "door": "#/1"}
    source = SerialSource("board", SerialSection(path="/dev/none", columns=columns), ("door",), Counter())

    def feed(data: bytes) -> None:
        for line in data.split(b"\n"):
            source._take_line(line)
        source.read()

    return Reader(feed=feed, seeds=(Seed(content=b'1.5,open\n[2, "shut"]\n{"0": 3}\n', form=Form.TEXT),))


def places(folder: Path) -> Reader:
    path = folder / "app.csv"
    path.write_bytes(CSV)
    section = LinesSection(path=str(path), columns={"a": "A"})

    def feed(data: bytes) -> None:
        source = LinesSource("lines", section, (), Counter())
        source.resume(data.decode(errors="replace"))
        source.close()

    return Reader(feed=feed, seeds=(Seed(content=f"{path.stat().st_ino}:3:123".encode(), form=Form.TEXT),))


def examples(_folder: Path) -> Reader:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"ab" * 40)
    chunks = [(b"IHDR", b"\0" * 13), (b"IDAT", b"abc"), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks
    )

    def feed(data: bytes) -> None:
        check_example(data, {b"RIFF": ".wav", b"\x89PNG": ".png"}.get(data[:4], ".jpg"))

    seeds = (file.getvalue(), png, b"\xff\xd8\xff\xe0abc\xff\xd9")
    return Reader(feed=feed, seeds=tuple(Seed(content=content) for content in seeds), refuses=(ValueError,))


def forget_requests(folder: Path) -> Reader:
    with open_row_store(folder, ("a", "who"), StoreLimits(max_bytes=10_000)) as store:
        store.commit([Row(1.0, (2.0, "ada"), 1)], {}, {}, 1000.0)
    content = (folder / STATE_NAME).read_bytes()
    write_forget_request(folder, ForgetRequest(since_s=0.0, until_s=9.0, where={"who": "bo"}))
    request = (folder / FORGET_NAME).read_bytes()
    (segment,) = folder.glob("*.csv")
    rows = segment.read_bytes()

    def feed(data: bytes) -> None:
        (folder / STATE_NAME).write_bytes(content)
        segment.write_bytes(rows)
        (folder / FORGET_NAME).write_bytes(data)
        state = read_store_state(folder)
        assert state is not None
        forget_here(folder, state)

    return Reader(feed=feed, seeds=(Seed(content=request, form=Form.JSON),))


def row_labels(folder: Path) -> Reader:
    (folder / "rows.csv").write_bytes(b"time,a,span,check\n1.000,2,1,00000000\n5.000,3,1,00000000\n")
    lines = [LabelLine(since_s=0.0, until_s=2.0, label="a, b", kind=kind) for kind in LabelKind]
    append_row_labels(folder, lines)

    def feed(data: bytes) -> None:
        (folder / LABELS_NAME).write_bytes(data)
        list(iterate_table(folder / "rows.csv", ("a",), ("label",), drops_missing=False))
        cut_row_labels(folder, 1.0, 1.5)

    return Reader(feed=feed, seeds=(Seed(content=(folder / LABELS_NAME).read_bytes(), form=Form.TEXT),))


def label_files(folder: Path) -> Reader:
    paths = {b"[": folder / "tasks.json", b"e": folder / "labels.csv"}

    def feed(data: bytes) -> None:
        path = paths.get(data[:1], paths[b"e"])
        path.write_bytes(data)
        read_label_file(path, "label")

    seeds = [Seed(content=content, form=Form.JSON) for content in LABEL_TASKS]
    return Reader(feed=feed, seeds=(*seeds, Seed(content=LABEL_CELLS, form=Form.TEXT)))


def yolo_folders(folder: Path) -> Reader:
    def feed(data: bytes) -> None:
        classes, _, boxes = data.partition(b"\n\n")
        (folder / CLASSES_NAME).write_bytes(classes)
        (folder / f"{NAME.decode()}.txt").write_bytes(boxes)
        read_label_file(folder, "label")

    return Reader(
        feed=feed, seeds=(Seed(content=b"robin\nwren\n\n1 0.5 0.5 1 1\n0 .1 .2 .3 .4 .9\n", form=Form.TEXT),)
    )


def answers(_folder: Path) -> Reader:
    model = b'{"v":1,"model":"ab","deployment":null,"classes":["shut","open"],"rows":30}'
    replies = (
        b'{"v":1,"model":"ab","deployment":"d1","rows":[{"class":"open","index":1,"probability":0.75,"margin":0.5}]}',
        b'{"v":1,"model":"ab","deployment":"d1","rows":[{"values":[1.5,-2]}]}',
    )

    def feed(data: bytes) -> None:
        if b"classes" in data:
            parse_model(data)
        else:
            parse_prediction(data)

    seeds = tuple(Seed(content=content, form=Form.JSON) for content in (model, *replies))
    return Reader(feed=feed, seeds=seeds, refuses=(ValueError,))


def uncertain_times(folder: Path) -> Reader:
    time = UncertainTime(since_s=1.0, until_s=2.0, label="open", probability=0.5, margin=0.25)
    save_uncertain_times(folder, [time, replace(time, since_s=5.0, until_s=6.5)])
    path = folder / UNCERTAIN_NAME

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        read_uncertain_times(folder)

    return Reader(feed=feed, seeds=(Seed(content=path.read_bytes(), form=Form.JSON),))


def shard_uses(folder: Path) -> Reader:
    path = folder / USES_NAME
    ShardUses(path, lambda: 1.0).record("series", "run-1")

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        ShardUses(path, lambda: 2.0).record("series", "run-2")

    return Reader(feed=feed, seeds=(Seed(content=path.read_bytes(), form=Form.JSON),))


def states(folder: Path) -> Reader:
    limits, row = StoreLimits(max_bytes=10_000), Row(1.0, (2.0,), 1)
    with open_row_store(folder, ("a",), limits) as store:
        store.commit([row], {"tail": "1:2:3"}, {"tail.refused": 3}, 1000.0)
        (segment,) = folder.glob("*.csv")
    content = (folder / STATE_NAME).read_bytes()

    def feed(data: bytes) -> None:
        (folder / STATE_NAME).write_bytes(data)
        segment.write_bytes(b"time,a,span,check\n")
        with open_row_store(folder, ("a",), limits) as store:
            store.commit([row], {}, {}, 2000.0)

    return Reader(feed=feed, seeds=(Seed(content=content, form=Form.JSON),))
