"""How often a device asks for work, with and without a broker."""

import itertools

from edgefl.device.polling import DEAF_FIRST_S, DEAF_MOST_S, PollPace
from edgefl.protocol import POLL_S


def test_a_device_asks_seldom_while_it_hears_bells_and_else_soon_after_work_and_then_ever_more_seldom():
    pace = PollPace()
    for _ in range(2):
        waits = [pace.next_s(hears_bells=False) for _ in range(8)]
        assert waits == [DEAF_FIRST_S, 1, 2, 4, 8, DEAF_MOST_S, 15, 15]
        assert pace.next_s(hears_bells=True) == POLL_S
    pace.next_s(hears_bells=False)
    pace.had_work()
    assert pace.next_s(hears_bells=False) == DEAF_FIRST_S
    own = PollPace(0.2)
    assert [own.next_s(hears_bells=False) for _ in range(3)] == [0.2, 0.2, 0.2], "a shorter one of its own holds"


def test_next_work_is_found_after_at_most_as_long_again_and_with_few_questions():
    for lasts_s in (0.3, 1.0, 7.0, 20.0):
        pace = PollPace()
        pace.had_work()
        asked_s = itertools.accumulate(pace.next_s(hears_bells=False) for _ in range(20))
        count, found_s = next((count, at_s) for count, at_s in enumerate(asked_s, 1) if at_s >= lasts_s)
        assert found_s <= 2 * lasts_s + DEAF_FIRST_S
        assert count <= 6
