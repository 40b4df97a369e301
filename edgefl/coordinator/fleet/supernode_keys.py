"""Public keys of stock SuperNodes."""

from __future__ import annotations

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, SECP521R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from edgefl.core.errors import UsageError


def parse_supernode_key(text: str) -> bytes:
    """Returns a SuperNode's public key as its requests name it: PEM.

    Args:
        text: the key, in OpenSSH's form, with any comment, or PEM.

    Raises:
        UsageError: it is no public key of a curve of NIST, as Flower asks for.
    """
    if "PRIVATE KEY-----" in text:
        raise UsageError("this is the private key, which stays with the SuperNode; give the public one: node.pub")
    content = text.strip().encode(errors="replace")
    try:
        load = load_ssh_public_key if content.startswith(b"ecdsa-") else load_pem_public_key
        key = load(content)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1 | SECP384R1 | SECP521R1):
        raise UsageError(
            "the public key of a SuperNode must be one of ECDSA (P-256, P-384 or P-521), in OpenSSH's form or PEM, "
            f"got {text[:40]!a}; make one: ssh-keygen -t ecdsa -b 384 -N '' -f node"
        )
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
