"""Who is asked, for how much, which updates are let in, and who evaluates."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.core.allowance import Allowance, BudgetLeft, Window
from edgefl.core.types import (
    DeviceInfo,
    DeviceThroughput,
    GossipConfig,
    HealthMetrics,
    Role,
    TensorSpec,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
)
from edgefl.strategies.participation import (
    MIN_UPLOAD_S,
    DeviceSelection,
    EvaluationSchedule,
    RunParticipationPolicy,
    WorkPlanner,
)
from edgefl.strategies.update_guard import UpdateGuard

SHAPES = (TensorSpec(name="w", shape=(3,)), TensorSpec(name="n", shape=(), dtype="int64"))


def update(values, *, device="pi-1", name="w"):
    tensors = {name: np.asarray(values, np.float32), "n": np.array(1)}
    return Update(
        assignment_id="a1", device_id=device, base_version=0, tensors=tensors, metrics=UpdateMetrics(num_examples=1)
    )


def view(vitals=None, **capabilities):
    devices = {
        name: DeviceInfo(device_id=name, capabilities=capabilities.get(name.replace("-", "_"), {}))
        for name in ("pi-1", "pi-2", "pi-3")
    }
    return SimpleNamespace(
        now_s=0.0, devices=devices, idle=list(devices), busy={}, speeds={}, progress={}, health=vitals or {},
        limited=(),
    )  # fmt: skip


def order(device="pi-1", **budget):
    plan = TrainConfig(**budget)
    return TrainInstruction(assignment_id="a1", device_id=device, base_version=0, plan=plan)


def gate(**selection):
    return RunParticipationPolicy(selection=DeviceSelection(**selection), guard=UpdateGuard(shapes=SHAPES))


def test_boards_with_too_little_memory_are_left_out_and_those_that_do_not_say_stay():
    fleet = view(pi_1={"memory_bytes": 100}, pi_2={"memory_bytes": 300})
    assert list(gate(min_memory_bytes=200).eligible_view(fleet).idle) == ["pi-2", "pi-3"]


def test_boards_without_an_accelerator_are_left_out_where_one_is_needed():
    fleet = view(pi_1={"accelerators": [{"kind": "cuda"}]}, pi_2={"accelerators": []})
    assert list(gate(needs_accelerator=True).eligible_view(fleet).idle) == ["pi-1"]


UNWELL = {
    "throttled": HealthMetrics(is_throttled=True),
    "hot": HealthMetrics(temperature_c=81.0),
    "empty": HealthMetrics(battery_fraction=0.1),
}
WELL = {
    "silent": HealthMetrics(),
    "fine": HealthMetrics(is_throttled=False, temperature_c=79.0, battery_fraction=0.9),
}
LIMITS = {"max_temperature_c": 80.0, "min_battery": 0.2}


@pytest.mark.parametrize("vitals", UNWELL.values(), ids=UNWELL)
def test_an_unwell_board_rests_or_gets_half_the_budget_and_never_none_as_the_run_file_says(vitals):
    spared, fleet, blind = gate(**LIMITS), view({"pi-1": vitals}), gate(unhealthy_policy="ignore", **LIMITS)
    assert list(gate(unhealthy_policy="rest", **LIMITS).eligible_view(fleet).idle) == ["pi-2", "pi-3"]
    assert blind.adapt_instruction(order(iterations=9), fleet).plan.iterations == 9
    assert blind.eligible_view(fleet) is fleet
    assert spared.adapt_instruction(order(iterations=9), fleet).plan.iterations == 4
    assert spared.adapt_instruction(order(iterations=1), fleet).plan.iterations == 1
    assert spared.adapt_instruction(order(epochs=3.0), fleet).plan.epochs == 1.5
    assert spared.adapt_instruction(order(seconds=4.0), fleet).plan.seconds == 2.0
    assert spared.adapt_instruction(order("pi-2", iterations=9), fleet).plan.iterations == 9


def test_a_block_of_a_redundant_shard_is_not_made_smaller_or_its_copies_would_differ():
    whole = replace(order(iterations=9), block=2)
    assert gate(**LIMITS).adapt_instruction(whole, view({"pi-1": UNWELL["throttled"]})) is whole


@pytest.mark.parametrize("vitals", WELL.values(), ids=WELL)
def test_a_board_that_is_well_or_does_not_say_is_treated_like_any_other(vitals):
    fleet = view({"pi-1": vitals})
    assert gate(**LIMITS).adapt_instruction(order(iterations=9), fleet).plan.iterations == 9
    assert list(gate(unhealthy_policy="rest", **LIMITS).eligible_view(fleet).idle) == ["pi-1", "pi-2", "pi-3"]


def test_a_device_is_quarantined_after_repeats_and_not_asked_again():
    strict = RunParticipationPolicy(guard=UpdateGuard(shapes=SHAPES, max_norm=1.0, refusals_before_quarantine=2))
    assert "quarantined" not in strict.rejection_reason(update([5, 0, 0]))
    assert list(strict.eligible_view(view()).idle) == ["pi-1", "pi-2", "pi-3"]
    assert strict.rejection_reason(update([1, 0, 0])) is None  # which forgives the first
    assert "quarantined" not in strict.rejection_reason(update([5, 0, 0]))
    assert "pi-1 is quarantined" in strict.rejection_reason(update([5, 0, 0]))
    assert list(strict.eligible_view(view()).idle) == ["pi-2", "pi-3"]


class Codecs:
    """Gives everybody `fp16`, and keeps what it is told."""

    def __init__(self):
        self.told = []

    def adapt_instruction(self, order, *, is_metered):
        return replace(order, codec="int8" if is_metered else "fp16")

    def observe(self, event, accuracy):
        self.told.append((event, accuracy))


def test_a_choice_of_codecs_sees_every_order_and_every_event():
    codecs = Codecs()
    guarded = RunParticipationPolicy(
        selection=DeviceSelection(max_temperature_c=70.0), guard=UpdateGuard(shapes=SHAPES), codec_policy=codecs
    )
    hot = view({"pi-1": HealthMetrics(temperature_c=90.0, is_metered=True), "pi-3": HealthMetrics(is_metered=False)})
    for name, iterations, codec in (("pi-1", 4, "int8"), ("pi-2", 8, "fp16"), ("pi-3", 8, "fp16")):
        made = guarded.adapt_instruction(order(name, iterations=8), hot)
        assert (made.codec, made.plan.iterations) == (codec, iterations)
    guarded.observe("event", 0.5)
    assert codecs.told == [("event", 0.5)]


def test_an_exchange_of_a_node_is_made_no_smaller_and_no_larger():
    node = GossipConfig(method="dsgd", edges=(), learning_rate=0.1, period=8)
    gate = RunParticipationPolicy(selection=DeviceSelection(unhealthy_policy="smaller"))
    for iterations in (0, 8):
        plan = TrainConfig(iterations=iterations, node=node)
        order = TrainInstruction(assignment_id="a", device_id="pi", base_version=0, plan=plan)
        hot = SimpleNamespace(health={"pi": HealthMetrics(is_throttled=True)})
        assert gate.adapt_instruction(order, hot) is order


DEVICES = {
    "pi-1": DeviceInfo(device_id="pi-1"),
    "pi-2": DeviceInfo(device_id="pi-2"),
    "judge": DeviceInfo(device_id="judge", role=Role.EVALUATOR, source="evaluator"),
    "own": DeviceInfo(device_id="own", role=Role.EVALUATOR, source="coordinator"),
}


def evaluators_view(*names):
    return SimpleNamespace(devices={name: DEVICES[name] for name in names})


def asked_to_evaluate(schedule, version, names, *, is_last=False):
    return [order.device_id for order in schedule(version, version, evaluators_view(*names), is_last)]


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
    assert asked_to_evaluate(EvaluationSchedule(evaluate_on=who), 1, DEVICES) == expected
    assert asked_to_evaluate(EvaluationSchedule(evaluate_on=who), 1, DEVICES, is_last=True) == expected


def test_without_evaluators_the_devices_own_splits_serve():
    assert asked_to_evaluate(EvaluationSchedule(), 1, ["pi-2", "pi-1"]) == ["pi-1", "pi-2"]


def test_every_nth_round_and_the_last_one_are_evaluated():
    schedule = EvaluationSchedule(every=3)
    assert [number for number in range(1, 10) if schedule(number, number, evaluators_view("own"), False)] == [3, 6, 9]
    assert schedule(4, 4, evaluators_view("own"), True)


def test_rounds_of_several_versions_count_by_round_and_say_which_version_it_is():
    schedule = EvaluationSchedule(every=2)
    assert [number for number in range(1, 5) if schedule(3 * number, number, evaluators_view("own"), False)] == [2, 4]
    (order,) = schedule(6, 2, evaluators_view("own"), False)
    assert (order.version, order.round) == (6, 2)


def pairs(schedule, names, subjects, *, number=1):
    return [
        (order.device_id, order.subject)
        for order in schedule(number, number, evaluators_view(*names), False, subjects)
    ]


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


def limited_view(allowance, *, speed=None, name="pi-1", **capabilities):
    """A fleet whose board pi-1 has an allowance, and 100 examples, as the others do."""
    fleet = view(**capabilities)
    for device, info in fleet.devices.items():
        fleet.devices[device] = replace(info, examples={"digits": 100})
    fleet.devices[name] = replace(fleet.devices[name], allowance=allowance)
    fleet.limited = {name}
    fleet.speeds = {} if speed is None else {name: speed}
    return fleet


def planning(plan=None, **settings):
    plan = plan or TrainConfig(iterations=10)
    return RunParticipationPolicy(planner=WorkPlanner(plan=plan, task="digits", **settings))


HOUR = Allowance(window=Window(ends_s=3600.0, reopens_s=60_000.0))


@pytest.mark.parametrize(
    ("step_s", "plan", "is_asked"),
    [
        (288.0, TrainConfig(iterations=10), True),
        (288.1, TrainConfig(iterations=10), False),
        (719.0, TrainConfig(epochs=1, batch_size=32), True),  # 4 iterations of 100 examples
        (721.0, TrainConfig(epochs=1, batch_size=32), False),
        (10.0, TrainConfig(seconds=2000.0), True),
        (10.0, TrainConfig(seconds=2900.0), False),
        (None, TrainConfig(iterations=10**6), True),
        (1e6, None, True),
    ],
)
def test_a_board_is_asked_only_where_its_hours_hold_the_work_as_far_as_that_is_known(step_s, plan, is_asked):
    policy = RunParticipationPolicy(planner=WorkPlanner(plan=plan, task="digits"))
    fleet = limited_view(HOUR, speed=DeviceThroughput(seconds_per_iteration=step_s))
    asked = policy.eligible_view(fleet)
    assert list(asked.idle) == (["pi-1"] if is_asked else []) + ["pi-2", "pi-3"]
    assert asked.is_excluded("pi-1") != is_asked


def test_examples_that_are_kept_for_a_test_are_none_of_the_work():
    fleet = limited_view(HOUR, speed=DeviceThroughput(seconds_per_iteration=800.0))
    plan = TrainConfig(epochs=1, batch_size=32)  # 3 iterations of 80 examples
    assert "pi-1" in planning(plan, test_fraction=0.2).eligible_view(fleet).idle
    assert "pi-1" not in planning(plan).eligible_view(fleet).idle


def test_before_its_first_update_a_board_is_judged_by_its_own_measurement_and_by_expected_bytes():
    fleet = limited_view(HOUR, pi_1={"steps_per_s": {"digits/cnn": 0.001}})
    assert "pi-1" not in planning(speed_name="digits/cnn").eligible_view(fleet).idle
    for name, speeds in (("digits", {"digits": 10.0}), ("cnn", {}), ("x", {"x": 0}), ("x", {"x": "1"}), ("x", 3),
                         ("x", {"x": 5e-324}), ("x", {"x": 10**400}), ("x", {"x": float("nan")})):  # fmt: skip
        fleet = limited_view(HOUR, pi_1={"steps_per_s": speeds})
        assert "pi-1" in planning(speed_name=name).eligible_view(fleet).idle
    budget = BudgetLeft(kind="traffic", period="day", left=100.0, limit=500.0, renews_s=600.0)
    for down, up, is_asked in ((40.0, 60.0, True), (40.0, 61.0, False)):
        policy = planning(count_bytes=lambda down=down, up=up: (down, up))
        assert ("pi-1" in policy.eligible_view(limited_view(Allowance(budgets=(budget,)))).idle) == is_asked
    fleet = limited_view(Allowance(budgets=(budget,)), speed=DeviceThroughput(bytes_up=30.0, bytes_down=71.0))
    assert "pi-1" not in planning().eligible_view(fleet).idle


def test_a_board_at_work_gets_more_only_where_all_of_it_fits():
    fleet = limited_view(HOUR, speed=DeviceThroughput(seconds_per_iteration=200.0))
    assert not planning().eligible_view(fleet).is_excluded("pi-1")
    fleet.busy = {"pi-1": ["a-0"]}
    assert planning().eligible_view(fleet).is_excluded("pi-1")


def test_only_iterations_that_are_open_are_cut_to_what_fits_and_never_below_one():
    speed = DeviceThroughput(seconds_per_iteration=100.0, exchange_s=200.0)
    for can_shorten, left_s, expected in ((True, 1000.0, 7), (True, 1e6, 50), (True, 10.0, 1), (False, 1000.0, 50)):
        fleet = limited_view(Allowance(window=Window(ends_s=left_s)), speed=speed)
        policy = planning(can_shorten=can_shorten)
        assert policy.adapt_instruction(order(iterations=50), fleet).plan.iterations == expected
    fleet = limited_view(Allowance(window=Window(ends_s=1000.0)), speed=speed)
    open_ended = replace(order(), plan=TrainConfig(iterations=10_000, report_progress=True, fallback_iterations=9))
    plan = planning(can_shorten=True).adapt_instruction(open_ended, fleet).plan
    assert (plan.iterations, plan.fallback_iterations) == (7, 7)
    assert planning(can_shorten=True).adapt_instruction(order("pi-2", iterations=50), fleet).plan.iterations == 50


def test_where_work_can_be_cut_a_board_is_asked_whose_hours_hold_one_iteration():
    for step_s, is_asked in ((2879.0, True), (2881.0, False)):
        fleet = limited_view(HOUR, speed=DeviceThroughput(seconds_per_iteration=step_s))
        policy = planning(TrainConfig(iterations=10), can_shorten=True)
        assert ("pi-1" in policy.eligible_view(fleet).idle) == is_asked


@pytest.mark.parametrize(
    ("deadline_s", "exchange_s", "expected"),
    [(10_000.0, 5.0, 3600.0 + MIN_UPLOAD_S), (10_000.0, 100.0, 3800.0), (900.0, 5.0, 900.0), (None, 5.0, None),
     (10_000.0, None, 10_000.0)],
)  # fmt: skip
def test_a_deadline_is_at_most_the_end_of_the_hours_and_the_time_of_an_upload(deadline_s, exchange_s, expected):
    speed = DeviceThroughput(seconds_per_iteration=1.0, exchange_s=exchange_s)
    asked = replace(order(iterations=10), deadline_s=deadline_s)
    assert planning().adapt_instruction(asked, limited_view(HOUR, speed=speed)).deadline_s == expected


def test_hours_that_are_over_end_no_deadline():
    past = Allowance(window=Window(ends_s=-100.0, reopens_s=-1.0))
    speed = DeviceThroughput(seconds_per_iteration=1.0, exchange_s=5.0)
    asked = replace(order(iterations=10), deadline_s=900.0)
    assert planning().adapt_instruction(asked, limited_view(past, speed=speed)).deadline_s == 900.0
