"""What comes of Flower apps: their folders, and messages between a ServerApp and the boards."""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from flower_apps import PROJECT, SERVER, write_app
from flwr.app import ArrayRecord, ConfigRecord, Metadata, MetricRecord, RecordDict
from fuzz.reader import Form, Reader, Seed

from edgefl.flower.app_bundle import CONTENT, open_app
from edgefl.flower.app_check import check_app
from edgefl.flower.app_codec import ChangeCodec, ModelCodec
from edgefl.flower.app_folder import read_app
from edgefl.flower.app_job import FlowerApp, _decode_state, merge_config
from edgefl.flower.app_messages import encode_envelope, encode_message, read_metrics
from edgefl.flower.server_link import _receive
from edgefl.flower.server_process import ProcessGrid
from edgefl.system.process_messages import write_message
from edgefl.tasks.job import JobContext


def make_content() -> RecordDict:
    """Returns a record of each kind, with a value of each type."""
    values = {"flag": True, "n": 3, "x": 0.5, "text": "ä", "raw": b"\0\xff", "many": [1, 2], "raws": [b"a", b""]}
    return RecordDict({
        "arrays": ArrayRecord([np.arange(6, dtype=np.float32).reshape(2, 3), np.array(1.5)]),
        "config": ConfigRecord(values),
        "metrics": MetricRecord({"loss": 0.25, "num-examples": 4, "both": [0.5, 1.5]}),
    })  # fmt: skip


def make_large(value: float = 0.0) -> RecordDict:
    """Returns arrays of which a codec saves something."""
    return RecordDict({"arrays": ArrayRecord([np.full((20, 20), value, np.float32), np.array(3)])})


def app_projects(folder: Path) -> Reader:
    """The project file of an app, up to what is said of it."""
    root = write_app(folder / "app")

    def feed(data: bytes) -> None:
        (root / "pyproject.toml").write_bytes(data)
        app = read_app(root)
        check_app(app)
        merge_config(app, "")

    return Reader(feed=feed, seeds=(Seed(content=PROJECT.encode(), form=Form.TOML), Seed(content=PROJECT.encode())))


def bundles(folder: Path) -> Reader:
    """A bundle of an app, and what it says of its own files."""
    path = folder / "app.fab"
    files = {"pyproject.toml": PROJECT.encode(), "mean_app/server_app.py": SERVER.encode()}
    lines = [f"{name},{hashlib.sha256(body).hexdigest()},{8 * len(body)}" for name, body in files.items()]
    content = "\n".join(lines).encode()

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        with open_app(path) as app:
            check_app(app)

    def close(changed: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, body in {**files, CONTENT: changed}.items():
                archive.writestr(name, body)
        return out.getvalue()

    seeds = Seed(content=close(content)), Seed(content=content, close=close)
    return Reader(feed=feed, seeds=seeds, most_bytes=64 << 20)


def app_modules(folder: Path) -> Reader:
    """A module of an app, which is parsed and never run."""
    root = write_app(folder / "app")

    def feed(data: bytes) -> None:
        (root / "mean_app" / "server_app.py").write_bytes(data)
        check_app(read_app(root))

    return Reader(feed=feed, seeds=(Seed(content=SERVER.encode(), form=Form.TEXT),), most_bytes=64 << 20)


def replies(_folder: Path) -> Reader:
    """A board's reply, up to what the ServerApp gets, and to the history."""
    grid = ProcessGrid(io.BytesIO(), io.BytesIO(), 1)
    sent, message = Metadata(1, "", 1, 2, "", "", 0.0, 1.0, "train"), make_large()

    def feed(data: bytes) -> None:
        grid._sent["0"], grid._codecs["0"] = sent, ChangeCodec(message)
        reply = grid._make_reply({"message": "0"}, data)
        hash((reply.has_error() and (reply.error.code, reply.error.reason), reply.metadata.group_id))
        for record in reply.content.values() if reply.has_content() else ():
            list(record.items())
        assert all(map(math.isfinite, read_metrics(data, kind="evaluate").values.values()))

    error = encode_message({"error": 2, "reason": "no data"})
    changed = encode_message({}, make_large(0.5), ChangeCodec(message, "topk:0.1|int8|rice", 1))
    bodies = encode_message({}, make_content()), error, changed
    return Reader(feed=feed, seeds=tuple(Seed(content=one) for one in bodies))


def messages(folder: Path) -> Reader:
    """A message as a board gets it, with a ClientApp that answers all, and the state that is kept of it."""
    kind = type("App", (FlowerApp,), {"root": write_app(folder / "app")})
    job = kind()
    job._client = lambda message, context: SimpleNamespace(has_error=lambda: False, content=message.content)
    context = {"run": "r", "run_id": 1, "node_id": 2, "node_config": {"partition-id": 0, "num-partitions": 1}}
    header = {"type": "train", "group": "1"}
    contents = encode_message(header, make_content()), encode_message(header, make_large(0.5), ModelCodec("int8"))

    def feed(data: bytes) -> None:
        place = {"device_id": "a", "path": folder, "scratch": folder}
        job.work(JobContext(part=0, num_parts=0, input=data, log=lambda _: None, **place))

    return Reader(feed=feed, seeds=tuple(Seed(content=encode_envelope(context) + one) for one in contents))


def kept_states(folder: Path) -> Reader:
    """The state of a ClientApp on a board's card."""
    kind = type("App", (FlowerApp,), {"root": write_app(folder / "app")})

    def feed(data: bytes) -> None:
        (folder / "context").write_bytes(data)
        _decode_state(kind()._load_state({"run": "r", "message": "m"}, folder))

    state = encode_message({}, make_content())
    keys = {"run": "r", "message": "m", "size": len(state)}
    return Reader(feed=feed, seeds=(Seed(content=encode_envelope(keys) + state + state),))


def requests(_folder: Path) -> Reader:
    """What a ServerApp's process writes, up to the queue of its run."""
    file = io.BytesIO()
    write_message(file, {"do": "push", "node": 3}, encode_message({"type": "train", "group": ""}, make_content()))

    def feed(data: bytes) -> None:
        found = []
        _receive(io.BytesIO(data), SimpleNamespace(put=found.append), 1 << 16)
        assert found[-1] is None or isinstance(found[-1], str)

    return Reader(feed=feed, seeds=(Seed(content=file.getvalue()),))
