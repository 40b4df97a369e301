from __future__ import annotations

import re

import pytest

from edgefl.errors import UsageError
from edgefl.history.plots import style
from edgefl.history.plots.names import ENDINGS


def sheet():
    with style.styled():
        figure = style.new_figure(3.0, title="a $sheet$")
        figure.subplots().plot([1, 2], [3, 4])
    return figure


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_same_sheet_gives_the_same_bytes_without_a_date(ending):
    first, second = style.encoded(sheet(), ending), style.encoded(sheet(), ending)
    assert first == second
    assert not re.search(rb"CreationDate|dc:date|Software|20\d\d-\d\d-\d\d", first)


def test_files_are_what_they_end_with():
    starts = {ending: style.encoded(sheet(), ending) for ending in ENDINGS}
    assert starts[".png"].startswith(b"\x89PNG")
    assert starts[".pdf"].startswith(b"%PDF")
    assert b"<svg" in starts[".svg"][:1000]
    with pytest.raises(UsageError, match=r"\.png, \.pdf, \.svg, got '\.jpg'"):
        style.encoded(sheet(), ".jpg")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a$b$", r"a\$b\$"), ("_x", " _x"), ("a\nb\x1b", "a b"), ("n" * 60, "n" * 47 + "…"), ("plain", "plain")],
)
def test_a_name_is_shown_as_it_stands_on_one_line(text, shown):
    assert style.literal(text) == shown


def test_a_long_title_is_broken_into_lines():
    with style.styled():
        figure = style.new_figure(3.0, width_inches=6.0, title="a word and another " * 8)
    figure.draw_without_rendering()
    text = figure.texts[0] if figure.texts else figure._suptitle
    assert text.get_window_extent().width < figure.bbox.width


def test_a_name_in_letters_that_the_font_lacks_breaks_nothing():
    with style.styled():
        figure = style.new_figure(3.0, title="日本")
    assert style.encoded(figure, ".png")


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(0.2, (1e-3, "ms")), (40, (1, "s")), (900, (60, "min")), (5e4, (3600, "h")), (1e6, (86_400, "days"))],
)
def test_times_have_a_unit_in_which_they_are_legible(seconds, unit):
    assert style.time_unit(seconds) == unit


@pytest.mark.parametrize(
    ("num_bytes", "unit"),
    [(999, (1, "B")), (1e3, (1e3, "kB")), (5e7, (1e6, "MB")), (5e9, (1e9, "GB")), (5e13, (1e12, "TB"))],
)
def test_sizes_have_a_unit_in_which_they_are_legible(num_bytes, unit):
    assert style.bytes_unit(num_bytes) == unit


def test_a_legend_reads_line_by_line_and_a_group_begins_a_line():
    figure = sheet()
    line = figure.axes[0].lines[0]
    style.legend_below(figure, dict.fromkeys(["r1", "r2", "r3"], line), dict.fromkeys(["k1", "k2"], line))
    (legend,) = figure.legends
    # matplotlib fills columns: three of two entries each.
    assert [text.get_text() for text in legend.get_texts()] == ["r1", "k1", "r2", "k2", "r3", ""]
