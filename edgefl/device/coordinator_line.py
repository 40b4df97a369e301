"""The agent's line to its coordinator: at which of its addresses it answers, and what time it is there."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable

from edgefl import __version__
from edgefl.device.state import DeviceState
from edgefl.device.trust import Hello, say_hello
from edgefl.errors import ClonedError, EdgeflError, NetworkError, StoreError
from edgefl.protocol import check_version

log = logging.getLogger(__name__)


class CoordinatorLine:
    """Made by the agent's main thread; the others read address and clock.

    Args:
        state: knows the addresses, and is told of those that the coordinator has now.
        trust: verifies the coordinator.
        on_hello: takes note of what the coordinator says of itself.
        enter: takes this device's place at an address; raises an EdgeflError where that fails.
        on_try: called before each attempt, which may take seconds.

    Attributes:
        address: where it answers, HOST:PORT; None while it does not.
        skew_s: its clock less this board's.
    """

    def __init__(
        self,
        state: DeviceState,
        trust: ssl.SSLContext,
        *,
        on_hello: Callable[[Hello], None],
        enter: Callable[[str], None],
        on_try: Callable[[], None],
    ) -> None:
        self._state, self._trust = state, trust
        self._on_hello, self._enter, self._on_try = on_hello, enter, on_try
        self.address: str | None = None
        self.skew_s = 0.0

    def clock(self) -> float:
        """Returns the coordinator's time in unix seconds.

        Boards have no clock battery, and Flower accepts no signature of another time.
        """
        return time.time() + self.skew_s

    def connect(self) -> None:
        """Finds the coordinator at one of its addresses, learns its clock and what has moved.

        Raises:
            NetworkError: it answers at none.
            ClonedError: it does not want this agent, which is a copy.
        """
        failures = []
        for address in self._state.device.addresses:
            self._on_try()
            try:
                hello = say_hello(address, self._trust)
                self.skew_s = hello.skew_s
                check_version(__version__, hello.version)
                self._on_hello(hello)
                self._enter(address)
            except ClonedError:
                raise  # at every other address it is the same coordinator
            except EdgeflError as error:
                failures.append(f"{address}: {error}")
                continue
            self.address = address
            self.remember(address, hello)
            log.info("connected to the coordinator at %s", address)
            return
        raise NetworkError(f"no coordinator at {'; '.join(failures) or 'any known address'}")

    def drop(self) -> None:
        """Says that there is no line any more."""
        self.address = None

    def remember(self, address: str, hello: Hello) -> None:
        """Keeps what the coordinator says of itself; a card without room does not stop the work."""
        try:
            self._state.change(
                addresses=tuple(dict.fromkeys([address, *hello.addresses])),
                broker_port=hello.broker_port,
                broker_host=hello.broker_host,
            )
        except StoreError as error:
            log.warning("cannot keep the coordinator's addresses: %s", error)
