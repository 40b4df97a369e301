from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import BrokerTls
from edgefl.coordinator.brokers.choice import make_broker, mosquitto_path
from edgefl.device.broker_probe import BrokerRules, probe_rules, shake_hands
from edgefl.device.mqtt_session import LinkTls, link_context
from edgefl.errors import BrokerError
from edgefl.local_fleet import free_port

KEEPS_TO_THEM = BrokerRules(writes_as_others=False, reads_others=False)
NEEDS_MOSQUITTO = pytest.mark.skipif(mosquitto_path() is None, reason="mosquitto is not installed")


class Site:
    """A fleet's certificates in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority, self.port = folder, pki.create_authority("lab"), free_port()
        server = pki.issue_server(self.authority, ["127.0.0.1"])
        self.write("ca", self.authority.cert_pem)
        self.write("server", server.cert_pem)
        self.write("server-key", server.key_pem)

    def write(self, name: str, content: bytes) -> Path:
        (self.folder / name).write_bytes(content)
        return self.folder / name

    def device(self, name: str, authority: pki.KeyPair | None = None) -> LinkTls:
        pair = pki.issue_client(authority or self.authority, name)
        return LinkTls(
            ca=self.folder / "ca", cert=self.write(name, pair.cert_pem), key=self.write(f"{name}-key", pair.key_pem)
        )

    def probe(self, name: str = "pi-1", tls: LinkTls | None = None, timeout_s: float = 5.0) -> BrokerRules:
        return probe_rules(
            "127.0.0.1", self.port, tls or self.device(name), fleet="lab", identity=name, timeout_s=timeout_s
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(params=["embedded", pytest.param("mosquitto", marks=NEEDS_MOSQUITTO)])
def own_broker(request: pytest.FixtureRequest, site: Site) -> Iterator[Site]:
    tls = BrokerTls(ca=site.folder / "ca", cert=site.folder / "server", key=site.folder / "server-key")
    made = make_broker(
        request.param, directory=site.folder / "broker", fleet="lab", tls=tls, host="127.0.0.1", port=site.port
    )
    made.start()
    yield site
    made.stop()


@pytest.fixture
def start_mosquitto(site: Site) -> Iterator[Callable[[str], None]]:
    """Starts one with the fleet's certificates and rules of somebody else's making."""
    processes = []

    def start(rules: str) -> None:
        site.write("acl", rules.encode())
        lines = [
            f"listener {site.port} 127.0.0.1", "user root", "allow_anonymous false",
            f"cafile {site.folder / 'ca'}", f"certfile {site.folder / 'server'}",
            f"keyfile {site.folder / 'server-key'}", "require_certificate true", "use_identity_as_username true",
            *([f"acl_file {site.folder / 'acl'}"] if rules else []),
        ]  # fmt: skip
        config = site.write("conf", "\n".join(lines).encode())
        processes.append(subprocess.Popen([str(mosquitto_path()), "-c", config], stderr=subprocess.DEVNULL))
        until_s = time.monotonic() + 60
        while True:
            try:
                shake_hands("127.0.0.1", site.port, site.device("waiter"))
            except BrokerError:
                assert time.monotonic() < until_s
                time.sleep(0.02)
            else:
                return

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_our_own_brokers_keep_to_the_rules(own_broker: Site) -> None:
    assert own_broker.probe() == KEEPS_TO_THEM


def test_a_probe_leaves_nothing_and_pushes_no_other_device_off(own_broker: Site) -> None:
    drops: list[object] = []
    other = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="pi-2")
    other.tls_set_context(link_context(own_broker.device("pi-2")))
    other.on_disconnect = lambda *_: drops.append(1)
    got: list[str] = []
    other.on_message = lambda _c, _d, message: got.append(message.topic)
    other.connect("127.0.0.1", own_broker.port)
    other.subscribe([("edgefl/v1/lab/+/peer/pi-2", 1), ("edgefl/v1/lab/pi-2/status", 1)])
    other.loop_start()
    own_broker.probe("pi-1")
    own_broker.probe("pi-1")
    assert (drops, got) == ([], [])
    other.disconnect()
    other.loop_stop()


@NEEDS_MOSQUITTO
def test_a_broker_without_rules_is_found_out(site: Site, start_mosquitto: Callable[[str], None]) -> None:
    start_mosquitto("")
    assert site.probe().writes_as_others


@NEEDS_MOSQUITTO
def test_a_broker_that_lets_devices_read_each_other_is_found_out(
    site: Site, start_mosquitto: Callable[[str], None]
) -> None:
    rules = "pattern read edgefl/v1/lab/#\npattern write edgefl/v1/lab/%u/#\n"
    start_mosquitto(rules)
    assert site.probe() == KEEPS_TO_THEM  # nobody has said anything yet
    other = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="pi-2")
    other.tls_set_context(link_context(site.device("pi-2")))
    other.connect("127.0.0.1", site.port)
    other.loop_start()
    other.publish("edgefl/v1/lab/pi-2/status", b"{}", qos=1, retain=True).wait_for_publish(5)
    other.disconnect()
    other.loop_stop()
    assert site.probe() == BrokerRules(writes_as_others=False, reads_others=True)


@NEEDS_MOSQUITTO
def test_a_broker_that_forgets_what_a_device_may_say_is_found_out(
    site: Site, start_mosquitto: Callable[[str], None]
) -> None:
    start_mosquitto("topic read nothing\n")
    with pytest.raises(BrokerError, match="does not carry what this device may say"):
        site.probe(timeout_s=1.0)


def test_a_broker_that_is_not_there_or_has_another_ca_is_said(site: Site, own_broker: Site, tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="cannot be reached"):
        shake_hands("127.0.0.1", free_port(), site.device("pi-1"))
    other = pki.create_authority("lab")
    stranger = site.device("pi-9", other)
    with pytest.raises(BrokerError, match=r"cannot be reached|does not let this certificate in"):
        site.probe("pi-9", stranger, timeout_s=2.0)
    site.write("ca", other.cert_pem)
    with pytest.raises(BrokerError, match="does not verify"):
        shake_hands("127.0.0.1", site.port, stranger)


def test_a_port_where_somebody_listens_and_says_nothing_is_no_broker(site: Site) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(BrokerError, match="cannot be reached"),
    ):
        shake_hands("127.0.0.1", mute.getsockname()[1], site.device("pi-1"), timeout_s=0.3)
