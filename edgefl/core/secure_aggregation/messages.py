"""Bytes of secure aggregation: what boards sign, and the messages between them and to the coordinator."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgefl.core.errors import SecureAggregationError
from edgefl.core.secure_aggregation.shamir import SHARE_BYTES
from edgefl.core.types import SecureAggregationConfig, SecureStep

MIN_MEMBERS = 3
"""In a sum of two, each of both knows the other's update."""
MAX_MEMBERS = 1000
MAX_CLIP = 1e6
ROUNDING = 1e-9
MIN_CORRUPTED = 0.05
"""Least share of corrupted boards against which a sparse graph must protect."""
MAX_GROUP_CHARACTERS = 400
CERTIFICATE_BYTES = 768
"""A certificate is padded to a multiple of this, so that messages have one size."""
PAIR_BYTES = 2 * SHARE_BYTES
ENCRYPTED_PAIR_BYTES = PAIR_BYTES + 16
MAX_SIGNATURE_BYTES = 200
SPENT = b""
"""In place of keys: the board has opened a sum of this version, and takes part in no other of it."""
_ADVERT = struct.Struct("<32s32s32s32sHH")


def compute_context(run: str, config: SecureAggregationConfig) -> bytes:
    """Returns the digest of what an attempt is of; every key and signature of it is bound to that."""
    values = [run, config.group, config.version, config.threshold, config.clip, config.max_examples]
    if config.corrupted is not None:
        values += ["sparse", config.corrupted, config.dropped]
    return hashlib.sha256(b"edgefl secure aggregation 1" + json.dumps(values).encode()).digest()


def compute_threshold(num_members: int, fraction: float) -> int:
    """Returns how many of so many members must be left at every step: more than this fraction of them."""
    return min(num_members, math.floor(fraction * num_members) + 1)


def check_config(config: SecureAggregationConfig) -> None:
    """Checks what a coordinator says of an attempt.

    Raises:
        SecureAggregationError: a step or a number makes no sense, or the threshold says nothing.
    """
    is_number = isinstance(config.threshold, float) and isinstance(config.clip, int | float)
    if config.step not in set(SecureStep) or not is_number or not isinstance(config.group, str):
        raise SecureAggregationError(f"no step of secure aggregation: {config.step!r:.40}")
    if not 0.5 <= config.threshold <= 1:
        raise SecureAggregationError(
            f"the threshold must be a fraction from 0.5 to 1, got {config.threshold!r}: with less, a coordinator "
            "could open two sums of one round"
        )
    if not 0 < config.clip <= MAX_CLIP:  # compared, for a whole number may be too large for a float
        raise SecureAggregationError(
            f"the largest entry of an update must be above 0, up to {MAX_CLIP:g}, got {format_number(config.clip)}"
        )
    numbers = config.version, config.max_examples, config.num_members
    if any(isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63 for number in numbers):
        raise SecureAggregationError(
            "whole numbers from 0 are needed in a step of secure aggregation, got "
            + ", ".join(format_number(number) for number in numbers)
        )
    num_named = max(len(config.survivors), len(config.sharers))
    if len(config.group) > MAX_GROUP_CHARACTERS or num_named > MAX_MEMBERS:
        raise SecureAggregationError(
            f"an attempt has an id of up to {MAX_GROUP_CHARACTERS} characters and up to {MAX_MEMBERS} boards, got "
            f"{len(config.group)} and {num_named}"
        )
    if config.corrupted is not None:
        _check_shares(config.threshold, config.corrupted, config.dropped)


def _check_shares(threshold: float, corrupted: float, dropped: float) -> None:
    """Checks for whom a sparse graph is made; with more corrupted boards two sums of one round could be opened."""
    most = 2 * threshold - 1  # so that two sets of enough boards have an honest one in common
    if not isinstance(corrupted, float) or not MIN_CORRUPTED <= corrupted <= most + ROUNDING:
        raise SecureAggregationError(
            f"a sparse graph must protect from a share of corrupted boards from {MIN_CORRUPTED} to {most:g} with a "
            f"threshold of {threshold:g}, got {corrupted!r:.40}"
        )
    if not isinstance(dropped, float) or not 0 <= dropped <= 1 - threshold + ROUNDING:
        raise SecureAggregationError(
            f"the share of boards that may drop out must lie in 0 to {1 - threshold:g}, got {dropped!r:.40}"
        )


def format_number(value: object) -> str:
    """Returns a number of outside for a message; a whole one of thousands of digits is not written."""
    return "a very large number" if isinstance(value, int) and abs(value) >= 2**63 else f"{value!r:.40}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advert:
    """A board's public keys for one attempt, signed.

    Attributes:
        context: digest of the attempt.
        share_key: encrypts the shares of secrets for it.
        mask_key: of its masks with other boards.
        commitment: to the seed of its own mask.
        certificate, signature: of the board.
    """

    context: bytes
    share_key: bytes
    mask_key: bytes
    commitment: bytes
    certificate: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    def encode(self) -> bytes:
        body = self.certificate + self.signature
        padding = -len(body) % CERTIFICATE_BYTES
        numbers = len(self.certificate), len(self.signature)
        return (
            _ADVERT.pack(self.context, self.share_key, self.mask_key, self.commitment, *numbers)
            + body
            + bytes(padding)
        )

    @property
    def keys(self) -> tuple[bytes, bytes]:
        return self.share_key, self.mask_key

    @classmethod
    def decode(cls, content: bytes) -> Advert:
        """Returns the advert in bytes.

        Raises:
            SecureAggregationError: it is cut off, or has other bytes in it.
        """
        if len(content) < _ADVERT.size or len(content) > _ADVERT.size + 16 * CERTIFICATE_BYTES:
            raise SecureAggregationError(f"a board's keys have {len(content)} bytes")
        context, share_key, mask_key, commitment, size, signature_size = _ADVERT.unpack_from(content)
        end = _ADVERT.size + size
        if end + signature_size > len(content) or any(content[end + signature_size :]):
            raise SecureAggregationError("a board's keys are cut off")
        return cls(
            context=context,
            share_key=share_key,
            mask_key=mask_key,
            commitment=commitment,
            certificate=content[_ADVERT.size : end],
            signature=content[end : end + signature_size],
        )


def make_advert_text(context: bytes, device_id: str, share_key: bytes, mask_key: bytes, commitment: bytes) -> bytes:
    """Returns what a board signs of its keys."""
    return b"\x00".join((b"edgefl keys", context, device_id.encode(), share_key + mask_key + commitment))


def compute_members_hash(context: bytes, adverts: Sequence[tuple[str, bytes]]) -> bytes:
    """Returns the digest of all members' keys, sorted by name."""
    digest = hashlib.sha256(b"edgefl members" + context)
    for device_id, content in sorted(adverts):
        digest.update(f"{device_id}\x00{len(content)}\x00".encode() + content)
    return digest.digest()


def compute_sharers_hash(members: bytes, sharers: Iterable[str]) -> bytes:
    """Returns the digest of members and of those whose shares went to the others."""
    return hashlib.sha256(b"\x00".join((b"edgefl sharers", members, *map(str.encode, sorted(sharers))))).digest()


def make_masked_text(sharers: bytes) -> bytes:
    """Returns what a board signs of a vector that it has masked with all that it must of these sharers."""
    return b"\x00".join((b"edgefl masked", sharers))


def make_survivors_text(members: bytes, survivors: Sequence[str]) -> bytes:
    """Returns what a board signs when it consents to the sum of these boards."""
    return b"\x00".join((b"edgefl survivors", members, *(name.encode() for name in sorted(survivors))))


def make_pair_text(purpose: bytes, context: bytes, first: str, second: str) -> bytes:
    """Returns what a key of two boards is for."""
    return b"\x00".join((b"edgefl " + purpose, context, first.encode(), second.encode()))
