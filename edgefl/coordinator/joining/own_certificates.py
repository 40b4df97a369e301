"""When certificates are renewed, and the coordinator's own ones: it renews those itself."""

from __future__ import annotations

from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.directory import CoordinatorDirectory, issue_own
from edgefl.errors import ConfigError
from edgefl.files import write_whole

DAY_S = 86_400.0
CA_LEFT_S = 5 * 365 * DAY_S
"""With less of its life left the CA's certificate is renewed, at the next start of the coordinator."""


def renewal_window(life_s: float, now: float, *, ca_ends_at: float) -> tuple[float, float]:
    """Returns two instants in unix seconds: a certificate that ends before or after is to be renewed.

    The first is a third of its life ahead, but not after the CA's end, since no certificate is better than that; one
    that ends after the second was made when certificates lived longer.
    """
    now = pki.issuing_time(now)
    return min(now + life_s / 3, ca_ends_at), now + life_s + DAY_S


def renew_ca(directory: CoordinatorDirectory, *, now: float) -> bool:
    """Returns whether the CA's certificate got a new end, since the former one was near; its key stays.

    Boards and operators need not hear of it: what they trust is the key. To be called before anything has it open.
    """
    authority = directory.authority()
    if pki.expires_at(authority.cert_pem) - pki.issuing_time(now) >= CA_LEFT_S:
        return False
    write_whole(directory.ca_cert, pki.renewed_authority(authority).cert_pem)
    return True


def renew_own(directory: CoordinatorDirectory, *, now: float) -> bool:
    """Returns whether the server's and the coordinator's own certificate were made anew, since it was time.

    It is at two thirds of their life, when they are good for longer than is wanted now, or when one does not belong
    to its key: a power cut came between the two.
    """
    pairs = ((directory.server_cert, directory.server_key), (directory.client_cert, directory.client_key))
    life_s = directory.certificates.server_days * DAY_S
    window = renewal_window(life_s, now, ca_ends_at=pki.expires_at(directory.ca_cert.read_bytes()))
    if all(_is_good(cert, key, *window) for cert, key in pairs):
        return False
    issue_own(directory)
    return True


def own_expiries(directory: CoordinatorDirectory) -> dict[str, float]:
    """Returns when each of the coordinator's certificates ends, in unix seconds."""
    files = {"ca": directory.ca_cert, "server": directory.server_cert, "coordinator": directory.client_cert}
    return {name: pki.expires_at(path.read_bytes()) for name, path in files.items()}


def _is_good(cert: Path, key: Path, earliest: float, latest: float) -> bool:
    try:
        cert_pem, key_pem = cert.read_bytes(), key.read_bytes()
        return pki.belong_together(cert_pem, key_pem) and earliest <= pki.expires_at(cert_pem) <= latest
    except (OSError, ConfigError):
        return False
