"""What boards and users choose is shown as visible characters only."""

import json
import logging
import sys
import unicodedata

import pytest

from edgefl.core.safe_text import (
    SafeFormatter,
    dump_readable_json,
    escape_lines,
    escape_text,
    escape_values,
    format_csv_cell,
    is_safe_text,
)

HOSTILE = {
    "\x1b[2J": r"\x1b[2J", "a\nb": r"a\nb", "a\rb": r"a\rb", "\x9b31m": r"\x9b31m", "\x7f": r"\x7f", "\x00": r"\x00",
    "\u202egpj": r"\u202egpj", "\u2066x\u2069": r"\u2066x\u2069", "a\u200bb": r"a\u200bb", "\ufeff": r"\ufeff",
    "a\u2028b": r"a\u2028b", "\u2029": r"\u2029", "\x85": r"\x85", "\u3164": r"\u3164", "\u034f": r"\u034f",
    "\U000e0041": r"\U000e0041", "\U000e0101": r"\U000e0101", "\ud800": r"\ud800", "\ue000": r"\ue000",
}  # fmt: skip


@pytest.mark.parametrize(("text", "escaped"), HOSTILE.items())
def test_what_changes_other_text_is_written_as_its_escape(text, escaped):
    assert (escape_text(text), is_safe_text(text)) == (escaped, False)
    assert is_safe_text(escape_text(text))


def test_no_control_format_or_separator_character_of_unicode_passes():
    bad = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    kept = [c for c in map(chr, range(0x3000)) if unicodedata.category(c) in bad and escape_text(c) == c]
    assert kept == []


@pytest.mark.parametrize("text", ["Läufe 7", "日本語", "naïve ½ €", "שלום", "a\\x1b"])
def test_letters_of_every_script_stay(text):
    assert escape_text(text) == text


def test_lines_keep_their_breaks_alone():
    assert escape_lines("a\x1b\nb\r\n") == "a\\x1b\nb\\r\n"


def test_values_are_escaped_with_their_keys():
    assert escape_values({"a\x1b": ["\u202e", 1, None]}) == {r"a\x1b": [r"\u202e", 1, None]}


def test_json_keeps_its_value_and_holds_nothing_unsafe():
    value = {text: [text, "é"] for text in HOSTILE}
    dumped = dump_readable_json(value, indent=2)
    assert json.loads(dumped) == value
    assert "é" in dumped
    assert all(map(is_safe_text, dumped.split("\n")))


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"), ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"), ("-2+3", "'-2+3"), ("@A1", "'@A1"),
        (" =1", "' =1"), ("\uff1d1", "'\uff1d1"), ("\t=1", r"\t=1"), ("\r=1", r"\r=1"), ("-3.5e-7", "-3.5e-7"),
        (-3, -3), (-1.5, -1.5), (None, None), ("a-b", "a-b"), (["=1", "\x1b"], '["=1", "\\u001b"]'),
        ({"=": 1}, '{"=": 1}'),
    ],
)  # fmt: skip
def test_a_cell_is_no_formula_and_a_number_stays_one(value, cell):
    assert format_csv_cell(value) == cell


def make_record(message, *args, exc_info=None):
    return logging.LogRecord("edgefl", logging.INFO, "x.py", 1, message, args, exc_info)


def test_a_log_message_is_one_line_whatever_stands_in_it():
    line = SafeFormatter("%(levelname)s: %(message)s").format(
        make_record("from %s", "x\nERROR: forged \x1b[2J\u202e")
    )
    assert line == r"INFO: from x\nERROR: forged \x1b[2J\u202e"


def test_a_traceback_stays_legible_and_forges_no_line_of_the_log():
    def fail():
        raise ValueError("a\nINFO: forged\x1b")

    try:
        fail()
    except ValueError:
        text = SafeFormatter("%(levelname)s: %(message)s").format(make_record("broke", exc_info=sys.exc_info()))
    first, *rest = text.split("\n")
    assert (first, rest[0]) == ("INFO: broke", "  Traceback (most recent call last):")
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in text
