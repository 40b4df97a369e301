"""Rounds with secure aggregation: five instructions to each board, of which one is to train.

A round asks boards for keys, gives every board all keys, asks for the masked updates of those that have shared their
secrets, asks whose consent there is to the sum of these, and then for what opens it. Boards that drop out on the way
are left out. Where too few are left before any has consented, another attempt asks for new keys. Where too few are
left after that, or the sum makes no sense, the version closes without a step: boards that have consented to one sum
of a version take part in no other, since the difference of two would be the update of one board.

Every step is an instruction, so the journal has it before it is sent, and a coordinator that was killed goes on with
the same survivors. Masked vectors are added as they come: the order does not change a sum of whole numbers.

Source: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, Figure 4.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgefl.core.config import SecureAggregationSection
from edgefl.core.errors import SecureAggregationError, StrategyError
from edgefl.core.types import (
    EPSILON,
    Array,
    Decision,
    FleetView,
    PeerMessage,
    SecureAggregationConfig,
    SecureStep,
    TrainConfig,
    TrainInstruction,
    Update,
)
from edgefl.strategies.aggregation import apply_step
from edgefl.strategies.strategy_config import MAX_WAIT_S, TICK_S
from edgefl.strategies.synchronous.round_state import RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly

if TYPE_CHECKING:
    from edgefl.core.secure_aggregation.graph import Neighbourhood

log = logging.getLogger(__name__)

STEP_DEADLINE_S = 120.0
"""Of a step in which nobody trains."""
MAX_ATTEMPTS = 10
"""Attempts at a version of which too few boards were left; then the run fails."""
SECURE_BOARDS = "secure_boards"
"""Figure of a version: boards whose sum was opened; 0 where none was, and the model stayed."""

Bodies = dict[str, bytes]


@dataclass(slots=True, kw_only=True)
class SecureAttempt:
    """An attempt at a round.

    Attributes:
        group: its id.
        step: that boards are asked for now, since `since_s`.
        since_s: on the run's clock.
        asked: assignment of this step -> board.
        answered: boards that have answered it.
        num_asked: boards that were asked for keys.
        adverts: their keys.
        spent: boards that take part in no other sum of this version.
        shares: board -> receiver -> the shares for it, encrypted.
        survivors: board -> assignment of its update.
        total: [words] uint32, the sum of the masked updates; empty before the first.
        masked: board -> its signature of which boards it has masked with, in a sparse graph.
        signatures: board -> its consent.
        openings: board -> what it gave out.
        is_over: the round closes.
    """

    group: str
    step: str = SecureStep.KEYS
    since_s: float = 0.0
    asked: dict[str, str] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    num_asked: int = 0
    adverts: Bodies = field(default_factory=dict)
    spent: set[str] = field(default_factory=set)
    shares: dict[str, Bodies] = field(default_factory=dict)
    survivors: dict[str, str] = field(default_factory=dict)
    total: Array = field(default_factory=lambda: np.zeros(0, np.uint32))
    masked: Bodies = field(default_factory=dict)
    signatures: Bodies = field(default_factory=dict)
    openings: Bodies = field(default_factory=dict)
    is_over: bool = False


@dataclass(slots=True, kw_only=True)
class SecureState(RoundState):
    """State of rounds with secure aggregation.

    Attributes:
        secure: the attempt at the present round.
        num_failed: attempts at this version of which too few boards were left.
        num_opened: boards in the newest version's sum.
    """

    secure: SecureAttempt | None = None
    num_failed: int = 0
    num_opened: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureRounds(SynchronousStrategy[SecureState]):
    """Rounds whose updates the coordinator never sees: the weighted mean of `fedavg`, of masked vectors."""

    secure: SecureAggregationSection

    _STEPS: ClassVar[Sequence[str]] = tuple(SecureStep)

    def make_state(self, model: dict[str, Array]) -> SecureState:
        return SecureState(model=model)

    def assign(self, state: SecureState, view: FleetView) -> tuple[SecureState, Decision]:
        """Begins an attempt, or asks for its next step once nobody is waited for."""
        instructions: tuple[TrainInstruction, ...] = ()
        attempt = state.secure
        if attempt is not None and not attempt.is_over and not self._is_waiting(attempt, view):
            instructions = self._close_step(state, attempt, view)
        if state.secure is None:
            instructions = self._start_attempt(state, view)
        return state, Decision(instructions=instructions, next_wake_s=self._compute_next_wake_s(state, view))

    def receive(self, state: SecureState, update: Update) -> SecureState:
        """Takes over the answer to a step; a late, repeated or malformed one changes nothing but the spent ε."""
        state.epsilon = max(state.epsilon, update.metrics.extra.get(EPSILON, 0.0))
        attempt = state.secure
        device_id = None if attempt is None else attempt.asked.get(update.assignment_id)
        if attempt is None or device_id is None or device_id in attempt.answered or device_id != update.device_id:
            return state
        bodies = {message.edge[1]: message.body for message in update.messages}
        if self._take_answer(state, attempt, update, bodies):
            attempt.answered.add(device_id)
        else:
            log.warning("%s of %s is left out: no answer to its step", update.assignment_id, device_id)
            del attempt.asked[update.assignment_id]
        return state

    def ready(self, state: SecureState, view: FleetView) -> bool:  # noqa: ARG002 all is in the state
        return state.secure is not None and state.secure.is_over

    def aggregate(self, state: SecureState) -> SecureState:
        attempt, state.secure = state.secure, None
        assert attempt is not None
        mean = self._open(state, attempt) if len(attempt.openings) else {}
        if mean:
            apply_step(state.model, self.rules.server.step(state.moments, mean))
        state.version, state.attempt, state.num_failed = state.version + 1, 0, 0
        state.used = tuple(attempt.survivors.values()) if mean else ()
        state.num_opened = len(state.used)
        return state

    def facts(self, state: SecureState) -> Mapping[str, float]:
        return {**SynchronousStrategy.facts(self, state), SECURE_BOARDS: float(state.num_opened)}

    def restore_model(self, state: SecureState, model: Mapping[str, Array]) -> SecureState:
        state.secure = None
        SynchronousStrategy.restore_model(self, state, model)
        return state

    def resumed(self, state: SecureState) -> SecureState:
        """Returns the state after a restart without the journal: new keys, unless boards may have consented."""
        SynchronousStrategy.resumed(self, state)
        attempt, state.num_failed = state.secure, 0
        if attempt is not None and attempt.step in {SecureStep.CONSENT, SecureStep.UNMASK}:
            attempt.is_over, attempt.openings = True, {}
        else:
            state.secure = None
        return state

    # An attempt.

    def _is_waiting(self, attempt: SecureAttempt, view: FleetView) -> bool:
        timeout_s = math.inf if self.rules.round_timeout_s is None else self.rules.round_timeout_s
        attempt.since_s = min(attempt.since_s, view.now_s)  # the clock of a restarted coordinator may be behind
        if view.now_s + TICK_S >= attempt.since_s + timeout_s:
            return False
        return any(
            device_id not in attempt.answered and assignment_id in view.busy.get(device_id, ())
            for assignment_id, device_id in attempt.asked.items()
        )

    def _compute_next_wake_s(self, state: SecureState, view: FleetView) -> float:
        attempt = state.secure
        if attempt is None:
            return MAX_WAIT_S
        if attempt.is_over:
            return 0.0
        if self.rules.round_timeout_s is None:
            return MAX_WAIT_S
        return max(TICK_S, min(MAX_WAIT_S, attempt.since_s + self.rules.round_timeout_s - view.now_s))

    def _start_attempt(self, state: SecureState, view: FleetView) -> tuple[TrainInstruction, ...]:
        from edgefl.core.secure_aggregation.messages import MAX_MEMBERS, MIN_MEMBERS  # noqa: PLC0415 likewise

        if state.is_over or len(view.idle) < max(MIN_MEMBERS, 0 if state.version else self.rules.min_devices):
            return ()
        if state.num_failed >= MAX_ATTEMPTS:
            raise StrategyError(
                f"round {state.version + 1}: too few boards were left in {MAX_ATTEMPTS} attempts at secure "
                "aggregation; see why with edgefl history events"
            )
        selected = self._select_devices(self.list_available(view), state)[:MAX_MEMBERS]
        if len(selected) < MIN_MEMBERS:
            raise StrategyError(
                f"a round of secure aggregation needs at least {MIN_MEMBERS} boards, devices.count or "
                f"devices.fraction asks for {len(selected)}"
            )
        state.secure = SecureAttempt(group=f"v{state.version}-a{state.attempt}", num_asked=len(selected))
        return self._ask(state, state.secure, SecureStep.KEYS, {name: {} for name in selected}, view)

    def _close_step(
        self, state: SecureState, attempt: SecureAttempt, view: FleetView
    ) -> tuple[TrainInstruction, ...]:
        """Returns the instructions of the next step; none where the attempt is over, or was given up."""
        if attempt.step == SecureStep.KEYS:
            _drop_unfit_adverts(attempt)
        left = _list_left(attempt)
        if self._has_enough(attempt, len(left)) and attempt.step != SecureStep.UNMASK:
            following = SecureStep(self._STEPS[self._STEPS.index(attempt.step) + 1])
            return self._ask(state, attempt, following, _make_bodies(attempt, left), view)
        # Boards have consented to a sum of this version, which may have gone with the coordinator.
        is_spent = attempt.step == SecureStep.KEYS and self._has_enough(attempt, len(left) + len(attempt.spent))
        if is_spent or attempt.step in {SecureStep.CONSENT, SecureStep.UNMASK}:
            attempt.is_over = True
            return ()
        log.warning("attempt %s ends at step %s: too few boards are left", attempt.group, attempt.step)
        state.secure, state.num_failed = None, state.num_failed + 1
        return ()

    def _has_enough(self, attempt: SecureAttempt, count: int) -> bool:
        from edgefl.core.secure_aggregation.messages import MIN_MEMBERS, compute_threshold  # noqa: PLC0415 likewise

        num_members = attempt.num_asked if attempt.step == SecureStep.KEYS else len(attempt.adverts)
        least = compute_threshold(num_members, self.secure.threshold)
        return count >= max(least, MIN_MEMBERS if attempt.step == SecureStep.KEYS else 0)

    def _ask(
        self,
        state: SecureState,
        attempt: SecureAttempt,
        step: SecureStep,
        bodies: Mapping[str, Mapping[str, bytes]],
        view: FleetView,
    ) -> tuple[TrainInstruction, ...]:
        """Returns the instructions of a step; each board gets the messages of others that are for it."""
        present = [name for name in bodies if name in view.devices]
        is_update = step == SecureStep.UPDATE
        plans = self.make_plans(state, self._make_round_plan(state), present, view) if is_update else {}
        attempt.step, attempt.since_s, attempt.answered = step, view.now_s, set()
        attempt.asked = {f"{attempt.group}-{step}-{name}": name for name in present}
        config = self._make_config(state, attempt)
        index = self._STEPS.index(step)
        return tuple(
            TrainInstruction(
                assignment_id=assignment_id,
                device_id=name,
                base_version=state.version,
                plan=replace(
                    plans.get(name, _NO_TRAINING),
                    secure=config,
                    messages=tuple(
                        PeerMessage(edge=(sender, name), step=index, body=body)
                        for sender, body in bodies[name].items()
                    ),
                ),
                codec=None,
                deadline_s=self.compute_deadline_s(state) if is_update else STEP_DEADLINE_S,
                sends_model=is_update,
            )
            for assignment_id, name in attempt.asked.items()
        )

    def _make_config(self, state: SecureState, attempt: SecureAttempt) -> SecureAggregationConfig:
        has_survivors = attempt.step in {SecureStep.CONSENT, SecureStep.UNMASK}
        return SecureAggregationConfig(
            step=attempt.step,
            group=attempt.group,
            version=state.version,
            threshold=self.secure.threshold,
            clip=self.secure.clip,
            max_examples=self._max_weight,
            num_members=0 if attempt.step in {SecureStep.KEYS, SecureStep.SHARES} else len(attempt.adverts),
            survivors=tuple(sorted(attempt.survivors)) if has_survivors else (),
            corrupted=self.secure.corrupted if self.is_sparse else None,
            dropped=self.secure.dropped if self.is_sparse else 0.0,
            sharers=tuple(sorted(attempt.shares)) if self.is_sparse and attempt.step == SecureStep.UPDATE else (),
        )

    @property
    def is_sparse(self) -> bool:
        return self.secure.graph == "sparse"

    def _compute_neighbourhood(self, state: SecureState, attempt: SecureAttempt) -> Neighbourhood:
        from edgefl.core.secure_aggregation.graph import compute_neighbourhood  # noqa: PLC0415 for secure runs alone

        return compute_neighbourhood(len(attempt.adverts), self._make_config(state, attempt))

    @property
    def _max_weight(self) -> int:
        return 1 if self.compute_weight is weight_uniformly else self.secure.max_examples

    def _take_answer(self, state: SecureState, attempt: SecureAttempt, update: Update, bodies: Bodies) -> bool:
        """Takes over what a board has answered; returns whether it is an answer."""
        name, body = update.device_id, next(iter(bodies.values()), b"")
        if attempt.step == SecureStep.SHARES:
            is_fit = name in bodies and bodies.keys() <= attempt.adverts.keys() and _have_shares_size(bodies)
            if is_fit and len(bodies) == self._compute_neighbourhood(state, attempt).num_holders:
                attempt.shares[name] = bodies
            return name in attempt.shares
        if len(bodies) != 1 or not _has_fit_size(attempt, name, body):
            return False
        match attempt.step:
            case SecureStep.KEYS if body:
                attempt.adverts[name] = body
            case SecureStep.KEYS:
                attempt.spent.add(name)
            case SecureStep.UPDATE:
                vector, signature = self._split_vector(state, body)
                if signature:
                    attempt.masked[name] = signature
                return self._add_vector(state, attempt, update, vector)
            case SecureStep.CONSENT:
                attempt.signatures[name] = body
            case _:
                attempt.openings[name] = body
        return True

    def _split_vector(self, state: SecureState, body: bytes) -> tuple[bytes, bytes]:
        """Returns the vector and the signature of an update; nothing where their sizes cannot be."""
        from edgefl.core.secure_aggregation.messages import MAX_SIGNATURE_BYTES  # noqa: PLC0415 for secure runs alone
        from edgefl.core.secure_aggregation.ring import WORD_BYTES, count_words  # noqa: PLC0415 likewise

        size = WORD_BYTES * count_words(state.model)
        if (0 < len(body) - size <= MAX_SIGNATURE_BYTES) if self.is_sparse else len(body) == size:
            return body[:size], body[size:]
        return b"", b""

    @staticmethod
    def _add_vector(state: SecureState, attempt: SecureAttempt, update: Update, body: bytes) -> bool:
        from edgefl.core.secure_aggregation.ring import WORD_BYTES, count_words  # noqa: PLC0415 likewise

        size = count_words(state.model)
        if len(body) != WORD_BYTES * size:
            return False
        if not attempt.total.size:
            attempt.total = np.zeros(size, np.uint32)
        attempt.total += np.frombuffer(body, "<u4")
        attempt.survivors[update.device_id] = update.assignment_id
        return True

    def _open(self, state: SecureState, attempt: SecureAttempt) -> dict[str, Array]:
        """Returns the mean of the survivors' updates; nothing where it cannot be opened, or makes no sense."""
        from edgefl.core.secure_aggregation.aggregator import unmask_sum  # noqa: PLC0415 likewise
        from edgefl.core.secure_aggregation.ring import decode_mean  # noqa: PLC0415 likewise

        num_members = len(attempt.adverts)
        try:
            unmask_sum(
                attempt.total,
                adverts=attempt.adverts,
                holders=attempt.shares,
                survivors=attempt.survivors,
                openings=attempt.openings,
                threshold=self._compute_neighbourhood(state, attempt).threshold,
            )
            return decode_mean(
                attempt.total,
                state.model,
                num_added=len(attempt.survivors),
                max_weight=self._max_weight,
                clip=self.secure.clip,
                num_members=num_members,
            )
        except SecureAggregationError as error:
            log.warning("attempt %s closes without a step: %s", attempt.group, error)
            return {}


_NO_TRAINING = TrainConfig(iterations=1)


def _have_shares_size(bodies: Bodies) -> bool:
    from edgefl.core.secure_aggregation.messages import ENCRYPTED_PAIR_BYTES  # noqa: PLC0415 for secure runs alone

    return all(len(body) == ENCRYPTED_PAIR_BYTES for body in bodies.values())


def _has_fit_size(attempt: SecureAttempt, name: str, body: bytes) -> bool:
    """Returns whether an answer to the present step has a size that it can have; those of vectors are not known."""
    from edgefl.core.secure_aggregation.messages import MAX_SIGNATURE_BYTES, Advert  # noqa: PLC0415 likewise
    from edgefl.core.secure_aggregation.shamir import SHARE_BYTES  # noqa: PLC0415 likewise

    match attempt.step:
        case SecureStep.KEYS if body:
            try:
                Advert.decode(body)
            except SecureAggregationError:
                return False
        case SecureStep.CONSENT:
            return 0 < len(body) <= MAX_SIGNATURE_BYTES
        case SecureStep.UNMASK:
            return len(body) == SHARE_BYTES * sum(name in holders for holders in attempt.shares.values())
    return True


def _drop_unfit_adverts(attempt: SecureAttempt) -> None:
    """Drops the keys of boards that are of another attempt than most, or came of an earlier board."""
    from edgefl.core.secure_aggregation.messages import Advert  # noqa: PLC0415 likewise

    adverts = {name: Advert.decode(content) for name, content in attempt.adverts.items()}
    contexts = Counter(advert.context for advert in adverts.values())
    context, keys = max(contexts, key=contexts.__getitem__, default=b""), set[bytes]()
    for name, advert in adverts.items():
        if advert.context == context and len({*advert.keys} - keys) == len(advert.keys):
            keys |= {*advert.keys}
        else:
            log.warning("%s is left out of attempt %s: its keys are of another one", name, attempt.group)
            del attempt.adverts[name]


def _list_left(attempt: SecureAttempt) -> list[str]:
    """Returns the boards that have answered the present step."""
    by_step: dict[str, Collection[str]] = {
        SecureStep.KEYS: attempt.adverts,
        SecureStep.SHARES: attempt.shares,
        SecureStep.UPDATE: attempt.survivors,
        SecureStep.CONSENT: attempt.signatures,
        SecureStep.UNMASK: attempt.openings,
    }
    return [*by_step[attempt.step]]


def _make_bodies(attempt: SecureAttempt, left: Sequence[str]) -> dict[str, Bodies]:
    """Returns what each board that has answered the present step is sent in the next one: sender -> message."""
    match attempt.step:
        case SecureStep.SHARES:
            return {name: _list_held(attempt.shares, name) for name in left}
        case SecureStep.UPDATE:
            held = {name: _list_held(attempt.shares, name) for name in left}
            return {
                name: {other: attempt.masked[other] for other in held[name] if other in attempt.masked}
                for name in left
            }
    return dict.fromkeys(left, attempt.adverts if attempt.step == SecureStep.KEYS else attempt.signatures)


def _list_held(shares: Mapping[str, Bodies], board: str) -> Bodies:
    """Returns sharer -> its shares for a board."""
    return {sender: bodies[board] for sender, bodies in shares.items() if board in bodies}


def make_secure_rounds(strategy: SynchronousStrategy[RoundState], section: SecureAggregationSection) -> SecureRounds:
    """Returns a strategy whose rounds are those of another one, with secure aggregation."""
    compute_weight: Callable[[Update], float] = strategy.compute_weight
    return SecureRounds(
        plan=strategy.plan,
        compute_weight=compute_weight,
        rules=strategy.rules,
        lr_schedule=strategy.lr_schedule,
        secure=section,
    )
