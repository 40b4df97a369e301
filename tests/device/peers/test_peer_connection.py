"""Which certificates a board believes, at either end."""

import datetime as dt
import socket
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from peer_boards import eventually, is_closed

from edgefl.coordinator import pki
from edgefl.core.errors import NetworkError, NotJoinedError
from edgefl.device.peers.peer_connection import (
    FrameKind,
    PeerTls,
    TransportFrame,
    read_frame,
    verify_certificate,
    write_frame,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_the_bytes_of_a_frame_are_these_and_are_read_as_they_were_written(pair):
    frame = TransportFrame(kind=FrameKind.MESSAGE, session=5, number=258, payload=b"hi")
    write_frame(pair[0], frame, idle_timeout_s=5.0)
    sent = pair[1].recv(100)
    assert sent.hex(" ") == (
        "45 46 4c 50 01 00 02 00 02 00 00 00 05 00 00 00 00 00 00 00 02 01 00 00 00 00 00 00 68 69"
    )
    for each in (
        frame,
        TransportFrame(kind=FrameKind.ACK, session=2**64 - 1, number=2**64 - 1),
        TransportFrame(kind=FrameKind.KEEP_ALIVE),
    ):
        write_frame(pair[0], each, idle_timeout_s=5.0)
        assert read_frame(pair[1], idle_timeout_s=5.0) == each


def test_a_frame_that_breaks_off_is_told_from_one_that_is_late(pair):
    write_frame(pair[0], TransportFrame(kind=FrameKind.MESSAGE, payload=b"12345"), idle_timeout_s=5.0)
    whole = pair[1].recv(100)
    pair[0].sendall(whole[:-1])
    with pytest.raises(TimeoutError):
        read_frame(pair[1], idle_timeout_s=0.05)
    pair[0].sendall(whole[:-1])
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        read_frame(pair[1], idle_timeout_s=5.0)


AUTHORITY = pki.create_authority("lab")


def der(pem):
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def name_in(cert_pem, authority=AUTHORITY):
    return verify_certificate(der(cert_pem), x509.load_pem_x509_certificate(authority.cert_pem))


def issued(
    authority,
    names=("b",),
    *,
    is_authority=False,
    usage=ExtendedKeyUsageOID.CLIENT_AUTH,
    names_issuer=True,
    years=(1970, 2046),
):
    """A certificate by the fleet's own CA that is a little different from what a join gives."""
    issuer = x509.load_pem_x509_certificate(authority.cert_pem)
    signer = serialization.load_pem_private_key(authority.key_pem, None)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(years[0], 1, 1, tzinfo=dt.UTC))
        .not_valid_after(dt.datetime(years[1], 1, 1, tzinfo=dt.UTC))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("b")]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if names_issuer:
        identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        link = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
        builder = builder.add_extension(link, critical=False)
    cert_pem = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pki.KeyPair(key_pem=key_pem, cert_pem=cert_pem)


def test_a_certificate_of_a_join_has_the_name_of_the_device_on_any_date():
    assert name_in(pki.issue_client_certificate(AUTHORITY, "pi-1").cert_pem) == "pi-1"
    for years in ((1970, 2046), (1990, 1991), (2040, 2041)):
        assert name_in(issued(AUTHORITY, years=years).cert_pem) == "b"


@pytest.mark.parametrize(
    "changed",
    [
        {"usage": ExtendedKeyUsageOID.SERVER_AUTH},
        {"is_authority": True},
        {"names_issuer": False},
        {"names": ()},
        {"names": ("b", "c")},
    ],
)
def test_a_certificate_of_another_kind_is_refused_though_the_right_authority_signed_it(changed):
    with pytest.raises(NetworkError):
        name_in(issued(AUTHORITY, **changed).cert_pem)


def test_what_another_authority_of_the_same_name_or_a_device_itself_has_signed_is_refused():
    device = pki.issue_client_certificate(AUTHORITY, "b")
    pretended = pki.KeyPair(key_pem=device.key_pem, cert_pem=AUTHORITY.cert_pem)
    other = pki.issue_client_certificate(pki.create_authority("lab"), "b")
    for certificate in (other, issued(pretended, ("c",)), AUTHORITY):
        with pytest.raises(NetworkError):
            name_in(certificate.cert_pem)


@pytest.mark.filterwarnings("ignore:Parsed a")
def test_no_damaged_certificate_is_believed_under_another_name():
    valid = der(pki.issue_client_certificate(AUTHORITY, "pi-1").cert_pem)
    for place in range(len(valid)):
        damaged = bytearray(valid)
        damaged[place] ^= 0x55
        with pytest.raises(NetworkError):
            verify_certificate(bytes(damaged), x509.load_pem_x509_certificate(AUTHORITY.cert_pem))


def test_both_ends_are_strict(peers):
    tls = PeerTls.load(peers.tls("a"), "a")
    assert tls.server_context.verify_flags & ssl.VERIFY_X509_STRICT
    assert tls.server_context.verify_mode is ssl.CERT_REQUIRED
    assert tls.server_context.minimum_version is ssl.TLSVersion.TLSv1_2
    lax = issued(peers.authority, names_issuer=False)
    a = peers.board("a", ["b"])
    assert is_closed(peers.dial("b", a, tls=peers.tls("b", certificate=lax)))
    eventually(lambda: a.carrier.counters.refused == 1)
    with pytest.raises(NotJoinedError, match="join again"):
        PeerTls.load(peers.tls("b", certificate=lax), "b")


def test_boards_meet_whose_certificates_are_over_or_not_yet_valid(peers):
    past, future = (issued(peers.authority, ("a",), years=(1990, 1991)), issued(peers.authority, years=(2040, 2041)))
    a = peers.board("a", ["b"], tls=peers.tls("a", certificate=past))
    b = peers.board("b", ["a"], tls=peers.tls("b", certificate=future))
    for board, other in ((a, b), (b, a)):
        board.carrier.set_addresses({other.name: other.address})
        board.carrier.send(other.name, b"hello")
    a.wait_for(b"hello")
    b.wait_for(b"hello")
