"""TLS towards the coordinator: the CA is checked against the token once, then nothing else is trusted.

Certificate dates are not checked: a board without a clock battery knows no date, and what is trusted is one CA
whose key the token named.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from edgefl.errors import NetworkError, StoreError, WrongCaError
from edgefl.protocol import certificate_fingerprint, dump_json, error_from_code, load_json, only_certificate
from edgefl.types import Json

X509_V_FLAG_NO_CHECK_TIME = 0x200000
MAX_ANSWER_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What the coordinator says at connect; `skew_s` is its clock minus ours, to about half a round trip.

    A certificate that ends before the first or after the second time of `certificates` is to be renewed; None where
    the coordinator is older than that.
    """

    version: str
    fleet: str
    addresses: tuple[str, ...]
    broker_port: int
    broker_host: str | None
    skew_s: float
    certificates: tuple[float, float] | None = None


def fetch_ca(address: str, ca_fingerprint: str, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns the coordinator's CA certificate (PEM), which has the fingerprint that the token names.

    Nothing but the question is sent.

    Raises:
        WrongCaError: it has another one.
        NetworkError: no answer, or none that makes sense.
    """
    status, body = request(address, _unverified_context(), "GET", "/edgefl/v1/ca", timeout_s=timeout_s)
    if status != 200:
        raise NetworkError(f"{address} is no edgefl coordinator: it answered {status} when asked for its CA")
    try:
        ca_pem = only_certificate(body)
        found = certificate_fingerprint(ca_pem)
    except NetworkError as error:
        raise NetworkError(f"{address} is no edgefl coordinator: {error}") from None
    if found != ca_fingerprint:
        raise WrongCaError(
            f"{address} has the CA {found[:16]}… but the token names {ca_fingerprint[:16]}…: "
            "it is another coordinator, or somebody in between; nothing was sent"
        )
    return ca_pem


def pinned_context(ca_pem: bytes) -> ssl.SSLContext:
    """Returns a client context that trusts this CA alone, checks host names and leaves dates alone.

    Of several certificates it is the first, whose key was compared with the token's.

    Raises:
        NetworkError: this is no certificate.
    """
    context = ssl.create_default_context(cadata=only_certificate(ca_pem).decode("ascii"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VerifyFlags(X509_V_FLAG_NO_CHECK_TIME)
    return context


def say_hello(address: str, context: ssl.SSLContext, *, timeout_s: float = TIMEOUT_S) -> Hello:
    """Returns what the coordinator says about itself and the difference of the clocks.

    Raises:
        WrongCaError: the server's certificate is not from the pinned CA.
        NetworkError: no answer, or none that makes sense.
    """
    # The clock of a board may be set by NTP in between: the interval comes from the one that never jumps.
    started = time.monotonic()
    value = _json(address, *request(address, context, "GET", "/edgefl/v1/hello", timeout_s=timeout_s))
    round_trip_s, now = time.monotonic() - started, time.time()
    try:
        return _hello(value, skew_s=float(value["time"]) + round_trip_s / 2 - now)
    except (KeyError, TypeError, ValueError) as error:
        raise NetworkError(f"{address} answers nonsense to hello: {error!r}") from None


def post_json(
    address: str,
    context: ssl.SSLContext,
    path: str,
    value: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Json:
    """Returns the JSON answer to a POST; an error that the coordinator names is raised as that error."""
    body = dump_json(value)
    return _json(address, *request(address, context, "POST", path, body=body, headers=headers, timeout_s=timeout_s))


def request(  # noqa: PLR0913 one argument per part of a request
    address: str,
    context: ssl.SSLContext,
    method: str,
    path: str,
    *,
    body: bytes | IO[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> tuple[int, bytes]:
    """Returns status and body of one HTTPS request to HOST:PORT; no proxy is asked.

    Raises:
        WrongCaError: the server's certificate is not from the context's CA; nothing was sent.
        NetworkError: no answer, or one of more than `max_bytes`.
    """
    kind = {"Content-Type": "application/json"} if body is not None else {}
    with _connected(address, context, timeout_s) as connection:
        connection.request(method, path, body=body, headers={**kind, **(headers or {})})
        response = connection.getresponse()
        answer = response.read(max_bytes + 1)
    if len(answer) > max_bytes:
        raise NetworkError(f"{address} answers more than {max_bytes} bytes")
    return response.status, answer


def download(
    address: str,
    context: ssl.SSLContext,
    path: str,
    into: IO[bytes],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, bytes]:
    """Returns the status of one GET; a body of status 200 was written into the file, any other one is returned.

    Raises:
        WrongCaError, NetworkError: as `request`; also when the body ends too early.
        StoreError: the file cannot be written.
    """
    with _connected(address, context, timeout_s) as connection:
        connection.request("GET", path, headers=dict(headers or {}))
        response = connection.getresponse()
        if response.status != 200:
            return response.status, response.read(MAX_ANSWER_BYTES)
        left = response.length
        while chunk := response.read(CHUNK_BYTES):
            _write(into, chunk)
            left = None if left is None else left - len(chunk)
    if left:
        raise NetworkError(f"{address} broke off {left} bytes before the end")
    return 200, b""


@contextmanager
def _connected(address: str, context: ssl.SSLContext, timeout_s: float) -> Iterator[http.client.HTTPSConnection]:
    """Gives a connection to HOST:PORT and closes it; what the network does wrong in the block is a `NetworkError`."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=timeout_s, context=context)
    try:
        yield connection
    except ssl.SSLCertVerificationError as error:
        raise _untrusted(address, error) from None
    except (OSError, http.client.HTTPException) as error:
        raise NetworkError(f"{address} cannot be reached: {_reason(error)}") from None
    finally:
        connection.close()


def _write(into: IO[bytes], chunk: bytes) -> None:
    """Keeps a fault of the disk from passing for one of the network."""
    try:
        into.write(chunk)
    except OSError as error:
        raise StoreError(f"{into.name} cannot be written: {error.strerror or error}") from None


def _hello(value: Json, *, skew_s: float) -> Hello:
    broker, window = value["broker"], value.get("certificates")
    return Hello(
        version=str(value["version"]),
        fleet=str(value["fleet"]),
        addresses=tuple(map(str, value["addresses"])),
        broker_port=int(broker["port"]),
        broker_host=None if broker.get("host") is None else str(broker["host"]),
        skew_s=skew_s,
        certificates=None if window is None else (float(window["earliest"]), float(window["latest"])),
    )


def _json(address: str, status: int, body: bytes) -> Json:
    try:
        value = load_json(body)
    except NetworkError as error:
        raise NetworkError(f"{address} is no edgefl coordinator: it answered {status}: {error}") from None
    if status != 200:
        raise error_from_code(str(value.get("error")), str(value.get("message", f"answered {status}")))
    return value


def _untrusted(address: str, error: ssl.SSLCertVerificationError) -> WrongCaError | NetworkError:
    reason = error.verify_message or str(error)
    if "mismatch" in reason or "not valid for" in reason:
        host = address.rpartition(":")[0]
        return NetworkError(
            f"the coordinator's certificate is not for {host}; on its machine: edgefl coordinator readdress {host}"
        )
    return WrongCaError(f"the certificate of {address} is not from this fleet's CA ({reason}); nothing was sent")


def _reason(error: Exception) -> str:
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
