"""JSON and TOML of others: a value that every later walk can take, or a ValueError."""

from __future__ import annotations

import pytest

from edgefl.core.safe_parsing import (
    MAX_NESTING,
    MAX_TOML_CHARS,
    check_nesting,
    format_toml,
    parse_json,
    parse_message,
    parse_toml,
)


def nested(depth):
    return "[" * depth + "]" * depth


def test_what_is_nested_as_deep_as_it_may_is_read_and_one_level_more_is_not():
    assert parse_json(nested(MAX_NESTING)) is not None
    assert parse_toml(f"a = {nested(MAX_NESTING - 1)}")
    for text in (nested(MAX_NESTING + 1), nested(100_000), '{"a":' * 100_000):
        with pytest.raises(ValueError, match=r"nested deeper|Expecting"):
            parse_json(text)
    for text in (f"a = {nested(MAX_NESTING)}", f"a = {nested(100_000)}", "a." * 50_000 + "a = 1"):
        with pytest.raises(ValueError, match="nested deeper"):
            parse_toml(text)


def test_many_brackets_beside_each_other_are_not_deep():
    assert len(parse_json(f"[{','.join(['[[]]'] * 5000)}]")) == 5000


@pytest.mark.parametrize("content", [b"\xff", b'{"a":', b"", b"nul"])
def test_what_is_no_json_is_a_value_error(content):
    for parse in (parse_json, parse_message):
        with pytest.raises(ValueError):
            parse(content)


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "1e999", "9223372036854775808", "-9223372036854775809", "1" * 5000]
)
def test_a_message_holds_no_number_that_cannot_be_stored(text):
    with pytest.raises(ValueError, match=r"is no number|at most 64 bits"):
        parse_message(b'{"a":[%s]}' % text.encode())


def test_a_message_keeps_the_largest_numbers():
    assert parse_message(b"[9223372036854775807,-9223372036854775808,1e308]") == [2**63 - 1, -(2**63), 1e308]


def test_a_message_loses_half_characters_and_nuls_and_keeps_whole_ones():
    assert parse_message(b'{"\\ud800":["a\\u0000b","\\ud83c\\udf53","\\u00e4"]}') == {
        "?": ["ab", "\U0001f353", "\xe4"]
    }


def test_toml_has_whole_numbers_of_64_bits_and_a_size():
    assert parse_toml("a = 0x7fffffffffffffff") == {"a": 2**63 - 1}
    for text in ("a = 0x8000000000000000", "a = {b = [0x" + "f" * 5000 + "]}"):
        with pytest.raises(ValueError, match="at most 64 bits"):
            parse_toml(text)
    with pytest.raises(ValueError, match="characters, at most"):
        parse_toml("#" * (MAX_TOML_CHARS + 1))


def test_a_value_that_stands_in_itself_or_in_many_places_is_looked_at_once_a_layer():
    ring = []
    ring += [ring, ring]
    with pytest.raises(ValueError, match="nested deeper"):
        check_nesting(ring)
    wide = []
    for _ in range(MAX_NESTING - 1):
        wide = [wide, wide]
    check_nesting(wide)


def test_many_dots_that_are_no_key_do_not_make_toml_deep():
    assert parse_toml(f"a = '{'.' * 1000}'\nb.c = [{', '.join(['1.5'] * 1000)}]")["b"]["c"][999] == 1.5


def test_a_table_written_as_toml_is_read_back_with_the_kinds_of_its_values():
    table = {"a": 1, "b": [1.5, 'x\x7f"'], "z z": True, "c": {"x": 3.0, "d e": {"f.g": "ü"}, "empty": {}}}
    again = parse_toml(format_toml(table))
    assert again == table
    assert isinstance(again["c"]["x"], float)
