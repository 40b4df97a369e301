from __future__ import annotations

import hashlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from webhook_receiver import Receiver

from edgefl.coordinator.directory import StartOptions, change_addresses, init_directory, load_directory
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.alerts import (
    DAY_S,
    FLUSH_TIMEOUT_S,
    MAX_QUEUED,
    Alert,
    AlertMonitor,
    Readings,
    WebhookConfig,
    WebhookRejectedError,
    WebhookSender,
    evaluate_rules,
    send_alert,
    update_alerts,
)
from edgefl.coordinator.runs.history_writer import HistoryRows
from edgefl.coordinator.runs.run_metrics import ActiveRun, FailedRun, RunMetrics
from edgefl.coordinator.service import Coordinator
from edgefl.core.config import AlertSettings
from edgefl.core.errors import ConfigError, NetworkError
from edgefl.core.protocol import Heartbeat, StatusMessage
from edgefl.core.settings import from_mapping
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.store import Store

SETTINGS = AlertSettings(webhook="https://hooks.example/x")
RUN = ActiveRun(
    run_id="r1", name="n", task="digits", strategy="fedavg", status=RunStatus.RUNNING, round=7, version=7,
    accuracy=None, typical_round_s=None, since_last_round_s=0.0,
)  # fmt: skip


def wrong(settings: AlertSettings = SETTINGS, **readings: object) -> list[tuple[str, str]]:
    return [found.key for found in evaluate_rules(Readings(**readings), settings)]  # type: ignore[arg-type]  # by name


def test_nothing_is_wrong_with_a_fleet_that_is_well() -> None:
    assert wrong(gone_s={"pi": 299.0}, run=RUN, disk_free_bytes={"coordinator": 10**9}, broker_lost_s=59.0,
                 certificate_left_s={"ca": 31 * DAY_S}) == []  # fmt: skip


def test_a_device_is_missed_after_its_minutes() -> None:
    assert wrong(gone_s={"pi-1": 300.0, "pi-2": 10.0}) == [("device-gone", "pi-1")]


def test_a_run_stalls_after_so_many_times_its_usual_but_not_below_the_least() -> None:
    assert wrong(run=replace(RUN, typical_round_s=1.0, since_last_round_s=599.0)) == []
    assert wrong(run=replace(RUN, typical_round_s=1.0, since_last_round_s=600.0)) == [("run-stalled", "r1")]
    assert wrong(run=replace(RUN, typical_round_s=200.0, since_last_round_s=999.0)) == []
    assert wrong(run=replace(RUN, typical_round_s=200.0, since_last_round_s=1000.0)) == [("run-stalled", "r1")]
    assert wrong(run=replace(RUN, since_last_round_s=600.0)) == [("run-stalled", "r1")]


def test_a_full_disk_must_have_room_again_before_it_is_over() -> None:
    limit = SETTINGS.disk_free_bytes
    low = ("disk-low", "pi-1")
    assert wrong(disk_free_bytes={"pi-1": limit - 1, "pi-2": limit}) == [low]
    still = evaluate_rules(Readings(disk_free_bytes={"pi-1": int(limit * 1.09)}), SETTINGS, {low})
    assert [found.key for found in still] == [low]
    assert evaluate_rules(Readings(disk_free_bytes={"pi-1": int(limit * 1.1) + 1}), SETTINGS, {low}) == []


def test_failed_runs_a_lost_broker_and_old_certificates_are_told() -> None:
    failed = [FailedRun(run_id="r0", reason="no device can do this", number=1, num_rounds=0)]
    assert wrong(failed=failed, broker_lost_s=60.0, certificate_left_s={"server": 3 * DAY_S}) == [
        ("run-failed", "r0"), ("broker-lost", "broker"), ("certificate-ends", "server"),
    ]  # fmt: skip
    assert wrong(replace(SETTINGS, broker_lost_s=0.0), broker_lost_s=0.0) == []


def test_an_alert_starts_once_and_ends_once_and_may_start_again() -> None:
    active, gone = {}, Alert(kind="device-gone", subject="pi", message="gone for 5 min")
    (started,) = update_alerts(active, [gone], 10.0)
    assert (started.started_at, started.ended_at) == (10.0, None)
    assert update_alerts(active, [replace(gone, message="gone for 6 min")], 20.0) == []
    (ended,) = update_alerts(active, [], 30.0)
    assert (ended.alert_id, ended.started_at, ended.ended_at) == (started.alert_id, 10.0, 30.0)
    assert update_alerts(active, [], 40.0) == []
    (again,) = update_alerts(active, [gone], 50.0)
    assert again.alert_id != started.alert_id


def test_the_body_has_a_version_and_a_line_for_chat_services() -> None:
    (started,) = update_alerts({}, [Alert(kind="run-failed", subject="r1", message="why")], 10.0)
    assert started.to_json("lab") == {
        "v": 1, "id": started.alert_id, "fleet": "lab", "alert": "run-failed", "subject": "r1", "state": "started",
        "started_at": 10.0, "ended_at": None, "message": "why", "text": "[lab] ALERT run-failed r1: why",
    }  # fmt: skip
    over = replace(started, ended_at=20.0).to_json("lab")
    assert (over["state"], over["text"][:10]) == ("ended", "[lab] OVER")


@pytest.mark.parametrize(
    "value",
    [{"webhook": "hooks.example"}, {"webhook": "ftp://x/y"}, {"webhook": "https://"}, {"webhook": "https://[x"},
     {"webhok": "https://x"}, {"device_gone_s": -1}, {"run_stalled_factor": 0.5}, {"check_s": 0}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^(unknown setting )?alerts\."):
        from_mapping(AlertSettings, value, "alerts")


class Site:
    """A fleet in memory under a clock that is set by hand, and the watch over it."""

    def __init__(self, receiver: Receiver, directory: Path, **settings: float) -> None:
        self.now_s, self.looks, self.is_connected, self.expiries = 1000.0, 0, True, {"ca": 2e9}
        self.registry = DeviceRegistry(PresenceTracker(heartbeat_s=5.0), self.clock)
        self.registry.record_broker_link(connected=True)
        self.meter = RunMetrics(clock=self.clock)
        for number, name in enumerate(("pi-1", "pi-2")):
            self.registry.add(name, node_id=number, role="trainer", groups=(), examples={})
        usual = AlertSettings(webhook=receiver.url, check_s=0.01, disk_free_bytes=1)
        self.watch = AlertMonitor(
            replace(usual, **settings),  # type: ignore[arg-type]  # numbers by name
            fleet="lab", registry=self.registry, run_metrics=self.meter, directory=directory,
            is_broker_connected=lambda: self.is_connected, expiries=self.expiries, expected={"pi-1"},
            clock=self.clock, monotonic=self.look,
        )  # fmt: skip
        self.watch.start()

    def clock(self) -> float:
        return self.now_s

    def look(self) -> float:
        self.looks += 1
        return self.now_s

    def beat(self, name: str, session: int = 1, **vitals: int) -> None:
        self.registry.record_status(name, StatusMessage(state="online", boot_id="b", session_no=session))
        self.registry.record_heartbeat(name, Heartbeat(seq=session, session_no=session, uptime_s=5.0, **vitals))

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.registry.tick()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


@pytest.fixture
def make_site(receiver: Receiver, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(**settings: float) -> Site:
        sites.append(Site(receiver, tmp_path, **settings))
        return sites[-1]

    yield make
    for site in sites:
        site.watch.stop()
    assert not {"alerts", "webhook"} & {thread.name for thread in threading.enumerate()}


def looked(site: Site) -> None:
    """Waits for one whole look at what is now."""
    before, until_s = site.looks, time.monotonic() + 60
    while site.looks < before + 2:
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_device_that_is_gone_is_told_when_its_minutes_are_over_and_when_it_is_back(
    make_site: Callable[..., Site], receiver: Receiver
) -> None:
    site = make_site(device_gone_s=60.0)
    site.beat("pi-1")
    site.pass_s(30.0)
    looked(site)
    site.pass_s(59.0)
    looked(site)
    assert receiver.told() == []
    site.pass_s(2.0)
    receiver.wait(lambda: receiver.told() == [("device-gone", "pi-1", "started")])
    site.pass_s(5.0)
    site.beat("pi-1", session=2)
    receiver.wait(lambda: len(receiver.requests) == 2)
    assert receiver.told()[1] == ("device-gone", "pi-1", "ended")
    first, second = receiver.bodies
    assert first["id"] == second["id"]
    assert second["ended_at"] > first["started_at"]


def test_a_device_that_the_last_coordinator_knew_and_that_never_came_is_gone_too(
    make_site: Callable[..., Site], receiver: Receiver
) -> None:
    site = make_site(device_gone_s=60.0)
    looked(site)
    site.pass_s(61.0)
    receiver.wait(lambda: receiver.told() == [("device-gone", "pi-1", "started")])  # not pi-2, which said goodbye
    site.registry.remove("pi-1")
    receiver.wait(lambda: receiver.told()[1:] == [("device-gone", "pi-1", "ended")])


def test_a_device_that_said_goodbye_is_not_missed(make_site: Callable[..., Site], receiver: Receiver) -> None:
    site = make_site(device_gone_s=60.0)
    site.beat("pi-1")
    site.registry.record_status("pi-1", StatusMessage(state="offline", boot_id="b", session_no=1))
    site.pass_s(1000.0)
    looked(site)
    assert receiver.told() == []


def run(name: str) -> RunRecord:
    return RunRecord(
        run_id=name, name="n", task="digits", strategy="fedavg", config={}, status=RunStatus.RUNNING, reason=None,
        submitted_at=1.0, started_at=2.0, finished_at=None, rounds=0, version=0, accuracy=None, seed=7,
    )  # fmt: skip


def test_a_run_that_failed_is_told_even_when_another_begins_at_once(
    make_site: Callable[..., Site], receiver: Receiver
) -> None:
    site = make_site()
    site.meter.on_run_started(run("r1"))
    site.meter.on_run_ended("r1", RunStatus.FAILED, "no device can do this")
    site.meter.on_run_started(run("r2"))
    receiver.wait(lambda: receiver.told() == [("run-failed", "r1", "started")])
    assert "no device can do this" in receiver.bodies[0]["text"]
    looked(site)
    looked(site)
    assert len(receiver.requests) == 1, "no round of the next run has closed yet"
    site.meter.record_rows(HistoryRows(closed_rounds={1: (1, 2.0)}))
    receiver.wait(lambda: receiver.told()[1:] == [("run-failed", "r1", "ended")])


def test_a_run_in_which_nothing_happens_is_told(make_site: Callable[..., Site], receiver: Receiver) -> None:
    site = make_site(run_stalled_s=100.0)
    site.meter.on_run_started(run("r1"))
    looked(site)
    site.now_s += 101.0
    receiver.wait(lambda: receiver.told() == [("run-stalled", "r1", "started")])
    site.meter.on_run_ended("r1", RunStatus.STOPPED, "by hand")
    receiver.wait(lambda: receiver.told()[1:] == [("run-stalled", "r1", "ended")])


def test_disk_broker_and_certificates_are_looked_at(make_site: Callable[..., Site], receiver: Receiver) -> None:
    site = make_site(disk_free_bytes=1000, broker_lost_s=10.0)
    site.beat("pi-1", disk_free_bytes=10)
    receiver.wait(lambda: receiver.told() == [("disk-low", "pi-1", "started")])
    site.is_connected = False
    looked(site)
    site.now_s += 11.0
    receiver.wait(lambda: receiver.told()[1:] == [("broker-lost", "broker", "started")])
    site.is_connected = True
    receiver.wait(lambda: receiver.told()[2:] == [("broker-lost", "broker", "ended")])
    site.expiries["server"] = site.now_s + 86_400.0
    receiver.wait(lambda: receiver.told()[3:] == [("certificate-ends", "server", "started")])
    assert "in 1 days" in receiver.bodies[-1]["message"]


def test_a_look_that_fails_does_not_end_the_watch(
    make_site: Callable[..., Site], receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(device_gone_s=60.0)
    site.expiries["broken"] = None  # type: ignore[assignment]  # on purpose
    receiver.wait(lambda: "could not be looked at" in caplog.text)
    del site.expiries["broken"]
    looked(site)
    site.pass_s(61.0)
    receiver.wait(lambda: receiver.told() == [("device-gone", "pi-1", "started")])


def test_a_real_coordinator_tells_its_webhook_of_a_run_that_fails(receiver: Receiver, tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
    with directory.settings.open("a") as settings:
        settings.write(f'\n[alerts]\nwebhook = "{receiver.url}"\nsecret = "s"\ncheck_s = 0.05\n')
    directory = load_directory(directory.root)
    with Store.open(directory.database) as store:
        store.add_run(
            run_id="bad", name="n", task="digits", strategy="fedavg", seed=7, submitted_at=1.0,
            config={"run": {"task": "digits", "init": str(tmp_path / "none.safetensors")}},
        )  # fmt: skip
    options = StartOptions(host="127.0.0.1", port=directory.port, broker_port=find_free_port(), broker="embedded")
    with Coordinator(directory, options, build_run):
        receiver.wait(lambda: receiver.told() == [("run-failed", "bad", "started")])
    assert receiver.requests[0][0]["X-Edgefl-Signature"].startswith("sha256=")


def test_settings_keep_their_alerts_when_they_are_written_again(receiver: Receiver, tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab")
    with directory.settings.open("a") as settings:
        settings.write(f'\n[alerts]\nwebhook = "{receiver.url}"\ndevice_gone_s = 60\n')
    change_addresses(directory.root, ["10.0.0.1"])
    again = load_directory(directory.root).alerts
    assert (again.webhook, again.device_gone_s, again.secret) == (receiver.url, 60.0, None)


def message(number: int) -> dict[str, object]:
    return {"alert": "test", "subject": str(number), "state": "started"}


@pytest.fixture
def sender(receiver: Receiver) -> Iterator[WebhookSender]:
    made = WebhookSender(WebhookConfig(url=receiver.url), initial_backoff_s=0.02)
    made.start()
    yield made
    made.stop()


def test_a_body_is_signed_with_the_secret_and_only_then(receiver: Receiver) -> None:
    send_alert(WebhookConfig(url=receiver.url, secret="key"), {"text": "grüße"})
    send_alert(WebhookConfig(url=receiver.url), {"text": "x"})
    (signed, body), (plain, _) = receiver.requests
    assert signed["X-Edgefl-Signature"] == "sha256=" + hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert (signed["Content-Type"], "grüße" in body.decode()) == ("application/json", True)
    assert "X-Edgefl-Signature" not in plain


def test_what_fails_is_tried_again_in_order_until_it_arrives(receiver: Receiver, sender: WebhookSender) -> None:
    receiver.answers = [503, 429, 500, 200, 200]
    sender.send(message(1))
    sender.send(message(2))
    receiver.wait(lambda: sender.num_queued == 0)
    assert [body["subject"] for body in receiver.bodies] == ["1", "1", "1", "1", "2"]


def test_a_receiver_that_comes_up_later_gets_what_waited() -> None:
    port = find_free_port()
    sender = WebhookSender(WebhookConfig(url=f"http://127.0.0.1:{port}/"), initial_backoff_s=0.02)
    sender.start()
    sender.send(message(1))
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(10)
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    sender.stop()
    assert sender.num_queued == 0


@pytest.mark.parametrize("status", [400, 404, 302])
def test_an_answer_that_will_not_change_is_not_asked_for_again(
    receiver: Receiver, sender: WebhookSender, status: int
) -> None:
    receiver.answers = [status]
    sender.send(message(1))
    sender.send(message(2))
    receiver.wait(lambda: sender.num_queued == 0)
    assert [body["subject"] for body in receiver.bodies] == ["1", "2"]


def test_the_kinds_of_failure_are_told_apart(receiver: Receiver) -> None:
    receiver.answers = [404, 503]
    with pytest.raises(WebhookRejectedError, match="answered 404"):
        send_alert(WebhookConfig(url=receiver.url), {})
    with pytest.raises(NetworkError, match="answered 503") as later:
        send_alert(WebhookConfig(url=receiver.url), {})
    assert not isinstance(later.value, WebhookRejectedError)
    with pytest.raises(NetworkError, match="cannot be reached"):
        send_alert(WebhookConfig(url="http://127.0.0.1:9/secret"), {})


def test_nobody_waits_for_a_receiver_that_does_not_answer(receiver: Receiver) -> None:
    receiver.hold.clear()
    sender = WebhookSender(WebhookConfig(url=receiver.url))
    sender.start()
    began_s = time.monotonic()
    for number in range(MAX_QUEUED + 5):
        sender.send(message(number))
    assert time.monotonic() - began_s < 10, "the receiver holds the first one for twenty"
    assert sender.num_queued == MAX_QUEUED
    receiver.hold.set()
    sender.stop()
    assert time.monotonic() - began_s < FLUSH_TIMEOUT_S + 15


def test_what_waits_at_the_end_is_tried_once_more(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.answers = [503]
    sender = WebhookSender(WebhookConfig(url=receiver.url), initial_backoff_s=60)
    sender.start()
    sender.send(message(1))
    receiver.wait(lambda: "an alert is tried again" in caplog.text)
    sender.stop()
    assert (len(receiver.requests), sender.num_queued) == (2, 0)
    assert "webhook" not in {thread.name for thread in threading.enumerate()}


def test_the_url_and_the_secret_are_never_logged(
    receiver: Receiver, sender: WebhookSender, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.answers = [503, 404]
    sender.send(message(1))
    receiver.wait(lambda: sender.num_queued == 0)
    assert "answered 503" in caplog.text
    assert "very-secret" not in caplog.text
    assert "very-secret" not in repr(WebhookConfig(url=receiver.url, secret="very-secret"))


def test_a_board_whose_list_lags_behind_is_told_until_it_has_the_newest(
    make_site: Callable[..., Site], receiver: Receiver
) -> None:
    site = make_site()

    def report(name: str, version: int) -> None:
        installs = {"list": {"version": version, "expires": 2_000_000_000}}
        site.registry.add(
            name, node_id=ord(name[-1]), role="trainer", groups=(), examples={}, facts={"installs": installs}
        )

    for name, version in (("pi-3", 2), ("pi-4", 3), ("pi-5", 3)):
        report(name, version)
    receiver.wait(lambda: receiver.told() == [("signatures-old", "pi-3", "started")])
    assert "it has list 2 of signers, others have list 3" in receiver.bodies[0]["text"]
    report("pi-3", 3)
    receiver.wait(lambda: receiver.told()[1:] == [("signatures-old", "pi-3", "ended")])
