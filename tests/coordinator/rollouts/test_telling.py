"""What devices are told of a rollout, and what of their words is news."""

from __future__ import annotations

import time
from typing import Any

import pytest

from edgefl.coordinator.fleet.presence import Presence
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.rollouts import telling
from edgefl.coordinator.rollouts.telling import MAX_REASON_CHARS, News, Teller, reason_of
from edgefl.errors import StoreFullError
from edgefl.protocol import Command, CommandKind, Heartbeat, Status
from edgefl.types import Json


class Ears:
    def __init__(self) -> None:
        self.heard: list[Command] = []

    def command(self, device_id: str, command: Command) -> None:
        assert device_id == "pi"
        self.heard.append(command)


def online() -> Roster:
    roster = Roster(Presence(), time.monotonic)
    roster.note_bus(connected=True)
    roster.add("pi", node_id=1, role="trainer", groups=(), examples={})
    roster.note_status("pi", Status(state="online", boot_id="b", session_no=1))
    return roster


def tell(teller: Teller, *, is_at_it: bool = False) -> None:
    teller.tell("pi", CommandKind.INSTALL, "i1", is_at_it=lambda _: is_at_it)


def handed(news: News) -> list[tuple[str, Json]]:
    """Takes all news there are."""
    taken: list[tuple[str, Json]] = []
    for device_id in news.waiting():
        news.hand_on(device_id, lambda *one: taken.append(one))
    return taken


def test_a_device_is_told_after_its_first_heartbeat_and_not_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    roster, ears = online(), Ears()
    teller = Teller(roster, ears)
    tell(teller)
    assert not ears.heard  # its subscriptions may not stand yet
    roster.note_heartbeat("pi", Heartbeat(seq=1, session_no=1, uptime_s=1.0))
    tell(teller)
    tell(teller)
    assert [(command.kind, command.argument) for command in ears.heard] == [("install", "i1")]
    monkeypatch.setattr(telling, "TELL_AGAIN_S", 0.0)
    tell(teller, is_at_it=True)
    assert len(ears.heard) == 1
    tell(teller)
    assert len({command.id for command in ears.heard}) == 2


def test_only_what_has_changed_is_news_and_silence_after_words_is() -> None:
    news, said = News(), {"id": "i1", "state": "fetching"}
    assert [news.note("pi", one) for one in (said, dict(said), None, None)] == [True, False, True, False]
    assert handed(news) == [("pi", {})]
    assert handed(news) == []


def test_what_could_not_be_taken_stays_news() -> None:
    news = News()
    for name in ("pi-1", "pi-2"):
        news.note(name, {"state": "running"})

    def stumble(_device_id: str, _said: Json) -> None:
        raise StoreFullError("no room")

    with pytest.raises(StoreFullError):
        news.hand_on("pi-1", stumble)
    assert handed(news) == [("pi-1", {"state": "running"}), ("pi-2", {"state": "running"})]
    assert handed(news) == []


def test_what_is_said_while_older_words_are_taken_is_news_whatever_becomes_of_those() -> None:
    news = News()
    news.note("pi", {"state": "fetching"})

    def hear_more(device_id: str, _said: Json) -> None:
        news.note(device_id, {"state": "running"})

    news.hand_on("pi", hear_more)
    assert news.waiting() == ["pi"]

    def stumble(device_id: str, _said: Json) -> None:
        news.note(device_id, {"state": "refused"})
        raise StoreFullError("no room")

    with pytest.raises(StoreFullError):
        news.hand_on("pi", stumble)
    assert handed(news) == [("pi", {"state": "refused"})]


@pytest.mark.parametrize(
    ("said", "reason"),
    [({}, None), ({"reason": ""}, None), ({"reason": 7}, "7"), ({"reason": "x" * 9999}, "x" * MAX_REASON_CHARS)],
)
def test_a_reason_is_a_text_of_a_length_worth_keeping(said: Any, reason: str | None) -> None:
    assert reason_of(said) == reason
