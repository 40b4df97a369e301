"""A fleet whose store is PostgreSQL: its address is told once, and neither side's death loses a row."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from typing import Any

import pytest
from postgres_server import PASSWORD, PostgresServer, running_postgres

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalFleet

pytestmark = pytest.mark.extended

ROUNDS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def fleet(tools: Any, server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("postgres")
    secret = root / "pgpass"
    secret.write_text(server.pass_line())
    secret.chmod(0o600)
    address = server.url(server.new_database(), password=False)
    told = {"PGPASSFILE": str(secret), "EDGEFL_STORE": address}
    options = {"scored": True, "environment": told, "kind": LocalFleet}
    with tools.fleet(root / "fleet", tools.devices(2), **options) as running:
        running.environment = {**running.environment, "EDGEFL_STORE": ""}  # from here on nobody is told
        yield running


def test_a_token_made_without_being_told_lets_a_board_in(fleet: LocalFleet, tools: Any) -> None:
    token = fleet.run_command("coordinator", "token", "--dir", str(fleet.directory)).splitlines()[0]
    told = fleet.run_command(
        "device", "join", f"127.0.0.1:{fleet.port}", "--token", token, "--name", "late",
        "--state", str(fleet.root / "late"),
        "--shard", f"digits={tools.devices(1)[0].shards['digits']}",
    )  # fmt: skip
    assert "late" in told
    assert not fleet.database.exists()


def test_rounds_outlive_the_death_of_the_coordinator_and_of_the_server(
    fleet: LocalFleet, server: PostgresServer
) -> None:
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": ROUNDS}, "devices": {"min": 2}}))
    deadline = time.monotonic() + 60
    while fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["rounds"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.restart()
    fleet.kill("coordinator")
    fleet.start_coordinator()
    run = fleet.wait_for_run(run_id)
    assert (run["status"], run["rounds"]) == ("finished", ROUNDS)
    rows = fleet.list_history("updates", run=run_id, limit=10_000)
    used = [(row["round"], row["device_id"]) for row in rows if row["outcome"] == "used"]
    assert sorted(used) == [(number, f"device-0{k}") for number in range(1, ROUNDS + 1) for k in (1, 2)]


def test_commands_that_read_the_directory_find_the_store(fleet: LocalFleet) -> None:
    place = ("--dir", str(fleet.directory))
    assert fleet.run_command("history", "rounds", "--run", "latest", *place).count("\n") > ROUNDS
    assert "revision" in fleet.run_command("doctor", *place, "--format", "json")
    assert "pg_dump" in fleet.run_command("coordinator", "backup", *place, str(fleet.root / "backup.tar.gz"))


def test_a_password_is_kept_for_its_owner_alone_and_shown_nowhere(server: PostgresServer, fleet: LocalFleet) -> None:
    place = fleet.root / "second"
    fleet.environment = {"EDGEFL_STORE": server.url(server.new_database())}
    said = fleet.run_command("coordinator", "init", "--dir", str(place))
    fleet.environment = {}
    said += fleet.run_command("doctor", "--dir", str(place), "--format", "json")
    assert '"level": "problem"' not in said
    assert PASSWORD not in said
    assert stat.S_IMODE((place / "settings.toml").stat().st_mode) == 0o600
