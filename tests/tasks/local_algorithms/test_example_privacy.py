"""Private gradients and the account of them: what an example can change at most, and what it costs."""

import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.core.errors import ConfigError, DataError, StoreError, TaskError
from edgefl.core.renyi_accounting import ORDERS, compute_divergences, compute_epsilon
from edgefl.core.types import Dataset, ExamplePrivacy, TrainConfig
from edgefl.tasks.augmentation import AugmentedDataset
from edgefl.tasks.learners.numpy_learner import ACTIVATIONS, DenseModel
from edgefl.tasks.local_algorithms import example_privacy
from edgefl.tasks.local_algorithms.example_privacy import (
    ExampleAccount,
    PrivateLearner,
    PrivateSteps,
    RunAccount,
    iterate_samples,
    make_private_steps,
)
from edgefl.tasks.local_algorithms.local_training import train

PRIVACY = ExamplePrivacy(optimizer="sgd", clip=0.5, epsilon=8.0, delta=1e-5, noise=1.0)
MAX_RUNS = 5
PLAN = TrainConfig(algorithm="dp-sgd", iterations=3, batch_size=8, privacy=PRIVACY)


def some_data(n=20, seed=0, weights=None):
    rng = np.random.default_rng(seed)
    return Dataset(
        inputs=rng.standard_normal((n, 5)).astype(np.float32), targets=rng.integers(0, 3, n), weights=weights
    )


def a_learner(seed=1, **kinds):
    model = DenseModel(sizes=(5, 7, 3), prepare=lambda x: x, **kinds)
    learner = model.learner()
    learner.load(model.init(seed))
    return learner


def read_gradients(learner):
    return {name: np.array(value, np.float64) for name, value in learner.gradients.items()}


def get_norm(arrays):
    return float(np.sqrt(sum(np.square(array).sum() for array in arrays.values())))


def sum_one_by_one(learner, data, clip):
    """The sum by the definition: one example at a time, whose gradient is that of a batch of one."""
    total = {name: np.zeros(value.shape) for name, value in learner.gradients.items()}
    for row in range(len(data)):
        learner.gradient(data.take([row]))
        gradient = read_gradients(learner)
        factor = min(1.0, clip / max(1e-30, get_norm(gradient)))
        for name, value in gradient.items():
            total[name] += factor * value
    return total


def open_account(path=None, **options):
    return RunAccount(account=ExampleAccount(path, **options), task="digits", run="r")


def run(plan=PLAN, *, learner=None, data=None, account=None, on_iteration=lambda *_: False, seed=5):
    return train(
        learner or a_learner(), data or some_data(), plan, np.random.default_rng(seed), clock=lambda: 0.0,
        on_iteration=on_iteration, account=account or open_account(),
    )  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weights", [None, np.linspace(0.0, 3.0, 20)])
def test_the_sum_is_that_of_one_example_at_a_time(activation, weights):
    learner, data = a_learner(activation=activation), some_data(weights=weights)
    expected = sum_one_by_one(learner, data, 0.5)
    learner.sum_clipped_gradients(data, 0.5)
    for name, value in read_gradients(learner).items():
        np.testing.assert_allclose(value, expected[name], atol=2e-5)


def test_frozen_tensors_count_in_no_norm():
    learner, data = a_learner(), some_data()
    learner.freeze(["fc1.weight", "fc1.bias"])
    expected = sum_one_by_one(learner, data, 0.5)
    assert sorted(expected) == ["fc2.bias", "fc2.weight"]
    learner.sum_clipped_gradients(data, 0.5)
    for name, value in read_gradients(learner).items():
        np.testing.assert_allclose(value, expected[name], atol=2e-5)


@given(
    scale=st.floats(1e-3, 1e18),
    clip=st.floats(1e-3, 10.0),
    row=st.integers(0, 7),
    odd=st.sampled_from([None, np.nan, np.inf, -np.inf]),
)
@settings(max_examples=60, deadline=None)
def test_no_example_changes_the_sum_by_more_than_the_clip(scale, clip, row, odd):
    data = some_data(8)
    data.inputs[row] *= np.float32(scale)
    if odd is not None:
        data.inputs[row, 0] = odd
    learner, others = a_learner(), np.arange(8) != row
    with np.errstate(all="ignore"):
        learner.sum_clipped_gradients(data, clip)
        whole = read_gradients(learner)
        learner.sum_clipped_gradients(data.take(others), clip)
    without = read_gradients(learner)
    change = get_norm({name: whole[name] - without[name] for name in whole})
    rounding = 1e-6 * max(get_norm(whole), 8 * clip)
    assert change <= clip + rounding


def test_the_noise_has_the_variance_it_says_and_sums_are_divided_by_the_batch_size():
    steps = PrivateSteps(privacy=PRIVACY, sampling=0.4, noise=1.7, batch_size=8)
    learner, empty = a_learner(), some_data().take(np.arange(0))
    private = PrivateLearner(learner, steps, np.random.default_rng(11))
    values = []
    for _ in range(200):
        assert private.gradient(empty) == 0.0
        values += [value.ravel() for value in read_gradients(learner).values()]
    noise = np.concatenate(values) * steps.batch_size / (steps.noise * PRIVACY.clip)
    # Of n normal numbers the mean square is 1 within 5 sqrt(2/n), the mean 0 within 5 / sqrt(n).
    assert abs(np.square(noise).mean() - 1.0) < 5 * np.sqrt(2 / noise.size)
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size)
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 5 / np.sqrt(noise.size)


def test_samples_are_of_each_example_by_itself():
    data, rng = some_data(40), np.random.default_rng(0)
    samples = iterate_samples(replace(data, targets=np.arange(40)), np.arange(40), 0.2, rng)
    taken = np.zeros((2000, 40), bool)
    for row in taken:
        row[next(samples).targets] = True
    assert np.abs(taken.mean(axis=0) - 0.2).max() < 5 * np.sqrt(0.16 / 2000)
    # A fixed size, or an epoch's order, would make the sizes vary less than by a binomial.
    assert taken.sum(axis=1).var() == pytest.approx(40 * 0.16, rel=0.2)


def test_the_seed_of_the_run_decides_neither_samples_nor_noise():
    first, other = run(seed=5), run(seed=5)
    assert any(not np.array_equal(first.displacement[name], other.displacement[name]) for name in first.displacement)


def test_a_hook_that_mixes_the_examples_of_a_batch_gets_one_at_a_time():
    sizes = []

    def mix(inputs, targets, _rng):
        sizes.append(len(inputs))
        return np.broadcast_to(inputs.mean(axis=0), inputs.shape).copy(), targets

    data, rng = some_data(), np.random.default_rng(0)
    augmented = AugmentedDataset(
        inputs=data.inputs, targets=data.targets, task="t", augment=mix, rng=np.random.default_rng(0)
    )
    sample = next(iterate_samples(augmented, np.arange(20), 0.9, rng))
    assert len(sample) > 10
    assert set(sizes) == {1}
    assert {tuple(row) for row in sample.inputs} <= {tuple(row) for row in data.inputs}


def test_the_account_is_of_the_steps_that_were_made():
    account, spent, plan = open_account(), [], replace(PLAN, privacy=replace(PRIVACY, epsilon=50.0))
    spent += [run(plan, account=account).epsilon for _ in range(2)]
    spent.append(run(plan, account=account, on_iteration=lambda done, _: done == 1).epsilon)
    expected = [compute_epsilon(compute_divergences(8 / 20, 1.0, number), 1e-5) for number in (3, 6, 7)]
    assert spent == pytest.approx(expected)


def test_only_labelled_examples_are_sampled_and_counted():
    is_labelled = np.arange(20) < 16
    found = run(data=replace(some_data(), weights=is_labelled.astype(float), weak=~is_labelled))
    assert found.epsilon == pytest.approx(compute_epsilon(compute_divergences(8 / 16, 1.0, 3), 1e-5))


def test_a_board_finds_the_noise_with_which_the_rounds_fit_and_takes_no_further_part():
    plan = replace(PLAN, privacy=replace(PRIVACY, noise=None, rounds=4))
    account = open_account()
    spent = [run(plan, account=account).epsilon for _ in range(4)]
    assert spent == sorted(spent)
    assert 7.99 < spent[-1] <= 8.0
    with pytest.raises(DataError, match=r"budget of the run is spent: another 3 steps .* privacy\.epsilon is 8$"):
        run(plan, account=account)
    assert make_private_steps(plan, 2000, 3).noise < make_private_steps(plan, 20, 3).noise


def test_the_owners_limit_is_over_all_runs_and_goes_before_the_runs_budget(tmp_path):
    path, epsilons = tmp_path / "account.json", []

    def train_in(number):
        account = RunAccount(account=ExampleAccount.load(path, max_epsilon=9.0), task="digits", run=f"r{number}")
        epsilons.append(run(account=account).epsilon)

    with pytest.raises(DataError, match=r"limit of this board's owner .* over all runs, --max-epsilon is 9"):
        any(map(train_in, range(20)))
    assert len(epsilons) == len(ExampleAccount.load(path).runs) > 1
    spent = ExampleAccount.load(path).tasks["digits"]
    np.testing.assert_allclose(spent, len(epsilons) * compute_divergences(0.4, 1.0, 3))
    assert compute_epsilon(spent, 1e-5) <= 9.0 < compute_epsilon(spent + spent / len(epsilons), 1e-5)


def test_the_account_is_on_disk_before_a_result_is_there(tmp_path):
    path = tmp_path / "account.json"
    found = run(account=open_account(path))
    kept = ExampleAccount.load(path)
    assert kept.compute_epsilon("r", 1e-5) == pytest.approx(found.epsilon)
    blocked = open_account(tmp_path / "away" / "account.json")
    with pytest.raises(Exception, match="away"):
        run(account=blocked)


def test_the_newest_runs_have_accounts_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(example_privacy, "MAX_RUNS", MAX_RUNS)
    account, steps = ExampleAccount(tmp_path / "a.json"), make_private_steps(PLAN, 20, 3)
    for number in range(MAX_RUNS):
        account.charge("digits", f"r{number}", steps, 1)
    account.charge("digits", "r0", steps, 1)
    account.charge("digits", "new", steps, 1)
    kept = ExampleAccount.load(tmp_path / "a.json")
    assert len(kept.runs) == MAX_RUNS
    assert {"r0", "new"} <= {*kept.runs}
    assert "r1" not in kept.runs
    np.testing.assert_allclose(kept.tasks["digits"], (MAX_RUNS + 2) * steps.compute_divergences(1))


def test_an_account_that_could_not_be_read_again_is_not_written(tmp_path):
    path, steps = tmp_path / "a.json", make_private_steps(PLAN, 20, 3)
    ExampleAccount(path).charge("digits", "r", steps, 1)
    with pytest.raises(StoreError, match=r"a\.json would have \d+ bytes, at most 8388608 can be read"):
        ExampleAccount.load(path).charge("digits", "r" * 2**23, steps, 1)
    assert [*ExampleAccount.load(path).runs] == ["r"]


def test_a_delta_that_would_allow_to_publish_an_example_is_refused():
    loose = replace(PLAN, privacy=replace(PRIVACY, delta=0.05))
    assert make_private_steps(loose, 19, 3).noise == 1.0
    with pytest.raises(DataError, match=r"privacy\.delta must be below 1 / 20, .* got 0\.05"):
        run(loose)


def damage(change):
    values = {"v": 1, "orders": [*ORDERS], "tasks": {"digits": [1.0] * len(ORDERS)}, "runs": {}}
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{",
        damage(lambda values: values.update(v=2)),
        damage(lambda values: values.update(orders=[2.0])),
        damage(lambda values: values.update(tasks=[])),
        damage(lambda values: values.update(tasks={"digits": [1.0]})),
        damage(lambda values: values["tasks"]["digits"].__setitem__(0, -1.0)),
        damage(lambda values: values["tasks"]["digits"].__setitem__(0, float("nan"))),
        damage(lambda values: values["tasks"]["digits"].__setitem__(0, 10**400)),
        damage(lambda values: values["tasks"]["digits"].__setitem__(0, "1")),
    ],
)  # fmt: skip
def test_a_damaged_account_is_not_taken_for_an_empty_one(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json cannot be read, so it is not known how much privacy"):
        ExampleAccount.load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"privacy": None}, "algorithm dp-sgd goes with privacy and with nothing else, got 'dp-sgd'"),
        ({"algorithm": "sgd"}, "algorithm dp-sgd goes with privacy and with nothing else, got 'sgd'"),
        ({"privacy": replace(PRIVACY, noise=None)}, "needs noise, or rounds"),
        ({"privacy": replace(PRIVACY, noise=0.0)}, "noise must be a number at least 0.1"),
        ({"privacy": replace(PRIVACY, clip=float("nan"))}, "clip must be"),
        ({"privacy": replace(PRIVACY, delta=1.0)}, "delta must be"),
        ({"privacy": replace(PRIVACY, optimizer="scaffold")}, "a private gradient goes to one of .*got 'scaffold'"),
        ({"privacy": replace(PRIVACY, optimizer="gradient")}, "a private gradient goes to one of .*got 'gradient'"),
        ({"iterations": None, "seconds": 2.0}, "does not go with seconds"),
        ({"head_epochs": 1.0}, "does not go with head_epochs"),
        ({"personal_lambda": 0.1}, "does not go with personal copies"),
        ({"consistency_weight": 1.0, "consistency_threshold": 0.9}, "does not go with consistency_weight"),
    ],
)
def test_a_plan_that_is_not_wholly_private_is_refused(changes, line):
    with pytest.raises(ConfigError, match=line):
        run(replace(PLAN, **changes))


def test_a_private_plan_without_an_account_trains_nothing():
    with pytest.raises(ConfigError, match="nobody keeps one here"):
        train(
            a_learner(), some_data(), PLAN, np.random.default_rng(0), clock=lambda: 0.0,
            on_iteration=lambda *_: False,
        )  # fmt: skip


def test_a_learner_without_gradients_by_example_is_refused_by_the_setting_that_works():
    class OfGraph:
        """A learner of a compiled task, which has the gradient of a batch alone."""

        parameters: ClassVar = {}
        gradients: ClassVar = {}
        read = staticmethod(dict)
        gradient = staticmethod(lambda _: 0.0)

    with pytest.raises(TaskError, match=r'OfGraph has no gradients by example.*run\.backend = "torch"'):
        run(learner=OfGraph())


@pytest.mark.parametrize(
    ("optimizer", "changes"), [("sgd", {"momentum": 0.9}), ("adam", {}), ("prox", {"options": {"mu": 0.1}})]
)
def test_private_gradients_go_to_the_optimiser_of_the_plan(optimizer, changes):
    plan = TrainConfig.from_json(replace(PLAN, privacy=replace(PRIVACY, optimizer=optimizer), **changes).to_json())
    assert plan == replace(PLAN, privacy=replace(PRIVACY, optimizer=optimizer), **changes)
    found = run(replace(plan, keeps_state=True))
    kinds = {"sgd": {"velocity"}, "adam": {"mean", "square"}, "prox": set()}[optimizer]
    assert {name.partition("/")[0] for name in found.algorithm_state} - {"iterations"} == kinds
