"""Renewal windows of certificates, and renewal of the coordinator's own."""

from __future__ import annotations

from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.directory import CoordinatorDirectory, issue_own_certificates
from edgefl.core.errors import ConfigError
from edgefl.system.atomic_files import write_atomic

DAY_S = 86_400.0
CA_RENEWAL_MARGIN_S = 5 * 365 * DAY_S
"""With less of its lifetime left the CA's certificate is renewed, at the next start of the coordinator."""


def compute_renewal_window(lifetime_s: float, now: float, *, ca_ends_at: float) -> tuple[float, float]:
    """Returns (earliest, latest) expiry in Unix seconds; a certificate that ends outside is due for renewal.

    The first is a third of the lifetime ahead, but not after the CA's end, since no certificate can end later; one
    that ends after the second was issued with a longer lifetime.
    """
    now = pki.clamp_issue_time(now)
    return min(now + lifetime_s / 3, ca_ends_at), now + lifetime_s + DAY_S


def renew_ca(directory: CoordinatorDirectory, *, now: float) -> bool:
    """Renews the CA's certificate if it ends soon, and returns whether it did; its key stays.

    Devices and operators trust the key, so they need no update. Call it before the certificate is loaded.
    """
    authority = directory.load_authority()
    if pki.get_expiry(authority.cert_pem) - pki.clamp_issue_time(now) >= CA_RENEWAL_MARGIN_S:
        return False
    write_atomic(directory.ca_cert, pki.renew_authority(authority).cert_pem)
    return True


def renew_own_certificates(directory: CoordinatorDirectory, *, now: float) -> bool:
    """Renews the server's and the coordinator's client certificate if due, and returns whether it did.

    They are due at two thirds of their lifetime, when it is longer than the present setting, or when one does not
    match its key, after a power cut between writing the two.
    """
    pairs = ((directory.server_cert, directory.server_key), (directory.client_cert, directory.client_key))
    lifetime_s = directory.certificates.server_days * DAY_S
    window = compute_renewal_window(lifetime_s, now, ca_ends_at=pki.get_expiry(directory.ca_cert.read_bytes()))
    if all(_is_current(cert, key, *window) for cert, key in pairs):
        return False
    issue_own_certificates(directory)
    return True


def list_own_expiries(directory: CoordinatorDirectory) -> dict[str, float]:
    """Returns the expiry of each of the coordinator's certificates, in Unix seconds."""
    files = {"ca": directory.ca_cert, "server": directory.server_cert, "coordinator": directory.client_cert}
    return {name: pki.get_expiry(path.read_bytes()) for name, path in files.items()}


def _is_current(cert: Path, key: Path, earliest: float, latest: float) -> bool:
    try:
        cert_pem, key_pem = cert.read_bytes(), key.read_bytes()
        return pki.is_key_pair(cert_pem, key_pem) and earliest <= pki.get_expiry(cert_pem) <= latest
    except (OSError, ConfigError):
        return False
