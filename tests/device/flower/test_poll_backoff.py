"""How often a device asks for work, with and without a broker."""

import itertools

from edgefl.core.protocol import POLL_S
from edgefl.device.flower.poll_backoff import INITIAL_DISCONNECTED_S, MAX_DISCONNECTED_S, PollBackoff


def test_a_device_asks_seldom_while_it_hears_bells_and_else_soon_after_work_and_then_ever_more_seldom():
    pace = PollBackoff()
    for _ in range(2):
        waits = [pace.compute_interval_s(is_connected=False) for _ in range(8)]
        assert waits == [INITIAL_DISCONNECTED_S, 1, 2, 4, 8, MAX_DISCONNECTED_S, 15, 15]
        assert pace.compute_interval_s(is_connected=True) == POLL_S
    pace.compute_interval_s(is_connected=False)
    pace.on_work()
    assert pace.compute_interval_s(is_connected=False) == INITIAL_DISCONNECTED_S
    own = PollBackoff(0.2)
    assert [own.compute_interval_s(is_connected=False) for _ in range(3)] == [0.2, 0.2, 0.2], (
        "a shorter one of its own holds"
    )


def test_next_work_is_found_after_at_most_as_long_again_and_with_few_questions():
    for lasts_s in (0.3, 1.0, 7.0, 20.0):
        pace = PollBackoff()
        pace.on_work()
        asked_s = itertools.accumulate(pace.compute_interval_s(is_connected=False) for _ in range(20))
        count, found_s = next((count, at_s) for count, at_s in enumerate(asked_s, 1) if at_s >= lasts_s)
        assert found_s <= 2 * lasts_s + INITIAL_DISCONNECTED_S
        assert count <= 6
