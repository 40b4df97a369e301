"""Messages of edges in one body with something else."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.core.errors import NetworkError
from edgefl.core.types import PeerMessage
from edgefl.decentralised.message_bundle import decode_messages, encode_messages

MAIL = (
    PeerMessage(edge=("a", "b"), step=3, body=b"one"),
    PeerMessage(edge=("a", "c"), step=2**40, body=b"", is_reply=True),
)


@pytest.mark.parametrize("mail", [(), MAIL])
@pytest.mark.parametrize("rest", [b"", b"a model"])
def test_what_is_packed_comes_out(mail: tuple[PeerMessage, ...], rest: bytes) -> None:
    told, body = encode_messages(mail, rest)
    assert decode_messages(told, body) == (mail, rest)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"a": 1},
        [["a", "b", 1, 0]],
        [["a", "b", 1, 0, 99]],
        [["a", "b", -1, 0, 1]],
        [["a", "b", 1.5, 0, 1]],
        [["a", 7, 1, 0, 1]],
        ["a"],
        [["a", "b", 1, 0, 0]] * 5000,
    ],
)
def test_a_list_that_does_not_fit_the_body_is_refused(told: Any) -> None:
    with pytest.raises(NetworkError, match="message"):
        decode_messages(told, b"body")
