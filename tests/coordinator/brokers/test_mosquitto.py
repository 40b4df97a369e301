"""What only the private mosquitto must be asked: its process and its files."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import needs

from edgefl.coordinator import pki
from edgefl.coordinator.brokers import mosquitto as mosquitto_module
from edgefl.coordinator.brokers.mosquitto import (
    HEALTHY_AFTER_S,
    Mosquitto,
    compute_restart_delay_s,
    count_failures,
    find_mosquitto,
)
from edgefl.core.errors import StoreFullError
from edgefl.system.atomic_files import TlsFiles

pytestmark = [pytest.mark.timeout(60), needs("mosquitto")]

OWNER = """
import sys, time
from pathlib import Path
from edgefl.coordinator.brokers.mqtt_service import make_broker
from edgefl.system.atomic_files import TlsFiles
directory, ca, cert, key, port = sys.argv[1:]
broker = make_broker("mosquitto", directory=Path(directory), fleet="lab",
    tls=TlsFiles(ca=Path(ca), cert=Path(cert), key=Path(key)), host="127.0.0.1", port=int(port))
broker.start()
sys.stdout.write(f"{broker.pid}\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.fixture
def mosquitto(certificates, tmp_path, free_port):
    broker = Mosquitto(
        str(find_mosquitto()),
        directory=tmp_path / "broker",
        fleet="lab",
        tls=certificates.server(),
        host="127.0.0.1",
        port=free_port,
    )
    broker.start()
    yield broker
    broker.stop()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_dies_with_a_coordinator_that_is_killed(certificates, tmp_path, free_port, mqtt_tools):
    tls = certificates.server()
    arguments = [str(tmp_path / "broker"), str(tls.ca), str(tls.cert), str(tls.key), str(free_port)]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], env=mqtt_tools.environment, stdout=subprocess.PIPE, text=True
    )
    with owner:
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
    mqtt_tools.eventually(lambda: not is_running(pid))


def test_another_broker_on_the_port_is_not_taken_for_this_one(mosquitto, certificates, tmp_path):
    pair = pki.issue_server_certificate(certificates.authority, ["127.0.0.1"])
    own = TlsFiles(ca=certificates.server().ca, cert=tmp_path / "own.pem", key=tmp_path / "own.key")
    own.cert.write_bytes(pair.cert_pem)
    own.key.write_bytes(pair.key_pem)
    other = Mosquitto(
        str(find_mosquitto()), directory=tmp_path / "other", fleet="lab", tls=own, host="127.0.0.1",
        port=mosquitto._port,
    )  # fmt: skip
    assert mosquitto._is_answering()
    assert not other._is_answering()


def test_it_comes_back_again_and_again_with_the_rules_that_were_made_meanwhile(mosquitto, mqtt_tools, tmp_path):
    for name in ("pi-1", "pi-2"):
        pid = mosquitto.pid
        os.kill(pid, signal.SIGKILL)
        mqtt_tools.eventually(lambda: mosquitto.pid is None)
        mosquitto.revoke({name})
        mqtt_tools.eventually(lambda pid=pid: mosquitto.pid not in (None, pid))
        assert f"user {name}\ntopic deny #" in (tmp_path / "broker" / "acl").read_text()
    assert mosquitto.is_alive()
    pid = mosquitto.pid
    mosquitto.stop()
    assert (is_running(pid), mosquitto.pid) == (False, None)


@pytest.mark.parametrize("running", ["mosquitto"], indirect=True)
def test_who_retains_whatever_it_can_is_hung_up_on_before_the_memory_is_full(running, mqtt_tools, monkeypatch):
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(mosquitto_module, "MEMORY_FRACTION", (64 << 20) / total)
    running.broker.stop()
    running.broker.start()
    greedy = running.client("pi-1")
    for number in range(20):
        with contextlib.suppress(RuntimeError, ValueError):  # it is not connected any more
            greedy.publish(f"edgefl/v1/lab/pi-1/peer/nobody-{number}", bytes(8 << 20), retain=True, wait_s=1)
        if greedy.drops:
            break
    mqtt_tools.eventually(lambda: greedy.drops)
    status = Path(f"/proc/{running.broker.pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 100_000, "kB"
    assert running.client("pi-2").connected


@pytest.mark.parametrize("running", ["mosquitto"], indirect=True)
def test_who_was_refused_while_the_disk_was_full_is_dropped_when_there_is_room(
    running, mqtt_tools, monkeypatch, certificates
):
    monkeypatch.setattr(running.broker, "_authority", certificates.authority)
    running.broker.stop()
    running.broker.start()
    device = running.client("pi-1")
    with monkeypatch.context() as patched:
        patched.setattr(mosquitto_module, "write_atomic", _no_room)
        with pytest.raises(StoreFullError):
            running.broker.revoke({"pi-1"})
    running.broker.revoke({"pi-1"})
    mqtt_tools.eventually(lambda: device.drops)


def _no_room(path, content):
    raise StoreFullError(f"{path} cannot be written: no room")


def test_its_files_are_private_and_a_large_log_is_put_aside_at_the_next_start(mosquitto, tmp_path):
    mosquitto.stop()
    directory = tmp_path / "broker"
    (directory / "mosquitto.log").write_text("x" * 2_000_000)
    mosquitto.start()
    assert (directory / "mosquitto.log").stat().st_size < 100_000
    assert (directory / "mosquitto.log.1").stat().st_size == 2_000_000
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE((directory / name).stat().st_mode) for name in ("mosquitto.conf", "acl")} == {0o600}


def test_after_a_healthy_life_it_is_back_at_once_and_else_ever_later():
    failures, delays_s = 0, []
    for lived_s in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, HEALTHY_AFTER_S + 1, 1.0):
        failures = count_failures(failures, uptime_s=lived_s)
        delays_s.append(compute_restart_delay_s(failures))
    assert delays_s == [0.2, 1.0, 2.0, 5.0, 10.0, 10.0, 0.2, 1.0]
