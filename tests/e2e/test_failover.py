"""Two hosts, one PostgreSQL and one S3: the active coordinator is lost, and the other goes on in the same round."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from chaos.hosts import TwoHostFleet
from postgres_server import PostgresServer, running_postgres
from s3_server import BUCKET, S3Server, run_s3_server

from edgefl.core.config import RunConfig
from edgefl.core.errors import LeaseLostError, StoreError

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

ROUNDS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, run_s3_server(patch, tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def fleet(
    tools: Any, server: PostgresServer, storage: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoHostFleet]:
    root = tmp_path_factory.mktemp("hosts")
    database = server.url(server.new_database())
    with TwoHostFleet(
        root=root / "fleet",
        devices=tools.devices(2, tools.gated),
        environment={name: tools.environment[name] for name in ("EDGEFL_ALLOW_MODULES", "PYTHONPATH")},
        store=database,
        models=f"s3://{BUCKET}/fleet",
    ) as running:
        yield running


def _run(tools: Any, *, pace_s: float, rounds: int = ROUNDS) -> RunConfig:
    config: RunConfig = tools.gated_run(pace_s=pace_s, rounds=rounds, min=2, seed=5)
    return config


def _expected(rounds: int = ROUNDS) -> list[tuple[int, str]]:
    return [(number, f"device-0{k}") for number in range(1, rounds + 1) for k in (1, 2)]


def test_the_other_host_goes_on_with_the_run_when_the_active_one_is_killed(
    fleet: TwoHostFleet, tools: Any, storage: S3Server
) -> None:
    run_id = fleet.submit(_run(tools, pace_s=0.2))
    fleet.wait_until(lambda: fleet.get_run(run_id)["rounds"] >= 3, 60, "three rounds")
    former = fleet.active
    fleet.fail_over()
    assert fleet.active == 1 - former
    fleet.start_host(former)
    run = fleet.wait_for_end(run_id)
    assert (run["status"], run["rounds"]) == ("finished", ROUNDS)
    assert fleet.list_used(run_id) == _expected()
    undisturbed = fleet.run_to_end(_run(tools, pace_s=0.0))
    assert run["model"] == undisturbed["model"]
    assert any(key.endswith(run["model"]) for key in list(storage.keys()))


def test_a_frozen_host_that_wakes_after_a_take_over_ends_and_has_written_nothing(
    fleet: TwoHostFleet, tools: Any
) -> None:
    run_id = fleet.submit(_run(tools, pace_s=0.2))
    fleet.wait_until(lambda: fleet.get_run(run_id)["rounds"] >= 3, 60, "three rounds")
    former = fleet.active
    fleet.wait_until(lambda: "standing by" in fleet.read_log_tail(f"host-{1 - former}", 1), 60, "the other")
    fleet.signal_host(former, signal.SIGSTOP)
    fleet.wait_until(lambda: fleet.find_active() == 1 - former, 60, "the other to serve")
    fleet.signal_host(former, signal.SIGCONT)
    assert fleet.processes[f"host-{former}"].wait(60) in {StoreError.exit_code, LeaseLostError.exit_code}
    assert "another host has taken over the fleet" in fleet.read_log_tail(f"host-{former}", 20)
    run = fleet.wait_for_end(run_id)
    assert (run["status"], run["rounds"]) == ("finished", ROUNDS)
    used = fleet.list_used(run_id)  # boards that hang on the frozen host past the recovery miss the round under way
    assert len(used) == len(set(used))
    assert {number for number, _ in used} == set(range(1, ROUNDS + 1))
