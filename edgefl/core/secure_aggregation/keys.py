"""Keys of secure aggregation: X25519 pairs, HKDF-SHA256, ChaCha20 masks, encrypted shares, boards' certificates."""

from __future__ import annotations

import hashlib
import hmac
from typing import Protocol

import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from edgefl.core.errors import SecureAggregationError
from edgefl.core.types import Array

KEY_BYTES = 32
_BLOCK_WORDS = 256 * 1024
_NONCE = bytes(12)


class Identity(Protocol):
    """Who a board is to the other boards: it signs, and verifies what they have signed."""

    @property
    def device_id(self) -> str: ...
    @property
    def certificate(self) -> bytes: ...
    def sign(self, data: bytes) -> bytes: ...
    def verify(self, device_id: str, certificate: bytes, data: bytes, signature: bytes) -> None:
        """Raises a `SecureAggregationError` unless the board with this certificate has signed the data."""


class CertificateIdentity:
    """Identity by a board's client certificate, which the fleet's authority has signed.

    Args:
        device_id: the common name of the certificate.
        key_pem, cert_pem: of this board.
        ca_pem: the authority, whose key signs all boards' certificates.
    """

    def __init__(self, device_id: str, *, key_pem: bytes, cert_pem: bytes, ca_pem: bytes) -> None:
        key = serialization.load_pem_private_key(key_pem, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self.device_id, self._key = device_id, key
        self._authority = x509.load_pem_x509_certificate(ca_pem)
        self.certificate = x509.load_pem_x509_certificate(cert_pem).public_bytes(serialization.Encoding.DER)

    def sign(self, data: bytes) -> bytes:
        """Returns r and s, each as long as the curve's order: all signatures of a key have one size."""
        first, second = utils.decode_dss_signature(self._key.sign(data, ec.ECDSA(hashes.SHA256())))
        size = (self._key.key_size + 7) // 8
        return first.to_bytes(size, "big") + second.to_bytes(size, "big")

    def verify(self, device_id: str, certificate: bytes, data: bytes, signature: bytes) -> None:
        try:
            found = x509.load_der_x509_certificate(certificate)
            found.verify_directly_issued_by(self._authority)
            names = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            key, half = found.public_key(), len(signature) // 2
            if not isinstance(key, ec.EllipticCurvePublicKey) or [name.value for name in names] != [device_id]:
                raise SecureAggregationError(f"the certificate of {device_id} is another's")
            numbers = int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big")
            key.verify(utils.encode_dss_signature(*numbers), data, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
            raise SecureAggregationError(
                f"what came as of {device_id} is not signed by it, or its certificate is not the fleet's"
            ) from None


def generate_key() -> bytes:
    """Returns a new private key of X25519."""
    return X25519PrivateKey.generate().private_bytes_raw()


def get_public_key(private_key: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def agree_key(private_key: bytes, public_key: bytes, purpose: bytes) -> bytes:
    """Returns the key that two boards share for one purpose.

    Raises:
        SecureAggregationError: the other board's public key is of low order.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private_key).exchange(
            X25519PublicKey.from_public_bytes(public_key)
        )
    except ValueError:
        raise SecureAggregationError("a board's public key is none") from None
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(shared)


def derive_key(seed: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(seed)


def commit_to(seed: bytes) -> bytes:
    """Returns what binds a board to a random seed and says nothing of it."""
    return hashlib.sha256(b"edgefl seed" + seed).digest()


def is_committed(seed: bytes, commitment: bytes) -> bool:
    return hmac.compare_digest(commit_to(seed), commitment)


def add_mask(words: Array, key: bytes, *, sign: int = 1) -> None:
    """Adds the key stream of ChaCha20 to a vector of uint32 in place, or subtracts it; a key is used once."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros = bytes(4 * min(_BLOCK_WORDS, words.size))
    for start in range(0, words.size, _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        mask = np.frombuffer(stream.update(zeros[: 4 * block.size]), "<u4")
        (np.add if sign > 0 else np.subtract)(block, mask, out=block)


def encrypt(key: bytes, content: bytes, context: bytes) -> bytes:
    """Returns content that only the holder of the key reads, and nobody changes; a key encrypts once."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, context)


def decrypt(key: bytes, content: bytes, context: bytes) -> bytes:
    """Returns what was encrypted.

    Raises:
        SecureAggregationError: it was not by this key, or has changed.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, content, context)
    except (InvalidTag, ValueError):
        raise SecureAggregationError("the share of a board was not encrypted for this one, or has changed") from None
