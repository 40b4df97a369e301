"""The fleet's own certificate authority: one CA, one server certificate, one client certificate per device.

Everything verifies under OpenSSL's strict rules (RFC 5280; Python 3.13 switches them on): the CA carries critical
basicConstraints and keyUsage and a key identifier, every leaf names the CA's key.

Dates: certificates are valid from 1970-01-01. A board without a clock battery starts there (or at the build date of
its system) and must still be able to join, and a certificate that is valid from its making would lock out every
board whose clock is a little behind. The CA ends in 20 years and is renewed, with the same key, long before; what it
signs ends in days (`[certificates]`), never after it, and is renewed long before, by its holder.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgefl.core.errors import ConfigError, JoinError, UsageError
from edgefl.core.protocol import certificate_fingerprint

VALID_FROM = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
CA_YEARS = 20
CLIENT_DAYS = 90.0
SERVER_DAYS = 730.0
# A coordinator whose own clock stands in 1970 must not make a CA that ends in 1990.
EARLIEST_NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
CRL_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
MAX_CN = 64
HOST_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?\Z")
PARSE_ERRORS = (ValueError, TypeError, KeyError, UnsupportedAlgorithm, x509.InvalidVersion)
"""Errors of the parser for bytes that are no certificate, request, list or key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A private key (PKCS #8) and its certificate, both PEM; the key stays out of every repr."""

    key_pem: bytes = field(repr=False)
    cert_pem: bytes


def create_authority(fleet: str) -> KeyPair:
    """Returns a new self-signed CA (EC P-256) for a fleet."""
    return _make_authority(ec.generate_private_key(ec.SECP256R1()), _make_name(f"edgefl {fleet} CA"))


def renew_authority(authority: KeyPair) -> KeyPair:
    """Returns the CA with the same key and name, and a full validity period.

    Trust in the former certificate covers what the new one signs, and the other way round: fingerprints in tokens
    and state directories are the key's.
    """
    return _make_authority(_load_key(authority.key_pem), _load_certificate(authority.cert_pem).subject)


def issue_server_certificate(authority: KeyPair, hosts: Sequence[str], *, days: float = SERVER_DAYS) -> KeyPair:
    """Returns a server certificate for every name and address in `hosts`, valid for `days`.

    Raises:
        UsageError: `hosts` is empty or holds something that is neither a name nor an address.
    """
    if not hosts:
        raise UsageError("a server certificate needs at least one host name or address, got none")
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_parse_general_name(host) for host in dict.fromkeys(hosts)]
    certificate = _sign_leaf(
        authority, key.public_key(), hosts[0], names=names, usage=ExtendedKeyUsageOID.SERVER_AUTH, days=days
    )
    return _make_key_pair(key, certificate)


def issue_client_certificate(authority: KeyPair, name: str, *, days: float = CLIENT_DAYS) -> KeyPair:
    """Returns a client certificate whose common name is `name`, the identity for both brokers."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _make_key_pair(key, _sign_client(authority, key.public_key(), name, days))


def sign_request(authority: KeyPair, csr_pem: bytes, name: str, *, days: float = CLIENT_DAYS) -> bytes:
    """Returns a client certificate (PEM) for the key of a certificate request, valid for `days`.

    Only the key of the request is used; its subject and extensions are ignored.

    Raises:
        JoinError: the request is damaged, its signature does not prove that the sender has the key, or the key is
            not EC P-256 or P-384.
    """
    return _encode_certificate(_sign_client(authority, verify_request(csr_pem), name, days))


def make_revocation_list(authority: KeyPair, serials: Iterable[str], *, number: int) -> bytes:
    """Returns the revocation list (CRL, PEM) of certificates, by their serials in hexadecimal.

    Of two lists OpenSSL uses the one of the later date, and none of a future date; so the `number` is the date, in
    seconds from 1970: whatever the clocks do, the higher number is the newer list.
    """
    issuer, key = _load_certificate(authority.cert_pem), _load_key(authority.key_pem)
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer.subject)
        .last_update(CRL_EPOCH + dt.timedelta(seconds=number))
        .next_update(issuer.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    for text in sorted(serials):
        revoked = x509.RevokedCertificateBuilder().serial_number(int(text, 16)).revocation_date(CRL_EPOCH)
        builder = builder.add_revoked_certificate(revoked.build())
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def parse_revocation_number(crl_pem: bytes) -> int:
    """Returns the number of a revocation list, 0 for anything else."""
    try:
        crl = x509.load_pem_x509_crl(crl_pem)
        return int(crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number)
    except (*PARSE_ERRORS, x509.ExtensionNotFound):
        return 0


def verify_request(csr_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Returns the public key of a certificate request after proof of possession; raises as `sign_request`."""
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        is_signature_valid = request.is_signature_valid
    except (*PARSE_ERRORS, InvalidSignature) as error:
        raise JoinError(f"the certificate request cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1):
        raise JoinError("the key of the certificate request must be EC P-256 or P-384")
    if not is_signature_valid:
        raise JoinError("the certificate request is not signed by its own key")
    return key


def compute_fingerprint(cert_pem: bytes) -> str:
    """Returns the SHA-256 of the certificate's public key (SubjectPublicKeyInfo), 64 hexadecimal digits."""
    return certificate_fingerprint(cert_pem)


def get_serial(cert_pem: bytes) -> str:
    """Returns the certificate's serial number in hexadecimal."""
    return f"{_load_certificate(cert_pem).serial_number:x}"


def get_expiry(cert_pem: bytes) -> float:
    """Returns the end of a certificate's validity, in Unix seconds."""
    return _load_certificate(cert_pem).not_valid_after_utc.timestamp()


def clamp_issue_time(now: float) -> float:
    """Returns `now` (Unix seconds), at least `EARLIEST_NOW`: a clock may stand in 1970."""
    return max(now, EARLIEST_NOW.timestamp())


def is_key_pair(cert_pem: bytes, key_pem: bytes) -> bool:
    """Returns whether a certificate is for this private key; False also when one of them cannot be read."""
    try:
        return _load_certificate(cert_pem).public_key() == _load_key(key_pem).public_key()
    except (ConfigError, *PARSE_ERRORS):  # the certificate is parsed on loading, its key only on access
        return False


def get_server_hosts(cert_pem: bytes) -> tuple[str, ...]:
    """Returns the names and addresses of a server certificate."""
    names = _load_certificate(cert_pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return tuple(str(name.value) for name in names)


def _make_authority(key: ec.EllipticCurvePrivateKey, name: x509.Name) -> KeyPair:
    builder = (
        _make_builder(name, name, key.public_key(), _now() + dt.timedelta(days=CA_YEARS * 365 + 5))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
    )
    return _make_key_pair(key, builder.sign(key, hashes.SHA256()))


def _sign_client(authority: KeyPair, key: ec.EllipticCurvePublicKey, name: str, days: float) -> x509.Certificate:
    if not name or len(name) > MAX_CN:
        raise UsageError(f"a certificate name must have 1 to {MAX_CN} characters, got {len(name)}")
    usage = ExtendedKeyUsageOID.CLIENT_AUTH
    return _sign_leaf(authority, key, name, names=[x509.DNSName(name)], usage=usage, days=days)


def _sign_leaf(
    authority: KeyPair,
    key: ec.EllipticCurvePublicKey,
    common_name: str,
    *,
    names: Iterable[x509.GeneralName],
    usage: x509.ObjectIdentifier,
    days: float,
) -> x509.Certificate:
    issuer = _load_certificate(authority.cert_pem)
    issuer_key = _load_key(authority.key_pem)
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    valid_to = min(_now() + dt.timedelta(days=days), issuer.not_valid_after_utc)
    builder = (
        _make_builder(_make_name(common_name), issuer.subject, key, valid_to)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256())


def _now() -> dt.datetime:
    return max(dt.datetime.now(dt.UTC), EARLIEST_NOW).replace(microsecond=0)


def _make_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_to: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(valid_to)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _make_key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _make_name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:MAX_CN])])


def _parse_general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    try:
        name = host.encode("idna").decode().lower()
    except UnicodeError:
        name = ""
    if not HOST_NAME.match(name):
        raise UsageError(f"a host must be a name or an address without a port, got {host!r}")
    return x509.DNSName(name)


def _load_certificate(cert_pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(cert_pem)
    except PARSE_ERRORS as error:
        raise ConfigError(f"the certificate cannot be read: {error}") from None


def _load_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except PARSE_ERRORS as error:
        raise ConfigError(f"the private key cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the private key must be an EC key")
    return key


def _encode_certificate(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _make_key_pair(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> KeyPair:
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return KeyPair(key_pem=key_pem, cert_pem=_encode_certificate(certificate))
