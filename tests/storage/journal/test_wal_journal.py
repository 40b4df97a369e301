"""What was committed comes back, whatever a crash or a bad disk does; damage is named."""

import errno
import json
import os
import resource
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgefl.core.allowance import Allowance, BudgetLeft, Window
from edgefl.core.errors import JournalError, NotKeptError, StoreFullError, StoreTooNewError
from edgefl.core.types import (
    Decision,
    DeviceAvailable,
    DeviceInfo,
    EvaluateInstruction,
    EvaluateResult,
    FinishEarlyInstruction,
    GossipConfig,
    HealthMetrics,
    InstructionFailed,
    PeerLinkConfig,
    PeerMessage,
    Progress,
    Role,
    SparseTensor,
    StopRequested,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.storage.journal import file_format
from edgefl.storage.journal.file_format import (
    HEADER_BYTES,
    JournalRecord,
    RecordKind,
    list_journal_files,
    read_records,
)
from edgefl.storage.journal.record_encoding import (
    Aggregation,
    CheckpointMark,
    HealthObserved,
    TurnStarted,
    decode_record,
    encode_event,
)
from edgefl.storage.journal.wal_journal import MAX_CACHE_BYTES, WalJournal, load_journal_entries
from edgefl.storage.state_serialisation import decode_tensors

in_a_fresh_directory = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def decode(body):
    return {"w": np.frombuffer(body, dtype=np.uint8)}


def update(assignment_id="a1", body=b"weights", **changes):
    values = {"device_id": "pi-1", "base_version": 3, "tensors": {}, "metrics": UpdateMetrics(iterations=5, loss=0.5)}
    return Update(assignment_id=assignment_id, body=body, **{**values, **changes})


def body_of(event):
    return event.tensors["w"].tobytes()


def open_journal(directory, **options):
    return WalJournal(directory, decode, **options)


def entries(directory, **options):
    with open_journal(directory) as journal:
        return list(journal.read_entries(**options))


def all_kinds():
    node = GossipConfig(
        method="pdmm-isvr",
        edges=(
            PeerLinkConfig(neighbour="a", sign=-1.0, degree=2, weight=1 / 3, period=8, epoch=2),
            PeerLinkConfig(neighbour="c", sign=1.0, degree=1, weight=0.1, period=4, slot=4, address="h:1"),
        ),
        learning_rate=0.05, period=5, codec="topk:0.01", listen="h:2", carrier="direct", schedule="slots",
        fires=("a", "c"), until=10, limit=20, reports=True,
    )  # fmt: skip
    plan = TrainConfig(
        node=node,
        iterations=3,
        options={"mu": 0.1, "name": "x"},
        messages=(
            PeerMessage(edge=("a", "b"), step=2, body=b"\x00\xff"),
            PeerMessage(edge=("b", "c"), step=1, body=b"z", is_reply=True),
        ),
    )
    orders = (
        TrainInstruction(
            assignment_id="a1", device_id="pi-1", base_version=3, plan=plan, codec="dense", used_assignments=("a0",)
        ),
        TrainInstruction(
            assignment_id="a2", device_id="pi-2", base_version=3, plan=TrainConfig(epochs=1), sends_model=False
        ),
        EvaluateInstruction(assignment_id="e1", device_id="pi-2", version=3, round=3),
        EvaluateInstruction(assignment_id="e2", device_id="pi-2", version=3, round=3, subject="pi-1"),
        FinishEarlyInstruction(assignment_id="a1", device_id="pi-1"),
    )
    evaluated = EvaluateResult(
        assignment_id="e1", device_id="pi-2", version=3, round=3, source="device", num_examples=9, loss=0.1,
        accuracy=0.9, metrics={"f1": 0.5}, sums=b"\x00\xff",
    )  # fmt: skip
    lost = InstructionFailed(
        device_id="pi-3", assignment_id="a3", outcome=UpdateStatus.REJECTED, reason="its norm", is_strike=True
    )
    own = replace(evaluated, assignment_id="e2", subject="pi-1")
    return Decision(instructions=orders, next_wake_s=2.5), [evaluated, own, lost, StopRequested(reason="enough")]


def test_everything_that_happened_comes_back_equal_and_in_order(tmp_path):
    decision, events = all_kinds()
    with open_journal(tmp_path / "j") as journal:
        journal.record_decision(decision)
        journal.record_events([update(received_s=7.5), *events])
        journal.record_aggregation(4, ["a1"])
    (first, got_decision), (_, got_update), *rest = entries(tmp_path / "j")
    assert (first, got_decision) == (1, decision)
    assert (got_update.device_id, got_update.metrics, got_update.received_s) == ("pi-1", update().metrics, 7.5)
    assert (body_of(got_update), got_update.body) == (b"weights", None)
    assert [entry for _, entry in rest] == [*events, Aggregation(version=4, assignment_ids=("a1",))]
    assert [number for number, _ in rest] == [3, 4, 5, 6, 7]


def test_a_received_update_is_read_from_the_disk_and_numbers_go_on_after_a_restart(tmp_path):
    decoded = []
    with WalJournal(tmp_path / "j", lambda body: decoded.append(body) or decode(body)) as journal:
        (kept,) = journal.record_events([update(body=b"first", tensors=decode(b"first"))])
        assert kept.body is None
        assert (body_of(kept), decoded) == (b"first", [])
        kept.tensors.unload()
        assert (body_of(kept), decoded) == (b"first", [b"first"])
        assert journal.last_record == 1
    with open_journal(tmp_path / "j") as journal:
        journal.record_events([update("a2")])
        assert journal.last_record == 2
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.record_events([update()])
    assert [number for number, _ in entries(tmp_path / "j", after=1)] == [2]


def test_only_the_newest_updates_stay_decoded(tmp_path):
    decoded, large = [], {"w": np.zeros(MAX_CACHE_BYTES // 2, np.uint8)}
    with WalJournal(tmp_path / "j", lambda body: decoded.append(body) or decode(body)) as journal:
        kept = [
            journal.record_events([update(name, body=name.encode(), tensors=tensors)])[0]
            for name, tensors in (
                ("a", large),
                ("b", large),
                ("c", large),
                ("d", {"w": np.zeros(MAX_CACHE_BYTES + 1)}),
            )
        ]
        for event in kept:
            assert event.tensors["w"].size
    assert decoded == [b"a", b"b", b"c"]


def test_an_update_without_codec_body_keeps_its_tensors(tmp_path):
    sparse = SparseTensor(indices=np.array([1, 5]), values=np.array([0.5, -1.0], dtype=np.float32), shape=(2, 3))
    tensors = {"z": np.arange(3, dtype=np.float32), "a": sparse, "scalar": np.float32(2.0) * np.ones((), np.float32)}
    with open_journal(tmp_path / "j") as journal:
        (kept,) = journal.record_events([update(body=None, tensors={**tensors, "scalar": np.array(2.0)})])
        assert list(kept.tensors) == ["z", "a", "scalar"]
    ((_, again),) = entries(tmp_path / "j")
    np.testing.assert_array_equal(again.tensors["z"], tensors["z"])
    np.testing.assert_array_equal(again.tensors["a"].dense(), sparse.dense())
    assert again.tensors["scalar"].shape == ()


def test_what_no_replay_needs_is_passed_on_and_not_written(tmp_path):
    progress = Progress(device_id="d", assignment_id="a", iteration=1, seconds_per_iteration=0.1, age_s=0.0)
    with open_journal(tmp_path / "j") as journal:
        assert journal.record_events([progress, DeviceAvailable(device_id="d")]) == [
            progress,
            DeviceAvailable(device_id="d"),
        ]
        journal.record_decision(Decision())
        assert journal.last_record == 0


def test_large_files_get_successors_and_checkpoints_begin_new_ones(tmp_path):
    with open_journal(tmp_path / "j", max_file_bytes=1000) as journal:
        kept = [event for n in range(10) for event in journal.record_events([update(f"a{n}", body=bytes([n]) * 400)])]
        files = len(list_journal_files(tmp_path / "j"))
        assert files > 2
        journal.record_checkpoint(CheckpointMark(sha256="0" * 64, last_record=journal.last_record))
        assert len(list_journal_files(tmp_path / "j")) > files
        assert list_journal_files(tmp_path / "j")[-1].stat().st_size == HEADER_BYTES
        assert [body_of(event) for event in kept] == [bytes([n]) * 400 for n in range(10)]
    assert [number for number, _ in entries(tmp_path / "j")] == list(range(1, 12))


def test_a_body_whose_file_is_gone_is_told_from_one_that_was_let_go_of(tmp_path):
    with open_journal(tmp_path / "j", max_file_bytes=1000) as journal:
        kept = [journal.record_events([update(f"a{n}", body=b"x" * 400)])[0] for n in range(6)]
        for path in list_journal_files(tmp_path / "j")[1:]:
            path.unlink()
        with pytest.raises(JournalError, match="is gone") as caught:
            body_of(kept[-1])
        assert not isinstance(caught.value, NotKeptError)


def test_pruning_removes_whole_files_up_to_the_checkpoint_and_nothing_behind_it(tmp_path):
    with open_journal(tmp_path / "j", max_file_bytes=1000) as journal:
        for n in range(1, 11):
            (first, *_) = journal.record_events([update(f"a{n}", body=b"x" * 400)])
            if n == 1:
                oldest = first
        journal.prune(5)
        with pytest.raises(NotKeptError, match="pruned"):
            body_of(oldest)
    assert [number for number, _ in entries(tmp_path / "j", after=5)] == [6, 7, 8, 9, 10]
    with pytest.raises(JournalError, match="missing"):
        entries(tmp_path / "j")


def test_a_checkpoint_that_knows_more_than_the_journal_is_an_error(tmp_path):
    with open_journal(tmp_path / "j") as journal:
        journal.record_events([update()])
    with pytest.raises(JournalError, match="ends with record 1"):
        list(read_records(tmp_path / "j", after=2))
    with pytest.raises(JournalError, match="ends with record 0"):
        list(read_records(tmp_path / "nothing", after=1))


def test_a_missing_file_in_the_middle_is_named(tmp_path):
    with open_journal(tmp_path / "j", max_file_bytes=HEADER_BYTES) as journal:
        for n in range(4):
            journal.record_events([update(f"a{n}")])
    list_journal_files(tmp_path / "j")[1].unlink()
    with pytest.raises(JournalError, match="record 2 is missing"):
        list(read_records(tmp_path / "j"))


def synced_journal(directory, sizes=(3, 0, 200)):
    """Writes one record per commit and returns the file and the end of every record."""
    ends = []
    with open_journal(directory) as journal:
        for number, size in enumerate(sizes):
            journal.record_events([update(f"a{number}", body=bytes(range(size)))])
            journal.commit()
            ends.append(list_journal_files(directory)[-1].stat().st_size)
    return list_journal_files(directory)[-1], ends


@in_a_fresh_directory
@given(data=st.data())
def test_a_torn_tail_is_cut_wherever_it_is_torn(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("torn") / "j"
    path, ends = synced_journal(directory)
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = sum(end <= cut for end in ends)
    assert [record.assignment_id for record in read_records(directory)] == [f"a{n}" for n in range(whole)]
    with open_journal(directory) as journal:
        assert journal.last_record == whole
        journal.record_events([update("after")])
    names = [record.assignment_id for record in read_records(directory)]
    assert names == [*(f"a{n}" for n in range(whole)), "after"]


@in_a_fresh_directory
@given(data=st.data())
def test_damage_of_what_was_durable_is_named_and_damage_of_the_last_commit_is_cut(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("damaged") / "j"
    path, ends = synced_journal(directory)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    if place < ends[-2]:
        with pytest.raises(JournalError, match=rf"{path}.* damaged at byte \d+|format \d+") as error:
            list(read_records(directory))
        assert "\n" not in str(error.value)
        with pytest.raises(JournalError):
            open_journal(directory)
        assert path.read_bytes() == content
    else:
        assert [record.assignment_id for record in read_records(directory)] == ["a0", "a1"]


@in_a_fresh_directory
@given(data=st.data())
def test_damage_of_an_older_file_is_always_named(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("older") / "j"
    with open_journal(directory, max_file_bytes=HEADER_BYTES) as journal:
        journal.record_events([update("a0"), update("a1")])
    old = list_journal_files(directory)[0]
    content = bytearray(old.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    old.write_bytes(content)
    with pytest.raises(JournalError):
        list(read_records(directory))


@in_a_fresh_directory
@given(lost=st.lists(st.integers(0, 7), unique=True), data=st.data())
def test_pages_of_an_unsynced_batch_may_arrive_in_any_order(tmp_path_factory, lost, data):
    directory = tmp_path_factory.mktemp("pages") / "j"
    with open_journal(directory) as journal:
        journal.record_events([update("kept")])
        journal.commit()
        start = list_journal_files(directory)[0].stat().st_size
        journal.record_events([update(f"a{n}", body=os.urandom(100)) for n in range(5)])
    path = list_journal_files(directory)[0]
    content = bytearray(path.read_bytes())
    page = data.draw(st.integers(50, 200))
    for number in lost:
        begin = min(start + number * page, len(content))
        content[begin : begin + page] = bytes(len(content[begin : begin + page]))
    path.write_bytes(content)
    names = [record.assignment_id for record in read_records(directory)]
    assert names[0] == "kept"
    assert names == ["kept", "a0", "a1", "a2", "a3", "a4"][: len(names)]


def test_a_body_that_looks_like_a_record_is_not_taken_for_one(tmp_path):
    with open_journal(tmp_path / "real") as journal:
        journal.record_events([update("x")])
        journal.commit()
        journal.record_events([update("y")])
    forged = list_journal_files(tmp_path / "real")[0].read_bytes()[HEADER_BYTES:]
    with open_journal(tmp_path / "j") as journal:
        journal.record_events([update("kept")])
        journal.commit()
        end = list_journal_files(tmp_path / "j")[0].stat().st_size
        journal.record_events([update("torn", body=forged)])
    path = list_journal_files(tmp_path / "j")[0]
    content = bytearray(path.read_bytes())
    content[end + 10] ^= 1
    path.write_bytes(content)
    assert [record.assignment_id for record in read_records(tmp_path / "j")] == ["kept"]


def test_what_lay_behind_a_torn_record_does_not_come_back_behind_its_successor(tmp_path):
    with open_journal(tmp_path / "j") as journal:
        journal.record_events([update("kept")])
        journal.commit()
        end = list_journal_files(tmp_path / "j")[0].stat().st_size
        journal.record_events([update("a1"), update("a2")])
    path = list_journal_files(tmp_path / "j")[0]
    content = bytearray(path.read_bytes())
    content[end] ^= 1
    path.write_bytes(content)
    with open_journal(tmp_path / "j") as journal:
        journal.record_events([update("b1")])
    assert [record.assignment_id for record in read_records(tmp_path / "j")] == ["kept", "b1"]


def test_a_crash_while_a_new_file_is_made_loses_nothing(tmp_path):
    with open_journal(tmp_path / "j") as journal:
        journal.record_events([update("a0")])
    (tmp_path / "j" / "000002.wal").write_bytes(b"EDGE")
    assert [record.assignment_id for record in read_records(tmp_path / "j")] == ["a0"]
    with open_journal(tmp_path / "j") as journal:
        journal.record_events([update("a1")])
        assert journal.last_record == 2
    assert [record.number for record in read_records(tmp_path / "j")] == [1, 2]


def test_a_newer_format_is_refused(tmp_path):
    path, _ = synced_journal(tmp_path / "j")
    content = bytearray(path.read_bytes())
    content[8] = 3
    import zlib  # noqa: PLC0415 only here

    content[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(content[: HEADER_BYTES - 4]).to_bytes(4, "little")
    path.write_bytes(content)
    before = [one.read_bytes() for one in list_journal_files(tmp_path / "j")]
    with pytest.raises(StoreTooNewError, match="format 3, this program reads 2: a newer edgefl wrote it"):
        list(read_records(tmp_path / "j"))
    with pytest.raises(StoreTooNewError):
        open_journal(tmp_path / "j")
    assert [one.read_bytes() for one in list_journal_files(tmp_path / "j")] == before


def test_a_whole_record_of_an_unknown_kind_is_a_newer_edgefls_and_no_torn_tail(tmp_path, monkeypatch):
    with open_journal(tmp_path / "j") as journal:
        journal.record_events([update("a1")])
        journal.commit()
    monkeypatch.setattr(file_format, "RecordKind", IntEnum("RecordKind", {"EVALUATION": 2}))
    path = list_journal_files(tmp_path / "j")[0]
    content = path.read_bytes()
    with pytest.raises(StoreTooNewError, match="a record of kind 1, this program knows kinds up to 2"):
        open_journal(tmp_path / "j")
    assert path.read_bytes() == content


def test_a_killed_writer_loses_nothing_that_it_committed(tmp_path):
    script = textwrap.dedent(
        """
        import os, signal, sys
        from edgefl.storage.journal.wal_journal import WalJournal, load_journal_entries
        from edgefl.core.types import StopRequested
        journal = WalJournal(__import__("pathlib").Path(sys.argv[1]), dict)
        for number in range(50):
            journal.record_events([StopRequested(reason=str(number))])
            journal.commit()
        journal.record_events([StopRequested(reason="not committed")])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "j")], check=False, env=environment, timeout=60
    )
    assert killed.returncode == -9
    reasons = [entry.reason for _, entry in entries(tmp_path / "j")]
    assert reasons[:50] == [str(number) for number in range(50)]


@pytest.fixture
def file_size_limit():
    """Limits every file that this process writes, as a full disk would, and lifts the limit at the end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_call_without_room_keeps_nothing_and_may_be_repeated(tmp_path, file_size_limit):
    journal = open_journal(tmp_path / "j")
    journal.record_events([update("a0", body=b"x" * 1000)])
    journal.commit()
    batch = [update("a1", body=b"y" * 1000), update("a2", body=b"z" * 5000)]
    file_size_limit(4000)
    with pytest.raises(StoreFullError, match="no room to write journal") as error:
        journal.record_events(batch)
    assert error.value.__cause__.errno == errno.EFBIG
    assert journal.last_record == 1
    file_size_limit(100_000)
    kept = journal.record_events(batch)
    assert [body_of(event)[:1] for event in kept] == [b"y", b"z"]
    journal.close()
    assert [record.assignment_id for record in read_records(tmp_path / "j")] == ["a0", "a1", "a2"]


def test_no_room_for_a_successor_leaves_the_journal_as_it_was(tmp_path, file_size_limit):
    journal = open_journal(tmp_path / "j", max_file_bytes=1500)
    file_size_limit(3000)
    with pytest.raises(StoreFullError):
        journal.record_events(
            [update("a0", body=b"x" * 1600), update("a1", body=b"x" * 100), update("a2", body=b"x" * 9000)]
        )
    assert len(list_journal_files(tmp_path / "j")) == 1
    assert journal.last_record == 0
    journal.record_events([update("b0")])
    journal.close()
    assert [record.assignment_id for record in read_records(tmp_path / "j")] == ["b0"]


def test_a_failed_sync_ends_the_journal_and_what_was_committed_comes_back(tmp_path):
    journal = open_journal(tmp_path / "j")
    journal.record_events([update("a0")])
    journal.commit()
    journal.record_events([update("a1")])
    os.close(journal._handle)
    with pytest.raises(JournalError, match="could not be made durable"):
        journal.commit()
    for call in (journal.commit, lambda: journal.record_events([update("a2")])):
        with pytest.raises(JournalError, match="could not be made durable"):
            call()
    assert next(read_records(tmp_path / "j")).assignment_id == "a0"


def test_a_whole_record_of_nonsense_is_named(tmp_path):
    from edgefl.storage.journal.record_encoding import EncodedRecord  # noqa: PLC0415 only here

    with open_journal(tmp_path / "j") as journal:
        journal._append_record(
            EncodedRecord(kind=RecordKind.INSTRUCTION_FAILED, assignment_id="a", parts=(b"\x05\0\0\0[1,2]",))
        )
        journal.commit()
        with pytest.raises(JournalError, match=r"record 1 \(instruction failed\) makes no sense"):
            list(journal.read_entries())


def test_files_are_for_their_owner_alone(tmp_path):
    open_journal(tmp_path / "runs" / "r" / "journal").close()
    (path,) = list_journal_files(tmp_path / "runs" / "r" / "journal")
    assert path.stat().st_mode & 0o777 == 0o600
    assert Path(path.parent).stat().st_mode & 0o777 == 0o700


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
MESSAGES = st.lists(
    st.builds(PeerMessage, edge=st.tuples(NAMES, NAMES), step=st.integers(0, 2**60), body=st.binary(max_size=40),
              is_reply=st.booleans()), max_size=4,
).map(tuple)  # fmt: skip
SIDES = st.builds(
    PeerLinkConfig, neighbour=NAMES, sign=NUMBERS, degree=st.integers(0, 9), weight=NUMBERS, slot=st.integers(0, 9)
)
NODES = st.builds(
    GossipConfig, method=NAMES, edges=st.lists(SIDES, max_size=3).map(tuple), learning_rate=NUMBERS,
    period=st.integers(1, 9), codec=NAMES, carrier=NAMES, schedule=NAMES,
    fires=st.lists(NAMES, max_size=3).map(tuple),
    until=st.integers(0, 2**40), limit=st.integers(0, 2**40), reports=st.booleans(),
)  # fmt: skip
PLANS = st.builds(TrainConfig, iterations=st.integers(0, 9), messages=MESSAGES, node=st.none() | NODES)


@in_a_fresh_directory
@given(plan=PLANS, messages=MESSAGES, body=st.none() | st.binary(max_size=40), sends_model=st.booleans())
def test_what_nodes_are_told_and_what_they_send_comes_back_exactly(
    tmp_path_factory, plan, messages, body, sends_model
):
    directory, tensors = tmp_path_factory.mktemp("j"), {"w": np.arange(3, dtype=np.uint8)}
    order = TrainInstruction(assignment_id="a1", device_id="d", base_version=1, plan=plan, sends_model=sends_model)
    with open_journal(directory) as journal:
        journal.record_decision(Decision(instructions=(order,)))
        decoded = tensors if body is None else decode(body)
        (kept,) = journal.record_events([update(body=body, tensors=decoded, messages=messages)])
        expected = decoded["w"].tobytes()
        assert (kept.messages, body_of(kept)) == (messages, expected)
    (_, decision), (_, again) = entries(directory)
    assert decision.instructions == (order,)
    assert (again.messages, body_of(again)) == (messages, expected)


def read_record(kind, meta, blob=b""):
    """What a record of this text and these bytes says."""
    text = json.dumps(meta).encode()
    body = len(text).to_bytes(4, "little") + text + blob
    record = JournalRecord(number=1, kind=kind, assignment_id="a1", body=body, path=Path("j"), offset=0)
    return decode_record(record, decode, lambda start, length: body[start : start + length])


def text_of(packed):
    whole = b"".join(packed.parts)
    return json.loads(whole[4 : 4 + int.from_bytes(whole[:4], "little")])


@pytest.mark.parametrize(("place", "length"), [((0, 4), 4), ((5, 3), 4), ((0, 3), 5)])
def test_messages_that_do_not_fill_their_place_before_the_body_are_named(place, length):
    told = text_of(encode_event(update()))
    told["messages"] = [{"edge": ["a", "b"], "step": 1, "is_reply": False, "at": place}]
    with pytest.raises(JournalError, match="record 1"):
        read_record(RecordKind.UPDATE, {**told, "length": length}, b"message")


def test_what_the_loop_saw_comes_back_and_costs_no_sync_of_its_own(tmp_path):
    budget = BudgetLeft(kind="traffic", period="day", left=1.0, limit=2.0, renews_s=3.0)
    allowance = Allowance(window=Window(ends_s=4.0, reopens_s=5.0), budgets=(budget,))
    info = DeviceInfo(
        device_id="pi-1", role=Role.EVALUATOR, groups=("a",), blocks={"digits": (0, 2)}, allowance=allowance
    )
    report = Progress(device_id="pi-1", assignment_id="a", iteration=3, seconds_per_iteration=0.5, age_s=0.0)
    turn = TurnStarted(now_s=1.25, at=1e9, devices={"pi-1": info, "pi-2": None}, progress=(report,), incarnation=2)
    seen = HealthObserved(health={"pi-1": HealthMetrics(temperature_c=61.5), "pi-2": None})
    syncs = []
    with WalJournal(tmp_path, decode_tensors, sync_timer=lambda: syncs.append(1) or nullcontext()) as wal:
        wal.record_turn(turn)
        wal.record_turn(seen)
        wal.commit()
        assert syncs == []
        wal.record_aggregation(1, ["a"])
        wal.commit()
        assert syncs == [1]
    entries = [entry for _, entry in load_journal_entries(tmp_path)]
    assert entries == [turn, seen, Aggregation(version=1, assignment_ids=("a",))]
    assert entries[0].devices["pi-1"].role is Role.EVALUATOR
