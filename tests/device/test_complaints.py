import logging

from edgefl.device.complaints import LOG_EVERY_S, Complaints


def test_each_kind_of_complaint_is_heard_at_once_and_again_after_a_minute(caplog):
    now_s = 0.0
    complaints = Complaints(logging.getLogger("edgefl.test"), clock=lambda: now_s)
    for at_s in (0.0, 1.0, LOG_EVERY_S - 0.1, LOG_EVERY_S, LOG_EVERY_S + 1):
        now_s = at_s
        complaints.add("a", "a at %g", at_s)
        complaints.add("b", "b at %g", at_s)
    assert [record.getMessage() for record in caplog.records] == ["a at 0", "b at 0", "a at 60", "b at 60"]
