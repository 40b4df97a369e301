from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from webhook_receiver import Receiver, run_that_fails

from edgefl.coordinator.directory import change_addresses, init_directory, load_directory
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.alert_rules import (
    DAY_S,
    Alert,
    Readings,
    evaluate_rules,
    list_notices,
    update_alerts,
)
from edgefl.coordinator.monitoring.alerts import AlertMonitor
from edgefl.coordinator.runs.history_writer import HistoryRows
from edgefl.coordinator.runs.run_metrics import ActiveRun, EndedRun, RunMetrics
from edgefl.core.config import AlertKind, AlertSettings
from edgefl.core.errors import ConfigError
from edgefl.core.protocol import Capabilities, Heartbeat, StatusMessage
from edgefl.core.settings import from_mapping
from edgefl.core.types import UpdateStatus
from edgefl.storage.repositories.records import RunRecord, RunStatus, UpdateRow

SETTINGS = AlertSettings(webhook="https://hooks.example/x")
RUN = ActiveRun(
    run_id="r1", name="n", task="digits", strategy="fedavg", status=RunStatus.RUNNING, round=7, version=7,
    accuracy=None, typical_round_s=None, since_last_round_s=0.0,
)  # fmt: skip


def wrong(settings: AlertSettings = SETTINGS, **readings: object) -> list[tuple[str, str]]:
    return [found.key for found in evaluate_rules(Readings(**readings), settings)]  # type: ignore[arg-type]  # by name


def test_nothing_is_wrong_with_a_fleet_that_is_well() -> None:
    assert wrong(gone_s={"pi": 299.0}, runs=[RUN], disk_free_bytes={"coordinator": 10**9}, broker_lost_s=59.0,
                 certificate_left_s={"ca": 31 * DAY_S}) == []  # fmt: skip


def test_a_device_is_missed_after_its_minutes() -> None:
    assert wrong(gone_s={"pi-1": 300.0, "pi-2": 10.0}) == [("device-gone", "pi-1")]


def test_a_run_stalls_after_so_many_times_its_usual_but_not_below_the_least() -> None:
    assert wrong(runs=[replace(RUN, typical_round_s=1.0, since_last_round_s=599.0)]) == []
    assert wrong(runs=[replace(RUN, typical_round_s=1.0, since_last_round_s=600.0)]) == [("run-stalled", "r1")]
    assert wrong(runs=[replace(RUN, typical_round_s=200.0, since_last_round_s=999.0)]) == []
    assert wrong(runs=[replace(RUN, typical_round_s=200.0, since_last_round_s=1000.0)]) == [("run-stalled", "r1")]
    assert wrong(runs=[replace(RUN, since_last_round_s=600.0)]) == [("run-stalled", "r1")]


def test_a_full_disk_must_have_room_again_before_it_is_over() -> None:
    limit = SETTINGS.disk_free_bytes
    low = ("disk-low", "pi-1")
    assert wrong(disk_free_bytes={"pi-1": limit - 1, "pi-2": limit}) == [low]
    still = evaluate_rules(Readings(disk_free_bytes={"pi-1": int(limit * 1.09)}), SETTINGS, {low})
    assert [found.key for found in still] == [low]
    assert evaluate_rules(Readings(disk_free_bytes={"pi-1": int(limit * 1.1) + 1}), SETTINGS, {low}) == []


def test_failed_runs_a_lost_broker_and_old_certificates_are_told() -> None:
    failed = [EndedRun(run_id="r0", status=RunStatus.FAILED, reason="no device can do this", number=1, num_rounds=0)]
    assert wrong(failed=failed, broker_lost_s=60.0, certificate_left_s={"server": 3 * DAY_S}) == [
        ("run-failed", "r0"), ("broker-lost", "broker"), ("certificate-ends", "server"),
    ]  # fmt: skip
    assert wrong(replace(SETTINGS, broker_lost_s=0.0), broker_lost_s=0.0) == []


def test_an_alert_starts_once_and_ends_once_and_may_start_again() -> None:
    active, gone = {}, Alert(kind=AlertKind.DEVICE_GONE, subject="pi", message="gone for 5 min")
    (started,) = update_alerts(active, [gone], 10.0)
    assert (started.started_at, started.ended_at) == (10.0, None)
    assert update_alerts(active, [replace(gone, message="gone for 6 min")], 20.0) == []
    (ended,) = update_alerts(active, [], 30.0)
    assert (ended.alert_id, ended.started_at, ended.ended_at) == (started.alert_id, 10.0, 30.0)
    assert update_alerts(active, [], 40.0) == []
    (again,) = update_alerts(active, [gone], 50.0)
    assert again.alert_id != started.alert_id


def test_the_body_has_a_version_and_a_line_for_chat_services() -> None:
    (started,) = update_alerts({}, [Alert(kind=AlertKind.RUN_FAILED, subject="r1", message="why")], 10.0)
    assert started.to_json("lab") == {
        "v": 1, "id": started.alert_id, "fleet": "lab", "alert": "run-failed", "subject": "r1", "state": "started",
        "started_at": 10.0, "ended_at": None, "message": "why", "text": "[lab] ALERT run-failed r1: why",
    }  # fmt: skip
    over = replace(started, ended_at=20.0).to_json("lab")
    assert (over["state"], over["text"][:10]) == ("ended", "[lab] OVER")


@pytest.mark.parametrize(
    "value",
    [{"webhook": "hooks.example"}, {"webhook": "ftp://x/y"}, {"webhook": "https://"}, {"webhook": "https://[x"},
     {"webhok": "https://x"}, {"device_gone_s": -1}, {"run_stalled_factor": 0.5}, {"check_s": 0},
     {"notify": ["ntfy.sh/fleet"]}, {"notify": ["ntfy://x"] * 17}, {"muted": ["device-gon"]}, {"accuracy_drop": 0},
     {"quiet_hours": ["22-7"]}, {"zone": "Atlantis"}, {"rejected_updates": 0}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^(unknown setting )?alerts\."):
        from_mapping(AlertSettings, value, "alerts")


@pytest.mark.parametrize("value", ["ntfy://x/very-secret", ["ntfy://x/very-secret", 5], ["very-secret"]])
def test_no_message_about_an_address_shows_it(value: object) -> None:
    with pytest.raises(ConfigError, match="notify") as refusal:
        from_mapping(AlertSettings, {"notify": value}, "alerts")
    assert "very-secret" not in str(refusal.value)


def test_an_accuracy_that_fell_is_told_until_it_is_half_way_back() -> None:
    fell = ("accuracy-fell", "r1")
    assert wrong(runs=[replace(RUN, accuracy=0.81, best_accuracy=0.9)]) == []
    assert wrong(runs=[replace(RUN, accuracy=0.79, best_accuracy=0.9)]) == [fell]
    assert wrong(runs=[replace(RUN, accuracy=float("nan"), best_accuracy=0.9)]) == [fell]
    for accuracy, still in ((0.84, [fell]), (0.86, [])):
        readings = Readings(runs=[replace(RUN, accuracy=accuracy, best_accuracy=0.9)])
        assert [found.key for found in evaluate_rules(readings, SETTINGS, {fell})] == still


def test_a_board_that_is_throttled_for_long_or_whose_updates_are_rejected_in_a_row_is_told() -> None:
    assert wrong(throttled={"pi-1": (59.0, "under-voltage")}) == []
    assert wrong(throttled={"pi-1": (60.0, "under-voltage")}) == [("throttled", "pi-1")]
    assert wrong(runs=[replace(RUN, rejections={"pi-1": (2, "norm"), "pi-2": (3, "norm")})]) == [
        ("updates-rejected", "pi-2")
    ]


def test_a_muted_kind_is_not_told() -> None:
    muted = replace(SETTINGS, muted=("throttled", "run-finished"))
    assert wrong(muted, throttled={"pi-1": (60.0, "x")}, drift={"pi-2": "psi 0.4"}) == [("data-drifted", "pi-2")]
    runs = [
        EndedRun(run_id=name, status=RunStatus.FINISHED, reason=reason, number=1, num_rounds=1, accuracy=0.9)
        for name, reason in (("r1", "rounds reached 5"), ("r2", "accuracy reached 0.9"), ("r3", "mse reached 0.2"))
    ]
    assert [notice.subject for notice in list_notices(runs, muted, 1.0)] == ["r2", "r3"]
    told = list_notices(runs, replace(SETTINGS, muted=()), 1.0)
    assert [notice.kind for notice in told] == ["run-finished", "goal-reached", "goal-reached"]
    assert told[0].to_json("lab")["text"] == "[lab] NOTICE run-finished r1: rounds reached 5; its accuracy is 0.9"
    assert (told[0].to_json("lab")["state"], told[0].ended_at) == ("notice", 1.0)
    assert list_notices(runs, AlertSettings(), 1.0) == [], "nobody who did not ask for it"


class Site:
    """A fleet in memory under a clock that is set by hand, and the watch over it."""

    def __init__(self, receiver: Receiver, directory: Path, **settings: object) -> None:
        self.now_s, self.looks, self.is_connected, self.expiries = 1000.0, 0, True, {"ca": 2e9}
        self.registry = DeviceRegistry(PresenceTracker(heartbeat_s=5.0), self.clock)
        self.registry.record_broker_link(connected=True)
        self.meter = RunMetrics(clock=self.clock)
        for number, name in enumerate(("pi-1", "pi-2")):
            self.registry.add(name, node_id=number, role="trainer", groups=(), examples={})
        usual = AlertSettings(webhook=receiver.url, check_s=0.01, disk_free_bytes=1)
        self.watch = AlertMonitor(
            replace(usual, **settings),  # type: ignore[arg-type]  # by name
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

    def beat(self, name: str, session: int = 1, **vitals: object) -> None:
        self.registry.record_status(name, StatusMessage(state="online", boot_id="b", session_no=session))
        self.registry.record_heartbeat(name, Heartbeat(seq=session, session_no=session, uptime_s=5.0, **vitals))  # type: ignore[arg-type]  # by name

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

    def make(**settings: object) -> Site:
        sites.append(Site(receiver, tmp_path, **settings))
        return sites[-1]

    yield make
    for site in sites:
        site.watch.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("alerts")]


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
    site.meter.record_rows("r2", HistoryRows(closed_rounds={1: (1, 2.0)}))
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


def test_throttling_and_drift_are_looked_at(make_site: Callable[..., Site], receiver: Receiver) -> None:
    site = make_site(throttled_s=10.0)
    site.beat("pi-1", throttled="under-voltage,capped")
    looked(site)
    site.now_s += 11.0
    receiver.wait(lambda: receiver.told() == [("throttled", "pi-1", "started")])
    assert "throttled for 11 s: under-voltage, capped" in receiver.bodies[0]["text"]
    site.beat("pi-1", session=2, throttled="ok")
    receiver.wait(lambda: receiver.told()[1:] == [("throttled", "pi-1", "ended")])
    claim = {"column": "3", "psi": 0.9, "ks": 0.2, "num_reference": 100, "num_newer": 40}
    site.registry.record_capabilities("pi-2", Capabilities(facts={"drift": {"digits": claim}}))
    receiver.wait(lambda: receiver.told()[2:] == [("data-drifted", "pi-2", "started")])
    assert "digits: psi 0.9" in receiver.bodies[2]["text"]


def test_a_run_is_followed_from_rejected_updates_and_a_lower_accuracy_to_its_end(
    make_site: Callable[..., Site], receiver: Receiver
) -> None:
    site = make_site(muted=(), rejected_updates=2)
    site.meter.on_run_started(run("r1"))

    def end(number: int, outcome: UpdateStatus) -> None:
        row = UpdateRow(
            assignment_id=f"a{number}", device_id="pi-1", round=1, base_version=0, outcome=outcome, reason="norm"
        )
        site.meter.record_rows("r1", HistoryRows(updates={row.assignment_id: row}))

    for number, outcome in enumerate((UpdateStatus.REJECTED, UpdateStatus.USED, UpdateStatus.REJECTED)):
        end(number, outcome)
    looked(site)
    assert receiver.told() == [], "not two in a row"
    end(3, UpdateStatus.REJECTED)
    receiver.wait(lambda: receiver.told() == [("updates-rejected", "pi-1", "started")])
    end(4, UpdateStatus.USED)
    receiver.wait(lambda: receiver.told()[1:] == [("updates-rejected", "pi-1", "ended")])
    for accuracy in (0.9, 0.5):
        site.meter.record_rows("r1", HistoryRows(accuracy=accuracy))
    receiver.wait(lambda: receiver.told()[2:] == [("accuracy-fell", "r1", "started")])
    site.meter.record_rows("r1", HistoryRows(accuracy=0.95))
    receiver.wait(lambda: receiver.told()[3:] == [("accuracy-fell", "r1", "ended")])
    site.meter.on_run_ended("r1", RunStatus.FINISHED, "accuracy reached 0.95")
    receiver.wait(lambda: receiver.told()[4:] == [("goal-reached", "r1", "notice")])
    looked(site)
    assert len(receiver.requests) == 5, "a notice is sent once, and nothing ends it"


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
    with run_that_fails(tmp_path, f'webhook = "{receiver.url}"\nsecret = "s"\ncheck_s = 0.05\n'):
        receiver.wait(lambda: receiver.told() == [("run-failed", "bad", "started")])
    assert receiver.requests[0][0]["X-Edgefl-Signature"].startswith("sha256=")


def test_settings_keep_their_alerts_when_they_are_written_again(receiver: Receiver, tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab")
    with directory.settings.open("a") as settings:
        settings.write(f'\n[alerts]\nwebhook = "{receiver.url}"\ndevice_gone_s = 60\nnotify = ["json://x"]\n')
    change_addresses(directory.root, ["10.0.0.1"])
    again = load_directory(directory.root).alerts
    assert (again.webhook, again.device_gone_s, again.secret) == (receiver.url, 60.0, None)
    assert again.notify == ("json://x",)


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
