from __future__ import annotations

from typing import Any

import pytest

from edgefl.coordinator.fleet.shard_errors import (
    MAX_ERROR_CHARS,
    MAX_SHARD_ERRORS,
    parse_shard_errors,
    record_capabilities,
)


@pytest.mark.parametrize(
    ("told", "faults"),
    [
        ({"digits": "away"}, {"digits": "away"}),
        ({"digits": "a\n\x1b[2Jb"}, {"digits": "a ?[2Jb"}),
        ({"digits": 7, "mnist": None}, {}),
        (["digits"], {}),
        ("digits", {}),
        (None, {}),
    ],
)
def test_what_a_device_tells_is_taken_as_lines_and_nothing_else(told: Any, faults: dict[str, str]) -> None:
    assert parse_shard_errors({"shard_errors": told}) == faults


def test_a_device_cannot_fill_the_events() -> None:
    found = parse_shard_errors({"shard_errors": {f"t{number}" * 200: "x" * 9999 for number in range(1000)}})
    assert len(found) == MAX_SHARD_ERRORS
    assert {len(text) for pair in found.items() for text in pair} == {MAX_ERROR_CHARS}


class Rows:
    """A store that keeps the newest report, and all events."""

    def __init__(self) -> None:
        self.newest: Any = None
        self.events: list[tuple[str, str, str]] = []

    def record_capabilities(self, _device: str, facts: Any, shards: Any, _at: float) -> bool:
        before, self.newest = self.newest, (facts, shards)
        return bool(before != self.newest)

    def record_event(self, kind: str, message: str, *, device_id: str, **_: Any) -> None:
        self.events.append((kind, message, device_id))


def test_an_event_is_written_when_it_is_new_and_not_at_every_report() -> None:
    store, report = Rows(), {"shard_errors": {"digits": "away"}}
    for at in (1.0, 2.0):
        record_capabilities(store, "pi-1", report, {}, at=at)  # type: ignore[arg-type]
    assert store.events == [("shard-unreadable", "digits: away", "pi-1")]
    record_capabilities(store, "pi-1", {}, {"digits": 3}, at=3.0)  # type: ignore[arg-type]
    assert len(store.events) == 1
