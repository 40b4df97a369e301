from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgefl.coordinator.connections import REFUSAL_REASONS, ConnectionLimiter
from edgefl.coordinator.directory import StartOptions, add_access_tokens, init_directory
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.metrics import (
    ConnectionCollector,
    FleetCollector,
    Metrics,
    load_grafana_dashboard,
    render_device_series,
)
from edgefl.coordinator.runs.history_writer import HistoryRows
from edgefl.coordinator.runs.run_metrics import RunMetrics
from edgefl.coordinator.service import Coordinator
from edgefl.core.config import ConnectionSettings
from edgefl.core.protocol import Heartbeat, StatusMessage
from edgefl.core.types import UpdateStatus
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.repositories.records import AssignmentRow, EvaluationRow, RunRecord, RunStatus, UpdateRow
from edgefl.system.https_client import create_pinned_context, request

RUN = RunRecord(
    run_id="r1", name="n", task="digits", strategy="fedavg", config={}, status=RunStatus.RUNNING, reason=None,
    submitted_at=1.0, started_at=2.0, finished_at=None, rounds=0, version=0, accuracy=None, seed=7,
)  # fmt: skip


class Site:
    """A fleet in memory and what is exported of it; `now_s` is its clock."""

    def __init__(self, directory: Path, *, max_devices: int = 1000) -> None:
        self.now_s = 100.0
        self.metrics = Metrics()
        self.meter = RunMetrics(self.metrics.registry, lambda: self.now_s)
        self.registry = DeviceRegistry(PresenceTracker(heartbeat_s=5.0), lambda: self.now_s)
        self.registry.record_broker_link(connected=True)
        self.metrics.register(
            FleetCollector(
                registry=self.registry, run_metrics=self.meter, directory=directory,
                store_file=directory / "edgefl.db", num_queued=lambda: 3,
                is_broker_connected=lambda: True, num_dropped=lambda: 4,
                expiries={"ca": 2e9}, max_devices=max_devices,
            ),
            lambda: render_device_series(self.registry, max_devices=max_devices, now=1000.0),
        )  # fmt: skip

    def add(self, name: str, **vitals: Any) -> None:
        self.registry.add(name, node_id=hash(name), role="trainer", groups=(), examples={"digits": 5})
        if vitals:
            self.registry.record_status(name, StatusMessage(state="online", boot_id="b", session_no=1))
            self.registry.record_heartbeat(name, Heartbeat(seq=1, session_no=1, uptime_s=5.0, **vitals))

    def value(self, name: str, /, **labels: str) -> float | None:
        """The sample of this name and these labels in what a scrape gets."""
        return samples(self.metrics.render()).get((name, frozenset(labels.items())))


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def update(
    number: int, outcome: UpdateStatus | None = None, staleness: int | None = None, **figures: Any
) -> UpdateRow:
    return UpdateRow(
        assignment_id=f"a{number}", device_id="d", round=1, base_version=0, outcome=outcome, staleness=staleness,
        **figures,
    )  # fmt: skip


def rows(*updates: UpdateRow, **more: Any) -> HistoryRows:
    return HistoryRows(updates={row.assignment_id: row for row in updates}, **more)


def test_devices_are_counted_by_presence_and_shown_one_by_one(site: Site) -> None:
    site.add("pi-1", temperature_c=61.5, throttled="hot", battery_fraction=0.4, power_w=3.5)
    site.add("pi-2", temperature_c=40.0, throttled="ok")
    site.add("pi-3")
    site.now_s += 2.0
    assert site.value("edgefl_devices", presence="online") == 2
    assert site.value("edgefl_devices", presence="never-seen") == 1
    assert site.value("edgefl_devices", presence="gone") == 0
    assert site.value("edgefl_device_temperature_celsius", device="pi-1") == 61.5
    assert site.value("edgefl_device_throttled", device="pi-1") == 1
    assert site.value("edgefl_device_throttled", device="pi-2") == 0
    assert site.value("edgefl_device_battery_ratio", device="pi-1") == 0.4
    assert site.value("edgefl_device_battery_ratio", device="pi-2") is None
    assert site.value("edgefl_device_last_seen_timestamp_seconds", device="pi-1") == 998.0
    assert site.value("edgefl_device_present", device="pi-3") == 0
    site.now_s += 60.0
    site.registry.tick()
    assert site.value("edgefl_devices", presence="gone") == 2
    assert site.value("edgefl_device_present", device="pi-1") == 0


def test_a_fleet_over_the_limit_is_only_counted(tmp_path: Path) -> None:
    site = Site(tmp_path, max_devices=2)
    for number in range(2):
        site.add(f"pi-{number}", temperature_c=50.0)
    assert site.value("edgefl_device_temperature_celsius", device="pi-0") == 50.0
    assert site.value("edgefl_devices_without_series") == 0
    site.add("pi-2", temperature_c=50.0)
    assert b'device="' not in site.metrics.render()
    assert site.value("edgefl_devices_without_series") == 3
    assert site.value("edgefl_devices", presence="online") == 3


def test_an_update_counts_once_with_its_bytes_whenever_its_outcome_comes(site: Site) -> None:
    site.meter.on_run_started(RUN)
    site.meter.record_rows("r1", rows(update(1, bytes_up=10, bytes_down=20)))
    assert site.value("edgefl_updates_total", outcome="used") == 0
    site.meter.record_rows("r1", rows(update(1, UpdateStatus.USED, 3, bytes_up=10, bytes_down=20)))
    site.meter.record_rows(
        "r1", rows(update(2, UpdateStatus.USED, 0, bytes_up=1, bytes_down=2), update(3, UpdateStatus.LOST))
    )
    assert site.value("edgefl_updates_total", outcome="used") == 2
    assert site.value("edgefl_updates_total", outcome="lost") == 1
    assert site.value("edgefl_uplink_bytes_total") == 11
    assert site.value("edgefl_downlink_bytes_total") == 22
    assert site.value("edgefl_update_staleness_versions_sum") == 3
    assert site.value("edgefl_update_staleness_versions_bucket", le="0.0") == 1


def shown(site: Site, numbers: range, **how: bool) -> None:
    """A run is given work, gets updates for it, and closes a round with each."""
    for number in numbers:
        given = AssignmentRow(assignment_id=f"a{number}", device_id="d", round=1, base_version=0, dispatched_at=5.0)
        score = EvaluationRow(
            assignment_id=f"e{number}", round=number, version=number, device_id="d", source="device", loss=1.0,
            accuracy=0.5, num_examples=9, at=5.0, bytes_up=100, bytes_down=100,
        )  # fmt: skip
        site.meter.record_rows("r1", rows(update(number, bytes_up=1, bytes_down=2), dispatches=[given]), **how)
        ended = update(number, UpdateStatus.USED, 0, bytes_up=1, bytes_down=2)
        closed = {"opened_rounds": {number: (5.0, 1)}, "closed_rounds": {number: (number, 6.0)}}
        site.meter.record_rows("r1", rows(ended, evaluations=[score], **closed), **how)


def counted(site: Site) -> tuple[float | None, ...]:
    """Assignments, updates used, rounds, and bytes of both ways."""
    return (
        site.value("edgefl_assignments_total"), site.value("edgefl_updates_total", outcome="used"),
        site.value("edgefl_rounds_closed_total"), site.value("edgefl_uplink_bytes_total"),
        site.value("edgefl_downlink_bytes_total"), site.value("edgefl_round_duration_seconds_sum"),
        site.value("edgefl_update_staleness_versions_count"),
    )  # fmt: skip


def test_what_a_run_is_shown_again_after_a_pause_counts_once_and_what_was_not_seen_counts_now(site: Site) -> None:
    site.meter.on_run_started(RUN)
    shown(site, range(1, 3))
    site.meter.on_checkpoint("r1")
    shown(site, range(3, 5))
    before = counted(site)
    site.meter.on_run_paused("r1")
    shown(site, range(3, 5), is_replay=True)
    assert counted(site) == before == (4, 4, 4, 404, 408, 4, 4)
    shown(site, range(5, 6), is_replay=True)  # its journal had it, but the pause came before it was counted
    shown(site, range(6, 7))
    assert counted(site) == (6, 6, 6, 606, 612, 6, 6)


def test_what_another_coordinator_did_is_not_counted_and_the_run_stands_where_it_is(site: Site) -> None:
    site.meter.on_run_started(RUN)
    shown(site, range(1, 4), is_replay=True)
    site.meter.record_rows("r1", rows(update(4, bytes_up=1, bytes_down=2)), is_replay=True)
    assert set(counted(site)) == {0}
    assert (site.value("edgefl_run_round", run="r1"), site.value("edgefl_run_version", run="r1")) == (3, 3)
    site.meter.record_rows("r1", rows(update(4, UpdateStatus.USED, 0, bytes_up=1, bytes_down=2)))
    assert counted(site) == (0, 1, 0, 0, 0, 0, 1), "its bytes came before"
    site.meter.on_run_paused("r1")
    shown(site, range(1, 4), is_replay=True)
    assert counted(site) == (0, 1, 0, 0, 0, 0, 1)


def test_a_round_lasts_from_its_first_assignment_to_its_close(site: Site) -> None:
    site.meter.on_run_started(RUN)
    given = AssignmentRow(assignment_id="a1", device_id="d", round=1, base_version=0, dispatched_at=50.0)
    site.meter.record_rows("r1", rows(dispatches=[given], opened_rounds={1: (50.0, 1)}))
    score = EvaluationRow(
        assignment_id="e", round=1, version=1, device_id="d", source="device", loss=1.0, accuracy=0.5,
        num_examples=9, at=53.0, bytes_up=5, bytes_down=6,
    )  # fmt: skip
    site.meter.record_rows("r1", rows(evaluations=[score], closed_rounds={1: (1, 54.0)}, accuracy=0.5))
    assert site.value("edgefl_round_duration_seconds_sum") == 4.0
    assert site.value("edgefl_rounds_closed_total") == 1
    assert site.value("edgefl_assignments_total") == 1
    assert site.value("edgefl_uplink_bytes_total") == 5
    assert (site.value("edgefl_run_round", run="r1"), site.value("edgefl_run_version", run="r1")) == (1, 1)
    assert site.value("edgefl_run_accuracy_ratio", run="r1") == 0.5
    assert site.value("edgefl_run_info", run="r1", name="n", task="digits", strategy="fedavg") == 1


def test_a_run_that_is_over_is_counted_and_no_longer_shown(site: Site) -> None:
    site.meter.on_run_started(RUN)
    site.meter.on_run_stopping("r1")
    assert (site.value("edgefl_runs", status="running"), site.value("edgefl_runs", status="stopping")) == (0, 1)
    site.meter.on_run_ended("r1", RunStatus.STOPPED, "by hand")
    site.meter.on_run_ended("r0", RunStatus.QUEUED, "its devices went on")
    assert (site.value("edgefl_runs", status="queued"), site.value("edgefl_runs", status="stopping")) == (3, 0)
    assert site.value("edgefl_runs_ended_total", status="stopped") == 1
    assert site.value("edgefl_runs_ended_total", status="queued") is None
    assert site.value("edgefl_run_round", run="r1") is None


def test_the_process_and_the_house_are_measured(site: Site, tmp_path: Path) -> None:
    (tmp_path / "edgefl.db").write_bytes(b"x" * 700)
    (tmp_path / "edgefl.db-wal").write_bytes(b"x" * 60)
    with site.meter.time_sync():
        pass
    assert site.value("edgefl_store_size_bytes") == 760
    assert site.value("edgefl_journal_sync_seconds_count") == 1
    assert site.value("edgefl_broker_connected") == 1
    assert site.value("edgefl_mqtt_messages_dropped_total") == 4
    assert site.value("edgefl_certificate_expiry_timestamp_seconds", certificate="ca") == 2e9
    assert (site.value("process_resident_memory_bytes") or 0) > 1e7
    assert (site.value("process_cpu_seconds_total") or 0) > 0
    assert (site.value("edgefl_disk_free_bytes") or 0) > 0


def test_connections_are_counted_by_listener_state_and_reason_of_a_refusal() -> None:
    made = {
        name: ConnectionLimiter(name, ConnectionSettings(max_pending_per_address=2), 100)
        for name in ("https", "mqtt")
    }
    slots = [made["https"].admit("192.0.2.1") for _ in range(4)]
    assert [slot is not None for slot in slots] == [True, True, False, False]
    assert slots[0] is not None
    slots[0].authenticate("board-1")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in ConnectionCollector(list(made.values())).collect()
        for sample in metric.samples
    }
    assert {key[1:]: value for key, value in samples.items() if key[0] == "edgefl_connections"} == {
        ("https", "pending"): 1,
        ("https", "authenticated"): 1,
        ("mqtt", "pending"): 0,
        ("mqtt", "authenticated"): 0,
    }
    refused = {key[1:]: value for key, value in samples.items() if key[0] == "edgefl_connections_refused_total"}
    assert {key for key, value in refused.items() if value} == {("https", "address")}
    assert refused["https", "address"] == 2
    assert {reason for _, reason in refused} == set(REFUSAL_REASONS)


def test_names_follow_the_conventions_and_no_label_grows_with_rounds_or_assignments(site: Site) -> None:
    site.add("pi-1", temperature_c=61.5)
    site.meter.on_run_started(RUN)
    families = [f for f in text_string_to_metric_families(site.metrics.render().decode()) if f.name[:6] == "edgefl"]
    assert len(families) > 20
    for family in families:
        assert family.documentation, family.name
        assert not re.search(r"_(ms|kb|mb|percent|minutes|total_total)$", family.name)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= {"presence", "status", "outcome", "device", "run", "name", "task", "strategy", "version",
                          "certificate", "api", "code"}  # fmt: skip
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith(("_total", "_created")) or sample.name.endswith(
                "_created"
            ), sample.name


def test_every_metric_of_the_dashboard_is_exported(site: Site) -> None:
    site.add("pi-1", temperature_c=61.5, throttled="ok", battery_fraction=1.0, power_w=1.0)
    site.meter.on_run_started(RUN)
    site.meter.record_rows(
        "r1",
        rows(update(1, UpdateStatus.USED, 0), opened_rounds={1: (1.0, 1)}, closed_rounds={1: (1, 2.0)}, accuracy=0.5),
    )
    exported = {name for name, _ in samples(site.metrics.render())} | {"edgefl_http_responses_total"}
    panels = load_grafana_dashboard()["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"\b((?:edgefl|process)_[a-z_]+)\{", text)}
    assert len(named) > 20
    assert named <= exported
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(places) == len({p["title"] for p in panels})


def num_calls(function: Callable[[], object]) -> int:
    """Returns how many functions, of Python and of C, are called in it: its work, however busy the machine is."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_a_scrape_of_a_thousand_devices_calls_few_functions_for_each(site: Site) -> None:
    calls = {}
    for number in range(1, 1001):
        site.add(f"pi-{number:04}", temperature_c=50.0 + number / 100, throttled="ok", battery_fraction=0.9)
        if number in {100, 1000}:
            calls[number] = num_calls(site.metrics.render)
    assert site.metrics.render().count(b"\nedgefl_device_") == 5000
    assert (calls[1000] - calls[100]) / 900 < 40, calls


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Callable[..., tuple[int, bytes]]]:
    """A real one that listens beyond loopback; gives what asks it for a path with a token."""
    directory = init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
    directory, operator, viewer = add_access_tokens(directory)
    options = StartOptions(host="0.0.0.0", port=directory.port, broker_port=find_free_port(), broker="embedded")
    trust = create_pinned_context(directory.ca_cert.read_bytes())

    def ask(path: str, token: str = "") -> tuple[int, bytes]:
        text = {"operator": operator, "viewer": viewer}.get(token, token)
        headers = {"Authorization": f"Bearer {text}"} if text else {}
        return request(f"127.0.0.1:{directory.port}", trust, "GET", path, headers=headers, max_bytes=10**6)

    with Coordinator(directory, options, build_run):
        yield ask


def test_a_real_coordinator_gives_its_metrics_to_those_who_may_read(
    coordinator: Callable[..., tuple[int, bytes]],
) -> None:
    assert coordinator("/metrics")[0] == 401
    assert coordinator("/metrics", "wrong")[0] == 401
    for reader in ("viewer", "operator"):
        status, text = coordinator("/metrics", reader)
        assert status == 200
    found = samples(text)
    assert found["edgefl_http_responses_total", frozenset({("api", "edgefl"), ("code", "401")})] == 2
    assert found["edgefl_runs", frozenset({("status", "queued")})] == 0
    assert found["edgefl_store_size_bytes", frozenset()] > 0


def test_a_device_that_is_not_known_is_counted_as_refused(coordinator: Callable[..., tuple[int, bytes]]) -> None:
    assert coordinator("/v1/fleet/pull-messages")[0] == 401
    found = samples(coordinator("/metrics", "viewer")[1])
    assert found["edgefl_http_responses_total", frozenset({("api", "fleet"), ("code", "401")})] == 1
