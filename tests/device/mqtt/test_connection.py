"""The link against a real broker (mosquitto where it is installed, else the embedded one) and over real TLS."""

import contextlib
import gc
import itertools
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from broker_site import HOST, BrokerSite
from peer_boards import eventually

from edgefl.coordinator import pki
from edgefl.core.errors import NotJoinedError, StoreFullError
from edgefl.core.protocol import (
    HEARTBEAT_S,
    Capabilities,
    Command,
    CommandKind,
    Heartbeat,
    PresenceState,
    ProgressReport,
    StatusMessage,
)
from edgefl.device.mqtt.connection import (
    MAX_BACKOFF_S,
    MAX_TAKEOVER_BACKOFF_S,
    DeviceActivity,
    HeartbeatPublisher,
    MqttConnection,
)
from edgefl.device.mqtt.session import MqttCallbacks, MqttIdentity
from edgefl.simulation.local_fleet import find_free_port

pytestmark = pytest.mark.timeout(60)

ROOT = "edgefl/v1/lab/pi-1"
CANNOT_REACH = "cannot reach the broker"


class Site(BrokerSite):
    """With a coordinator that hears all."""

    def start(self):
        super().start()
        self.coordinator, self.heard = self.client("coordinator", "edgefl/v1/lab/#")
        return self

    def statuses(self):
        return [StatusMessage.load(payload) for payload in self.said("status") if payload]

    def said(self, kind):
        return [payload for name, payload in self.heard if name == f"{ROOT}/{kind}"]

    def say(self, kind, payload=b"", *, retain=False):
        self.coordinator.publish(f"{ROOT}/{kind}", payload, qos=1, retain=retain)


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path).start()
    yield site
    site.close()


def test_it_says_online_and_at_a_clean_stop_offline_and_leaves_no_thread(site):
    link = site.link()
    online = StatusMessage(state="online", boot_id="boot", session_no=1, version="1.2.3", will=False)
    eventually(lambda: site.statuses() == [online])
    assert link.session_no == 1
    link.stop()
    eventually(lambda: site.statuses() == [online, replace(online, state="offline")])
    assert not link.is_connected()
    assert not [thread for thread in threading.enumerate() if thread.name == "mqtt-link"]


def test_each_connection_has_a_number_and_a_will_of_its_own_and_says_everything_again(site):
    link, capabilities = site.link(is_up=False), Capabilities(facts={"cores": 4}, shards={"digits": 100})
    link.publish_capabilities(capabilities)
    link.start()
    assert link.wait_connected(60)
    link.set_draining(draining=True)
    eventually(lambda: [status.state for status in site.statuses()] == ["online", "draining"])
    eventually(lambda: len(site.said("capabilities")) == 1)
    site.broker.stop()
    eventually(lambda: not link.is_connected())
    site.broker.start()
    eventually(lambda: site.statuses()[-1].session_no == link.session_no == 2)
    assert site.statuses()[-1].state == "draining"
    eventually(lambda: len(site.said("capabilities")) == 2)
    assert Capabilities.load(site.said("capabilities")[-1]) == capabilities
    link.set_draining(draining=False)
    eventually(lambda: site.statuses()[-1].state == "online")
    # Somebody of the same name takes the session over: the broker sends the will of session 2.
    eventually(site.coordinator.is_connected)
    site.link()
    eventually(lambda: any(status.will and status.session_no == 2 for status in site.statuses()))


def test_a_session_that_is_over_leaves_no_file_open_until_garbage_is_collected(site):
    link, tls = site.link(), site.tls("pi-1")
    gc.collect()
    gc.disable()
    try:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for number in (2, 3):
            link.renew(tls)
            eventually(lambda number=number: link.session_no == number and link.is_connected())
        eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, timeout_s=20)
    finally:
        gc.enable()


def test_attempts_that_no_broker_hears_of_use_no_session_number_and_every_address_is_tried(site, caplog):
    nobody = find_free_port()
    lost = site.link("pi-2", addresses=[(HOST, nobody)], is_up=False)
    lost.start()
    eventually(lambda: CANNOT_REACH in caplog.text)
    started_s = time.monotonic()
    lost.stop()
    assert time.monotonic() - started_s < 5
    link = site.link(addresses=[("no-such-host.invalid", site.port), (HOST, nobody), (HOST, site.port)])
    assert link.session_no == 1


def test_it_contradicts_an_offline_that_it_did_not_send(site):
    site.link()
    eventually(site.statuses)
    site.say("status", StatusMessage(state="offline", boot_id="boot", session_no=0, will=True).dump(), retain=True)
    eventually(lambda: [status.state for status in site.statuses()] == ["online", "offline", "online"])


def test_what_holds_for_now_carries_the_session_is_dropped_while_down_and_leaves_ten_times_a_second(site):
    link, report = site.link(is_up=False), ProgressReport(assignment="a", iteration=1, seconds_per_iteration=0.001)
    beat = Heartbeat(seq=2, session_no=0, uptime_s=1.0)
    assert not link.publish_heartbeat(beat)
    assert not link.publish_progress(report)
    link.start()
    assert link.wait_connected(60)
    assert link.publish_heartbeat(beat)
    eventually(lambda: site.said("heartbeat"))
    (heartbeat,) = map(Heartbeat.load, site.said("heartbeat"))
    assert (heartbeat.seq, heartbeat.session_no) == (2, 1)
    started_s, num_sent = time.monotonic(), 0
    while num_sent < 3:
        num_sent += link.publish_progress(report)
    assert time.monotonic() - started_s >= 0.2
    eventually(lambda: len(site.said("progress")) == 3)


def test_bells_and_commands_come_over_the_broker_and_nothing_that_they_do_ends_the_link(site, caplog):
    bells, done = [], []

    def fail_once(command):
        done.append(command.id)
        if len(done) == 1:
            raise RuntimeError("a bug in the agent")

    link = site.link(on_wake_up=lambda: bells.append(1), on_command=fail_once)
    eventually(lambda: len(bells) == 1)
    eventually(site.statuses)
    site.say("wakeup")
    eventually(lambda: len(bells) == 2)
    site.say("command", b"\xff")
    site.say("status", b"[]")
    for identifier in ("1", "1", "2"):
        site.say("command", Command(id=identifier, kind=CommandKind.RELOAD).dump())
    eventually(lambda: done == ["1", "2"])
    assert link.is_connected()
    assert "dropped a message" in caplog.text
    assert "a bug in the agent" in caplog.text


def test_a_broker_of_another_ca_or_name_is_not_believed_but_on_request(site, tmp_path, caplog):
    stranger, tls = tmp_path / "stranger.pem", site.tls("pi-1")
    stranger.write_bytes(pki.create_authority("elsewhere").cert_pem)
    for host, trusted in ((HOST, replace(tls, ca=stranger)), ("localhost", tls)):
        caplog.clear()
        link = site.link(addresses=[(host, site.port)], tls=trusted, is_up=False)
        link.start()
        eventually(lambda: CANNOT_REACH in caplog.text)
        assert not link.is_connected()
        link.stop()
    assert site.statuses() == []
    site.link(addresses=[("localhost", site.port)], tls=replace(tls, check_hostname=False))


def test_a_missing_key_or_address_asks_to_join_again(site):
    with pytest.raises(NotJoinedError, match="join again"):
        site.link(tls=replace(site.tls("pi-1"), key=site.folder / "missing"), is_up=False)
    with pytest.raises(NotJoinedError, match="no address"):
        made_link(site, lambda: 1, [])


def made_link(site, next_session_no, addresses):
    identity = MqttIdentity(fleet="lab", device_id="pi-1", boot_id="b")
    callbacks = MqttCallbacks(on_wake_up=lambda: None, on_command=lambda _: None)
    return MqttConnection(
        addresses, site.tls("pi-1"), identity, callbacks, next_session_no=next_session_no, max_backoff_s=0.2
    )


def test_a_card_that_is_full_for_a_while_does_not_end_the_link(site):
    attempts = []

    def next_session_no():
        attempts.append(1)
        if len(attempts) < 3:
            raise StoreFullError("no space left on the card")
        return 7

    link = made_link(site, next_session_no, [(HOST, site.port)])
    site.links.append(link)
    link.start()
    assert link.wait_connected(60)
    assert link.session_no == 7


SLOW_BYTES = 500_000
PIECE_BYTES = 10_000
KEEP_ALIVE_S = 2


class SlowUplink:
    """Passes a piece up to the broker every 0.1 s and everything down at once; nothing while it is `clogged`."""

    def __init__(self, port):
        self._there = (HOST, port)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        self._listener.bind((HOST, 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        self.clogged, self._ended = threading.Event(), threading.Event()
        self.num_bytes = 0
        self._closers = contextlib.ExitStack()
        self._thread = self._start(self._accept)

    def close(self):
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self._closers.close()

    def _start(self, work, *arguments):
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                board = self._closers.enter_context(self._listener.accept()[0])
                broker = self._closers.enter_context(socket.create_connection(self._there))
                self._start(self._up, board, broker)
                self._start(self._down, broker, board)

    def _up(self, board, broker):
        with contextlib.suppress(OSError):
            while not self._ended.wait(0.1):
                piece = b"" if self.clogged.is_set() else board.recv(PIECE_BYTES)
                broker.sendall(piece)
                self.num_bytes += len(piece)

    def _down(self, broker, board):
        with contextlib.suppress(OSError):
            while piece := broker.recv(65536):
                board.sendall(b"" if self.clogged.is_set() else piece)


@pytest.mark.extended
@pytest.mark.parametrize(("is_accepted", "longest_s"), [(True, MAX_TAKEOVER_BACKOFF_S), (False, MAX_BACKOFF_S)])
def test_a_session_that_a_clone_took_over_is_followed_by_the_next_before_the_device_counts_as_gone(
    site, monkeypatch, is_accepted, longest_s
):
    link, pauses = made_link(site, lambda: 1, [(HOST, 1)]), []
    link._max_backoff_s = MAX_BACKOFF_S

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 20:
            link._stopping.set()

    monkeypatch.setattr(link, "_connect_to_any", lambda: is_accepted)
    monkeypatch.setattr(link._interrupted, "wait", pause)
    link._run()
    assert longest_s / 2 < max(pauses) <= longest_s
    assert MAX_TAKEOVER_BACKOFF_S <= HEARTBEAT_S - 2.0, "a connection and its first status take time, too"


def test_a_packet_may_take_longer_than_the_keep_alive_and_a_broker_that_takes_nothing_more_is_left(site):
    with contextlib.closing(SlowUplink(site.port)) as uplink:
        link = site.link(addresses=[(HOST, uplink.port)], keep_alive_s=KEEP_ALIVE_S)
        started_s = time.monotonic()
        link.peers.publish("pi-2", bytes(SLOW_BYTES))
        eventually(lambda: uplink.num_bytes > SLOW_BYTES)
        assert time.monotonic() - started_s > 2 * KEEP_ALIVE_S
        assert site.num_sessions["pi-1"] == 1
        link.peers.publish("pi-2", bytes(SLOW_BYTES))
        eventually(lambda: uplink.num_bytes > 1.1 * SLOW_BYTES)
        uplink.clogged.set()
        eventually(lambda: not link.is_connected(), timeout_s=4 * KEEP_ALIVE_S)
        uplink.clogged.clear()
        eventually(lambda: site.num_sessions["pi-1"] > 1 and link.is_connected())
        link.stop()


def test_without_a_host_of_its_own_the_broker_is_where_the_coordinator_is(state):
    state.update(addresses=("10.0.0.7:8000", "10.0.0.8:8000", "10.0.0.7:9000"), broker_port=1999, broker_host=None)
    assert state.settings.brokers == [("10.0.0.7", 1999), ("10.0.0.8", 1999)]


def test_a_broker_that_moved_is_followed_also_when_the_card_is_full(state, full_card):
    with full_card(), pytest.raises(StoreFullError):
        state.update(broker_port=1999, broker_host="10.0.0.9")
    assert state.settings.brokers == [("10.0.0.9", 1999)]


@pytest.mark.parametrize("was_up", [True, False])
def test_following_goes_offline_at_the_broker_before_and_subscribes_again_at_another(site, tmp_path, was_up):
    (tmp_path / "other").mkdir()
    other, heard = BrokerSite(tmp_path / "other", authority=site.authority).start(), []
    try:
        here = (HOST, site.port if was_up else find_free_port())
        link = site.link(addresses=[here], is_up=was_up, on_peer_message=lambda *message: heard.append(message))
        link.publish_capabilities(Capabilities(facts={"model": "Pi"}, shards={}))
        link.peers.subscribe()
        if not was_up:
            link.start()
        _, said = other.client("coordinator", "edgefl/v1/lab/#")
        link.switch_broker([(HOST, other.port)])
        eventually(lambda: f"{ROOT}/capabilities" in [name for name, _ in said] and link.is_connected())
        if was_up:
            eventually(lambda: site.statuses()[-1].state == PresenceState.OFFLINE)
        assert sum(thread.name == "mqtt-link" for thread in threading.enumerate()) == 1
        link.peers.publish("pi-1", b"x")
        eventually(lambda: heard == [("pi-1", b"x")])
        link.stop()
        assert not any(thread.name == "mqtt-link" for thread in threading.enumerate())
    finally:
        other.close()


class Ear:
    def __init__(self):
        self.beats, self.times_s, self._changed = [], [], threading.Condition()

    def __call__(self, heartbeat):
        with self._changed:
            self.beats.append(heartbeat)
            self.times_s.append(time.monotonic())
            self._changed.notify_all()
        return True

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.beats) >= count, 30)


@contextlib.contextmanager
def beating(heart):
    heart.start()
    yield heart
    heart.stop()


@pytest.fixture
def ear():
    return Ear()


def health(uptime_s=0.0, **readings):
    return {"uptime_s": uptime_s, **readings}


def test_it_beats_at_once_counts_and_keeps_its_pace_within_the_jitter(ear):
    with beating(HeartbeatPublisher(ear, health, interval_s=0.1, seed="pi-1")):
        ear.wait_for(6)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(ear.times_s)]
    assert all(gap_s >= 0.09 for gap_s in gaps_s)
    assert len(set(gaps_s)) > 1
    assert [beat.seq for beat in ear.beats[:6]] == [1, 2, 3, 4, 5, 6]


def test_it_tells_the_board_and_what_the_device_is_at(ear):
    signs = health(uptime_s=9.0, temperature_c=51.5, throttled="ok", cpu_fraction=0.5, memory_bytes=7)
    activity = DeviceActivity(run="r", assignment="r-1", iteration=3, holding=["r-0"], clock_skew_s=-2.5)
    with beating(HeartbeatPublisher(ear, lambda: signs, lambda: activity)):
        ear.wait_for(1)
    beat = ear.beats[0]
    assert (beat.uptime_s, beat.temperature_c, beat.throttled, beat.cpu_fraction) == (9.0, 51.5, "ok", 0.5)
    assert (beat.run, beat.assignment, beat.iteration, beat.holding) == ("r", "r-1", 3, ["r-0"])
    assert beat.clock_skew_s == -2.5
    assert beat.battery_fraction is None


def test_a_reading_that_fails_costs_one_beat_and_not_the_heart(ear, caplog):
    readings = iter([RuntimeError("sensor"), health(), health()])

    def read():
        reading = next(readings, health())
        if isinstance(reading, Exception):
            raise reading
        return reading

    with beating(HeartbeatPublisher(ear, read, interval_s=0.02)):
        ear.wait_for(2)
    assert "a heartbeat was lost" in caplog.text


def test_beat_now_does_not_wait_for_the_interval_and_stopping_ends_the_thread(ear):
    with beating(HeartbeatPublisher(ear, health, interval_s=60.0)) as heart:
        ear.wait_for(1)
        heart.publish_now()
        ear.wait_for(2)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    assert len(ear.beats) == 2


def test_it_beats_while_the_main_thread_is_busy(ear):
    with beating(HeartbeatPublisher(ear, health, interval_s=0.02)):
        until_s = time.monotonic() + 10
        while len(ear.beats) < 4 and time.monotonic() < until_s:
            sum(range(1000))
        assert len(ear.beats) >= 4
