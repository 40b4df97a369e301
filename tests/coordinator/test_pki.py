from __future__ import annotations

import contextlib
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from edgefl.coordinator import pki
from edgefl.core.errors import ConfigError, JoinError, UsageError

STRICT = ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN


@pytest.fixture(scope="module")
def authority() -> pki.KeyPair:
    return pki.create_authority("lab")


def _context(side: int, authority: pki.KeyPair, own: pki.KeyPair, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.load_verify_locations(cadata=authority.cert_pem.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= STRICT
    (folder / "c.pem").write_bytes(own.cert_pem)
    (folder / "k.pem").write_bytes(own.key_pem)
    context.load_cert_chain(folder / "c.pem", folder / "k.pem")
    return context


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(6):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0], ends[1]


def test_a_renewed_ca_and_its_former_certificate_vouch_for_each_other_s_leaves(
    authority: pki.KeyPair, tmp_path: Path
) -> None:
    renewed = pki.renew_authority(authority)
    assert renewed.cert_pem != authority.cert_pem
    for trusted, signer in ((authority, renewed), (renewed, authority)):
        server = pki.issue_server_certificate(signer, ["localhost"])
        client = pki.issue_client_certificate(signer, "pi-1")
        ends = _handshake(
            _context(ssl.PROTOCOL_TLS_CLIENT, trusted, client, tmp_path),
            _context(ssl.PROTOCOL_TLS_SERVER, trusted, server, tmp_path),
            "localhost",
        )
        assert all(end.version() for end in ends)
    stranger = pki.issue_server_certificate(pki.create_authority("lab"), ["localhost"])
    ends = [
        _context(ssl.PROTOCOL_TLS_CLIENT, renewed, pki.issue_client_certificate(renewed, "pi-1"), tmp_path),
        _context(ssl.PROTOCOL_TLS_SERVER, renewed, stranger, tmp_path),
    ]
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(*ends, "localhost")


def _request(key: object, name: str = "pi-1") -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())  # type: ignore[arg-type]
    return request.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("host", ["pi.local", "192.168.1.10", "fd00::2", "127.0.0.1"])
def test_server_and_client_verify_each_other_under_strict_rules(
    authority: pki.KeyPair, tmp_path: Path, host: str
) -> None:
    hosts = ["pi.local", "192.168.1.10", "fd00::2", "127.0.0.1"]
    server = _context(ssl.PROTOCOL_TLS_SERVER, authority, pki.issue_server_certificate(authority, hosts), tmp_path)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, authority, pki.issue_client_certificate(authority, "pi-1"), tmp_path)
    ours, theirs = _handshake(client, server, host)
    assert ours.version() == "TLSv1.3"
    assert theirs.getpeercert()["subject"] == ((("commonName", "pi-1"),),)  # type: ignore[index]


def test_a_server_certificate_is_no_good_for_other_hosts(authority: pki.KeyPair, tmp_path: Path) -> None:
    server = _context(
        ssl.PROTOCOL_TLS_SERVER, authority, pki.issue_server_certificate(authority, ["pi.local"]), tmp_path
    )
    client = _context(ssl.PROTOCOL_TLS_CLIENT, authority, pki.issue_client_certificate(authority, "pi-1"), tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        _handshake(client, server, "other.local")


def test_a_device_certificate_cannot_serve(authority: pki.KeyPair, tmp_path: Path) -> None:
    server = _context(ssl.PROTOCOL_TLS_SERVER, authority, pki.issue_client_certificate(authority, "pi-1"), tmp_path)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, authority, pki.issue_client_certificate(authority, "pi-2"), tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        _handshake(client, server, "pi-1")


def test_certificates_are_valid_for_a_board_whose_clock_starts_in_1970(authority: pki.KeyPair) -> None:
    for pem in (authority.cert_pem, pki.issue_client_certificate(authority, "pi-1").cert_pem):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc.year == 1970
        assert certificate.not_valid_after_utc.year >= 2026


def test_a_signed_request_gets_the_name_that_was_given_not_the_one_it_wishes(authority: pki.KeyPair) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = pki.sign_request(authority, _request(key, "coordinator"), "pi-1")
    certificate = x509.load_pem_x509_certificate(pem)
    assert certificate.subject.rfc4514_string() == "CN=pi-1"
    assert certificate.public_key() == key.public_key()


def test_flowers_p384_keys_are_signed_too(authority: pki.KeyPair) -> None:
    assert pki.sign_request(authority, _request(ec.generate_private_key(ec.SECP384R1())), "pi-1")


def test_a_request_with_a_broken_signature_is_refused(authority: pki.KeyPair) -> None:
    request = x509.load_pem_x509_csr(_request(ec.generate_private_key(ec.SECP256R1())))
    raw = bytearray(request.public_bytes(serialization.Encoding.DER))
    raw[raw.index(b"pi-1")] ^= 1
    damaged = x509.load_der_x509_csr(bytes(raw)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(JoinError, match="not signed by its own key"):
        pki.sign_request(authority, damaged, "pi-1")


def test_a_request_with_an_rsa_key_is_refused(authority: pki.KeyPair) -> None:
    with pytest.raises(JoinError, match=r"P-256 or P-384"):
        pki.sign_request(authority, _request(rsa.generate_private_key(65537, 2048)), "pi-1")


@pytest.mark.parametrize("body", [b"", b"nonsense", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END"])
def test_a_request_that_is_none_is_refused(authority: pki.KeyPair, body: bytes) -> None:
    with pytest.raises(JoinError, match="cannot be read"):
        pki.sign_request(authority, body, "pi-1")


@pytest.mark.parametrize("host", ["", "pi.local:8000", "https://pi.local", "a b", "x" * 300])
def test_a_host_that_is_neither_name_nor_address_is_refused(authority: pki.KeyPair, host: str) -> None:
    with pytest.raises(UsageError, match="host"):
        pki.issue_server_certificate(authority, [host])


def test_fingerprint_is_the_key_s_and_serials_differ(authority: pki.KeyPair) -> None:
    first, second = pki.issue_client_certificate(authority, "a"), pki.issue_client_certificate(authority, "a")
    assert len(pki.compute_fingerprint(authority.cert_pem)) == 64
    assert pki.compute_fingerprint(first.cert_pem) != pki.compute_fingerprint(second.cert_pem)
    assert pki.get_serial(first.cert_pem) != pki.get_serial(second.cert_pem)


def test_private_keys_stay_out_of_the_repr(authority: pki.KeyPair) -> None:
    assert "PRIVATE" not in repr(authority)


def test_a_damaged_authority_is_named(authority: pki.KeyPair) -> None:
    broken = pki.KeyPair(key_pem=b"-----BEGIN", cert_pem=authority.cert_pem)
    with pytest.raises(ConfigError, match="private key cannot be read"):
        pki.issue_client_certificate(broken, "pi-1")


def test_a_revoked_certificate_is_refused_under_strict_rules_and_the_newer_list_counts(
    authority: pki.KeyPair, tmp_path: Path
) -> None:
    revoked, other = pki.issue_client_certificate(authority, "pi-1"), pki.issue_client_certificate(authority, "pi-2")
    server = _context(
        ssl.PROTOCOL_TLS_SERVER, authority, pki.issue_server_certificate(authority, ["pi.local"]), tmp_path
    )
    lists = [
        pki.make_revocation_list(authority, serials, number=number)
        for number, serials in ((1, []), (2, [pki.get_serial(revoked.cert_pem)]))
    ]
    assert [pki.parse_revocation_number(crl) for crl in (*lists, b"none")] == [1, 2, 0]
    for crl in lists:
        (tmp_path / "crl.pem").write_bytes(crl)
        server.load_verify_locations(tmp_path / "crl.pem")
    server.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    for pair, is_refused in ((other, False), (revoked, True)):
        client = _context(ssl.PROTOCOL_TLS_CLIENT, authority, pair, tmp_path)
        if is_refused:
            with pytest.raises(ssl.SSLCertVerificationError, match="certificate revoked"):
                _handshake(client, server, "pi.local")
        else:
            _handshake(client, server, "pi.local")


@pytest.mark.parametrize("days", [1.0, 90.0, 1e6])
def test_a_certificate_lives_as_long_as_is_wanted_and_no_longer_than_the_ca(
    authority: pki.KeyPair, tmp_path: Path, days: float
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = pki.sign_request(authority, _request(key), "pi-1", days=days)
    left_days = (pki.get_expiry(pem) - time.time()) / 86_400
    wanted = min(days, (pki.get_expiry(authority.cert_pem) - time.time()) / 86_400)
    assert left_days == pytest.approx(wanted, abs=0.01)
    pair = pki.KeyPair(
        key_pem=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        cert_pem=pem,
    )
    server = _context(
        ssl.PROTOCOL_TLS_SERVER, authority, pki.issue_server_certificate(authority, ["pi.local"], days=days), tmp_path
    )
    _handshake(_context(ssl.PROTOCOL_TLS_CLIENT, authority, pair, tmp_path), server, "pi.local")
