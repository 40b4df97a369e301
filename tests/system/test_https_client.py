import datetime as dt
import ssl
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from edgefl.coordinator import pki
from edgefl.core.errors import NetworkError, WrongCaError
from edgefl.system.https_client import create_pinned_context, fetch_ca, fetch_coordinator_info, post_json

YEAR_S = 365 * 86400.0


def _expired(directory):
    """Gives the server the same certificate, ended in 2001: to it, the board's clock is far ahead."""
    old = x509.load_pem_x509_certificate(directory.server_cert.read_bytes())
    builder = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(old.serial_number)
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(dt.datetime(2001, 1, 1, tzinfo=dt.UTC))
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    key = serialization.load_pem_private_key(directory.ca_key.read_bytes(), None)
    directory.server_cert.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def front_door(module_front_door):
    module_front_door.forget()
    return module_front_door


def test_the_ca_is_fetched_when_it_is_the_token_s(front_door):
    expected = front_door.directory.ca_cert.read_bytes()
    assert fetch_ca(front_door.address, pki.compute_fingerprint(expected)) == expected
    with pytest.raises(WrongCaError, match=r"the token names 0000000000000000…"):
        fetch_ca(front_door.address, "0" * 64)
    with pytest.raises(NetworkError, match=r"nowhere\.invalid:8000 cannot be reached"):
        fetch_ca("nowhere.invalid:8000", "0" * 64)


@pytest.mark.parametrize("kind", ["CERTIFICATE", "TRUSTED CERTIFICATE", "X509 CERTIFICATE"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_ca_that_somebody_in_between_adds_to_the_token_s_is_not_trusted(front_door, monkeypatch, kind, is_first):
    real, impostor = pki.create_authority("lab").cert_pem, front_door
    added = impostor.directory.ca_cert.read_bytes().replace(b" CERTIFICATE", b" " + kind.encode())
    told = [added, real] if is_first else [real, added]
    monkeypatch.setattr("edgefl.system.https_client.request", lambda *_args, **_options: (200, b"".join(told)))
    try:
        trusted = fetch_ca(impostor.address, pki.compute_fingerprint(real))
    except WrongCaError:
        return
    finally:
        monkeypatch.undo()
    assert trusted == real
    for context in (
        create_pinned_context(trusted),
        create_pinned_context(b"".join(told)),
    ):  # the latter was kept before
        with pytest.raises(WrongCaError):
            fetch_coordinator_info(impostor.address, context)


def test_skew_is_the_coordinator_s_clock_minus_ours(make_front_door):
    door = make_front_door(clock=lambda: time.time() - 3 * YEAR_S)
    hello = fetch_coordinator_info(door.address, create_pinned_context(door.directory.ca_cert.read_bytes()))
    assert hello.skew_s == pytest.approx(-3 * YEAR_S, abs=0.5)
    assert (hello.fleet, hello.addresses, hello.broker_port) == ("lab", (door.address,), 18883)


def test_a_certificate_that_our_clock_calls_expired_is_accepted(make_front_door):
    owner = make_front_door().directory
    _expired(owner)
    door = make_front_door(server=(owner.server_cert, owner.server_key))
    with pytest.raises(WrongCaError, match="expired"):
        fetch_coordinator_info(door.address, ssl.create_default_context(cadata=owner.ca_cert.read_text()))
    assert fetch_coordinator_info(door.address, create_pinned_context(owner.ca_cert.read_bytes())).fleet == "lab"


def test_a_certificate_of_another_ca_is_refused(front_door, make_front_door):
    other = make_front_door()
    context = create_pinned_context(front_door.directory.ca_cert.read_bytes())
    with pytest.raises(WrongCaError, match="not from this fleet's CA"):
        fetch_coordinator_info(other.address, context)
    assert other.requests == []


def test_the_system_s_certificate_authorities_are_not_trusted(front_door):
    context = create_pinned_context(front_door.directory.ca_cert.read_bytes())
    assert [ca["subject"] for ca in context.get_ca_certs()] == [((("commonName", "edgefl lab CA"),),)]
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.verify_flags & ssl.VERIFY_X509_STRICT


def test_errors_of_the_coordinator_are_raised_as_themselves_and_pages_of_others_are_called_so(front_door):
    context = create_pinned_context(front_door.directory.ca_cert.read_bytes())
    with pytest.raises(NetworkError, match="malformed join request"):
        post_json(front_door.address, context, "/edgefl/v1/enroll", {"name": "pi"})
    with pytest.raises(NetworkError, match="no edgefl coordinator: it answered 404"):
        post_json(front_door.address, context, "/other", {})
