"""What a device finds in its own folders after a bad night, and what its local servers are asked."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from fuzz.reader import MIB, Form, Reader, Seed
from onnx_graphs import constant_model

from edgefl.coordinator.pki import create_authority, issue_client_certificate
from edgefl.core.conditions import USE_KINDS, ConditionsEndedError
from edgefl.core.errors import ClonedError, EdgeflError
from edgefl.core.protocol import Command, CommandReply
from edgefl.core.safe_parsing import parse_json
from edgefl.core.secure_aggregation.keys import CertificateIdentity
from edgefl.core.secure_aggregation.messages import Advert
from edgefl.core.types import Dataset
from edgefl.device.conditions.budgets import Clocks
from edgefl.device.conditions.facts import FactReader
from edgefl.device.conditions.gate import ConditionGate
from edgefl.device.conditions.run_conditions import publish_answer
from edgefl.device.diagnostics.diagnostic_report import format_summary, read_report
from edgefl.device.diagnostics.json_log import read_page
from edgefl.device.drift_watch import DriftReference, encode_reference, read_reference
from edgefl.device.enrolment.certificates import create_key
from edgefl.device.hardware.board_reader import BoardReader, no_program
from edgefl.device.hardware.step_rate import _load
from edgefl.device.inference.deployments import DeployedModel, DeploymentState, ModelStore
from edgefl.device.inference.onnx_model import OnnxModel
from edgefl.device.inference.server import InferenceServer, ServedModel, _RequestHandler, open_listener
from edgefl.device.inference.table_rows import parse_lines, read_unlabelled, write_rows
from edgefl.device.rollouts.client import RolloutReport
from edgefl.device.secure_worker import load_consents
from edgefl.device.state_dir import (
    LOCKOUT_FILE,
    DeviceSettings,
    DeviceStateDir,
    _encode_settings,
    check_not_locked_out,
    load_pending_enrolment,
)
from edgefl.device.training.gossip_worker import load_node_instruction
from edgefl.device.training.process_link import parse_description, parse_reply
from edgefl.device.updates.installations import load_report
from edgefl.device.updates.protocol import (
    AgentHealth,
    InstallAttempt,
    InstallPhase,
    InstallResult,
    read_health,
    read_request,
    read_status,
)
from edgefl.device.updates.slots import Slots
from edgefl.system.process_messages import read_message
from edgefl.tasks.configured.options import ConfiguredTask
from edgefl.tasks.registry import make_task


def drift_references(folder: Path) -> Reader:
    """What a device keeps of the data that newer data is compared with."""
    path = folder / "reference.npz"
    sample = Dataset(inputs=np.arange(12.0).reshape(4, 3), targets=np.arange(4))
    seed = encode_reference(DriftReference(source="first", options={"columns": "a"}, num_examples=9, sample=sample))

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        read_reference(path)

    return Reader(feed=feed, seeds=(Seed(content=seed),))


def secure_adverts(_folder: Path) -> Reader:
    """Keys of another board, with its certificate and signature."""
    authority = create_authority("home")
    pair = issue_client_certificate(authority, "pi")
    identity = CertificateIdentity("pi", key_pem=pair.key_pem, cert_pem=pair.cert_pem, ca_pem=authority.cert_pem)
    advert = Advert(
        context=bytes(32), share_key=bytes(range(32)), mask_key=bytes(range(32, 64)), commitment=bytes(32),
        certificate=identity.certificate, signature=identity.sign(b"keys"),
    )  # fmt: skip

    def feed(data: bytes) -> None:
        found = Advert.decode(data)
        identity.verify("pi", found.certificate, b"keys", found.signature)

    return Reader(feed=feed, seeds=(Seed(content=advert.encode()),))


def consents(folder: Path) -> Reader:
    """What a device keeps of the sums that it has consented to."""
    path = folder / "secure-aggregation.json"
    content = json.dumps({"r": {"version": 4, "digest": "ab" * 32}}).encode()

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        load_consents(path).is_spent("r", 4)

    return Reader(feed=feed, seeds=(Seed(content=content, form=Form.JSON),))


def conditions(folder: Path) -> Reader:
    """The owner's file, a pause, the usage of budgets, a run's conditions: whatever they hold, the gate decides."""
    names = {b"c": "conditions.toml", b"p": "pause.json", b"b": "budgets.json", b"s": "longest_step_s"}
    clocks = Clocks(boot_id="b", wall=lambda: 1.8e9, boot_time=lambda: 50.0)
    limits = b'[conditions]\nzone = "Europe/Oslo"\n[conditions.day]\nprocessor_s = 60\n'

    def feed(data: bytes) -> None:
        for name in names.values():
            (folder / name).unlink(missing_ok=True)
        (folder / "conditions.toml").write_bytes(limits)
        if data[:1] != b"r":
            (folder / names.get(data[:1], "conditions.toml")).write_bytes(data[1:])
        gate = ConditionGate(folder, board=BoardReader(folder, run=no_program), clocks=clocks)
        if data[:1] == b"r":
            with suppress(ValueError, ConditionsEndedError):
                gate.admit("r-1", parse_json(data[1:]))
            assert gate.find_owner_blocker() is None
            question = Command(id="q", kind="conditions", argument=data[1:].decode(errors="replace"))
            replies: list[CommandReply] = []
            publish_answer(
                question,
                find_owner_blocker=lambda: None,
                publish=lambda reply: replies.append(reply) is None,
                facts=FactReader(BoardReader(folder, run=no_program)),
                sleep=lambda _: None,
            ).join()
            assert len(replies) == 1
        with gate.work():
            gate.check()

    whole = b"""[conditions]
zone = "Europe/Oslo"
hours = ["22:00-06:00", "12:00-13:30"]
weekdays = ["mon", "fri"]
mains = true
min_battery = 0.5
max_other_load = 0.3
interfaces = ["eth0"]
[conditions.day]
traffic_mb = 50
[conditions.month]
processor_s = 3600
"""
    pause = {"v": 1, "until_s": 1.9e9, "until_boot_s": 60.0, "boot_id": "b"}
    run = {"zone": "Europe/Oslo", "hours": ["22:00-06:00"], "weekdays": ["mon"], "min_battery": 0.5, "mains": True}
    kinds = dict.fromkeys(USE_KINDS, 1.5)
    usage = {
        "v": 1, "used": {"day": kinds, "month": kinds}, "period": {"day": "2027-01-15", "month": "2027-01"},
        "margins": kinds, "time_s": 1.8e9, "boot_s": 40.0, "boot_id": "b",
    }  # fmt: skip
    seeds = [
        Seed(content=whole, form=Form.TOML, close=lambda content: b"c" + content),
        Seed(content=json.dumps(pause).encode(), form=Form.JSON, close=lambda content: b"p" + content),
        Seed(content=json.dumps(run).encode(), form=Form.JSON, close=lambda content: b"r" + content),
        Seed(content=json.dumps({"conditions": run}).encode(), form=Form.JSON, close=lambda content: b"r" + content),
        Seed(content=json.dumps(usage).encode(), form=Form.JSON, close=lambda content: b"b" + content),
    ]
    return Reader(feed=feed, seeds=tuple(seeds))


def confined_messages(_folder: Path) -> Reader:
    """What the agent reads of its confined training process: messages, replies and descriptions of tasks."""

    def feed(data: bytes) -> None:
        source = io.BytesIO(data)
        while (message := read_message(source, MIB)) is not None:
            parse_description(message[0])
            if isinstance(reply := message[0].get("reply"), dict):
                parse_reply(reply)

    def pack(header: bytes) -> bytes:
        return struct.pack("<II", len(header), 2) + header + b"ab"

    metrics = {"iterations": 3, "loss": 0.5, "extra": {"messages": 2}, "health": {"paced_s": 0.0}}
    values: tuple[Any, ...] = (
        {"reply": {"metrics": metrics, "messages": []}},
        {"reply": {"ready": False, "reason": "no shard", "error": "no"}},
        {"needs_torch": True, "has_shape": False, "num_examples": 7, "error": "x"},
    )
    seeds = tuple(Seed(content=json.dumps(value).encode(), form=Form.JSON, close=pack) for value in values)
    return Reader(feed=feed, seeds=seeds, refuses=(EdgeflError, ValueError))


def states(folder: Path) -> Reader:
    """`device.json`, the counter of sessions, and what is left of a join that was cut off."""
    device = DeviceSettings(
        device_id="pi-1", fleet="lab", role="trainer", ca_fingerprint="ab" * 32, addresses=("pi.local:8000",),
        broker_port=8883, shards={"digits": "/srv/digits"}, threads=2, max_temperature_c=75.0,
    )  # fmt: skip
    pending = {"key": create_key().decode(), "name": "pi-1", "ca": "ab" * 32}
    names = {b"d": "device.json", b"s": "session", b"p": ".pending"}

    def feed(data: bytes) -> None:
        for name in names.values():
            (folder / name).unlink(missing_ok=True)
        kind = data[:1]
        (folder / names.get(kind, "device.json")).write_bytes(data[1:])
        if kind == b"s":
            assert DeviceStateDir(folder, device).next_session_no() > 0
        elif kind == b"p":
            load_pending_enrolment(folder)
        else:
            state = DeviceStateDir.load(folder)
            state.update(threads=1)
            _used(state.settings)

    seeds = (
        Seed(content=_encode_settings(device), form=Form.JSON, close=lambda found: b"d" + found),
        Seed(content=b"17\n", form=Form.TEXT, close=lambda found: b"s" + found),
        Seed(content=json.dumps(pending).encode(), form=Form.JSON, close=lambda found: b"p" + found),
    )
    return Reader(feed=feed, seeds=seeds)


def notes(folder: Path) -> Reader:
    """Small notes of agent and updater; the first byte says which. Most count as missing when they are damaged."""
    slots = Slots(folder / "opt")
    for place in (slots.work_dir, slots.path("a"), folder / "models", folder / "updates"):
        place.mkdir(parents=True, exist_ok=True)
    store = ModelStore(folder)
    places: dict[bytes, tuple[Path, Callable[[], object]]] = {
        b"h": (folder / "health.json", lambda: read_health(folder)),
        b"r": (folder / "updates" / "request.json", lambda: read_request(folder)),
        b"s": (slots.work_dir / "status.json", lambda: hash(read_status(slots))),
        b"l": (
            next(slots.path("a").glob("*.json"), slots.path("a") / _record_name()),
            lambda: slots.load_record("a"),
        ),
        b"m": (store.state_path, store.load),
        b"b": (folder / "speeds.json", lambda: _load(folder / "speeds.json")),
        b"n": (folder / "node.json", lambda: load_node_instruction(folder / "node.json")),
        b"w": (folder / LOCKOUT_FILE, lambda: _welcomed(folder)),
        b"i": (folder / "updates" / _install_note_name(), lambda: load_report(folder / "updates")),
    }

    def feed(data: bytes) -> None:
        path, read = places.get(data[:1], places[b"h"])
        path.write_bytes(data[1:])
        read()

    model = DeployedModel(deployment="d1", sha256="ab" * 32, model="cd" * 32, task="digits")
    trial = InstallAttempt(id="i1", sha256="ab" * 32, step=InstallPhase.TRIAL, old="a", new="b", token="t")
    values: dict[bytes, Any] = {
        b"h": {"v": 1, **asdict(AgentHealth(boot_id="b", version="0.9.1", packs={"p": "1"}))},
        b"r": {"v": 1, "id": "i1", "bundle": "ab" * 32},
        b"s": {"v": 1, "trial": asdict(trial), "outcome": asdict(InstallResult(id="i0", state="running"))},
        b"l": {"v": 1, "packs": {"p": {"version": "1", "projects": ["p", "q"]}}, "serials": {"k": 5}},
        b"m": {"v": 1, **asdict(DeploymentState(current=model, former=model,
        report=RolloutReport(id="d1", state="running")))},
        b"b": {"v": 1, "speeds": {"digits": {"steps_per_s": 5.0, "batch_size": 4, "backend": "numpy",
        "stamp": ["x"]}}},
        b"n": {"run": "r", "plan": {}},
        b"w": {"reason": "a copy", "boot": "b"},
        b"i": {"v": 1, "id": "i1", "state": "running", "reason": None},
    }  # fmt: skip
    seeds = [
        Seed(content=json.dumps(value).encode(), form=Form.JSON, close=lambda found, mark=mark: mark + found)
        for mark, value in values.items()
    ]
    return Reader(feed=feed, seeds=tuple(seeds))


def _welcomed(folder: Path) -> None:
    with suppress(ClonedError):
        check_not_locked_out(folder)


def logbooks(folder: Path) -> Reader:
    """The log that a device keeps, read for a page of it."""
    rows = [{"n": n, "at": 5.0 + n, "level": "INFO", "logger": "x", "message": "ä" * n, "run": "r"} for n in range(4)]
    content = b"\n".join(json.dumps(row).encode() for row in rows)

    def feed(data: bytes) -> None:
        (folder / _log_name()).write_bytes(data)
        json.dumps(read_page(folder, {"after": 1, "since": 2.0})).encode()

    one = Seed(
        content=json.dumps(rows[1]).encode(),
        form=Form.JSON,
        close=lambda found: content + b"\n" + found.replace(b"\n", b" "),
    )
    return Reader(feed=feed, seeds=(Seed(content=content, form=Form.TEXT), one))


def reports(folder: Path) -> Reader:
    """A field report of another board, on the operator's machine."""
    facts = {"v": 1, "made_at": 5.0, "device": {"id": "pi", "speeds": [{"a": 1}]}, "checks": [["a", True]]}

    def packed(text: bytes) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
            member = tarfile.TarInfo(_report_name())
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
        return out.getvalue()

    def feed(data: bytes) -> None:
        path = folder / "report.tar.gz"
        path.write_bytes(data)
        format_summary(read_report(path)).encode(errors="replace")

    text = json.dumps(facts).encode()
    seeds = (Seed(content=packed(text)), Seed(content=text, form=Form.JSON, close=packed))
    return Reader(feed=feed, seeds=seeds, most_bytes=32 * MIB)


class _Wire:
    """What a request handler takes for a connection."""

    def __init__(self, content: bytes) -> None:
        self._content, self.sent = io.BytesIO(content), bytearray()

    def makefile(self, *_: Any, **__: Any) -> Any:
        return self._content

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def settimeout(self, _seconds: float) -> None: ...

    def setsockopt(self, *_: Any) -> None: ...

    def shutdown(self, _how: int) -> None: ...


def inference_requests(folder: Path) -> Reader:
    """Whole requests to a board's inference server; none may end in its log as an internal error."""
    # Counts of a text's words in 64 buckets, which are as many as pixels of a picture.
    options = {"column": "a", "target": "b", "labels": "x,y", "size": 64}
    constant_model(folder / "m.onnx", 3, task="text", task_options=json.dumps(options))
    served = ServedModel(file=folder / "m.onnx")
    server = InferenceServer(served, open_listener("127.0.0.1", 0))
    inner: Any = server._server

    def feed(data: bytes) -> None:
        wire: Any = _Wire(data)
        _RequestHandler(wire, ("127.0.0.1", 5), inner)
        assert b" 500 " not in bytes(wire.sent[:20]), bytes(wire.sent[:400])

    array = io.BytesIO()
    np.save(array, np.zeros((2, 8, 8), np.uint8))
    rows = json.dumps({"rows": [np.zeros((8, 8)).tolist()]}).encode()

    def post(found: bytes) -> bytes:
        return b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(found) + found

    seeds = (
        Seed(content=rows, form=Form.JSON, close=post),
        Seed(content=json.dumps({"texts": ["too hot", "\ud800"]}).encode(), form=Form.JSON, close=post),
        Seed(content=array.getvalue(), close=post),
        Seed(content=post(rows), form=Form.TEXT),
        Seed(content=b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /model HTTP/1.0\r\n\r\n", form=Form.TEXT),
    )
    words = (
        b"GET ",
        b"POST ",
        b"/predict",
        b"HTTP/1.1",
        b"Content-Length: 5",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
    )
    return Reader(feed=feed, seeds=seeds, words=words, most_bytes=16 * MIB, close=inner.server_close)


def inference_rows(folder: Path) -> Reader:
    options = {"columns": "a,b", "window": 4, "target": "label", "labels": "shut,open", "group": "span"}
    task = cast(ConfiguredTask, make_task("series", options))

    def feed(data: bytes) -> None:
        write_rows(folder / "rows.csv", parse_lines(data), task)
        read_unlabelled(task, folder / "rows.csv")

    rows = "".join(f'{1000 + at}.000,{at},"{-at}",1,00000000\n' for at in range(6))
    content = f"time,a,b,span,check\n{rows}".encode()
    return Reader(feed=feed, seeds=(Seed(content=content, form=Form.TEXT),))


def model_facts(folder: Path) -> Reader:
    """What a model's file says of itself, in the metadata of an export; the graph itself is the library's to read."""
    from onnx import load, save  # noqa: PLC0415 beside its use
    from onnx.helper import set_model_props  # noqa: PLC0415 likewise

    constant_model(folder / "m.onnx", 3)
    model = load(folder / "m.onnx")
    told = {each.key: each.value for each in model.metadata_props}

    def feed(data: bytes) -> None:
        value = json.loads(data)
        if not isinstance(value, dict):
            return  # no metadata of a model
        texts = {str(name): entry if isinstance(entry, str) else json.dumps(entry) for name, entry in value.items()}
        set_model_props(model, texts)
        save(model, str(folder / "fed.onnx"))
        opened = OnnxModel(folder / "fed.onnx", threads=1)
        opened.predict(np.zeros((1, 8, 8), np.float32))

    return Reader(
        feed=feed, seeds=(Seed(content=json.dumps(told).encode(), form=Form.JSON),),
        refuses=(*Reader.__dataclass_fields__["refuses"].default, ValueError, RecursionError),
    )  # fmt: skip


def _used(device: DeviceSettings) -> None:
    """Looks at every field as an agent does that starts."""
    assert device.device_id
    hash((device.device_id, device.role, device.addresses, device.threads, device.peer_port, device.broker_port))


def _record_name() -> str:
    from edgefl.device.updates import slots  # noqa: PLC0415 a name of that file

    return slots.RECORD_FILE


def _install_note_name() -> str:
    from edgefl.device.updates import installations  # noqa: PLC0415 likewise

    return installations.REPORT_FILE


def _log_name() -> str:
    from edgefl.device.diagnostics import json_log  # noqa: PLC0415 a name of that file

    return json_log.FILE_NAME


def _report_name() -> str:
    from edgefl.device.diagnostics import diagnostic_report  # noqa: PLC0415 likewise

    return diagnostic_report.REPORT_FILE
