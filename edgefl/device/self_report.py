"""What a board tells of itself: what it can do, with what data, how fast, and where its neighbours reach it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from edgefl.device.board.capabilities import probe
from edgefl.device.board.speed_book import SpeedBook
from edgefl.device.board.training_facts import training_facts
from edgefl.device.state import DeviceState
from edgefl.device.trainer import Trainer
from edgefl.protocol import Capabilities, host_and_port
from edgefl.types import Json, Role

CONNECT_WITHIN_S = 5.0


class SelfReport:
    """Used by the agent's main thread; only `forget` may be called from others.

    Args:
        state: says what data there is.
        trainer: knows that data, and what it is at.
        speeds: how fast the board is.
        accelerator: what it trains on.
        software: returns what is said of installed releases and packs.
        address: returns where the coordinator answers, None while it does not.
        publish: tells the fleet.
    """

    def __init__(  # noqa: PLR0913 a composition root hands over its parts by name
        self,
        state: DeviceState,
        *,
        trainer: Trainer,
        speeds: SpeedBook,
        accelerator: str,
        software: Callable[[], Json],
        address: Callable[[], str | None],
        publish: Callable[[Capabilities], None],
    ) -> None:
        self._state, self._trainer, self._speeds, self._accelerator = state, trainer, speeds, accelerator
        self._software, self._address, self._publish = software, address, publish
        self._reported: tuple[object, Json] | None = None

    def forget(self) -> None:
        """Looks at everything anew the next time, and tells it again."""
        self._reported = None

    def tell(self) -> None:
        """Publishes facts and example counts when the shards have changed; a new shard may have been added."""
        self._state.refresh()
        stamp = self._trainer.shard_stamps(), self._speeds.version
        reported = self._reported
        if reported is None or reported[0] != stamp:
            facts = reported[1] if reported else probe()
            self._reported = stamp, facts
            blocks = self._trainer.blocks()
            device = self._state.device
            trains = training_facts(device.role, device.shards, facts)
            own = {**trains, **self._peer_facts(), **self._software(), **self._speeds.told()}
            examples, faults = self._trainer.examples(), self._trainer.shard_faults()
            marks = {**({"blocks": blocks} if blocks else {}), **({"shard_errors": faults} if faults else {})}
            self._publish(Capabilities(facts={**facts, **marks, **own}, shards=examples))

    def measure_speeds(self) -> None:
        """Has the next speed measured that is not known yet, unless a node trains by itself meanwhile."""
        device, reported = self._state.device, self._reported
        if self._trainer.now is not None:
            self._speeds.busy()
        elif device.role == Role.TRAINER and reported is not None:
            self._speeds.idle(device.shards, facts=reported[1], accelerator=self._accelerator, threads=device.threads)

    def _peer_facts(self) -> Json:
        """Returns at which address neighbours can reach this board: the one that it reaches its coordinator from."""
        address = self._address()
        if address is None:
            return {}
        host, port = host_and_port(address)
        try:
            with socket.create_connection((host, port), timeout=CONNECT_WITHIN_S) as connection:
                own = str(connection.getsockname()[0])
        except OSError:
            return {}
        own = f"[{own}]" if ":" in own else own
        return {"peer_address": f"{own}:{self._state.device.peer_port}"}
