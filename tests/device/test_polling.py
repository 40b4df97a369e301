"""How often a device asks for work, with and without a broker."""

import itertools

from edgefl.device.polling import DEAF_FIRST_S, DEAF_MOST_S, PollPace
from edgefl.protocol import POLL_S


def test_a_device_that_hears_bells_asks_seldom_whatever_there_was():
    pace = PollPace()
    assert pace.next_s(hears_bells=True) == POLL_S
    pace.had_work()
    assert pace.next_s(hears_bells=True) == POLL_S


def test_a_device_without_a_broker_asks_soon_after_work_and_then_ever_more_seldom():
    pace = PollPace()
    waits = [pace.next_s(hears_bells=False) for _ in range(8)]
    assert waits == [0.5, 1, 2, 4, 8, 15, 15, 15]
    pace.had_work()
    assert pace.next_s(hears_bells=False) == DEAF_FIRST_S


def test_next_work_is_found_after_at_most_as_long_again_and_with_few_questions():
    for lasts_s in (0.3, 1.0, 7.0, 20.0):
        pace = PollPace()
        pace.had_work()
        asked_s = itertools.accumulate(pace.next_s(hears_bells=False) for _ in range(20))
        count, found_s = next((count, at_s) for count, at_s in enumerate(asked_s, 1) if at_s >= lasts_s)
        assert found_s <= 2 * lasts_s + DEAF_FIRST_S
        assert count <= 6


def test_who_loses_the_broker_asks_soon_again():
    pace = PollPace()
    for _ in range(8):
        pace.next_s(hears_bells=False)
    assert pace.next_s(hears_bells=False) == DEAF_MOST_S
    pace.next_s(hears_bells=True)
    assert pace.next_s(hears_bells=False) == DEAF_FIRST_S


def test_a_shorter_interval_of_the_agent_s_own_holds_without_a_broker_too():
    pace = PollPace(0.2)
    assert [pace.next_s(hears_bells=False) for _ in range(3)] == [0.2, 0.2, 0.2]
