"""Bytes are counted for the instruction that they belong to."""

from edgefl.coordinator.asgi import KEPT_INSTRUCTIONS, Traffic

NODE, OTHER = 1, 2


def test_what_is_fetched_while_the_answer_before_is_still_sent_counts_for_the_newer_instruction():
    traffic = Traffic()
    traffic.fetched(NODE, 1000, "first")
    traffic.fetched(NODE, 5000)
    traffic.sent(NODE, 70)
    traffic.fetched(NODE, 2000, "second")
    traffic.answered(NODE, 9)
    assert traffic.take(NODE, "first") == (70, 6009)
    traffic.sent(NODE, 80)
    assert traffic.take(NODE, "second") == (80, 2000)
    assert traffic.take(NODE, "second") == (0, 0)


def test_nodes_are_counted_apart():
    traffic = Traffic()
    traffic.fetched(NODE, 1000, "a")
    traffic.fetched(OTHER, 1, "b")
    assert traffic.take(OTHER, "b") == (0, 1)
    assert traffic.take(NODE, "a") == (0, 1000)


def test_instructions_that_nobody_answers_do_not_gather():
    traffic = Traffic()
    for number in range(3 * KEPT_INSTRUCTIONS):
        traffic.fetched(NODE, 1, str(number))
    assert traffic.take(NODE, "0") == (0, 0)
    assert traffic.take(NODE, str(3 * KEPT_INSTRUCTIONS - 1)) == (0, 1)
    assert len(traffic._down[NODE]) < KEPT_INSTRUCTIONS
