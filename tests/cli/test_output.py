"""Tables on a terminal of a given width."""

from edgefl.cli.output import render_table

RUN = "20261122-010019-aa549e"


def test_a_table_that_fits_keeps_every_column_and_every_cell_on_one_line():
    lines = render_table(["device id", "silent s", "groups"], [["pi-01", "0.4", "-"]], [False, True, False], 40)
    assert lines == ["device  silent", "id           s  groups", "──────  ──────  ──────", "pi-01      0.4  -"]


def test_a_column_that_holds_nothing_goes_first_when_room_is_short():
    lines = render_table(
        ["device", "groups", "model"], [["pi-01", "-", "3f2a91"], ["pi-02", "-", "-"]], [False] * 3, 16
    )
    assert lines == ["device  model", "──────  ──────", "pi-01   3f2a91", "pi-02   -"]


def test_long_ids_and_times_break_between_their_parts_and_nowhere_else():
    lines = render_table(["run id", "at"], [[RUN, "2026-11-22 01:00:21"]], [False, True], 22)
    assert lines[2:] == ["20261122-   2026-11-22", "010019-       01:00:21", "aa549e"]


def test_a_run_that_all_rows_share_stands_once_above_a_table_that_is_too_wide():
    lines = render_table(["run id", "reason"], [[RUN, "one"], [RUN, "two"]], [False] * 2, 22)
    assert lines == [f"run id {RUN}", "reason", "──────", "one", "two"]


def test_no_line_is_wider_than_the_terminal():
    headings = [f"num column {index}" for index in range(10)]
    rows = [[RUN, "a reason of several words", *["12345"] * 8]]
    for width in (60, 100, 120, 200):
        assert max(map(len, render_table(headings, rows, [False] * 10, width))) <= width


def test_a_table_that_cannot_fit_becomes_a_block_of_lines_for_each_row():
    lines = render_table(["first", "second"], [["a" * 15, "b" * 15], ["c", "d"]], [False] * 2, 25)
    assert lines == [f"first   {'a' * 15}", f"second  {'b' * 15}", "", "first   c", "second  d"]


def test_a_table_without_rows_shows_its_headings():
    assert render_table(["run id", "name"], [], [False] * 2, 80) == ["run", "id   name", "───  ────"]
