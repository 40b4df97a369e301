"""A board that tells all it can: joined and not, with and without what it needs, and never a secret."""

import io
import json
import re
import tarfile
import time
from pathlib import Path

import pytest
from board_trees import PI_3, plant
from digit_shards import digit_shard

from edgefl.cli.main import main
from edgefl.core.errors import DataError, VersionError
from edgefl.device.diagnostics import diagnostic_report, timings
from edgefl.device.diagnostics.diagnostic_report import (
    REPORT_FILE,
    DiagnosticReport,
    ReportContext,
    make_report,
    read_report,
    write_report,
)
from edgefl.device.enrolment.enroll import EnrolmentOptions, enroll
from edgefl.device.hardware.board_reader import no_program

SYSTEMCTL = """
case "$*" in
*edgefl-device.service*) printf 'LoadState=loaded\\nActiveState=active\\nNRestarts=3\\nEnvironment=TOKEN=abc\\n';;
*) printf 'LoadState=not-found\\nActiveState=inactive\\n';;
esac
"""
DMESG = """
echo '[    1.0] Booting Linux'
echo '[   12.5] hwmon hwmon1: Undervoltage detected!'
echo '[   13.5] mmc0: error -110 whilst initialising SD card, asked by 192.168.7.7'
"""


@pytest.fixture
def state(front_door, tmp_path):
    shard = digit_shard(tmp_path / "digits.npz", 100)
    token = front_door.token()
    wishes = EnrolmentOptions(name="pi-7", shards={"digits": str(shard)}, examples={"digits": 5}, threads=1)
    joined = enroll(token, wishes, root=tmp_path / "device", addresses=[front_door.address])
    joined.update(addresses=(front_door.address, "192.168.178.99:8000", "lab-server.example.org:8000"))
    return joined, token.text()


@pytest.fixture(autouse=True)
def _brisk(monkeypatch):
    monkeypatch.setattr(diagnostic_report, "HEALTH_INTERVAL_S", 0.05)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    for name, body in (("systemctl", SYSTEMCTL), ("dmesg", DMESG)):
        plant(folder, {name: f"#!/bin/sh\n{body}"})
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(timings, "IMPORT_NAMES", ("numpy", "no_such_library_of_edgefl"))


def contents(path):
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


@pytest.mark.usefixtures("programs")
def test_a_joined_board_tells_all_that_helps_and_nothing_that_is_secret(state, tmp_path, monkeypatch):
    device, token = state
    monkeypatch.setattr("edgefl.device.diagnostics.diagnostic_report.socket.gethostname", lambda: "living-room-pi")
    message = f"living-room-pi: no coordinator at 192.168.178.99:8000 with {token}; {device.key.read_text()}"
    log = {"n": 1, "at": 1.0, "level": "WARNING", "logger": "edgefl", "run": "r", "message": message}
    plant(device.root, {"logs/agent.jsonl": json.dumps(log) + "\n"})
    out = tmp_path / "report.tar.gz"
    write_report(out, make_report(ReportContext(state=device, scratch=device.root)))
    assert oct(out.stat().st_mode & 0o777) == "0o600"
    files = contents(out)
    names = ("kernel.txt", "log.txt", "report.json", "summary.txt")
    assert sorted(files) == [f"edgefl-report/{name}" for name in names]
    everything = "\n".join(files.values())
    keys = (device.key, device.cert, device.ca)
    secrets = [line for path in keys for line in path.read_text().splitlines() if not line.startswith("---")]
    hidden = [
        *secrets, token, token.partition(".")[2][:20], "192.168.178.99", "lab-server", "192.168.7.7",
        "living-room-pi", "TOKEN=abc", device.settings.ca_fingerprint, "PRIVATE KEY",
    ]  # fmt: skip
    assert [secret for secret in hidden if secret in everything] == []
    facts = json.loads(files[REPORT_FILE])
    assert (facts["v"], facts["device"]["device_id"], facts["device"]["tasks"]) == (1, "pi-7", ["digits"])
    assert facts["units"] == {"edgefl-device": {"LoadState": "loaded", "ActiveState": "active", "NRestarts": "3"}}
    assert files["edgefl-report/kernel.txt"].count("\n") == 1
    assert "Undervoltage detected!" in files["edgefl-report/kernel.txt"]
    assert "no coordinator at <host " in files["edgefl-report/log.txt"]
    assert facts["training"]["digits"]["steps_per_s"] > 1
    assert len(facts["health"]) >= diagnostic_report.MIN_HEALTH_SAMPLES
    assert facts["imports"]["numpy"]["max_rss_bytes"] > 1e6
    assert facts["imports"]["no_such_library_of_edgefl"] == {"missing": True}
    reached = [found for address, found in facts["latency"].items() if "median_s" in found]
    assert len(facts["latency"]) == 3
    assert 0 < reached[0]["median_s"] < 5
    assert {finding["check"] for finding in facts["findings"]} >= {"versions", "device", "certificates", "training"}


@pytest.mark.extended
@pytest.mark.usefixtures("programs")
def test_a_board_that_has_not_joined_tells_of_itself_offline(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["-q", "field-report"])
    assert ended.value.code == 0
    (path,) = tmp_path.glob("edgefl-report-board-*.tar.gz")
    facts = read_report(path)
    assert facts["device"] == {"joined": False}
    assert {name for name, part in facts.items() if isinstance(part, dict) and "error" in part} == set()
    assert not list(tmp_path.glob(".edgefl-card-*")), "what tried the card is still there"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["-q", "field-report", "--print", str(path)])
    assert "training.digits.steps_per_s: " in capsys.readouterr().out


def test_a_part_that_fails_or_hangs_leaves_the_others(tmp_path, monkeypatch):
    def crash():
        raise ZeroDivisionError("no such thing")

    plant(tmp_path, {"crashing_one.py": "import os, signal\nos.kill(os.getpid(), signal.SIGILL)"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = {"good": (5.0, lambda: {"x": 1}), "bad": (5.0, crash), "hung": (0.2, lambda: time.sleep(30)),
             "kernel": (1.0, list),
             "imports": (30.0, lambda: timings.measure_import_times(["crashing_one"]))}  # fmt: skip
    monkeypatch.setattr(diagnostic_report, "_list_sections", lambda _: parts)
    site = ReportContext(state=None, scratch=tmp_path, root=plant(tmp_path / "pi", PI_3), run=no_program)
    facts = make_report(site).facts
    assert facts["good"] == {"x": 1}
    assert facts["bad"] == {"error": "ZeroDivisionError: no such thing"}
    assert facts["hung"] == {"error": "took more than 0.2 s"}
    assert "crashed" in facts["imports"]["crashing_one"]["error"]
    assert {sample["throttled"] for sample in facts["health"]} == {"under-voltage,throttled"}


def archive(path, name, content):
    with tarfile.open(path, "w:gz") as file:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))
    return path


def test_what_is_no_report_is_refused_and_one_of_a_stranger_cannot_move_the_cursor(tmp_path, capsys):
    whole, path = tmp_path / "whole.tar.gz", tmp_path / "r.tar.gz"
    write_report(whole, DiagnosticReport(facts={"v": 1, "made_at": 1, "x": list(range(9999))}, texts={}))
    (tmp_path / "torn").write_bytes(whole.read_bytes()[:200])
    (tmp_path / "text").write_text("no archive")
    refused = [
        ("../../etc/passwd", b"{}"), (REPORT_FILE, b"[1]"), (REPORT_FILE, b"{"), (REPORT_FILE, b'{"v": "one"}'),
        (REPORT_FILE, b""), (REPORT_FILE, b" " * (5 << 20)), (REPORT_FILE, b"[" * 100_000),
    ]  # fmt: skip
    for made in (tmp_path / "torn", tmp_path / "text", *refused):
        with pytest.raises(DataError, match="is no field report"):
            read_report(made if isinstance(made, Path) else archive(path, *made))
    assert len(list(tmp_path.iterdir())) == 4, "nothing is unpacked"
    with pytest.raises(VersionError, match="a report of version 2, this edgefl reads 1"):
        read_report(archive(path, REPORT_FILE, b'{"v": 2}'))
    archive(path, REPORT_FILE, json.dumps({"v": 1, "a\x1b[2J": "b\x07\x1b]0;c\n"}).encode())
    with pytest.raises(SystemExit):
        main(["-q", "field-report", "--print", str(path)])
    assert capsys.readouterr().out == "v: 1\na[2J: b]0;c\n"


REPORTED = "comes first in the archive"


def test_the_docs_name_every_key_of_a_report():
    pages = [page.read_text() for page in (Path(__file__).parents[3] / "docs").rglob("*.md")]
    (text,) = [page.partition(REPORTED)[2] for page in pages if REPORTED in page]
    told = {name for row in re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    site = ReportContext(state=None, scratch=Path("/"), run=no_program)
    made = {*diagnostic_report._list_sections(site), "v", "made_at", "took_s", "edgefl", "health"}
    assert told == made - {"kernel"}, "kernel lines are a file of their own"
