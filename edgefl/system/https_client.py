"""HTTPS client of the coordinator: its CA is checked against the token once, then it alone is trusted.

Certificate dates are not checked: a board without a clock battery knows no date, and trust is in one CA, whose
key the token names.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from edgefl.core.errors import NetworkError, StoreError, WrongCaError
from edgefl.core.protocol import certificate_fingerprint, dump_json, error_from_code, load_json, single_certificate
from edgefl.core.types import Json

X509_V_FLAG_NO_CHECK_TIME = 0x200000
MAX_RESPONSE_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 10.0
SignRequest = Callable[[str, str, bytes], Mapping[str, str]]
"""Returns the headers that sign one request: of method, path with query, and body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorInfo:
    """Coordinator's answer at connect; `skew_s` is its clock minus ours, to about half a round trip.

    A certificate that expires before the first or after the second time of `renewal_window` is to be renewed; None
    with a coordinator too old to send it.
    """

    version: str
    fleet: str
    addresses: tuple[str, ...]
    broker_port: int
    broker_host: str | None
    skew_s: float
    renewal_window: tuple[float, float] | None = None


def fetch_ca(address: str, ca_fingerprint: str, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns the coordinator's CA certificate (PEM), which has the fingerprint that the token names.

    Nothing but the request is sent.

    Raises:
        WrongCaError: its CA is another one.
        NetworkError: no answer, or a malformed one.
    """
    status, body = request(address, _unverified_context(), "GET", "/edgefl/v1/ca", timeout_s=timeout_s)
    if status != 200:
        raise NetworkError(f"{address} is no edgefl coordinator: it answered {status} when asked for its CA")
    try:
        ca_pem = single_certificate(body)
        fingerprint = certificate_fingerprint(ca_pem)
    except NetworkError as error:
        raise NetworkError(f"{address} is no edgefl coordinator: {error}") from None
    if fingerprint != ca_fingerprint:
        raise WrongCaError(
            f"{address} has the CA {fingerprint[:16]}… but the token names {ca_fingerprint[:16]}…: "
            "it is another coordinator, or somebody in between; nothing was sent"
        )
    return ca_pem


def create_pinned_context(ca_pem: bytes) -> ssl.SSLContext:
    """Returns a client context that trusts only this CA, checks host names and ignores dates.

    Of several certificates only the first counts, whose key was compared with the token's.

    Raises:
        NetworkError: `ca_pem` is no certificate.
    """
    context = ssl.create_default_context(cadata=single_certificate(ca_pem).decode("ascii"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VerifyFlags(X509_V_FLAG_NO_CHECK_TIME)
    return context


class ClosingSocket(ssl.SSLSocket):
    """Closes when the handshake fails; paho leaves that to the garbage collector."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise


def fetch_coordinator_info(address: str, context: ssl.SSLContext, *, timeout_s: float = TIMEOUT_S) -> CoordinatorInfo:
    """Returns the coordinator's info, including the difference of the clocks.

    Raises:
        WrongCaError: the server's certificate is not from the pinned CA.
        NetworkError: no answer, or a malformed one.
    """
    # NTP may set the board's clock in between, so the interval is measured on the monotonic clock.
    started_s = time.monotonic()
    value = _parse_json_response(address, *request(address, context, "GET", "/edgefl/v1/hello", timeout_s=timeout_s))
    round_trip_s, now_s = time.monotonic() - started_s, time.time()
    try:
        return _parse_coordinator_info(value, skew_s=float(value["time"]) + round_trip_s / 2 - now_s)
    except (KeyError, TypeError, ValueError) as error:
        raise NetworkError(f"{address} answers nonsense to hello: {error!r}") from None


def post_json(
    address: str,
    context: ssl.SSLContext,
    path: str,
    value: Mapping[str, Any],
    *,
    sign: SignRequest | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Json:
    """Returns the JSON answer to a POST; an error that the coordinator names is raised as that error."""
    body = dump_json(value)
    headers = None if sign is None else sign("POST", path, body)
    return _parse_json_response(
        address, *request(address, context, "POST", path, body=body, headers=headers, timeout_s=timeout_s)
    )


def request(  # noqa: PLR0913 one argument per part of a request
    address: str,
    context: ssl.SSLContext,
    method: str,
    path: str,
    *,
    body: bytes | IO[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_RESPONSE_BYTES,
) -> tuple[int, bytes]:
    """Returns status and body of one HTTPS request to HOST:PORT; no proxy is asked.

    Raises:
        WrongCaError: the server's certificate is not from the context's CA; nothing was sent.
        NetworkError: no answer, or one of more than `max_bytes`.
    """
    content_type = {"Content-Type": "application/json"} if body is not None else {}
    with _open_connection(address, context, timeout_s) as connection:
        connection.request(method, path, body=body, headers={**content_type, **(headers or {})})
        response = connection.getresponse()
        reply = response.read(max_bytes + 1)
    if len(reply) > max_bytes:
        raise NetworkError(f"{address} answers more than {max_bytes} bytes")
    return response.status, reply


def download(
    address: str,
    context: ssl.SSLContext,
    path: str,
    file: IO[bytes],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, bytes]:
    """Returns the status of one GET; a 200 body is written into the file, others are returned.

    Raises:
        WrongCaError, NetworkError: as `request`; also when the body ends too early.
        StoreError: the file cannot be written.
    """
    with _open_connection(address, context, timeout_s) as connection:
        connection.request("GET", path, headers=dict(headers or {}))
        response = connection.getresponse()
        if response.status != 200:
            return response.status, response.read(MAX_RESPONSE_BYTES)
        bytes_left = response.length
        while chunk := response.read(CHUNK_BYTES):
            _write_chunk(file, chunk)
            bytes_left = None if bytes_left is None else bytes_left - len(chunk)
    if bytes_left:
        raise NetworkError(f"{address} broke off {bytes_left} bytes before the end")
    return 200, b""


class KeptConnection:
    """HTTPS connection to HOST:PORT that stays open between requests; used by one thread."""

    def __init__(self, address: str, context: ssl.SSLContext, *, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPSConnection(
            host.strip("[]"), int(port), timeout=timeout_s, context=context
        )

    def request(
        self, method: str, path: str, *, body: bytes, headers: Mapping[str, str], max_bytes: int
    ) -> tuple[int, bytes]:
        """Returns status and body of one request; opens the connection where it is closed.

        Raises:
            WrongCaError, NetworkError: as `request`.
        """
        try:
            self._connection.request(method, path, body=body, headers=dict(headers))
            response = self._connection.getresponse()
            reply = response.read(max_bytes + 1)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise _make_certificate_error(self.address, error) from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise NetworkError(f"{self.address} cannot be reached: {_format_reason(error)}") from None
        if len(reply) > max_bytes:
            self.close()
            raise NetworkError(f"{self.address} answers more than {max_bytes} bytes")
        return response.status, reply

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _open_connection(
    address: str, context: ssl.SSLContext, timeout_s: float
) -> Iterator[http.client.HTTPSConnection]:
    """Yields a connection to HOST:PORT and closes it; network failures in the block become `NetworkError`."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=timeout_s, context=context)
    try:
        yield connection
    except ssl.SSLCertVerificationError as error:
        raise _make_certificate_error(address, error) from None
    except (OSError, http.client.HTTPException) as error:
        raise NetworkError(f"{address} cannot be reached: {_format_reason(error)}") from None
    finally:
        connection.close()


def _write_chunk(file: IO[bytes], chunk: bytes) -> None:
    """Writes a chunk; disk failures become `StoreError`, not `NetworkError`."""
    try:
        file.write(chunk)
    except OSError as error:
        raise StoreError(f"{file.name} cannot be written: {error.strerror or error}") from None


def _parse_coordinator_info(value: Json, *, skew_s: float) -> CoordinatorInfo:
    broker, window = value["broker"], value.get("certificates")
    return CoordinatorInfo(
        version=str(value["version"]),
        fleet=str(value["fleet"]),
        addresses=tuple(map(str, value["addresses"])),
        broker_port=int(broker["port"]),
        broker_host=None if broker.get("host") is None else str(broker["host"]),
        skew_s=skew_s,
        renewal_window=None if window is None else (float(window["earliest"]), float(window["latest"])),
    )


def _parse_json_response(address: str, status: int, body: bytes) -> Json:
    try:
        value = load_json(body)
    except NetworkError as error:
        raise NetworkError(f"{address} is no edgefl coordinator: it answered {status}: {error}") from None
    if status != 200:
        raise error_from_code(str(value.get("error")), str(value.get("message", f"answered {status}")))
    return value


def _make_certificate_error(address: str, error: ssl.SSLCertVerificationError) -> WrongCaError | NetworkError:
    reason = error.verify_message or str(error)
    if "mismatch" in reason or "not valid for" in reason:
        host = address.rpartition(":")[0]
        return NetworkError(
            f"the coordinator's certificate is not for {host}; on its machine: edgefl coordinator readdress {host}"
        )
    return WrongCaError(f"the certificate of {address} is not from this fleet's CA ({reason}); nothing was sent")


def _format_reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host name"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLError):
        return f"no TLS there ({error.reason or error})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _unverified_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
