from edgefl.device.collect import alignment
from edgefl.device.collect.alignment import Row, RowMaker
from edgefl.device.collect.readings import Reading


def _maker(every_s=10.0, *, hold_s=25.0, drops_missing=True, last_row_s=0.0):
    return RowMaker(("a", "b"), every_s=every_s, hold_s=hold_s, drops_missing=drops_missing, last_row_s=last_row_s)


def _at(time_s, **values):
    return Reading(values=values, time_s=time_s)


def test_a_row_has_the_last_value_of_each_column_before_its_time():
    maker = _maker()
    maker.update([], 101.0)
    rows = maker.update([_at(104.0, a=1.0, b=5.0), _at(109.0, a=2.0), _at(112.0, a=3.0)], 121.0)
    assert rows == [Row(110.0, (2.0, 5.0), 1), Row(120.0, (3.0, 5.0), 1)]


def test_a_value_counts_up_to_its_time_to_hold_and_a_gap_ends_the_span():
    maker = _maker()
    maker.update([], 101.0)
    assert [row.time_s for row in maker.update([_at(105.0, a=1.0, b=1.0)], 141.0)] == [110.0, 120.0, 130.0]
    assert maker.num_dropped == 1
    assert maker.update([_at(145.0, a=1.0, b=1.0)], 150.0) == [Row(150.0, (1.0, 1.0), 2)]


def test_a_missing_value_leaves_a_cell_empty_where_rows_are_kept_and_a_row_without_any_goes():
    maker = _maker(drops_missing=False)
    maker.update([], 101.0)
    assert maker.update([_at(105.0, a=1.0)], 110.0) == [Row(110.0, (1.0, None), 1)]
    assert maker.update([_at(111.0, a=None)], 120.0) == []


def test_a_value_older_than_the_one_that_is_held_does_not_replace_it():
    maker = _maker()
    maker.update([_at(100.0, a=1.0, b=1.0)], 101.0)
    assert maker.update([_at(99.0, a=7.0)], 110.0) == [Row(110.0, (1.0, 1.0), 1)]


def test_after_a_restart_nothing_is_held_and_rows_are_of_another_span():
    maker = _maker()
    maker.update([], 101.0)
    maker.update([_at(105.0, a=1.0, b=1.0)], 110.0)
    maker.restart()
    assert maker.update([], 55.0) == []
    assert maker.update([_at(58.0, a=2.0, b=2.0)], 60.0) == [Row(60.0, (2.0, 2.0), 2)]


def test_hours_without_a_turn_are_a_gap_and_not_a_row_for_each_tick():
    maker = _maker(0.01, hold_s=1e9)
    maker.update([_at(100.0, a=1.0, b=1.0)], 100.005)
    assert len(maker.update([], 100.02)) == 2
    (row,) = maker.update([], 100_000.0)
    assert row.span == 2


def test_rows_are_made_up_for_from_the_first_reading_after_the_last_row():
    maker = _maker(last_row_s=100.0)
    assert maker.update([], 1000.0) == []
    rows = maker.update([_at(81.0, a=1.0, b=1.0), _at(104.0, a=2.0, b=2.0), _at(151.0, a=3.0, b=3.0)], 1000.0)
    assert [(row.time_s, row.values[0], row.span) for row in rows] == [
        (110.0, 2.0, 1), (120.0, 2.0, 1), (160.0, 3.0, 2), (170.0, 3.0, 2),
    ]  # fmt: skip
    assert maker.update([_at(165.0, a=4.0, b=4.0)], 1001.0) == [Row(180.0, (4.0, 4.0), 3), Row(190.0, (4.0, 4.0), 3)]


def test_rows_that_are_late_count_as_dropped_once():
    maker = _maker()
    maker.update([], 101.0)
    maker.update([], 151.0)
    assert maker.num_dropped == 5
    maker.update([_at(104.0, a=1.0)], 151.0)
    assert maker.num_dropped == 5


def test_rows_wait_for_a_source_that_is_behind_and_so_do_readings_of_the_others():
    maker = _maker()
    assert maker.update([_at(104.0, b=1.0), _at(118.0, a=1.0), _at(131.0, a=2.0)], 1000.0, 104.0) == []
    assert maker.has_waiting
    rows = maker.update([_at(116.0, b=2.0), _at(126.0, b=3.0), _at(133.0, b=4.0)], 1000.0, 133.0)
    assert rows == [Row(120.0, (1.0, 2.0), 1), Row(130.0, (1.0, 3.0), 1)]
    assert [row.time_s for row in maker.update([], 1000.0)] == [140.0, 150.0]
    assert not maker.has_waiting


def test_more_rows_than_one_update_may_make_come_with_the_next(monkeypatch):
    monkeypatch.setattr(alignment, "MAX_TICKS", 4)
    maker = _maker()
    rows = maker.update([_at(100.0 + 20 * number, a=1.0, b=1.0) for number in range(5)], 190.0)
    assert maker.has_backlog
    assert [row.time_s for row in rows] == [100.0, 110.0, 120.0, 130.0]
    while maker.has_backlog:
        rows += maker.update([], 190.0)
    assert [(row.time_s, row.span) for row in rows] == [(100.0 + 10 * number, 1) for number in range(10)]


def test_with_a_rate_of_none_each_reading_is_a_row_and_a_long_pause_ends_the_span():
    maker = _maker(0.0)
    rows = maker.update(
        [_at(1.0, a=1.0, b=1.0), _at(2.0, a=2.0), _at(3.0, a=3.0, b=3.0), _at(29.0, a=4.0, b=4.0)], 50.0
    )
    assert [(row.time_s, row.span) for row in rows] == [(1.0, 1), (3.0, 2), (29.0, 3)]
