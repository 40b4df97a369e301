"""States come back equal, files are whole or not there, and damage is named."""

from __future__ import annotations

import hashlib
import math
import re
import resource
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from edgefl.core.errors import JournalError, NotFoundError, StoreFullError, StoreTooNewError
from edgefl.core.types import LazyTensors, SparseTensor, UpdateStatus
from edgefl.storage.checkpoints import (
    Checkpoint,
    is_intact,
    list_checkpoint_files,
    list_checkpoints,
    load_model_file,
    load_run_snapshot,
    load_state,
    prune_checkpoints,
    save_model,
    save_state,
)
from edgefl.storage.state_serialisation import decode_state, encode_state


@dataclass(frozen=True, slots=True, kw_only=True)
class PerDevice:
    staleness: int
    moment: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    version: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, PerDevice] = field(default_factory=dict)
    pending: tuple[str, ...] = ()
    extra: Any = None
    last: PerDevice | None = None


@dataclass
class Other:
    version: int = 0


class Plain(Enum):
    WARM = "warm"
    COLD = (1, 2)


class Bits(IntFlag):
    A = 1
    B = 2


class Name(str):
    """As `numpy.str_` is."""

    __slots__ = ()


@dataclass
class Phases:
    plain: Plain
    mixed: dict[Plain, Bits]
    role: UpdateStatus


def same(left, right):
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list | deque):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and left == right


def state():
    return State(
        version=3,
        model={"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4)), "n": np.array(7)},
        devices={"pi-1": PerDevice(staleness=2, moment={"w": np.array([1.5, np.nan])})},
        pending=("a1", "a2"),
        last=PerDevice(staleness=1, moment={}),
    )


def test_a_state_comes_back_equal_and_may_be_written_to(tmp_path):
    saved = save_state(tmp_path / "c", state(), 42)
    assert saved == list_checkpoints(tmp_path / "c")[0]
    assert (saved.last_record, (tmp_path / "c" / f"{saved.sha256}.safetensors").stat().st_size) == (
        42,
        saved.bytes_file,
    )
    again = load_state(tmp_path / "c", State)
    assert same(dict(again.model), dict(state().model))
    assert same(again.devices["pi-1"].moment, state().devices["pi-1"].moment)
    assert (again.version, again.pending, again.last) == (3, ("a1", "a2"), state().last)
    again.model["w"] += 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=2))
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(extra=values)
def test_any_nest_of_plain_values_comes_back_equal(extra):
    assert same(decode_state(encode_state(State(extra=extra)), State).extra, extra)


def test_every_kind_of_number_comes_back():
    for dtype in ("bool", "int8", "uint8", "int16", "int64", "uint64", "float16", "float32", "float64"):
        array = np.array([[0, 1], [1, 0]]).astype(dtype)
        for stored in (array, array.T, array[:, ::2], array[0, 0], np.asfortranarray(array)):
            again = decode_state(encode_state(State(extra=stored)), State).extra
            assert same(np.asarray(again), np.ascontiguousarray(stored).reshape(np.shape(stored))), dtype
    big_endian = np.array([1, 2], dtype=">i4")
    assert decode_state(encode_state(State(extra=big_endian)), State).extra.tolist() == [1, 2]


def test_sparse_tensors_sets_and_enums_come_back():
    sparse = SparseTensor(indices=np.array([0, 5]), values=np.array([1.0, 2.0]), shape=(2, 3))
    lazy = LazyTensors(lambda: {"w": np.ones(2)})
    extra = [sparse, {"b", "a"}, UpdateStatus.USED, deque([1], maxlen=2)]
    whole = decode_state(encode_state(State(extra=extra, model=lazy)), State)
    assert same(whole.model, {"w": np.ones(2)})
    again = whole.extra
    np.testing.assert_array_equal(again[0].dense(), sparse.dense())
    assert again[1:3] == [{"a", "b"}, "used"]
    assert again[3].maxlen == 2


def test_equal_states_have_equal_bytes():
    assert encode_state(State(extra={"b", "a", "c"})) == encode_state(State(extra={"c", "b", "a"}))
    assert encode_state(state()) == encode_state(state())


@pytest.mark.parametrize("extra", [object(), Other(), np.array(["text"]), np.array([1j]), lambda: None])
def test_what_would_not_come_back_is_refused_when_it_is_saved(extra):
    with pytest.raises(JournalError, match=r"cannot save State\.extra\[1\]"):
        encode_state(State(extra=[1, extra]))


@pytest.mark.parametrize(
    ("extra", "right"),
    [
        (defaultdict(int, a=1), "a defaultdict: it would come back as a dict, if at all; keep dict"),
        (Counter(a=2), "a Counter: it would come back as a dict"),
        (OrderedDict(a=2), "an? OrderedDict: it would come back as a dict"),
        (np.ma.array([1.0, 9.0], mask=[0, 1]), "a MaskedArray: its mask would be lost; keep data and mask as two"),
        (np.rec.array([1.0, 2.0]), "it would come back as an ndarray; keep numpy"),
        (Plain.WARM, "a Plain: .* let the annotation of its field name Plain, or keep its value"),
        (Name("a"), "a Name: a state holds numbers, text"),
        (SparseTensor(indices=np.array([0]), values=np.ma.array([1.0]), shape=(2,)), "its mask would be lost"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_with_its_field_and_what_would_be_right(extra, right):
    with pytest.raises(JournalError, match=rf"cannot save State\.extra\['now'\], which is .*{right}"):
        encode_state(State(extra={"now": extra}))


def test_an_enum_that_the_annotations_name_comes_back_as_itself():
    phases = Phases(plain=Plain.COLD, mixed={Plain.WARM: Bits.A | Bits.B}, role=UpdateStatus.USED)
    again = decode_state(encode_state(phases), Phases)
    assert again == phases
    assert (again.plain, again.role) == (Plain.COLD, UpdateStatus.USED)
    assert (type(again.role), next(iter(again.mixed))) == (UpdateStatus, Plain.WARM)


def test_an_array_in_several_places_is_one_array_afterwards_too():
    weights = np.zeros(2)
    again = decode_state(encode_state(State(model={"w": weights}, extra=[weights, weights.copy(), weights.T])), State)
    again.model["w"] += 1
    assert [array.tolist() for array in again.extra] == [[1, 1], [0, 0], [0, 0]]


def test_a_missing_file_no_checkpoint_and_another_class_are_named(tmp_path):
    saved = save_state(tmp_path, State(), 1)
    assert saved.snapshot_sha256 == ""
    assert len(list_checkpoint_files(tmp_path, saved)) == 1
    (tmp_path / f"{saved.sha256}.safetensors").unlink()
    with pytest.raises(JournalError, match=f"missing.*{saved.sha256}"):
        load_state(tmp_path, State)
    with pytest.raises(NotFoundError):
        load_state(tmp_path / "nothing", State)
    with pytest.raises(JournalError, match="Other"):
        decode_state(encode_state(Other()), State)


def test_pruning_keeps_the_newest_which_is_loaded_and_older_ones_by_name(tmp_path):
    first, *_ = [save_state(tmp_path, State(version=record), record) for record in (1, 20, 300)]
    assert load_state(tmp_path, State, first).version == 1
    (tmp_path / ".left.over.tmp").write_bytes(b"half")
    assert [saved.last_record for saved in prune_checkpoints(tmp_path, keep=2)] == [300, 20]
    assert [saved.last_record for saved in list_checkpoints(tmp_path)] == [300, 20]
    assert len(list(tmp_path.iterdir())) == 4
    assert load_state(tmp_path, State).version == 300


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_damage_of_a_checkpoint_is_named(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("damaged")
    saved = save_state(directory, state(), 7)
    path = directory / f"{saved.sha256}.safetensors"
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(JournalError, match="record 7 is damaged") as error:
        load_state(directory, State)
    assert str(path) in str(error.value)
    # The same state again mends the file.
    save_state(directory, state(), 7)
    assert load_state(directory, State).version == 3


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_give_anything_but_a_journal_error(data):
    content = bytearray(encode_state(state()))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert isinstance(decode_state(bytes(content), State), State)
    except JournalError as error:
        assert "\n" not in str(error)  # noqa: PT017 damage of a value, too, is possible and no error


def test_a_damaged_note_is_left_out_with_a_warning(tmp_path, caplog):
    save_state(tmp_path, State(version=1), 1)
    save_state(tmp_path, State(version=2), 2)
    note = max(tmp_path.glob("*.json"))
    note.write_bytes(note.read_bytes()[:-5])
    assert load_state(tmp_path, State).version == 1
    assert str(note) in caplog.text


def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_else(tmp_path):
    save_state(tmp_path, State(version=1), 1)
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(StoreFullError, match="cannot be written: File too large; free some space"):
            save_state(tmp_path, State(version=2, extra=np.zeros(10_000)), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
    assert load_state(tmp_path, State).version == 1


def test_a_model_is_plain_safetensors_named_by_its_hash_and_in_its_order(tmp_path):
    model = {"w2": np.ones((2, 2), dtype=np.float32), "b1": np.zeros(2, dtype=np.float32)}
    sha256, path = save_model(tmp_path / "models", model)
    assert path.name == f"{sha256}.safetensors"
    assert save_model(tmp_path / "models", model) == (sha256, path)
    again = load_model_file(path)
    assert list(again) == ["w2", "b1"]
    again["w2"] += 1
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(JournalError, match="damaged"):
        load_model_file(path)


def test_a_model_of_another_program_can_be_loaded(tmp_path):
    save_file({"w": np.ones(3)}, tmp_path / "theirs.safetensors")
    np.testing.assert_array_equal(load_model_file(str(tmp_path / "theirs.safetensors"))["w"], np.ones(3))
    (tmp_path / "letter.safetensors").write_text("dear aunt")
    with pytest.raises(JournalError, match=r"letter\.safetensors.*damaged"):
        load_model_file(tmp_path / "letter.safetensors")
    with pytest.raises(NotFoundError):
        load_model_file(tmp_path / "nothing.safetensors")


def test_what_stands_beside_a_state_is_kept_checked_and_pruned_with_it(tmp_path):
    first = save_state(tmp_path, State(version=1), 10, PerDevice(staleness=1, moment={}))
    second = save_state(tmp_path, State(version=2), 20, PerDevice(staleness=2, moment={"w": 0.5}))
    assert load_run_snapshot(tmp_path, PerDevice, second) == PerDevice(staleness=2, moment={"w": 0.5})
    assert [is_intact(path) for saved in (first, second) for path in list_checkpoint_files(tmp_path, saved)] == [
        True
    ] * 4
    prune_checkpoints(tmp_path, keep=1)
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == sorted(
        [second.sha256, second.snapshot_sha256]
    )
    (_, path) = list_checkpoint_files(tmp_path, second)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert not is_intact(path)
    with pytest.raises(JournalError, match=r"run snapshot of record 20 is damaged"):
        load_run_snapshot(tmp_path, PerDevice, second)
    path.unlink()
    assert not is_intact(path)


def test_a_note_of_a_newer_format_keeps_the_one_before_from_being_used(tmp_path):
    save_state(tmp_path, state(), 41)
    save_state(tmp_path, state(), 42)
    path = tmp_path / f"{42:020d}.checkpoint.json"
    path.write_text(path.read_text().replace('"v": 2', '"v": 9'))
    with pytest.raises(StoreTooNewError, match="has format 9, this program reads 2") as found:
        list_checkpoints(tmp_path)
    assert str(path) in str(found.value)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreTooNewError):
        prune_checkpoints(tmp_path, keep=1)
    assert sorted(tmp_path.iterdir()) == before


def test_a_note_of_a_format_that_never_was_is_damaged_and_left_out(tmp_path, caplog):
    before = save_state(tmp_path, state(), 41)
    save_state(tmp_path, state(), 42)
    path = tmp_path / f"{42:020d}.checkpoint.json"
    for never in ("0", '"9"', "-1", "2.5"):
        path.write_text(re.sub(r'"v": [^,]+', f'"v": {never}', path.read_text()))
        assert list_checkpoints(tmp_path) == [before]
    assert f"checkpoint note {path} is damaged and left out" in caplog.text


def test_a_state_of_a_newer_format_is_not_taken_for_a_damaged_one(tmp_path):
    content = encode_state(State(version=1)).replace(rb"\"v\": 1", rb"\"v\": 7")
    name = hashlib.sha256(content).hexdigest()
    (tmp_path / f"{name}.safetensors").write_bytes(content)
    saved = Checkpoint(sha256=name, last_record=3, bytes_file=len(content))
    with pytest.raises(StoreTooNewError, match=rf"{name}.safetensors: the file of tensors has format 7"):
        load_state(tmp_path, State, saved)


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def test_a_state_is_refused_that_would_be_too_deep_to_be_read():
    deepest = max(levels for levels in range(60) if _is_packed(State(extra=nested(levels))))
    content = encode_state(State(extra=nested(deepest)))
    assert decode_state(content, State).extra == nested(deepest)
    with pytest.raises(JournalError, match="cannot save a State: as JSON it is nested deeper than 100 levels"):
        encode_state(State(extra=nested(deepest + 1)))


def _is_packed(state):
    try:
        return bool(encode_state(state))
    except JournalError:
        return False


def test_a_standing_that_would_not_come_back_is_left_out_of_its_checkpoint(tmp_path, caplog):
    saved = save_state(tmp_path, State(version=1), 10, State(extra=nested(99)))
    assert saved.snapshot_sha256 == ""
    assert load_state(tmp_path, State, saved).version == 1
    assert "a checkpoint has its state alone: cannot save a State" in caplog.text
