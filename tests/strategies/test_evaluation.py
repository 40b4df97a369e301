from types import SimpleNamespace

import pytest

from edgefl.core.types import DeviceInfo, Role
from edgefl.strategies.evaluation import EvaluationSchedule

DEVICES = {
    "pi-1": DeviceInfo(device_id="pi-1"),
    "pi-2": DeviceInfo(device_id="pi-2"),
    "judge": DeviceInfo(device_id="judge", role=Role.EVALUATOR, source="evaluator"),
    "own": DeviceInfo(device_id="own", role=Role.EVALUATOR, source="coordinator"),
}


def view(*names):
    return SimpleNamespace(devices={name: DEVICES[name] for name in names})


def asked(schedule, version, names, *, is_last=False):
    return [order.device_id for order in schedule(version, version, view(*names), is_last)]


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        ("auto", ["judge", "own"]),
        ("coordinator", ["own"]),
        ("evaluator", ["judge"]),
        ("devices", ["pi-1", "pi-2"]),
        ("none", []),
    ],
)
def test_those_are_asked_whom_the_run_file_names(who, expected):
    assert asked(EvaluationSchedule(evaluate_on=who), 1, DEVICES) == expected
    assert asked(EvaluationSchedule(evaluate_on=who), 1, DEVICES, is_last=True) == expected


def test_without_evaluators_the_devices_own_splits_serve():
    assert asked(EvaluationSchedule(), 1, ["pi-2", "pi-1"]) == ["pi-1", "pi-2"]


def test_every_nth_round_and_the_last_one_are_evaluated():
    schedule = EvaluationSchedule(every=3)
    assert [number for number in range(1, 10) if schedule(number, number, view("own"), False)] == [3, 6, 9]
    assert schedule(4, 4, view("own"), True)


def test_rounds_of_several_versions_count_by_round_and_say_which_version_it_is():
    schedule = EvaluationSchedule(every=2)
    assert [number for number in range(1, 5) if schedule(3 * number, number, view("own"), False)] == [2, 4]
    (order,) = schedule(6, 2, view("own"), False)
    assert (order.version, order.round) == (6, 2)


def pairs(schedule, names, subjects, *, number=1):
    return [(order.device_id, order.subject) for order in schedule(number, number, view(*names), False, subjects)]


def test_evaluators_are_asked_for_the_global_model_and_for_each_device_s_own():
    assert pairs(EvaluationSchedule(), DEVICES, ["pi-2", "gone"]) == [
        ("judge", ""), ("own", ""), ("judge", "gone"), ("own", "gone"), ("judge", "pi-2"), ("own", "pi-2"),
    ]  # fmt: skip


@pytest.mark.parametrize("who", ["auto", "devices"])
def test_a_device_is_asked_for_its_own_model_and_for_nobody_else_s(who):
    names = ["pi-1", "pi-2"] if who == "auto" else DEVICES
    assert pairs(EvaluationSchedule(evaluate_on=who), names, ["pi-2", "gone"]) == [
        ("pi-1", ""),
        ("pi-2", ""),
        ("pi-2", "pi-2"),
    ]


def test_devices_models_are_evaluated_when_the_global_one_is_and_not_else():
    schedule = EvaluationSchedule(every=2)
    assert [len(pairs(schedule, ["own"], ["pi-1"], number=number)) for number in (1, 2, 3, 4)] == [0, 2, 0, 2]
    assert pairs(EvaluationSchedule(evaluate_on="none"), DEVICES, ["pi-1"]) == []


def test_ids_tell_apart_what_names_with_hyphens_could_mix_up():
    names = ["a", "a-b", "b", "b-c", "c", "a-of-b"]
    devices = {name: DeviceInfo(device_id=name, role=Role.EVALUATOR, source="evaluator") for name in names}
    orders = EvaluationSchedule()(1, 1, SimpleNamespace(devices=devices), False, names)
    assert len({order.assignment_id for order in orders}) == len(orders) == 6 + 6 * 6
