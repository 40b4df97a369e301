"""What goes with `[privacy]` and what does not, each said in one line before any board is asked."""

import logging
import sys
from importlib.util import find_spec

import pytest

import edgefl
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, MissingPackageError
from edgefl.core.types import TensorKind, TensorSpec
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.privacy import explain_privacy, get_private_mean, make_private_mean
from edgefl.engine.privacy_accounting import compute_epsilon, compute_gaussian_epsilon
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store

IS_ACCOUNTED = find_spec("dp_accounting") is not None


@pytest.fixture
def accounted():
    if not IS_ACCOUNTED:
        pytest.skip("dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt")


def tables(**sections):
    base = {
        "run": {"task": "digits", "rounds": 5},
        "task": {"model": "logistic"},
        "guard": {"enabled": False},
        "privacy": {"unit": "device", "epsilon": 8.0, "delta": 1e-3, "clip": 1.0, "boards": 10},
        "simulation": {"workers": 0},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def build(**sections):
    return build_run(parse_run(tables(**sections)), "r")


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"strategy": {"name": "fedbuff"}}, "strategy.name must be one of fedavg, fedprox, ssgd with .*'fedbuff'"),
        ({"strategy": {"name": "coordinate-median"}}, "strategy.name must be one of .*'coordinate-median'"),
        ({"strategy": {"name": "fednova"}}, "strategy.name must be one of .*'fednova'"),
        ({"strategy": {"name": "dsgd"}}, "strategy.name must be one of .*'dsgd'"),
        ({"strategy": {"name": "statistics"}}, "strategy.name must be one of .*'statistics'"),
        ({"strategy": {"double_buffering": True}}, "strategy.double_buffering must be false with"),
        ({"guard": {"enabled": True}}, "guard.enabled must be false with .* it judges an update by those of others"),
        ({"guard": {"max_norm": 1.0}}, "guard.max_norm must be left out"),
        ({"run": {"min_updates": 3}}, "run.min_updates must be left out"),
        ({"run": {"on_divergence": "halve"}}, "run.on_divergence must be 'warn'"),
        ({"run": {"accuracy": 0.9}}, "run.evaluate_on must be coordinator or evaluator .*'auto'"),
        ({"devices": {"fraction": 0.5}}, "devices.fraction must be left out"),
        ({"compression": {"up": "auto"}}, "compression.up must be one codec"),
        ({"aggregation": {"collective": "ring"}}, "aggregation.collective must be 'coordinator'"),
        ({"split": {"after": "fc1"}}, "split.after must be left out"),
        ({"task": {"normalise": "fleet"}}, "task.normalise must be left out .*'fleet'"),
        ({"task": {"normalise": "run:scales"}}, "task.normalise must be left out .*'run:scales'"),
        ({"run": {"until": "accuracy >= 0.9"}}, "run.evaluate_on must be coordinator or evaluator .*'auto'"),
        ({"run": {"epochs": 3}}, "run.epochs must be left out"),
        ({"run": {"updates": 3}}, "run.updates must be left out"),
        ({"run": {"bytes": 3}}, "run.bytes must be left out"),
        ({"job": {"name": "sum"}, "run": {"task": "digits"}}, "privacy means nothing beside job"),
    ],
)  # fmt: skip
def test_what_gives_a_device_more_than_one_bounded_part_of_a_sum_is_refused(sections, line):
    with pytest.raises(ConfigError, match=line):
        build(**sections)


@pytest.mark.parametrize(
    ("privacy", "line"),
    [
        ({"boards": None}, "privacy.boards is missing"),
        ({"sampling": 0.1, "boards": None}, "privacy.boards is missing"),
        ({"noise": 0.05}, "privacy.noise = 0.05 passes epsilon = 8 in the first round"),
        ({"clip": "adaptive"}, "needs .* boards in a round at a noise multiplier"),
        (
            {"clip": "adaptive", "noise": 2.0, "boards": 36},
            "needs 37 boards in a round at a noise multiplier of 2,",
        ),
    ],
)
def test_a_setting_without_which_the_sum_has_no_bound_is_asked_for(accounted, privacy, line):
    found = tables()["privacy"] | privacy
    with pytest.raises(ConfigError, match=line):
        build_run(parse_run({**tables(), "privacy": {name: value for name, value in found.items() if value}}), "r")


CORRELATED = {"mechanism": "dp-ftrl", "separation": 2}


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"privacy": {"sampling": 0.5}}, 'privacy.sampling must be left out with mechanism = "dp-ftrl", got 0.5'),
        ({"privacy": {"clip": "adaptive"}}, 'privacy.clip must be a number with mechanism = "dp-ftrl"'),
        ({"privacy": {"separation": None}}, "privacy.separation is missing"),
        (
            {"privacy": {"separation": None, "sampling": 0.5, "clip": "adaptive"}},
            "privacy.sampling must.*privacy.clip must.*privacy.separation is missing",
        ),
        ({"devices": {}}, 'devices.count is missing: privacy.mechanism = "dp-ftrl"'),
        ({"privacy": {"boards": 9}}, r"privacy.boards must be at least privacy.separation x devices.count = 10"),
        ({"privacy": {"participations": 2}}, "privacy.participations must be at least 3 with 5 rounds of 5 of 10"),
        ({"privacy": {"mechanism": "gaussian"}}, "privacy.separation must be left out with mechanism"),
        ({"privacy": {"unit": "example", "boards": None}}, "privacy.mechanism must be left out with unit"),
        ({"strategy": {"name": "fedbuff"}}, "strategy.name must be one of"),
    ],
)
def test_limits_of_participation_go_with_what_keeps_them(accounted, sections, line):
    base = {"privacy": CORRELATED, "devices": {"count": 5}}
    whole = tables(**{**base, **sections, "privacy": {**CORRELATED, **sections.get("privacy", {})}})
    whole["privacy"] = {name: value for name, value in whole["privacy"].items() if value is not None}
    with pytest.raises(ConfigError, match=line):
        build_run(parse_run(whole), "r")


def test_the_noise_of_limits_is_that_of_a_single_gaussian_and_the_run_stays_within(accounted, tmp_path):
    mean = get_private_mean(build(privacy=CORRELATED, devices={"count": 5}).strategy)
    limits = mean.correlation.limits
    assert (limits.separation, limits.participations, mean.correlation.bands) == (2, 5, 2)
    # Of two bands a column has the norm √(1 + 1/4); rounds 1, 3 and 5 of 5, the last with one row behind it.
    sensitivity = (2 * 1.25 + 1) ** 0.5
    assert compute_gaussian_epsilon(mean.noise_multiplier / sensitivity, 1e-3) == pytest.approx(8.0, abs=1e-6)
    result, rounds = simulate(tmp_path, devices=10, privacy=CORRELATED, devices_={"count": 5})
    assert result.reason == "rounds reached 5"
    spent = [row["facts"]["epsilon"] for row in rounds]
    expected = [
        compute_gaussian_epsilon(mean.noise_multiplier / square**0.5, 1e-3) for square in (1, 1.25, 2.25, 2.5, 3.5)
    ]
    assert spent == pytest.approx(expected, abs=1e-6)
    assert [row["num_updates"] for row in rounds] == [5] * 5


def test_each_round_waits_for_as_many_as_it_asks_where_devices_min_does_not_say_how_many(accounted):
    needed = [
        build(privacy=CORRELATED, devices=devices).strategy.rules.min_devices
        for devices in ({"count": 5}, {"count": 5, "min": 4})
    ]
    assert needed == [5, 4]


def test_a_simulated_fleet_that_is_too_small_for_the_limits_is_refused(accounted, tmp_path):
    few = {**CORRELATED, "separation": 5, "boards": 10}
    with pytest.raises(ConfigError, match=r"the number of devices must be at least .* x devices.count = 10, got 6"):
        simulate(tmp_path, devices=6, privacy=few, devices_={"count": 2})


def test_limits_with_a_noise_of_ones_own_end_at_the_budget(accounted, tmp_path):
    result, rounds = simulate(
        tmp_path, devices=10, privacy={**CORRELATED, "noise": 1.0}, devices_={"count": 5}, run={"rounds": 50}
    )
    assert result.reason == "privacy budget"
    assert rounds[-1]["facts"]["epsilon"] <= 8.0
    mean = get_private_mean(
        build(privacy={**CORRELATED, "noise": 1.0}, devices={"count": 5}, run={"rounds": 50}).strategy
    )
    assert mean.compute_epsilon(len(rounds) + 1, 0) > 8.0


def test_a_sample_has_no_fixed_size(accounted):
    with pytest.raises(ConfigError, match=r"devices.count must be left out with privacy.sampling, got 3"):
        build(privacy={"sampling": 0.1}, devices={"count": 3})


def test_noise_or_rounds_must_be_given(accounted):
    with pytest.raises(ConfigError, match=r"privacy\.noise is missing"):
        build_run(parse_run({**tables(), "run": {"task": "digits", "seconds": 60}}), "r")


@pytest.mark.parametrize(
    ("privacy", "line"),
    [
        ({"epsilon": 8.0}, "privacy.unit is missing"),
        ({"unit": "device", "delta": 1e-5}, "privacy.epsilon is missing"),
        ({"unit": "device", "epsilon": 1.0}, "privacy.delta is missing"),
        ({"unit": "board", "epsilon": 1.0, "delta": 1e-5}, "privacy.unit"),
        ({"unit": "device", "epsilon": float("nan"), "delta": 1e-5}, "privacy.epsilon"),
    ],
)
def test_half_a_table_is_refused(privacy, line):
    with pytest.raises(ConfigError, match=line):
        parse_run({"run": {"task": "digits"}, "privacy": privacy})


def test_a_run_file_comes_back_as_it_was_and_others_have_no_table():
    config = parse_run(tables(privacy={"sampling": 0.25}))
    assert parse_run(config.to_json()) == config
    assert "privacy" not in parse_run({"run": {"task": "digits"}}).to_json()


def test_without_the_package_a_private_run_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    compute_epsilon.cache_clear()
    with pytest.raises(MissingPackageError, match=r"privacy needs dp-accounting: .*\[privacy\]"):
        build(privacy={"noise": 1.0})


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (TensorSpec(name="mean", shape=(3,), kind=TensorKind.BUFFER), "a buffer"),
        (TensorSpec(name="mean", shape=(3,), dtype="float16"), "float16"),
        (TensorSpec(name="mean", shape=(3,), dtype="int64"), "int64"),
    ],
)
def test_a_model_with_tensors_that_noise_does_not_fit_is_refused(spec, found):
    with pytest.raises(ConfigError, match=f"float32 or float64 parameters alone: tensor 'mean' is {found}"):
        make_private_mean(parse_run(tables()), (TensorSpec(name="w", shape=(2,)), spec))


def test_the_denominator_is_a_setting(accounted):
    for sections, expected in [
        ({"privacy": {"boards": 40}}, 40.0),
        ({"privacy": {"boards": 40, "sampling": 0.25}}, 10.0),
        ({"devices": {"count": 4}}, 4.0),
    ]:
        assert get_private_mean(build(**sections).strategy).num_expected == expected


def test_a_dry_run_says_what_is_promised_and_what_is_not(accounted):
    run = build(privacy={"noise": 4.0})
    line = explain_privacy(run.config, get_private_mean(run.strategy))
    assert "epsilon 8 at delta 0.001" in line
    assert "without amplification" in line
    assert "metrics, counts, bytes, times and logs are not covered" in line
    assert explain_privacy(parse_run({"run": {"task": "digits"}}), None) == ""
    adaptive = build(privacy={"noise": 4.0, "clip": "adaptive", "boards": 74})
    line = explain_privacy(adaptive.config, get_private_mean(adaptive.strategy))
    assert "noise multiplier 4 (4.754 on updates)" in line
    correlated = build(privacy={**CORRELATED, "participations": 3}, devices={"count": 5}, run={"rounds": 6})
    line = explain_privacy(correlated.config, get_private_mean(correlated.strategy))
    assert "for as many rounds as boards may take part in" in line
    assert "devices take part at most 3 times, 2 rounds apart at least, with noise that is correlated over 2" in line


def simulate(tmp_path, devices=6, devices_=None, **sections):
    if devices_ is not None:
        sections["devices"] = devices_
    result = edgefl.simulate(tables(**sections), devices=devices, scheme="iid", root=tmp_path)
    with Store.open(tmp_path / "edgefl.db", read_only=True) as store:
        return result, list(read_history(store, "rounds", run=result.run_id))


def test_epsilon_stands_in_the_history_and_ends_at_the_budget(accounted, tmp_path):
    result, rounds = simulate(tmp_path, privacy={"boards": 6})
    spent = [row["facts"]["epsilon"] for row in rounds]
    assert (result.reason, len(spent)) == ("rounds reached 5", 5)
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(8.0, abs=1e-2)
    assert spent[-1] <= 8.0


def test_a_run_ends_before_its_budget_would_be_passed(accounted, tmp_path):
    result, rounds = simulate(tmp_path, run={"rounds": 50}, privacy={"noise": 3.0, "boards": 6})
    assert (result.status, result.reason) == ("finished", "privacy budget")
    last = len(rounds)
    assert rounds[-1]["facts"]["epsilon"] <= 8.0 < compute_epsilon(3.0, 1e-3, None, last + 1, 0)


def test_sampled_rounds_have_some_of_the_boards(accounted, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        _, rounds = simulate(tmp_path, run={"rounds": 12}, privacy={"sampling": 0.5, "boards": 6})
    numbers = [row["num_updates"] for row in rounds]
    assert len(numbers) == 12
    assert len(set(numbers)) > 1
    assert "take part with probability 0.5" in caplog.text


def example_tables(**sections):
    """Tables of a run with private examples; None leaves a setting out."""
    base = {"unit": "example", "boards": None}
    whole = tables(guard={"enabled": True}, **{**sections, "privacy": {**base, **sections.get("privacy", {})}})
    return {name: {key: item for key, item in table.items() if item is not None} for name, table in whole.items()}


def build_example(**sections):
    return build_run(parse_run(example_tables(**sections)), "r")


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"strategy": {"name": "scaffold"}}, "strategy.name must be one of fedavg, .*'scaffold'"),
        ({"strategy": {"name": "ssgd"}}, "strategy.name must be one of fedavg, .*'ssgd'"),
        ({"strategy": {"name": "ecl-isvr"}}, "strategy.name must be one of fedavg, .*'ecl-isvr'"),
        ({"strategy": {"name": "ifca"}}, "strategy.name must be one of fedavg, .*'ifca'"),
        ({"strategy": {"optimizer": "scaffold"}}, "a private gradient goes to one of .*'scaffold'"),
        ({"strategy": {"optimizer": "dp-sgd"}}, "a?lgorithm dp-sgd goes with privacy and with nothing else"),
        ({"strategy": {"optimizer": "mine"}}, "a private gradient goes to one of .*'mine'"),
        ({"strategy": {"seconds": 2.0}}, "does not go with seconds"),
        ({"strategy": {"personal_lambda": 0.5}}, "does not go with personal copies"),
        ({"strategy": {"head_epochs": 1.0}}, "does not go with head_epochs"),
        ({"aggregation": {"collective": "ring"}}, "aggregation.collective must be 'coordinator'"),
        ({"split": {"after": "fc1"}}, "split.after must be left out"),
        ({"adapt": {"method": "lora"}}, "adapt.method must be 'none'"),
        ({"run": {"on_divergence": "stop"}}, "run.on_divergence must be .warn."),
        ({"selection": {"rule": "utility"}, "devices": {"count": 2}}, "selection.rule must be .uniform."),
        ({"strategy": {"micro_batch_size": 8}}, "does not go with micro_batch_size"),
        ({"strategy": {"max_gradient_norm": 1.0}}, "does not go with max_gradient_norm"),
        (
            {"task": {"model": "cnn"}, "run": {"task": "mnist"}, "strategy": {"precision": "bfloat16"}},
            "with precision",
        ),
        ({"run": {"backend": "onnx"}}, 'run.backend must be "torch" .*got "onnx"'),
        ({"run": {"rounds": None, "seconds": 60.0}}, "privacy.noise is missing: give it, or run.rounds"),
        ({"privacy": {"noise": 0.05}}, "privacy.noise must be a number at least 0.1"),
        ({"privacy": {"clip": "adaptive"}}, "privacy.clip must be a number with unit"),
        ({"privacy": {"sampling": 0.5}}, "privacy.sampling must be left out with unit"),
        ({"privacy": {"boards": 5}}, "privacy.boards must be left out with unit"),
        ({"privacy": {"delta": None}}, "privacy.delta is missing"),
    ],
)
def test_private_examples_go_with_nothing_that_uses_them_otherwise(sections, line):
    with pytest.raises(ConfigError, match=line):
        build_example(**sections)


@pytest.mark.parametrize(
    ("name", "optimizer"), [("fedavg", "sgd"), ("fedprox", "prox"), ("fednova", "sgd"), ("krum", "sgd")]
)
def test_boards_are_told_to_train_privately_by_a_name_that_older_ones_refuse(name, optimizer):
    built = build_example(strategy={"name": name})
    plan = built.strategy.plan
    assert (plan.algorithm, plan.privacy.optimizer, plan.privacy.rounds) == ("dp-sgd", optimizer, 5)
    assert (plan.privacy.epsilon, plan.privacy.delta, plan.privacy.clip, plan.privacy.noise) == (8.0, 1e-3, 1.0, None)
    assert built.header["privacy"] == "example"
    assert "privacy" not in build_run(parse_run({**tables(), "privacy": {}}), "r").header


def test_what_private_examples_are_promised_is_said_in_one_line():
    built = build_example()
    line = explain_privacy(built.config, get_private_mean(built.strategy))
    assert "each example has differential privacy on its board, against the coordinator, too: epsilon 8 at" in line
    assert "each board takes the least noise with which 5 rounds of its examples fit" in line
    line = explain_privacy(build_example(privacy={"noise": 2.0}).config, None)
    assert "noise multiplier 2, and a board takes part as long as its budget lasts" in line


def test_a_run_with_private_examples_shows_the_most_that_a_board_has_spent(tmp_path):
    result = edgefl.simulate(example_tables(simulation={"scheme": "dirichlet:0.5"}), devices=3, root=tmp_path)
    with Store.open(tmp_path / "edgefl.db", read_only=True) as store:
        spent = [row["facts"]["epsilon"] for row in read_history(store, "rounds", run=result.run_id)]
        rows = read_history(store, "updates", run=result.run_id)
        reported = [row["metrics"]["epsilon"] for row in rows]
    assert len(spent) == 5
    assert spent == sorted(spent)
    assert max(reported) == spent[-1]
    assert 7.9 < spent[-1] <= 8.0
