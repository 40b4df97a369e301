"""What devices are told of a rollout, and what of their words is news."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.coordinator.rollouts.service import MAX_REASON_CHARS, StatusUpdates, parse_reason
from edgefl.core.errors import StoreFullError
from edgefl.core.types import Json


def handed(news: StatusUpdates) -> list[tuple[str, Json]]:
    """Takes all news there are."""
    taken: list[tuple[str, Json]] = []
    for device_id in news.list_pending():
        news.dispatch(device_id, lambda *one: taken.append(one))
    return taken


def test_only_what_has_changed_is_news_and_silence_after_words_is() -> None:
    news, said = StatusUpdates(), {"id": "i1", "state": "fetching"}
    assert [news.record("pi", one) for one in (said, dict(said), None, None)] == [True, False, True, False]
    assert handed(news) == [("pi", {})]
    assert handed(news) == []


def test_what_is_said_while_older_words_are_taken_is_news_whatever_becomes_of_those() -> None:
    news = StatusUpdates()
    news.record("pi", {"state": "fetching"})

    def hear_more(device_id: str, _said: Json) -> None:
        news.record(device_id, {"state": "running"})

    news.dispatch("pi", hear_more)
    assert news.list_pending() == ["pi"]

    def stumble(device_id: str, _said: Json) -> None:
        news.record(device_id, {"state": "rejected"})
        raise StoreFullError("no room")

    with pytest.raises(StoreFullError):
        news.dispatch("pi", stumble)
    assert handed(news) == [("pi", {"state": "rejected"})]


@pytest.mark.parametrize(
    ("said", "reason"),
    [({}, None), ({"reason": ""}, None), ({"reason": 7}, "7"), ({"reason": "x" * 9999}, "x" * MAX_REASON_CHARS)],
)
def test_a_reason_is_a_text_of_a_length_worth_keeping(said: Any, reason: str | None) -> None:
    assert parse_reason(said) == reason
