"""The coordinator's side of secure aggregation: the sum of the masked vectors without their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    sharers: Sequence[str],
    survivors: Sequence[str],
    openings: Mapping[str, bytes],
    threshold: int,
) -> None:
    """Takes the masks off a sum of masked vectors, in place.

    Args:
        total: [words] uint32, the sum of the survivors' vectors.
        adverts: keys of all members, by name.
        sharers: members whose shares went to the others.
        survivors: those of them whose vectors are in the sum.
        openings: board -> the shares that it gave out: of each sharer, sorted by name.
        threshold: how many are needed.

    Raises:
        SecureAggregationError: too few are there, or they do not give the secrets that boards are bound to.
    """
    names, points = sorted(sharers), {name: place for place, name in enumerate(sorted(adverts), start=1)}
    size = SHARE_BYTES * len(names)
    holders = sorted(name for name, content in openings.items() if len(content) == size and name in points)[
        :threshold
    ]
    if len(holders) < threshold:
        raise SecureAggregationError(f"{len(holders)} boards opened the sum, at least {threshold} are needed")
    factors = compute_lagrange([points[name] for name in holders])
    members = {name: Advert.decode(content) for name, content in adverts.items()}
    context = members[names[0]].context
    for place, name in enumerate(names):
        start = SHARE_BYTES * place
        secret = combine_shares([openings[holder][start : start + SHARE_BYTES] for holder in holders], factors)
        if name in survivors:
            if not is_committed(secret, members[name].commitment):
                raise SecureAggregationError(
                    f"the shares of {name}'s seed give another one: a board gave a wrong one"
                )
            add_mask(total, derive_key(secret, context), sign=-1)
        elif get_public_key(secret) != members[name].mask_key:
            raise SecureAggregationError(f"the shares of {name}'s key give another one: a board gave a wrong one")
        else:
            _remove_pairs(total, name, secret, context, members, survivors)


def _remove_pairs(
    total: Array, lost: str, secret: bytes, context: bytes, members: Mapping[str, Advert], survivors: Sequence[str]
) -> None:
    """Takes off the masks that the survivors share with a board whose vector did not come."""
    for name in survivors:
        purpose = make_pair_text(b"mask", context, *sorted((name, lost)))
        add_mask(total, agree_key(secret, members[name].mask_key, purpose), sign=-1 if name < lost else 1)
