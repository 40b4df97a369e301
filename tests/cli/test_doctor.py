"""The doctor looks at real directories, a real coordinator and a real broker, and at what was broken on purpose."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from edgefl.assembly import assemble
from edgefl.cli.main import main
from edgefl.coordinator import pki
from edgefl.coordinator.brokers.choice import mosquitto_path
from edgefl.coordinator.directory import load_directory
from edgefl.coordinator.service import Coordinator
from edgefl.coordinator.start_options import StartOptions
from edgefl.device.state import DeviceState
from edgefl.local_fleet import free_port
from edgefl.storage.checkpoints import save_model, save_state
from edgefl.storage.journal import WalJournal
from edgefl.storage.records import CheckpointRow
from edgefl.storage.store import Store
from edgefl.tasks.cards import ShardCard
from edgefl.tasks.shards import write_shard
from edgefl.types import Dataset


class Said:
    """What the doctor said."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        self.rows = json.loads(out).get("rows", []) if out.startswith("{") else []

    def of(self, check, level=None):
        return [row for row in self.rows if row["check"] == check and level in {None, row["level"]}]

    @property
    def problems(self):
        return [row["text"] for row in self.rows if row["level"] == "problem"]

    @property
    def warnings(self):
        return [row["text"] for row in self.rows if row["level"] == "warning"]


@pytest.fixture
def edgefl(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("EDGEFL_URL", raising=False)
    monkeypatch.delenv("EDGEFL_TOKEN", raising=False)

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["-q", *map(str, arguments)])
        out, err = capsys.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def doctor(edgefl):
    def call(*arguments):
        said = edgefl("doctor", "--format", "json", *arguments)
        for row in said.rows:
            assert (row["level"] == "ok") == (row["remedy"] == ""), row
        assert (said.code == 50) == bool(said.problems), said.err
        return said

    return call


@pytest.fixture
def directory(edgefl, tmp_path):
    root = tmp_path / "data" / "edgefl" / "coordinator"
    said = edgefl("coordinator", "init", "--host", "127.0.0.1", "--port", str(free_port()))
    assert said.code == 0
    return load_directory(root)


@pytest.fixture
def running(directory):
    broker = "mosquitto" if mosquitto_path() else "embedded"
    options = StartOptions(host="127.0.0.1", port=directory.port, broker_port=free_port(), broker=broker)
    with Coordinator(directory, options, assemble):
        yield directory


@pytest.fixture
def joined(edgefl, running, tmp_path):
    shard = tmp_path / "shards" / "device-01.npz"
    rows = np.arange(12)
    data = Dataset(inputs=np.zeros((12, 8, 8), dtype=np.uint8), labels=rows % 3)
    write_shard(shard, data, ShardCard(task="digits"))
    token = json.loads(edgefl("coordinator", "token", "--format", "json").out)["token"]
    said = edgefl("device", "join", f"127.0.0.1:{running.port}", "--token", token, "--shard", str(shard),
                  "--name", "pi-1", "--accelerator", "cpu")  # fmt: skip
    assert said.code == 0, said.err
    return DeviceState.load()


def test_nothing_set_up_is_one_line(edgefl):
    said = edgefl("doctor")
    assert (said.code, said.out, said.err.count("\n")) == (36, "", 1)


def test_it_finds_out_where_it_is_and_all_is_well(doctor, joined):
    said = doctor()
    assert said.problems == []
    assert {row["where"] for row in said.rows} == {"software", "coordinator", "device", "operator"}
    assert said.warnings == ["no agent runs"]
    assert len(said.of("certificates", "ok")) == 4
    assert "it refuses what a device says as another one" in [row["text"] for row in said.of("broker")]
    assert [row["text"].split(";")[0].split(" in ")[0] for row in said.of("shards")] == ["digits: 12 examples"]
    (sound,) = said.of("database")
    assert "is sound" in sound["text"]


def test_people_get_a_line_for_each_finding_and_one_for_its_remedy(edgefl, directory):
    directory.ca_key.chmod(0o644)
    said = edgefl("doctor", "--dir", directory.root)
    assert said.code == 50
    assert said.err == "edgefl: 1 problem found\n"
    lines = said.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  problem"))
    assert "can be read by others (mode 644)" in lines[at]
    assert lines[at + 1].strip() == f"remedy: chmod 600 {directory.ca_key}"


def test_it_changes_nothing(doctor, directory):
    with Store.open(directory.database):
        pass

    def all_files():
        found = (path for path in directory.root.rglob("*") if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}

    before = all_files()
    doctor("--dir", directory.root)
    assert all_files() == before


def test_a_coordinator_that_does_not_run_is_a_warning_and_a_taken_port_a_problem(doctor, directory):
    said = doctor("--dir", directory.root)
    assert "it does not run" in said.warnings
    with socket.create_server(("127.0.0.1", directory.port)):
        assert "another program has its port" in doctor("--dir", directory.root).problems[0]


def test_damage_in_a_coordinator_s_directory_is_found_piece_by_piece(doctor, directory):
    with Store.open(directory.database) as store, store.batch():
        store.add_run(run_id="r1", name="n", task="digits", strategy="fedavg", config={}, seed=7, submitted_at=1.0)
        kept = [save_model(directory.models, {"w": np.full(3, value, np.float32)}) for value in (1.0, 2.0, 3.0)]
        for version, (sha256, path) in enumerate(kept):
            row = CheckpointRow(
                version=version,
                round=version,
                last_record=version,
                sha256=sha256,
                bytes_file=path.stat().st_size,
                at=1.0,
            )
            store.record_checkpoint("r1", row)
    journal = directory.runs / "r1" / "journal"
    (directory.runs / "r1").mkdir(mode=0o700)
    with WalJournal(journal, lambda body: {}) as wal:
        for version in range(1, 30):
            wal.aggregated(version, [f"a{version}"])
            wal.commit()
        saved = save_state(directory.runs / "r1" / "checkpoints", CheckpointRow(
            version=1, round=1, last_record=1, sha256="0", bytes_file=1, at=1.0), 29)  # fmt: skip
    assert doctor("--dir", directory.root).problems == []
    state = directory.runs / "r1" / "checkpoints" / f"{saved.sha256}.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    kept[0][1].write_bytes(b"damaged")
    kept[1][1].unlink()
    said = doctor("--dir", directory.root)
    assert [text.split(":")[0] for text in said.problems] == ["run r1", f"the model {kept[0][0][:12]}… is damaged"]
    (missing,) = said.of("models", "warning")
    assert missing["text"].endswith("is missing")
    wal_file = next(journal.glob("*.wal"))
    body = bytearray(wal_file.read_bytes())
    body[200] ^= 255
    wal_file.write_bytes(body)
    assert any("is damaged at byte" in text for text in doctor("--dir", directory.root).problems)


def test_a_damaged_and_a_newer_database_are_problems(doctor, directory):
    with Store.open(directory.database):
        pass
    whole = directory.database.read_bytes()
    directory.database.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    (found,) = doctor("--dir", directory.root).of("database", "problem")
    assert "restore" in found["remedy"]
    directory.database.write_bytes(whole)
    with closing(sqlite3.connect(directory.database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    (found,) = doctor("--dir", directory.root).of("database", "problem")
    assert found["remedy"] == "update edgefl"


def test_a_checkpoint_of_a_newer_edgefl_is_a_problem_that_no_backup_mends(doctor, directory):
    folder = directory.runs / "r1" / "checkpoints"
    folder.mkdir(mode=0o700, parents=True)
    (folder / f"{1:020d}.checkpoint.json").write_text('{"v": 2}')
    (found,) = doctor("--dir", directory.root).of("journals", "problem")
    assert "has format 2" in found["text"]
    assert found["remedy"] == "start a newer edgefl"


def test_certificates_of_another_ca_or_for_other_names_are_problems(doctor, directory):
    server = pki.issue_server(directory.authority(), ["elsewhere.lan"])
    directory.server_cert.write_bytes(server.cert_pem)
    directory.server_key.write_bytes(server.key_pem)
    said = doctor("--dir", directory.root)
    assert said.problems == ["the server's certificate is not for 127.0.0.1, where boards look for it"]
    stranger = pki.issue_client(pki.create_authority("fleet"), "coordinator")
    directory.client_cert.write_bytes(stranger.cert_pem)
    directory.client_key.write_bytes(stranger.key_pem)
    assert "the coordinator's own certificate is not from this fleet's CA" in doctor("--dir", directory.root).problems


def doctor_with_clock_off(off_s, *arguments):
    """The doctor in a process of its own, whose clock is so much ahead."""
    command = [sys.executable, "-c", _SHIFTED, str(off_s), "-q", "doctor", "--format", "json", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


# What a wrong clock is to a Python program; nothing of ours is changed.
_SHIFTED = """
import sys, time
real_time, off_s = time.time, float(sys.argv.pop(1))
time.time = lambda: real_time() + off_s
from edgefl.cli.main import main
main()
"""


def test_a_fleet_whose_certificates_have_ended_is_told(directory):
    said = doctor_with_clock_off(21 * 366 * 86_400.0, "--dir", directory.root)
    assert (said.code, sum(" ended on " in text for text in said.problems)) == (50, 3)


def test_a_board_whose_clock_is_wrong_is_told_and_works_all_the_same(joined):
    said = doctor_with_clock_off(-50 * 365 * 86_400.0, "--state", joined.root)
    assert said.problems == []
    (wrong, apart) = said.of("clock", "warning")
    assert wrong["text"].startswith("this machine's clock says 197")
    assert apart["text"].endswith("s ahead of this one")
    assert len(said.of("broker", "ok")) == 2


def test_a_device_whose_fleet_is_away_says_so_with_a_remedy(doctor, joined):
    joined.change(addresses=(f"127.0.0.1:{free_port()}",), broker_port=free_port())
    said = doctor("--state", joined.root)
    assert [row["check"] for row in said.rows if row["level"] == "problem"] == ["coordinator", "broker"]
    joined.change(addresses=(f"127.0.0.1:{free_port()}", f"127.0.0.1:{load_directory_port(joined)}"))
    assert doctor("--state", joined.root).problems == []


def load_directory_port(state):
    return load_directory(state.root.parent / "coordinator").port


def test_a_device_with_damaged_shards_or_keys_says_which(doctor, joined, tmp_path):
    (tmp_path / "shards" / "device-01.npz").write_bytes(b"no shard")
    joined.key.chmod(0o604)
    said = doctor("--state", joined.root)
    assert [row["check"] for row in said.rows if row["level"] == "problem"] == ["files", "shards"]
    joined.ca.unlink()
    assert any("ca.pem" in text for text in doctor("--state", joined.root).problems)
    shutil.rmtree(joined.root)
    assert doctor("--state", joined.root).of("device", "problem")


def test_a_running_agent_is_not_pushed_off_by_the_doctor(doctor, joined):
    with joined.locked():
        said = doctor("--state", joined.root)
    assert said.problems == said.warnings == []
    (broker,) = said.of("broker")
    assert "its rules are tried when pi-1 is not connected" in broker["text"]


def test_an_operator_s_token_is_tried(doctor, joined, monkeypatch):
    port = load_directory_port(joined)
    said = doctor("--url", f"https://127.0.0.1:{port}")
    assert (said.problems, {row["where"] for row in said.rows}) == ([], {"software", "operator"})
    monkeypatch.setenv("EDGEFL_TOKEN", "wrong")
    # On loopback everybody may read, so a wrong token is no obstacle there.
    assert doctor("--url", f"https://127.0.0.1:{port}").code == 0
    assert doctor("--url", f"https://127.0.0.1:{free_port()}").of("coordinator", "problem")
