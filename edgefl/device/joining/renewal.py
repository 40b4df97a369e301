"""Renews this device's certificate, with a new key, before it ends; nobody has to join again.

When it is time the coordinator says: the board's own clock may stand in 1970. The request is signed as every other
one is, and that signature knows no dates: a board that lay in a drawer for longer than its certificate lives comes
back by itself. The new key is on the disk before anybody hears of it. So when the answer is lost, and the coordinator
knows the new key already, the device finds that its old one counts no more and asks again with the new one.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from edgefl.device.joining.keys import certificate_in, new_key, public_pem, request_pem
from edgefl.device.state import DeviceState
from edgefl.device.trust import Hello, post_json, say_hello
from edgefl.errors import ClonedError, EdgeflError, NetworkError, NotAllowedError, NotJoinedError
from edgefl.files import write_whole

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)

ROUTE, READMIT = "/edgefl/v1/renew", "/edgefl/v1/readmit"
LOOK_EVERY_S = 3600.0
"""How often the coordinator is asked anew what is to be renewed."""
LOOK_WHILE_OFF_S = 60.0
"""The same while the broker does not let this device in: its certificate may be why."""
TRY_AGAIN_S = 300.0


class Renewal:
    """Used by the agent's main thread; only `ask` may be called from others.

    Args:
        state: where key and certificate lie.
        trust: verifies the coordinator.
        sign: makes the headers of a request, signed with a private key (PEM).
        monotonic: seconds, for waiting.
    """

    def __init__(
        self,
        state: DeviceState,
        trust: ssl.SSLContext,
        *,
        sign: Callable[[bytes], Mapping[str, str]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._trust, self._sign, self._monotonic = state, trust, sign, monotonic
        self._asked = threading.Event()
        self._window: tuple[float, float] | None = None
        self._heard_s = self._next_try_s = -LOOK_EVERY_S
        self._ends_at: float | None = None

    def ask(self) -> None:
        """Makes it time."""
        self._next_try_s = self._monotonic()
        self._asked.set()

    def heard(self, hello: Hello) -> None:
        """Takes note of what the coordinator says is to be renewed."""
        self._window, self._heard_s = hello.certificates, self._monotonic()

    def is_due(self) -> bool:
        """Returns whether the certificate is to be renewed now."""
        if self._monotonic() < self._next_try_s:
            return False
        if self._asked.is_set():
            return True
        if self._window is None:
            return False
        waited_s = self._monotonic() - self._heard_s
        earliest, latest = (instant + waited_s for instant in self._window)
        return not earliest <= self._end() <= latest

    def look(self, address: str, *, is_link_up: bool) -> None:
        """Asks the coordinator now and then what is to be renewed, more often while the broker refuses this device.

        Raises:
            NetworkError: it does not answer, or another server does at its address.
            ClonedError: it refuses this device.
        """
        every_s = LOOK_EVERY_S if is_link_up else LOOK_WHILE_OFF_S
        if self._window is not None and self._monotonic() - self._heard_s >= every_s:
            try:
                self.heard(say_hello(address, self._trust))
            except (NetworkError, ClonedError):
                raise
            except EdgeflError as error:
                raise NetworkError(str(error)) from error

    def renew(self, address: str) -> bool:
        """Returns whether this device has a new key and certificate; if not it is tried again later."""
        self._next_try_s = self._monotonic() + TRY_AGAIN_S
        try:
            own = self._state.key.read_bytes()
            key_pem = self._pending(own) or new_key()
            write_whole(self._state.pending_key, key_pem)
            self._exchange(address, key_pem, signed_by=own)
        except (EdgeflError, OSError, ValueError) as error:
            log.warning("cannot renew the certificate: %s; trying again", error)
            return False
        return True

    def recover(self, address: str) -> bool:
        """Returns whether the device is known again.

        That is by the key of a renewal whose answer was lost, or by the one that it has, where the coordinator was
        restored from a backup that is older.

        Raises:
            NetworkError: no answer.
            StoreError: it cannot be written.
        """
        return self._is_renewed(address) or self._is_readmitted(address)

    def _is_readmitted(self, address: str) -> bool:
        """Shows the coordinator a certificate that it may not have heard of."""
        try:
            key_pem = self._state.key.read_bytes()
            body = {
                "csr": request_pem(key_pem, self._state.device_id).decode(),
                "certificate": certificate_alone(self._state.cert.read_bytes()),
            }
            post_json(address, self._trust, READMIT, body)
        except (EdgeflError, OSError, ValueError) as error:
            log.debug("not readmitted: %s", error)
            return False
        log.info("the coordinator did not know this device's newest certificate, and has taken note of it")
        return True

    def _is_renewed(self, address: str) -> bool:
        if not self._state.pending_key.exists():
            return False
        key_pem = self._state.pending_key.read_bytes()
        try:
            self._exchange(address, key_pem, signed_by=key_pem)
        except NotAllowedError:
            return False  # neither key counts: it was removed, or the clock is off
        except ValueError as error:
            log.warning("the key of a renewal is damaged and given up: %s", error)
            self._state.pending_key.unlink()
            return False
        return True

    def _pending(self, own: bytes) -> bytes | None:
        """Returns the key of a renewal that was cut off, unless only its end was."""
        path = self._state.pending_key
        key_pem = path.read_bytes() if path.exists() else None
        return None if key_pem is None or public_pem(key_pem) == public_pem(own) else key_pem

    def _exchange(self, address: str, key_pem: bytes, *, signed_by: bytes) -> None:
        body = {"csr": request_pem(key_pem, self._state.device_id).decode()}
        answer = post_json(address, self._trust, ROUTE, body, headers=self._sign(signed_by))
        self._state.take_certificate(key_pem=key_pem, cert_pem=certificate_in(answer, key_pem))
        self._asked.clear()
        self._ends_at = None
        log.info("the certificate is renewed")

    def _end(self) -> float:
        """Returns when the certificate ends; what cannot be read has ended."""
        if self._ends_at is None:
            try:
                self._ends_at = ends_at(self._state.cert.read_bytes())
            except (OSError, NotJoinedError):
                return 0.0
        return self._ends_at


def ends_at(cert_pem: bytes) -> float:
    """Returns when a certificate ends, in unix seconds.

    Raises:
        NotJoinedError: it is none.
    """
    return _loaded(cert_pem).not_valid_after_utc.timestamp()


def certificate_alone(pem: bytes) -> str:
    """Returns the certificate (PEM) of a file in which its key may stand as well.

    Raises:
        NotJoinedError: there is none.
    """
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415 as below

    return _loaded(pem).public_bytes(Encoding.PEM).decode()


def _loaded(pem: bytes) -> Certificate:
    from cryptography import x509  # noqa: PLC0415 not every command of a device looks at certificates

    try:
        return x509.load_pem_x509_certificate(pem)
    except (ValueError, KeyError, x509.InvalidVersion) as error:
        raise NotJoinedError(f"the device's certificate cannot be read: {error}; join again") from None
