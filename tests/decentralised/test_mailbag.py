"""Messages of edges in one body with something else."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.decentralised.mailbag import pack_mail, unpack_mail
from edgefl.errors import NetworkError
from edgefl.types import EdgeMessage

MAIL = (
    EdgeMessage(edge=("a", "b"), step=3, body=b"one"),
    EdgeMessage(edge=("a", "c"), step=2**40, body=b"", is_reply=True),
)


@pytest.mark.parametrize("mail", [(), MAIL])
@pytest.mark.parametrize("rest", [b"", b"a model"])
def test_what_is_packed_comes_out(mail: tuple[EdgeMessage, ...], rest: bytes) -> None:
    told, body = pack_mail(mail, rest)
    assert unpack_mail(told, body) == (mail, rest)


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
        unpack_mail(told, b"body")
