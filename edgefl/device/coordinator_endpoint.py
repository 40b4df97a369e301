"""Coordinator endpoint of the agent: the address that answers, and the coordinator's clock."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable

from edgefl import __version__
from edgefl.core.errors import ClonedError, EdgeflError, NetworkError, StoreError
from edgefl.core.protocol import check_version
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.https_client import CoordinatorInfo, fetch_coordinator_info

log = logging.getLogger(__name__)


class CoordinatorEndpoint:
    """Endpoint connected by the main thread; other threads read address and clock.

    Args:
        state: has the known addresses, and stores new ones.
        tls_context: verifies the coordinator.
        on_info: called with the coordinator's info.
        activate: activates this device at an address; raises an EdgeflError where that fails.
        on_attempt: called before each attempt, which may take seconds.

    Attributes:
        address: HOST:PORT of the coordinator; None while disconnected.
        skew_s: its clock less this board's.
    """

    def __init__(
        self,
        state: DeviceStateDir,
        tls_context: ssl.SSLContext,
        *,
        on_info: Callable[[CoordinatorInfo], None],
        activate: Callable[[str], None],
        on_attempt: Callable[[], None],
    ) -> None:
        self._state, self._tls_context = state, tls_context
        self._on_info, self._activate, self._on_attempt = on_info, activate, on_attempt
        self.address: str | None = None
        self.skew_s = 0.0

    def clock(self) -> float:
        """Returns the coordinator's time in unix seconds.

        Boards have no clock battery, and Flower accepts no signature of another time.
        """
        return time.time() + self.skew_s

    def connect(self) -> None:
        """Connects at the first address that answers; updates clock and stored addresses.

        Raises:
            NetworkError: no address answers.
            ClonedError: it rejects this agent as a clone.
        """
        failures = []
        for address in self._state.settings.addresses:
            self._on_attempt()
            try:
                info = fetch_coordinator_info(address, self._tls_context)
                self.skew_s = info.skew_s
                check_version(__version__, info.version)
                self._on_info(info)
                self._activate(address)
            except ClonedError:
                raise  # every other address leads to the same coordinator
            except EdgeflError as error:
                failures.append(f"{address}: {error}")
                continue
            self.address = address
            self.save(address, info)
            log.info("connected to the coordinator at %s", address)
            return
        raise NetworkError(f"no coordinator at {'; '.join(failures) or 'any known address'}")

    def disconnect(self) -> None:
        """Marks the endpoint as disconnected."""
        self.address = None

    def save(self, address: str, info: CoordinatorInfo) -> None:
        """Saves the coordinator's addresses and broker; a full card is only logged."""
        try:
            self._state.update(
                addresses=tuple(dict.fromkeys([address, *info.addresses])),
                broker_port=info.broker_port,
                broker_host=info.broker_host,
            )
        except StoreError as error:
            log.warning("cannot keep the coordinator's addresses: %s", error)
