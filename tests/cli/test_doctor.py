"""The doctor looks at real directories, a real coordinator and a real broker, and at what was broken on purpose."""

import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.mosquitto import find_mosquitto
from edgefl.coordinator.directory import StartOptions, load_directory
from edgefl.coordinator.service import Coordinator
from edgefl.device.state_dir import DeviceStateDir
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.checkpoints import FORMAT_VERSION, save_model, save_state
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.repositories.records import SavedModelRow
from edgefl.storage.store import Store

NO_MOSQUITTO = [] if find_mosquitto() else ["mosquitto is not installed"]


class Said:
    """What the doctor said."""

    def __init__(self, code, out):
        self.code, self.rows = code, json.loads(out)["rows"]
        assert all((row["level"] == "ok") == (row["remedy"] == "") for row in self.rows)
        assert (code == 50) == bool(self.problems)

    def of(self, check, level):
        return [row for row in self.rows if (row["check"], row["level"]) == (check, level)]

    @property
    def problems(self):
        return [row["text"] for row in self.rows if row["level"] == "problem"]

    @property
    def checks_with_problems(self):
        return [row["check"] for row in self.rows if row["level"] == "problem"]

    @property
    def warnings(self):
        return [row["text"].partition(";")[0] for row in self.rows if row["level"] == "warning"]


@pytest.fixture
def doctor(run):
    def call(*arguments):
        ran = run("doctor", "--format", "json", *arguments)
        return Said(ran.code, ran.out)

    return call


def test_a_foreign_edgefl_is_a_problem_before_anything_is_set_up(doctor, tmp_path, monkeypatch):
    info = tmp_path / "packages" / "edgefl-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: edgefl\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(info.parent)
    (problem,) = doctor().problems
    assert problem.startswith(f"a foreign package, edgefl 0.1.0, is installed in {info.parent}")


@pytest.fixture
def directory(run, tmp_path):
    assert run("coordinator", "init", "--host", "127.0.0.1", "--port", find_free_port()).code == 0
    return load_directory(tmp_path / "data" / "edgefl" / "coordinator")


@pytest.fixture
def joined(run, directory, shard):
    options = StartOptions(host="127.0.0.1", port=directory.port, broker_port=find_free_port())
    with Coordinator(directory, options, build_run):
        token = json.loads(run("coordinator", "token", "--format", "json").out)["token"]
        ran = run("device", "join", f"127.0.0.1:{directory.port}", "--token", token, "--shard", shard,
                  "--name", "pi-1", "--accelerator", "cpu")  # fmt: skip
        assert ran.code == 0, ran.err
        yield DeviceStateDir.load()


def test_it_finds_out_where_it_is_and_all_is_well(doctor, joined, directory, monkeypatch):
    said = doctor()
    assert said.problems == []
    assert {row["where"] for row in said.rows} == {"software", "coordinator", "device", "operator"}
    assert said.warnings == [*NO_MOSQUITTO, "no agent runs"]
    assert len(said.of("certificates", "ok")) == 4
    tried = [
        row["where"] for row in said.of("broker", "ok") if "refuses what a device says as another" in row["text"]
    ]
    assert tried == ["coordinator", "device"]
    assert said.of("shards", "ok")[0]["text"].startswith("digits: 12 examples")
    assert "is sound" in said.of("database", "ok")[0]["text"]
    with joined.lock():
        said = doctor("--state", joined.root)
    assert said.problems == said.warnings == []
    (broker,) = said.of("broker", "ok")
    assert "its rules are tried when pi-1 is not connected" in broker["text"], "the agent is not pushed off"
    operator = ("--url", f"https://127.0.0.1:{directory.port}")
    assert {row["where"] for row in doctor(*operator).rows} == {"software", "operator"}
    monkeypatch.setenv("EDGEFL_TOKEN", "wrong")
    assert doctor(*operator).code == 0, "on loopback everybody may read"
    assert doctor("--url", f"https://127.0.0.1:{find_free_port()}").of("coordinator", "problem")


def test_nothing_set_up_is_one_line_and_people_get_a_line_for_each_finding_and_its_remedy(run, refused, request):
    refused(["doctor"], 36, "nothing of edgefl is set up here")
    directory = request.getfixturevalue("directory")
    directory.ca_key.chmod(0o644)
    ran = run("doctor", "--dir", directory.root)
    assert (ran.code, ran.err) == (50, "edgefl: 1 problem found\n")
    lines = ran.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  problem"))
    assert "can be read by others (mode 644)" in lines[at]
    assert lines[at + 1].strip() == f"remedy: chmod 600 {directory.ca_key}"


def test_it_changes_nothing_and_a_coordinator_that_does_not_run_is_a_warning_unless_its_port_is_taken(
    doctor, directory
):
    Store.open(directory.database).close()

    def all_files():
        found = (path for path in directory.root.rglob("*") if path.is_file())
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}

    before = all_files()
    assert "it does not run" in doctor("--dir", directory.root).warnings
    assert all_files() == before
    with socket.create_server(("127.0.0.1", directory.port)):
        assert "another program has its port" in doctor("--dir", directory.root).problems[0]


def test_damage_in_a_coordinator_s_directory_is_found_piece_by_piece(doctor, directory):
    def row(version, **facts):
        return SavedModelRow(version=version, round=version, last_record=version, at=1.0, **facts)

    with Store.open(directory.database) as store, store.batch():
        store.add_run(run_id="r1", name="n", task="digits", strategy="fedavg", config={}, seed=7, submitted_at=1.0)
        kept = [save_model(directory.models, {"w": np.full(3, value, np.float32)}) for value in (1.0, 2.0, 3.0)]
        for version, (sha256, path) in enumerate(kept):
            store.record_saved_model("r1", row(version, sha256=sha256, bytes_file=path.stat().st_size))
    journal, checkpoints = directory.runs / "r1" / "journal", directory.runs / "r1" / "checkpoints"
    (directory.runs / "r1").mkdir(mode=0o700)
    with WalJournal(journal, lambda body: {}) as wal:
        for version in range(1, 30):
            wal.record_aggregation(version, [f"a{version}"])
            wal.commit()
        saved = save_state(checkpoints, row(1, sha256="0", bytes_file=1), 29)
    assert doctor("--dir", directory.root).problems == []
    state = checkpoints / f"{saved.sha256}.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    kept[0][1].write_bytes(b"damaged")
    kept[1][1].unlink()
    said = doctor("--dir", directory.root)
    assert [text.split(":")[0] for text in said.problems] == ["run r1", f"the model {kept[0][0][:12]}… is damaged"]
    assert said.of("models", "warning")[0]["text"].endswith("is missing")
    wal_file = next(journal.glob("*.wal"))
    body = bytearray(wal_file.read_bytes())
    body[200] ^= 255
    wal_file.write_bytes(body)
    assert any("is damaged at byte" in text for text in doctor("--dir", directory.root).problems)
    (checkpoints / f"{9:020d}.checkpoint.json").write_text(f'{{"v": {FORMAT_VERSION + 1}}}')
    assert "start a newer edgefl" in [
        row["remedy"] for row in doctor("--dir", directory.root).of("journals", "problem")
    ]


def test_a_damaged_and_a_newer_database_are_problems(doctor, directory):
    Store.open(directory.database).close()
    whole = directory.database.read_bytes()
    directory.database.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    assert "restore" in doctor("--dir", directory.root).of("database", "problem")[0]["remedy"]
    directory.database.write_bytes(whole)
    with closing(sqlite3.connect(directory.database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    assert doctor("--dir", directory.root).of("database", "problem")[0]["remedy"] == "update edgefl"


def test_certificates_that_have_ended_are_of_another_ca_or_for_other_names_are_problems(
    doctor, directory, monkeypatch
):
    real_time = time.time
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: real_time() + 21 * 366 * 86_400.0)
        assert sum(" ended on " in text for text in doctor("--dir", directory.root).problems) == 3
    server = pki.issue_server_certificate(directory.load_authority(), ["elsewhere.lan"])
    directory.server_cert.write_bytes(server.cert_pem)
    directory.server_key.write_bytes(server.key_pem)
    (wrong_name,) = doctor("--dir", directory.root).problems
    assert "is not for 127.0.0.1" in wrong_name
    stranger = pki.issue_client_certificate(pki.create_authority("fleet"), "coordinator")
    directory.client_cert.write_bytes(stranger.cert_pem)
    directory.client_key.write_bytes(stranger.key_pem)
    assert "the coordinator's own certificate is not from this fleet's CA" in doctor("--dir", directory.root).problems


# What a wrong clock is to a Python program; nothing of ours is changed.
_SHIFTED = """
import sys, time
real_time, off_s = time.time, float(sys.argv.pop(1))
time.time = lambda: real_time() + off_s
from edgefl.cli.main import main
main()
"""


def test_a_board_whose_clock_is_wrong_is_told_and_works_all_the_same(joined):
    words = [str(-50 * 365 * 86_400.0), "-q", "doctor", "--format", "json", "--state", str(joined.root)]
    done = subprocess.run([sys.executable, "-c", _SHIFTED, *words], capture_output=True, text=True, check=False)
    said = Said(done.returncode, done.stdout)
    assert said.problems == []
    (wrong, apart) = said.of("clock", "warning")
    assert wrong["text"].startswith("this machine's clock says 197")
    assert apart["text"].endswith("s ahead of this one")
    assert len(said.of("broker", "ok")) == 2


def test_a_device_whose_fleet_is_away_or_whose_files_are_damaged_says_so(doctor, joined, directory, shard):
    nobody = f"127.0.0.1:{find_free_port()}"
    joined.update(addresses=(nobody,), broker_port=find_free_port())
    assert doctor("--state", joined.root).checks_with_problems == ["coordinator", "broker"]
    joined.update(addresses=(nobody, f"127.0.0.1:{directory.port}"))
    assert doctor("--state", joined.root).problems == [], "the coordinator says where the broker is"
    shard.write_bytes(b"no shard")
    joined.key.chmod(0o604)
    assert doctor("--state", joined.root).checks_with_problems == ["files", "shards"]
    joined.ca.unlink()
    assert any("ca.pem" in text for text in doctor("--state", joined.root).problems)
    shutil.rmtree(joined.root)
    assert doctor("--state", joined.root).of("device", "problem")
