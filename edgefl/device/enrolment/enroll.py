"""Enrolment in a fleet: checks the CA, creates and proves a key, stores the certificate.

Nothing is left behind when the coordinator rejects. When its reply is lost, the key stays in the state directory, and
the same command again yields the same identity. A board that nobody sits at tries again.

All addresses of a token are probed in parallel: a stale one takes ten seconds to time out, and there may be several.
Only public requests are sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from numpy.random import Generator

from edgefl import __version__
from edgefl.core.errors import (
    EdgeflError,
    JoinError,
    NetworkError,
    NotAllowedError,
    StoreError,
    TokenExpiredError,
    TokenInvalidError,
    TokenUsedError,
    UsageError,
    VersionError,
    WrongCaError,
)
from edgefl.core.protocol import PEER_PORT, JoinToken, validate_slug
from edgefl.core.types import Json, derive_rng
from edgefl.device.enrolment.certificates import (
    RENEW_ROUTE,
    create_key,
    create_signing_request,
    export_public_key,
    parse_certificate,
)
from edgefl.device.hardware.requirements import find_unsupported_backends, get_training_facts
from edgefl.device.state_dir import (
    LOCKOUT_FILE,
    DeviceSettings,
    DeviceStateDir,
    PendingEnrolment,
    delete_pending_enrolment,
    load_pending_enrolment,
    save_enrolment,
    save_pending_enrolment,
)
from edgefl.system.atomic_files import is_locked
from edgefl.system.https_client import (
    CoordinatorInfo,
    create_pinned_context,
    fetch_ca,
    fetch_coordinator_info,
    post_json,
)
from edgefl.system.retries import Backoff, RateLimitedLog

log = logging.getLogger(__name__)

# Larger differences are logged, because they make certificates and logs of the board look wrong.
SKEW_WARNING_S = 60.0

GRACE_S = 2.0
"""How long to wait for better addresses than one that has answered."""

INITIAL_WAIT_S = 1.0
MAX_WAIT_S = 60.0
TIME_SYNC_S = 30.0
"""Enrolment does not need the date: the wait only avoids first log lines and events dated decades back."""
TIMESYNC_DIR = Path("/run/systemd/timesync")
PERMANENT_ERRORS = (TokenExpiredError, TokenInvalidError, TokenUsedError)
"""Errors that no retry can fix: the board needs another token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentOptions:
    """Requested identity and settings of a board; `examples` are counts per task for its capabilities."""

    name: str
    role: str = "trainer"
    shards: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, int] = field(default_factory=dict)
    accelerator: str = "auto"
    threads: int | None = None
    peer_port: int = PEER_PORT
    facts: Json = field(default_factory=dict)


def enroll(
    token: JoinToken, options: EnrolmentOptions, *, root: Path, addresses: Sequence[str] = ()
) -> DeviceStateDir:
    """Returns the state of the device after enrolment; idempotent for the same fleet and name.

    A board that is enrolled, or cannot verify it, keeps its identity; a removed one enrols with a new key.

    Args:
        token: CA fingerprint and permission to join.
        options: requested identity and settings.
        root: the state directory; created when it is missing.
        addresses: HOST:PORT to try first; the token's own come after them.

    Raises:
        WrongCaError: the first address belongs to another CA, or no address to the right one; nothing was sent.
        JoinError: the coordinator rejects (see its kinds), or `root` belongs to another fleet or name.
        NetworkError: no address answers, or the reply was lost.
        VersionError: the coordinator has another version.
    """
    validate_slug(options.name)
    options = _add_training_facts(options)
    if (root / "device.json").exists() and not _is_clone(root, options.name):
        state = _update_enrolment(DeviceStateDir.load(root), token, options)
        coordinator = find_removing_coordinator(state, [*addresses, *token.addresses])
        if coordinator is None:
            return state
        log.warning("the coordinator knows this board no more; it joins anew, with a new key")
        if is_locked(root / "lock"):
            log.warning("an agent runs on %s with the key before: start it anew after this", root)
        return _complete_enrolment(
            coordinator, token, replace(options, shards=state.settings.shards), root, previous=state.settings
        )
    return _complete_enrolment(
        find_coordinator([*addresses, *token.addresses], token.ca_fingerprint), token, options, root
    )


def _complete_enrolment(
    coordinator: DiscoveredCoordinator,
    token: JoinToken,
    options: EnrolmentOptions,
    root: Path,
    *,
    previous: DeviceSettings | None = None,
) -> DeviceStateDir:
    """Returns the state of the enrolled device; the limits of `previous` settings stay."""
    if abs(coordinator.info.skew_s) > SKEW_WARNING_S:
        log.warning(
            "this board's clock differs from the coordinator's by %.0f s; it works all the same",
            coordinator.info.skew_s,
        )
    with _open_enrolment_key(root, token, options.name) as key_pem:
        reply = _send_request(coordinator, token, options, key_pem)
        device = _parse_settings(reply, coordinator, token, options)
        if device.role != options.role:
            log.warning(
                "this board joins as %s, not as %s: its token decides; edgefl coordinator token --role %s",
                device.role,
                options.role,
                options.role,
            )
        if previous is not None:
            device = replace(
                device,
                max_temperature_c=previous.max_temperature_c,
                min_group=previous.min_group,
                max_epsilon=previous.max_epsilon,
                only_masked=previous.only_masked,
                drift_references=previous.drift_references,
            )
        cert_pem = parse_certificate(reply, key_pem)
        return save_enrolment(root, device, key_pem=key_pem, cert_pem=cert_pem, ca_pem=coordinator.ca_pem)


def _add_training_facts(options: EnrolmentOptions) -> EnrolmentOptions:
    """Returns options whose facts say why a 32-bit board trains nothing; the token decides its role."""
    reason = find_unsupported_backends(options.facts).get("numpy", "")
    if not reason:
        return options
    log.warning("this board trains nothing, whatever its token: %s", reason)
    facts = {**options.facts, **get_training_facts(options.role, options.shards, options.facts)}
    return replace(options, facts=facts)


def get_host_slug() -> str:
    """Returns this machine's name as a device name."""
    slug = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:63].rstrip("-")
    return slug if slug and slug != "localhost" else "device"


def _is_clone(root: Path, name: str) -> bool:
    """Returns whether this board was rejected as a clone, and gets a name of its own now."""
    return (root / LOCKOUT_FILE).exists() and DeviceStateDir.load(root).device_id != name


def _update_enrolment(state: DeviceStateDir, token: JoinToken, options: EnrolmentOptions) -> DeviceStateDir:
    settings = state.settings
    if settings.ca_fingerprint != token.ca_fingerprint or settings.device_id != options.name:
        raise JoinError(
            f"{state.root} belongs to device {settings.device_id!r} of fleet {settings.fleet!r}; "
            "for another device take another --state DIR"
        )
    state.update(
        shards={**settings.shards, **options.shards},
        accelerator=options.accelerator,
        threads=options.threads,
        peer_port=options.peer_port,
    )
    return state


@contextlib.contextmanager
def _open_enrolment_key(root: Path, token: JoinToken, name: str) -> Iterator[bytes]:
    """Yields the enrolment key; removed after a rejection, kept after a lost reply."""
    pending = load_pending_enrolment(root)
    if pending and (pending.name, pending.ca_fingerprint) == (name, token.ca_fingerprint):
        yield pending.key_pem
        return
    created_folders = _find_missing_folders(root)
    key_pem = create_key()
    try:
        save_pending_enrolment(
            root, PendingEnrolment(key_pem=key_pem, name=name, ca_fingerprint=token.ca_fingerprint)
        )
        yield key_pem
    except (JoinError, VersionError):
        delete_pending_enrolment(root)
        for folder in created_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _find_missing_folders(root: Path) -> list[Path]:
    return [folder for folder in (root, *root.parents) if not folder.exists()]


def _send_request(
    coordinator: DiscoveredCoordinator, token: JoinToken, options: EnrolmentOptions, key_pem: bytes
) -> Json:
    request = {
        "token_id": token.token_id,
        "secret": token.secret,
        "name": options.name,
        "role": options.role,
        "csr": create_signing_request(key_pem, options.name).decode(),
        "public_key": export_public_key(key_pem).decode(),
        "capabilities": {"facts": options.facts, "shards": dict(options.examples)},
        "version": __version__,
    }
    return post_json(coordinator.address, coordinator.tls_context, "/edgefl/v1/enroll", request)


def _parse_settings(
    response: Json, coordinator: DiscoveredCoordinator, token: JoinToken, options: EnrolmentOptions
) -> DeviceSettings:
    try:
        addresses = tuple(map(str, response["addresses"]))
        return DeviceSettings(
            device_id=str(response["device_id"]),
            fleet=str(response["fleet"]),
            role=str(response["role"]),
            ca_fingerprint=token.ca_fingerprint,
            addresses=tuple(dict.fromkeys([coordinator.address, *addresses, *token.addresses])),
            broker_port=int(response["broker"]["port"]),
            broker_host=response["broker"].get("host"),
            shards=dict(options.shards),
            accelerator=options.accelerator,
            threads=options.threads,
            peer_port=options.peer_port,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NetworkError(f"{coordinator.address} answers nonsense to a join: {error!r}") from None


def find_removing_coordinator(state: DeviceStateDir, addresses: Sequence[str]) -> DiscoveredCoordinator | None:
    """Returns the coordinator that has removed this board; None while registered or unknown.

    Only the coordinator of the CA that the board joined counts, over a connection verified by this CA; after any
    other answer, or none, the board keeps its identity.

    Args:
        state: of the enrolment; both its key and that of a renewal under way must be unknown.
        addresses: HOST:PORT, tried before the board's own.
    """
    try:
        coordinator = find_coordinator([*addresses, *state.settings.addresses], state.settings.ca_fingerprint)
        keys = [path.read_bytes() for path in (state.key, state.pending_key) if path.exists()]
        return None if any(_is_key_registered(coordinator, key_pem) for key_pem in keys) else coordinator
    except (EdgeflError, OSError, ValueError) as error:
        log.info("cannot ask whether this board is still in the fleet: %s", error)
        return None


def _is_key_registered(coordinator: DiscoveredCoordinator, key_pem: bytes) -> bool:
    """Returns whether a key is registered: the coordinator authenticates before it parses a request."""
    from edgefl.device.flower.supernode import RequestSigner  # noqa: PLC0415 a first enrolment needs no Flower

    signer = RequestSigner(key_pem, lambda: time.time() + coordinator.info.skew_s)
    try:
        post_json(coordinator.address, coordinator.tls_context, RENEW_ROUTE, {}, sign=signer.sign)
    except NotAllowedError:
        return False
    except NetworkError as error:
        log.debug("as is meant: %s", error)
    return True


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


def _create_rng() -> Generator:
    return derive_rng("join", secrets.randbits(64))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Clock, sleep and jitter of enrolment retries; replaceable in tests.

    The jitter spreads boards that boot together after a power cut.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rng: Generator | None = field(default_factory=_create_rng)


def enroll_with_retry(
    token: JoinToken, options: EnrolmentOptions, *, root: Path, policy: RetryPolicy | None = None
) -> DeviceStateDir:
    """Returns the state of the device after enrolment; idempotent.

    Network failures, lost replies, version mismatches, taken names and a wrong CA are retried: each can be fixed
    elsewhere, and nothing was sent to another CA.

    Raises:
        UsageError: the token has no address.
        TokenInvalidError, TokenExpiredError, TokenUsedError: the token is not valid.
        JoinError: the request is rejected, or `root` belongs to another device.
        StoreError: `root` cannot be written.
    """
    if not token.addresses:
        raise UsageError(
            "no address of the coordinator is known; give one: edgefl device join HOST:PORT --token-file FILE"
        )
    policy = policy or RetryPolicy()
    backoff = Backoff(initial_s=INITIAL_WAIT_S, max_s=MAX_WAIT_S, rng=policy.rng)
    rate_limited_log = RateLimitedLog(log, clock=policy.clock)
    while True:
        try:
            return enroll(token, options, root=root)
        except (NetworkError, VersionError, JoinError) as error:
            if isinstance(error, PERMANENT_ERRORS) or type(error) is JoinError:
                raise
            rate_limited_log.warning(str(error), "not joined yet: %s; trying again until it works", error)
        policy.sleep(backoff.next_s())
        # Another address first: a wrong CA at the first one ends a search.
        token = replace(token, addresses=(*token.addresses[1:], token.addresses[0]))


def wait_for_clock(policy: RetryPolicy, *, timesync_dir: Path = TIMESYNC_DIR) -> bool:
    """Returns whether the clock is set; waits briefly for systemd-timesyncd where it runs."""
    if not timesync_dir.is_dir():
        return False
    until_s = policy.clock() + TIME_SYNC_S
    while not (timesync_dir / "synchronized").exists():
        if policy.clock() >= until_s:
            log.warning("the clock is not set after %.0f s; joining all the same", TIME_SYNC_S)
            return False
        policy.sleep(1.0)
    return True


def delete_secret_file(path: Path) -> None:
    """Overwrites and removes a file that holds a token; a missing one is ignored.

    Raises:
        StoreError: it cannot be removed.
    """
    try:
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path} holds a token and cannot be removed: {error.strerror or error}") from None
