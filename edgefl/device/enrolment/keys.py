"""Device key: created on the board, never leaves it, proven by a certificate request."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edgefl.core.errors import JoinError, NetworkError
from edgefl.core.protocol import certificate_fingerprint
from edgefl.core.types import Json


def parse_certificate(response: Json, key_pem: bytes) -> bytes:
    """Returns the certificate (PEM) of a coordinator's reply; raises `NetworkError` when it is for another key."""
    cert_pem = str(response.get("certificate", "")).encode()
    public_key = (
        _load_key(key_pem)
        .public_key()
        .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public_key)
    if certificate_fingerprint(cert_pem) != digest.finalize().hex():
        raise NetworkError("the coordinator answered with a certificate for another key")
    return cert_pem


def create_key() -> bytes:
    """Returns a new private key, EC P-256, as PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:  # it is encrypted, or of an unknown kind
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise JoinError("the key in the state directory is no EC key; remove the directory and join anew")
    return key


def export_public_key(key_pem: bytes) -> bytes:
    """Returns the public half of a private key, as PEM."""
    return (
        _load_key(key_pem)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def create_signing_request(key_pem: bytes, name: str) -> bytes:
    """Returns a certificate request (PEM) for a key, signed with it."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_load_key(key_pem), hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)
