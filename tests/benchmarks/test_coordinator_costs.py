from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture(scope="module")
def parts(harness):
    return SimpleNamespace(**{name: harness(name) for name in ("cost_rows", "fold_costs", "adacomp_costs")})


@pytest.mark.parametrize(
    ("value", "more_is_better", "is_met"),
    [(1.6, False, True), (1.7, False, False), (1.6, True, True), (1.5, True, False)],
)
def test_an_aim_is_a_bound_from_above_or_from_below(parts, value, more_is_better, is_met):
    row = parts.cost_rows.Row(part="p", what="w", value=value, unit="times", aim=1.6, more_is_better=more_is_better)
    assert row.is_met is is_met
    assert ("MISSED" in str(row)) is not is_met


def test_a_ratio_is_that_of_each_turn_and_not_that_of_the_medians(parts):
    assert parts.cost_rows.ratio([2.0, 40.0, 60.0], [1.0, 20.0, 30.0]) == 2.0
    assert parts.cost_rows.ratio([1.0, 2.0, 9.0], [3.0, 1.0, 3.0]) == 2.0


@pytest.mark.extended
def test_rounds_of_ten_devices_take_three_models_of_memory(parts):
    assert sum(spec.size for spec in parts.fold_costs.resnet_shapes(11_000_000)) == 11_000_000
    (row,) = parts.fold_costs.memory_rows(11_000_000, [10])
    assert row.is_met, str(row)
    assert row.value > 2.5  # the model, the sum and an update, or nothing was looked at


def test_the_window_and_pythons_loops_count_the_same_touches(parts):
    fleet = parts.adacomp_costs.Fleet()
    fleet.answer(3)
    fast, slow = (count(fleet) for count in (parts.adacomp_costs._window_counts, parts.adacomp_costs._python_counts))
    assert all(np.array_equal(one, other) for one, other in zip(fast, slow, strict=True))
    assert any(np.max(counts) > 1 for counts in fast)


@pytest.mark.parametrize(
    ("benchmark", "words", "told"),
    [
        ("coordinator_costs.py", "--parts fold,fald", "there is no part 'fald'"),
        ("round_overhead.py", "--rounds 2", "must be a whole number of 3 or more, got '2'"),
        ("round_overhead.py", "--train-s nan", "must be a number of seconds above 0, got 'nan'"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_in_one_line(refused, benchmark, words, told):
    assert told in refused(benchmark, *words.split())
