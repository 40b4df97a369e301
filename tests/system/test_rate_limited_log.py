import logging

from edgefl.system.rate_limited_log import LOG_INTERVAL_S, RateLimitedLog


def test_each_kind_of_complaint_is_heard_at_once_and_again_after_a_minute(caplog):
    now_s = 0.0
    complaints = RateLimitedLog(logging.getLogger("edgefl.test"), clock=lambda: now_s)
    for at_s in (0.0, 1.0, LOG_INTERVAL_S - 0.1, LOG_INTERVAL_S, LOG_INTERVAL_S + 1):
        now_s = at_s
        complaints.warning("a", "a at %g", at_s)
        complaints.warning("b", "b at %g", at_s)
    assert [record.getMessage() for record in caplog.records] == ["a at 0", "b at 0", "a at 60", "b at 60"]
