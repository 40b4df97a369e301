"""When certificates are renewed, and the coordinator's own ones: it renews those itself."""

from __future__ import annotations

from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.directory import CoordinatorDirectory, issue_own
from edgefl.errors import ConfigError

DAY_S = 86_400.0


def renewal_window(life_s: float, now: float) -> tuple[float, float]:
    """Returns two instants in unix seconds: a certificate that ends before or after is to be renewed.

    The first is a third of its life ahead; one that ends after the second was made when certificates lived longer.
    """
    now = pki.issuing_time(now)
    return now + life_s / 3, now + life_s + DAY_S


def renew_own(directory: CoordinatorDirectory, *, now: float) -> bool:
    """Returns whether the server's and the coordinator's own certificate were made anew, since it was time.

    It is at two thirds of their life, when they are good for longer than is wanted now, or when one does not belong
    to its key: a power cut came between the two.
    """
    pairs = ((directory.server_cert, directory.server_key), (directory.client_cert, directory.client_key))
    life_s = directory.certificates.server_days * DAY_S
    if all(_is_good(cert, key, life_s=life_s, now=now) for cert, key in pairs):
        return False
    issue_own(directory)
    return True


def own_expiries(directory: CoordinatorDirectory) -> dict[str, float]:
    """Returns when each of the coordinator's certificates ends, in unix seconds."""
    files = {"ca": directory.ca_cert, "server": directory.server_cert, "coordinator": directory.client_cert}
    return {name: pki.expires_at(path.read_bytes()) for name, path in files.items()}


def _is_good(cert: Path, key: Path, *, life_s: float, now: float) -> bool:
    try:
        cert_pem, key_pem = cert.read_bytes(), key.read_bytes()
        earliest, latest = renewal_window(life_s, now)
        return pki.belong_together(cert_pem, key_pem) and earliest <= pki.expires_at(cert_pem) <= latest
    except (OSError, ConfigError):
        return False
