"""All-reduce over a ring, a butterfly and binary blocks: sums, bytes, times, and chunks in any order."""

import numpy as np
import pytest

from edgefl.core.errors import NetworkError
from edgefl.strategies.peer_algorithms.collectives import (
    AllReduce,
    Chunk,
    LinkSpeed,
    choose_collective,
    compute_end_times,
    count_sent,
    list_blocks,
    make_schedule,
    reduce_vectors,
)

COLLECTIVES = ("ring", "butterfly", "binary-blocks")
CASES = [
    (name, n) for name in COLLECTIVES for n in (*range(1, 12), 16, 23) if name != "butterfly" or n & (n - 1) == 0
]


def run_members(collective, vectors, *, chunk_size, rng):
    """Runs all members; each pair's chunks arrive in order, those of different pairs in any."""
    schedule = make_schedule(collective, len(vectors), len(vectors[0]))
    members = [AllReduce(schedule, index, vector, chunk_size=chunk_size) for index, vector in enumerate(vectors)]
    links: dict[tuple[int, int], list[Chunk]] = {}
    while True:
        for index, member in enumerate(members):
            for chunk in member.pop_due():
                arriving = Chunk(peer=index, step=chunk.step, start=chunk.start, values=chunk.values)
                links.setdefault((index, chunk.peer), []).append(arriving)
        waiting = [link for link, chunks in links.items() if chunks]
        if not waiting:
            assert all(member.is_complete for member in members), "no chunk is under way, and some wait for one"
            return members
        link = waiting[rng.integers(len(waiting))]
        members[link[1]].receive(links[link].pop(0))


@pytest.mark.parametrize(("collective", "num_members"), CASES)
@pytest.mark.parametrize("size", [1, 5, 200])
def test_all_members_end_with_the_sum_in_the_same_bytes_however_chunks_arrive(collective, num_members, size):
    rng = np.random.default_rng([num_members, size])
    vectors = rng.standard_normal((num_members, size)).astype(np.float32)
    results = []
    for attempt in range(2):
        ends = [vector.copy() for vector in vectors]
        run_members(collective, ends, chunk_size=7, rng=np.random.default_rng(attempt))
        results += [end.tobytes() for end in ends]
    assert set(results) == {reduce_vectors(collective, [vector.copy() for vector in vectors]).tobytes()}
    total = vectors.astype(np.float64).sum(axis=0)
    assert np.frombuffer(results[0], np.float32) == pytest.approx(total, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("collective", "num_members"), CASES)
def test_every_member_sends_what_the_theory_says(collective, num_members):
    size = 64 * num_members * 16
    sent = count_sent(make_schedule(collective, num_members, size), num_members)
    if collective != "binary-blocks":
        assert sent == [2 * (num_members - 1) * size // num_members] * num_members
        return
    blocks = list_blocks(num_members)
    for number, block in enumerate(blocks):
        within = 2 * (size - size / len(block))
        up = size / len(block) if number else 0
        down = size / len(block) if number + 1 < len(blocks) else 0
        assert [sent[member] for member in block] == pytest.approx([within + up + down] * len(block), abs=num_members)


def test_the_number_of_steps_is_that_of_the_algorithm():
    assert len(make_schedule("ring", 8, 80)) == 14
    assert len(make_schedule("butterfly", 8, 80)) == 6
    assert len(make_schedule("binary-blocks", 7, 80)) == 8, "two halvings, two between blocks, and back"
    assert list_blocks(7) == [range(4), range(4, 6), range(6, 7)]


def test_a_chunk_goes_on_before_the_rest_of_its_slice_has_arrived():
    member = AllReduce(make_schedule("ring", 3, 30), 1, np.ones(30, np.float32), chunk_size=4)
    assert [chunk.step for chunk in member.pop_due()] == [0, 0, 0]
    member.receive(Chunk(peer=0, step=0, start=0, values=np.full(4, 2, np.float32)))
    (onward,) = member.pop_due()
    assert (onward.peer, onward.step, onward.start) == (2, 1, 0)
    assert onward.values.tolist() == [3.0] * 4


def test_a_member_without_room_is_sent_nothing_now_and_the_rest_later():
    member = AllReduce(make_schedule("butterfly", 2, 8), 0, np.ones(8, np.float32), chunk_size=2)
    rooms = iter([True, False])
    assert len(list(member.pop_due(lambda _: next(rooms)))) == 1
    assert len(list(member.pop_due())) == 1
    assert not member.is_complete


def test_what_no_member_sends_is_refused_and_a_repeat_changes_nothing():
    vector = np.ones(8, np.float32)
    member = AllReduce(make_schedule("butterfly", 2, 8), 0, vector, chunk_size=2)
    list(member.pop_due())

    def chunk(**changes):
        return Chunk(**{"peer": 1, "step": 0, "start": 0, "values": np.ones(2, np.float32), **changes})

    for wrong in (
        chunk(peer=0),
        chunk(step=5),
        chunk(start=2),
        chunk(values=np.ones(3, np.float32)),
        chunk(values=np.ones(2, np.float64)),
    ):
        with pytest.raises(NetworkError):
            member.receive(wrong)
    member.receive(chunk())
    member.receive(chunk())
    assert vector[:3].tolist() == [2.0, 2.0, 1.0]
    with pytest.raises(ValueError, match="power of two"):
        make_schedule("butterfly", 6, 10)
    with pytest.raises(ValueError, match="1 to 128"):
        make_schedule("ring", 129, 10)


def test_times_follow_from_rates_and_latency_and_the_slowest_link_holds_up_the_ring():
    link = LinkSpeed(100.0, 100.0, 0.5)
    assert compute_end_times(make_schedule("ring", 4, 400), [link] * 4) == pytest.approx([6 * 1.5] * 4)
    assert compute_end_times(make_schedule("butterfly", 4, 400), [link] * 4) == pytest.approx([6 + 4 * 0.5] * 4)
    slow = LinkSpeed(10.0, 100.0, 0.5)
    assert max(compute_end_times(make_schedule("ring", 4, 400), [link, slow, link, link])) > 6 * 10


def test_auto_takes_the_butterfly_for_powers_of_two_blocks_for_small_models_and_the_ring_for_large_ones():
    assert choose_collective(8, 20_000_000) == "butterfly"
    assert choose_collective(7, 20_000_000) == "ring"
    assert choose_collective(7, 1000) == "binary-blocks"
