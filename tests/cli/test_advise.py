"""`edgefl advise`: what settings come to, in a table or as JSON."""

import json
import math
from importlib.util import find_spec

import pytest

from edgefl.core.config import load_run
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


@accounted
def test_correlated_noise_is_found_for_the_limits_of_participation_and_less_of_it_is_left_on_sums(run):
    words = ("advise", "privacy", "--epsilon", 8, "--delta", 1e-5, "--rounds", 100, "--boards", 1000)
    rows = run(*words, "--separation", 10, "--format", "json").rows
    assert rows[-1]["epsilon"] == pytest.approx(8.0, abs=1e-6)
    assert [row["epsilon"] for row in rows] == sorted(row["epsilon"] for row in rows)
    independent = run(*words, "--format", "json").rows
    assert rows[-1]["noise_of_mean"] * 100 < independent[-1]["noise_of_mean"] * 1000 / 4
    assert rows[-1]["noise_of_mean"] < rows[0]["noise_of_mean"] < rows[0]["noise"] / 100
    large = run(*words, "--separation", 10, "--weights", 2**27, "--format", "json").rows
    assert large[-1]["noise"] < rows[-1]["noise"], "its noise has a single band"
    assert large[-1]["noise_of_mean"] > rows[-1]["noise_of_mean"]


@pytest.mark.parametrize(
    ("boards", "words", "line"),
    [
        (5, (), "--boards must be at least --separation = 10, got 5"),
        (1000, ("--participations", 1), "--participations must be at least 10 with 100 rounds of 100 of 1000 boards"),
    ],
)
def test_limits_that_no_run_can_keep_are_refused(refused, boards, words, line):
    budget = ("advise", "privacy", "--epsilon", 8, "--delta", 1e-5, "--rounds", 100, "--boards", boards)
    refused([*budget, "--separation", 10, *words], 2, line)


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


PROFILES = """
[profile.fast]
speed = 0.002
up_bytes_per_s = 200_000
[profile.slow]
speed = 0.0004
up_bytes_per_s = 200_000
"""
RUN_FILE = """
[run]
task = "digits"
rounds = 3
[task]
model = "logistic"
[strategy]
learning_rate = 0.2
[simulation]
devices = 3
profiles = ["fast", "slow"]
profile_file = "profiles.toml"
scheme = "iid"
"""


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "profiles.toml").write_text(PROFILES)
    (path := tmp_path / "run.toml").write_text(RUN_FILE)
    return path


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_advice_on_a_run_file_is_a_table_with_reasons_and_a_file_that_is_not_overwritten(run, run_file, tmp_path):
    out = tmp_path / "advised.toml"
    ran = run("advise", "run", run_file, "--seconds", 400, "--jobs", 2, "--write", out)
    assert ran.code == 0, ran.err
    assert "reaches accuracy >= 0." in ran.out
    assert "not tried: " in ran.out
    assert "joules" not in ran.out  # no board has a power
    written = load_run(out)
    assert written.advice.seconds > 0
    assert f"# edgefl advise run {run_file.name}" in out.read_text()
    refused = run("advise", "run", run_file, "--write", out)
    assert refused.is_one_line
    assert "exists; name another file, or add --force" in refused.err


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_goal_out_of_reach_ends_with_its_exit_code_and_says_so_as_json(run, run_file):
    ran = run(
        "advise", "run", run_file, "--goal", "accuracy >= 0.9999", "--seconds", 300, "--jobs", 2, "--format", "json"
    )
    assert ran.code == 41
    report = json.loads(ran.out)
    assert (report["kind"], report["goal"], report["v"]) == ("advice", "accuracy >= 0.9999", 1)
    assert all(not row["reached"] for row in report["rows"])
    assert report["sentences"][0].startswith(("none of", "no simulation"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--goal", "rmse <= 3"), "--goal: the task declares no metric 'rmse'"),
        (("--budget", "time"), "--budget must be time, bytes or energy, =, and a number above 0, such as time=600"),
        (("--budget", "money=3"), "--budget must be time, bytes or energy"),
        (("--budget", "time=nan"), "--budget must be time, bytes or energy"),
        (("--budget", "time=3", "--budget", "time=4"), "--budget time is given twice"),
        (("--minimise", "energy"), "energy is not known of 3 boards, such as device-01: give its profile power_w"),
        (("--measured", "--devices", 3), "--measured says which boards there are"),
        (("--profile", "nonesuch"), "no profile 'nonesuch'"),
    ],
)
def test_what_makes_no_sense_is_one_line(run, run_file, words, line):
    ran = run("advise", "run", run_file, *words)
    assert ran.is_one_line, ran.err
    assert line in ran.err
    assert ran.code != 41
