from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.enrolment.tokens import format_join_command, make_token, parse_ttl
from edgefl.core.errors import UsageError
from edgefl.core.protocol import JoinToken
from edgefl.storage.store import Store


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("24h", 86400), ("7d", 604800), ("1.5H", 5400), ("2w", 1209600)]
)
def test_a_lifetime_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert parse_ttl(text) == seconds


def test_a_lifetime_that_is_none_is_refused() -> None:
    for text in ("", "24", "0h", "-1h", "h", "1y", "4000d", "1h30m", "nan h"):
        with pytest.raises(UsageError, match="lifetime"):
            parse_ttl(text)


def test_a_token_says_whom_to_trust_and_where_and_the_store_has_its_hash_and_not_the_secret(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["pi.local", "10.0.0.5"], fleet="lab")
    with Store.open(directory.database) as store:
        token = make_token(store, directory, now=1000.0, ttl_s=60, uses=3, groups=("roof",))
        (record,) = store.list_tokens()
    assert (record.token_id, record.expires_at, record.uses_left) == (token.token_id, 1060, 3)
    assert record.groups == ("roof",)
    raw = directory.database.read_bytes() + b"".join(p.read_bytes() for p in directory.root.glob("edgefl.db-*"))
    assert token.secret.encode() not in raw
    assert hashlib.sha256(token.secret.encode()).hexdigest().encode() in raw
    assert len(token.secret) >= 24
    assert token.ca_fingerprint == directory.compute_ca_fingerprint()
    assert token.addresses == ("pi.local:8000", "10.0.0.5:8000")
    line = format_join_command(token)
    variable, _, command = line.partition(" ")
    assert JoinToken.parse(variable.removeprefix("EDGEFL_JOIN_TOKEN=")) == token
    assert command == "edgefl device join pi.local:8000 --shard TASK=PATH", "the token stands in no argument"


def test_terms_that_make_no_sense_are_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["pi.local"])
    with Store.open(directory.database) as store:
        for terms in ({"uses": 0}, {"uses": 10**9}, {"role": "boss"}, {"groups": ("A b",)}):
            with pytest.raises(UsageError):
                make_token(store, directory, now=0.0, **terms)
        assert store.list_tokens() == []
