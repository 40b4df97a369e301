"""Jobs on real agents, confined: parts of killed boards are done by others, a killed coordinator loses none."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

HERE = Path(__file__).parents[1]
EXAMPLES = HERE.parent / "examples" / "jobs"
GREETING, WORDS = "gated_jobs:Greeting", "gated_jobs:Words"
TEXTS = {"board-1": "a rose is a rose", "board-2": "is a rose", "board-3": "rose"}


@pytest.fixture(scope="module")
def running(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("jobs")
    devices = []
    for name, text in TEXTS.items():
        (root / name).mkdir()
        (root / name / "text.txt").write_text(text)
        jobs = (
            GREETING,
            WORDS,
            "gated_jobs:Uncombined",
            "three_jobs:HelloWorld",
            "three_jobs:MatrixProduct",
            "three_jobs:WordCount",
        )
        devices.append(LocalDeviceSpec(name=name, shards=dict.fromkeys(jobs, str(root / name))))
    environment = {"EDGEFL_CONFINE": "auto", "EDGEFL_ALLOW_MODULES": "gated_jobs,three_jobs"}
    with tools.fleet(
        root / "fleet", devices, environment=environment, also_importable=[HERE, EXAMPLES], kind=LocalFleet
    ) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: LocalFleet) -> LocalFleet:
    """The module's fleet with all of its boards up."""
    for name in TEXTS:
        if running.processes[name].poll() is not None:
            running.start_device(name)
    running.wait_for_devices(len(TEXTS))
    return running


def make_config(name: str, *, devices: dict[str, Any] | None = None, **job: Any) -> RunConfig:
    return parse_run({"job": {"name": name, **job}, "devices": {"min": len(TEXTS), **(devices or {})}})


def read_result(fleet: LocalFleet, tools: Any, run_id: str, path: Path) -> bytes:
    ended = tools.as_operator(fleet, "run", "result", run_id, "--out", path)
    assert ended.code == 0, ended.err
    return path.read_bytes()


def list_started(fleet: LocalFleet, mark: str) -> dict[tuple[int, str], list[int]]:
    """Returns the processes, its own and its agent's, that began a part, by part and board."""
    found = {}
    for path in fleet.root.glob(f"board-*/confined/task-*/{mark}-*"):
        if len(numbers := path.read_text().split()) == 2:
            found[int(path.name.rpartition("-")[2]), path.relative_to(fleet.root).parts[0]] = [*map(int, numbers)]
    return found


def wait_started(tools: Any, fleet: LocalFleet, mark: str, *parts: int) -> dict[int, tuple[str, list[int]]]:
    """Waits until parts are under way; returns the board of each, and the processes that it is done by."""

    def read_started() -> dict[int, tuple[str, list[int]]] | None:
        started = {part: (name, pids) for (part, name), pids in list_started(fleet, mark).items() if part in parts}
        return started if len(started) == len(parts) else None

    return tools.eventually(read_started, 60, f"parts {parts} under way")


def open_gate(fleet: LocalFleet, mark: str, *boards: str) -> None:
    for name in boards or TEXTS:
        (fleet.root.parent / name / mark).touch()


def wait_failed(fleet: LocalFleet, tools: Any, run_id: str) -> str:
    """Waits for the failure of a run, and returns the reason."""
    tools.eventually(lambda: tools.status(fleet, run_id) == "failed", 60)
    return str(tools.run(fleet, run_id)["reason"])


def list_used(fleet: LocalFleet, run_id: str) -> list[str]:
    """Returns the assignments in the result."""
    rows = fleet.list_history("updates", run=run_id)
    return sorted(row["assignment_id"] for row in rows if row["outcome"] == "used")


def test_a_killed_boards_part_is_done_by_another_and_a_killed_coordinator_repeats_none(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    run_id = fleet.submit(make_config(GREETING, parts=5, mark="kills"))
    started = wait_started(tools, fleet, "kills", 0, 1, 2)
    first, killed, kept = (started[part][0] for part in range(3))
    fleet.kill(killed)
    open_gate(fleet, "kills", first)
    tools.eventually(lambda: len(fleet.list_history("updates", run=run_id)) >= 2, 60, "parts of the first board")
    fleet.kill("coordinator")
    fleet.start_coordinator()
    open_gate(fleet, "kills")
    ended = fleet.wait_for_run(run_id)
    assert ended["status"] == "finished", ended
    expected = b"".join(f"{part}/5\n".encode() for part in range(5))
    assert read_result(fleet, tools, run_id, tmp_path / "result") == expected
    used = list_used(fleet, run_id)
    assert [name[:2] for name in used] == ["p0", "p1", "p2", "p3", "p4"]
    # The part of the killed board was done by another one; those that others had were begun once.
    assert not used[1].endswith(killed)
    assert {f"p0-t1-{first}", f"p2-t1-{kept}"} < set(used)
    begun = list_started(fleet, "kills")
    assert {key for key in begun if key[0] in {0, 2}} == {(0, first), (2, kept)}


def test_a_boards_own_files_are_counted_where_they_lie_and_a_board_that_is_away_can_be_left_out(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    run_id = fleet.submit(make_config(WORDS))
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    words = json.loads(read_result(fleet, tools, run_id, tmp_path / "words"))
    assert words == {"a": 3, "is": 2, "rose": 4}

    fleet.kill("board-3")
    tools.eventually(
        lambda: fleet.make_client().get("/edgefl/v1/devices/board-3")["presence"] in {"gone", "offline"}, 60
    )
    names = {"names": list(TEXTS), "min": 2}
    run_id = fleet.submit(make_config(WORDS, devices=names, skip_missing_s=1))
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert json.loads(read_result(fleet, tools, run_id, tmp_path / "fewer")) == {"a": 3, "is": 2, "rose": 3}

    waiting = fleet.submit(make_config(WORDS, devices=names))
    tools.eventually(lambda: len(fleet.list_history("updates", run=waiting)) >= 2, 60, "the others' parts")
    assert tools.status(fleet, waiting) in {"running", "waiting"}
    fleet.start_device("board-3")
    assert fleet.wait_for_run(waiting)["status"] == "finished"
    assert json.loads(read_result(fleet, tools, waiting, tmp_path / "all")) == words


def test_a_board_that_fails_its_parts_gets_no_more_and_what_jobs_log_is_in_the_history(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    run_id = fleet.submit(make_config(GREETING, parts=12, bad_device="board-2", max_failures=2))
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert read_result(fleet, tools, run_id, tmp_path / "result").count(b"\n") == 12
    events = fleet.list_history("events", run=run_id)
    kinds = [(row["kind"], row["device_id"]) for row in events]
    assert kinds.count(("device-quarantined", "board-2")) == 1
    assert kinds.count(("assignment-failed", "board-2")) == 2
    assert any("broken on purpose" in row["message"] for row in events)
    assert {"part 0: input 0/12", "part 11: input 11/12"} <= {row["message"] for row in events}

    run_id = fleet.submit(make_config(GREETING, parts=3, bad_part=1, max_failures=1))
    assert "broken on purpose" in wait_failed(fleet, tools, run_id)
    refused = tools.as_operator(fleet, "run", "result", run_id, "--out", tmp_path / "none")
    assert "has no result, it is failed" in refused.line


def test_parts_are_bounded_in_size_and_time_and_a_stopped_job_ends_its_parts_at_once(
    fleet: LocalFleet, tools: Any
) -> None:
    large = fleet.submit(make_config(GREETING, parts=1, result_bytes=3000, max_part_bytes=2000, max_failures=1))
    assert "at most 2000 are taken" in wait_failed(fleet, tools, large)
    slow = fleet.submit(make_config(GREETING, parts=1, mark="slow", deadline_s=2, max_failures=1))
    assert "work took longer than 2 s" in wait_failed(fleet, tools, slow)
    stopped = fleet.submit(make_config(GREETING, parts=3, mark="stopped"))
    process = wait_started(tools, fleet, "stopped", 0, 1, 2)[1][1][0]
    fleet.make_client().post(f"/edgefl/v1/runs/{stopped}/stop")
    tools.eventually(lambda: tools.status(fleet, stopped) == "stopped", 60)
    tools.eventually(lambda: not Path(f"/proc/{process}").exists(), 30, "the end of its work")
    uncombined = fleet.submit(make_config("gated_jobs:Uncombined", parts=2))
    assert "combine(parts) raised ValueError: of 2 parts" in wait_failed(fleet, tools, uncombined)


def test_a_killed_training_process_costs_its_part_one_try(fleet: LocalFleet, tools: Any) -> None:
    run_id = fleet.submit(make_config(GREETING, parts=3, mark="process"))
    board, (process, agent) = wait_started(tools, fleet, "process", 0, 1, 2)[1]
    assert agent == fleet.processes[board].pid
    os.kill(process, signal.SIGKILL)
    open_gate(fleet, "process")
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert [name for name in list_used(fleet, run_id) if name.startswith("p1-t2-")]


def test_the_jobs_of_the_examples_do_what_they_say(fleet: LocalFleet, tools: Any, tmp_path: Path) -> None:
    submitted = {
        name: fleet.submit(make_config(f"three_jobs:{name}", **job))
        for name, job in (
            ("HelloWorld", {"parts": 4}),
            ("MatrixProduct", {"parts": 4, "size": 30}),
            ("WordCount", {}),
        )
    }
    results = {}
    for name, run_id in submitted.items():
        assert fleet.wait_for_run(run_id)["status"] == "finished"
        results[name] = read_result(fleet, tools, run_id, tmp_path / name)
    lines = results["HelloWorld"].decode().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == list("0123")
    left, right = (np.random.default_rng(seed).standard_normal((30, 30)) for seed in (1, 2))
    assert np.allclose(np.load(tmp_path / "MatrixProduct"), left @ right)
    assert json.loads(results["WordCount"]) == {"rose": 4, "a": 3, "is": 2}
    (row,) = [
        row for row in tools.as_operator(fleet, "run", "list", "--format", "json").rows if "Word" in row["task"]
    ][-1:]
    assert (row["strategy"], row["status"]) == ("job", "finished")
    watched = tools.as_operator(fleet, "run", "watch", submitted["MatrixProduct"])
    assert "4 of 4 parts done" in watched.err
    assert tools.as_operator(fleet, "model", "list", "--format", "json").rows == []
    refused = tools.as_operator(fleet, "model", "deploy", submitted["HelloWorld"])
    assert refused.code != 0
