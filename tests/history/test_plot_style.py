import re

import pytest

from edgefl.core.errors import UsageError
from edgefl.history import FILE_SUFFIXES, plot_style


def sheet(title="a $sheet$"):
    with plot_style.apply_style():
        figure = plot_style.make_figure(3.0, title=title)
        figure.subplots().plot([1, 2], [3, 4])
    return figure


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_same_sheet_gives_the_same_bytes_without_a_date(ending, start):
    first, second = plot_style.encode_figure(sheet(), ending), plot_style.encode_figure(sheet(), ending)
    assert first == second
    assert first.startswith(start)
    assert not re.search(rb"CreationDate|dc:date|Software|20\d\d-\d\d-\d\d", first)


def test_other_endings_are_refused_and_letters_that_the_font_lacks_break_nothing():
    assert set(FILE_SUFFIXES) == {".png", ".pdf", ".svg"}
    with pytest.raises(UsageError, match=r"\.png, \.pdf, \.svg, got '\.jpg'"):
        plot_style.encode_figure(sheet(), ".jpg")
    assert plot_style.encode_figure(sheet("日本"), ".png")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a$b$", r"a\$b\$"), ("_x", " _x"), ("a\nb\x1b", r"a\nb\x1b"), ("n" * 60, "n" * 47 + "…"), ("plain", "plain")],
)
def test_a_name_is_shown_as_it_stands_on_one_line(text, shown):
    assert plot_style.format_label(text) == shown


def test_a_long_title_is_broken_into_lines():
    with plot_style.apply_style():
        figure = plot_style.make_figure(3.0, width_inches=6.0, title="a word and another " * 8)
    figure.draw_without_rendering()
    text = figure.texts[0] if figure.texts else figure._suptitle
    assert text.get_window_extent().width < figure.bbox.width


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [
        (plot_style.select_time_unit, 0.2, (1e-3, "ms")),
        (plot_style.select_time_unit, 40, (1, "s")),
        (plot_style.select_time_unit, 900, (60, "min")),
        (plot_style.select_time_unit, 5e4, (3600, "h")),
        (plot_style.select_time_unit, 1e6, (86_400, "days")),
        (plot_style.select_bytes_unit, 999, (1, "B")),
        (plot_style.select_bytes_unit, 1e3, (1e3, "kB")),
        (plot_style.select_bytes_unit, 5e7, (1e6, "MB")),
        (plot_style.select_bytes_unit, 5e9, (1e9, "GB")),
        (plot_style.select_bytes_unit, 5e13, (1e12, "TB")),
    ],
)
def test_times_and_sizes_have_a_unit_in_which_they_are_legible(unit, value, expected):
    assert unit(value) == expected


def test_a_legend_reads_line_by_line_and_a_group_begins_a_line():
    figure = sheet()
    line = figure.axes[0].lines[0]
    plot_style.add_legend_below(figure, dict.fromkeys(["r1", "r2", "r3"], line), dict.fromkeys(["k1", "k2"], line))
    (legend,) = figure.legends
    # matplotlib fills columns: three of two entries each.
    assert [text.get_text() for text in legend.get_texts()] == ["r1", "k1", "r2", "k2", "r3", ""]
