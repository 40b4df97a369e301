"""`edgefl run` against a real fleet of two devices."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from dataclasses import dataclass

import apart_strategy
import pytest

from edgefl.cli.run import COLUMNS
from edgefl.local_fleet import LocalFleet
from edgefl.local_run import cut_devices

BASE = {"task": "digits", "evaluate_on": "coordinator"}


@dataclass
class Ended:
    code: int
    out: str
    err: str

    def rows(self):
        return list(json.loads(self.out)["rows"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    cut = cut_devices("digits", "iid", 2, root / "shards", None, 7)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(apart_strategy.TESTS), prepend=":")
        with LocalFleet(root=root, devices=cut.devices, test_shards=cut.test_shards) as running:
            yield running


@pytest.fixture
def edgefl(fleet):
    def call(*words):
        process = fleet.popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=100)
        return Ended(process.returncode, out.decode(), err.decode())

    return call


@pytest.fixture
def run_file(tmp_path):
    def write(name="run", min_devices=2, **run):
        lines = [f"{key} = {json.dumps(value)}" for key, value in (BASE | {"name": name} | run).items()]
        path = tmp_path / f"{name}.toml"
        path.write_text("\n".join(["[run]", *lines, "[devices]", f"min = {min_devices}"]) + "\n")
        return path

    return write


def test_submit_prints_the_id_and_watch_stays_to_the_end(edgefl, run_file, fleet):
    ended = edgefl("run", "submit", run_file("first", rounds=3), "--watch")
    assert ended.code == 0
    run_id = ended.out.strip()
    assert "first finished: round 3 of 3, accuracy 0." in ended.err
    shown = edgefl("run", "show", run_id, "--format", "json").rows()[0]
    assert (shown["status"], shown["rounds"], shown["reason"]) == ("finished", 3, "rounds reached 3")
    assert shown["config"]["run"]["rounds"] == 3
    assert fleet.model_file(fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["model"]).stat().st_size > 19_000


def test_show_names_every_setting(edgefl, run_file):
    edgefl("run", "submit", run_file("shown", rounds=1), "--watch")
    table = edgefl("run", "show", "shown").out
    assert "run.evaluate_on" in table
    assert "strategy.name" in table


def test_runs_wait_for_each_other_and_are_listed_oldest_first(edgefl, run_file, fleet):
    first = edgefl("run", "submit", run_file("queue-1", rounds=20)).out.strip()
    second = edgefl("run", "submit", run_file("queue-2", rounds=1)).out.strip()
    rows = {row["run_id"]: row for row in edgefl("run", "list", "--format", "json").rows()}
    assert list(rows)[-2:] == [first, second]
    ended = fleet.wait_run(second)
    assert fleet.wait_run(first)["finished_at"] <= ended["started_at"]
    assert ended["status"] == "finished"


def test_stop_ends_a_run_after_what_is_in_flight_and_keeps_its_model(edgefl, run_file, fleet):
    run_id = edgefl("run", "submit", run_file("endless", rounds=1_000_000)).out.strip()
    while len(fleet.history("rounds", run=run_id)) < 3:
        threading.Event().wait(0.05)
    assert edgefl("run", "stop", run_id).out == f"{run_id} stopping\n"
    ended = fleet.wait_run(run_id)
    assert (ended["status"], ended["reason"]) == ("stopped", "stopped by the operator")
    assert fleet.model_file(ended["model"]).exists()
    rows = fleet.history("updates", run=run_id, limit=10)
    assert all(row["outcome"] is not None for row in rows), "nothing is left open"
    again = edgefl("run", "stop", run_id)
    assert again.code == 2
    assert "is stopped already" in again.err


def test_stop_takes_a_waiting_run_out_of_the_queue(edgefl, run_file, fleet):
    first = edgefl("run", "submit", run_file("blocks", rounds=1_000_000, min_devices=50)).out.strip()
    second = edgefl("run", "submit", run_file("waits", rounds=1)).out.strip()
    assert edgefl("run", "stop", second).out == f"{second} stopped\n"
    assert edgefl("run", "stop", first).code == 0
    assert fleet.wait_run(first)["status"] == "stopped"
    assert fleet.history("rounds", run=second) == []
    assert fleet.operator().get(f"/edgefl/v1/runs/{second}")["started_at"] is None


@pytest.mark.parametrize(
    ("rule", "value", "reason"),
    [
        ("updates", 6, "updates reached 6"),
        ("bytes", 200_000, "bytes reached 200000"),
        ("accuracy", 0.8, "accuracy reached 0.8"),
        ("seconds", 0.5, "seconds reached 0.5"),
    ],
)
def test_a_run_ends_by_each_stop_rule(edgefl, run_file, fleet, rule, value, reason):
    run_id = edgefl("run", "submit", run_file(rule, **{rule: value})).out.strip()
    ended = fleet.wait_run(run_id)
    assert (ended["status"], ended["reason"]) == ("finished", reason)
    updates, rounds = fleet.history("updates", run=run_id), fleet.history("rounds", run=run_id)
    if rule == "updates":
        assert len([row for row in updates if row["outcome"] == "used"]) == 6
    if rule == "bytes":
        assert sum(row["bytes_up"] + row["bytes_down"] for row in updates) >= 200_000
        assert sum(row["bytes_up"] + row["bytes_down"] for row in rounds[:-1]) < 200_000
    if rule == "accuracy":
        assert max(row["accuracy"] for row in fleet.history("evaluations", run=run_id)) >= 0.8
    if rule == "seconds":
        assert ended["finished_at"] - ended["started_at"] >= 0.5
    closed = [row for row in rounds if row["closed_at"] is not None]
    assert closed[-1]["accuracy"] is not None, "the last version is evaluated"


def test_a_run_that_fails_says_why_and_watch_ends_with_41(edgefl, run_file, tmp_path):
    path = run_file("hopeless", rounds=3)
    path.write_text(path.read_text() + "[strategy]\nlearning_rate = 1e30\n")
    ended = edgefl("run", "submit", path, "--watch")
    assert ended.code == 41
    last = ended.err.splitlines()[-1]
    assert last.startswith("edgefl: run ")
    assert " failed: " in last


def test_a_watcher_sees_the_end_of_a_run_that_went_on_under_another_coordinator(edgefl, run_file, fleet):
    run_id = edgefl("run", "submit", run_file("cut", rounds=1_000_000)).out.strip()
    while len(fleet.history("rounds", run=run_id)) < 3:
        threading.Event().wait(0.05)
    assert fleet.end("coordinator") == 0
    fleet.start_coordinator()
    fleet.wait_present(2)
    assert edgefl("run", "stop", run_id).out == f"{run_id} stopping\n"
    ended = edgefl("run", "watch", run_id)
    assert ended.code == 0
    assert ended.err.splitlines()[-1].startswith("cut stopped: round ")


def test_the_module_starts_without_anything_heavy():
    program = "import edgefl.cli.run, sys; sys.exit(bool({'rich', 'sqlalchemy', 'numpy', 'flwr'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_submit_says_what_the_strategy_keeps_for_the_devices_and_refuses_too_much(edgefl, tmp_path):
    path = tmp_path / "compensated.toml"
    path.write_text('[run]\ntask = "digits"\nrounds = 1\n[strategy]\nname = "dc-asgd"\n')
    ended = edgefl("run", "submit", path, "--watch")
    assert (ended.code, "dc-asgd keeps" in ended.err, "B for 2 devices" in ended.err) == (0, True, True)
    path.write_text('[run]\ntask = "digits"\nmax_state_bytes = 1000\n[strategy]\nname = "dc-asgd"\n')
    refused = edgefl("run", "submit", path)
    assert refused.code == 3
    assert "for 2 devices, the run may have 1000 bytes: raise run.max_state_bytes" in refused.err


def test_the_end_of_a_run_with_models_of_single_devices_tells_the_average_and_the_nodes(edgefl, run_file, fleet):
    path = run_file("apart", rounds=3)
    path.write_text(f'{path.read_text()}[strategy]\nname = "{apart_strategy.NAME}"\n')
    ended = edgefl("run", "submit", path, "--watch")
    assert ended.code == 0, ended.err
    words = ended.err.splitlines()[-1]
    told = re.fullmatch(r"accuracy of the average model (\S+), of the nodes (\S+) \(worst (\S+)\)", words)
    assert told is not None
    average, nodes, worst = map(float, told.groups())
    assert average > 0.4
    assert worst < 0.25
    assert nodes == pytest.approx((average + worst) / 2, abs=1e-4), "the first has the average"
    shown = edgefl("run", "show", "apart")
    assert shown.out.splitlines()[-1] == words
    assert "worst_node_accuracy" in shown.out
    (row,) = edgefl("run", "show", "apart", "--format", "json").rows()
    assert (row["node_accuracy"], row["disagreement"]) == (pytest.approx(nodes, abs=1e-4), 0.75)
    rounds = fleet.history("rounds", run=row["run_id"])
    assert [one["facts"]["disagreement"] for one in rounds] == [0.25, 0.5, 0.75]
    assert [one["node_accuracy"] is None for one in rounds] == [False] * 3


def test_a_run_without_them_is_shown_as_ever(edgefl, run_file):
    ended = edgefl("run", "submit", run_file("plain", rounds=1), "--watch")
    assert ended.err.splitlines()[-1].startswith("plain finished: round 1 of 1, accuracy 0.")
    (row,) = edgefl("run", "show", "plain", "--format", "json").rows()
    assert set(row) == {*COLUMNS, "priority", "resumes", "config"}
    assert "of the nodes" not in edgefl("run", "show", "plain").out
