from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.coordinator import pki
from edgefl.coordinator.broker import Broker, BrokerAddress, BrokerTls
from edgefl.coordinator.brokers import make_broker
from edgefl.device.link import Link, LinkCallbacks, LinkIdentity
from edgefl.device.mqtt_session import LinkTls
from edgefl.local_fleet import free_port
from edgefl.protocol import Heartbeat

BUSY_S = 1.5


class Fleet:
    def __init__(self, root: Path) -> None:
        authority = pki.create_authority("lab")
        self._root = root
        self.server = BrokerTls(**self._files("server", authority, pki.issue_server(authority, ["127.0.0.1"])))
        self.device = LinkTls(**self._files("pi", authority, pki.issue_client(authority, "pi")))

    def _files(self, name: str, authority: pki.KeyPair, pair: pki.KeyPair) -> dict[str, Path]:
        content = {"ca": authority.cert_pem, "cert": pair.cert_pem, "key": pair.key_pem}
        for kind, pem in content.items():
            (self._root / f"{name}.{kind}").write_bytes(pem)
        return {kind: self._root / f"{name}.{kind}" for kind in content}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture
def address(fleet: Fleet, tmp_path: Path) -> Iterator[BrokerAddress]:
    broker: Broker = make_broker(
        "auto", directory=tmp_path / "b", fleet="lab", tls=fleet.server, host="127.0.0.1", port=free_port()
    )
    yield broker.start()
    broker.stop()


def test_threads_that_publish_at_once_do_not_tear_the_connection(fleet: Fleet, address: BrokerAddress) -> None:
    sessions: list[int] = []
    link = Link(
        [(address.host, address.port)],
        fleet.device,
        LinkIdentity(fleet="lab", device_id="pi", boot_id="b", version="0.1.0"),
        LinkCallbacks(on_bell=lambda: None, on_command=lambda _: None),
        next_session_no=lambda: sessions.append(1) or len(sessions),  # type: ignore[func-returns-value] # append, then count
    )
    link.start()
    try:
        assert link.wait_connected(10)
        until_s = time.monotonic() + BUSY_S
        _together(until_s, lambda: link.publish_heartbeat(Heartbeat(seq=1, session_no=0, uptime_s=1.0)))
        assert link.is_connected()
    finally:
        link.stop()
    assert len(sessions) == 1


def _together(until_s: float, beat: object) -> None:
    def busy(link_call: object) -> None:
        while time.monotonic() < until_s:
            for _ in range(50):
                link_call()  # type: ignore[operator] # a call without arguments
            time.sleep(0.001)

    threads = [threading.Thread(target=busy, args=(beat,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
