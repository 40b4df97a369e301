"""Coordinator discovery: probes all addresses of a token in parallel and selects the best.

A stale address takes ten seconds to time out, and a token may name several such. Only public requests are sent.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from edgefl.core.errors import EdgeflError, NetworkError, WrongCaError
from edgefl.system.https_client import CoordinatorInfo, create_pinned_context, fetch_ca, fetch_coordinator_info

GRACE_S = 2.0
"""How long to wait for better addresses than one that has answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredCoordinator:
    """Reachable coordinator whose CA is the token's."""

    address: str
    ca_pem: bytes
    tls_context: ssl.SSLContext
    info: CoordinatorInfo


def probe_coordinator(address: str, ca_fingerprint: str) -> DiscoveredCoordinator:
    """Returns the coordinator at an address.

    Raises:
        WrongCaError: its CA is another one.
        NetworkError: no answer, or a malformed one.
    """
    ca_pem = fetch_ca(address, ca_fingerprint)
    context = create_pinned_context(ca_pem)
    return DiscoveredCoordinator(
        address=address, ca_pem=ca_pem, tls_context=context, info=fetch_coordinator_info(address, context)
    )


def find_coordinator(
    addresses: Sequence[str],
    ca_fingerprint: str,
    *,
    probe: Callable[[str, str], DiscoveredCoordinator] = probe_coordinator,
    grace_s: float = GRACE_S,
) -> DiscoveredCoordinator:
    """Returns the first coordinator among `addresses`, best first, that has the right CA and answers in time.

    The first address is the user's choice: another CA there ends the search. The others may belong to other hosts by
    now and are skipped.

    Args:
        addresses: HOST:PORT, best first.
        ca_fingerprint: the CA that the token names.
        probe: contacts one address; called from threads.
        grace_s: how long to wait for better addresses after the first answer.

    Raises:
        WrongCaError: another CA at the first address, or at another one while none succeeds.
        NetworkError: none answers.
    """
    attempts = [_start_probe(probe, address, ca_fingerprint) for address in dict.fromkeys(addresses)]
    if not attempts:
        raise NetworkError(
            "no address of the coordinator is known; give one: edgefl device join HOST:PORT --token-file FILE"
        )
    until_s: float | None = None
    while True:
        if attempts[0].done() and isinstance(attempts[0].exception(), WrongCaError):
            return attempts[0].result()  # it raises
        best = next((attempt for attempt in attempts if attempt.done() and attempt.exception() is None), None)
        pending = {attempt for attempt in attempts[: attempts.index(best) if best else None] if not attempt.done()}
        if not pending:
            return best.result() if best else _raise_failure(attempts)
        if best is not None and until_s is None:
            until_s = time.monotonic() + grace_s
        remaining_s = None if until_s is None else until_s - time.monotonic()
        if best is not None and remaining_s is not None and remaining_s <= 0:
            return best.result()
        wait(
            pending if best else [attempt for attempt in attempts if not attempt.done()], remaining_s, FIRST_COMPLETED
        )


def _start_probe(
    probe: Callable[[str, str], DiscoveredCoordinator], address: str, ca_fingerprint: str
) -> Future[DiscoveredCoordinator]:
    """Probes in a daemon thread: the address may be silent for long."""
    future: Future[DiscoveredCoordinator] = Future()

    def run() -> None:
        try:
            future.set_result(probe(address, ca_fingerprint))
        except Exception as error:  # noqa: BLE001 it is raised again where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name=f"reach {address}", daemon=True).start()
    return future


def _raise_failure(attempts: Sequence[Future[DiscoveredCoordinator]]) -> DiscoveredCoordinator:
    failures = [error for attempt in attempts if (error := attempt.exception()) is not None]
    for error in failures:
        if not isinstance(error, EdgeflError):
            raise error
    worst_error = next((failure for failure in failures if isinstance(failure, WrongCaError)), failures[0])
    suffix = f" (nor {len(failures) - 1} other addresses)" if len(failures) > 1 else ""
    raise type(worst_error)(f"{worst_error}{suffix}")
