import pytest

from edgefl.device.collect.readings import find_value, parse_payload, parse_pointer, parse_value


@pytest.mark.parametrize(
    ("payload", "pointer", "value"),
    [
        (b'{"temperature": 21.5, "linkquality": 90}', "/temperature", 21.5),  # Zigbee2MQTT
        (b'{"Time": "2026-01-01T00:00:00", "ENERGY": {"Power": [3, 4]}}', "/ENERGY/Power/1", 4.0),  # Tasmota
        (b"21.50", "", 21.5),  # ESPHome
        (b"ON", "", 1.0),
        (b"false", "", 0.0),
        (b'{"a/b": {"~": "7"}}', "/a~1b/~0", 7.0),
        (b"unavailable", "", None),  # Home Assistant
        (b"nan", "", None),
        (b'{"state": null}', "/state", None),
    ],
)
def test_a_payload_of_a_known_kind_gives_the_number_that_its_pointer_leads_to(payload, pointer, value):
    assert parse_value(find_value(parse_payload(payload), parse_pointer(pointer)), is_text=False) == value


@pytest.mark.parametrize(
    "payload", [b'{"x": 1e999}', b"1e39", b"inf", b"[1]", b"open", b"\xff", b'{"x": 1', b"1" * 65]
)
def test_a_payload_that_is_no_number_of_a_float32_is_refused(payload):
    with pytest.raises(ValueError):
        parse_value(parse_payload(payload), is_text=False)


def test_a_text_is_short_and_has_visible_characters_only():
    assert parse_value(" open ", is_text=True) == "open"
    for text in ("a\nb", "x" * 65, [1]):
        with pytest.raises(ValueError):
            parse_value(text, is_text=True)


def test_a_message_about_something_else_has_no_value():
    with pytest.raises(KeyError):
        find_value({"battery": 3}, parse_pointer("/temperature"))
    with pytest.raises(KeyError):
        find_value({"list": [1]}, parse_pointer("/list/1"))
