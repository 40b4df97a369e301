from __future__ import annotations

from dataclasses import replace

import pytest

from edgefl.coordinator.monitoring.alerts import DAY_S, AlertCondition, AlertTracker, Readings, evaluate_rules
from edgefl.coordinator.runs.run_metrics import ActiveRun, FailedRun
from edgefl.core.config import AlertSettings, from_mapping
from edgefl.core.errors import ConfigError
from edgefl.storage.repositories.records import RunStatus

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
    book, gone = AlertTracker(), AlertCondition(kind="device-gone", subject="pi", message="gone for 5 min")
    (started,) = book.update([gone], 10.0)
    assert (started.started_at, started.ended_at) == (10.0, None)
    assert book.update([replace(gone, message="gone for 6 min")], 20.0) == []
    (ended,) = book.update([], 30.0)
    assert (ended.alert_id, ended.started_at, ended.ended_at) == (started.alert_id, 10.0, 30.0)
    assert book.update([], 40.0) == []
    (again,) = book.update([gone], 50.0)
    assert again.alert_id != started.alert_id


def test_the_body_has_a_version_and_a_line_for_chat_services() -> None:
    (started,) = AlertTracker().update([AlertCondition(kind="run-failed", subject="r1", message="why")], 10.0)
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
