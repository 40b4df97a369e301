"""What devices say reaches who asked for it, and work that nobody wants any more is taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from edgefl.coordinator.device_clients import DeviceClients, DeviceMessageRouter
from edgefl.core.protocol import Command, CommandKind, Heartbeat
from edgefl.core.types import Progress


@dataclass
class Worker:
    """A worker whose run `r` is active; of it, `pi-flagged` is asked no more; `away` goes on by itself."""

    posted: list[Any] = field(default_factory=list)

    def post(self, item: Any) -> None:
        self.posted.append(item)

    def is_active(self, run_id: str) -> bool:
        return run_id == "r"

    def is_autonomous(self, run_id: str) -> bool:
        return run_id == "away"

    def is_blocked(self, run_id: str, device_id: str) -> bool:
        return (run_id, device_id) == ("r", "pi-flagged")


class Site:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, Any]] = []
        self.commands: list[tuple[str, Command]] = []
        self.worker = Worker()
        self.now_s = 60.0
        self.board = DeviceMessageRouter(clock=lambda: self.now_s)
        parts: Any = {
            "notifier": SimpleNamespace(
                send_command=lambda device_id, command: self.commands.append((device_id, command))
            ),
            "device_rpc": SimpleNamespace(on_reply=self._hears("answer")),
            "deployments": SimpleNamespace(on_heartbeat=self._hears("deployment")),
            "installations": SimpleNamespace(on_heartbeat=self._hears("installation")),
            "bundle_store": None,
            "run_scheduler": self.worker,
        }
        self.askers = DeviceClients(**parts)

    def _hears(self, what: str) -> Any:
        return lambda device_id, said: self.said.append((what, device_id, said))


@pytest.fixture
def site() -> Site:
    return Site()


def beat(**told: Any) -> Heartbeat:
    return Heartbeat(seq=1, session_no=1, uptime_s=1.0, **told)


def progress() -> Progress:
    return Progress(device_id="pi", assignment_id="a", iteration=1, seconds_per_iteration=1.0, age_s=0.0)


def test_what_is_said_before_it_is_open_goes_to_nobody_and_breaks_nothing(site: Site) -> None:
    site.board.route_reply(progress())
    site.board.on_command_reply("pi", b"{}")
    site.board.on_heartbeat("pi", beat(run="over", assignment="a-1"))
    site.board.open(site.askers)
    assert (site.said, site.commands, site.worker.posted) == ([], [], [])


def test_progress_goes_to_the_worker_answers_to_the_questions_and_heartbeats_to_both_rollouts(site: Site) -> None:
    site.board.open(site.askers)
    said, heard = progress(), beat()
    site.board.route_reply(said)
    site.board.on_command_reply("pi", b"{}")
    site.board.on_heartbeat("pi", heard)
    assert site.worker.posted == [said]
    assert site.said == [("answer", "pi", b"{}"), ("deployment", "pi", heard), ("installation", "pi", heard)]
    assert site.commands == []


def test_work_of_a_run_that_is_over_is_recalled_under_the_same_id_each_time(site: Site) -> None:
    site.board.open(site.askers)
    for _ in range(2):
        site.board.on_heartbeat("pi", beat(run="over", assignment="a-1"))
    recall = Command(id="finish-early-a-1", kind=CommandKind.FINISH_EARLY, argument="a-1")
    assert site.commands == [("pi", recall)] * 2


def test_a_node_of_a_run_that_is_over_is_told_to_end_under_another_id_once_a_minute(site: Site) -> None:
    site.board.open(site.askers)
    for site.now_s in (60.0, 119.0, 120.0):
        site.board.on_heartbeat("pi", beat(run="over"))
    first, same, later = (command for _, command in site.commands)
    assert (first.kind, first.argument) == (CommandKind.END, "over")
    assert first == same
    assert later == Command(id=later.id, kind=CommandKind.END, argument="over")
    assert later.id != first.id


def test_a_board_that_keeps_the_conditions_of_a_run_that_is_over_is_told_its_end(site: Site) -> None:
    site.board.open(site.askers)
    for run in ("r", "away", "", "over"):
        site.board.on_heartbeat("pi", beat(blocked={"kind": "hours", "reason": "outside its hours", "run": run}))
    assert [(command.kind, command.argument) for _, command in site.commands] == [(CommandKind.END, "over")]


@pytest.mark.parametrize("told", [{"run": "r", "assignment": "a-1"}, {"run": "r"}, {"run": "away"}], ids=str)
def test_work_of_a_run_that_is_active_or_goes_on_by_itself_is_left_alone(site: Site, told: dict[str, str]) -> None:
    site.board.open(site.askers)
    site.board.on_heartbeat("pi", beat(**told))
    assert site.commands == []


def test_a_flagged_node_is_ended_but_the_assignment_that_it_still_has_is_waited_for(site: Site) -> None:
    site.board.open(site.askers)
    site.board.on_heartbeat("pi-flagged", beat(run="r", assignment="a-1"))
    assert site.commands == []
    site.board.on_heartbeat("pi-flagged", beat(run="r"))
    assert [(command.kind, command.argument) for _, command in site.commands] == [(CommandKind.END, "r")]
