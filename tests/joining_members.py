"""A fleet's directory and store with members in it, whose keys the tests hold."""

from __future__ import annotations

import time
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.directory import init_directory, token_hash
from edgefl.coordinator.joining.tokens import TokenTerms, make_token
from edgefl.device.joining.keys import new_key, public_pem, request_pem
from edgefl.storage.certificate_rows import note_issued
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
        token = make_token(self.store, self.directory, TokenTerms(), now=AT)
        key = self.keys[name] = new_key()
        cert = pki.sign_request(self.directory.authority(), request_pem(key, name), name)
        self.store.enroll_device(
            token_id=token.token_id, secret_sha256=token_hash(token.secret), now=AT, device_id=name,
            public_key=public_pem(key), role="trainer", certificate=lambda: pki.serial(cert), version="1",
        )  # fmt: skip
        note_issued(self.store, serial=pki.serial(cert), ends_at=pki.expires_at(cert), at=AT, device_id=name)
        return pki.serial(cert)
