"""Rounds as traces, at a collector that takes OTLP over HTTP as every collector does."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import plotted_store as made
import pytest
from history.test_tracking import PageReader

from edgefl.cli.main import main
from edgefl.core.errors import NetworkError, StoreError, UsageError
from edgefl.history import traces
from edgefl.history.traces import OtlpTracker
from edgefl.history.tracking import HistoryTracking
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.repositories.records import AssignmentRow, UpdateRow

MISSING = "opentelemetry-proto is not installed: pip install 'edgefl-fleet[track]'"
service_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason=MISSING)


class Collector:
    """A collector; `answers` are status, headers and body of the next requests."""

    def __init__(self):
        self.requests, self.answers = [], []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                content = self.rfile.read(int(self.headers["Content-Length"]))
                status, headers, body = collector.answers.pop(0) if collector.answers else (200, {}, b"")
                if status == 200 and not body:
                    collector.requests.append(service_pb2.ExportTraceServiceRequest.FromString(content))
                self.answer(status, headers, body)

            def do_GET(self):
                self.answer(200, {}, b"")

            def answer(self, status, headers, body):
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def spans(self):
        """(service, span) of every request."""
        return [
            (group.resource.attributes[0].value.string_value, span)
            for request in self.requests
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    @property
    def rounds(self):
        return [span.name for _, span in self.spans if not span.parent_span_id]


@pytest.fixture
def collector():
    running = Collector()
    thread = threading.Thread(target=running.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield running
    running.server.shutdown()
    thread.join()
    running.server.server_close()


def test_a_round_is_one_trace_from_the_coordinator_to_training_and_upload(store, collector, tmp_path):
    run = made.add_synchronous(store, "one", rounds=1)
    lost = {"assignment_id": "x", "device_id": "pi-9", "round": 1, "base_version": 0}
    store.record_assignments(run, [AssignmentRow(**lost, dispatched_at=made.BEGIN)])
    store.record_updates(run, [UpdateRow(**lost, outcome=made.UpdateStatus.REJECTED, reason="norm")])
    source = PageReader(store)
    HistoryTracking(source, [OtlpTracker(collector.url, source, tmp_path / "memory")]).update()
    assert len({span.trace_id for _, span in collector.spans}) == 1
    by_id = {span.span_id: span for _, span in collector.spans}
    assert len(by_id) == len(collector.spans)
    (root,) = [span for _, span in collector.spans if not span.parent_span_id]
    assert (root.name, root.start_time_unix_nano, root.end_time_unix_nano) == (
        "round 1", made.BEGIN * 10**9, (made.BEGIN + 5) * 10**9,
    )  # fmt: skip
    figures = {each.key: each.value.double_value for each in root.attributes}
    assert (figures["edgefl.accuracy"], figures["edgefl.bytes_up"]) == (0.1, 200.0)
    ((service, training),) = [
        (service, span)
        for service, span in collector.spans
        if span.name == "train" and by_id[span.parent_span_id].name == "assignment pi-1"
    ]
    (upload,) = [
        span
        for _, span in collector.spans
        if span.name == "upload" and span.parent_span_id == training.parent_span_id
    ]
    assignment = by_id[training.parent_span_id]
    assert (service, assignment.parent_span_id) == ("edgefl-device", root.span_id)
    begin_ns = assignment.start_time_unix_nano
    times = [
        round((ns - begin_ns) / 1e9, 6)
        for span in (training, upload)
        for ns in (span.start_time_unix_nano, span.end_time_unix_nano)
    ]
    assert times == [0.0, 1.0, 1.0, 1.4]
    assert assignment.end_time_unix_nano == upload.end_time_unix_nano
    (rejected,) = [span for _, span in collector.spans if span.name == "assignment pi-9"]
    assert (rejected.status.code, rejected.status.message) == (2, "norm")
    assert (assignment.status.code, rejected.span_id in {span.parent_span_id for _, span in collector.spans}) == (
        0, False,
    )  # fmt: skip


def test_each_round_is_sent_once_whoever_starts_again(store, collector, tmp_path):
    run = made.add_synchronous(store, "one", rounds=2)
    store.set_run_status(run, made.RunStatus.RUNNING, at=made.BEGIN)
    source, memory = PageReader(store), tmp_path / "memory"
    follower = HistoryTracking(source, [OtlpTracker(collector.url, source, memory)])
    follower.update()
    follower.update()
    assert collector.rounds == ["round 1", "round 2"]
    made.add_round(store, run, 3, made.BEGIN + 100, made.PACES_S)
    made.evaluate(store, run, 3, 0.75)
    HistoryTracking(source, [OtlpTracker(collector.url, source, memory)]).update()
    store.set_run_status(run, made.RunStatus.FINISHED, at=made.BEGIN)
    HistoryTracking(source, [OtlpTracker(collector.url, source, memory)]).update()
    assert collector.rounds == ["round 1", "round 2", "round 3"]
    first = {(span.trace_id, span.span_id) for _, span in collector.spans}
    for path in memory.iterdir():  # as if it had been killed before it could be written
        path.unlink()
    HistoryTracking(source, [OtlpTracker(collector.url, source, memory)]).update()
    assert len(collector.rounds) == 6
    assert {(span.trace_id, span.span_id) for _, span in collector.spans} == first


def test_many_rounds_are_sent_in_parts_and_what_fails_is_sent_by_the_next_look(
    store, collector, tmp_path, monkeypatch
):
    monkeypatch.setattr(traces, "BATCH_ROUNDS", 2)
    made.add_synchronous(store, "one", rounds=5)
    source = PageReader(store)
    follower = HistoryTracking(source, [OtlpTracker(collector.url, source, tmp_path)])
    failures = {
        "answered 503": (503, {}, b""),
        "answered 429": (429, {}, b""),
        "answered 401": (401, {}, b""),  # what it lacks may be set right
        "redirects": (302, {"Location": collector.url + "/other"}, b""),
        "what is no OTLP": (200, {}, b"<html>"),
    }
    for words, answer in failures.items():
        collector.answers = [answer]
        with pytest.raises(NetworkError, match=words):
            follower.update()
    assert collector.rounds == []
    collector.answers = [(200, {}, b""), (503, {}, b"")]
    with pytest.raises(NetworkError, match="503"):
        follower.update()
    assert collector.rounds == ["round 1", "round 2"]
    follower.update()
    assert collector.rounds == [f"round {number}" for number in range(1, 6)]
    assert len(collector.requests) == 3


def test_what_a_collector_refuses_for_good_is_told_and_not_sent_again(
    store, collector, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(traces, "BATCH_ROUNDS", 2)
    made.add_synchronous(store, "one", rounds=5)
    partial = service_pb2.ExportTraceServiceResponse()
    partial.partial_success.rejected_spans, partial.partial_success.error_message = 3, "too\nmany"
    collector.answers = [(200, {}, partial.SerializeToString()), (400, {}, b"")]
    source = PageReader(store)
    for _ in range(2):
        HistoryTracking(source, [OtlpTracker(collector.url, source, tmp_path)]).update()
    assert collector.rounds == ["round 5"]
    first, second = (record.getMessage() for record in caplog.records)
    assert "rounds 1 to 2, for good: 3 spans: too many" in first
    assert "rounds 3 to 4, for good: all spans, by the answer 400" in second


def test_a_clock_that_was_set_back_hides_no_round_and_a_resumed_run_is_sent_again(store, collector, tmp_path):
    run = made.add_run(store, "one")
    source = PageReader(store)

    def close(number, at):
        made.add_round(store, run, number, at, {})
        made.evaluate(store, run, number, 0.5, at=at)
        for _ in range(2):
            HistoryTracking(source, [OtlpTracker(collector.url, source, tmp_path)]).update()

    for number, at in {1: 100.0, 2: 200.0, 3: 150.0, 4: 160.0}.items():
        close(number, at)
    assert collector.rounds == ["round 1", "round 2", "round 3", "round 4"]
    store.close_round(run, 4, version=4, closed_at=120.0)
    close(5, 130.0)
    assert collector.rounds[4:] == [f"round {number}" for number in range(1, 6)]


def test_a_collector_that_is_away_a_wrong_url_and_a_damaged_memory_are_told(store, tmp_path):
    made.add_synchronous(store, "one", rounds=1)
    source, url = PageReader(store), f"http://127.0.0.1:{find_free_port()}"
    with pytest.raises(NetworkError, match="cannot be reached"):
        HistoryTracking(source, [OtlpTracker(url, source, tmp_path)]).update()
    for wrong, words in {
        "127.0.0.1:4318": "URL of a collector",
        "file:///x": "URL of",
        "http://a:b@c": "login",
    }.items():
        with pytest.raises(UsageError, match=words) as refusal:
            OtlpTracker(wrong, source, tmp_path)
        assert "a:b" not in str(refusal.value)
    path = OtlpTracker(url, source, tmp_path)._memory_path
    for damaged in ("[1]", '{"one": 1.5}', '{"one": [1e999, 1]}', "[" * 100_000):
        path.write_text(damaged)
        with pytest.raises(StoreError, match="remove it"):
            OtlpTracker(url, source, tmp_path)


def test_the_command_sends_a_run(store, collector, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    made.add_synchronous(store, "one", rounds=2)
    with pytest.raises(SystemExit) as ended:
        main(["history", "track", "--dir", str(tmp_path), "--otlp", collector.url])
    assert (ended.value.code, capsys.readouterr().out) == (0, "tracked 2 rounds\n")
    assert collector.rounds == ["round 1", "round 2"]
