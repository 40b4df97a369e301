"""The coordinator's side of secure aggregation: the sum of the masked vectors without their masks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from edgefl.core.errors import SecureAggregationError
from edgefl.core.secure_aggregation.keys import (
    add_mask,
    agree_key,
    derive_key,
    get_public_key,
    is_committed,
)
from edgefl.core.secure_aggregation.messages import Advert, make_pair_text
from edgefl.core.secure_aggregation.shamir import SHARE_BYTES, combine_shares, compute_lagrange
from edgefl.core.types import Array


def unmask_sum(
    total: Array,
    *,
    adverts: Mapping[str, bytes],
    holders: Mapping[str, Collection[str]],
    survivors: Collection[str],
    openings: Mapping[str, bytes],
    threshold: int,
) -> None:
    """Takes the masks off a sum of masked vectors, in place.

    Args:
        total: [words] uint32, the sum of the survivors' vectors.
        adverts: keys of all members, by name.
        holders: member whose shares went to others -> the boards that have them, which it masks with.
        survivors: those of them whose vectors are in the sum.
        openings: board -> the shares that it gave out: of each sharer that it holds, sorted by name.
        threshold: how many are needed of each sharer's.

    Raises:
        SecureAggregationError: too few are there, or they do not give the secrets that boards are bound to.
    """
    points = {name: place for place, name in enumerate(sorted(adverts), start=1)}
    members = {name: Advert.decode(content) for name, content in adverts.items()}
    context, shares = members[min(holders)].context, _split_openings(openings, holders)
    # Boards of a complete graph have the same holders, whose factors take long to compute.
    factors = lru_cache(maxsize=1)(compute_lagrange)
    for name in sorted(holders):
        opened = sorted(shares[name])[:threshold]
        if len(opened) < threshold:
            raise SecureAggregationError(
                f"{len(opened)} boards opened the sum, at least {threshold} are needed"
                if len(holders[name]) == len(members)
                else f"{len(opened)} boards opened the part of {name}, at least {threshold} are needed"
            )
        secret = combine_shares(
            [shares[name][holder] for holder in opened], factors(tuple(points[holder] for holder in opened))
        )
        if name in survivors:
            if not is_committed(secret, members[name].commitment):
                raise SecureAggregationError(
                    f"the shares of {name}'s seed give another one: a board gave a wrong one"
                )
            add_mask(total, derive_key(secret, context), sign=-1)
        elif get_public_key(secret) != members[name].mask_key:
            raise SecureAggregationError(f"the shares of {name}'s key give another one: a board gave a wrong one")
        else:
            paired = [other for other in survivors if other in holders[name] or name in holders[other]]
            _remove_pairs(total, name, secret, members, paired)


def list_held(holders: Mapping[str, Collection[str]], board: str) -> list[str]:
    """Returns the sharers whose shares a board has, sorted."""
    return sorted(name for name, found in holders.items() if board in found)


def _split_openings(
    openings: Mapping[str, bytes], holders: Mapping[str, Collection[str]]
) -> dict[str, dict[str, bytes]]:
    """Returns sharer -> holder -> its share; without the openings of another size."""
    shares: dict[str, dict[str, bytes]] = {name: {} for name in holders}
    for board, content in openings.items():
        held = list_held(holders, board)
        if len(content) == SHARE_BYTES * len(held):
            for place, name in enumerate(held):
                shares[name][board] = content[SHARE_BYTES * place : SHARE_BYTES * (place + 1)]
    return shares


def _remove_pairs(
    total: Array, lost: str, secret: bytes, members: Mapping[str, Advert], paired: Sequence[str]
) -> None:
    """Takes off the masks that some survivors share with a board whose vector did not come."""
    context = members[lost].context
    for name in paired:
        purpose = make_pair_text(b"mask", context, *sorted((name, lost)))
        add_mask(total, agree_key(secret, members[name].mask_key, purpose), sign=-1 if name < lost else 1)
