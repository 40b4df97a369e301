"""A run that waits for devices says so, once, and what for."""

from __future__ import annotations

from edgefl.coordinator.dispatch.participants import FleetRun
from edgefl.coordinator.dispatch.waiting import AFTER_S, WAITING, Waiting


class Desk:
    """A run at a time that a test sets."""

    def __init__(self) -> None:
        self.now_s, self.told = 0.0, list[tuple[str, str]]()
        run = FleetRun(
            run_id="r", task="digits", header={}, groups=(), names=(), join_at_start=False,
            encode=lambda _model, _version: b"", decode=lambda _body: {},
        )  # fmt: skip
        self.waiting = Waiting(run, lambda: self.now_s, lambda kind, said: self.told.append((kind, said)))

    def at(self, now_s: float, *ready: str, has_work: bool = False) -> list[str]:
        self.now_s = now_s
        self.waiting.look(ready, has_work=has_work)
        return [said for kind, said in self.told if kind == WAITING]


def test_a_long_wait_is_told_once_with_what_is_missing() -> None:
    desk = Desk()
    assert desk.at(0.0) == desk.at(AFTER_S - 1) == []
    assert desk.waiting.next_look_s() == AFTER_S
    assert desk.at(AFTER_S) == ["waits: no device with a shard for digits is ready; see edgefl devices list"]
    assert desk.waiting.next_look_s() is None
    assert len(desk.at(10 * AFTER_S)) == 1
    few = Desk()
    few.at(0.0, "pi-1")
    assert few.at(AFTER_S, "pi-1")[0].startswith("waits for more devices: 1 ready (pi-1)")


def test_a_run_that_had_work_meanwhile_waits_anew() -> None:
    desk = Desk()
    desk.at(0.0)
    assert not desk.at(AFTER_S - 1, has_work=True)
    assert not desk.at(AFTER_S)
    assert len(desk.at(2 * AFTER_S)) == 1
    desk.at(3 * AFTER_S, has_work=True)
    desk.at(4 * AFTER_S)
    assert len(desk.at(5 * AFTER_S)) == 2
