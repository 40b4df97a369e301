"""The broker in pure Python, for demos of up to about 100 devices: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

from edgefl.coordinator.brokers.broker import BrokerAddress, BrokerTls, OnDenied, connect_host, nobody_is_told
from edgefl.coordinator.brokers.mended_amqtt import CONNECT_TIMEOUT_S, MendedBroker
from edgefl.errors import BrokerError, EdgeflError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0


class EmbeddedBroker:
    """Runs the broker in an event loop of its own thread; see `edgefl.coordinator.brokers.broker.Broker`."""

    def __init__(
        self,
        *,
        fleet: str,
        tls: BrokerTls,
        host: str = "127.0.0.1",
        port: int,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        on_denied: OnDenied = nobody_is_told,
    ) -> None:
        self._on_denied = on_denied
        self._connect_timeout_s = connect_timeout_s
        self._fleet = fleet
        self._tls = tls
        self._host = host
        self._port = port
        self._refused: frozenset[str] = frozenset()
        self._revoked: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broker: MendedBroker | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: EdgeflError | None = None

    def start(self) -> BrokerAddress:
        # Every refused client would otherwise be a line or a traceback on the coordinator's terminal.
        logging.getLogger("amqtt").setLevel(logging.CRITICAL)
        logging.getLogger("transitions").setLevel(logging.WARNING)
        self._started.clear()
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="embedded-broker", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise BrokerError(f"the embedded broker does not start within {START_TIMEOUT_S:.0f} s")
        self._raise_failure()
        return BrokerAddress(host=connect_host(self._host), port=self._port)

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop is already closed
                self._loop.call_soon_threadsafe(self._stop.set)
        thread.join()

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._failure is None

    def refuse(self, names: Collection[str], serials: Collection[str] = ()) -> None:
        self._refused, self._revoked = frozenset(names), frozenset(serials)
        if self._broker is not None:
            self._call(self._broker.shut_out, self._refused, self._revoked)

    def reload(self) -> None:
        if self._broker is not None:
            self._call(self._broker.reload)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Has the broker's own thread do it."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # stopped meanwhile
                self._loop.call_soon_threadsafe(function, *arguments)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except EdgeflError as error:
            self._failure = error
        except Exception as error:
            # The boundary of the thread: the coordinator must hear of it whatever it was.
            log.exception("the embedded broker ended")
            self._failure = BrokerError(f"the embedded broker ended: {error}")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_log_quietly)
        self._stop = asyncio.Event()
        broker = MendedBroker(
            fleet=self._fleet, tls=self._tls, bind=(self._host, self._port), on_denied=self._on_denied
        )
        broker.connect_timeout_s = self._connect_timeout_s
        broker.shut_out(self._refused, self._revoked)
        await broker.start()
        self._broker = broker
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            self._broker = None
            await broker.shutdown()


def _log_quietly(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # Failed handshakes and connections that break: every port scan makes some.
    log.debug("broker: %s", context.get("message"), exc_info=context.get("exception"))
