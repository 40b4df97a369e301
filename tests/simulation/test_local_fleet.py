import socket
import time

import pytest

from edgefl.core.errors import RunFailedError
from edgefl.simulation import local_fleet
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, find_free_port


@pytest.mark.extended
def test_a_fleet_that_cannot_start_says_why_and_leaves_nothing_running(tmp_path):
    missing = LocalDeviceSpec(name="device-01", shards={"digits": str(tmp_path / "none.npz")})
    fleet = LocalFleet(root=tmp_path / "fleet", devices=[missing])
    with pytest.raises(RunFailedError, match=r"device-01 could not join: .*none\.npz"), fleet:
        pass
    assert fleet.processes["coordinator"].poll() == 0


@pytest.mark.extended
def test_devices_find_the_coordinator_at_their_own_hosts_and_its_death_is_told_with_its_last_words(tmp_path):
    hosts = {"device-01": "127.0.0.1", "device-02": "127.0.0.2"}
    devices = [LocalDeviceSpec(name=name, shards={"noop": str(tmp_path)}, host=host) for name, host in hosts.items()]
    with LocalFleet(root=tmp_path / "fleet", devices=devices, hosts=list(hosts.values())) as fleet:
        for name, host in hosts.items():
            told, until_s = f"connected to the coordinator at {host}:{fleet.port}", time.monotonic() + 30
            while told not in fleet.read_log_tail(name, 20):  # the broker may be reached first
                assert time.monotonic() < until_s, fleet.read_log_tail(name, 20)
                time.sleep(0.05)
        fleet.kill("coordinator")
        with pytest.raises(RunFailedError, match="the coordinator ended with code -9"):
            fleet.wait_for_devices(1)


def test_a_command_that_does_not_end_in_time_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(local_fleet, "START_TIMEOUT_S", 1e-3)
    with pytest.raises(RunFailedError, match="edgefl device status must end within 0 s, and did not"):
        LocalFleet(root=tmp_path, devices=[]).run_command("device", "status")


def test_a_free_port_is_kept_from_all_but_those_who_ask_for_it():
    port = find_free_port()
    with socket.socket() as one_that_looks_for_any_port, pytest.raises(OSError, match="in use"):
        one_that_looks_for_any_port.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    assert find_free_port() != port
