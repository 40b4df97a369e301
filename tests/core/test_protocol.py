from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from edgefl.core.errors import NetworkError, TokenInvalidError, UsageError, VersionError, WrongCaError
from edgefl.core.protocol import (
    MAX_FACTS_BYTES,
    MAX_JSON_BYTES,
    MAX_TOKEN_CHARS,
    TOKEN_PREFIX,
    Capabilities,
    Command,
    CommandKind,
    CommandReply,
    Heartbeat,
    JoinToken,
    ProgressReport,
    StatusMessage,
    Topic,
    certificate_fingerprint,
    check_version,
    dump_json,
    error_code,
    error_from_code,
    finite_or_none,
    host_and_port,
    is_slug,
    load_json,
    model_fingerprint,
    parse_peer_topic,
    parse_topic,
    peer_topic,
    single_certificate,
    topic,
    validate_address,
    validate_slug,
)
from edgefl.core.types import TensorKind, TensorSpec
from edgefl.device.hardware.board_reader import THROTTLED_BITS

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


def test_a_truncated_paste_is_invalid_at_every_length() -> None:
    for cut in range(len(TOKEN.text())):
        with pytest.raises(TokenInvalidError, match="copy it whole"):
            JoinToken.parse(TOKEN.text()[:cut])


def with_content(*content: object) -> str:
    """A token of this content whose checksum holds."""
    body = json.dumps(list(content)).encode()
    return TOKEN_PREFIX + base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:3] + body).decode().rstrip("=")


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, "ab"), (0, "AB" * 32), (1, ""), (2, 7), (3, "My_Lab"), (4, ["pi:0"])],
)
def test_a_sound_token_whose_content_makes_no_sense_is_invalid(place: int, value: object) -> None:
    content: list[object] = [TOKEN.ca_fingerprint, TOKEN.token_id, TOKEN.secret, TOKEN.fleet, list(TOKEN.addresses)]
    assert JoinToken.parse(with_content(*content, "of a later release")) == TOKEN
    with pytest.raises(TokenInvalidError, match="makes no sense"):
        JoinToken.parse(with_content(*content[:place], value, *content[place + 1 :]))
    for short in (content[:4], []):
        with pytest.raises(TokenInvalidError, match="is damaged"):
            JoinToken.parse(with_content(*short))


def test_the_longest_token_is_read_and_a_longer_text_is_not_looked_at() -> None:
    padding = "x" * MAX_TOKEN_CHARS
    content = [TOKEN.ca_fingerprint, TOKEN.token_id, padding, TOKEN.fleet, []]
    spare = len(with_content(*content)) - MAX_TOKEN_CHARS
    longest = next(
        text
        for cut in range(spare * 3 // 4, spare)
        if len(text := with_content(*content[:2], padding[cut:], *content[3:])) <= MAX_TOKEN_CHARS
    )
    assert len(longest) >= MAX_TOKEN_CHARS - 1
    assert JoinToken.parse(longest).fleet == "lab"
    with pytest.raises(TokenInvalidError, match="starts with"):
        JoinToken.parse(longest + "A" * (MAX_TOKEN_CHARS + 1 - len(longest)))


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


def test_a_topic_says_fleet_device_and_kind() -> None:
    for kind in Topic:
        assert parse_topic(topic("lab", "pi-1", kind)) == ("lab", "pi-1", kind)
    for name in (
        "edgefl/v1/lab/status",
        "edgefl/v2/lab/pi-1/status",
        "other/v1/lab/pi-1/status",
        "edgefl/v1/lab/p/x",
    ):
        with pytest.raises(NetworkError, match="not an edgefl topic"):
            parse_topic(name)


def test_a_topic_from_device_to_device_says_who_has_it_for_whom() -> None:
    assert peer_topic("lab", "pi-1", "pi-2") == "edgefl/v1/lab/pi-1/peer/pi-2"
    assert parse_peer_topic("edgefl/v1/lab/pi-1/peer/pi-2") == ("lab", "pi-1", "pi-2")
    with pytest.raises(NetworkError, match="not an edgefl topic"):
        parse_topic("edgefl/v1/lab/pi-1/peer/pi-2")


@pytest.mark.parametrize(
    "name",
    [
        topic("lab", "pi-1", Topic.STATUS),
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
    assert validate_address(text, 8000) == expected
    host, port = host_and_port(expected)
    assert f"{host}:{port}" == expected.replace("[", "").replace("]", "")


@pytest.mark.parametrize("text", ["", "pi:0", "pi:65536", "https://pi:8000", "a b:1", "pi:80a0"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    assert validate_address("pi:1") == "pi:1"
    assert validate_address("pi:65535") == "pi:65535"
    with pytest.raises(UsageError, match="HOST:PORT"):
        validate_address(text)


@pytest.mark.parametrize(("device", "coordinator"), [("1.4.0", "1.4.9"), ("1.3.7", "1.4.0"), ("0.1.0", "0.1.0rc1")])
def test_the_same_minor_version_and_the_one_before_work_together(device: str, coordinator: str) -> None:
    check_version(device, coordinator)


@pytest.mark.parametrize(
    ("device", "coordinator", "who"),
    [
        ("1.2.0", "1.4.0", "update the device"),
        ("1.5.0", "1.4.0", "update the coordinator"),
        ("2.4.0", "1.4.0", "update the coordinator"),
        ("0.9.0", "1.4.0", "update the device"),
        ("nonsense", "1.4.0", "update the device"),
        ("1.4.0", "nonsense", "update the device"),
        ("1.4_", "1.4.0", "update the device"),
    ],
)
def test_other_versions_are_told_which_side_to_update(device: str, coordinator: str, who: str) -> None:
    with pytest.raises(VersionError, match=who):
        check_version(device, coordinator)


def test_an_error_code_becomes_the_class_it_names() -> None:
    assert error_code(WrongCaError("x")) == "wrong-ca"
    assert type(error_from_code("token-invalid", "x")) is TokenInvalidError
    assert type(error_from_code("from-the-future", "x")) is NetworkError
    assert error_from_code("conditions-ended", "too hot").blocker.reason == "too hot"


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


MESSAGES = (
    StatusMessage(state="online", boot_id="b", session_no=3, version="1", will=True, board="x"),
    Heartbeat(seq=1, session_no=2, uptime_s=3.5, temperature_c=60, holding=["a"], deployment={"id": "d"}, run="r"),
    Capabilities(facts={"cores": 4}, shards={"digits": 9}),
    ProgressReport(assignment="a", iteration=2, seconds_per_iteration=0.5),
    Command(id="c", kind=CommandKind.DRAIN),
    CommandReply(id="c", content={"lines": []}, error="why"),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written_and_a_newer_one_may_say_more(message: Any) -> None:
    written = message.dump()
    assert type(message).load(written) == message
    assert type(message).load(dump_json({**json.loads(written), "later": 1})) == message
    assert b"null" not in written
    required = [each.name for each in fields(message) if each.default is each.default_factory is MISSING]
    for name in required:
        with pytest.raises(NetworkError, match=f"malformed {type(message).__name__.lower()}: .*{name}"):
            type(message).load(dump_json({k: v for k, v in json.loads(written).items() if k != name}))
    for each in fields(message):
        wrong = [1] if "list" not in str(each.type) else "text"
        with pytest.raises(NetworkError, match=f"{each.name} is .*, expected"):
            type(message).load(dump_json({**json.loads(written), each.name: wrong}))


def test_a_truth_value_is_no_number_and_a_whole_number_is_a_fraction() -> None:
    with pytest.raises(NetworkError, match="seq is True, expected int"):
        Heartbeat.load(dump_json({"seq": True, "session_no": 1, "uptime_s": 1.0}))
    assert Heartbeat.load(dump_json({"seq": 1, "session_no": 1, "uptime_s": 1})).uptime_s == 1


def test_a_heartbeat_with_a_long_reason_of_throttling_is_refused() -> None:
    words = ",".join(THROTTLED_BITS.values())
    heartbeat = Heartbeat(seq=1, session_no=1, uptime_s=1.0, throttled=words)
    assert Heartbeat.load(heartbeat.dump()) == heartbeat
    with pytest.raises(NetworkError, match="throttled has 101 characters, at most 100"):
        Heartbeat.load(replace(heartbeat, throttled="x" * 101).dump())


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "is not an edgefl v1 object"),
        (b"{}", "is not an edgefl v1 object"),
        (b'{"v": 2}', "is not an edgefl v1 object"),
        (b'{"v": 1, "x": NaN}', "is not JSON"),
        (b'{"v": 1' + b" " * MAX_JSON_BYTES, "message of 65543 bytes, at most 65536 are read"),
    ],
)
def test_what_is_no_object_of_this_protocol_is_refused(payload: bytes, message: str) -> None:
    assert load_json(b'{"v":1}'.ljust(MAX_JSON_BYTES)) == {"v": 1}
    with pytest.raises(NetworkError, match=message):
        load_json(payload)


def test_a_name_has_1_to_63_letters_digits_and_inner_hyphens() -> None:
    for text in ("a", "9", "a-b", "a" * 63, "a" + "-" * 61 + "b"):
        assert validate_slug(text) == text
    for text in ("", "-a", "a-", "A", "a_b", "a" * 64, "a\n", "ä"):
        assert not is_slug(text)
        with pytest.raises(UsageError, match="fleet must be 1 to 63"):
            validate_slug(text, "fleet")


def test_what_json_cannot_carry_is_no_number() -> None:
    found = [finite_or_none(value) for value in (1, 2.5, True, math.nan, math.inf, "1", None)]
    assert found == [1.0, 2.5, 1.0, None, None, None, None]


def certificate() -> tuple[bytes, ec.EllipticCurvePrivateKey]:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    begins = datetime(2026, 1, 1, tzinfo=UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(begins).not_valid_after(begins + timedelta(days=1))
    return made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM), key


def test_of_a_certificate_the_first_is_taken_and_its_fingerprint_is_that_of_its_key() -> None:
    (first, key), (second, _) = certificate(), certificate()
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert single_certificate(first + b"and more\n" + second) == first
    assert certificate_fingerprint(first + second) == hashlib.sha256(public).hexdigest()
    for pem in (b"", b"no certificate", first[:200]):
        for read in (single_certificate, certificate_fingerprint):
            with pytest.raises(NetworkError, match="not a certificate"):
                read(pem)


def test_two_models_have_the_same_layout_only_if_all_of_their_tensors_are_alike() -> None:
    one = TensorSpec(name="w", shape=(2, 3))
    others = [
        replace(one, name="v"), replace(one, shape=(3, 2)), replace(one, dtype="float64"), replace(one, shared=False),
        replace(one, kind=TensorKind.BUFFER),
    ]  # fmt: skip
    assert model_fingerprint((one,)) == model_fingerprint((replace(one),))
    assert (
        len({model_fingerprint(shapes) for shapes in ((one,), (one, one), (), *((other,) for other in others))}) == 8
    )
    assert len(model_fingerprint((one,))) == 16
