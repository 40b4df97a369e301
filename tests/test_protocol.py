from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import NetworkError, TokenInvalidError, UsageError, VersionError, WrongCaError
from edgefl.protocol import (
    MAX_FACTS_BYTES,
    Capabilities,
    JoinToken,
    Topic,
    check_version,
    checked_address,
    dump_json,
    error_code,
    error_from_code,
    parse_peer_topic,
    parse_topic,
    peer_topic,
    topic,
)

TOKEN = JoinToken(
    ca_fingerprint="ab" * 32,
    token_id="1a2b3c4d",
    secret="s3cret-S3cret_s3cret-S3cret_abcd",
    fleet="lab",
    addresses=("pi.local:8000", "192.168.1.10:8000", "[fd00::2]:8000"),
)


def test_a_token_is_read_as_it_was_written() -> None:
    assert JoinToken.parse(TOKEN.text()) == TOKEN


def test_a_token_is_one_word_that_no_shell_changes() -> None:
    assert TOKEN.text().startswith("efl1.")
    assert set(TOKEN.text()) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_line_breaks_in_a_paste_do_not_matter() -> None:
    text = TOKEN.text()
    assert JoinToken.parse(f"  {text[:40]}\n  {text[40:90]}\r\n{text[90:]}\n") == TOKEN


@pytest.mark.parametrize("cut", range(len(TOKEN.text())))
def test_a_truncated_paste_is_invalid_at_every_length(cut: int) -> None:
    with pytest.raises(TokenInvalidError, match="copy it whole"):
        JoinToken.parse(TOKEN.text()[:cut])


@given(place=st.integers(5, len(TOKEN.text()) - 1), letter=st.sampled_from("Aa0_-~."))
def test_a_damaged_letter_is_noticed(place: int, letter: str) -> None:
    text = TOKEN.text()
    damaged = text[:place] + letter + text[place + 1 :]
    if damaged == text:
        return
    with contextlib.suppress(TokenInvalidError):
        assert JoinToken.parse(damaged) == TOKEN  # the last letter has bits that carry nothing


@given(st.text(max_size=200))
def test_any_other_text_is_invalid(text: str) -> None:
    with pytest.raises(TokenInvalidError):
        JoinToken.parse("efl1." + text)


def test_the_secret_stays_out_of_the_repr() -> None:
    assert TOKEN.secret not in repr(TOKEN)


def test_a_topic_from_device_to_device_says_who_has_it_for_whom() -> None:
    assert peer_topic("lab", "pi-1", "pi-2") == "edgefl/v1/lab/pi-1/peer/pi-2"
    assert parse_peer_topic("edgefl/v1/lab/pi-1/peer/pi-2") == ("lab", "pi-1", "pi-2")
    with pytest.raises(NetworkError, match="not an edgefl topic"):
        parse_topic("edgefl/v1/lab/pi-1/peer/pi-2")


@pytest.mark.parametrize(
    "name",
    [
        topic("lab", "pi-1", Topic.STATUS),
        "edgefl/v1/lab/pi-1/peer",
        "edgefl/v1/lab/pi-1/peer/pi-2/more",
        "edgefl/v1/lab/pi-1/other/pi-2",
        "edgefl/v2/lab/pi-1/peer/pi-2",
        "edgefl/v1/lab/pi-1/peer/",
        "edgefl/v1/lab/+/peer/pi-2",
        "edgefl/v1/lab/pi-1/peer/PI_2",
        "edgefl/v1//pi-1/peer/pi-2",
        "",
    ],
)
def test_what_is_no_topic_from_device_to_device_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(NetworkError, match="from device to device") as refused:
        parse_peer_topic(name)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pi.local:8000", "pi.local:8000"),
        ("pi", "pi:8000"),
        ("10.0.0.1", "10.0.0.1:8000"),
        ("fd00::2", "[fd00::2]:8000"),
        ("[fd00::2]", "[fd00::2]:8000"),
        ("[fd00::2]:9", "[fd00::2]:9"),
    ],
)
def test_an_address_without_a_port_gets_the_default_one(text: str, expected: str) -> None:
    assert checked_address(text, 8000) == expected


@pytest.mark.parametrize("text", ["", "pi:0", "pi:65536", "https://pi:8000", "a b:1", "pi:80a0"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        checked_address(text)


@pytest.mark.parametrize(("device", "coordinator"), [("1.4.0", "1.4.9"), ("1.3.7", "1.4.0"), ("0.1.0", "0.1.0rc1")])
def test_the_same_minor_version_and_the_one_before_work_together(device: str, coordinator: str) -> None:
    check_version(device, coordinator)


@pytest.mark.parametrize(
    ("device", "coordinator", "who"),
    [
        ("1.2.0", "1.4.0", "update the device"),
        ("1.5.0", "1.4.0", "update the coordinator"),
        ("2.4.0", "1.4.0", "update the coordinator"),
        ("nonsense", "1.4.0", "update the device"),
    ],
)
def test_other_versions_are_told_which_side_to_update(device: str, coordinator: str, who: str) -> None:
    with pytest.raises(VersionError, match=who):
        check_version(device, coordinator)


def test_an_error_code_becomes_the_class_it_names() -> None:
    assert error_code(WrongCaError("x")) == "wrong-ca"
    assert type(error_from_code("token-invalid", "x")) is TokenInvalidError
    assert type(error_from_code("from-the-future", "x")) is NetworkError


def test_what_a_device_tells_of_itself_is_small_and_shallow() -> None:
    def told(**value: object) -> Capabilities:
        return Capabilities.load(dump_json({"facts": {}, **value}))

    widest = {"a": "x" * (MAX_FACTS_BYTES - len('{"a":""}'))}
    seven_lists = [[[[[[[1]]]]]]]
    assert told(facts=widest, shards={"digits": 9}).facts == widest
    assert told(facts={"a": seven_lists}).facts == {"a": seven_lists}
    with pytest.raises(NetworkError, match="facts have 16385 bytes, at most 16384 are kept"):
        told(facts={"a": widest["a"] + "x"})
    with pytest.raises(NetworkError, match="facts cannot be kept: it is nested deeper than 8 levels"):
        told(facts={"a": [seven_lists]})
    with pytest.raises(NetworkError, match="shards cannot be kept: it is nested deeper than 8 levels"):
        told(shards={"a": [seven_lists]})
