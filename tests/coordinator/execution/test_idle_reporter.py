"""A run that waits for devices says so, once, and what for."""

from __future__ import annotations

from edgefl.coordinator.execution.eligibility import RunSpec
from edgefl.coordinator.execution.idle_reporter import REPORT_AFTER_S, RUN_WAITING, IdleRunReporter


class Desk:
    """A run at a time that a test sets."""

    def __init__(self) -> None:
        self.now_s, self.told = 0.0, list[tuple[str, str]]()
        run = RunSpec(
            run_id="r", task="digits", header={}, groups=(), names=(), join_at_start=False,
            encode=lambda _model, _version: b"", decode=lambda _body: {},
        )  # fmt: skip
        self.waiting = IdleRunReporter(run, lambda: self.now_s, lambda kind, said: self.told.append((kind, said)))

    def at(self, now_s: float, *ready: str, has_work: bool = False) -> list[str]:
        self.now_s = now_s
        self.waiting.poll(ready, has_work=has_work)
        return [said for kind, said in self.told if kind == RUN_WAITING]


def test_a_long_wait_is_told_once_with_what_is_missing() -> None:
    desk = Desk()
    assert desk.at(0.0) == desk.at(REPORT_AFTER_S - 1) == []
    assert desk.waiting.next_poll_s() == REPORT_AFTER_S
    assert desk.at(REPORT_AFTER_S) == ["waits: no device with a shard for digits is ready; see edgefl devices list"]
    assert desk.waiting.next_poll_s() is None
    assert len(desk.at(10 * REPORT_AFTER_S)) == 1
    few = Desk()
    few.at(0.0, "pi-1")
    assert few.at(REPORT_AFTER_S, "pi-1")[0].startswith("waits for more devices: 1 ready (pi-1)")


def test_a_run_that_had_work_meanwhile_waits_anew() -> None:
    desk = Desk()
    desk.at(0.0)
    assert not desk.at(REPORT_AFTER_S - 1, has_work=True)
    assert not desk.at(REPORT_AFTER_S)
    assert len(desk.at(2 * REPORT_AFTER_S)) == 1
    desk.at(3 * REPORT_AFTER_S, has_work=True)
    desk.at(4 * REPORT_AFTER_S)
    assert len(desk.at(5 * REPORT_AFTER_S)) == 2
