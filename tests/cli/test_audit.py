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


@pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
def test_a_promise_that_does_not_hold_has_an_exit_code_of_its_own(run, write, monkeypatch):
    file = write(PLAIN + PRIVATE)
    assert run("audit", "privacy", file, *WORDS).code == 0
    monkeypatch.setattr(PrivateMean, "update_noise", property(lambda _: 0.0))
    broken = run("audit", "privacy", file, *WORDS)
    assert broken.code == 50
    assert "promised is 0.5: the promise does not hold" in broken.err
    assert "epsilon promised" in broken.out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--shards", "x", "--devices", 2), 2, "--shards says who has what"),
        (("--devices", 4, "--canaries", 20000), 3, "20000 canaries are too many for a model of"),
    ],
)
def test_what_makes_no_sense_is_one_line(refused, write, options, code, words):
    refused(("audit", "privacy", write(PLAIN), *options), code, words)
