"""What an advice takes from a history: how wrong earlier ones were, and the factors that follow."""

from types import SimpleNamespace

import pytest

from edgefl.client.advice import compute_corrections, read_errors


class FakeSource:
    """A history of runs; each took 90 s and 3,000 bytes in its closed rounds."""

    def __init__(self, *runs, goal=None):
        self.runs, self.goal = {row["run_id"]: (row, advice) for row, advice in runs}, goal

    def read_rows(self, kind, run=None):
        if kind == "runs":
            return [row for row, _ in self.runs.values()]
        closed = [
            {"started_at": 100.0 + 30 * number, "closed_at": 130.0 + 30 * number, "bytes_up": 400, "bytes_down": 600}
            for number in range(3)
        ]
        return [*closed, {"started_at": 190.0, "closed_at": None, "bytes_up": 9, "bytes_down": 9}]

    def find_run(self, run):
        config = {"run": {"accuracy": self.goal}}
        return SimpleNamespace(config={**config, "advice": self.runs[run][1]} if self.runs[run][1] else config)


def make_run(number, advice, *, status="finished", task="digits", energy_j=None, reason="rounds reached 3"):
    row = {"run_id": f"r{number}", "name": "advised", "task": task, "strategy": "esync", "status": status}
    return {**row, "energy_j": energy_j, "reason": reason}, advice


def test_errors_are_of_the_closed_rounds_of_finished_runs_with_a_prediction():
    source = FakeSource(
        make_run(1, {"seconds": 100.0, "bytes_up": 1000, "bytes_down": 1000, "joules": 50.0}, energy_j=60.0),
        make_run(2, None),
        make_run(3, {"seconds": 100.0}, status="failed"),
        make_run(4, {"seconds": 45.0}),
    )
    first, second = read_errors(source)
    assert (first["run_id"], second["run_id"]) == ("r1", "r4")
    assert first["seconds_error"] == pytest.approx(-0.1)
    assert first["bytes_error"] == pytest.approx(0.5)
    assert first["joules_error"] == pytest.approx(0.2)
    assert (second["seconds_error"], second["bytes_error"]) == (pytest.approx(1.0), None)


def test_three_runs_of_the_task_correct_the_next_by_their_median_within_bounds():
    predictions = [100.0, 60.0, 10.0]
    rows = read_errors(FakeSource(*(make_run(n, {"seconds": seconds}) for n, seconds in enumerate(predictions))))
    assert compute_corrections(rows[:2], "digits") == {}
    assert compute_corrections(rows, "mnist") == {}
    assert compute_corrections(rows, "digits") == {"seconds": pytest.approx(1.5)}
    assert compute_corrections([rows[2]] * 3, "digits") == {"seconds": 4.0}


def test_corrections_of_corrected_advice_come_to_the_same_factor_again():
    # Runs take 90 s and the simulation says 60: the factor is 1.5 however often figures with it are compared.
    runs, factor = [], 1.0
    for number in range(12):
        advice = {"seconds": 60.0 * factor} | ({} if factor == 1.0 else {"seconds_factor": factor})
        runs.append(make_run(number, advice))
        factor = compute_corrections(read_errors(FakeSource(*runs)), "digits").get("seconds", 1.0)
        assert factor == (pytest.approx(1.5) if number >= 2 else 1.0)
    assert read_errors(FakeSource(*runs))[-1]["seconds_error"] == pytest.approx(0.0)


def test_runs_that_ended_by_a_limit_are_no_errors():
    runs = [
        make_run(1, {"seconds": 60.0}, reason="accuracy reached 0.81"),
        make_run(2, {"seconds": 60.0}, reason="rounds reached 3"),
    ]
    assert [row["run_id"] for row in read_errors(FakeSource(*runs, goal=0.8))] == ["r1"]
    short = [make_run(1, {"seconds": 60.0, "rounds": 3}), make_run(2, {"seconds": 60.0, "rounds": 4})]
    assert [row["run_id"] for row in read_errors(FakeSource(*short))] == ["r1"]
