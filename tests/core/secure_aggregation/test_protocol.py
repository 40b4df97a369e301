"""The whole protocol in memory: exact sums over drop-outs, and coordinators that do not keep to it."""

import dataclasses

import numpy as np
import pytest
from secure_round import CONFIG, RUN, WORDS, Round, drop, make_boards, make_certified, make_participants

from edgefl.coordinator.pki import create_authority
from edgefl.core.errors import DataError, SecureAggregationError
from edgefl.core.secure_aggregation.messages import SPENT
from edgefl.core.secure_aggregation.participant import MAX_RUNS, Consent, ConsentRecorder, Participant
from edgefl.core.secure_aggregation.ring import count_levels, decode_mean, encode_vector
from edgefl.core.secure_aggregation.shamir import PRIME, combine_shares, compute_lagrange, split_secret
from edgefl.simulation.secure_boards import SimulatedIdentity


@pytest.mark.parametrize(("count", "fraction"), [(3, 0.3), (10, 0.0), (10, 0.1), (10, 0.3), (50, 0.3)])
@pytest.mark.parametrize("at", ["keys", "shares", "update", "consent", "unmask"])
def test_the_sum_of_the_survivors_is_exact_whichever_step_boards_drop_out_at(count, fraction, at):
    attempt = Round(make_boards(count))
    left = {step: list(attempt.boards) for step in ("keys", "shares", "update", "consent", "unmask")}
    for step in list(left)[list(left).index(at) :]:
        left[step] = drop(left[step], fraction)
    attempt.advertise(left["keys"])
    attempt.share(left["shares"])
    for name in left["update"]:
        attempt.mask(name)
    survivors = left["update"]
    signatures = attempt.consent(survivors, left["consent"])
    openings = attempt.open(survivors, signatures, left["unmask"])
    expected = np.sum([attempt.vectors[name] for name in survivors], axis=0, dtype=np.uint32)
    assert (attempt.unmask(survivors, openings) == expected).all()


def test_a_masked_vector_and_sums_of_some_say_nothing_of_what_is_in_them():
    attempt = Round(make_boards(3))
    attempt.advertise()
    attempt.share()
    masked = [attempt.mask(name, np.zeros(WORDS, np.uint32)) for name in attempt.boards]
    for words in (*masked, masked[0] + masked[1], attempt.total):
        assert len(set(words.tolist())) == WORDS
        assert not (words == 0).any()


def test_below_the_threshold_nothing_is_opened():
    attempt = Round(make_boards(10)).run_to_masks()
    survivors = list(attempt.boards)
    signatures = attempt.consent(survivors)
    openings = attempt.open(survivors, signatures, survivors[:6])
    with pytest.raises(SecureAggregationError, match="6 boards opened the sum, at least 7 are needed"):
        attempt.unmask(survivors, openings)
    too_few = Round(make_boards(10)).run_to_masks(survivors[:6])
    with pytest.raises(SecureAggregationError, match="6 of 10 boards are left, at least 7"):
        too_few.consent(survivors[:6])
    with pytest.raises(SecureAggregationError, match="6 of 10 boards are left"):
        attempt.open(survivors, dict(list(signatures.items())[:6]))


def test_updates_are_sent_only_where_enough_boards_have_shared():
    attempt = Round(make_boards(10))
    attempt.advertise()
    attempt.share(list(attempt.boards)[:6])
    with pytest.raises(SecureAggregationError, match="6 of 10 boards"):
        attempt.mask("b00")


def test_a_board_never_opens_two_sums_of_one_attempt_or_version():
    saved = []
    boards = make_boards(10, save=lambda consents: saved.append(dict(consents)))
    attempt = Round(boards).run_to_masks()
    names = list(boards)
    signatures = attempt.consent(names)
    assert len(saved) == 10
    with pytest.raises(SecureAggregationError, match="never consents to another one"):
        attempt.consent(names[:9], ["b00"])
    with pytest.raises(SecureAggregationError, match="has not consented"):
        attempt.open(names[:9], signatures, ["b00"])
    first = attempt.open(names, signatures, ["b00"])
    assert attempt.open(names, signatures, ["b00"]) == first
    again = Round(boards, config=dataclasses.replace(CONFIG, group="v0-a2"))
    again.advertise()
    assert set(again.adverts.values()) == {SPENT}
    later = Round(boards, config=dataclasses.replace(CONFIG, group="v1-a1", version=1))
    later.advertise()
    assert SPENT not in later.adverts.values()


def test_a_consent_holds_over_a_restart():
    kept = {}
    boards = make_boards(3, save=kept.update)
    attempt = Round(boards).run_to_masks()
    attempt.consent(list(boards))
    restarted = Participant(SimulatedIdentity("b00"), ConsentRecorder(consents=kept))
    boards["b00"] = restarted
    with pytest.raises(SecureAggregationError, match="no keys of this attempt"):
        attempt.consent(list(boards), ["b00"])
    attempt.advertise(["b00"])
    assert attempt.adverts == {"b00": SPENT}


def test_a_board_gives_out_a_share_of_the_seed_or_of_the_key_and_never_both():
    attempt = Round(make_boards(10)).run_to_masks(survivors=[f"b{number:02}" for number in range(8)])
    survivors = list(attempt.boards)[:8]
    signatures = attempt.consent(survivors)
    opened = attempt.open(survivors, signatures, ["b00"])["b00"]
    assert len(opened) == 10 * 33
    # The two whose updates did not come are asked for again as survivors, to get the other share of each.
    for lie in (list(attempt.boards), [*survivors[:7], "b09"]):
        with pytest.raises(SecureAggregationError):
            attempt.open(lie, signatures, ["b00"])


def test_a_coordinator_that_replays_an_attempt_gets_nothing():
    attempt = Round(make_boards(3)).run_to_masks()
    old_adverts, old_shares = attempt.adverts, attempt.shares
    with pytest.raises(SecureAggregationError, match="sent already"):
        attempt.mask("b00")
    with pytest.raises(SecureAggregationError, match="members of this attempt are known"):
        attempt.share()
    attempt.advertise()
    attempt.adverts = {**old_adverts, "b01": attempt.adverts["b01"]}
    with pytest.raises(SecureAggregationError, match="with its own keys"):
        attempt.share(["b00"])
    attempt.advertise()
    attempt.share()
    attempt.shares = old_shares
    with pytest.raises(SecureAggregationError, match="not encrypted for this one"):
        attempt.mask("b00")


def test_a_coordinator_that_asks_for_other_settings_meanwhile_is_refused():
    attempt = Round(make_boards(3))
    attempt.advertise()
    attempt.config = dataclasses.replace(CONFIG, clip=1e6)
    with pytest.raises(SecureAggregationError, match="no keys of this attempt"):
        attempt.share()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 0.4}, "threshold must be a fraction"),
        ({"clip": float("nan")}, "above 0"),
        ({"step": "open"}, "no step"),
        ({"version": -1}, "whole numbers"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, message):
    attempt = Round(make_boards(3), config=CONFIG)
    with pytest.raises(SecureAggregationError, match=message):
        attempt.ask("b00", dataclasses.replace(CONFIG, **change))


def test_two_boards_are_too_few():
    attempt = Round(make_boards(2))
    attempt.advertise()
    with pytest.raises(SecureAggregationError, match="3 to 1000 members"):
        attempt.share()


def test_a_wrong_share_is_found_and_opens_nothing():
    attempt = Round(make_boards(3)).run_to_masks()
    names = list(attempt.boards)
    openings = attempt.open(names, attempt.consent(names))
    openings["b01"] = openings["b01"][:40] + bytes([openings["b01"][40] ^ 1]) + openings["b01"][41:]
    with pytest.raises(SecureAggregationError, match="a board gave"):
        attempt.unmask(names, openings)


def test_boards_with_certificates_of_the_fleet_open_their_sum():
    attempt = Round(make_participants(make_certified(["b0", "b1", "b2"], create_authority("home")))).run_to_masks()
    names = list(attempt.boards)
    expected = np.sum([*attempt.vectors.values()], axis=0, dtype=np.uint32)
    openings = attempt.open(names, attempt.consent(names))
    assert (attempt.unmask(names, openings) == expected).all()
    assert {len(advert) for advert in attempt.adverts.values()} == {132 + 768}


def test_a_coordinator_that_swaps_keys_or_invents_boards_is_refused():
    authority, other = create_authority("home"), create_authority("home")
    identities = make_certified(["b0", "b1", "b2"], authority)
    attempt = Round(make_participants(identities))
    attempt.advertise()
    honest = dict(attempt.adverts)
    invented = make_participants(make_certified(["b3"], other))["b3"]
    outsider = invented.answer(RUN, CONFIG, ())[0].body
    swapped = honest["b1"][:3] + bytes([honest["b1"][3] ^ 1]) + honest["b1"][4:]
    for lie in ({"b1": swapped}, {"b3": outsider}, {"b1": honest["b2"]}, {"b1": honest["b1"][:50]}, {"b1": b""}):
        attempt.adverts = {**honest, **lie}
        with pytest.raises(SecureAggregationError):
            attempt.share(["b0"])
    attempt.adverts = honest
    attempt.share(["b0"])


def test_a_coordinator_that_lies_about_who_consents_is_refused():
    attempt = Round(make_participants(make_certified(["b0", "b1", "b2"], create_authority("home")))).run_to_masks()
    names = list(attempt.boards)
    signatures = attempt.consent(names)
    for lie in ({"b1": signatures["b2"]}, {"b1": bytes(64)}, {"b1": b""}):
        with pytest.raises(SecureAggregationError, match="not signed by it"):
            attempt.open(names, {**signatures, **lie}, ["b0"])
    with pytest.raises(SecureAggregationError, match="not in"):
        attempt.open(names, {**signatures, "b9": signatures["b1"]}, ["b0"])


def test_consents_of_many_runs_are_bounded():
    recorder = ConsentRecorder()
    for number in range(MAX_RUNS + 5):
        recorder.record(f"r{number}", Consent(version=0, digest="d"))
    assert len(recorder.consents) == MAX_RUNS
    assert "r4" not in recorder.consents


def test_any_threshold_of_shares_gives_the_secret_and_fewer_give_another():
    secret = bytes(range(200, 232))
    shares = split_secret(secret, [1, 2, 3, 4, 5], 3)
    for points in ([1, 2, 3], [2, 4, 5], [1, 3, 5]):
        chosen = [shares[point - 1] for point in points]
        assert combine_shares(chosen, compute_lagrange(points)) == secret
    fewer = sum(
        int.from_bytes(shares[point - 1], "big") * factor
        for point, factor in zip([1, 2], compute_lagrange([1, 2]), strict=True)
    )
    assert fewer % PRIME != int.from_bytes(secret, "big")


def test_the_field_is_a_prime_field():
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11))


@pytest.mark.parametrize("count", [3, 50, 1000])
def test_the_largest_updates_of_all_members_do_not_overflow(count):
    model = {"w": np.zeros(3, np.float32)}
    update = {"w": np.array([5.0, -5.0, 0.25], np.float32)}
    settings = {"max_weight": 100, "clip": 1.0, "num_members": count}
    total = np.zeros(4, np.uint32)
    for _ in range(count):
        total += encode_vector(update, weight=1000, **settings)
    mean = decode_mean(total, model, num_added=count, **settings)
    np.testing.assert_allclose(mean["w"], [1.0, -1.0, 0.25], rtol=1e-6)
    assert abs(int(total.view(np.int32)[1])) <= count * count_levels(count) <= 2**31 - 1


def test_updates_weigh_as_many_examples_as_they_have_up_to_the_bound():
    model = {"w": np.zeros(1, np.float32), "n": np.zeros(1, np.int64)}
    settings = {"max_weight": 10, "clip": 2.0, "num_members": 3}
    total = np.zeros(2, np.uint32)
    for value, weight in ((1.0, 1), (-1.0, 3), (0.5, 50)):
        total += encode_vector({**model, "w": np.array([value], np.float32)}, weight=weight, **settings)
    mean = decode_mean(total, model, num_added=3, **settings)
    np.testing.assert_allclose(mean["w"], [(1 - 3 + 5) / 14], rtol=1e-6)
    assert mean.keys() == {"w"}


def test_an_update_that_is_not_finite_or_too_heavy_is_refused():
    settings = {"weight": 1, "clip": 1.0, "num_members": 3}
    with pytest.raises(DataError, match="NaN"):
        encode_vector({"w": np.array([np.nan])}, max_weight=10, **settings)
    with pytest.raises(SecureAggregationError, match="largest weight"):
        encode_vector({"w": np.zeros(1)}, max_weight=2**31, **settings)


def test_a_sum_that_no_honest_boards_can_have_is_refused():
    settings = {"max_weight": 10, "clip": 1.0, "num_members": 3}
    good = encode_vector({"w": np.array([1.0])}, weight=10, **settings)
    model = {"w": np.zeros(1, np.float32)}
    too_large, too_light = good * np.uint32(3), good * np.uint32(3)
    too_large[0], too_light[0] = 15, 2
    for total in (too_large, too_light):
        with pytest.raises(SecureAggregationError, match="out of range"):
            decode_mean(total, model, num_added=3, **settings)
