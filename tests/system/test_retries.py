import logging

import numpy as np

from edgefl.system.retries import LOG_INTERVAL_S, Backoff, RateLimitedLog


def test_each_kind_of_complaint_is_heard_at_once_and_again_after_a_minute(caplog):
    now_s = 0.0
    complaints = RateLimitedLog(logging.getLogger("edgefl.test"), clock=lambda: now_s)
    for at_s in (0.0, 1.0, LOG_INTERVAL_S - 0.1, LOG_INTERVAL_S, LOG_INTERVAL_S + 1):
        now_s = at_s
        complaints.warning("a", "a at %g", at_s)
        complaints.warning("b", "b at %g", at_s)
    assert [record.getMessage() for record in caplog.records] == ["a at 0", "b at 0", "a at 60", "b at 60"]


def test_a_pause_doubles_up_to_the_longest_and_begins_anew_after_a_success():
    backoff = Backoff(initial_s=1.0, max_s=5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_a_pause_with_a_generator_is_between_half_and_all_of_it():
    backoff = Backoff(initial_s=8.0, max_s=8.0, rng=np.random.default_rng(1))
    pauses = [backoff.next_s() for _ in range(50)]
    assert 4.0 <= min(pauses) < 5.0
    assert 7.0 < max(pauses) <= 8.0


def test_until_it_has_waited_long_enough_no_pause_is_longer_than_the_eager_one():
    backoff = Backoff(initial_s=1.0, max_s=30.0, eager_s=7.0, eager_max_s=2.0)
    assert [backoff.next_s() for _ in range(8)] == [1.0, 2.0, 2.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    backoff.reset()
    assert [backoff.next_s() for _ in range(3)] == [1.0, 2.0, 2.0]
