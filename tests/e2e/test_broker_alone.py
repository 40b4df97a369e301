"""The broker is a unit of its own: devices go on through it while the coordinator beside it is killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from requirements import needs

from edgefl.coordinator import pki
from edgefl.coordinator.directory import load_directory
from edgefl.core.config import parse_run
from edgefl.device.mqtt.connection import MqttConnection
from edgefl.device.mqtt.session import MqttCallbacks, MqttIdentity
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.system.atomic_files import TlsFiles

pytestmark = [pytest.mark.extended, pytest.mark.timeout(240)]

BETWEEN_S = 0.02
KEPT = 999_999


class Talker:
    """A link that says ever higher numbers to the other one, in a thread of its own, and keeps what it hears."""

    def __init__(self, fleet: LocalFleet, name: str, other: str, port: int) -> None:
        directory = load_directory(fleet.directory)
        pair = pki.issue_client_certificate(directory.load_authority(), name)
        files = {kind: fleet.root / f"{name}.{kind}" for kind in ("cert", "key")}
        files["cert"].write_bytes(pair.cert_pem)
        files["key"].write_bytes(pair.key_pem)
        self.name, self.other = name, other
        self.heard: list[int] = []
        self.said = 0
        self.sessions = 0
        self._stopping = threading.Event()
        self.link = MqttConnection(
            [("127.0.0.1", port)],
            TlsFiles(ca=directory.ca_cert, **files),
            MqttIdentity(fleet=directory.fleet, device_id=name, boot_id="boot"),
            MqttCallbacks(on_wake_up=lambda: None, on_command=lambda _: None, on_peer_message=self._hear),
            next_session_no=self._next_session,
        )
        self.link.peers.subscribe()
        self.link.start()
        assert self.link.wait_connected(60)
        self._thread = threading.Thread(target=self._talk, name=f"talker-{name}")
        self._thread.start()

    def hush(self) -> None:
        """Says nothing more, but stays connected."""
        self._stopping.set()
        self._thread.join()

    def close(self) -> None:
        self.hush()
        self.link.stop()

    def _talk(self) -> None:
        while not self._stopping.wait(BETWEEN_S):
            self.said += 1
            assert self.link.peers.publish(self.other, self.said.to_bytes(4, "big"))

    def _hear(self, sender: str, payload: bytes) -> None:
        assert sender == self.other
        self.heard.append(int.from_bytes(payload, "big"))

    def _next_session(self) -> int:
        self.sessions += 1
        return self.sessions


@pytest.fixture(params=["auto", pytest.param("embedded", marks=[pytest.mark.slow, needs("mosquitto")])])
def site(request: Any, tools: Any, tmp_path: Path) -> Iterator[tuple[LocalFleet, int]]:
    """A broker in a process of its own, a coordinator that is told where it is, and a device agent."""
    with tools.fleet_beside_broker(tmp_path / "fleet", tools.devices(1), broker=request.param) as (fleet, _):
        yield fleet, int(fleet.broker.rpartition(":")[2])


def _works(fleet: LocalFleet) -> None:
    fleet.wait_for_devices(1)
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2, "evaluate_on": "none"}}))
    assert fleet.wait_for_run(run_id)["status"] == "finished"


def test_devices_talk_on_while_the_coordinator_is_killed_and_it_finds_everything_again(
    site: tuple[LocalFleet, int], tools: Any
) -> None:
    fleet, port = site
    _works(fleet)
    assert tools.eventually(lambda: fleet.list_history("heartbeats")), "the agent has found the broker"
    talkers = [Talker(fleet, "pi-1", "pi-2", port), Talker(fleet, "pi-2", "pi-1", port)]
    one, two = talkers
    try:
        tools.eventually(lambda: len(one.heard) > 5 and len(two.heard) > 5, what="they talk")
        one.link.peers.publish("pi-9", KEPT.to_bytes(4, "big"))
        fleet.kill("coordinator")
        before = len(one.heard), len(two.heard)
        tools.eventually(
            lambda: len(one.heard) > before[0] + 20 and len(two.heard) > before[1] + 20, what="they talk on"
        )
        fleet.start_coordinator()
        _works(fleet)
        one.hush()
        two.hush()
        tools.eventually(lambda: one.heard[-1] == two.said and two.heard[-1] == one.said, what="the last value")
        for talker in talkers:
            assert talker.heard == sorted(set(talker.heard)), "in order, and each once"
            assert talker.sessions == 1
        one.close()
        late = Talker(fleet, "pi-9", "pi-1", port)
        talkers.append(late)
        assert tools.eventually(lambda: late.heard) == [KEPT], "retained since before the kill"
    finally:
        for talker in talkers:
            talker.close()
