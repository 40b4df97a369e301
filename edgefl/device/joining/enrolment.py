"""Joining a fleet: check the CA, make a key, prove it, keep what comes back.

Nothing is left behind when the coordinator refuses. When its answer is lost, the key stays in the state directory,
and the same command again gets the same place.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgefl import __version__
from edgefl.device.board.fits import role_that_fits
from edgefl.device.board.training_facts import training_facts
from edgefl.device.joining.keys import certificate_in, new_key, public_pem, request_pem
from edgefl.device.joining.reaching import Site, reach
from edgefl.device.joining.standing import where_it_is_out
from edgefl.device.state import (
    REFUSED,
    DeviceState,
    JoinedDevice,
    PendingJoin,
    drop_pending,
    load_pending,
    save_joined,
    save_pending,
)
from edgefl.device.trust import post_json
from edgefl.errors import JoinError, NetworkError, VersionError
from edgefl.files import is_held
from edgefl.protocol import PEER_PORT, JoinToken, checked_slug
from edgefl.types import Json

log = logging.getLogger(__name__)

# A longer difference than this is worth a line: certificates and logs of the board will look odd.
NOTABLE_SKEW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinWishes:
    """What a board wants to be; `examples` are the counts per task that it reports with its capabilities."""

    name: str
    role: str = "trainer"
    shards: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, int] = field(default_factory=dict)
    accelerator: str = "auto"
    threads: int | None = None
    peer_port: int = PEER_PORT
    facts: Json = field(default_factory=dict)


def join(token: JoinToken, wishes: JoinWishes, *, root: Path, addresses: Sequence[str] = ()) -> DeviceState:
    """Returns the state of the device after it joined; again, if it had joined this fleet under this name already.

    A board that is in the fleet, or cannot find out, stays what it is; one that was removed joins under a new key.

    Args:
        token: whom to trust and the right to come in.
        wishes: who this board wants to be.
        root: the state directory; made when it is missing.
        addresses: HOST:PORT to try first; the token's own come after them.

    Raises:
        WrongCaError: the first address belongs to another CA, or no address to the right one; nothing was sent.
        JoinError: the coordinator refuses (see its kinds), or `root` belongs to another fleet or name.
        NetworkError: no address answers, or the answer was lost.
        VersionError: the coordinator speaks another version.
    """
    checked_slug(wishes.name)
    wishes = _fitting(wishes)
    if (root / "device.json").exists() and not _is_copy_of_another(root, wishes.name):
        state = _join_again(DeviceState.load(root), token, wishes)
        site = where_it_is_out(state, [*addresses, *token.addresses])
        if site is None:
            return state
        log.warning("the coordinator knows this board no more; it joins anew, with a new key")
        if is_held(root / "lock"):
            log.warning("an agent runs on %s with the key before: start it anew after this", root)
        return _enrol(site, token, replace(wishes, shards=state.device.shards), root, former=state.device)
    return _enrol(reach([*addresses, *token.addresses], token.ca_fingerprint), token, wishes, root)


def _enrol(
    site: Site, token: JoinToken, wishes: JoinWishes, root: Path, *, former: JoinedDevice | None = None
) -> DeviceState:
    """Returns the state of the device that the coordinator has let in; the limits of a `former` one stay."""
    if abs(site.hello.skew_s) > NOTABLE_SKEW_S:
        log.warning(
            "this board's clock differs from the coordinator's by %.0f s; it works all the same", site.hello.skew_s
        )
    with _key(root, token, wishes.name) as key_pem:
        answer = _ask(site, token, wishes, key_pem)
        device = _joined(answer, site, token, wishes)
        if former is not None:
            device = replace(device, max_temperature_c=former.max_temperature_c)
        cert_pem = certificate_in(answer, key_pem)
        return save_joined(root, device, key_pem=key_pem, cert_pem=cert_pem, ca_pem=site.ca_pem)


def _fitting(wishes: JoinWishes) -> JoinWishes:
    """Returns wishes that this board can keep; a 32-bit one evaluates and sends heartbeats, and trains nothing."""
    role, reason = role_that_fits(wishes.role, wishes.facts)
    if reason:
        log.warning("this board joins as %s: %s", role, reason)
        facts = {**wishes.facts, **training_facts(role, wishes.shards, wishes.facts)}
        return replace(wishes, role=role, facts=facts)
    return wishes


def host_slug() -> str:
    """Returns this machine's name as a device name."""
    slug = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:63].rstrip("-")
    return slug if slug and slug != "localhost" else "device"


def _is_copy_of_another(root: Path, name: str) -> bool:
    """Returns whether this board was refused as the copy of a device, and gets a name of its own now."""
    return (root / REFUSED).exists() and DeviceState.load(root).device_id != name


def _join_again(state: DeviceState, token: JoinToken, wishes: JoinWishes) -> DeviceState:
    known = state.device
    if known.ca_fingerprint != token.ca_fingerprint or known.device_id != wishes.name:
        raise JoinError(
            f"{state.root} belongs to device {known.device_id!r} of fleet {known.fleet!r}; "
            "for another device take another --state DIR"
        )
    state.change(
        shards={**known.shards, **wishes.shards},
        accelerator=wishes.accelerator,
        threads=wishes.threads,
        peer_port=wishes.peer_port,
    )
    return state


@contextlib.contextmanager
def _key(root: Path, token: JoinToken, name: str) -> Iterator[bytes]:
    """Gives the key to join with; after a refusal the directory is as it was, after a lost answer the key stays."""
    pending = load_pending(root)
    if pending and (pending.name, pending.ca_fingerprint) == (name, token.ca_fingerprint):
        yield pending.key_pem
        return
    made = _missing_folders(root)
    key_pem = new_key()
    try:
        save_pending(root, PendingJoin(key_pem=key_pem, name=name, ca_fingerprint=token.ca_fingerprint))
        yield key_pem
    except (JoinError, VersionError):
        drop_pending(root)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _missing_folders(root: Path) -> list[Path]:
    return [folder for folder in (root, *root.parents) if not folder.exists()]


def _ask(site: Site, token: JoinToken, wishes: JoinWishes, key_pem: bytes) -> Json:
    request = {
        "token_id": token.token_id,
        "secret": token.secret,
        "name": wishes.name,
        "role": wishes.role,
        "csr": request_pem(key_pem, wishes.name).decode(),
        "public_key": public_pem(key_pem).decode(),
        "capabilities": {"facts": wishes.facts, "shards": dict(wishes.examples)},
        "version": __version__,
    }
    return post_json(site.address, site.context, "/edgefl/v1/enroll", request)


def _joined(answer: Json, site: Site, token: JoinToken, wishes: JoinWishes) -> JoinedDevice:
    try:
        known = tuple(map(str, answer["addresses"]))
        return JoinedDevice(
            device_id=str(answer["device_id"]),
            fleet=str(answer["fleet"]),
            role=str(answer["role"]),
            ca_fingerprint=token.ca_fingerprint,
            addresses=tuple(dict.fromkeys([site.address, *known, *token.addresses])),
            broker_port=int(answer["broker"]["port"]),
            broker_host=answer["broker"].get("host"),
            shards=dict(wishes.shards),
            accelerator=wishes.accelerator,
            threads=wishes.threads,
            peer_port=wishes.peer_port,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NetworkError(f"{site.address} answers nonsense to a join: {error!r}") from None
