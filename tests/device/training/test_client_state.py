"""What a device remembers of a run, on real files and a clock that the test turns."""

import logging
import os

import numpy as np
import pytest

from edgefl.compression.codec import decode_body
from edgefl.core.errors import CodecError
from edgefl.core.types import TensorSpec, derive_rng
from edgefl.device.training.client_state import SAVE_INTERVAL_S, ClientState, save_arrays
from edgefl.strategies.asynchronous.strategy import WorkSlots
from edgefl.tasks.local_algorithms.scaffold import ClientControlVariate

SHAPES = (TensorSpec(name="w", shape=(4,)),)
SPEC = "ef|topk:0.25"


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memory(tmp_path, clock):
    return ClientState(tmp_path, clock=clock)


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.npz"))


def encode(memory, *values, run="r", assignment="r/a-1", spec=SPEC):
    displacement = {"w": np.array(values, np.float32)}
    return memory.get_feedback(run, spec, SHAPES).encode(assignment, displacement, derive_rng(0))


def residual(memory, run="r"):
    state = memory.get_feedback(run, SPEC, SHAPES).state()
    return state["residual/w"].tolist() if "residual/w" in state else None


def test_a_step_state_is_that_of_the_run_and_the_algorithm_and_survives_a_stop_and_a_change_of_runs(memory, tmp_path):
    assert memory.get_step_state("r", "adam") is None
    memory.update_step_state("r", "adam", {"iterations": np.array(3), "mean/w": np.ones(4, np.float32)})
    assert memory.get_step_state("r", "sgd") is None
    assert memory.get_step_state("r2", "adam") is None
    assert memory.get_step_state("r", "adam")["mean/w"].tolist() == [1.0] * 4
    memory.update_step_state("r", "adam", {"iterations": np.array(4)})
    memory.save()
    again = ClientState(tmp_path).get_step_state("r", "adam")
    assert {name: value.tolist() for name, value in again.items()} == {"iterations": 4}


def test_what_is_left_out_is_that_of_the_run_survives_a_stop_and_goes_on_under_another_codec(memory, tmp_path):
    encode(memory, 1.0, 2.0, 3.0, 4.0)
    assert residual(memory, "r2") is None
    assert residual(memory) == [1.0, 2.0, 3.0, 0.0]
    with pytest.raises(CodecError):
        memory.get_feedback("r", "ef|rar", SHAPES)
    assert memory.get_feedback("r", "ef|topk:0.5", SHAPES).state()["residual/w"].tolist() == [1.0, 2.0, 3.0, 0.0]
    memory.save()
    rebooted = ClientState(tmp_path)
    assert residual(rebooted) == [1.0, 2.0, 3.0, 0.0]
    assert rebooted.get_feedback("r", SPEC, SHAPES).pending == ("r/a-1",)


@pytest.mark.parametrize("lost", [(), (3,), (5, 6), (6, 7)])
@pytest.mark.parametrize("cut_before", range(1, 10))
def test_a_power_cut_puts_back_nothing_that_the_coordinator_used(memory, tmp_path, clock, cut_before, lost):
    """All of every update travels. Each is a bit of its own, so that the sum tells which were used, and how often."""
    slots, used = WorkSlots(), 0
    for number in range(12):
        clock.now_s += 70
        if number == cut_before:
            memory = ClientState(tmp_path, clock=clock)
        told = slots.assign("a", f"r/a-{number}", base_version=number, learning_rate=1.0)
        memory.get_feedback("r", "ef|topk:1", SHAPES).record_used(told)
        body = encode(memory, 2**number, 0, 0, 0, assignment=f"r/a-{number}", spec="ef|topk:1")
        memory.save(only_when_due=True)
        if number not in lost:
            used += int(decode_body(body, SHAPES)["w"].dense()[0])
            slots.complete("a", f"r/a-{number}")
    missing = 2**12 - 1 - used
    lost_with_the_card = sum(2**number for number in lost if number < cut_before)
    assert missing >= 0
    assert missing & ~lost_with_the_card == 0


def test_files_are_written_every_five_minutes_and_only_when_something_changed(memory, clock, tmp_path):
    encode(memory, 1.0, 2.0, 3.0, 4.0)
    memory.save(only_when_due=True)
    assert files(tmp_path) == []
    clock.now_s += SAVE_INTERVAL_S
    memory.save(only_when_due=True)
    assert files(tmp_path) == ["residuals/r.npz"]
    memory.update_step_state("r", "sgd", {"iterations": np.array(1)})
    memory.save(only_when_due=True)
    assert files(tmp_path) == ["residuals/r.npz"]
    written = (tmp_path / "residuals" / "r.npz").stat().st_mtime_ns
    memory.save()
    assert files(tmp_path) == ["residuals/r.npz", "steps/r.npz"]
    assert (tmp_path / "residuals" / "r.npz").stat().st_mtime_ns == written


def test_a_card_that_cannot_be_written_stops_nothing_and_is_tried_again(memory, tmp_path, caplog):
    (tmp_path / "residuals").touch()
    encode(memory, 1.0, 2.0, 3.0, 4.0)
    with caplog.at_level(logging.WARNING):
        memory.save()
    assert "cannot keep the residuals of run r" in caplog.text
    (tmp_path / "residuals").unlink()
    memory.save()
    assert files(tmp_path) == ["residuals/r.npz"]


def test_a_residual_of_another_model_is_left_aside(memory, tmp_path, caplog):
    encode(memory, 1.0, 2.0, 3.0, 4.0)
    memory.save()
    other = (TensorSpec(name="v", shape=(9,)),)
    with caplog.at_level(logging.WARNING):
        feedback = ClientState(tmp_path).get_feedback("r", SPEC, other)
    assert "is lost" in caplog.text
    assert feedback.state() == {}


def test_the_last_model_is_held_for_its_run_alone_and_in_memory(memory, tmp_path):
    assert memory.get_model_version("r") is None
    memory.update_model("r", 3, {"w": np.ones(4, np.float32)})
    memory.update_model("r", 4, {"w": np.zeros(4, np.float32)})
    assert (memory.get_model_version("r"), memory.get_model("r")["w"].tolist()) == (4, [0.0] * 4)
    assert memory.get_model_version("r2") is None
    memory.save()
    assert ClientState(tmp_path).get_model_version("r") is None
    memory.get_step_state("r2", "sgd")
    memory.save()
    assert files(tmp_path) == [], "nothing is written for a run that keeps nothing"
    assert memory.get_model_version("r") is None


def moved(variate, assignment, *values):
    return variate.add_move(assignment, {"w": np.array(values, np.float32)})


def test_a_control_variate_is_on_the_card_before_its_update_leaves_and_counts_once_it_was_used(memory, tmp_path):
    variate = memory.get_variate("r").apply_used(0, ())
    memory.update_variate("r", moved(variate, "r/a-1", 1.0, 0.0))
    after_a_power_cut = ClientState(tmp_path).get_variate("r")
    assert after_a_power_cut.apply_used(0, ["r/a-1"]).value["w"].tolist() == [1.0, 0.0]
    assert after_a_power_cut.apply_used(0, []).is_zero


def test_a_control_variate_moves_by_what_was_used_alone_and_once_when_work_is_done_again():
    variate = moved(ClientControlVariate().apply_used(0, ()), "a", 1.0)
    variate = moved(
        moved(variate.apply_used(0, ["a"]), "b", 3.0), "b", 4.0
    )  # done again, of which the second is the one
    variate = moved(variate, "c", 9.0)
    variate = variate.apply_used(0, ["a", "c"])
    assert (variate.value["w"].tolist(), [*variate.pending_moves]) == ([9.0], []), "b is older than c, and lost"
    variate = moved(moved(variate, "d", 10.0), "e", 20.0).apply_used(0, ["c", "d"])
    assert (variate.value["w"].tolist(), [*variate.pending_moves]) == ([10.0], ["e"]), "e may still be used"
    assert variate.apply_used(0, ["d", "e"]).value["w"].tolist() == [21.0]


@pytest.mark.parametrize(
    ("began", "used"), [(7, ["a", "b"]), (0, ["b", "unknown"]), (0, []), (0, ["a"])],
    ids=["all begin anew", "a newer state is lost", "the run is another", "the run went back"],
)  # fmt: skip
def test_a_control_variate_that_is_not_that_of_the_run_begins_at_zero(began, used):
    variate = moved(
        moved(ClientControlVariate().apply_used(0, ()), "a", 1.0).apply_used(0, ["a"]), "b", 2.0
    ).apply_used(0, ["a", "b"])
    assert not variate.apply_used(0, ["a", "b"]).is_zero
    variate = variate.apply_used(began, used)
    assert variate.is_zero
    assert not moved(variate, "c", 1.0).apply_used(began, [*used, "c"]).is_zero
    other_model = moved(moved(ClientControlVariate().apply_used(0, ()), "a", 1.0).apply_used(0, ["a"]), "b", 1.0, 2.0)
    assert (other_model.is_zero, [*other_model.pending_moves]) == (True, ["b"])
    diverged = moved(ClientControlVariate().apply_used(0, ()), "a", 1.0).add_move("a", {})
    assert diverged.apply_used(0, []).pending_moves == {}


@pytest.mark.parametrize("damage", ["index", "no index", "shapes", "nan", "no zip"])
def test_a_damaged_control_variate_is_said_and_begins_at_zero(memory, tmp_path, caplog, damage):
    arrays = moved(
        moved(ClientControlVariate().apply_used(0, ()), "a", 1.0).apply_used(0, ["a"]), "b", 2.0
    ).to_arrays()
    if damage == "index":
        arrays["index"] = arrays["index"][:-3]
    elif damage == "no index":
        del arrays["index"]
    elif damage == "shapes":
        arrays["own/w"] = np.ones((2, 2), np.float32)
    elif damage == "nan":
        arrays["move0/w"] = np.full(1, np.nan, np.float32)
    save_arrays(tmp_path / "variates", "r", arrays)
    if damage == "no zip":
        (tmp_path / "variates" / "r.npz").write_bytes(b"PK")
    assert memory.get_variate("r").is_zero
    assert memory.get_variate("r").pending_moves == {}
    assert ("is lost" in caplog.text) == (damage != "no zip")


LOCAL_SHAPES = (
    TensorSpec(name="body", shape=(4,)),
    TensorSpec(name="head.weight", shape=(2, 2), shared=False),
    TensorSpec(name="head.bias", shape=(2,), shared=False),
)


class Learner:
    def __init__(self, value):
        self.value = value

    def read(self):
        return {spec.name: np.full(spec.shape, self.value, np.float32) for spec in LOCAL_SHAPES}


def test_the_newest_comes_back_and_only_what_stays_on_the_board(tmp_path):
    ClientState(tmp_path).update_local_tensors("r", LOCAL_SHAPES[:1], Learner(1.0))
    assert list(tmp_path.iterdir()) == [], "a model that is shared whole writes nothing"
    assert ClientState(tmp_path).get_local_tensors("r", LOCAL_SHAPES) is None
    for value in (1.0, 3.0):
        ClientState(tmp_path).update_local_tensors("r", LOCAL_SHAPES, Learner(value))
    kept = ClientState(tmp_path).get_local_tensors("r", LOCAL_SHAPES)
    assert set(kept) == {"head.weight", "head.bias"}
    assert kept["head.weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_personal_copy_comes_back_after_a_restart_and_is_no_part_of_the_model(tmp_path):
    assert ClientState(tmp_path).get_personal_copy("r", LOCAL_SHAPES) is None
    for value in (1.0, 3.0, np.nan):
        ClientState(tmp_path).update_personal_copy("r", Learner(value).read())
    kept = ClientState(tmp_path).get_personal_copy("r", LOCAL_SHAPES)
    assert list(kept) == ["body", "head.weight", "head.bias"]
    assert kept["body"].tolist() == [3.0] * 4, "what a training that diverged leaves is not kept"
    assert ClientState(tmp_path).get_local_tensors("r", LOCAL_SHAPES) is None
    assert ClientState(tmp_path).get_personal_copy("r", (TensorSpec(name="body", shape=(5,)),)) is None


def test_what_a_training_that_diverged_leaves_is_not_kept(tmp_path):
    for value in (1.0, np.nan):
        ClientState(tmp_path).update_local_tensors("r", LOCAL_SHAPES, Learner(value))
    assert ClientState(tmp_path).get_local_tensors("r", LOCAL_SHAPES)["head.bias"].tolist() == [1.0, 1.0]


def test_runs_are_kept_apart_whatever_they_are_called(tmp_path):
    ClientState(tmp_path).update_local_tensors("r", LOCAL_SHAPES, Learner(1.0))
    ClientState(tmp_path).update_local_tensors("../r", LOCAL_SHAPES, Learner(2.0))
    assert ClientState(tmp_path).get_local_tensors("r", LOCAL_SHAPES)["head.bias"].tolist() == [1.0, 1.0]
    assert {path.parent for path in tmp_path.rglob("*.npz")} == {tmp_path / "runs"}


def test_only_the_newest_runs_are_kept_whatever_the_clock_says(tmp_path):
    for number in range(6):
        ClientState(tmp_path).update_local_tensors(f"r{number}", LOCAL_SHAPES, Learner(1.0))
        os.utime(tmp_path / "runs" / f"r{number}.npz", (1000 + number, 1000 + number))
    assert {path.stem for path in (tmp_path / "runs").iterdir()} == {"r2", "r3", "r4", "r5"}
    for path in (tmp_path / "runs").iterdir():
        os.utime(path, (9e9, 9e9))
    ClientState(tmp_path).update_local_tensors("new", LOCAL_SHAPES, Learner(1.0))
    assert ClientState(tmp_path).get_local_tensors("new", LOCAL_SHAPES) is not None
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_a_torn_file_counts_as_none_and_flipped_bits_are_noticed_or_harmless(tmp_path):
    ClientState(tmp_path).update_local_tensors("r", LOCAL_SHAPES, Learner(1.0))
    (path,) = tmp_path.rglob("*.npz")
    whole = path.read_bytes()
    for cut in (0, 1, 10, 100, -1, -10, -100):
        path.write_bytes(whole[:cut])
        assert ClientState(tmp_path).get_local_tensors("r", LOCAL_SHAPES) is None
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        kept = ClientState(tmp_path).get_local_tensors("r", LOCAL_SHAPES)
        assert kept is None or kept["head.bias"].tolist() == [1.0, 1.0]


def test_a_task_of_another_shape_begins_anew(tmp_path):
    ClientState(tmp_path).update_local_tensors("r", LOCAL_SHAPES, Learner(1.0))
    other = (LOCAL_SHAPES[0], TensorSpec(name="head.weight", shape=(3, 3), shared=False))
    assert ClientState(tmp_path).get_local_tensors("r", other) is None
    assert ClientState(tmp_path).get_local_tensors("r", (TensorSpec(name="new", shape=(1,), shared=False),)) is None


def test_what_finds_no_room_is_held_in_memory_and_written_once_there_is_some(tmp_path, full_card, caplog):
    residents = ClientState(tmp_path)
    residents.update_local_tensors("r", LOCAL_SHAPES, Learner(1.0))
    with full_card():
        for value in (2.0, 3.0, np.nan):
            residents.update_local_tensors("r", LOCAL_SHAPES, Learner(value))
    assert "cannot keep the tensors of run r" in caplog.text
    assert residents.get_local_tensors("r", LOCAL_SHAPES)["head.bias"].tolist() == [3.0, 3.0]
    assert ClientState(tmp_path).get_local_tensors("r", LOCAL_SHAPES)["head.bias"].tolist() == [1.0, 1.0]
    residents.update_local_tensors("s", LOCAL_SHAPES, Learner(4.0))
    for run, value in (("r", 3.0), ("s", 4.0)):
        assert ClientState(tmp_path).get_local_tensors(run, LOCAL_SHAPES)["head.bias"].tolist() == [value] * 2
