"""The link against a real broker (mosquitto where it is installed, else the embedded one) and over real TLS."""

from __future__ import annotations

import gc
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import BrokerTls, client_context
from edgefl.coordinator.brokers.choice import make_broker
from edgefl.device.link import Link, LinkCallbacks, LinkIdentity, LinkPace, LinkTls
from edgefl.errors import NotJoinedError, StoreFullError
from edgefl.local_fleet import free_port
from edgefl.protocol import Capabilities, Command, CommandKind, Heartbeat, ProgressReport, Status

pytestmark = pytest.mark.timeout(60)

ROOT = "edgefl/v1/lab/pi-1"


def eventually(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s"
        time.sleep(0.01)


class Site:
    """A broker, its certificates, and an ear that hears all."""

    def __init__(self, directory):
        self.directory = directory
        self.authority = pki.create_authority("lab")
        self.port = free_port()
        self.broker = make_broker(
            "auto",
            directory=directory / "broker",
            fleet="lab",
            tls=self.files("server", pki.issue_server(self.authority, ["127.0.0.1"])),
            host="127.0.0.1",
            port=self.port,
        )
        self.broker.start()
        self.heard = []
        self.ear = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="coordinator")
        self.ear.tls_set_context(
            client_context(self.files("coordinator", pki.issue_client(self.authority, "coordinator")))
        )
        self.ear.reconnect_delay_set(1, 1)
        self.ear.on_connect = lambda client, *_: client.subscribe("edgefl/v1/lab/#", qos=1)
        self.ear.on_message = lambda _c, _d, m: self.heard.append((m.topic, bytes(m.payload)))
        self.ear.connect("127.0.0.1", self.port)
        self.ear.loop_start()
        eventually(self.ear.is_connected)
        self.links = []
        self.session_no = 0

    def close(self):
        for link in self.links:
            link.stop()
        self.ear.disconnect()
        self.ear.loop_stop()
        self.broker.stop()

    def files(self, name, pair):
        made = BrokerTls(**{kind: self.directory / f"{name}.{kind}" for kind in ("ca", "cert", "key")})
        made.ca.write_bytes(self.authority.cert_pem)
        made.cert.write_bytes(pair.cert_pem)
        made.key.write_bytes(pair.key_pem)
        return made

    def link_tls(self):
        made = self.files("pi-1", pki.issue_client(self.authority, "pi-1"))
        return LinkTls(ca=made.ca, cert=made.cert, key=made.key)

    def next_session_no(self):
        self.session_no += 1
        return self.session_no

    def link(self, *, addresses=None, tls=None, start=True, **callbacks):
        link = Link(
            addresses or [("127.0.0.1", self.port)],
            tls or self.link_tls(),
            LinkIdentity(fleet="lab", device_id="pi-1", boot_id="boot", version="1.2.3"),
            LinkCallbacks(
                on_bell=callbacks.get("on_bell", lambda: None),
                on_command=callbacks.get("on_command", lambda _: None),
                on_connection=callbacks.get("on_connection", lambda _: None),
            ),
            next_session_no=self.next_session_no,
            pace=LinkPace(max_backoff_s=0.5),
        )
        self.links.append(link)
        if start:
            link.start()
        return link

    def statuses(self):
        return [Status.load(payload) for name, payload in self.heard if name == f"{ROOT}/status" and payload]

    def said(self, kind):
        return [payload for name, payload in self.heard if name == f"{ROOT}/{kind}"]


@pytest.fixture
def site(tmp_path: Path):
    site = Site(tmp_path)
    yield site
    site.close()


def beat(seq):
    return Heartbeat(seq=seq, session_no=0, uptime_s=1.0)


def test_it_says_online_with_the_number_of_its_session(site):
    link = site.link()
    assert link.wait_connected(60)
    eventually(site.statuses)
    expected = Status(state="online", boot_id="boot", session_no=1, version="1.2.3", will=False)
    assert site.statuses() == [expected]
    assert link.session_no == 1


def test_a_clean_stop_says_offline_itself_and_leaves_no_thread(site):
    link = site.link()
    assert link.wait_connected(60)
    link.stop()
    eventually(lambda: len(site.statuses()) == 2)
    assert site.statuses()[-1] == Status(state="offline", boot_id="boot", session_no=1, version="1.2.3", will=False)
    assert not link.is_connected()
    assert not [thread for thread in threading.enumerate() if thread.name == "mqtt-link"]


def test_each_connection_has_its_own_session_number_and_will(site):
    link = site.link()
    assert link.wait_connected(60)
    eventually(site.statuses)
    site.broker.stop()
    eventually(lambda: not link.is_connected())
    site.broker.start()
    assert link.wait_connected(60)
    eventually(lambda: link.session_no == 2)
    # Somebody of the same name takes the session over: the broker sends the will of session 2.
    eventually(site.ear.is_connected)
    eventually(lambda: site.statuses()[-1].session_no == 2)
    rival = site.link(on_connection=lambda up: None)
    assert rival.wait_connected(60)
    eventually(lambda: any(status.will and status.session_no == 2 for status in site.statuses()))


def test_a_session_that_is_over_leaves_no_file_open_until_garbage_is_collected(site):
    link, tls = site.link(), site.link_tls()
    assert link.wait_connected(60)
    gc.collect()
    gc.disable()
    try:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for number in range(2, 6):
            link.renew(tls)
            eventually(lambda number=number: link.session_no == number and link.is_connected())
        eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, timeout_s=20)
    finally:
        gc.enable()


def test_an_attempt_that_fails_before_the_broker_hears_of_it_uses_no_session_number(site):
    site.broker.stop()
    link = site.link()
    until_s = time.monotonic() + 1.5
    eventually(lambda: time.monotonic() > until_s)
    site.broker.start()
    assert link.wait_connected(60)
    assert link.session_no == 1


def test_it_contradicts_an_offline_that_it_did_not_send(site):
    link = site.link()
    assert link.wait_connected(60)
    eventually(site.statuses)
    late_will = Status(state="offline", boot_id="boot", session_no=0, will=True)
    site.ear.publish(f"{ROOT}/status", late_will.dump(), qos=1, retain=True)
    eventually(lambda: [status.state for status in site.statuses()] == ["online", "offline", "online"])


def test_it_tries_every_address_of_the_coordinator(site):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = closed.getsockname()[1]
        link = site.link(
            addresses=[("no-such-host.invalid", site.port), ("127.0.0.1", nobody), ("127.0.0.1", site.port)]
        )
        assert link.wait_connected(60)


def test_draining_is_told_and_kept_over_a_reconnect(site):
    link = site.link()
    assert link.wait_connected(60)
    link.set_draining(draining=True)
    eventually(lambda: [status.state for status in site.statuses()] == ["online", "draining"])
    site.broker.stop()
    eventually(lambda: not link.is_connected())
    site.broker.start()
    eventually(lambda: site.statuses()[-1].session_no == 2)
    assert site.statuses()[-1].state == "draining"
    link.set_draining(draining=False)
    eventually(lambda: site.statuses()[-1].state == "online")


def test_heartbeats_carry_the_present_session_and_are_dropped_while_down(site):
    link = site.link(start=False)
    assert not link.publish_heartbeat(beat(1))
    link.start()
    assert link.wait_connected(60)
    assert link.publish_heartbeat(beat(2))
    eventually(lambda: site.said("heartbeat"))
    (heartbeat,) = [Heartbeat.load(payload) for payload in site.said("heartbeat")]
    assert (heartbeat.seq, heartbeat.session_no) == (2, 1)


def test_capabilities_are_said_again_after_a_broker_forgot_them(site):
    link = site.link(start=False)
    capabilities = Capabilities(facts={"cores": 4}, shards={"digits": 100})
    link.publish_capabilities(capabilities)
    link.start()
    eventually(lambda: len(site.said("capabilities")) == 1)
    site.broker.stop()
    site.broker.start()
    eventually(lambda: len(site.said("capabilities")) == 2)
    assert Capabilities.load(site.said("capabilities")[-1]) == capabilities


def test_progress_leaves_at_most_ten_times_a_second(site):
    link = site.link()
    assert link.wait_connected(60)
    started_s = time.monotonic()
    sent = 0
    while time.monotonic() - started_s < 0.55:
        sent += link.publish_progress(ProgressReport(assignment="a", iteration=sent, seconds_per_iteration=0.001))
    assert 1 <= sent <= 6
    eventually(lambda: len(site.said("progress")) == sent)


def test_the_bell_rings_once_at_connect_and_then_when_the_coordinator_rings(site):
    bells = []
    link = site.link(on_bell=lambda: bells.append(1))
    assert link.wait_connected(60)
    eventually(lambda: len(bells) == 1)
    eventually(site.statuses)
    site.ear.publish(f"{ROOT}/bell", b"")
    eventually(lambda: len(bells) == 2)


def test_a_command_that_comes_twice_runs_once(site):
    commands = []
    link = site.link(on_command=commands.append)
    assert link.wait_connected(60)
    for identifier in ("1", "1", "2", "1"):
        site.ear.publish(f"{ROOT}/command", Command(id=identifier, kind=CommandKind.RELOAD).dump(), qos=1)
    eventually(lambda: len(commands) == 2)
    site.ear.publish(f"{ROOT}/command", Command(id="3", kind=CommandKind.RELOAD).dump(), qos=1)
    eventually(lambda: [command.id for command in commands] == ["1", "2", "3"])


def test_malformed_commands_and_failing_callbacks_do_not_end_the_link(site, caplog):
    done = []

    def fail_once(command):
        done.append(command.id)
        if len(done) == 1:
            raise RuntimeError("a bug in the agent")

    link = site.link(on_command=fail_once)
    assert link.wait_connected(60)
    site.ear.publish(f"{ROOT}/command", b"\xff", qos=1)
    site.ear.publish(f"{ROOT}/status", b"[]", qos=1)
    for identifier in ("1", "2"):
        site.ear.publish(f"{ROOT}/command", Command(id=identifier, kind="reload").dump(), qos=1)
    eventually(lambda: done == ["1", "2"])
    assert link.is_connected()
    assert "dropped a message" in caplog.text
    assert "a bug in the agent" in caplog.text


def test_a_broker_of_another_ca_is_not_believed(site, tmp_path):
    stranger = tmp_path / "stranger.pem"
    stranger.write_bytes(pki.create_authority("elsewhere").cert_pem)
    link = site.link(tls=replace(site.link_tls(), ca=stranger))
    assert not link.wait_connected(1.0)
    assert site.statuses() == []


def test_a_host_name_that_the_certificate_does_not_hold_is_believed_only_on_request(site):
    strict = site.link(addresses=[("localhost", site.port)])
    assert not strict.wait_connected(1.0)
    strict.stop()
    lenient = site.link(addresses=[("localhost", site.port)], tls=replace(site.link_tls(), check_hostname=False))
    assert lenient.wait_connected(60)


def test_stopping_a_link_that_never_connected_takes_no_long_wait(site):
    site.broker.stop()
    link = site.link()
    started_s = time.monotonic()
    link.stop()
    assert time.monotonic() - started_s < 5


def test_a_missing_key_asks_to_join_again(site):
    with pytest.raises(NotJoinedError, match="join again"):
        site.link(tls=replace(site.link_tls(), key=site.directory / "missing"), start=False)


def test_no_address_asks_to_join_again(site):
    with pytest.raises(NotJoinedError, match="no address"):
        Link(
            [],
            site.link_tls(),
            LinkIdentity(fleet="lab", device_id="pi-1", boot_id="b"),
            LinkCallbacks(on_bell=lambda: None, on_command=lambda _: None),
            next_session_no=lambda: 1,
        )


def test_a_card_that_is_full_for_a_while_does_not_end_the_link(site):
    attempts = []

    def next_session_no():
        attempts.append(1)
        if len(attempts) < 3:
            raise StoreFullError("no space left on the card")
        return 7

    link = Link(
        [("127.0.0.1", site.port)],
        site.link_tls(),
        LinkIdentity(fleet="lab", device_id="pi-1", boot_id="boot", version="1.2.3"),
        LinkCallbacks(on_bell=lambda: None, on_command=lambda _: None),
        next_session_no=next_session_no,
        pace=LinkPace(max_backoff_s=0.2),
    )
    site.links.append(link)
    link.start()
    assert link.wait_connected(60)
    assert link.session_no == 7
