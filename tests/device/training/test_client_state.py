"""What a device remembers of a run, on real files and a clock that the test turns."""

import logging

import numpy as np
import pytest

from edgefl.compression.decoding import decode_body
from edgefl.core.errors import CodecError
from edgefl.core.types import TensorSpec, derive_rng
from edgefl.device.training.client_state import SAVE_INTERVAL_S, ClientState
from edgefl.device.training.run_arrays import save_arrays
from edgefl.strategies.asynchronous.work_slots import WorkSlots
from edgefl.tasks.local_algorithms.control_variates import ClientControlVariate

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
    seats, used = WorkSlots(), 0
    for number in range(12):
        clock.now_s += 70
        if number == cut_before:
            memory = ClientState(tmp_path, clock=clock)
        told = seats.assign("a", f"r/a-{number}", base_version=number, learning_rate=1.0)
        memory.get_feedback("r", "ef|topk:1", SHAPES).record_used(told)
        body = encode(memory, 2**number, 0, 0, 0, assignment=f"r/a-{number}", spec="ef|topk:1")
        memory.save(only_when_due=True)
        if number not in lost:
            used += int(decode_body(body, SHAPES)["w"].dense()[0])
            seats.complete("a", f"r/a-{number}")
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
