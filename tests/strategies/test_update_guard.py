"""The guard: what is refused, clipped and let in, and that neither order nor a restart changes it."""

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.core.types import SparseTensor, TensorSpec, Update, UpdateMetrics
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.update_guard import (
    MAX_RECORDS,
    MIN_DIRECTION_VERSIONS,
    MIN_EXCUSE,
    MIN_OPPOSITION,
    MIN_OPPOSITION_BESIDE_RESPONSES,
    SKETCH_SIZE,
    DeviceTrust,
    GuardState,
    UpdateGuard,
    compute_low_medians,
    compute_most_norm,
    measure_update,
    raise_bound,
)

SHAPES = (TensorSpec(name="w", shape=(3,)), TensorSpec(name="n", shape=(), dtype="int64"))
DIRECTION = np.array([3.0, 4.0, 0.0])
EMPTY_VIEW = SimpleNamespace(busy={}, idle=[])


def update(values, *, device="pi-1", name="w", version=0):
    tensors = {name: np.asarray(values, np.float32), "n": np.array(1)}
    return Update(
        assignment_id=f"v{version}-{device}",
        device_id=device,
        base_version=version,
        tensors=tensors,
        metrics=UpdateMetrics(num_examples=1),
    )


def make_guard(**settings):
    return UpdateGuard(**{"shapes": SHAPES, "norm_ratio": 4.0, "min_cosine": -0.3, **settings})


def play_version(guard, version, vectors):
    """Sends one update of each device; returns what came through, by device."""
    received = []
    for device, values in vectors.items():
        sent = update(values, device=device, version=version)
        if guard.rejection_reason(sent) is None:
            received += guard.admit(sent)
    received += guard.release(EMPTY_VIEW)
    guard.record_version(version + 1)
    return {each.device_id: np.array(each.tensors["w"]) for each in received}


def honest(num_devices=5, *, version=0):
    rng = np.random.default_rng(version)
    return {f"pi-{i}": DIRECTION + 0.5 * rng.standard_normal(3) for i in range(1, num_devices + 1)}


def test_a_healthy_update_is_let_in_dense_or_sparse():
    guard = UpdateGuard(shapes=SHAPES, max_norm=10.0)
    assert guard.rejection_reason(update([1, 2, 3])) is None
    tensors = {"w": SparseTensor(indices=np.array([1]), values=np.array([2.0]), shape=(3,)), "n": np.array(1)}
    assert guard.rejection_reason(replace(update([0, 0, 0]), tensors=tensors)) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (update([1, np.nan, 0]), "a NaN or an infinity"),
        (update([1, np.inf, 0]), "a NaN or an infinity"),
        (update([3e38, 3e38, 3e38]), "norm is inf|a NaN or an infinity"),  # its square is beyond a float: no warning
        (update([1, 2]), r"tensor 'w' has shape \(2,\), the model's is \(3,\)"),
        (update([1, 2, 3], name="v"), "no tensor 'w'"),
        (update([0, 0, 11]), "norm is 11, at most 10"),
    ],
)
def test_an_update_that_would_spoil_the_model_is_refused_with_what_is_wrong(bad, reason):
    refusal = UpdateGuard(shapes=SHAPES, max_norm=10.0).rejection_reason(bad)
    assert refusal is not None
    assert re.search(reason, refusal)


@pytest.mark.parametrize("factor", [10.0, 1e6, 1e12])
def test_a_first_update_that_is_far_too_long_is_clipped_to_a_few_times_the_others(factor):
    guard, vectors = make_guard(), honest()
    vectors["pi-3"] = DIRECTION * factor
    received = play_version(guard, 0, vectors)
    assert np.linalg.norm(received["pi-3"]) <= 4.001 * max(np.linalg.norm(vectors[f"pi-{i}"]) for i in (1, 2, 4, 5))
    assert np.array_equal(received["pi-1"], np.float32(vectors["pi-1"]))
    (clipped,) = guard.pop_clipped()
    assert (clipped.device_id, "times the usual" in clipped.reason) == ("pi-3", True)
    assert not guard.pop_clipped()


def test_the_result_does_not_depend_on_who_answers_first():
    results = []
    for order in itertools.permutations(range(1, 6), 5):
        guard = make_guard()
        for version, factor in enumerate([50.0, 1.0, 9.0]):
            vectors = honest(version=version)
            vectors["pi-2"] = vectors["pi-2"] * factor
            received = play_version(guard, version, {f"pi-{i}": vectors[f"pi-{i}"] for i in order})
        results.append({name: received[name].tobytes() for name in sorted(received)})
    assert all(result == results[0] for result in results)


def test_a_device_that_grows_by_a_tenth_each_version_does_not_move_its_own_bound():
    guard = make_guard()
    for version in range(50):
        vectors = honest(version=version)
        vectors["pi-5"] = vectors["pi-5"] * 1.1**version
        received = play_version(guard, version, vectors)
        assert np.linalg.norm(received["pi-5"]) < 4.001 * 7
    assert np.linalg.norm(received["pi-5"]) < 1  # far above the peers version by version: the less, the further


def test_a_device_that_was_long_for_long_has_to_be_short_for_as_long_before_it_counts_again():
    guard, received = make_guard(), []
    for version, factor in enumerate([10.0] * 8 + [3.5] * 7):
        sent = play_version(guard, version, honest(4) | {"pi-5": factor * DIRECTION})
        received.append(float(np.linalg.norm(sent["pi-5"])) / 5)
        if version == 7:
            (clipped,), (let_in,) = (guard.admit(update(f * DIRECTION, device="pi-5")) for f in (10.0, 1.0))
            assert (clipped.share, let_in.share) == (pytest.approx(0.4, rel=0.1), 1.0)
    assert max(received[4:8]) < 0.6
    assert max(received[8:14]) < 1.1
    assert received[14] == pytest.approx(3.5)


def test_where_norms_differ_much_the_bound_follows_the_upper_quartile():
    assert compute_most_norm(np.array([1.0, 1.0, 1.1, 1e6]), 4.0) == pytest.approx(4.0)
    assert compute_most_norm(np.array([0.9, 0.2, 1.0, 0.3]), 4.0) == pytest.approx(4 * 0.9)
    assert 8.0 < compute_most_norm(np.array([1.0, 1.3, 3.0, 3.0]), 4.0) < 9.0
    assert compute_most_norm(np.array([0.0, 0.0, 1.0]), 4.0) == np.inf


def test_a_device_hundreds_of_times_above_its_peers_is_refused_after_some_versions():
    guard, reasons = make_guard(), []
    for version in range(6):
        vectors = honest(version=version)
        vectors["pi-5"] = vectors["pi-5"] * 1e6
        received = play_version(guard, version, vectors)
        reasons.append("pi-5" in received)
    assert reasons == [True] * 3 + [False] * 3
    assert guard.state.quarantined == {"pi-5"}


@pytest.mark.parametrize(("times", "is_refused"), [(0.5, False), (1e4, True)])
def test_where_nearly_all_examples_fit_a_device_with_one_that_does_not_is_clipped_and_stays(times, is_refused):
    guard = make_guard()
    play_version(guard, 0, honest())
    for version in range(1, 7):
        vectors = {name: 1e-6 * vector for name, vector in honest(version=version).items()}
        vectors["pi-5"] = vectors["pi-5"] * 1e6 * times
        received = play_version(guard, version, vectors)
    assert ("pi-5" not in received, guard.state.quarantined) == (is_refused, {"pi-5"} if is_refused else set())
    assert is_refused or np.linalg.norm(received["pi-5"]) < 1e-5


def test_where_most_others_move_nothing_the_largest_median_of_the_run_bounds_an_update():
    guard = make_guard()
    play_version(guard, 0, honest())
    for version in (1, 2):
        vectors = dict.fromkeys(honest(), np.zeros(3)) | {"pi-5": 1e6 * DIRECTION}
        guard.pop_clipped()
        received = play_version(guard, version, vectors)
    assert np.linalg.norm(received["pi-5"]) == pytest.approx(4.0 * guard.state.usual_norm, rel=1e-5)
    assert "times the usual 4.8" in guard.pop_clipped()[-1].reason
    assert not guard.state.quarantined


def test_a_tensor_that_is_too_long_as_a_whole_keeps_its_direction():
    guard, vectors = make_guard(), honest()
    vectors["pi-3"] = np.array([1.0, 4.0, 2.0]) * 1e6
    received = play_version(guard, 0, vectors)["pi-3"]
    assert np.allclose(received / np.linalg.norm(received), vectors["pi-3"] / np.linalg.norm(vectors["pi-3"]))


def test_what_was_cut_off_of_others_does_not_lower_the_bound():
    guard = make_guard()
    play_version(guard, 0, honest())
    guard.state.records = {name: replace(record, norm=1.0) for name, record in guard.state.records.items()}
    sent = 3 * DIRECTION
    assert np.array_equal(play_version(guard, 1, {"pi-1": sent})["pi-1"], np.float32(sent))


def test_clipping_ends_when_there_are_too_few_devices_to_judge_by():
    guard = make_guard()
    for version in range(30):
        vectors = {name: values + version * np.eye(3)[2] * (name == "pi-5") for name, values in honest().items()}
        play_version(guard, version, vectors)
    assert guard.state.trust["pi-5"].damping < 1 or guard.state.trust["pi-5"].num_long
    few = {name: vectors[name] for name in ("pi-1", "pi-2", "pi-5")}
    guard.state.records = {name: guard.state.records[name] for name in few}
    play_version(guard, 30, few)
    assert not guard.state.trust


def test_an_opposed_device_of_other_data_is_no_longer_than_its_peers_and_never_refused():
    guard = make_guard()
    for version in range(40):
        rng = np.random.default_rng(version)
        vectors = {f"pi-{i}": np.roll([1.0, -0.1, -0.1], i) + 0.1 * rng.standard_normal(3) for i in range(1, 5)}
        vectors["pi-5"] = -3 * sum(vectors.values())
        received = play_version(guard, version, vectors)
        assert len(received) == 5
    assert np.linalg.norm(received["pi-5"]) <= 1.001 * max(np.linalg.norm(vectors[f"pi-{i}"]) for i in range(1, 5))


def test_a_device_is_let_in_whole_that_is_opposed_to_others_which_are_opposed_to_each_other():
    guard = make_guard()
    for version in range(20):
        rng = np.random.default_rng(version)
        vectors = {f"pi-{i}": np.roll([1.0, -0.5, -0.5], i) + 0.1 * rng.standard_normal(3) for i in range(1, 5)}
        vectors["pi-5"] = -2.5 * sum(vectors.values())
        received = play_version(guard, version, vectors)
    trust = guard.state.trust["pi-5"]
    assert trust.agreement < -0.9
    assert trust.unity < 0
    assert np.allclose(received["pi-5"], vectors["pi-5"], rtol=1e-5)


@pytest.mark.parametrize("compares_responses", [True, False])
def test_opposition_has_to_be_larger_where_responses_tell_the_rest(compares_responses):
    guard, around = make_guard(compares_responses=compares_responses), [(0, 1, 0), (0, 0, 1), (0, -1, 0), (0, 0, -1)]
    for version in range(MIN_DIRECTION_VERSIONS):
        vectors = {f"pi-{i}": np.array([1.0, 0.0, 0.0]) + turned for i, turned in enumerate(around, 1)}
        vectors["pi-5"] = np.array([-0.6, 0.8, 0.0])
        play_version(guard, version, vectors)
    trust = guard.state.trust["pi-5"]
    assert MIN_OPPOSITION < trust.unity - trust.agreement < MIN_OPPOSITION_BESIDE_RESPONSES
    reason = guard.rejection_reason(update(vectors["pi-5"], device="pi-5", version=version + 1))
    assert (reason is None) == compares_responses


class SparseDevice:
    """Sends the largest entries of what it has not sent yet."""

    def __init__(self, num_entries):
        self.num_entries, self.residual = num_entries, 0.0

    def send(self, values, *, device, version):
        self.residual = self.residual + values
        indices = np.sort(np.argsort(-np.abs(self.residual))[: self.num_entries])
        sent = SparseTensor(indices=indices, values=np.float32(self.residual[indices]), shape=values.shape)
        self.residual[indices] = 0.0
        return replace(update(values, device=device, version=version), tensors={"w": sent, "n": np.array(1)})


def play_sparse_descent(centers, *, num_versions, rogue="pi-5"):
    """Devices descend towards a centre each, the rogue away from it, by an update each in turn; returns the guard."""
    size = len(next(iter(centers.values())))
    guard = make_guard(shapes=(TensorSpec(name="w", shape=(size,)), SHAPES[1]))
    model, rng = np.zeros(size), np.random.default_rng(0)
    devices = {name: SparseDevice(num_entries=size // 10) for name in centers}
    for version in range(num_versions):
        step = np.zeros(size)
        for name, center in centers.items():
            pull = 0.05 * (center - model) + 0.02 * rng.standard_normal(size)
            sent = devices[name].send(-pull if name == rogue else pull, device=name, version=version)
            received = guard.admit(sent) if guard.rejection_reason(sent) is None else ()
            for each in [*received, *guard.release(EMPTY_VIEW)] if name == "pi-5" else received:
                step += each.tensors["w"].dense()
        model = model + step / len(centers)
        guard.record_version(version + 1)
    return guard


@pytest.mark.parametrize("rogue", ["pi-5", None])
@pytest.mark.parametrize("spread", [0.3, 1.0], ids=["of like data", "of unlike data"])
def test_a_changed_sign_of_sparse_updates_is_refused(spread, rogue):
    rng = np.random.default_rng(1)
    middle = rng.standard_normal(200)
    centers = {f"pi-{i}": middle + spread * rng.standard_normal(200) for i in range(1, 6)}
    guard = play_sparse_descent(centers, num_versions=60, rogue=rogue)
    assert guard.state.quarantined == ({rogue} if rogue else set())


def test_all_devices_together_may_grow():
    guard = make_guard()
    for version in range(8):
        vectors = {name: values * 3.0**version for name, values in honest(version=version).items()}
        received = play_version(guard, version, vectors)
    assert np.allclose(received["pi-1"], vectors["pi-1"])


def test_a_changed_sign_is_refused_every_other_time_after_some_versions_and_then_the_device_is_quarantined():
    guard, reasons = make_guard(compares_responses=False), []
    for version in range(MIN_DIRECTION_VERSIONS + 5):
        vectors = honest(version=version)
        vectors["pi-5"] = -vectors["pi-5"]
        play_version(
            guard, version, {name: vectors[name] for name in vectors if name != "pi-5"} | {"pi-5": vectors["pi-5"]}
        )
        reasons.append(guard.state.refusals.get("pi-5", 0))
    assert reasons == [0] * MIN_DIRECTION_VERSIONS + [1, 1, 2, 2, 3]
    assert guard.state.quarantined == {"pi-5"}


def test_a_device_that_is_opposed_for_a_moment_is_not_quarantined_for_it():
    guard, counts = make_guard(), []
    for version in range(40):
        vectors = honest(version=version)
        if version % 20 in range(8, 12):
            vectors["pi-5"] = -vectors["pi-5"]
        play_version(guard, version, vectors)
        counts.append(guard.state.refusals.get("pi-5", 0))
    assert (max(counts), counts[-1]) == (1, 0)
    assert not guard.state.quarantined


def test_devices_that_pull_in_all_directions_are_not_refused():
    guard = make_guard()
    for version in range(30):
        rng = np.random.default_rng(version)
        vectors = {f"pi-{i}": np.roll([1.0, -0.5, -0.5], i) + 0.3 * rng.standard_normal(3) for i in range(6)}
        assert len(play_version(guard, version, vectors)) == 6


def play_descent(guard, centers, *, rogue=None):
    """Devices descend towards a centre each, the rogue away from it; returns who was clipped, by version."""
    model, clipped = np.zeros(3), []
    for version in range(30):
        rng = np.random.default_rng(version)
        vectors = {
            name: 0.05 * (np.array(center) - model) * (-1 if name == rogue else 1) + 0.001 * rng.standard_normal(3)
            for name, center in centers.items()
        }
        received = play_version(guard, version, vectors)
        model = model + sum(received.values()) / len(received)
        clipped.append({each.device_id for each in guard.pop_clipped()})
    return clipped


def test_a_device_of_other_data_that_descends_is_neither_clipped_nor_refused():
    guard, around = make_guard(), [(3, 4, 0), (3, -4, 0), (3, 0, 4), (3, 0, -4)]
    clipped = play_descent(guard, {"pi-1": (-5, 0, 0), **{f"pi-{i}": center for i, center in enumerate(around, 2)}})
    assert guard.state.trust["pi-1"].agreement < -0.9
    assert not set().union(*clipped[6:])
    assert not guard.state.refusals


@pytest.mark.parametrize(
    ("num_devices", "score", "is_refused"),
    [(10, 1.1, True), (10, 0.9, False), (50, 1.7, False), (50, 1.9, True), (200, 2.3, False), (200, 2.5, True)],
)
def test_among_many_devices_one_is_not_refused_for_a_score_that_chance_alone_gives(num_devices, score, is_refused):
    guard = make_guard()
    scores = {f"pi-{number}": -2.4 for number in range(2, num_devices + 1)} | {"pi-1": score}
    guard.state.trust = {
        name: DeviceTrust(response=value, response_square=1.0, num_responses=30, num_versions=31)
        for name, value in scores.items()
    }
    assert (guard.rejection_reason(update([0.1, 0.1, 0.1], version=31)) is not None) == is_refused


@pytest.mark.parametrize("usual", [-1.2, -4.0, -12.0, -60.0])
@pytest.mark.parametrize(
    ("num_devices", "gap", "is_refused"),
    [(6, 3.8, True), (6, 3.7, False), (50, 4.0, False), (50, 4.2, True), (200, 4.3, False), (200, 4.5, True)],
)
def test_a_score_of_sparse_updates_counts_by_its_distance_however_clearly_the_others_pull_back(
    usual, num_devices, gap, is_refused
):
    guard = make_guard()
    sent = SparseDevice(num_entries=1).send(DIRECTION / 10, device="pi-1", version=31)
    guard.state.records["pi-1"] = measure_update(sent, SHAPES[:1])
    scores = {f"pi-{number}": usual for number in range(2, num_devices + 1)} | {"pi-1": usual + gap}
    guard.state.trust = {
        name: DeviceTrust(response=value, response_square=1.0, num_responses=30, num_versions=31)
        for name, value in scores.items()
    }
    assert (guard.rejection_reason(sent) is not None) == is_refused


def test_a_bound_rises_with_the_devices_above_those_it_was_measured_with_and_takes_any_number():
    assert [raise_bound(bound, 10) for bound in (-60.0, 1.0)] == [-60.0, 1.0]
    assert 1.0 < raise_bound(1.0, 11) < raise_bound(1.0, 60) < raise_bound(1.0, 10**6) < 8.0
    assert all(
        raise_bound(bound, num_devices) >= bound for bound in (-1e6, -60.0, 1e6) for num_devices in (11, 10**6)
    )


def test_an_opposed_device_is_excused_for_pulling_back_until_it_is_long():
    guard, around, num_excused = make_guard(), [(3, 1, 0), (3, -1, 0), (3, 0, 1), (3, 0, -1)], 0
    for version in range(40):
        vectors = {f"pi-{i}": np.array(values, float) for i, values in enumerate(around, 1)}
        vectors["pi-5"] = np.array([3 - 0.4 * version, 1.0, 0.0])
        trust = replace(guard.state.trust.get("pi-5", DeviceTrust()))
        if "pi-5" not in play_version(guard, version, vectors):
            break
        num_excused += trust.unity - trust.agreement > MIN_OPPOSITION_BESIDE_RESPONSES
    assert num_excused > 10
    assert trust.score < MIN_EXCUSE
    assert 2 < trust.norm_ratio < 2.5


def test_a_changed_sign_is_refused_where_the_devices_do_not_agree():
    guard = make_guard()
    centers = {"pi-1": (0, 5, 0), "pi-2": (0, 0, 5), "pi-3": (5, 0, 0), "pi-4": (0, -5, 0), "pi-5": (0, 0, -5)}
    play_descent(guard, centers, rogue="pi-5")
    assert guard.state.quarantined == {"pi-5"}
    assert len(guard.state.positions) <= 3


def test_one_entry_is_clipped_and_the_rest_of_the_update_stays():
    shapes = (TensorSpec(name="w", shape=(100,)),)
    guard = UpdateGuard(shapes=shapes, norm_ratio=4.0)
    sent = []
    for i in range(5):
        values = np.ones(100, np.float32)
        values[7] = 1e6 if i == 4 else 1.0
        each = replace(update([0]), tensors={"w": values}, device_id=f"pi-{i}", assignment_id=f"a{i}")
        assert guard.rejection_reason(each) is None
        sent += guard.admit(each)
    received = guard.release(EMPTY_VIEW)
    assert received[4].tensors["w"][7] == 10.0  # 4 x 2.5 times the largest entry of the others
    assert np.all(np.delete(received[4].tensors["w"], 7) == 1.0)


def test_first_updates_are_held_until_all_that_are_asked_have_answered():
    guard = make_guard(hold_updates=None)
    busy = SimpleNamespace(busy={"pi-2": ("v0-pi-2",)}, idle=[])
    first = update([1, 2, 3])
    assert guard.rejection_reason(first) is None
    assert guard.admit(first) == ()
    assert (guard.release(busy), guard.list_held()) == ((), {"pi-1": ["v0-pi-1"]})
    guard.release_next()
    assert [each.device_id for each in guard.release(busy)] == ["pi-1"]
    assert [each.device_id for each in guard.admit(update([1, 2, 3], device="pi-2"))] == ["pi-2"]


def test_a_state_that_was_saved_decides_as_the_one_that_went_on():
    guard = make_guard()
    for version in range(3):
        play_version(guard, version, honest(version=version))
    assert guard.admit(update([1, 2, 3], device="pi-9", version=3)) != ()
    other = make_guard()
    other.restore(decode_state(encode_state(guard.state), GuardState), keeps_held=True)
    vectors = honest(version=3) | {"pi-2": DIRECTION * 100}
    results = [play_version(each, 3, vectors) for each in (guard, other)]
    assert {name: values.tobytes() for name, values in results[0].items()} == {
        name: values.tobytes() for name, values in results[1].items()
    }


def test_held_updates_are_in_a_saved_state_and_are_asked_for_again_in_another_life():
    guard = make_guard()
    guard.admit(update([1, 2, 3]))
    saved = decode_state(encode_state(guard.state), GuardState)
    other = make_guard()
    other.restore(saved, keeps_held=True)
    assert np.array_equal(other.release(EMPTY_VIEW)[0].tensors["w"], [1, 2, 3])
    other.restore(saved)
    assert not other.list_held()


def test_memory_does_not_grow_with_the_number_of_devices():
    guard = make_guard(hold_updates=4)
    for version in range(3):
        play_version(guard, version, honest(3 * MAX_RECORDS, version=version))
    assert len(guard.state.records) == len(guard.state.trust) == MAX_RECORDS
    assert not guard.state.incoming


def test_low_medians_ignore_zeros_and_are_unknown_without_a_majority():
    values = np.array([[0.0, 1.0], [2.0, 1e12], [4.0, 0.0], [0.0, 0.0]])
    assert compute_low_medians(values).tolist() == [2.0, 1.0]
    assert compute_low_medians(np.array([[1.0], [0.0], [0.0]])).tolist() == [np.inf]


def test_a_sketch_keeps_cosines_dense_or_sparse():
    spec, rng = TensorSpec(name="w", shape=(20, 1000)), np.random.default_rng(1)
    first, second = rng.standard_normal((2, 20, 1000)).astype(np.float32)
    mixed = first + second
    records = [
        measure_update(replace(update([0]), tensors={"w": tensor}), (spec,))
        for tensor in (
            first,
            second,
            mixed,
            SparseTensor(indices=np.arange(20000), values=mixed.ravel(), shape=(20, 1000)),
        )
    ]
    assert all(record.sketch.shape == (SKETCH_SIZE,) for record in records)
    assert abs(records[0].sketch @ records[1].sketch) < 0.1
    assert abs(records[0].sketch @ records[2].sketch - 0.707) < 0.1
    assert np.allclose(records[2].sketch, records[3].sketch, atol=1e-5)
    assert records[2].norm == pytest.approx(float(np.linalg.norm(mixed)), rel=1e-5)
