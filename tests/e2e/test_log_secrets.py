"""No key, no access token and no join token reaches a log, the database or what a command prints in passing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from log_secrets import leaks, secrets_of, written_below

from edgefl.core.config import parse_run
from edgefl.core.errors import EdgeflError
from edgefl.core.protocol import JoinToken
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

LOUD = (sys.executable, "-m", "edgefl.cli.main", "-vv")


@pytest.mark.extended  # and a part of `make check`
def test_a_fleet_that_says_all_it_can_writes_down_no_secret(tools: Any, tmp_path: Path) -> None:
    devices = [LocalDeviceSpec(name=device.name, shards=device.shards, program=LOUD) for device in tools.devices(2)]
    with tools.fleet(tmp_path, devices, program=LOUD, kind=LocalFleet) as fleet:
        token = fleet.make_client().post("/edgefl/v1/tokens", {"uses": 1})["token"]
        printed = [_join(fleet, token, "late"), _join(fleet, token, "later"), _join(fleet, token, "Bad Name")]
        run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2}}))
        fleet.wait_for_run(run_id)
        with pytest.raises(EdgeflError):
            fleet.make_client().get("/edgefl/v1/devices/nobody")
        printed += [fleet.run_command("devices", "logs", "device-01", "--run", run_id), fleet.run_command("doctor")]
    secrets = secrets_of(tmp_path) | {JoinToken.parse(token).secret.encode(): "the secret of a join token"}
    assert len(secrets) > 20, "the scan knows too little to find anything"
    texts = written_below(tmp_path) | {f"output {n}": text.encode() for n, text in enumerate(printed)}
    assert sum(map(len, texts.values())) > 100_000, "too little was written to say anything"
    assert any("agent.jsonl" in name for name in texts), "the boards' own logs are scanned too"
    assert leaks(texts, secrets) == []


def test_the_scan_finds_a_key_that_was_written(tmp_path: Path) -> None:
    lines = [
        "-----BEGIN PRIVATE KEY-----",
        "A" * 64,
        "bcdefghijklmnopqrstuvwxyzBCDEFGHIJKLMNOPQRSTUVWXYZ012",
        "-----END PRIVATE KEY-----",
    ]
    (tmp_path / "own.key").write_text("\n".join(lines))
    (tmp_path / "operator.toml").write_text('operator_token = "hunter2hunter2"\n')
    (tmp_path / "a.log").write_text(f"INFO: the key is {lines[2]} and the token hunter2hunter2\n")
    told = leaks(written_below(tmp_path), secrets_of(tmp_path))
    assert {line.partition(" stands")[0] for line in told} == {"the key own.key", "an access token of operator.toml"}


def _join(fleet: Any, token: str, name: str) -> str:
    state = str(fleet.root / name.replace(" ", "-"))
    process = fleet.start_command(
        ["device", "join", "--name", name, "--state", state], LOUD, variables={"EDGEFL_JOIN_TOKEN": token}
    )
    output, _ = process.communicate(timeout=60)
    return str(output.decode())
