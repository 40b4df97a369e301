"""All-reduce between devices: who sends which slice to whom in which step, and one member's state while it runs.

Every member holds a vector and ends with the sum of all, in the same bytes: each slice is summed by one member and
then copied.

- `ring`, any number n of members: a slice goes round and is added to, then goes round as the sum; every member sends
  2 (n - 1) / n vectors in 2 (n - 1) steps. Source: Patarasuk, Yuan, Bandwidth Optimal All-reduce Algorithms for
  Clusters of Workstations, Journal of Parallel and Distributed Computing 2009.
- `butterfly`, a power of two: recursive halving, then recursive doubling; as many bytes, in 2 log2 n steps. Source:
  Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005, section 4.5.
- `binary-blocks`, any number: blocks of powers of two, each a butterfly; a smaller block adds its slices to the next
  larger one's, and gets the sum back from there. Source: Rabenseifner, Träff, More Efficient Reduction Algorithms for
  Non-Power-of-Two Number of Processors in Message-Passing Parallel Systems, EuroPVM/MPI 2004.

A slice travels in chunks. A chunk goes on as soon as it has arrived, while the rest of its slice is under way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from edgefl.core.errors import NetworkError
from edgefl.core.types import Array

Collective = Literal["ring", "butterfly", "binary-blocks"]

MAX_MEMBERS = 128
"""A ring of more takes thousands of steps."""
CHUNK_BYTES = 256 * 1024
USUAL_BYTES_PER_S, USUAL_LATENCY_S = 2.5e6, 5e-3
"""20 Mbit/s and a local network: what `choose_collective` compares by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTransfer:
    """Entries `start` to `stop` of the vector, from one member to another; members are numbered from 0."""

    sender: int
    receiver: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveStep:
    """Transfers at the same time; `adds`: the receiver adds, otherwise it replaces its own entries."""

    transfers: tuple[SliceTransfer, ...]
    adds: bool


Schedule = tuple[CollectiveStep, ...]


def make_schedule(collective: Collective, num_members: int, size: int) -> Schedule:
    """Returns the steps of an all-reduce of `size` entries over 1 to `MAX_MEMBERS` members.

    Raises:
        ValueError: there are more members, or a butterfly of a number that is no power of two.
    """
    if not 1 <= num_members <= MAX_MEMBERS:
        raise ValueError(f"a collective has 1 to {MAX_MEMBERS} members, got {num_members}")
    if collective == "ring":
        steps = [_make_ring_step(index, num_members, size) for index in range(2 * (num_members - 1))]
    else:
        blocks = list_blocks(num_members)
        if collective == "butterfly" and len(blocks) > 1:
            raise ValueError(f"a butterfly needs a power of two of members, got {num_members}")
        steps = [*_iterate_block_steps(blocks, size)]
    return tuple(
        CollectiveStep(
            transfers=tuple(transfer for transfer in transfers if transfer.start < transfer.stop), adds=adds
        )
        for transfers, adds in steps
    )


def list_blocks(num_members: int) -> list[range]:
    """Returns the members of each binary block, largest first."""
    blocks, first = list[range](), 0
    for power in reversed(range(num_members.bit_length())):
        if num_members & (1 << power):
            blocks.append(range(first, first + (1 << power)))
            first += 1 << power
    return blocks


def choose_collective(num_members: int, num_bytes: int) -> Collective:
    """Returns the collective that ends first over equal links of the usual speed; on a tie that of fewer steps."""
    links = [LinkSpeed(USUAL_BYTES_PER_S, USUAL_BYTES_PER_S, USUAL_LATENCY_S)] * num_members
    candidates: list[Collective] = ["butterfly" if len(list_blocks(num_members)) == 1 else "binary-blocks", "ring"]
    return min(
        candidates, key=lambda name: max(compute_end_times(make_schedule(name, num_members, num_bytes), links))
    )


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One member's link; `latency_s` passes after the last byte of a transfer that it receives."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float = 0.0


def compute_end_times(schedule: Schedule, links: Sequence[LinkSpeed]) -> list[float]:
    """Returns when each member has ended, in seconds after all have begun; the schedule's entries are bytes.

    A transfer begins when its sender has ended the step before, goes at the lower rate of its two ends, and shares a
    link with no other. Chunks that go on before their slice has arrived would make it sooner.
    """
    ends, up_free, down_free = ([0.0] * len(links) for _ in range(3))
    for step in schedule:
        begins = list(ends)
        for transfer in step.transfers:
            sender, receiver = links[transfer.sender], links[transfer.receiver]
            start_s = max(begins[transfer.sender], up_free[transfer.sender], down_free[transfer.receiver])
            rate = min(sender.up_bytes_per_s, receiver.down_bytes_per_s)
            sent_s = start_s + (transfer.stop - transfer.start) / rate
            up_free[transfer.sender] = down_free[transfer.receiver] = sent_s
            ends[transfer.sender] = max(ends[transfer.sender], sent_s)
            ends[transfer.receiver] = max(ends[transfer.receiver], sent_s + receiver.latency_s)
    return ends


def count_sent(schedule: Schedule, num_members: int) -> list[int]:
    """Returns how many entries each member sends."""
    counts = [0] * num_members
    for step in schedule:
        for transfer in step.transfers:
            counts[transfer.sender] += transfer.stop - transfer.start
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a slice on its way: the entries of `step` from `start` on; `peer` is its receiver, or its sender."""

    peer: int
    step: int
    start: int
    values: Array = field(repr=False)


@dataclass(slots=True, eq=False)
class _SliceProgress:
    """A transfer that this member sends or receives, done up to the entry `done`.

    Attributes:
        blockers: transfers of earlier steps that have to be done up to an entry before this one may be.
        received: end of what has arrived; `waiting`: chunks that have arrived and must not be applied yet.
    """

    step: int
    peer: int
    stop: int
    adds: bool
    done: int
    received: int
    blockers: list[_SliceProgress] = field(default_factory=list)
    waiting: deque[Array] = field(default_factory=deque)

    def is_free(self, stop: int) -> bool:
        """Returns whether the entries up to `stop` may be sent or applied."""
        return all(blocker.done >= min(stop, blocker.stop) for blocker in self.blockers)


class AllReduce:
    """One member's state of an all-reduce, which ends with the sum of all members' vectors in `vector`.

    Args:
        schedule: of all members.
        member: number of this one.
        vector: [size] floats, changed in place.
        chunk_size: most entries of a chunk, the same for all members.
    """

    def __init__(self, schedule: Schedule, member: int, vector: Array, *, chunk_size: int) -> None:
        self._vector, self._chunk_size = vector, chunk_size
        self._sends, self._receives = list[_SliceProgress](), list[_SliceProgress]()
        for index, step in enumerate(schedule):
            self._add_step(index, step, member)

    def _add_step(self, index: int, step: CollectiveStep, member: int) -> None:
        sends, receives = list[_SliceProgress](), list[_SliceProgress]()
        for transfer in step.transfers:
            if member not in {transfer.sender, transfer.receiver}:
                continue
            is_send = transfer.sender == member
            progress = _SliceProgress(
                step=index,
                peer=transfer.receiver if is_send else transfer.sender,
                stop=transfer.stop,
                adds=step.adds,
                done=transfer.start,
                received=transfer.start,
            )
            earlier = self._receives if is_send else [*self._receives, *self._sends]
            # Sums are added in the order of steps, whoever is first: the same bytes whatever the network does.
            progress.blockers = [other for other in earlier if _overlaps(other, progress)]
            (sends if is_send else receives).append(progress)
        self._sends += sends
        self._receives += receives

    @property
    def is_complete(self) -> bool:
        """Whether the vector holds the sum, and this member has sent all that others need of it."""
        return all(progress.done == progress.stop for progress in (*self._sends, *self._receives))

    def list_partners(self) -> set[int]:
        """Returns the members that this one still has to hear of, or to send to."""
        return {item.peer for item in self._sends if item.done < item.stop} | {
            item.peer for item in self._receives if item.received < item.stop
        }

    def pop_due(self, has_room: Callable[[int], bool] = lambda _: True) -> Iterator[Chunk]:
        """Yields the chunks that can be sent now, each once; of a member only while it `has_room`."""
        for progress in self._sends:
            while progress.done < progress.stop:
                stop = min(progress.stop, progress.done + self._chunk_size)
                if not (progress.is_free(stop) and has_room(progress.peer)):
                    break
                start, progress.done = progress.done, stop
                yield Chunk(
                    peer=progress.peer, step=progress.step, start=start, values=self._vector[start:stop].copy()
                )
        self._apply_waiting()

    def receive(self, chunk: Chunk) -> None:
        """Adds a chunk of another member; one that came before changes nothing.

        Raises:
            NetworkError: it is none that this member sends next, or of another length or type.
        """
        progress = next(
            (item for item in self._receives if item.step == chunk.step and item.peer == chunk.peer), None
        )
        if progress is None or chunk.start > progress.received:
            raise NetworkError(f"entry {chunk.start} of step {chunk.step} is not due from member {chunk.peer}")
        if chunk.start < progress.received:
            return
        stop = min(progress.stop, chunk.start + self._chunk_size)
        if chunk.values.shape != (stop - chunk.start,) or chunk.values.dtype != self._vector.dtype:
            raise NetworkError(
                f"a chunk must have {stop - chunk.start} {self._vector.dtype}, got {chunk.values.shape} "
                f"{chunk.values.dtype}"
            )
        progress.received = stop
        progress.waiting.append(chunk.values)
        self._apply_waiting()

    def _apply_waiting(self) -> None:
        for progress in self._receives:
            while progress.waiting and progress.is_free(progress.done + len(progress.waiting[0])):
                values = progress.waiting.popleft()
                target = self._vector[progress.done : progress.done + len(values)]
                if progress.adds:
                    target += values
                else:
                    target[:] = values
                progress.done += len(values)


def reduce_vectors(collective: Collective, vectors: Sequence[Array], *, chunk_size: int = CHUNK_BYTES // 4) -> Array:
    """Returns the sum of vectors of one length and type, added as their members would; they are changed."""
    schedule = make_schedule(collective, len(vectors), len(vectors[0]))
    members = [AllReduce(schedule, index, vector, chunk_size=chunk_size) for index, vector in enumerate(vectors)]
    while not all(member.is_complete for member in members):
        for index, member in enumerate(members):
            for chunk in member.pop_due():
                members[chunk.peer].receive(
                    Chunk(peer=index, step=chunk.step, start=chunk.start, values=chunk.values)
                )
    return vectors[0]


def _overlaps(earlier: _SliceProgress, later: _SliceProgress) -> bool:
    return earlier.done < later.stop and later.done < earlier.stop


def _make_ring_step(index: int, num_members: int, size: int) -> tuple[list[SliceTransfer], bool]:
    bounds = [size * part // num_members for part in range(num_members + 1)]
    adds = index < num_members - 1
    transfers = []
    for sender in range(num_members):
        # The sum of slice i is with the member before the one that began with it.
        part = (sender - index if adds else sender - (index - num_members)) % num_members
        transfers.append(
            SliceTransfer(
                sender=sender, receiver=(sender + 1) % num_members, start=bounds[part], stop=bounds[part + 1]
            )
        )
    return transfers, adds


def _iterate_block_steps(blocks: Sequence[range], size: int) -> Iterator[tuple[list[SliceTransfer], bool]]:
    """Yields the steps of butterflies within blocks, largest block first, and those between the blocks."""
    num_halvings = int(math.log2(len(blocks[0])))
    for depth in range(num_halvings):
        yield [transfer for block in blocks for transfer in _list_halving(block, depth, size)], True
    for larger, smaller in reversed(list(pairwise(blocks))):
        yield _list_between(larger, smaller, size), True
    for larger, smaller in pairwise(blocks):
        down = _list_between(larger, smaller, size)
        yield (
            [
                SliceTransfer(sender=item.receiver, receiver=item.sender, start=item.start, stop=item.stop)
                for item in down
            ],
            False,
        )
    for depth in reversed(range(num_halvings)):
        yield [transfer for block in blocks for transfer in _list_doubling(block, depth, size)], False


def _list_halving(block: range, depth: int, size: int) -> list[SliceTransfer]:
    """Returns the exchange of each member with the one at half the distance of the step before: the other's half."""
    distance = len(block) >> (depth + 1)
    if not distance:
        return []
    return [
        _send_half(block, place, place ^ distance, distance, size, of=place ^ distance) for place in range(len(block))
    ]


def _list_doubling(block: range, depth: int, size: int) -> list[SliceTransfer]:
    """Returns the same exchange on the way back: what each holds of the sum."""
    distance = len(block) >> (depth + 1)
    if not distance:
        return []
    return [_send_half(block, place, place ^ distance, distance, size, of=place) for place in range(len(block))]


def _send_half(block: range, place: int, partner: int, distance: int, size: int, *, of: int) -> SliceTransfer:
    first = of // distance * distance
    return SliceTransfer(
        sender=block[place],
        receiver=block[partner],
        start=size * first // len(block),
        stop=size * (first + distance) // len(block),
    )


def _list_between(larger: range, smaller: range, size: int) -> list[SliceTransfer]:
    """Returns the transfers of the smaller block's slices to the members of the larger one that sum them."""
    ratio = len(larger) // len(smaller)
    return [
        SliceTransfer(
            sender=smaller[place // ratio],
            receiver=larger[place],
            start=size * place // len(larger),
            stop=size * (place + 1) // len(larger),
        )
        for place in range(len(larger))
    ]
