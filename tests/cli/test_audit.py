"""`edgefl audit privacy`: a table, and an exit code where a promise does not hold."""

from importlib.util import find_spec

import pytest

from edgefl.strategies.private_mean import PrivateMean

PLAIN = """
[run]
task = "digits"
rounds = 2
evaluate_on = "none"
[strategy]
name = "fedavg"
iterations = 2
[guard]
enabled = false
"""
PRIVATE = """
[privacy]
unit = "device"
epsilon = 0.5
delta = 1e-5
clip = 1.0
boards = 4
"""
WORDS = ("--devices", 4, "--canaries", 40)


@pytest.fixture
def write(tmp_path):
    def call(text):
        (tmp_path / "run.toml").write_text(text)
        return tmp_path / "run.toml"

    return call


def test_a_run_without_privacy_is_audited_by_devices_and_promises_nothing(run, write):
    ran = run("audit", "privacy", write(PLAIN), *WORDS, "--format", "json")
    (row,) = ran.rows
    assert ran.code == 0
    assert (row["unit"], row["canaries"], row["epsilon_promised"], row["confidence"]) == ("device", 40, None, 0.95)
    assert row["epsilon_lower"] > 1.0


def test_inversion_and_property_inference_have_tables_of_their_own(run, write):
    words = ("--devices", 4, "--attack")
    ran = run("audit", "privacy", write(PLAIN), *words, "inversion", "--trials", 2, "--format", "json")
    assert ran.code == 0
    plain, models = ran.rows
    assert (plain["settings"], plain["seen_by"], plain["recovered"]) == ("plain", "coordinator", 1.0)
    assert (models["seen_by"], models["boards"], models["examples"]) == ("models", 4, 1)
    words = (*words, "property", "--examples", 20, "--trials", 20, "--class", 3, "--share", 0.5)
    ran = run("audit", "privacy", write(PLAIN), *words)
    assert ran.code == 0
    assert "share 0.5 of class 3, or none" in ran.out
    assert run("audit", "privacy", write(PLAIN), *words, "--format", "json").rows[0]["accuracy"] > 0.8


@pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
def test_a_promise_that_does_not_hold_has_an_exit_code_of_its_own(run, write, monkeypatch):
    file = write(PLAIN + PRIVATE)
    # The noise is the system's: at the default confidence an audit may err once in twenty times.
    assert run("audit", "privacy", file, *WORDS, "--confidence", 0.999999).code == 0
    monkeypatch.setattr(PrivateMean, "update_noise", property(lambda _: 0.0))
    broken = run("audit", "privacy", file, *WORDS)
    assert broken.code == 50
    assert "promised is 0.5: the promise does not hold" in broken.err
    assert "epsilon promised" in broken.out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--shards", "x", "--devices", 2), 2, "--shards says who has what"),
        (
            ("--attack", "inversion", "--shadows", 4),
            2,
            "--shadows goes with --attack canaries, got --attack inversion",
        ),
        (("--attack", "inversion", "--class", 1), 2, "--class goes with --attack property, got --attack inversion"),
        (("--trials", 10), 2, "--trials goes with --attack inversion or property, got --attack canaries"),
        (("--attack", "inversion", "--confidence", 0.9), 2, "--confidence goes with --attack canaries or property"),
        (("--attack", "inversion", "--examples", 9, "--devices", 4), 3, "is of 1 to 8 examples, got 9"),
        (("--devices", 4, "--canaries", 20000), 3, "20000 canaries are too many for a model of"),
    ],
)
def test_what_makes_no_sense_is_one_line(refused, write, options, code, words):
    refused(("audit", "privacy", write(PLAIN), *options), code, words)
