"""Sparse graphs: how few boards protect each, what an attempt over them opens, and coordinators that lie."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from secure_round import CONFIG, WORDS, Round, drop, make_boards, make_certified, make_participants

from edgefl.coordinator.pki import create_authority
from edgefl.core.errors import SecureAggregationError
from edgefl.core.secure_aggregation.graph import compute_neighbourhood, draw_holders
from edgefl.core.secure_aggregation.messages import SPENT

STEPS = ("keys", "shares", "update", "consent", "unmask")
SPARSE = dataclasses.replace(CONFIG, corrupted=0.05, dropped=0.05)
ROBUST = dataclasses.replace(CONFIG, corrupted=0.05, dropped=0.3)


def compute_tail(num_others, num_marked, num_drawn, least):
    """Returns P[at least so many of the drawn are marked], exactly."""
    found = sum(
        math.comb(num_marked, count) * math.comb(num_others - num_marked, num_drawn - count)
        for count in range(least, min(num_marked, num_drawn) + 1)
    )
    return found / math.comb(num_others, num_drawn)


def find_by_definition(num_members, threshold, corrupted, dropped):
    """Returns holders and threshold by the three bounds, in whole numbers."""
    num_corrupted, num_dropped = math.ceil(corrupted * num_members), math.ceil(dropped * num_members)
    honest, least = num_members - num_corrupted, math.floor(threshold * num_members) + 1
    left, has_quorum = least - num_corrupted, 2 * least > num_members + num_corrupted
    for degree in range(1, num_members - 1 if has_quorum else 1):
        needed = max(
            (
                needed
                for needed in range(1, degree + 1)
                if num_members * compute_tail(num_members - 1, num_dropped, degree, degree - needed + 1) <= 2**-30
            ),
            default=0,
        )
        most = min(
            count
            for count in range(degree + 1)
            if honest * compute_tail(num_members - 1, num_corrupted, degree, count + 1) <= 2**-41
        )
        chance = sum(
            math.comb(honest, size)
            * math.comb(honest - size, left - size)
            * (math.comb(num_members - 1 - left + size, degree) / math.comb(num_members - 1, degree)) ** size
            for size in range(max(1, needed - most), left // 2 + 1)
        )
        if needed > most and chance <= 2**-41:
            return degree + 1, needed
    return num_members, math.floor(threshold * num_members) + 1


@pytest.mark.parametrize("num_members", [3, 10, 50, 120])
@pytest.mark.parametrize(("corrupted", "dropped"), [(0.05, 0.05), (0.1, 0.1), (0.1, 0.3), (0.3, 0.1), (0.34, 0)])
def test_a_neighbourhood_is_the_smallest_that_meets_the_bounds(num_members, corrupted, dropped):
    config = dataclasses.replace(CONFIG, corrupted=corrupted, dropped=dropped)
    found = compute_neighbourhood(num_members, config)
    assert (found.num_holders, found.threshold) == find_by_definition(num_members, 0.67, corrupted, dropped)


def test_more_boards_need_few_more_holders_and_a_few_share_with_all():
    sizes = [compute_neighbourhood(count, SPARSE).num_holders for count in (3, 50, 200, 1000)]
    assert sizes[0] == 3
    assert sizes[1] < 20
    assert sizes[3] < 2.1 * sizes[2] < 0.4 * 200
    assert compute_neighbourhood(50, CONFIG).num_holders == 50


def test_boards_draw_holders_uniformly_and_are_one_themselves():
    names = [f"b{number}" for number in range(10)]
    drawn = Counter()
    for _ in range(900):
        holders = draw_holders("b3", names, 4)
        assert len(set(holders)) == 4
        assert list(holders) == sorted(holders)
        drawn.update(holders)
    assert drawn.pop("b3") == 900
    assert all(abs(count - 300) < 100 for count in drawn.values())


@pytest.mark.parametrize(
    ("count", "fraction", "config"),
    [(3, 0.3, ROBUST), (10, 0.0, SPARSE), (10, 0.1, ROBUST), (10, 0.3, ROBUST), (50, 0.0, SPARSE), (50, 0.3, ROBUST)],
)
@pytest.mark.parametrize("at", STEPS)
def test_the_sum_of_the_survivors_is_exact_whichever_step_boards_drop_out_at(count, fraction, config, at):
    attempt, left = Round(make_boards(count), config=config), {}
    for step in STEPS:
        present = list(attempt.boards)
        left[step] = drop(present, fraction) if STEPS.index(step) >= STEPS.index(at) else present
    attempt.advertise(left["keys"])
    attempt.share(left["shares"])
    for name in left["update"]:
        attempt.mask(name)
    survivors = left["update"]
    openings = attempt.open(survivors, attempt.consent(survivors, left["consent"]), left["unmask"])
    expected = np.sum([attempt.vectors[name] for name in survivors], axis=0, dtype=np.uint32)
    assert (attempt.unmask(survivors, openings) == expected).all()


def test_boards_share_with_few_and_what_they_send_says_nothing():
    attempt = Round(make_boards(50), config=SPARSE)
    attempt.advertise()
    attempt.share()
    masked = [attempt.mask(name, np.zeros(WORDS, np.uint32)) for name in attempt.boards]
    assert {len(found) for found in attempt.shares.values()} == {compute_neighbourhood(50, SPARSE).num_holders}
    assert all(name in found for name, found in attempt.shares.items())
    for words in (*masked, np.sum(masked[:49], axis=0, dtype=np.uint32), attempt.total):
        assert len(set(words.tolist())) == WORDS


def test_below_the_threshold_of_a_neighbourhood_nothing_is_opened():
    attempt = Round(make_boards(50), config=SPARSE).run_to_masks()
    names = list(attempt.boards)
    openings = attempt.open(names, attempt.consent(names))
    needed = compute_neighbourhood(50, SPARSE).threshold
    for name in sorted(attempt.shares["b07"])[needed - 1 :]:
        del openings[name]
    with pytest.raises(SecureAggregationError, match=rf"\d+ boards opened the part of b\d\d, at least {needed}"):
        attempt.unmask(names, openings)
    lonely = Round(make_boards(50), config=SPARSE)
    lonely.advertise()
    lonely.share()
    left = set(lonely.shares["b00"])
    lonely.sharers = [name for name in lonely.sharers if name not in sorted(left - {"b00"})[: len(left) - needed + 1]]
    with pytest.raises(
        SecureAggregationError, match=rf"{needed - 1} of the {len(left)} boards with this one's shares"
    ):
        lonely.mask("b00")
    few = Round(make_boards(50), config=SPARSE)
    few.advertise()
    few.share()
    few.sharers = sorted(few.sharers, key=lambda name: name not in few.shares["b00"])[:33]
    with pytest.raises(SecureAggregationError, match="33 of 50 boards are left"):
        few.mask("b00")


def test_a_coordinator_that_names_other_sharers_to_a_board_cannot_open_its_part():
    attempt = Round(make_boards(50), config=SPARSE)
    attempt.advertise()
    attempt.share()
    everyone = attempt.sharers
    victim, cut = "b00", next(name for name in attempt.shares["b00"] if name != "b00")
    for name in attempt.boards:
        attempt.sharers = [other for other in everyone if other != cut] if name == victim else everyone
        attempt.mask(name)
    attempt.sharers, names = everyone, list(attempt.boards)
    for name in set(attempt.shares[victim]) - {victim}:
        with pytest.raises(SecureAggregationError, match="not signed by it"):
            attempt.consent(names, [name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: (*found, found[0]), "named twice"),
        (lambda found: (*found, "b99"), "no members"),
        (lambda found: found[1:], "are others"),
    ],
)
def test_sharers_that_cannot_be_are_refused(change, message):
    attempt = Round(make_boards(10), config=SPARSE)
    attempt.advertise()
    attempt.share()
    attempt.list_sharers = lambda name: change((name, *(other for other in attempt.sharers if other != name)))
    with pytest.raises(SecureAggregationError, match=message):
        attempt.mask("b03")


def test_a_board_opens_no_seed_without_the_signature_of_what_it_was_masked_with():
    attempt = Round(
        make_participants(make_certified([f"b{n}" for n in range(4)], create_authority("h"))), config=SPARSE
    )
    attempt.run_to_masks()
    names, honest = list(attempt.boards), dict(attempt.masked)
    for lie in ({"b1": b""}, {"b1": honest["b2"]}, {"b1": bytes(64)}):
        attempt.masked = {**honest, **lie}
        with pytest.raises(SecureAggregationError, match="b1 is not signed by it"):
            attempt.consent(names, ["b0"])
    attempt.masked = honest
    signatures = attempt.consent(names)
    for lie in ({"b1": signatures["b2"]}, {"b1": honest["b1"]}):
        with pytest.raises(SecureAggregationError, match="not signed by it"):
            attempt.open(names, {**signatures, **lie}, ["b0"])


def test_a_board_never_opens_two_sums_nor_both_shares_of_a_board():
    attempt = Round(make_boards(50), config=SPARSE).run_to_masks(survivors=[f"b{number:02}" for number in range(48)])
    survivors = list(attempt.boards)[:48]
    signatures = attempt.consent(survivors)
    opened = attempt.open(survivors, signatures, ["b00"])["b00"]
    assert len(opened) == 33 * sum("b00" in found for found in attempt.shares.values())
    for lie in (survivors[:47], [*survivors[:47], "b49"], list(attempt.boards)):
        with pytest.raises(SecureAggregationError):
            attempt.open(lie, signatures, ["b00"])
    with pytest.raises(SecureAggregationError, match="never consents to another one"):
        attempt.consent(survivors[:47], ["b00"])
    again = Round(attempt.boards, config=dataclasses.replace(SPARSE, group="v0-a2"))
    again.advertise(survivors)
    assert set(again.adverts.values()) == {SPENT}


def test_a_coordinator_that_replays_swaps_keys_or_asks_for_another_graph_is_refused():
    attempt = Round(make_boards(10), config=SPARSE).run_to_masks()
    old_adverts, old_shares = attempt.adverts, attempt.shares
    with pytest.raises(SecureAggregationError, match="sent already"):
        attempt.mask("b00")
    with pytest.raises(SecureAggregationError, match="members of this attempt are known"):
        attempt.share(["b00"])  # would draw other holders
    attempt.advertise()
    fresh = attempt.adverts
    attempt.adverts = {**old_adverts, "b00": fresh["b00"]}
    attempt.adverts["b01"] = fresh["b02"]
    with pytest.raises(SecureAggregationError, match=r"b01 is not signed by it"):
        attempt.share(["b00"])
    attempt.adverts = fresh
    attempt.share()
    current, attempt.shares = attempt.shares, old_shares
    with pytest.raises(SecureAggregationError, match="not encrypted for this one"):
        attempt.mask("b00")
    attempt.shares = current
    for change in ({"corrupted": 0.3}, {"dropped": 0.2}, {"corrupted": None}):
        attempt.config = dataclasses.replace(SPARSE, **change)
        with pytest.raises(SecureAggregationError, match="no keys of this attempt"):
            attempt.mask("b00")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corrupted": 0.01}, "from 0.05 to 0.34"),
        ({"corrupted": 0.4}, "from 0.05 to 0.34"),
        ({"corrupted": float("nan")}, "corrupted boards"),
        ({"corrupted": "0.1"}, "corrupted boards"),
        ({"dropped": 0.4}, "0 to 0.33"),
        ({"dropped": None}, "0 to 0.33"),
        ({"sharers": ("b",) * 1001}, "up to 1000 boards"),
    ],
)
def test_a_graph_that_protects_from_nobody_is_refused(change, message):
    attempt = Round(make_boards(3))
    with pytest.raises(SecureAggregationError, match=message):
        attempt.ask("b00", dataclasses.replace(SPARSE, **change))
