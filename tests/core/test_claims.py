"""What a device claims of its work counts within what the coordinator knows itself."""

import math

import pytest

from edgefl.core.claims import (
    MAX_DRIFT_TASKS,
    MAX_EXAMPLES,
    MAX_NAME_CHARS,
    TOTAL_ITERATIONS,
    BoundedClaim,
    ClaimLimits,
    bound_reported_examples,
    compute_weight_limit,
    format_drift,
    parse_drift,
    parse_label_page,
)
from edgefl.core.types import (
    EPSILON,
    DeviceInfo,
    DeviceThroughput,
    EvaluateResult,
    ExamplePrivacy,
    GossipConfig,
    Progress,
    TrainConfig,
    TrainInstruction,
    UpdateMetrics,
)

HUGE = 2**53


def limits(*examples, **settings):
    bounded = []
    made = ClaimLimits(task="t", on_bounded=bounded.append, **settings)
    for number, count in enumerate(examples):
        name = f"d{number}"
        made.record_order(name, DeviceInfo(device_id=name, examples={"t": count}))
    return made, bounded


def bound(made, plan, *, elapsed_s=2.0, early=False, speeds=None, **claims):
    order = TrainInstruction(assignment_id="a", device_id="d0", base_version=0, plan=plan)
    metrics = UpdateMetrics(**{"num_examples": 100, "iterations": 5, "compute_s": 1.0, **claims})
    return made.bound_metrics(metrics, order, elapsed_s=elapsed_s, is_finishing_early=early, speeds=speeds or {})


def test_examples_iterations_and_seconds_are_at_most_what_the_coordinator_knows():
    made, bounded = limits(100, 100, 100)
    found = bound(
        made, TrainConfig(iterations=5), num_examples=HUGE, iterations=HUGE, compute_s=float(HUGE), paced_s=9e9
    )
    assert (found.num_examples, found.iterations, found.compute_s, found.paced_s) == (100, 5, 2.0, 2.0)
    assert [claim.name for claim in bounded] == ["examples", "seconds", "iterations"]
    assert str(bounded[0]) == "examples: claimed 9.0072e+15, counted as 100"


def test_a_board_has_spent_at_most_the_budget_of_privacy():
    made, bounded = limits(100, 100, 100)
    privacy = ExamplePrivacy(optimizer="sgd", clip=1.0, epsilon=8.0, delta=1e-5, noise=1.0)
    plan = TrainConfig(algorithm="dp-sgd", iterations=5, privacy=privacy)
    assert bound(made, plan, extra={EPSILON: 7.9}).extra == {EPSILON: 7.9}
    assert not bounded
    assert bound(made, plan, extra={EPSILON: 1e300}).extra[EPSILON] == pytest.approx(8.0)
    assert bound(made, plan, extra={EPSILON: -1.0}).extra[EPSILON] == 0.0
    assert [claim.name for claim in bounded] == ["epsilon", "epsilon"]


def test_an_honest_claim_stays_as_it_is():
    made, bounded = limits(100, 100, 100)
    found = bound(made, TrainConfig(epochs=2.0, batch_size=32), num_examples=90, iterations=6)
    assert (found.num_examples, found.iterations, found.compute_s, bounded) == (90, 6, 1.0, [])


def test_fewer_iterations_than_ordered_count_only_after_a_recall():
    made, _ = limits(100, 100, 100)
    assert bound(made, TrainConfig(iterations=5), iterations=1).iterations == 5
    assert bound(made, TrainConfig(iterations=5), iterations=1, early=True).iterations == 1


def test_a_device_whose_query_was_not_answered_counts_for_what_it_did_and_no_less_than_its_fallback():
    made, bounded = limits(100, 100, 100)
    query = TrainConfig(iterations=10_000, fallback_iterations=7)
    assert [bound(made, query, iterations=count).iterations for count in (7, 9, 10_000)] == [7, 9, 10_000]
    assert not bounded
    assert bound(made, query, iterations=1).iterations == 7
    assert bound(made, TrainConfig(iterations=5, fallback_iterations=7), iterations=HUGE).iterations == 5


def test_a_budget_of_seconds_allows_eight_times_what_the_median_device_does():
    made, _ = limits(100, 100, 100)
    speeds = {
        name: DeviceThroughput(seconds_per_iteration=pace) for name, pace in (("a", 0.1), ("b", 0.2), ("d0", 1e-9))
    }
    assert bound(made, TrainConfig(seconds=1.0), iterations=HUGE, speeds=speeds).iterations == 81
    assert bound(made, TrainConfig(seconds=1.0), iterations=HUGE).iterations == 10_001
    assert bound(made, TrainConfig(seconds=1.0), iterations=7, speeds=speeds).iterations == 7


@pytest.mark.parametrize(
    ("counts", "ratio", "limit"),
    [
        ([100, 100, 100], 2.0, 200),
        ([HUGE, 100], 2.0, 200),
        ([HUGE, *[100] * 9], 2.0, 200),
        ([1, 1, 1, 1, 100, 100, 100, 100, 100, HUGE], 2.0, 126),
        ([0, 0, 50], 2.0, 100),
        ([], 2.0, math.inf),
        ([1, 100], 0.0, math.inf),
    ],
)
def test_a_device_weighs_at_most_twice_the_median_and_two_parts_in_n(counts, ratio, limit):
    found = compute_weight_limit(counts, ratio)
    assert found == pytest.approx(limit, rel=0.01)
    if len(counts) > 2 and math.isfinite(found):
        weights = [min(count, found) for count in counts if count]
        assert max(weights) <= 2 / len(weights) * sum(weights) * 1.0001


def test_a_board_that_joined_with_2_53_examples_weighs_no_more_than_two():
    made, bounded = limits(HUGE, *[100] * 9)
    assert bound(made, TrainConfig(iterations=5), num_examples=HUGE).num_examples == 200
    assert [claim.name for claim in bounded] == ["weight"]
    unbounded, _ = limits(HUGE, *[100] * 9, max_weight_ratio=0.0)
    assert bound(unbounded, TrainConfig(iterations=5), num_examples=HUGE).num_examples == HUGE


def test_examples_that_double_with_each_report_count_twice_at_most_in_a_run():
    made, bounded = limits(100, 100, 100, 800, 800, 800)
    for step in range(1, 8):
        made.record_order("d0", DeviceInfo(device_id="d0", examples={"t": 100 * 2**step}))
        other = ClaimLimits(task="t", on_bounded=bounded.append)
        other.restore(made.examples, made.first_examples)
        made = other
    assert bound(made, TrainConfig(iterations=5), num_examples=HUGE).num_examples == 200
    assert str(bounded[0]) == "examples: claimed 400, counted as 200"
    made.record_order("d0", DeviceInfo(device_id="d0", examples={"t": 50}))
    assert bound(made, TrainConfig(iterations=5), num_examples=HUGE).num_examples == 50


def test_a_claim_is_reported_ever_more_rarely():
    made, bounded = limits(100, 100)
    for _ in range(100):
        bound(made, TrainConfig(iterations=5), num_examples=HUGE)
    assert len(bounded) == 7
    assert bounded[-1] == BoundedClaim(device_id="d0", name="examples", claim=HUGE, bound=100)


def test_a_node_claims_the_iterations_of_its_run_only_where_it_continues_by_itself():
    made, _ = limits(100, 100)
    node = GossipConfig(method="isvr", edges=(), learning_rate=0.1, period=2, until=8, limit=40, carrier="direct")
    extra = {TOTAL_ITERATIONS: float(HUGE), "message_bytes": -5.0, "own": 3.0}
    found = bound(made, TrainConfig(iterations=0, node=node), iterations=HUGE, extra=extra)
    assert (found.iterations, dict(found.extra)) == (40, {TOTAL_ITERATIONS: 40, "message_bytes": 0.0, "own": 3.0})
    relayed = TrainConfig(iterations=5, node=GossipConfig(method="isvr", edges=(), learning_rate=0.1, period=2))
    assert TOTAL_ITERATIONS not in bound(made, relayed, extra=extra).extra


def test_progress_fits_the_order_and_the_clock():
    made, _ = limits(100, 100)
    report = Progress(device_id="d0", assignment_id="a", iteration=HUGE, seconds_per_iteration=9e9, age_s=-1.0)
    found = made.bound_progress(report, TrainConfig(iterations=4), elapsed_s=2.0)
    assert (found.iteration, found.seconds_per_iteration, found.age_s) == (4, 0.5, 0.0)


def test_an_evaluation_is_on_no_more_examples_than_the_device_has():
    made, _ = limits(100)
    result = EvaluateResult(
        assignment_id="e",
        device_id="d0",
        version=1,
        round=1,
        source="device",
        num_examples=HUGE,
        loss=1.0,
        accuracy=1.0,
    )
    assert made.bound_evaluation(result, DeviceInfo(device_id="d0", examples={"t": 100})).num_examples == 100


def test_a_report_of_more_examples_counts_in_steps():
    former = {"t": 8, "big": 50_000}
    assert bound_reported_examples(former, {"t": HUGE, "big": HUGE, "new": 7}) == {
        "t": 10_008,
        "big": 100_000,
        "new": 7,
    }
    assert bound_reported_examples({}, {"t": HUGE, "u": True, "v": "9", "w": -1}) == {"t": MAX_EXAMPLES}
    assert bound_reported_examples(former, {"t": 3}) == {"t": 3}


DRIFT = {"column": "a", "psi": 0.5, "ks": None, "num_reference": 200, "num_newer": 100}


JOINT = {**DRIFT, "psi": 0.1, "mmd": 0.02, "p_value": 0.002}


def test_of_drifts_the_largest_comes_first_and_is_large_above_a_quarter():
    found = parse_drift({"drift": {"small": {**DRIFT, "psi": 0.25}, "large": DRIFT}})
    assert [(task, claim.is_large) for task, claim in found.items()] == [("large", True), ("small", False)]
    assert format_drift(found) == (
        "large: psi 0.5 of a, 100 examples against 200; small: psi 0.25 of a, 100 examples against 200"
    )
    assert format_drift(parse_drift({})) is None


@pytest.mark.parametrize(
    ("reported", "is_right"),
    [
        ("https://192.0.2.7:8443/", True),
        ("https://[2001:db8::7]:8443/", True),
        ("https://bank.example:443/", False),
        ("http://192.0.2.7:8443/", False),
        ("javascript:alert(1)", False),
        ("https://192.0.2.7:8443/x\nhttps://", False),
        ("https://[" + 90 * ":" + "]:1/", False),
        (["https://192.0.2.7:8443/"], False),
        ("https://192.0.2.7:1/", True),
        ("https://[::ffff:192.0.2.7]:65535/", True),
        ("https://192.0.2.7:65536/", False),
        ("https://192.0.2.7:0/", False),
        ("https://999.1.1.1:8443/", False),
        ("https://192.0.2:8443/", False),
        ("https://[::::]:1/", False),
        ("https://[192.0.2.7]:8443/", False),
    ],
)
def test_a_label_page_is_an_ip_address_and_a_port_and_nothing_else(reported, is_right):
    assert parse_label_page({"label_page": reported}) == (reported if is_right else None)
    assert parse_label_page({}) is None


def test_a_drift_of_all_columns_is_large_where_no_column_is_unless_chance_makes_it():
    changes = {"both": {}, "small": {"mmd": 0.01}, "chance": {"p_value": 0.004}, "column": {"psi": 0.2, "mmd": 0.0}}
    found = parse_drift({"drift": {task: {**JOINT, **change} for task, change in changes.items()}})
    assert [task for task, claim in found.items() if claim.is_large] == ["both"]
    assert next(iter(found)) == "both", "before those of a larger index that are not large"
    assert str(found["both"]) == "psi 0.1 of a, mmd 0.02 (p 0.002) of all columns, 100 examples against 200"
    assert parse_drift({"drift": {"below": {**JOINT, "mmd": -0.003}}})["below"].mmd == -0.003


def test_drift_of_features_alone_is_large_where_columns_show_none():
    features = {"feature_mmd": 0.02, "feature_p_value": 0.002}
    changes = {"seen": {}, "small": {"feature_mmd": 0.01}, "chance": {"feature_p_value": 0.004}}
    still = {**DRIFT, "psi": 0.1, "mmd": -0.001, "p_value": 0.9}
    found = parse_drift({"drift": {name: {**still, **features, **change} for name, change in changes.items()}})
    assert {name: claim.is_large for name, claim in found.items()} == {"seen": True, "small": False, "chance": False}
    assert ", mmd -0.001 (p 0.9) of all columns, mmd 0.02 (p 0.002) of features, " in str(found["seen"])
    for wrong in ({"feature_mmd": 0.1}, {"feature_mmd": 3, "feature_p_value": 0}, {"feature_p_value": 0.5}):
        assert parse_drift({"drift": {"wrong": {**still, **wrong}}}) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"column": 3},
        {"mmd": math.nan, "p_value": 0.1},
        {"mmd": -2.1, "p_value": 0.1},
        {"mmd": 0.1, "p_value": 1.1},
        {"mmd": 0.1},
        {"p_value": 0.1},
        {"mmd": "0.1", "p_value": 0.1},
        {"psi": math.nan},
        {"psi": -0.1},
        {"psi": True},
        {"psi": "1"},
        {"psi": 10**400},
        {"ks": 1.5},
        {"num_newer": 2.0},
        {"num_reference": -1},
        {"num_newer": 2**60},
    ],
)
def test_a_drift_that_cannot_be_is_not_believed(change):
    assert parse_drift({"drift": {"digits": {**DRIFT, **change}, "mnist": DRIFT}}).keys() == {"mnist"}


def test_what_a_device_says_of_drift_is_bounded():
    many = {f"t{number}\n" * 99: {**DRIFT, "column": "\x1b" * 999} for number in range(1000)}
    found = parse_drift({"drift": many})
    assert len(found) == MAX_DRIFT_TASKS
    assert {len(text) for task, claim in found.items() for text in (task, claim.column)} == {MAX_NAME_CHARS}
    assert [parse_drift({"drift": value}) for value in (None, [DRIFT], "x", {"digits": [1]})] == [{}] * 4
