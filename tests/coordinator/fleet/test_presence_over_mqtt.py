"""One contract for presence over both brokers: real device processes that are killed, stopped and cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from edgefl.coordinator.brokers.mqtt_service import MqttClient
from edgefl.coordinator.fleet.presence import DevicePresence, PresenceChanged, PresenceTracker
from edgefl.core.protocol import Command, CommandKind, Heartbeat, StatusMessage, Topic

pytestmark = [pytest.mark.timeout(110), pytest.mark.extended]

FAST_HEARTBEAT_S = 0.5
# A busy machine may hold a process back for longer than three fast heartbeats; those who must not be declared gone
# by mistake get slower ones.
STEADY_HEARTBEAT_S = 2.0


class Coordinator:
    """Bus and presence put together, as the live fleet does it."""

    def __init__(self, running, certificates, heartbeat_s):
        self.presence = PresenceTracker(heartbeat_s=heartbeat_s)
        self.events = []
        self.connections = []
        self.heartbeats = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.bus = MqttClient(
            running.address, certificates.of("coordinator"), "lab", self._on_message, self._on_connection
        )
        self._ticker = threading.Thread(target=self._tick)
        self.bus.connect()
        self._ticker.start()

    def close(self):
        self._stopping.set()
        self._ticker.join()
        self.bus.close()

    def get_state(self, device_id):
        with self._lock:
            return self.presence.get_state(device_id)

    def was_gone(self):
        return [
            event
            for event in self.events
            if isinstance(event, PresenceChanged) and event.after is DevicePresence.GONE
        ]

    def _on_message(self, device_id, kind, payload):
        now_s = time.monotonic()
        with self._lock:
            if kind is Topic.STATUS:
                self.events += self.presence.on_status(device_id, StatusMessage.load(payload), now_s)
            elif kind is Topic.HEARTBEAT:
                heartbeat = Heartbeat.load(payload)
                self.heartbeats.append((device_id, heartbeat))
                self.events += self.presence.on_heartbeat(device_id, heartbeat, now_s)

    def _on_connection(self, connected):
        with self._lock:
            self.connections.append(connected)
            self.presence.on_broker_link(connected=connected, now_s=time.monotonic())

    def _tick(self):
        while not self._stopping.wait(0.05):
            with self._lock:
                self.events += self.presence.tick(time.monotonic())


@pytest.fixture
def coordinator_of(running, certificates):
    made = []

    def make(heartbeat_s=FAST_HEARTBEAT_S):
        made.append(Coordinator(running, certificates, heartbeat_s))
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.close()


@pytest.fixture
def device_of(running, certificates, tmp_path, mqtt_tools):
    processes = []

    def make(name, heartbeat_s=FAST_HEARTBEAT_S):
        tls = certificates.of(name)
        settings = {
            "addresses": [[running.address.host, running.address.port]],
            "tls": {"ca": str(tls.ca), "cert": str(tls.cert), "key": str(tls.key)},
            "fleet": "lab",
            "device": name,
            "counter": str(tmp_path / f"{name}.session"),
            "heartbeat_s": heartbeat_s,
            "max_backoff_s": 1.0,
        }
        command = [sys.executable, str(mqtt_tools.device_process), json.dumps(settings)]
        process = subprocess.Popen(command, env=mqtt_tools.environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.kill()
        process.communicate()


def is_state(coordinator, name, state):
    return lambda: coordinator.get_state(name) is state


@pytest.mark.parametrize("heartbeat_s", [2.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_a_killed_device_is_gone_within_three_heartbeats_and_one_that_is_told_to_stop_says_goodbye(
    coordinator_of, device_of, mqtt_tools, heartbeat_s
):
    coordinator = coordinator_of(heartbeat_s)
    process, other = device_of("pi-1", heartbeat_s), device_of("pi-2", heartbeat_s)
    for name in ("pi-1", "pi-2"):
        mqtt_tools.eventually(is_state(coordinator, name, DevicePresence.ONLINE))
    process.kill()
    killed_s = time.monotonic()
    other.terminate()
    mqtt_tools.eventually(is_state(coordinator, "pi-1", DevicePresence.GONE), 3 * heartbeat_s)
    # By its will: silence alone would take longer.
    assert time.monotonic() - killed_s < 2.2 * heartbeat_s
    (gone,) = coordinator.was_gone()
    assert (gone.device_id, gone.reason.startswith("last will")) == ("pi-1", True)
    assert other.wait(60) == 0
    mqtt_tools.eventually(is_state(coordinator, "pi-2", DevicePresence.OFFLINE))


def test_a_device_that_falls_silent_is_gone_after_three_heartbeats_and_back_when_it_wakes(
    coordinator_of, device_of, mqtt_tools
):
    coordinator = coordinator_of()
    process = device_of("pi-1")
    mqtt_tools.eventually(is_state(coordinator, "pi-1", DevicePresence.ONLINE))
    os.kill(process.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    mqtt_tools.eventually(is_state(coordinator, "pi-1", DevicePresence.GONE), 20 * FAST_HEARTBEAT_S / 5 + 1)
    assert time.monotonic() - stopped_s >= 2 * FAST_HEARTBEAT_S
    os.kill(process.pid, signal.SIGCONT)
    mqtt_tools.eventually(is_state(coordinator, "pi-1", DevicePresence.ONLINE))


@pytest.mark.slow
def test_a_device_that_falls_silent_is_gone_within_20_seconds(coordinator_of, device_of, mqtt_tools):
    coordinator = coordinator_of(heartbeat_s=5.0)
    process = device_of("pi-1", heartbeat_s=5.0)
    mqtt_tools.eventually(lambda: len(coordinator.heartbeats) >= 2)
    os.kill(process.pid, signal.SIGSTOP)
    mqtt_tools.eventually(is_state(coordinator, "pi-1", DevicePresence.GONE), 20)


@pytest.mark.parametrize("running", ["mosquitto", pytest.param("embedded", marks=pytest.mark.slow)], indirect=True)
def test_a_broker_restart_makes_nobody_gone_and_everybody_comes_back_and_sets_its_will_again(
    running, coordinator_of, device_of, mqtt_tools
):
    coordinator = coordinator_of(STEADY_HEARTBEAT_S)
    process, _ = (device_of(name, STEADY_HEARTBEAT_S) for name in ("pi-1", "pi-2"))
    both = lambda: all(coordinator.get_state(name) is DevicePresence.ONLINE for name in ("pi-1", "pi-2"))  # noqa: E731 two uses
    mqtt_tools.eventually(both)
    running.broker.stop()
    mqtt_tools.eventually(lambda: coordinator.connections[-1:] == [False])
    # Longer than silence is forgiven otherwise.
    down_until_s = time.monotonic() + 3 * 1.1 * STEADY_HEARTBEAT_S + 0.5
    mqtt_tools.eventually(lambda: time.monotonic() > down_until_s)
    running.broker.start()
    seen = len(coordinator.heartbeats)
    mqtt_tools.eventually(lambda: {name for name, _ in coordinator.heartbeats[seen:]} == {"pi-1", "pi-2"})
    mqtt_tools.eventually(both)
    assert coordinator.was_gone() == []
    process.kill()
    mqtt_tools.eventually(is_state(coordinator, "pi-1", DevicePresence.GONE), 15)
    assert coordinator.was_gone()[0].reason.startswith("last will")
    with coordinator._lock:
        sessions = {
            record.device_id: record.session_no for record in coordinator.presence.list_records(time.monotonic())
        }
    assert sessions["pi-1"] >= 2


def test_bell_and_command_reach_the_device_and_a_repeated_command_runs_once(coordinator_of, device_of, mqtt_tools):
    coordinator = coordinator_of(STEADY_HEARTBEAT_S)
    process = device_of("pi-1", STEADY_HEARTBEAT_S)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(line.strip() for line in process.stdout), daemon=True)
    reader.start()
    mqtt_tools.eventually(lambda: coordinator.heartbeats)
    # A heartbeat shows that the subscriptions, which were sent before it, are there.
    for _ in range(2):
        coordinator.bus.send_command("pi-1", Command(id="1", kind=CommandKind.DRAIN))
    coordinator.bus.send_command("pi-1", Command(id="2", kind=CommandKind.RESUME))
    mqtt_tools.eventually(lambda: "command resume" in lines)
    assert lines.count("command drain") == 1
    bells = lines.count("bell")
    assert bells == 1  # rung once by the device itself when it connected
    coordinator.bus.notify("pi-1")
    mqtt_tools.eventually(lambda: lines.count("bell") == 2)


@pytest.mark.parametrize("running", ["mosquitto"], indirect=True)
def test_a_killed_mosquitto_comes_back_by_itself(running, coordinator_of, device_of, mqtt_tools):
    pid = running.broker.pid
    coordinator = coordinator_of(STEADY_HEARTBEAT_S)
    device_of("pi-1", STEADY_HEARTBEAT_S)
    mqtt_tools.eventually(is_state(coordinator, "pi-1", DevicePresence.ONLINE))
    os.kill(pid, signal.SIGKILL)
    mqtt_tools.eventually(lambda: coordinator.connections == [True, False, True])
    seen = len(coordinator.heartbeats)
    mqtt_tools.eventually(lambda: len(coordinator.heartbeats) > seen)
    mqtt_tools.eventually(is_state(coordinator, "pi-1", DevicePresence.ONLINE))
    assert coordinator.was_gone() == []
    assert running.broker.is_alive()
    assert running.broker.pid != pid
