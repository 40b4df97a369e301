"""Bytes are counted for the instruction that they belong to."""

import asyncio
import os

import pytest

from edgefl.coordinator.asgi import MAX_COUNTED_INSTRUCTIONS, SEND_CHUNK_BYTES, ByteCounters, send_response

NODE, OTHER = 1, 2


def test_what_is_fetched_while_the_answer_before_is_still_sent_counts_for_the_newer_instruction():
    traffic = ByteCounters()
    traffic.add_instruction_downlink(NODE, 1000, "first")
    traffic.add_instruction_downlink(NODE, 5000)
    traffic.add_uplink(NODE, 70)
    traffic.add_instruction_downlink(NODE, 2000, "second")
    traffic.add_other_downlink(NODE, 9)
    assert traffic.pop_reply_bytes(NODE, "first") == (70, 6009)
    traffic.add_uplink(NODE, 80)
    assert traffic.pop_reply_bytes(NODE, "second") == (80, 2000)
    assert traffic.pop_reply_bytes(NODE, "second") == (0, 0)


def test_nodes_are_counted_apart():
    traffic = ByteCounters()
    traffic.add_instruction_downlink(NODE, 1000, "a")
    traffic.add_instruction_downlink(OTHER, 1, "b")
    assert traffic.pop_reply_bytes(OTHER, "b") == (0, 1)
    assert traffic.pop_reply_bytes(NODE, "a") == (0, 1000)


def test_instructions_that_nobody_answers_do_not_gather():
    traffic = ByteCounters()
    for number in range(3 * MAX_COUNTED_INSTRUCTIONS):
        traffic.add_instruction_downlink(NODE, 1, str(number))
    assert traffic.pop_reply_bytes(NODE, "0") == (0, 0)
    assert traffic.pop_reply_bytes(NODE, str(3 * MAX_COUNTED_INSTRUCTIONS - 1)) == (0, 1)
    assert len(traffic._downlink[NODE]) < MAX_COUNTED_INSTRUCTIONS


@pytest.mark.parametrize("size", [0, 1, SEND_CHUNK_BYTES, SEND_CHUNK_BYTES + 1, 3 * SEND_CHUNK_BYTES])
def test_an_answer_leaves_slice_by_slice_and_says_which_is_the_last(size):
    content, sent = os.urandom(size), []

    async def send(message):
        sent.append(message)

    asyncio.run(send_response(send, 200, content))
    start, *slices = sent
    assert dict(start["headers"])[b"content-length"] == str(size).encode()
    assert b"".join(message["body"] for message in slices) == content
    assert all(len(message["body"]) <= SEND_CHUNK_BYTES for message in slices)
    assert [message["more_body"] for message in slices] == [True] * (len(slices) - 1) + [False]
