"""What lies on disk and may be damaged: journals, their records, checkpoints, states, models, backups."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from fuzz.reader import MIB, Form, Reader, Seed

from edgefl.compression.codec import decode_body, make_codec
from edgefl.coordinator.backup import _check_manifest, _extract_archive
from edgefl.core.types import (
    Array,
    Decision,
    EvaluateInstruction,
    EvaluateResult,
    FinishEarlyInstruction,
    GossipConfig,
    InstructionFailed,
    PeerLinkConfig,
    PeerMessage,
    SparseTensor,
    StopRequested,
    TensorSpec,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.storage.checkpoints import load_state, open_tensor_bytes, prune_checkpoints, save_state
from edgefl.storage.journal.file_format import (
    HEADER_BYTES,
    RECORD_HEADER_BYTES,
    JournalRecord,
    RecordKind,
    list_journal_files,
    read_header,
    read_records,
)
from edgefl.storage.journal.record_encoding import decode_record, encode_decision, encode_event
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.lineage import _parse_run_record
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.state_serialisation import (
    decode_model,
    decode_state,
    decode_tensors,
    encode_model,
    encode_state,
    encode_tensors,
)
from edgefl.tasks.adaptation.base_catalogue import BaseCatalogue
from edgefl.tasks.adaptation.base_file import encode_base, load_base

SHAPES = (TensorSpec(name="w", shape=(4,)),)
BODY = make_codec("dense", SHAPES).encode({"w": np.ones(4, np.float32)}, np.random.default_rng(0))


def _decode(body: bytes) -> dict[str, Array]:
    return dict(decode_body(body, SHAPES))  # type: ignore[arg-type]


def events() -> tuple[Update | EvaluateResult | InstructionFailed | StopRequested, ...]:
    metrics = UpdateMetrics(iterations=5, num_examples=9, loss=0.5, extra={"a": 1.0})
    message = PeerMessage(edge=("a", "b"), step=1, body=b"mail")
    update = Update(
        assignment_id="a1", device_id="pi", base_version=3, tensors={}, metrics=metrics, body=BODY,
        messages=(message,), received_s=2.5,
    )  # fmt: skip
    plain = Update(
        assignment_id="a2", device_id="pi", base_version=3, metrics=metrics, body=None,
        tensors={"w": SparseTensor(indices=np.array([1]), values=np.ones(1, np.float32), shape=(4,))},
    )  # fmt: skip
    scores = EvaluateResult(
        assignment_id="e1", device_id="pi", version=1, round=1, source="device", num_examples=3, loss=0.1,
        accuracy=0.5,
        subject="",
    )  # fmt: skip
    lost = InstructionFailed(device_id="pi", assignment_id="a3", outcome=UpdateStatus.LOST, reason="silent")
    return update, plain, scores, lost, StopRequested(reason="enough")


def decision() -> Decision:
    node = GossipConfig(
        method="gossip", edges=(PeerLinkConfig(neighbour="b", sign=1.0, degree=2, weight=0.5, period=1),),
        learning_rate=0.1,
        period=1, codec="int8", carrier="relay",
    )  # fmt: skip
    messages = (PeerMessage(edge=("b", "a"), step=1, body=b"in"),)
    plans = (TrainConfig(iterations=3), TrainConfig(epochs=1.0, messages=messages, node=node))
    orders = [
        TrainInstruction(assignment_id=f"a{n}", device_id="pi", base_version=0, plan=plan)
        for n, plan in enumerate(plans)
    ]
    evaluation = EvaluateInstruction(assignment_id="e1", device_id="pi", version=0, round=0)
    return Decision(
        instructions=(*orders, evaluation, FinishEarlyInstruction(assignment_id="a0", device_id="pi")),
        next_wake_s=5.0,
    )


def journals(folder: Path) -> Reader:
    """A journal's file, read as a coordinator does that starts again."""
    place = folder / "journal"
    with WalJournal(place, _decode) as journal:
        journal.record_events(events())
        journal.record_decision(decision())
        journal.commit()
        journal.record_aggregation(1, ["a1", "a2"])
        journal.commit()
    path = list_journal_files(place)[0]
    content = path.read_bytes()
    header = read_header(path)
    assert header is not None
    last = [record.offset for record in read_records(place)][-1]

    def sealed(found: bytes) -> bytes:
        """The same file with another last record, whose checksum is right."""
        start = last - RECORD_HEADER_BYTES
        head = struct.pack("<4sI", b"\xe5WR\x01", len(found))
        rest = struct.pack("<BBHQ", RecordKind.AGGREGATION, 0, 0, HEADER_BYTES)
        crc = zlib.crc32(found, zlib.crc32(rest, zlib.crc32(head, header.salt)))
        return content[:start] + head + struct.pack("<I", crc) + rest + found

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        read = lambda start, length: data[start : start + length]  # noqa: E731 as long as its name
        for record in read_records(place):
            entry = decode_record(record, _decode, read)
            assert entry is not None
        with WalJournal(place, _decode) as opened:
            opened.record_aggregation(2, ["a9"])

    seeds = (Seed(content=content), Seed(content=content[:HEADER_BYTES]), Seed(content=content[last:], close=sealed))
    return Reader(feed=feed, seeds=seeds)


def records(_folder: Path) -> Reader:
    """The body of a record that is whole, as an older version might have written it; its kind comes first."""
    packed = [one for event in events() if (one := encode_event(event)) is not None] + [encode_decision(decision())]
    seeds = []
    for one in packed:
        body, mark = b"".join(one.parts), bytes([one.kind])
        (length,) = struct.unpack_from("<I", body)
        seeds.append(Seed(content=body, close=lambda found, mark=mark: mark + found))
        seeds.append(
            Seed(
                content=body[4 : 4 + length], form=Form.JSON,
                close=lambda found, mark=mark, rest=body[4 + length :]: mark + struct.pack("<I",
                len(found)) + found + rest,
            )
        )  # fmt: skip

    def feed(data: bytes) -> None:
        kind = RecordKind(1 + (data[0] - 1) % len(RecordKind)) if data else RecordKind.STOP
        body = data[1:]
        record = JournalRecord(number=1, kind=kind, assignment_id="a1", body=body, path=Path("000001.wal"), offset=0)
        entry = decode_record(record, _decode, lambda start, length: body[start : start + length])
        if isinstance(entry, Update):
            dict(entry.tensors)

    return Reader(feed=feed, seeds=tuple(seeds), refuses=(*Reader.__dataclass_fields__["refuses"].default,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    weight: Array
    sparse: SparseTensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """As a strategy's state is: some of everything that can be kept."""

    model: dict[str, Array]
    inner: Inner
    names: tuple[str, ...] = ()
    seen: frozenset[str] = frozenset()
    best: float = float("inf")
    raw: bytes = b"raw"
    by_device: dict[str, int] = field(default_factory=dict)


def states(_folder: Path) -> Reader:
    """A checkpoint's state."""
    state = State(
        model={"w": np.ones(4, np.float32)}, names=("a", "b"), seen=frozenset({"x"}), by_device={"pi": 1},
        inner=Inner(weight=np.zeros((2, 2)), sparse=SparseTensor(indices=np.array([1]), values=np.ones(1), shape=(4,
        ))),
    )  # fmt: skip
    content = encode_state(state)
    return Reader(feed=lambda data: decode_state(data, State), seeds=tuple(safetensors_seeds(content)))


def tensors(_folder: Path) -> Reader:
    """Tensors of an update that came without a codec, and whole models; the first byte says which."""
    sparse = SparseTensor(indices=np.array([1]), values=np.ones(1, np.float32), shape=(4,))
    update, model = (
        encode_tensors({"w": np.ones(3), "s": sparse}),
        encode_model({"w": np.ones(3), "v": np.zeros((2, 2))}),
    )
    seeds = [
        Seed(
            content=seed.content, form=seed.form, close=lambda found, mark=mark, close=seed.close: mark + close(found)
        )
        for mark, content in ((b"u", update), (b"m", model))
        for seed in safetensors_seeds(content)
    ]
    feed = lambda data: (decode_tensors if data[:1] == b"u" else decode_model)(data[1:])  # noqa: E731 as long as its name
    return Reader(feed=feed, seeds=tuple(seeds))


def job_results(folder: Path) -> Reader:
    """The file of a job's result, which is sent without being read."""
    path = folder / "result.safetensors"

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        file, num_bytes = open_tensor_bytes(path, "result")
        with file:
            assert len(file.read()) == num_bytes

    content = encode_model({"result": np.frombuffer(b"what a job found", np.uint8)})
    return Reader(feed=feed, seeds=tuple(safetensors_seeds(content)))


def checkpoint_notes(folder: Path) -> Reader:
    """The note beside a checkpoint's state; a damaged one is left out."""
    place = folder / "checkpoints"
    saved = save_state(place, Inner(weight=np.zeros((2, 2))), 7)
    note, state = place / f"{7:020d}.checkpoint.json", place / f"{saved.sha256}.safetensors"
    content, kept = note.read_bytes(), state.read_bytes()

    def feed(data: bytes) -> None:
        note.write_bytes(data)
        state.write_bytes(kept)
        try:
            load_state(place, Inner)
        finally:
            prune_checkpoints(place)

    return Reader(feed=feed, seeds=(Seed(content=content, form=Form.JSON),))


def run_rows(folder: Path) -> Reader:
    """A run's row beside its journal; one that is damaged is left out, with a warning."""
    path = folder / "run.json"
    record = RunRecord(
        run_id="r", name="n", task="digits", strategy="fedavg", config={"run": {}}, status=RunStatus.RUNNING,
        reason=None, submitted_at=1.0, started_at=2.0, finished_at=None, rounds=3, version=3, accuracy=0.5, seed=7,
    )  # fmt: skip

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        _parse_run_record("r", path)

    content = json.dumps(asdict(record)).encode()
    return Reader(
        feed=feed, seeds=(Seed(content=content, form=Form.JSON),), refuses=(ValueError, TypeError, KeyError)
    )


def backups(folder: Path) -> Reader:
    """The archive of a backup, read up to its checks; the settings in it have a reader of their own."""
    content = b"x = 1\n"
    manifest = {
        "v": 1, "fleet": "lab", "version": "0.9.1", "created_at": 5.0, "revision": "0001", "has_models": False,
        "files": {"settings.toml": {"sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}},
    }  # fmt: skip
    count = [0]

    def packed(text: bytes) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
            for name, body in (("settings.toml", content), ("manifest.json", text)):
                member = tarfile.TarInfo(name)
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
        return out.getvalue()

    def feed(data: bytes) -> None:
        path, stage = folder / "backup.tar.gz", folder / f"stage-{count[0]}"
        count[0] += 1
        path.write_bytes(data)
        stage.mkdir()
        try:
            _check_manifest(path, *_extract_archive(path, stage))
        finally:
            _remove(stage)

    text = json.dumps(manifest).encode()
    plain = zlib.decompress(packed(text), 31)
    seeds = (
        Seed(content=packed(text)),
        Seed(content=plain),
        Seed(content=text, form=Form.JSON, close=packed),
        Seed(content=plain[:512], close=lambda found: _tar_sealed(found[:512].ljust(512, b"\0")) + plain[512:]),
    )
    return Reader(feed=feed, seeds=seeds, most_bytes=16 * MIB)


def _tar_sealed(header: bytes) -> bytes:
    """A header of a tar with the checksum that it should have."""
    blank = header[:148] + b" " * 8 + header[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


def bases(folder: Path) -> Reader:
    """A base: a safetensors file of an operator's or of a coordinator, by its own reader."""
    path = folder / "base.safetensors"
    tensors = {"fc.weight": np.ones((2, 3), np.float32), "fc.steps": np.array(3)}

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        load_base(path, ["fc.weight", "more"])
        load_base(path)

    content = encode_base(tensors)
    size = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + size], content[8 + size :]
    close = lambda found: len(found).to_bytes(8, "little") + found + rest  # noqa: E731 as long as its name
    return Reader(feed=feed, seeds=(Seed(content=content), Seed(content=header, form=Form.JSON, close=close)))


def base_names(folder: Path) -> Reader:
    """What a coordinator calls its pretrained bases."""
    catalogue, names = BaseCatalogue(folder), folder / "names.json"
    sha256 = "ab" * 32
    (folder / f"{sha256}.safetensors").write_bytes(encode_base({"w": np.ones(2, np.float32)}))

    def feed(data: bytes) -> None:
        names.write_bytes(data)
        catalogue.list_bases()
        catalogue.find("mobilenet")

    seed = json.dumps({"mobilenet": sha256, "other": "cd" * 32}).encode()
    return Reader(feed=feed, seeds=(Seed(content=seed, form=Form.JSON),))


def safetensors_seeds(content: bytes, key: str = "edgefl") -> list[Seed]:
    """All of the file, its header, and the JSON in the header's metadata."""
    size = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + size], content[8 + size :]

    def close(found: bytes) -> bytes:
        return len(found).to_bytes(8, "little") + found + rest

    def deep(found: bytes) -> bytes:
        value = json.loads(header)
        value["__metadata__"][key] = found.decode(errors="replace")
        return close(json.dumps(value).encode())

    inner = json.loads(header)["__metadata__"][key].encode()
    return [
        Seed(content=content),
        Seed(content=header, form=Form.JSON, close=close),
        Seed(content=inner, form=Form.JSON, close=deep),
    ]


Close = Callable[[bytes], bytes]
