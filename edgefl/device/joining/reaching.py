"""Finding the coordinator among the addresses that a token names: all are asked side by side, the best one is taken.

An address that nobody has any more does not answer for ten seconds, and a token may name several such. Nothing is
sent to any of them but questions that everybody may ask.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from edgefl.device.trust import Hello, fetch_ca, pinned_context, say_hello
from edgefl.errors import EdgeflError, NetworkError, WrongCaError

GRACE_S = 2.0
"""An address that stands before one that has answered is waited for so long, and then passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A coordinator that was reached and whose CA is the token's."""

    address: str
    ca_pem: bytes
    context: ssl.SSLContext
    hello: Hello


def ask(address: str, ca_fingerprint: str) -> Site:
    """Returns the coordinator at an address.

    Raises:
        WrongCaError: its CA is another one.
        NetworkError: no answer, or none that makes sense.
    """
    ca_pem = fetch_ca(address, ca_fingerprint)
    context = pinned_context(ca_pem)
    return Site(address=address, ca_pem=ca_pem, context=context, hello=say_hello(address, context))


def reach(
    addresses: Sequence[str],
    ca_fingerprint: str,
    *,
    ask: Callable[[str, str], Site] = ask,
    grace_s: float = GRACE_S,
) -> Site:
    """Returns the first coordinator among `addresses`, best first, that has the right CA and answers in time.

    The first address is what the user said: another CA there ends the search. The others may have become somebody
    else's in the meantime and are passed over.

    Args:
        addresses: HOST:PORT, best first.
        ca_fingerprint: the CA that the token names.
        ask: asks one address; called from threads.
        grace_s: how long a better address may be behind the first one that answered.

    Raises:
        WrongCaError: another CA at the first address, or at the others and nothing better.
        NetworkError: none answers.
    """
    tries = [_begun(ask, address, ca_fingerprint) for address in dict.fromkeys(addresses)]
    if not tries:
        raise NetworkError("no address of the coordinator is known; give one: edgefl device join HOST:PORT --token T")
    until_s: float | None = None
    while True:
        if tries[0].done() and isinstance(tries[0].exception(), WrongCaError):
            return tries[0].result()  # it raises
        best = next((each for each in tries if each.done() and each.exception() is None), None)
        waiting = {each for each in tries[: tries.index(best) if best else None] if not each.done()}
        if not waiting:
            return best.result() if best else _refuse(tries)
        if best is not None and until_s is None:
            until_s = time.monotonic() + grace_s
        left_s = None if until_s is None else until_s - time.monotonic()
        if best is not None and left_s is not None and left_s <= 0:
            return best.result()
        wait(waiting if best else [each for each in tries if not each.done()], left_s, FIRST_COMPLETED)


def _begun(ask: Callable[[str, str], Site], address: str, ca_fingerprint: str) -> Future[Site]:
    """Asks in a thread that nobody waits for at the end: its address may be silent for long."""
    future: Future[Site] = Future()

    def run() -> None:
        try:
            future.set_result(ask(address, ca_fingerprint))
        except Exception as error:  # noqa: BLE001 it is raised again where the answer is looked at
            future.set_exception(error)

    threading.Thread(target=run, name=f"reach {address}", daemon=True).start()
    return future


def _refuse(tries: Sequence[Future[Site]]) -> Site:
    failures = [error for each in tries if (error := each.exception()) is not None]
    for error in failures:
        if not isinstance(error, EdgeflError):
            raise error
    worst = next((failure for failure in failures if isinstance(failure, WrongCaError)), failures[0])
    others = f" (nor {len(failures) - 1} other addresses)" if len(failures) > 1 else ""
    raise type(worst)(f"{worst}{others}")
