"""`edgefl advise`: what settings come to, in a table or as JSON."""

import math
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
BUDGET = {"epsilon": 8, "delta": 1e-5, "rounds": 100, "boards": 1000, "sampling": 0.1}
WORDS = ("advise", "privacy", *(word for name, value in BUDGET.items() for word in (f"--{name}", value)))


def test_the_noise_of_a_budget_and_what_is_spent_on_the_way(run):
    rows = run(*WORDS, "--weights", 7850, "--format", "json").rows
    assert [row["rounds"] for row in rows] == [10, 25, 50, 100]
    spent = [row["epsilon"] for row in rows]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(8.0, abs=0.01)
    assert spent[-1] <= 8.0
    for row in rows:
        assert row["noise_of_mean"] == pytest.approx(row["noise"] / 100)
        assert row["norm_of_noise"] == pytest.approx(row["noise_of_mean"] * math.sqrt(7850))


def test_a_table_without_weights_has_no_length_of_the_noise(run):
    header, *lines = run(*WORDS).out.splitlines()
    assert header.split()[:3] == ["rounds", "noise", "epsilon"]
    assert [line.split()[0] for line in lines] == ["10", "25", "50", "100"]
    assert "nan" not in "".join(lines).lower()
