"""`edgefl advise`: what settings come to, in a table or as JSON."""

import math
from importlib.util import find_spec

import pytest

from edgefl.core.types import ExamplePrivacy, TrainConfig
from edgefl.tasks.local_algorithms.example_privacy import make_private_steps

accounted = pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
BUDGET = {"epsilon": 8, "delta": 1e-5, "rounds": 100, "boards": 1000, "sampling": 0.1}
WORDS = ("advise", "privacy", *(word for name, value in BUDGET.items() for word in (f"--{name}", value)))


@accounted
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


@accounted
def test_a_table_without_weights_has_no_length_of_the_noise(run):
    header, *lines = run(*WORDS).out.splitlines()
    assert header.split()[:3] == ["rounds", "noise", "epsilon"]
    assert [line.split()[0] for line in lines] == ["10", "25", "50", "100"]
    assert "nan" not in "".join(lines).lower()


OF_EXAMPLES = ("advise", "privacy", "--unit", "example", "--epsilon", 4, "--delta", 1e-5, "--rounds", 20)


def test_the_noise_of_examples_is_what_a_board_finds(run):
    rows = run(*OF_EXAMPLES, "--examples", 640, "--batch", 32, "--steps", 5, "--format", "json").rows
    plan = TrainConfig(
        algorithm="dp-sgd",
        iterations=5,
        batch_size=32,
        privacy=ExamplePrivacy(optimizer="sgd", clip=1.0, epsilon=4.0, delta=1e-5, rounds=20),
    )
    assert {row["noise"] for row in rows} == {make_private_steps(plan, 640, 5).noise}
    assert [row["rounds"] for row in rows] == [2, 5, 10, 20]
    assert 3.99 < rows[-1]["epsilon"] <= 4.0
    assert rows[0]["noise_of_mean"] == rows[0]["noise"] / 32
    an_epoch = run(*OF_EXAMPLES, "--examples", 640, "--batch", 32, "--format", "json").rows
    assert an_epoch[0]["noise"] > rows[0]["noise"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--examples", 640), "--batch is missing: it is needed with --unit example"),
        (("--examples", 640, "--batch", 32, "--boards", 3), "--boards means nothing with --unit example"),
    ],
)
def test_options_of_the_other_unit_are_refused(refused, words, line):
    refused([*OF_EXAMPLES, *words], 2, line)
    refused(["advise", "privacy", *OF_EXAMPLES[4:]], 2, "--boards is missing: it is needed with --unit device")
