"""Work as it comes and goes: pulled from Flower, done, kept until the coordinator has used it, and answered.

Answers leave in a thread of their own, so that the next work is trained meanwhile. A finished update is kept until
the coordinator says that it was used, and a repeated assignment is answered from there.
"""

from __future__ import annotations

import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from edgefl.device.outbox import Outbox
from edgefl.device.state import DeviceState
from edgefl.device.supernode import Answer, RefusedError, SuperNode
from edgefl.device.trainer import Trainer
from edgefl.types import Json

log = logging.getLogger(__name__)

KEPT_ANSWERS = 2
"""At most two assignments are outstanding per device, so no more finished updates can be asked for again."""


class Workbench:
    """Used by the agent's main thread; `holding` and `log_tag` by any.

    Args:
        state: has the key that requests are signed with, and is read anew for each piece of work.
        trust: verifies the coordinator.
        trainer: does the work.
        clock: the coordinator's time in unix seconds.
        instance: of this agent process.
        on_work: called when there is work, before it is done.
        on_failure: called in another thread when an answer could not be sent; `outbox.check` then says why.

    Attributes:
        supernode: the connection to Flower.
        outbox: the answers on their way.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        state: DeviceState,
        *,
        trust: ssl.SSLContext,
        trainer: Trainer,
        clock: Callable[[], float],
        instance: str,
        on_work: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._state, self._trainer, self._on_work = state, trainer, on_work
        self._finished: OrderedDict[str, tuple[Any, Answer]] = OrderedDict()
        self._answering: tuple[str, str] | None = None
        self.supernode = SuperNode(
            private_key_pem=state.key.read_bytes(),
            trust=trust,
            clock=clock,
            train=self._trained,
            evaluate=trainer.evaluate,
            instance=instance,
        )
        self.outbox: Outbox[tuple[str, Any]] = Outbox(self._send, on_failure)

    def work_once(self) -> bool:
        """Does the next piece of work; returns whether there was one.

        Raises:
            UnauthorisedError: the clock may have jumped; it is learnt anew at the next connect.
            NetworkError: the coordinator is away.
        """
        instruction = self.supernode.pull()
        if instruction is None:
            return False
        self._on_work()
        self._state.refresh()  # a shard may have been added since
        assignment = str(instruction.header.get("assignment"))
        for used in instruction.header.get("settled", ()):
            self._finished.pop(used, None)
        self._answering = str(instruction.header.get("run")), assignment
        version, known = self._finished.get(assignment, (None, None))
        # Of another version it is other work: a coordinator that was restored from a backup gives names once more.
        if known is not None and version == instruction.header.get("version"):
            reply = self.supernode.reply_to(instruction, known)
        else:
            reply = self.supernode.answer(instruction)
        self._answering = None
        del instruction  # the model in it need not wait until the answer is through
        self.outbox.put((assignment, reply))
        return True

    def holding(self) -> tuple[str, ...]:
        """Returns the assignments that this device has, finished, under way or arriving."""
        now = self._trainer.now
        arriving = self.supernode.arriving  # a model that takes minutes to come is held, else it would be sent again
        working = [now[1]] if now and now[1] else []
        return tuple(dict.fromkeys([*self._finished, *working, *([arriving] if arriving else [])]))

    def log_tag(self) -> tuple[str, str] | None:
        """Returns run and assignment that are worked on."""
        now = self._trainer.now or self._answering
        return (now[0], now[1]) if now is not None else None

    def _trained(self, header: Json, body: bytes) -> Answer:
        answer = self._trainer.train(header, body)
        _log_work(answer[0])
        if "error" not in answer[0] and "phase" not in header:
            self._finished[str(header["assignment"])] = header.get("version"), answer
            while len(self._finished) > KEPT_ANSWERS:
                self._finished.popitem(last=False)
        return answer

    def _send(self, answer: tuple[str, Any]) -> None:
        """Sends one answer; one that nobody wants any more is let go."""
        assignment, reply = answer
        try:
            self.supernode.push(reply)
        except RefusedError as error:
            log.info("the answer to %s is not wanted: %s", assignment, error)


def _log_work(told: Json) -> None:
    """Leaves one line about what was done; a failure has its own already."""
    if isinstance(metrics := told.get("metrics"), dict):
        log.info(
            "%s: %s iterations, loss %.4g, %.3g s",
            told.get("assignment"), metrics.get("iterations"), _number(metrics.get("loss")),
            _number(metrics.get("compute_s")),
        )  # fmt: skip
    elif told.get("ready") is True:
        log.info("%s: ready", told.get("assignment"))


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else float("nan")
