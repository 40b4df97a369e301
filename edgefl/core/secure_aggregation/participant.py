"""A board's side of secure aggregation.

Its secrets of an attempt are in memory only: a board that restarts has dropped out of it. On disk it keeps, for each
run, the version and the boards whose sum it has last consented to, before it says so: it consents to one sum of a
version, and never takes part in another.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edgefl.core.errors import SecureAggregationError
from edgefl.core.protocol import COORDINATOR_NAME
from edgefl.core.secure_aggregation.graph import compute_neighbourhood, draw_holders
from edgefl.core.secure_aggregation.keys import (
    KEY_BYTES,
    Identity,
    add_mask,
    agree_key,
    commit_to,
    decrypt,
    derive_key,
    encrypt,
    generate_key,
    get_public_key,
)
from edgefl.core.secure_aggregation.messages import (
    MAX_MEMBERS,
    MIN_MEMBERS,
    PAIR_BYTES,
    SPENT,
    Advert,
    check_config,
    compute_context,
    compute_members_hash,
    compute_sharers_hash,
    compute_threshold,
    make_advert_text,
    make_masked_text,
    make_pair_text,
    make_survivors_text,
)
from edgefl.core.secure_aggregation.shamir import SHARE_BYTES, split_secret
from edgefl.core.types import Array, PeerMessage, SecureAggregationConfig, SecureStep

MAX_RUNS = 1000
"""Runs whose last consent is kept."""

Bodies = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """The last sum of a run that a board has consented to; `digest` is of its attempt and of its boards."""

    version: int
    digest: str


@dataclass(slots=True, kw_only=True)
class ConsentRecorder:
    """A board's last consent of each run; `save` makes them durable, and without it they end with the process."""

    consents: OrderedDict[str, Consent] = field(default_factory=OrderedDict)
    save: Callable[[Mapping[str, Consent]], None] = lambda _: None

    def is_spent(self, run: str, version: int) -> bool:
        """Returns whether the board has consented to a sum of this version, or of a later one."""
        found = self.consents.get(run)
        return found is not None and found.version >= version

    def has_consent(self, run: str, consent: Consent) -> bool:
        return self.consents.get(run) == consent

    def record(self, run: str, consent: Consent) -> None:
        """Records a consent, durably.

        Raises:
            SecureAggregationError: there is one to another sum of this version, or to one of a later version.
        """
        if self.has_consent(run, consent):
            return
        if self.is_spent(run, consent.version):
            raise SecureAggregationError(
                f"this board has consented to a sum of version {self.consents[run].version} already, and never "
                "consents to another one"
            )
        consents = OrderedDict(self.consents)
        consents[run] = consent
        consents.move_to_end(run)
        while len(consents) > MAX_RUNS:
            consents.popitem(last=False)
        self.save(consents)  # where this fails the board has not consented
        self.consents = consents


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """Secrets of one attempt, and what has come of the other boards.

    Attributes:
        members_hash: of the members' keys.
        sum_hash: of what a consent is to; where boards draw others of the sharers, too.
        threshold: of the members, left at every step.
        holders: boards that have shares of this one's secrets.
        num_needed: of these, to open a secret.
        neighbours: boards to mask with.
        sharers: boards whose shares went to those that they have drawn.
        shares: of this board and of those that have drawn it.
    """

    context: bytes
    share_key: bytes
    mask_key: bytes
    seed: bytes
    advert: bytes
    members: dict[str, Advert] = field(default_factory=dict)
    members_hash: bytes = b""
    sum_hash: bytes = b""
    threshold: int = 0
    holders: tuple[str, ...] = ()
    num_needed: int = 0
    neighbours: frozenset[str] = frozenset()
    shares: dict[str, bytes] = field(default_factory=dict)
    sharers: frozenset[str] = frozenset()
    is_masked: bool = False


class Participant:
    """The steps of a board in the rounds of its runs; used by one thread.

    Args:
        identity: signs its keys and consents, and verifies others'.
        recorder: of its consents.
    """

    def __init__(self, identity: Identity, recorder: ConsentRecorder) -> None:
        self._identity, self._recorder = identity, recorder
        self._attempt: _Attempt | None = None

    @property
    def _name(self) -> str:
        return self._identity.device_id

    def answer(
        self, run: str, config: SecureAggregationConfig, messages: Sequence[PeerMessage]
    ) -> tuple[PeerMessage, ...]:
        """Returns the messages that answer a step without an update.

        Raises:
            SecureAggregationError: the coordinator, or another board, does not keep to the protocol; or this board
                has no secrets of this attempt.
        """
        bodies = self._read(config, messages)
        match config.step:
            case SecureStep.KEYS:
                found = {COORDINATOR_NAME: self._advertise(run, config)}
            case SecureStep.SHARES:
                found = self._share_secrets(self._get_attempt(run, config), config, bodies)
            case SecureStep.CONSENT:
                found = {COORDINATOR_NAME: self._consent(self._get_attempt(run, config), run, config, bodies)}
            case _:
                found = {COORDINATOR_NAME: self._unmask(self._get_attempt(run, config), run, config, bodies)}
        return self._send(config, found)

    def accept_shares(self, run: str, config: SecureAggregationConfig, messages: Sequence[PeerMessage]) -> None:
        """Accepts the shares that come with the instruction to train; before the training.

        Raises:
            SecureAggregationError: as `answer`.
        """
        attempt, bodies = self._get_attempt(run, config), self._read(config, messages)
        if config.num_members != len(attempt.members) or attempt.is_masked:
            raise SecureAggregationError("the update of this attempt was sent already, or is asked for other members")
        if not bodies.keys() <= attempt.members.keys() or self._name not in bodies:
            raise SecureAggregationError("shares came of boards that are no members, or not of this one")
        sharers = {*bodies} if config.corrupted is None else self._get_sharers(attempt, config, bodies)
        self._check_enough(attempt, sharers)
        attempt.shares = {sender: self._decrypt(attempt, sender, body) for sender, body in bodies.items()}
        attempt.sharers = frozenset(sharers)
        attempt.neighbours = frozenset(bodies.keys() | (sharers & set(attempt.holders))) - {self._name}
        is_complete = config.corrupted is None
        attempt.sum_hash = (
            attempt.members_hash if is_complete else compute_sharers_hash(attempt.members_hash, sharers)
        )

    def mask(self, run: str, config: SecureAggregationConfig, words: Array) -> tuple[PeerMessage, ...]:
        """Returns the message with an update's vector [words] of uint32, which is masked in place.

        Raises:
            SecureAggregationError: as `answer`; a vector is masked once.
        """
        attempt = self._get_attempt(run, config)
        if attempt.is_masked or not attempt.shares:
            raise SecureAggregationError("the update of this attempt was sent already, or no shares came before it")
        attempt.is_masked = True
        for other in attempt.neighbours:
            key = self._agree(attempt, attempt.mask_key, attempt.members[other].mask_key, b"mask", other)
            add_mask(words, key, sign=1 if self._name < other else -1)
        add_mask(words, derive_key(attempt.seed, attempt.context))
        signature = b"" if config.corrupted is None else self._identity.sign(make_masked_text(attempt.sum_hash))
        return self._send(config, {COORDINATOR_NAME: words.astype("<u4", copy=False).tobytes() + signature})

    def _get_sharers(self, attempt: _Attempt, config: SecureAggregationConfig, bodies: Bodies) -> set[str]:
        """Returns the sharers that the coordinator names, among whom enough hold this board's shares."""
        sharers = set(config.sharers)
        if len(sharers) < len(config.sharers) or not bodies.keys() <= sharers <= attempt.members.keys():
            raise SecureAggregationError("the boards that have shared are named twice, are no members, or are others")
        num_holding = len(sharers & set(attempt.holders))
        if num_holding < attempt.num_needed:
            raise SecureAggregationError(
                f"{num_holding} of the {len(attempt.holders)} boards with this one's shares are left, at least "
                f"{attempt.num_needed} are needed"
            )
        return sharers

    def _read(self, config: SecureAggregationConfig, messages: Sequence[PeerMessage]) -> dict[str, bytes]:
        check_config(config)
        bodies = {message.edge[0]: message.body for message in messages}
        if len(bodies) != len(messages) or any(message.edge[1] != self._name for message in messages):
            raise SecureAggregationError("messages came twice of one board, or are for another one")
        return bodies

    def _send(self, config: SecureAggregationConfig, bodies: Bodies) -> tuple[PeerMessage, ...]:
        step = list(SecureStep).index(SecureStep(config.step))
        return tuple(PeerMessage(edge=(self._name, name), step=step, body=body) for name, body in bodies.items())

    def _get_attempt(self, run: str, config: SecureAggregationConfig) -> _Attempt:
        attempt = self._attempt
        if attempt is None or attempt.context != compute_context(run, config):
            raise SecureAggregationError("this board has no keys of this attempt: it restarted, or began another one")
        return attempt

    def _check_enough(self, attempt: _Attempt, boards: Collection[str]) -> None:
        if len(boards) < attempt.threshold:
            raise SecureAggregationError(
                f"{len(boards)} of {len(attempt.members)} boards are left, at least {attempt.threshold} are needed"
            )

    def _advertise(self, run: str, config: SecureAggregationConfig) -> bytes:
        self._attempt = None
        if self._recorder.is_spent(run, config.version):
            return SPENT
        context, seed = compute_context(run, config), secrets.token_bytes(KEY_BYTES)
        share_key, mask_key, commitment = generate_key(), generate_key(), commit_to(seed)
        public = get_public_key(share_key), get_public_key(mask_key)
        text = make_advert_text(context, self._name, *public, commitment)
        advert = Advert(
            context=context,
            share_key=public[0],
            mask_key=public[1],
            commitment=commitment,
            certificate=self._identity.certificate,
            signature=self._identity.sign(text),
        ).encode()
        self._attempt = _Attempt(context=context, share_key=share_key, mask_key=mask_key, seed=seed, advert=advert)
        return advert

    def _share_secrets(self, attempt: _Attempt, config: SecureAggregationConfig, bodies: Bodies) -> dict[str, bytes]:
        """Verifies all members' keys, and returns the shares of this board's two secrets, encrypted for each."""
        if attempt.members:
            raise SecureAggregationError("the members of this attempt are known already")
        if not MIN_MEMBERS <= len(bodies) <= MAX_MEMBERS or bodies.get(self._name) != attempt.advert:
            raise SecureAggregationError(
                f"an attempt has {MIN_MEMBERS} to {MAX_MEMBERS} members, this board with its own keys among them; "
                f"got {len(bodies)}"
            )
        members = {name: self._verify_advert(attempt, name, bodies[name]) for name in sorted(bodies)}
        if len({key for advert in members.values() for key in advert.keys}) < 2 * len(members):
            raise SecureAggregationError("two members have the same key")
        attempt.members, attempt.members_hash = members, compute_members_hash(attempt.context, [*bodies.items()])
        attempt.threshold = compute_threshold(len(members), config.threshold)
        found = compute_neighbourhood(len(members), config)
        attempt.holders, attempt.num_needed = draw_holders(self._name, [*members], found.num_holders), found.threshold
        places = {name: place for place, name in enumerate(members, start=1)}
        points = [places[name] for name in attempt.holders]
        keys = split_secret(attempt.mask_key, points, attempt.num_needed)
        seeds = split_secret(attempt.seed, points, attempt.num_needed)
        return {
            name: self._encrypt(attempt, name, key + seed)
            for name, key, seed in zip(attempt.holders, keys, seeds, strict=True)
        }

    def _verify_advert(self, attempt: _Attempt, name: str, content: bytes) -> Advert:
        advert = Advert.decode(content)
        if advert.context != attempt.context:
            raise SecureAggregationError(f"the keys of {name} are of another attempt")
        text = make_advert_text(attempt.context, name, advert.share_key, advert.mask_key, advert.commitment)
        self._identity.verify(name, advert.certificate, text, advert.signature)
        return advert

    def _agree(self, attempt: _Attempt, private_key: bytes, public_key: bytes, purpose: bytes, other: str) -> bytes:
        pair = sorted((self._name, other))
        return agree_key(private_key, public_key, make_pair_text(purpose, attempt.context, *pair))

    def _encrypt(self, attempt: _Attempt, receiver: str, content: bytes) -> bytes:
        key = self._agree_share_key(attempt, self._name, receiver)
        return encrypt(key, content, attempt.members_hash)

    def _decrypt(self, attempt: _Attempt, sender: str, content: bytes) -> bytes:
        try:
            pair = decrypt(self._agree_share_key(attempt, sender, self._name), content, attempt.members_hash)
        except SecureAggregationError as error:
            raise SecureAggregationError(f"{error}; it came as of {sender}") from None
        if len(pair) != PAIR_BYTES:
            raise SecureAggregationError(f"shares have {PAIR_BYTES} bytes, got {len(pair)} of {sender}")
        return pair

    def _agree_share_key(self, attempt: _Attempt, sender: str, receiver: str) -> bytes:
        """Returns the key of one direction between this board and another, or itself."""
        other = receiver if sender == self._name else sender
        purpose = make_pair_text(b"share", attempt.context, sender, receiver)
        return agree_key(attempt.share_key, attempt.members[other].share_key, purpose)

    def _make_consent(self, attempt: _Attempt, config: SecureAggregationConfig) -> tuple[bytes, Consent]:
        """Returns the text of a consent, and what is kept of it."""
        survivors = config.survivors
        sharers = attempt.sharers
        is_known = attempt.is_masked and sharers >= set(survivors) and self._name in survivors
        if not is_known or len(set(survivors)) < len(survivors):
            raise SecureAggregationError("the boards of the sum are not those whose shares came, this one among them")
        self._check_enough(attempt, survivors)
        text = make_survivors_text(attempt.sum_hash, survivors)
        return text, Consent(version=config.version, digest=hashlib.sha256(text).hexdigest())

    def _consent(self, attempt: _Attempt, run: str, config: SecureAggregationConfig, signatures: Bodies) -> bytes:
        text, consent = self._make_consent(attempt, config)
        if config.corrupted is not None:
            self._verify_masked(attempt, config.survivors, signatures)
        self._recorder.record(run, consent)
        return self._identity.sign(text)

    def _verify_masked(self, attempt: _Attempt, survivors: Sequence[str], signatures: Bodies) -> None:
        """Verifies that each board whose seed this one could open has masked with the sharers that this one knows.

        A coordinator that names others to a board cuts masks out of its vector.
        """
        text = make_masked_text(attempt.sum_hash)
        for name in attempt.shares.keys() & set(survivors) - {self._name}:
            self._identity.verify(name, attempt.members[name].certificate, text, signatures.get(name, b""))

    def _unmask(self, attempt: _Attempt, run: str, config: SecureAggregationConfig, signatures: Bodies) -> bytes:
        """Returns a share of each board's seed where it is in the sum, else of its key; never of both."""
        text, consent = self._make_consent(attempt, config)
        if not self._recorder.has_consent(run, consent):
            raise SecureAggregationError("this board has not consented to the sum of these boards")
        self._check_enough(attempt, signatures)
        for name, signature in signatures.items():
            if name not in config.survivors:
                raise SecureAggregationError(f"{name} consents to a sum that it is not in")
            self._identity.verify(name, attempt.members[name].certificate, text, signature)
        survivors = set(config.survivors)
        return b"".join(
            pair[SHARE_BYTES:] if name in survivors else pair[:SHARE_BYTES]
            for name, pair in sorted(attempt.shares.items())
        )
