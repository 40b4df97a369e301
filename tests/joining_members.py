"""A fleet's directory and store with members in it, whose keys the tests hold."""

from __future__ import annotations

import time
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.directory import hash_token, init_directory
from edgefl.coordinator.enrolment.tokens import make_token
from edgefl.device.enrolment.certificates import create_key, create_signing_request, export_public_key
from edgefl.storage.repositories.certificates import record_issued_certificate
from edgefl.storage.store import Store

AT = time.time()
"""Certificates are dated by this machine's clock, so these tests are, too."""


class Members:
    """`join` lets one in; `keys` are their private keys (PEM) by name."""

    def __init__(self, root: Path) -> None:
        self.directory = init_directory(root, hosts=["127.0.0.1"], fleet="lab")
        self.store = Store.open(self.directory.database)
        self.keys: dict[str, bytes] = {}

    def join(self, name: str) -> str:
        """Returns the serial of its certificate."""
        token = make_token(self.store, self.directory, now=AT)
        key = self.keys[name] = create_key()
        cert = pki.sign_request(self.directory.load_authority(), create_signing_request(key, name), name)
        self.store.enroll_device(
            token_id=token.token_id, secret_sha256=hash_token(token.secret), now=AT, device_id=name,
            public_key=export_public_key(key), role="trainer",
            issue_certificate=lambda: pki.get_serial(cert), version="1",
        )  # fmt: skip
        record_issued_certificate(
            self.store, serial=pki.get_serial(cert), expires_at=pki.get_expiry(cert), at=AT, device_id=name
        )
        return pki.get_serial(cert)
