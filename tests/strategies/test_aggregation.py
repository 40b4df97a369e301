"""Streaming means of updates, and the coordinator's optimisers against two steps worked out by hand."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, StrategyError
from edgefl.core.types import LazyTensors, SparseTensor, Update, UpdateMetrics
from edgefl.strategies.aggregation import SERVER_OPTIMIZERS, ServerOptimizer, StreamingMean, apply_step


def update(name, tensors, num_examples=1):
    return Update(
        assignment_id=name,
        device_id=f"device-of-{name}",
        base_version=0,
        tensors=tensors,
        metrics=UpdateMetrics(num_examples=num_examples),
    )


def receive(fold, one, weight, model, norm=1.0, buffers=frozenset()):
    fold.add_update(one.assignment_id, one, weight=weight, norm=norm)
    fold.add_next_updates(model, buffers)


def close(fold, model, buffers=frozenset()):
    apply_step(model, fold.compute_mean(model, buffers))


def folded(model, *updates, weights=None, norms=None, buffers=frozenset()):
    fold = StreamingMean(expected=[u.assignment_id for u in updates])
    for number, one in enumerate(updates):
        weight = weights[number] if weights else float(one.metrics.num_examples)
        receive(fold, one, weight, model, norms[number] if norms else 1.0, buffers)
    close(fold, model, buffers)
    return model


def test_the_model_moves_by_the_weighted_mean():
    model = {"w": np.array([1.0, 10.0], np.float32)}
    folded(
        model,
        update("a", {"w": np.array([4.0, 0.0], np.float32)}, 1),
        update("b", {"w": np.array([0.0, -4.0], np.float32)}, 3),
    )
    assert model["w"].tolist() == [2.0, 7.0]


def test_what_was_clipped_to_a_part_counts_as_a_part_and_leaves_the_step_of_the_others():
    model = {"w": np.zeros(1), "mean": np.zeros(1)}
    honest = update("a", {"w": np.array([4.0]), "mean": np.array([3.0])})
    clipped = replace(update("b", {"w": np.array([1.0]), "mean": np.array([9.0])}), is_clipped=True, share=0.25)
    folded(model, honest, clipped, weights=[2.0, 2.0], norms=[2.0, 2.0], buffers=frozenset({"mean"}))
    assert model["w"].tolist() == [4.0]
    assert model["mean"] == pytest.approx((3.0 + 0.25 * 9.0) / 1.25)


def test_counters_come_from_the_device_with_most_examples_and_means_are_averaged():
    model = {"steps": np.array(5, np.int64), "mean": np.array(0.0)}
    folded(
        model,
        update("a", {"steps": np.array(2), "mean": np.array(1e-12)}, 10),
        update("b", {"steps": np.array(9), "mean": np.array(3e-12)}, 30),
        update("c", {"steps": np.array(4), "mean": np.array(2e-12)}, 30),
        weights=[1.0, 1.0, 1.0],
    )
    assert model["steps"] == 14
    assert model["steps"].dtype == np.int64
    assert model["mean"] == 2e-12


def test_what_is_a_counter_depends_on_the_model_and_not_on_the_update():
    model = {"w": np.zeros(2, np.float32), "steps": np.zeros(1, np.int32)}
    folded(
        model,
        update("a", {"w": np.array([2, 4]), "steps": np.array([3.0])}, 1),
        update("b", {"w": np.array([0, 0]), "steps": np.array([1.0])}, 1),
    )
    assert model["w"].tolist() == [1.0, 2.0]
    assert model["steps"].tolist() == [3]
    assert {name: tensor.dtype.name for name, tensor in model.items()} == {"w": "float32", "steps": "int32"}


def test_half_floats_do_not_overflow_under_many_examples():
    model = {"w": np.zeros(2, np.float16)}
    folded(
        model,
        update("a", {"w": np.array([3.0, -1.0], np.float16)}, 60_000),
        update("b", {"w": np.array([1.0, 1.0], np.float16)}, 60_000),
    )
    assert model["w"].tolist() == [2.0, 0.0]
    assert model["w"].dtype == np.float16


def test_updates_are_added_in_the_order_of_their_assignment_whoever_is_first():
    values = {"a": 1e8, "b": 1.0, "c": -1e8}
    sums = set()
    for order in ("abc", "cab", "cba"):
        model, fold = {"w": np.zeros(1, np.float32)}, StreamingMean(expected=["a", "b", "c"])
        for name in order:
            receive(fold, update(name, {"w": np.array([values[name]], np.float32)}), 1.0, model)
        close(fold, model)
        assert list(fold.used) == ["a", "b", "c"]
        sums.add(model["w"].tobytes())
    assert len(sums) == 1


def test_the_first_update_for_a_slot_counts_and_a_missing_one_holds_nothing_back():
    model, fold = {"w": np.zeros(1, np.float32)}, StreamingMean(expected=["a", "b"])
    for name, value in (("b", 4.0), ("b", 100.0), ("a", 2.0), ("a", 100.0), ("b", 100.0)):
        receive(fold, update(name, {"w": np.array([value], np.float32)}), 1.0, model)
    close(fold, model)
    assert model["w"].tolist() == [3.0]
    model, fold = {"w": np.zeros(1, np.float32)}, StreamingMean(expected=["block:0", "lost", "c"])
    receive(fold, update("c", {"w": np.array([2.0], np.float32)}), 1.0, model)
    fold.add_update("block:0", update("copy-of-b", {"w": np.array([4.0], np.float32)}))
    assert fold.num_received == 2
    close(fold, model)
    assert (fold.used, model["w"].tolist()) == ({"block:0": "copy-of-b", "c": "c"}, [3.0])


def part(name, block, **tensors):
    cut = {
        tensor: SparseTensor(indices=np.arange(start, start + len(values)), values=np.array(values), shape=(4,))
        for tensor, (start, values) in tensors.items()
    }
    return update(name, {"w": np.zeros(4), "mean": np.array(float(block)), **cut}, 1), f"block {block}"


@pytest.mark.parametrize(
    ("lost", "moved", "mean"),
    [
        ("", [3.0, 3.0, 4.0, 6.0], 1.75),  # (2·1 + 1·5 + 1·5)/4, …
        ("a2", [3.0, 3.0, 3.0, 7.0], 1.75),
        ("a1", [5.0, 5.0, 4.0, 6.0], 1.75),
        ("a1 b1", [5.0, 5.0, 13 / 3, 6.0], 1.75),
        ("a1 a2", [5.0, 5.0, 3.0, 7.0], 2.5),
        ("b1 b2 c", [1.0, 1.0, 5.0, 5.0], 1.0),
        ("a1 b1 c", [0.0, 0.0, 5.0, 17 / 3], 5 / 3),
    ],
)
def test_each_entry_moves_by_the_mean_of_the_updates_whose_part_with_it_came(lost, moved, mean):
    parts = {
        "a1": (*part("a1", 1, w=(0, [1.0, 1.0])), 2.0),
        "a2": (*part("a2", 1, w=(2, [5.0, 5.0])), 2.0),
        "b1": (*part("b1", 3, w=(0, [5.0, 5.0, 3.0])), 1.0),
        "b2": (*part("b2", 3, w=(3, [7.0])), 1.0),
        "c": (update("c", {"w": np.array([5.0, 5.0, 3.0, 7.0]), "mean": np.array(2.0)}, 1), "", 1.0),
    }
    fold = StreamingMean(expected=list(parts))
    model = {"w": np.zeros(4), "mean": np.zeros(())}
    for name, (one, group, weight) in parts.items():
        if name not in lost.split():
            fold.add_update(name, one, weight=weight, part_group=group)
            fold.add_next_updates(model, frozenset({"mean"}))
    close(fold, model, frozenset({"mean"}))
    assert (model["w"].tolist(), float(model["mean"])) == (pytest.approx(moved), pytest.approx(mean))


def test_a_whole_tensor_in_place_of_a_part_counts_once_and_is_never_scaled():
    whole = update("a1", {"w": np.full(4, 8.0)}, 1)
    late = update("a2", {"w": np.full(4, 9.0)}, 1)
    model, fold = {"w": np.zeros(4)}, StreamingMean(expected=["a1", "a2"])
    for one in (whole, late):
        fold.add_update(one.assignment_id, one, weight=500.0, part_group="block 0")
    close(fold, model)
    assert model["w"].tolist() == [8.0] * 4


def test_normalised_updates_move_the_model_by_the_mean_norm_times_the_mean_of_displacements_over_norms():
    model = {"w": np.zeros(1, np.float32), "mean": np.zeros(1, np.float32), "steps": np.array(0)}
    one = {"w": np.array([8.0], np.float32), "mean": np.array([8.0], np.float32), "steps": np.array(4)}
    other = {"w": np.array([1.0], np.float32), "mean": np.array([1.0], np.float32), "steps": np.array(1)}
    folded(
        model, update("a", one, 30), update("b", other, 10),
        weights=[3.0, 1.0], norms=[4.0, 1.0], buffers=frozenset({"mean"}),
    )  # fmt: skip
    # τ = (3·4 + 1·1)/4, Σ p d/a = (3·8/4 + 1·1/1)/4; a running mean is averaged as it is.
    assert model["w"].tolist() == [13 / 4 * 7 / 4]
    assert model["mean"].tolist() == [25 / 4]
    assert model["steps"] == 4


def test_only_one_decoded_update_is_in_memory_at_a_time():
    alive = []

    class Watched(LazyTensors):
        def __init__(self, name):
            super().__init__(lambda: self.load(name))

        def load(self, name):
            alive.append((name, "in"))
            return {"w": np.ones(1, np.float32)}

        def unload(self):
            super().unload()
            alive.append(("", "out"))

    fold, model = StreamingMean(expected=["a", "b", "c"]), {"w": np.zeros(1, np.float32)}
    for name in "cab":
        receive(fold, update(name, Watched(name)), 1.0, model)
    close(fold, model)
    assert [name for name, what in alive if what == "in"] == ["a", "b", "c"]
    assert all(first[1] != second[1] for first, second in pairwise(alive))


def test_a_large_tensor_is_summed_to_the_bit_as_if_it_were_weighed_at_once():
    rng = np.random.default_rng(1)
    first, second = (rng.standard_normal((3, 2**16 + 5), dtype=np.float32) for _ in range(2))
    model = {"w": np.zeros(first.shape, np.float32)}
    fold = StreamingMean(expected=["a", "b"])
    for name, tensor in (("a", first), ("b", second)):
        receive(fold, update(name, {"w": tensor}), 7.3, model)
    weight = np.float32(7.3)
    assert np.array_equal(fold.total["w"], first * weight + second * weight)


@pytest.mark.parametrize("comes", ["sd", "ds", "ss"])
def test_a_sparse_update_is_summed_to_the_bit_as_its_dense_form(comes):
    rng = np.random.default_rng(1)
    updates = [
        SparseTensor(indices=np.array([0, 3, 5]), values=rng.standard_normal(3, dtype=np.float32), shape=(2, 3))
        if kind == "s"
        else rng.standard_normal((2, 3), dtype=np.float32)
        for kind in comes
    ]
    models = [{"w": np.zeros((2, 3), np.float32)} for _ in range(2)]
    folded(models[0], *(update(name, {"w": one}, 3) for name, one in zip("ab", updates, strict=True)))
    dense = [one.dense() if isinstance(one, SparseTensor) else one for one in updates]
    folded(models[1], *(update(name, {"w": one}, 3) for name, one in zip("ab", dense, strict=True)))
    assert np.array_equal(models[0]["w"], models[1]["w"])
    assert models[0]["w"].any()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [({}, "has no tensor 'w'"), ({"w": np.ones(3, np.float32)}, r"shape \(3,\), the model's is \(2,\)")],
)
def test_an_update_that_does_not_fit_is_named(tensors, message):
    with pytest.raises(StrategyError, match=message):
        folded({"w": np.zeros(2, np.float32)}, update("a", tensors))


def test_without_updates_the_model_stays():
    model = {"w": np.ones(2, np.float32)}
    close(StreamingMean(), model)
    assert model["w"].tolist() == [1.0, 1.0]


def two_steps(optimizer, first=0.2, second=-0.1):
    moments, taken = {}, []
    for moved in (first, second):
        step = optimizer.step(moments, {"w": np.array([moved])})
        taken.append(float(step["w"][0]))
    return taken


def test_none_takes_the_displacement_itself_or_scales_it_by_a_rate():
    moved = {"w": np.array([0.2])}
    assert ServerOptimizer().step({}, moved) is moved
    assert two_steps(ServerOptimizer(learning_rate=0.5)) == pytest.approx([0.1, -0.05])


def test_momentum_keeps_a_share_of_the_old_direction():
    assert two_steps(ServerOptimizer(kind="momentum", beta1=0.5, learning_rate=2.0)) == pytest.approx([0.4, 0.0])


@pytest.mark.parametrize(
    ("kind", "second_moments"),
    [
        ("adagrad", (0.04, 0.05)),
        ("adam", (0.25 * 0.04, 0.75 * 0.01 + 0.25 * 0.01)),
        ("yogi", (0.25 * 0.04, 0.01)),  # the second time v equals the square: its sign is 0 and v stays
    ],
)
def test_adaptive_steps_are_those_of_the_paper(kind, second_moments):
    optimizer = ServerOptimizer(kind=kind, learning_rate=0.1, beta1=0.5, beta2=0.75, epsilon=0.01)
    directions = (0.5 * 0.2, 0.25 * 0.2 - 0.5 * 0.1)
    expected = [0.1 * m / (math.sqrt(v) + 0.01) for m, v in zip(directions, second_moments, strict=True)]
    assert two_steps(optimizer) == pytest.approx(expected)


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
def test_integers_and_buffers_pass_as_they_are(kind):
    optimizer = ServerOptimizer(kind=kind, learning_rate=0.1, buffers=frozenset({"mean"}))
    moved = {"mean": np.array([0.25]), "count": np.array([3])}
    step = optimizer.step({}, dict(moved))
    assert all(np.array_equal(step[name], moved[name]) for name in moved)


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_steps_keep_shape_and_type(kind, dtype):
    optimizer = ServerOptimizer(kind=kind, learning_rate=0.1)
    step = optimizer.step({}, {"w": np.full((2, 3), 0.5, dtype), "scale": np.array(0.5, dtype)})
    assert [(t.shape, t.dtype) for t in step.values()] == [((2, 3), dtype), ((), dtype)]


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(ConfigError, match=r"server\.optimizer must be one of none, momentum"):
        ServerOptimizer(kind="adamw")


@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi"])
def test_the_square_of_a_small_half_float_is_not_lost(kind):
    optimizer = ServerOptimizer(kind=kind, learning_rate=0.1, epsilon=1e-6)
    halves = optimizer.step({}, {"w": np.full(3, 1e-4, np.float16)})["w"]
    singles = optimizer.step({}, {"w": np.full(3, np.float16(1e-4), np.float32)})["w"]
    assert halves == pytest.approx(singles, rel=1e-3)
