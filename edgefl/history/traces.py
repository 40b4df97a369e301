"""Rounds as OpenTelemetry traces: one for each round, from the coordinator to each device, its training, its upload.

They are made of what the history has, so no board and no round waits for a collector.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgefl import __version__
from edgefl.core.errors import NetworkError, StoreError, UsageError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.safe_text import escape_start
from edgefl.core.types import Json
from edgefl.history.tracking import Point, RoundReader, TrackedRun
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
TIMEOUT_S = 10.0
BATCH_ROUNDS, MAX_UPDATES = 20, 1000
"""Rounds of one request, and updates of one round."""
MAX_RUNS = 10_000
"""Runs whose last traced round is remembered."""
MAX_ANSWER_BYTES, MAX_MEMORY_BYTES = 65_536, 4_000_000
MAX_REASON_CHARS = 200
REFUSED_STATUSES = frozenset({400, 413, 422})
"""Answers that the same spans would get again. Others speak of the path or a login, which can be set right."""
_UPDATE_FIGURES = ("iterations", "num_examples", "bytes_up", "bytes_down", "staleness", "loss", "wait_s")


@dataclass(slots=True)
class OtlpTracker:
    """A collector that takes OTLP over HTTP; ids of traces and spans follow from run and round.

    Which rounds it has cannot be asked of it, so a file remembers that. A program that is killed between the two
    sends up to `BATCH_ROUNDS` again, with the same ids; of a run that resumed from a checkpoint all are sent again.
    What the collector refuses for good is logged, and not sent again.

    Args:
        url: of the collector, such as http://127.0.0.1:4318; the path of traces is added.
        source: of the updates.
        folder: of the file.
    """

    url: str
    source: RoundReader
    folder: Path
    _sent: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Of each run the last round that was sent, and its end in Unix seconds."""

    def __post_init__(self) -> None:
        """Reads what was sent before.

        Raises:
            UsageError: the URL is none, or has a login.
            StoreError: the file cannot be read.
        """
        address = urlsplit(self.url)
        if address.scheme not in {"http", "https"} or not address.hostname:
            raise UsageError(f"--otlp must be the URL of a collector, http://127.0.0.1:4318, got {self.url!r:.100}")
        if "@" in address.netloc:
            raise UsageError("--otlp must have no login in its URL: let a collector on this machine send it on")
        import_module("opentelemetry.proto.trace.v1.trace_pb2")  # an extra: missed at once, not at the first round
        self._sent = _read_memory(self._memory_path)

    @property
    def _memory_path(self) -> Path:
        return self.folder / f"traces-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}.json"

    def record(self, run: TrackedRun, points: Sequence[Point], *, is_whole: bool, num_ready: int) -> None:  # noqa: ARG002 as `Tracker` has it
        """Sends the rounds behind the last one that was sent."""
        last = self._sent.get(run.run_id)
        # Without that one they begin behind it, or a run that resumed has closed it anew. Clocks may be set back.
        known = next((point.round for point in points if (point.round, point.closed_at) == last), 0)
        new = [point for point in points[:num_ready] if point.round > known]
        for start in range(0, len(new), BATCH_ROUNDS):
            batch = new[start : start + BATCH_ROUNDS]
            if refusal := self._send(make_request(run, batch, self._read_updates(run.run_id, batch))):
                log.warning(
                    "the collector at %s refuses of run %s, rounds %d to %d, for good: %s",
                    self.url, run.run_id, batch[0].round, batch[-1].round, refusal,
                )  # fmt: skip
            self._sent.pop(run.run_id, None)  # the newest stands last
            self._sent[run.run_id] = batch[-1].round, batch[-1].closed_at
            self._remember()

    def _read_updates(self, run_id: str, points: Sequence[Point]) -> dict[int, list[Json]]:
        first, last = points[0].round, points[-1].round
        filters = {"run": run_id, "where": [f"round>={first}", f"round<={last}"]}
        updates: dict[int, list[Json]] = defaultdict(list)
        for row in (row for page in self.source.read_pages("updates", filters) for row in page):
            if len(updates[row["round"]]) < MAX_UPDATES:
                updates[row["round"]].append(row)
        return updates

    def _send(self, content: bytes) -> str:
        """Sends a request; returns what the collector refuses of it for good, empty where it takes all.

        Raises:
            NetworkError: another try may do.
        """
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415 an extra
            ExportTraceServiceResponse,
        )

        headers = {"Content-Type": "application/x-protobuf", "User-Agent": f"edgefl/{__version__}"}
        url = self.url.rstrip("/") + TRACES_PATH
        request = urllib.request.Request(url, data=content, headers=headers, method="POST")  # noqa: S310 http or https
        try:
            with urllib.request.build_opener().open(request, timeout=TIMEOUT_S) as response:
                answered_by, content = response.geturl(), response.read(MAX_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in REFUSED_STATUSES:
                return f"all spans, by the answer {error.code}"
            raise NetworkError(f"the collector at {self.url} answered {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise NetworkError(f"the collector at {self.url} cannot be reached: {reason}") from None
        if answered_by != url:  # a redirected POST has become a GET without its body
            raise NetworkError(f"the collector at {self.url} redirects to another address; name that one")
        try:
            answer = ExportTraceServiceResponse.FromString(content)
        except Exception:  # noqa: BLE001 protobuf's error, of whose package this room knows nothing
            raise NetworkError(f"the collector at {self.url} answers what is no OTLP") from None
        count, reason = answer.partial_success.rejected_spans, answer.partial_success.error_message
        return f"{count} spans: {escape_start(reason, MAX_REASON_CHARS)}" if count else ""

    def _remember(self) -> None:
        newest = dict([*self._sent.items()][-MAX_RUNS:])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._memory_path, json.dumps(newest).encode())
        except OSError as error:
            raise StoreError(f"cannot write {self._memory_path}: {error.strerror or error}") from error


def default_memory_folder() -> Path:
    """Returns `~/.local/share/edgefl/track`, or its counterpart under `XDG_DATA_HOME`."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "edgefl" / "track"


def _read_memory(path: Path) -> dict[str, tuple[int, float]]:
    try:
        with path.open("rb") as file:
            found = parse_json(file.read(MAX_MEMORY_BYTES))
        return {str(run_id): (int(number), float(closed_at)) for run_id, (number, closed_at) in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise StoreError(f"{path} cannot be read ({error}); remove it, and all rounds are sent again") from None


def make_request(run: TrackedRun, points: Sequence[Point], updates: Mapping[int, Sequence[Json]]) -> bytes:
    """Returns the body of OTLP's request with the traces of some rounds.

    Args:
        run: of the rounds.
        points: the rounds.
        updates: rows of the history's updates, by round.
    """
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: PLC0415 extra
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope  # noqa: PLC0415 likewise
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource  # noqa: PLC0415 likewise
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans  # noqa: PLC0415 likewise

    services: dict[str, list[Any]] = {"coordinator": [], "device": []}
    for point in points:
        for service, span in _list_spans(run, point, updates.get(point.round, ())):
            services[service].append(span)
    scope = InstrumentationScope(name="edgefl", version=__version__)
    request = ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=_make_attributes({"service.name": f"edgefl-{service}"})),
                scope_spans=[ScopeSpans(scope=scope, spans=spans)],
            )
            for service, spans in services.items()
        ]
    )
    content: bytes = request.SerializeToString(deterministic=True)
    return content


def _list_spans(run: TrackedRun, point: Point, updates: Sequence[Json]) -> Iterator[tuple[str, Any]]:
    """Yields service and span: the round, in it each assignment, in that the device's training and upload."""
    trace_id = _make_id(16, run.run_id, point.round, point.closed_at)
    round_id = _make_id(8, trace_id, "round")
    starts = [row["dispatched_at"] for row in updates if row["dispatched_at"] is not None]
    started_at = min([*starts, point.closed_at - point.values.get("seconds", 0.0)])
    facts = {"edgefl.run": run.run_id, "edgefl.run_name": run.name, **_list_figures(point.values, point.values)}
    yield (
        "coordinator",
        _make_span(trace_id, round_id, b"", f"round {point.round}", started_at, point.closed_at, facts),
    )
    for row in updates:
        if row["dispatched_at"] is None:
            continue
        assignment_id = _make_id(8, trace_id, row["assignment_id"])
        received_at = row["received_at"]
        ended_at = point.closed_at if received_at is None else received_at
        facts = {
            "edgefl.device": row["device_id"],
            "edgefl.outcome": str(row["outcome"] or ""),
            **_list_figures(row, _UPDATE_FIGURES),
        }
        is_failed = row["outcome"] in {"failed", "lost", "rejected"}
        yield (
            "coordinator",
            _make_span(
                trace_id, assignment_id, round_id, f"assignment {row['device_id']}", row["dispatched_at"], ended_at,
                facts, failure=(row["reason"] or str(row["outcome"])) if is_failed else None,
            ),
        )  # fmt: skip
        if received_at is None or row["compute_s"] is None:
            continue
        # The board's clock is not asked: what it took is counted back from the arrival.
        sent_at = max(row["dispatched_at"], received_at - (row["send_s"] or 0.0))
        training_at = max(row["dispatched_at"], sent_at - row["compute_s"])
        for name, start, end in (("train", training_at, sent_at), ("upload", sent_at, received_at)):
            span_id = _make_id(8, assignment_id, name)
            yield "device", _make_span(trace_id, span_id, assignment_id, name, start, end, {
                "edgefl.device": row["device_id"],
            })  # fmt: skip


def _make_span(  # noqa: PLR0913, PLR0917 the fields of a span
    trace_id: bytes,
    span_id: bytes,
    parent_id: bytes,
    name: str,
    started_at: float,
    ended_at: float,
    attributes: Mapping[str, Any],
    failure: str | None = None,
) -> Any:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status  # noqa: PLC0415 an extra

    start_ns, end_ns = round(max(0.0, started_at) * 1e9), round(max(0.0, ended_at) * 1e9)
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent_id,
        name=name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=max(start_ns, end_ns),
        attributes=_make_attributes(attributes),
        status=Status()
        if failure is None
        else Status(code=Status.STATUS_CODE_ERROR, message=escape_start(failure, MAX_REASON_CHARS)),
    )


def _list_figures(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Returns the numbers that are known, by names of attributes."""
    return {f"edgefl.{name}": float(values[name]) for name in names if values[name] is not None}


def _make_attributes(values: Mapping[str, Any]) -> list[Any]:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue  # noqa: PLC0415 an extra

    return [
        KeyValue(
            key=key, value=AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=value)
        )
        for key, value in values.items()
    ]


def _make_id(num_bytes: int, *parts: object) -> bytes:
    """Returns bytes that follow from the parts."""
    return hashlib.sha256(repr(parts).encode()).digest()[:num_bytes]
