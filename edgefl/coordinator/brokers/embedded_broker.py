"""Embedded broker, for fleets of up to about 100 devices: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Callable, Collection
from typing import Any

from edgefl.coordinator.brokers.broker import (
    MISSING_CERTIFICATE,
    UNTRUSTED_CERTIFICATE,
    BrokerAddress,
    BrokerTls,
    OnDenied,
    get_connect_host,
    ignore_denied,
    make_port_error,
)
from edgefl.coordinator.brokers.mqtt.connection import ClientConnection
from edgefl.coordinator.brokers.mqtt.router import TopicRouter
from edgefl.core.errors import BrokerError, EdgeflError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
BACKLOG = 1000
"""Connections queued by the system until accepted: a whole fleet reconnects at once."""


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
        on_denied: OnDenied = ignore_denied,
    ) -> None:
        self._on_denied = on_denied
        self._connect_timeout_s = connect_timeout_s
        self._fleet = fleet
        self._tls = tls
        self._host = host
        self._port = port
        self._revoked: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._router: TopicRouter | None = None
        self._context: ssl.SSLContext | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: EdgeflError | None = None

    def start(self) -> BrokerAddress:
        self._started.clear()
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="embedded-broker", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise BrokerError(f"the embedded broker does not start within {START_TIMEOUT_S:.0f} s")
        self._raise_failure()
        return BrokerAddress(host=get_connect_host(self._host), port=self._port)

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop is already closed
                self._loop.call_soon_threadsafe(self._stop.set)
        thread.join()

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._failure is None

    def revoke(self, names: Collection[str], serials: Collection[str] = ()) -> None:
        self._revoked = frozenset(names), frozenset(serials)
        if self._router is not None:
            self._call_in_loop(self._router.revoke, *self._revoked)

    def reload(self) -> None:
        if self._context is not None:
            self._call_in_loop(_load_certificate, self._context, self._tls)

    def _call_in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function in the broker's own thread."""
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
            # The boundary of the thread: every error must reach the coordinator.
            log.exception("the embedded broker ended")
            self._failure = BrokerError(f"the embedded broker ended: {error}")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_loop_error)
        self._stop = asyncio.Event()
        self._router = router = TopicRouter(self._fleet, self._on_denied)
        router.revoke(*self._revoked)
        connections = set[ClientConnection]()
        context = _make_server_context(self._tls, self._on_denied)
        try:
            server = await loop.create_server(
                lambda: ClientConnection(router, connections, self._connect_timeout_s),
                self._host or None,
                self._port,
                ssl=context,
                ssl_handshake_timeout=self._connect_timeout_s,
                ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
                backlog=BACKLOG,
                reuse_address=True,
            )
        except OSError as error:
            raise make_port_error(self._host, self._port, error) from None
        self._context = context
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            self._router = self._context = None
            server.close()
            for connection in list(connections):
                connection.abort(should_publish_will=False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    while connections:  # noqa: ASYNC110 a few turns of the loop
                        await asyncio.sleep(0)


def _make_server_context(tls: BrokerTls, on_denied: OnDenied) -> ssl.SSLContext:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:  # ssl.SSLError is one
        raise BrokerError(
            f"the broker's TLS files cannot be used ({tls.ca}, {tls.cert}, {tls.key}): {error}"
        ) from None
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would not check the dates of its certificate again.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    context.sslobject_class = _make_reporting_class(on_denied)
    return context


def _load_certificate(context: ssl.SSLContext, tls: BrokerTls) -> None:
    """Loads the server's certificate from its files again, for new connections."""
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:
        log.warning("the broker goes on with its old certificate: %s", error)


def _make_reporting_class(on_denied: OnDenied) -> type[ssl.SSLObject]:
    """Returns a class of TLS connections that report invalid certificates, which asyncio does not."""

    class ReportingSSLObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except ssl.SSLCertVerificationError:
                on_denied("", UNTRUSTED_CERTIFICATE)
                raise
            except ssl.SSLError as error:
                if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
                    on_denied("", MISSING_CERTIFICATE)
                raise

    return ReportingSSLObject


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs failed handshakes and broken connections at debug level, other errors as bugs."""
    error = context.get("exception")
    is_expected = error is None or isinstance(error, OSError)
    log.log(logging.DEBUG if is_expected else logging.ERROR, "broker: %s", context.get("message"), exc_info=error)
