"""Joining and renewing, both ends: what boards ask for, and what a coordinator answers them."""

from __future__ import annotations

import base64
import http.client
import io
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from fuzz.reader import Form, Reader, Seed
from sqlalchemy import delete, update

from edgefl import __version__
from edgefl.coordinator import pki
from edgefl.coordinator.api.sign_in import identify, parse_provider, verify_id_token
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.enrolment.enrolment_service import EnrolmentService, RenewalService
from edgefl.coordinator.enrolment.tokens import make_token
from edgefl.core.config import OpenIdSettings
from edgefl.core.protocol import JoinToken, certificate_fingerprint
from edgefl.device.enrolment.certificates import (
    create_key,
    create_signing_request,
    export_public_key,
    parse_certificate,
    parse_expiry,
)
from edgefl.device.enrolment.enroll import _parse_settings
from edgefl.device.flower.supernode import _parse_clone_reason
from edgefl.device.inference.deployments import DeployedModels, ModelOffer
from edgefl.device.rollouts.download import DownloadSource, fetch_offer, parse_json_response
from edgefl.device.updates.installations import InstalledBundles
from edgefl.storage.store import Store
from edgefl.storage.tables import DeviceTable, EventTable
from edgefl.system import https_client
from edgefl.system.diagnostics import check_certificate
from edgefl.system.https_client import _parse_json_response, fetch_coordinator_info

KEY = ec.generate_private_key(ec.SECP256R1())
PUBLIC = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def csr_pem() -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pi-1")])
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(name)
        .sign(KEY, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )


def armoured(der: bytes, what: str = "CERTIFICATE REQUEST") -> str:
    text = base64.b64encode(der).decode()
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    return "\n".join([f"-----BEGIN {what}-----", *lines, f"-----END {what}-----", ""])


def _der(pem: bytes) -> bytes:
    return base64.b64decode(b"".join(pem.strip().splitlines()[1:-1]))


def enrolments(folder: Path) -> Reader:
    """`POST /edgefl/v1/enroll`: JSON, the certificate request in it, and the key beside it."""
    directory = init_directory(folder / "c", hosts=["pi.local"], fleet="lab")
    store = Store.open(directory.database)
    service = EnrolmentService(
        directory=directory,
        store=store,
        on_enrolled=lambda *_: None,
        broker_port=8883,
        clock=lambda: 5000.0,
    )
    token = make_token(store, directory, now=5000.0, uses=1)
    value = {
        "v": 1, "token_id": token.token_id, "secret": token.secret, "name": "pi-1", "role": "trainer",
        "csr": csr_pem().decode(), "public_key": PUBLIC, "version": __version__,
        "capabilities": {"facts": {"cores": 4, "model": "Pi"}, "shards": {"digits": 90}},
    }  # fmt: skip

    def feed(data: bytes) -> None:
        json.dumps(service.enroll(data), allow_nan=False)

    def with_csr(der: bytes) -> bytes:
        return json.dumps({**value, "csr": armoured(der)}).encode()

    def with_key(der: bytes) -> bytes:
        return json.dumps({**value, "public_key": armoured(der, "PUBLIC KEY")}).encode()

    seeds = (
        Seed(content=json.dumps(value).encode(), form=Form.JSON),
        Seed(content=_der(csr_pem()), close=with_csr),
        Seed(content=_der(PUBLIC.encode()), close=with_key),
    )
    return Reader(feed=feed, seeds=seeds, close=store.close)


def renewals(folder: Path) -> Reader:
    """`POST /edgefl/v1/renew`, of a device that was known by its signature."""
    directory = init_directory(folder / "c", hosts=["pi.local"], fleet="lab")
    store = Store.open(directory.database)
    store.add_token(token_id="t", secret_sha256="ab" * 32, expires_at=2e9, uses=100, groups=())
    store.enroll_device(token_id="t", secret_sha256="ab" * 32, now=1e9, device_id="pi-1", public_key=b"before")
    now = [1e9]

    def clock() -> float:
        now[0] += 700.0
        return now[0]

    service = RenewalService(
        directory=directory, store=store, on_renewed=lambda *_: None, on_reenrolled=lambda *_: None, clock=clock
    )

    def feed(data: bytes) -> None:
        service.renew("pi-1", data)

    value = {"v": 1, "csr": csr_pem().decode()}
    seeds = (
        Seed(content=json.dumps(value).encode(), form=Form.JSON),
        Seed(content=_der(csr_pem()), close=lambda der: json.dumps({"v": 1, "csr": armoured(der)}).encode()),
    )
    return Reader(feed=feed, seeds=seeds, close=store.close)


def _ignore(_device_id: str, _public_key: bytes) -> None:
    """Ignores a new key."""


def reenrolments(folder: Path) -> Reader:
    """`POST /edgefl/v1/re-enroll`, of anybody: a certificate of the fleet, and a request by the same key."""
    directory = init_directory(folder / "c", hosts=["pi.local"], fleet="lab")
    store = Store.open(directory.database)
    store.add_token(token_id="t", secret_sha256="ab" * 32, expires_at=2e9, uses=100, groups=())
    store.enroll_device(token_id="t", secret_sha256="ab" * 32, now=1e9, device_id="pi-1", public_key=b"before")
    client = pki.issue_client_certificate(directory.load_authority(), "pi-1")
    service = RenewalService(
        directory=directory, store=store, on_renewed=lambda *_: None, on_reenrolled=lambda *_: None, clock=lambda: 1e9
    )
    csr, shown = create_signing_request(client.key_pem, "pi-1").decode(), client.cert_pem.decode()

    def feed(data: bytes) -> None:
        service.reenroll(data)
        with store.database.write() as connection:  # it has never heard of this one
            connection.execute(delete(EventTable))
            connection.execute(update(DeviceTable).values(certificate_serial=None))

    def closed(der: bytes) -> bytes:
        return json.dumps({"v": 1, "csr": csr, "certificate": armoured(der, "CERTIFICATE")}).encode()

    seeds = (
        Seed(content=json.dumps({"v": 1, "csr": csr, "certificate": shown}).encode(), form=Form.JSON),
        Seed(content=_der(client.cert_pem), close=closed),
    )
    return Reader(feed=feed, seeds=seeds, close=store.close)


def certificates(_folder: Path) -> Reader:
    """Certificates and revocation lists, wherever they are read; the first byte says what the rest is."""
    authority = pki.create_authority("lab")
    client = pki.issue_client_certificate(authority, "pi-1")
    revoked = pki.make_revocation_list(authority, ["ab"], number=7)

    def feed(data: bytes) -> None:
        kind, pem = data[:1], data[1:]
        if kind == b"r":
            assert pki.parse_revocation_number(pem) >= 0
            return
        if kind == b"k":
            pki.is_key_pair(client.cert_pem, pem)
            check_certificate("x", client.cert_pem, authority.cert_pem, key_pem=pem, now=5.0, remedy="")
            return
        check_certificate("x", pem, authority.cert_pem, now=5.0, remedy="")
        pki.is_key_pair(pem, client.key_pem)
        certificate_fingerprint(pem)
        pki.get_serial(pem)
        pki.get_expiry(pem)
        parse_expiry(pem)

    kinds = (
        (b"c", "CERTIFICATE", client.cert_pem),
        (b"r", "X509 CRL", revoked),
        (b"k", "PRIVATE KEY", client.key_pem),
    )
    seeds = []
    for mark, what, pem in kinds:
        seeds.append(Seed(content=pem, close=lambda found, mark=mark: mark + found))
        seeds.append(
            Seed(content=_der(pem), close=lambda der, mark=mark, what=what: mark + armoured(der, what).encode())
        )
    return Reader(feed=feed, seeds=tuple(seeds))


def coordinator_answers(_folder: Path) -> Reader:
    """What a device is answered: hello, its join, its certificate, offers of files; the first byte says which."""
    own = create_key()
    authority = pki.create_authority("lab")
    cert_pem = pki.sign_request(authority, csr_pem(), "pi-1")
    own_cert = _own_certificate(authority, own)
    token = JoinToken(ca_fingerprint="ab" * 32, token_id="t", secret="s", fleet="lab", addresses=("b:1",))
    wishes: Any = SimpleNamespace(shards={}, accelerator="auto", threads=None, peer_port=8884)
    site: Any = SimpleNamespace(address="pi:8000")
    source: Any = DownloadSource(address="pi:8000", tls_context=None, sign=lambda *_: {})  # type: ignore[arg-type]
    said = [b""]

    @contextmanager
    def connected(*_: Any) -> Any:
        answer = http.client.HTTPResponse(
            _Socket(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said[0]) + said[0])
        )
        answer.begin()
        yield SimpleNamespace(request=lambda *_, **__: None, getresponse=lambda: answer)

    hello = {
        "v": 1, "time": 5.5, "version": "0.9.1", "fleet": "lab", "addresses": ["a:1"], "broker": {"port": 1,
        "host": None},
        "certificates": {"earliest": 1.0, "latest": 2.0},
    }  # fmt: skip
    joined = {**hello, "device_id": "pi-1", "role": "trainer", "certificate": cert_pem.decode()}
    offer = {
        "v": 1, "deployment": "d1", "model": "ab" * 32, "sha256": "cd" * 32, "bytes": 1000, "task": "digits",
        "options": {},
        "tolerance": 0.1, "min_accuracy": 0.0, "test_fraction": 0.2,
    }  # fmt: skip
    bundle = {
        "v": 1,
        "installation": "i1",
        "sha256": "cd" * 32,
        "bytes": 9,
        "kind": "pack",
        "name": "p",
        "version": "1",
    }
    refused = {"v": 1, "error": "token-used", "message": "no uses left"}
    readers = {
        b"x": lambda body: _parse_clone_reason(httpx.Response(409, content=body)),
        b"h": lambda body: fetch_coordinator_info("pi:8000", source.tls_context),
        b"j": lambda body: _parse_settings(_parse_json_response("pi:8000", 200, body), site, token, wishes),
        b"c": lambda body: parse_certificate(_parse_json_response("pi:8000", 200, body), own),
        b"o": lambda body: ModelOffer.from_json(fetch_offer(source, DeployedModels.artefact, "d1")[0]),
        b"b": lambda body: fetch_offer(source, InstalledBundles.artefact, "i1"),
        b"e": lambda body: _parse_json_response("pi:8000", 403, body),
        b"f": lambda body: parse_json_response("pi:8000", 404, body),
    }

    def feed(data: bytes) -> None:
        said[0], real = data[1:], https_client._open_connection
        https_client._open_connection = connected  # type: ignore[assignment]  # nothing listens here
        try:
            readers.get(data[:1], readers[b"h"])(data[1:])
        finally:
            https_client._open_connection = real

    values = {
        b"h": hello, b"j": joined, b"c": {"v": 1, "certificate": own_cert.decode()}, b"o": offer, b"b": bundle,
        b"e": refused, b"f": refused, b"x": {"detail": "a copy"},
    }  # fmt: skip
    seeds = [
        Seed(content=json.dumps(value).encode(), form=Form.JSON, close=lambda found, mark=mark: mark + found)
        for mark, value in values.items()
    ]
    return Reader(feed=feed, seeds=tuple(seeds), takes_seeds=False)


class _Socket:
    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def makefile(self, *_: Any) -> Any:
        return self._content


def _own_certificate(authority: pki.KeyPair, key_pem: bytes) -> bytes:
    assert export_public_key(key_pem)
    return pki.sign_request(authority, create_signing_request(key_pem, "pi-1"), "pi-1")


def openid_answers(_folder: Path) -> Reader:
    """What an OpenID provider answers: its configuration, its keys, and ID tokens with any header and any claims."""
    from joserfc import jwt  # noqa: PLC0415 of one reader alone
    from joserfc.jwk import ECKey  # noqa: PLC0415 likewise

    issuer, now, nonce = "https://id.example", 1_000_000.0, "n"
    settings = OpenIdSettings(issuer=issuer, client_id="edgefl", admins=("a@b.c", "staff"))
    key = ECKey.import_key(
        {
            "kty": "EC", "crv": "P-256", "kid": "k", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
            "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0", "d": "jpsQnnGQmL-YBIffH1136cspYG6-0iY7X1fCE9-E9LI",
        }
    )  # fmt: skip
    keys = {"keys": [key.as_dict(private=False)]}
    claims = {
        "iss": issuer, "aud": "edgefl", "sub": "1", "iat": int(now), "exp": int(now) + 300, "nonce": nonce,
        "email": "a@b.c", "email_verified": True, "groups": ["staff", "x"],
    }  # fmt: skip
    header = {"alg": "ES256", "kid": "k"}
    token = {"id_token": jwt.encode(header, claims, key), "access_token": "a"}
    configuration = {
        "issuer": issuer, "authorization_endpoint": f"{issuer}/a", "token_endpoint": f"{issuer}/t",
        "jwks_uri": f"{issuer}/k", "token_endpoint_auth_methods_supported": ["client_secret_post"],
    }  # fmt: skip

    def verify(answer: bytes, key_set: bytes) -> object:
        return identify(verify_id_token(answer, key_set, settings, nonce=nonce, now=now), settings)

    def signed(content: bytes) -> bytes:
        """The answer with an ID token of this header and these claims, whose signature is right."""
        first, _, second = content.partition(b"\n")
        text = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (first, second))
        r, s = decode_dss_signature(key.private_key.sign(text, ec.ECDSA(hashes.SHA256())))
        signature = base64.urlsafe_b64encode(r.to_bytes(32) + s.to_bytes(32)).rstrip(b"=")
        return json.dumps({"id_token": (text + b"." + signature).decode("latin-1"), "access_token": "a"}).encode()

    readers = {
        b"c": lambda body: parse_provider(body, issuer, now=now),
        b"k": lambda body: verify(json.dumps(token).encode(), body),
        b"t": lambda body: verify(body, json.dumps(keys).encode()),
        b"i": lambda body: verify(signed(json.dumps(header).encode() + b"\n" + body), json.dumps(keys).encode()),
        b"h": lambda body: verify(signed(body + b"\n" + json.dumps(claims).encode()), json.dumps(keys).encode()),
    }

    def feed(data: bytes) -> None:
        readers.get(data[:1], readers[b"c"])(data[1:])

    values = {b"c": configuration, b"k": keys, b"t": token, b"i": claims, b"h": header}
    seeds = [
        Seed(content=json.dumps(value).encode(), form=Form.JSON, close=lambda body, kind=kind: kind + body)  # type: ignore[misc]
        for kind, value in values.items()
    ]
    return Reader(feed=feed, seeds=tuple(seeds), words=(b'"alg":"none"', b'"HS256"', b'"crit"', b'"kty":"oct"'))
