"""Bytes are counted for the instruction that they belong to."""

import asyncio
import os

import pytest

from edgefl.coordinator.asgi import KEPT_INSTRUCTIONS, SLICE_BYTES, Traffic, respond

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


@pytest.mark.parametrize("size", [0, 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES])
def test_an_answer_leaves_slice_by_slice_and_says_which_is_the_last(size):
    content, sent = os.urandom(size), []

    async def send(message):
        sent.append(message)

    asyncio.run(respond(send, 200, content))
    start, *slices = sent
    assert dict(start["headers"])[b"content-length"] == str(size).encode()
    assert b"".join(message["body"] for message in slices) == content
    assert all(len(message["body"]) <= SLICE_BYTES for message in slices)
    assert [message["more_body"] for message in slices] == [True] * (len(slices) - 1) + [False]
