import itertools
from dataclasses import replace

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Dataset, TrainConfig
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.local_algorithms.registry import list_local_algorithms


def some_data(n=20):
    rng = np.random.default_rng(0)
    return Dataset(inputs=rng.standard_normal((n, 3)).astype(np.float32), targets=np.arange(n) % 2)


def a_learner(seed=1):
    model = DenseModel(sizes=(3, 2), prepare=lambda x: x)
    learner = model.learner()
    learner.load(model.init(seed))
    return learner


class Around:
    """A learner that does something of its own, and is another one in everything else."""

    def __init__(self, learner=None):
        self.learner = learner or a_learner()

    def __getattr__(self, name):
        return getattr(self.learner, name)


def go_on(*_):
    return False


def run(plan, *, data=None, learner=None, seed=5, on_iteration=go_on, **options):
    ticks = itertools.count()
    return train(
        learner or a_learner(), some_data() if data is None else data, plan, np.random.default_rng(seed),
        clock=lambda: float(next(ticks)), on_iteration=on_iteration, **options,
    )  # fmt: skip


def same(first, other):
    return all(np.array_equal(first.displacement[name], other.displacement[name]) for name in first.displacement)


def test_the_displacement_is_end_minus_start_in_the_order_of_the_tensors():
    learner = a_learner()
    before = learner.read()
    result = run(TrainConfig(iterations=4, batch_size=8, learning_rate=0.5), learner=learner)
    assert list(result.displacement) == list(before)
    for name, value in learner.read().items():
        np.testing.assert_allclose(result.displacement[name], value - before[name], atol=1e-7)
        assert result.displacement[name].any()


@pytest.mark.parametrize(
    ("budget", "iterations"),
    [
        ({"iterations": 7}, 7),
        ({"epochs": 2.0}, 6),
        ({"epochs": 0.5}, 2),
        ({"epochs": 0.01}, 1),
        ({"seconds": 4.0}, 4),
        ({"seconds": 1e-9}, 1),
    ],
)
def test_each_budget_grants_its_iterations_and_at_least_one(budget, iterations):
    # 20 examples in batches of 8 are three iterations an epoch; the clock ticks once per iteration.
    result = run(TrainConfig(**budget, batch_size=8))
    assert (result.iterations, result.num_examples) == (iterations, 20)


def test_a_recall_ends_after_the_present_iteration():
    seen = []

    def recalled(iteration, seconds_per_iteration):
        seen.append((iteration, seconds_per_iteration))
        return iteration == 2

    assert run(TrainConfig(iterations=50, batch_size=4), on_iteration=recalled).iterations == 2
    assert seen == [(1, 1.0), (2, 1.0)]


def test_every_example_is_used_once_per_epoch_in_another_order():
    class Watched(Around):
        def gradient(self, batch):
            seen.append(batch.inputs[:, 0].tolist())
            return self.learner.gradient(batch)

    seen, data = [], some_data()
    run(TrainConfig(epochs=2.0, batch_size=8), learner=Watched(), data=data)
    first, second = list(itertools.chain(*seen[:3])), list(itertools.chain(*seen[3:]))
    assert sorted(first) == sorted(second) == sorted(data.inputs[:, 0].tolist())
    assert first != second
    assert [len(batch) for batch in seen] == [8, 8, 4, 8, 8, 4]


def test_the_same_seed_gives_the_same_result_to_the_bit():
    plan = TrainConfig(epochs=3.0, batch_size=4, momentum=0.9)
    assert same(run(plan), run(plan))
    assert not same(run(plan), run(plan, seed=6))


def test_sgd_with_momentum_and_weight_decay_follows_its_formula():
    class FrozenBias(Around):
        """Shows only the weight to the algorithm, so that the formula has one tensor to follow."""

        parameters = property(lambda self: {"fc1.weight": self.learner.parameters["fc1.weight"]})
        gradients = property(lambda self: {"fc1.weight": self.learner.gradients["fc1.weight"]})

    learner, other, data, velocity = a_learner(), a_learner(), some_data(), 0.0
    weight = learner.read()["fc1.weight"]
    for _ in range(3):
        other.load({"fc1.weight": weight})
        other.gradient(data)
        velocity = 0.9 * velocity + (other.gradients["fc1.weight"] + 0.1 * weight)
        weight = weight - 0.2 * velocity
    plan = TrainConfig(iterations=3, batch_size=20, learning_rate=0.2, momentum=0.9, weight_decay=0.1)
    run(plan, learner=FrozenBias(learner), data=data)
    np.testing.assert_allclose(learner.read()["fc1.weight"], weight, atol=1e-6)


def test_gradient_moves_once_along_the_exact_gradient_over_the_shard():
    learner, data = a_learner(), some_data()
    learner.gradient(data)
    expected = -0.3 * learner.gradients["fc1.weight"]
    plan = TrainConfig(algorithm="gradient", epochs=1.0, batch_size=8, learning_rate=0.3, keeps_state=True)
    result = run(plan, learner=learner, data=data)
    assert (result.iterations, result.algorithm_state) == (3, {})
    np.testing.assert_allclose(result.displacement["fc1.weight"], expected, atol=1e-6)


def test_the_loss_is_the_mean_over_the_examples_and_that_of_a_diverging_model_is_no_error():
    learner, data = a_learner(), some_data()
    expected = learner.gradient(data)
    result = run(TrainConfig(epochs=1.0, batch_size=8, learning_rate=0.0), learner=learner, data=data)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert not np.isfinite(run(TrainConfig(iterations=40, batch_size=8, learning_rate=1e20, weight_decay=1e10)).loss)


def test_no_examples_are_an_error():
    with pytest.raises(DataError, match="holds no examples"):
        run(TrainConfig(iterations=1), data=some_data().take(np.empty(0, np.int64)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "exactly one of iterations, epochs and seconds, got none"),
        ({"iterations": 1, "epochs": 1.0}, "exactly one of"),
        ({"iterations": 0}, "plan.iterations must be a whole number at least 1, got 0"),
        ({"seconds": float("nan")}, "plan.seconds must be"),
        ({"iterations": 1, "batch_size": 0}, "plan.batch_size must be"),
        ({"iterations": 1, "learning_rate": -0.1}, "plan.learning_rate must be a number at least 0"),
        ({"iterations": 1, "algorithm": "adamw"}, "'adamw' is not installed on this board, only adadelta, adagrad"),
    ],
)
def test_a_plan_that_makes_no_sense_is_one_clear_line(wrong, message):
    with pytest.raises(ConfigError, match=message):
        run(TrainConfig(**wrong))


SIGNS = """
from edgefl.tasks.local_algorithms.registry import LocalAlgorithm
class Signs(LocalAlgorithm):
    def __init__(self, plan):
        self.plan = plan
    def start(self, learner): ...
    def step(self, learner, batch):
        for weight in learner.parameters.values():
            weight -= self.plan.learning_rate
    def finish(self, learner): ...
"""


def test_an_installed_package_adds_an_algorithm(installed):
    installed({"signs": SIGNS}, {"edgefl.local_steps": {"signs": "signs:Signs"}})
    assert "signs" in list_local_algorithms()
    result = run(TrainConfig(algorithm="signs", iterations=2, learning_rate=0.25))
    np.testing.assert_allclose(result.displacement["fc1.bias"], [-0.5, -0.5])


def test_state_is_kept_only_when_the_plan_asks_and_goes_on_in_the_next_assignment():
    plan = TrainConfig(iterations=2, batch_size=20, algorithm="adam", keeps_state=True)
    learner = a_learner()
    first = run(plan, learner=learner)
    second = run(plan, learner=learner, seed=6, algorithm_state=first.algorithm_state)
    assert [int(result.algorithm_state["iterations"]) for result in (first, second)] == [2, 4]
    whole = run(replace(plan, iterations=4, keeps_state=False))
    assert whole.algorithm_state is None
    for name, moved in whole.displacement.items():
        np.testing.assert_allclose(first.displacement[name] + second.displacement[name], moved, rtol=1e-4)
    forgets = replace(plan, keeps_state=False)
    assert same(run(forgets, algorithm_state=first.algorithm_state), run(forgets)), (
        "it begins anew whatever it is given"
    )


@pytest.mark.parametrize(("algorithm", "momentum"), [("sgd", 0.9), ("adam", 0.0)])
def test_a_training_that_diverged_leaves_no_state_that_the_next_would_go_on_with(algorithm, momentum):
    plan = TrainConfig(algorithm=algorithm, iterations=3, momentum=momentum, keeps_state=True)
    learner = a_learner()
    learner.load({name: np.full_like(array, np.nan) for name, array in learner.read().items()})
    assert run(plan, learner=learner).algorithm_state == {}
    assert run(plan).algorithm_state


@pytest.mark.parametrize("algorithm", ["sgd", "gradient"])
@pytest.mark.parametrize("workers", [1, 2, 4, 5])
def test_the_mean_over_workers_is_one_node_on_the_union_of_their_batches(workers, algorithm):
    """Vector P-T1: synchronous SGD over equal blocks is SGD on one node, up to the order of the sum."""
    data, batch = some_data(20), 20 // workers
    together, alone = a_learner(), a_learner()
    plan = TrainConfig(iterations=1, batch_size=batch, learning_rate=0.5, algorithm=algorithm)
    for version in range(5):
        start = together.read()
        mean = {name: np.zeros_like(value) for name, value in start.items()}
        for worker in range(workers):
            together.load(start)
            block = data.take(np.arange(worker * batch, (worker + 1) * batch))
            for name, moved in run(plan, learner=together, data=block, seed=version).displacement.items():
                mean[name] += moved / workers
        together.load({name: value + mean[name] for name, value in start.items()})
        run(replace(plan, batch_size=20, algorithm="sgd"), learner=alone, data=data, seed=version)
    for name, value in alone.read().items():
        np.testing.assert_allclose(together.read()[name], value, rtol=1e-5, atol=1e-7)


def test_a_learner_with_random_parts_is_seeded_without_disturbing_the_order_of_the_batches():
    class Random(Around):
        def reseed(self, seed):
            seeds.append(seed)

    seeds, plan = [], TrainConfig(epochs=2.0, batch_size=8)
    results = [run(plan, learner=Random(), seed=seed) for seed in (5, 5, 6)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert same(results[0], run(plan))
