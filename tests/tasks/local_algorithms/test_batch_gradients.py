"""Gradients of a batch in parts, clipped, and of activations in half precision."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.core.errors import ConfigError
from edgefl.core.types import Dataset, TrainConfig
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.local_algorithms.batch_gradients import bound_learner, clip_gradients
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.local_algorithms.optimizers import to_numpy
from edgefl.tasks.losses.torch_only_losses import Contrastive


def make_data(count=21, *, weights=None):
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((count, 6)).astype(np.float32)
    return Dataset(inputs=inputs, targets=(inputs[:, 0] > 0).astype(np.int64), weights=weights)


def make_learner(learner=None):
    model = DenseModel(sizes=(6, 5, 2), prepare=lambda inputs: inputs)
    learner = learner or model.learner()
    learner.load(model.init(1))
    return learner


def compute(learner, data, **plan):
    """Returns loss, and the gradients as a plan makes them."""
    loss = bound_learner(learner, TrainConfig(iterations=1, **plan)).gradient(data)
    return loss, {name: to_numpy(gradient) for name, gradient in learner.gradients.items()}


def measure_norm(gradients):
    return float(np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in gradients.values())))


@pytest.mark.parametrize("weights", [None, np.linspace(0, 3, 21, dtype=np.float32)])
@pytest.mark.parametrize("size", [1, 4, 20, 21, 400])
def test_the_gradient_of_a_batch_in_parts_is_that_of_the_batch(size, weights):
    data, sizes, learner = make_data(weights=weights), [], make_learner()
    whole = compute(learner, data)
    gradient = learner.gradient
    learner.gradient = lambda batch: sizes.append(len(batch)) or gradient(batch)
    found = compute(learner, data, micro_batch_size=size)
    assert (max(sizes) <= size, sum(sizes)) == (True, 21)
    assert found[0] == pytest.approx(whole[0], rel=1e-6)
    for name, expected in whole[1].items():
        np.testing.assert_allclose(found[1][name], expected, atol=1e-7)


def test_a_gradient_is_clipped_as_a_whole_and_a_shorter_one_is_not():
    data, learner = make_data(), make_learner()
    loss, whole = compute(learner, data)
    norm = measure_norm(whole)
    clipped_loss, clipped = compute(learner, data, max_gradient_norm=norm / 4)
    assert clipped_loss == loss
    assert measure_norm(clipped) == pytest.approx(norm / 4)
    for name, expected in whole.items():
        np.testing.assert_allclose(clipped[name], expected / 4, atol=1e-7)
    kept = compute(learner, data, max_gradient_norm=2 * norm)[1]
    assert all(np.array_equal(kept[name], expected) for name, expected in whole.items())
    parts = compute(learner, data, max_gradient_norm=norm / 4, micro_batch_size=5)[1]
    assert measure_norm(parts) == pytest.approx(norm / 4), "after the parts are one gradient"


def test_a_gradient_that_is_not_finite_is_left_for_the_coordinator_to_see():
    data, learner = make_data(), make_learner()
    data.inputs[0, 0] = np.inf
    with np.errstate(invalid="ignore"):
        found = compute(learner, data, max_gradient_norm=1.0)[1]
    assert not all(np.isfinite(gradient).all() for gradient in found.values())


def run(learner, data, **plan):
    clock = itertools.count()
    return train(
        learner, data, TrainConfig(**{"iterations": 20, "batch_size": 7, "learning_rate": 0.5, **plan}),
        np.random.default_rng(5), clock=lambda: float(next(clock)), on_iteration=lambda *_: False,
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", ["sgd", "adam", "gradient"])
def test_training_makes_such_gradients_with_every_local_algorithm(algorithm):
    plan = {"algorithm": algorithm, "learning_rate": 0.05}
    whole, parts = (run(make_learner(), make_data(), **plan, **more) for more in ({}, {"micro_batch_size": 2}))
    clipped = run(make_learner(), make_data(), **plan, max_gradient_norm=0.01)
    for name, moved in whole.displacement.items():
        np.testing.assert_allclose(parts.displacement[name], moved, atol=1e-5)
    if algorithm != "adam":  # whose step hardly depends on the gradient's length
        assert measure_norm(clipped.displacement) <= 20 * 0.05 * 0.01 < measure_norm(whole.displacement)


def test_a_run_file_says_it_and_boards_are_told_what_is_used_alone():
    settings = {"micro_batch_size": 4, "max_gradient_norm": 1.0, "precision": "bfloat16"}
    assert StrategyConfig(**settings).plan().to_json().items() >= settings.items()
    assert TrainConfig.from_json(StrategyConfig(**settings).plan().to_json()).precision == "bfloat16"
    assert settings.keys().isdisjoint(StrategyConfig().plan().to_json())
    for wrong in ({"micro_batch_size": 0}, {"max_gradient_norm": 0.0}, {"precision": "float8"}):
        with pytest.raises(ConfigError, match=f"strategy.{next(iter(wrong))} must be"):
            StrategyConfig(**wrong).plan()


def make_torch_learner():
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    from edgefl.tasks.learners.torch_learner import TorchLearner  # noqa: PLC0415 with torch

    torch.manual_seed(1)
    layers = torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    return TorchLearner(torch.nn.Sequential(*layers), threads=1)


@pytest.mark.parametrize(("precision", "error"), [("bfloat16", 0.03), ("float16", 0.005)])
def test_activations_of_torch_are_of_that_precision_and_weights_of_float32(precision, error):
    learner, data, seen = make_torch_learner(), make_data(200), []
    learner.module[0].register_forward_hook(lambda _module, _inputs, outputs: seen.append(str(outputs.dtype)))
    exact = compute(learner, data)[1]
    learner.set_precision(precision)
    found = compute(learner, data)[1]
    learner.set_precision("float32")
    again = compute(learner, data)[1]
    assert seen == ["torch.float32", f"torch.{precision}", "torch.float32"]
    assert all(np.array_equal(again[name], exact[name]) for name in exact)
    assert {str(weight.dtype) for weight in learner.parameters.values()} == {"torch.float32"}
    distance = measure_norm({name: found[name] - exact[name] for name in exact})
    assert 0 < distance < error * measure_norm(exact)


def test_mixed_precision_learns_and_the_next_run_without_it_is_in_float32():
    learner, data = make_torch_learner(), make_data(200)
    start = learner.read()
    first = learner.evaluate(data)[0]
    for precision in ("float16", "bfloat16"):
        learner.load(start)
        run(learner, data, precision=precision, iterations=60)
        assert learner.evaluate(data)[0] < 0.5 * first
    outcomes = []
    for precision in (None, "float32"):
        learner.load(start)
        outcomes.append(run(learner, data, precision=precision).displacement)
    assert all(np.array_equal(outcomes[0][name], outcomes[1][name]) for name in start)


def load_large_weights(learner):
    learner.load({"0.weight": np.full((16, 6), 300.0, np.float32), "2.weight": np.full((2, 16), 100.0, np.float32)})
    return Dataset(inputs=np.abs(make_data().inputs), targets=np.arange(21) % 2)


def test_a_gradient_that_overflows_float16_is_computed_again_by_half_the_scale():
    learner, seen = make_torch_learner(), []
    learner.load({"2.bias": np.array([200.0, 0.0], np.float32)})
    data = Dataset(inputs=100 * make_data().inputs, targets=np.ones(21, np.int64))
    learner.load({"2.weight": np.full((2, 16), 1.0, np.float32)})
    learner.load({"2.weight": np.stack([np.full(16, 90.0), np.full(16, -90.0)]).astype(np.float32)})
    exact_loss, exact = compute(learner, data)
    learner.module.register_forward_hook(lambda *_: seen.append(learner.module.training))
    learner.set_precision("float16")
    for size in (None, 5):
        seen.clear()
        loss, found = compute(learner, data, micro_batch_size=size)
        assert len(seen) == (1 if size is None else 5), "the network itself computes a part once"
        assert loss == pytest.approx(exact_loss, rel=0.01)
        assert measure_norm({name: found[name] - exact[name] for name in exact}) < 0.01 * measure_norm(exact)
    start = learner.read()
    result = run(learner, data, precision="float16", iterations=1, batch_size=21, learning_rate=1e-4)
    assert measure_norm(result.displacement) > 0, "one step an assignment trains, too"
    assert start.keys() == result.displacement.keys()


def test_a_gradient_that_is_not_finite_by_any_scale_is_left_as_in_float32():
    learner = make_torch_learner()
    data = load_large_weights(learner)
    huge = Dataset(inputs=1000 * data.inputs, targets=data.targets)
    learner.set_precision("float16")
    assert not np.isfinite(measure_norm(compute(learner, huge)[1]))
    assert not np.isfinite(measure_norm(compute(learner, huge, micro_batch_size=5, max_gradient_norm=1.0)[1]))
    result = run(learner, huge, precision="float16", iterations=1, weight_decay=0.1)
    assert not all(np.isfinite(moved).all() for moved in result.displacement.values()), "the coordinator sees it"


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_a_gradient_whose_square_is_no_float32_is_clipped(size):
    learner = make_learner()
    for gradient in learner.gradients.values():
        gradient.fill(-size)
    clip_gradients(learner, 2.0)
    assert measure_norm(learner.gradients) == pytest.approx(2.0, rel=1e-5)


def test_a_loss_that_compares_the_examples_of_a_batch_is_not_computed_in_parts():
    learner = SimpleNamespace(loss=Contrastive())
    with pytest.raises(ConfigError, match=r"strategy.micro_batch_size = 4 does not go with the loss contrastive"):
        bound_learner(learner, TrainConfig(iterations=1, micro_batch_size=4))
    bound_learner(learner, TrainConfig(iterations=1, max_gradient_norm=1.0))
