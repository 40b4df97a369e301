"""Parquet files as shards: the same rows as of a CSV file, however they are written, within bounds."""

import datetime as dt
import decimal
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from table_parts import read_table

from edgefl.core.errors import DataError, TaskError
from edgefl.tasks.datasets import parquet_files, table_files
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.datasets.parquet_files import ParquetTable
from edgefl.tasks.datasets.shards import inspect_shard, load_task_data
from edgefl.tasks.datasets.table_files import survey_table
from edgefl.tasks.registry import make_task

ROWS = 1000
WRITERS = {
    "usual": {},
    "groups": {"row_group_size": 7},
    "small pages": {"data_page_size": 64, "write_batch_size": 4, "use_dictionary": False},
    "second version": {"data_page_version": "2.0", "compression": "zstd"},
    "gzip and plain": {"compression": "gzip", "use_dictionary": False},
    "neither": {"compression": "none", "store_schema": False, "write_statistics": False},
    "other encodings": {
        "use_dictionary": False,
        "column_encoding": {
            "heat": "BYTE_STREAM_SPLIT",
            "kind": "DELTA_LENGTH_BYTE_ARRAY",
            "count": "DELTA_BINARY_PACKED",
        },
    },
}


def make_columns(num_rows=ROWS):
    rng = np.random.default_rng(2)
    return {
        "heat": pa.array(rng.normal(size=num_rows), mask=np.arange(num_rows) % 9 == 4),
        "count": pa.array(rng.integers(0, 1000, num_rows), pa.int16()),
        "kind": pa.array([f" word {row % 5}" if row % 11 else None for row in range(num_rows)]),
        "unused": pa.array([[row] for row in range(num_rows)]),
    }


def write(path, columns, **options):
    parquet.write_table(pa.table(columns), path, **options)
    return path


def write_csv(path, columns):
    cells = zip(*(column.to_pylist() for column in columns.values()), strict=True)
    lines = [",".join("" if cell is None else str(cell) for cell in row) for row in cells]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return path


def read(path, numbers, texts=(), **options):
    parts = read_table(path, "table", numbers, texts, **options)
    return [(part.numbers.tolist(), part.texts, part.first_row) for part in parts]


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_rows_are_those_of_a_csv_file_however_they_are_written(tmp_path, monkeypatch, options):
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 64)
    columns = make_columns()
    path = write(tmp_path / "rows.parquet", columns, **options)
    other = write_csv(tmp_path / "rows.csv", columns)
    assert read(path, ["count", "heat"], ["kind"], drops_missing=True) == read(
        other, ["count", "heat"], ["kind"], drops_missing=True
    )
    for place in (path, other):
        with pytest.raises(DataError, match="row 5: heat is missing or no finite number"):
            read(place, ["count", "heat"])
        with pytest.raises(DataError, match="row 1: kind is missing"):
            read(place, ["count"], ["kind"])
    found = [survey_table(place, "table", is_detailed=True) for place in (path, other)]
    assert [one.num_examples for one in found] == [ROWS, ROWS]
    assert found[0].details == found[1].details
    assert found[0].details[3] == "unused: texts"


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([True, None, False]), [1.0, None, 0.0]),
        (pa.array([1.5, None, -2.0], pa.float16()), [1.5, None, -2.0]),
        (pa.array([decimal.Decimal("1.25"), None, decimal.Decimal("-3.50")]), [1.25, None, -3.5]),
        (pa.array([2**63, 1, None], pa.uint64()), [2.0**63, 1.0, None]),
        (pa.array([7, None, 7], pa.int8()).dictionary_encode(), [7.0, None, 7.0]),
        (pa.array([1.0, float("nan"), 2.0]), [1.0, None, 2.0]),
    ],
    ids=["bool", "half", "decimal", "large", "categories", "nan"],
)
def test_each_type_of_number_is_read_and_a_null_is_missing(tmp_path, column, values):
    path = write(tmp_path / "a.parquet", {"a": column})
    assert read(path, ["a"], drops_missing=True)[0][0] == [[value] for value in values if value is not None]


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array([1, 20]), ("1", "20")),
        (pa.array([True, False]), ("true", "false")),
        (pa.array([b"on", b"off"]), ("on", "off")),
        (pa.array(["on", "off"], pa.large_string()), ("on", "off")),
        (pa.array(["on", "off"]).dictionary_encode(), ("on", "off")),
        (pa.array([dt.date(2026, 5, 1), dt.date(2026, 5, 2)]), ("2026-05-01", "2026-05-02")),
    ],
    ids=["numbers", "bools", "bytes", "large", "categories", "dates"],
)
def test_each_type_of_class_or_group_becomes_text(tmp_path, column, texts):
    assert read(write(tmp_path / "a.parquet", {"a": column}), [], ["a"])[0][1] == (texts,)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([[1.0], [2.0]]), "list<"),
        (pa.array([{"b": 1.0}, {"b": 2.0}]), "struct<b: double>"),
        (pa.array(["warm", "cold"]), "string"),
        (pa.array([dt.datetime(2026, 5, 1), None]), "timestamp"),  # noqa: DTZ001 a column without a zone
    ],
)
def test_a_column_of_another_type_is_one_clear_line_that_names_it(tmp_path, column, kind):
    path = write(tmp_path / "a.parquet", {"a": column})
    with pytest.raises(DataError, match=f"column 'a' must hold numbers, and holds {kind}") as error:
        read(path, ["a"])
    assert "warm" not in str(error.value)


def test_a_part_of_a_struct_is_not_taken_for_a_column_of_that_name(tmp_path):
    columns = {"a.b": pa.array([1.0, 2.0]), "a": pa.array([{"b": 3.0}, {"b": 4.0}])}
    with pytest.raises(DataError, match=r"column 'a\.b' must hold numbers"):
        read(write(tmp_path / "a.parquet", columns), ["a.b"])
    alone = write(tmp_path / "b.parquet", {"a.b": columns["a.b"], "a": columns["a.b"]})
    assert read(alone, ["a", "a.b"])[0][0] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_long_text_that_many_rows_share_is_in_memory_once(tmp_path):
    places = pa.array(np.zeros(4000, np.int32))
    path = write(tmp_path / "a.parquet", {"a": pa.DictionaryArray.from_arrays(places, ["x" * 60_000])})
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with ParquetTable(path, max_cells=4000) as table:
            chunks = table.read_chunks([], ["a"], 1000)
            assert [len(words[0]) for _, words in chunks] == [0, 1000, 1000, 1000, 1000]
    finally:
        pa.set_memory_pool(usual)
    assert 60_000 < pool.max_memory() < 2_000_000


def test_a_word_of_a_dictionary_is_one_text_for_all_rows_of_a_group(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 50)
    path = write(tmp_path / "a.parquet", {"a": pa.array([f"a long word {row % 3}" for row in range(1000)])})
    (part,) = read_table(path, "series", [], ["a"])
    assert len(set(map(id, part.texts[0]))) == 3


@pytest.mark.parametrize("has_dictionary", [True, False])
def test_texts_count_as_often_as_rows_have_them(tmp_path, monkeypatch, has_dictionary):
    words = {"a": pa.array(["x" * 1000] * 100 + [None]), "b": pa.array(["y"] * 101)}
    path = write(tmp_path / "a.parquet", words, use_dictionary=has_dictionary)
    monkeypatch.setattr(parquet_files, "MAX_FILE_TEXT_BYTES", 100_101)
    assert len(read(path, [], ["a", "b"], drops_missing=True)[0][1][0]) == 100
    monkeypatch.setattr(parquet_files, "MAX_FILE_TEXT_BYTES", 100_100)
    with pytest.raises(
        DataError, match=r"its rows have more than 100,100 bytes of text .*; cut it into several files"
    ):
        read(path, [], ["a", "b"], drops_missing=True)


@pytest.mark.parametrize("packing", ["zstd", "gzip", "none"])
def test_pages_larger_than_the_bound_are_refused_before_they_are_unpacked(tmp_path, monkeypatch, packing):
    options = {"compression": packing, "use_dictionary": False, "data_page_size": 2**30, "max_rows_per_page": 2**30}
    path = write(tmp_path / "a.parquet", {"a": np.zeros(200_000), "b": np.zeros(200_000)}, **options)
    monkeypatch.setattr(parquet_files, "MAX_BYTES_AT_ONCE", 2_000_000)
    assert len(read(path, ["a"])[0][0]) == 200_000
    monkeypatch.setattr(ParquetTable, "_to_numbers", None)
    with pytest.raises(
        DataError, match=r"needs 3,2\d\d,\d\d\d bytes at once .*, at most are 2,000,000; write smaller"
    ):
        read(path, ["a", "b"])


def test_all_pages_of_texts_count_since_one_chunk_may_be_of_many(tmp_path, monkeypatch):
    words = pa.array([f"{row:0>100}" for row in range(2000)])
    path = write(tmp_path / "a.parquet", {"a": words}, use_dictionary=False, data_page_size=1000, write_batch_size=8)
    monkeypatch.setattr(parquet_files, "MAX_BYTES_AT_ONCE", 100_000)
    with pytest.raises(DataError, match="needs 2"):
        read(path, [], ["a"])
    smaller = write(tmp_path / "b.parquet", {"a": words}, use_dictionary=False, row_group_size=500)
    assert read(smaller, [], ["a"])[0][1][0] == tuple(words.to_pylist())


def test_texts_that_are_parts_of_each_other_are_refused(tmp_path):
    words = pa.array([f"{'x' * 100}{row}" for row in range(50)])
    options = {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY", "b": "PLAIN"}}
    path = write(tmp_path / "a.parquet", {"a": words, "b": words}, **options)
    with pytest.raises(DataError, match=r"'a' is encoded as DELTA_BYTE_ARRAY, .* which is not read"):
        read(path, [], ["a"])
    assert len(read(path, [], ["b"])[0][1][0]) == 50


def test_a_text_longer_than_the_bound_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": pa.array(["x" * 1_000_001])})
    with pytest.raises(DataError, match="'a' has a text of more than 1000000 characters"):
        read(path, [], ["a"])


def test_a_file_that_is_cut_encrypted_or_none_is_one_clear_line(tmp_path):
    path = write(tmp_path / "a.parquet", make_columns())
    whole = path.read_bytes()
    no_footer = whole[:-8] + (20_000_000).to_bytes(4, "little") + b"PAR1"
    for content, message in (
        (whole[:-1], "is no whole Parquet file"),
        (b"", "is no whole Parquet file"),
        (b"PAR1", "is no whole Parquet file"),
        (whole[:-4] + b"PARE", "is no whole Parquet file"),
        (no_footer, "has a footer of 20,000,000 bytes, at most 16,777,216 are read"),
        (whole[:4] + b"\xff" * 40 + whole[44:], "cannot be read as Parquet"),
        (b"PAR1" + b"\xff" * 50 + whole[-8:], "cannot be read as Parquet"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as error:
            read(path, ["heat", "count"], ["kind"], drops_missing=True)
        assert "\n" not in str(error.value)


def test_a_folder_is_its_parquet_files_by_name_unless_it_has_csv_files(tmp_path):
    for name, value in {"b.parquet": 2.0, "a.parquet": 1.0, ".c.parquet": 3.0}.items():
        write(tmp_path / name, {"a": pa.array([value])})
    assert [part[0] for part in read(tmp_path, ["a"])] == [[[1.0]], [[2.0]]]
    (tmp_path / "a.csv").write_text("a\n7\n")
    assert [part[0] for part in read(tmp_path, ["a"])] == [[[7.0]]], "as before there were Parquet files"


def test_the_bound_on_numbers_holds_for_rows_that_take_no_room_in_the_file(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", {"a": np.zeros(100_000)})
    assert path.stat().st_size < 2000
    task = make_task("table", {"columns": "a", "loss": "reconstruction"})
    monkeypatch.setattr(table_files, "MAX_CELLS", 150_000)
    assert len(task.read(str(path)).inputs) == 100_000
    write(tmp_path / "b.parquet", {"a": np.zeros(100_000)})
    with pytest.raises(DataError, match="more than 150,000 numbers; take fewer files"):
        task.read(str(tmp_path))
    monkeypatch.setattr(table_files, "MAX_CELLS", 50_000)
    for look in (task.read, lambda place: survey_table(Path(place), "table")):
        with pytest.raises(DataError, match="has 100,000 rows, with so many columns at most 50,000 are read"):
            look(str(path))


def test_rows_that_are_left_out_count_too(tmp_path, monkeypatch):
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / name, {"a": pa.nulls(1000, pa.float32()), "b": pa.array([1.0] + 999 * [None])})
    monkeypatch.setattr(table_files, "MAX_CELLS", 1999)
    with pytest.raises(DataError, match=r"a\.parquet has 1,000 rows, with so many columns at most 999 are read"):
        read_table(tmp_path / "a.parquet", "table", ["a", "b"], drops_missing=True)
    with pytest.raises(DataError, match="more than 1,999 numbers; take fewer files"):
        read_table(tmp_path, "table", ["b"], drops_missing=True)
    monkeypatch.setattr(table_files, "MAX_CELLS", 2000)
    assert sum(len(part.numbers) for part in read_table(tmp_path, "table", ["b"], drops_missing=True)) == 2


def test_a_footer_that_says_fewer_rows_than_there_are_is_no_way_around_the_bound(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": np.arange(1000.0)}, store_schema=False)
    content, rows = path.read_bytes(), b"\x16\xd0\x0f"
    footer = content.index(rows, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))
    path.write_bytes(content[:footer] + b"\x16\xce\x0f" + content[footer + len(rows) :])
    assert inspect_shard("table", str(path)).num_examples == 999
    with pytest.raises(DataError, match=r"cannot be read as Parquet \(ValueError\)"):
        read(path, ["a"])


@pytest.mark.parametrize("damaged", ["a", "b"])
def test_a_footer_with_levels_that_its_columns_have_not_is_refused_and_does_not_end_the_process(tmp_path, damaged):
    path = write(tmp_path / "a.parquet", {"a": np.arange(9), "b": np.arange(9)}, store_schema=False)
    content, levels = path.read_bytes(), b"\x29\x06\x19\x26\x00\x12"  # none of repetition, two of definition
    assert content.count(levels) == 2
    place = content.index(levels) if damaged == "a" else content.rindex(levels)
    path.write_bytes(content[:place] + b"\x29\x26\x00\x12\x19\x06" + content[place + len(levels) :])
    with pytest.raises(DataError, match=r"cannot be read as Parquet \(OSError\): it is damaged"):
        read(path, ["a", "b"])
    with pytest.raises(DataError, match=r"cannot be read as Parquet \(OSError\)"):
        survey_table(path, "table", is_detailed=True)


@pytest.mark.parametrize(("name", "bound"), [("MAX_PAGES", 49), ("MAX_UNPACKED_BYTES", 49 * 80)])
def test_pages_of_all_groups_of_rows_count_since_they_may_be_the_same(tmp_path, monkeypatch, name, bound):
    path = write(tmp_path / "a.parquet", {"a": np.arange(500.0)}, row_group_size=10, use_dictionary=False)
    assert len(read(path, ["a"])[0][0]) == 500
    monkeypatch.setattr(parquet_files, name, bound)
    with pytest.raises(DataError, match=r"pages or .* bytes in these columns; cut it into several files"):
        read(path, ["a"])


def test_a_survey_in_detail_leaves_out_columns_beyond_the_bound_on_numbers(tmp_path, monkeypatch, caplog):
    path = write(tmp_path / "a.parquet", {name: np.zeros(100) for name in "abc"} | {"d": pa.array(["x"] * 100)})
    monkeypatch.setattr(table_files, "MAX_CELLS", 299)
    found = survey_table(path, "table", is_detailed=True)
    assert (found.num_examples, [line[0] for line in found.details]) == (100, ["a", "b", "d"])
    assert "1 columns are left out" in caplog.text
    monkeypatch.setattr(table_files, "MAX_CELLS", 300)
    assert [line[0] for line in survey_table(path, "table", is_detailed=True).details] == ["a", "b", "c", "d"]


def test_a_schema_of_groups_within_groups_is_one_clear_line(tmp_path):
    group, depth = b"\x35\x02\x18\x01a\x15\x02\0", 60_000  # optional, by name, with one child
    leaf, size = b"\x15\x02\x25\x02\x18\x01a\0", bytes([(depth + 1) & 127 | 128, (depth + 1) >> 7 & 127 | 128, 3])
    footer = b"\x15\x02\x19\xfc" + size + group * depth + leaf + b"\x16\0\x19\x0c\0"
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(DataError, match=r"cannot be read as Parquet \(OSError\)"):
        read(tmp_path / "a.parquet", ["a"])


def field(number, kind, *content):
    return bytes([kind, number * 2, *content])


def test_fields_of_a_page_header_are_found_as_thrift_finds_them():
    parse = parquet_files._parse_struct
    found, end = parse(bytes([0x15, 8, 0x38, 3, 1, 2, 3, 0x1C, 0x25, 9, 0, 0x11, 0x13, 7, 0, 99]), 0)
    assert (found.integers, found.structs[5].integers, end) == ({1: 4}, {2: -5}, 15)
    twice = field(2, 5, 10) + field(2, 5, 12) + field(2, 6, 0) + field(2, 8, 1, 0)
    assert parse(twice + b"\0", 0)[0].integers == {2: 6}, "the last of its type counts, others are skipped"
    for damaged in (
        field(2, 9, 0x15, 2),
        field(2, 5, *[255] * 10),
        field(2, 5, 0xFE, 0xFF, 0xFF, 0xFF, 0x7F),
        bytes([5, 0x84, 0x80, 0x08, 2]),
        bytes([0x1C] * 40),
    ):
        with pytest.raises(ValueError, match="no "):
            parse(damaged + b"\0", 0)
    with pytest.raises(IndexError):
        parse(field(2, 5, 128), 0)


def test_without_pyarrow_one_line_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", {"a": pa.array([1.0])})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match=r"read with pyarrow, .*'edgefl-fleet\[parquet\]' -c constraints.txt"):
        read(path, ["a"])


def test_pyarrow_is_not_imported_for_csv_files(tmp_path):
    (tmp_path / "a.csv").write_text("a\n1\n")
    program = (
        "import sys; from edgefl.tasks.datasets.shards import inspect_shard; inspect_shard('table', sys.argv[1]); "
        "sys.exit('pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_pandas_is_not_imported_for_parquet_files(tmp_path):
    write(tmp_path / "a.parquet", make_columns())
    program = (
        "import sys; from pathlib import Path; from edgefl.tasks.datasets.table_files import iterate_shard; "
        "parts = iterate_shard(Path(sys.argv[1]), 'table', ['heat', 'count'], ['kind'], drops_missing=True); "
        "assert sum(len(part.numbers) for part in parts) > 700; sys.exit('pandas' in sys.modules)"
    )
    assert importlib.util.find_spec("pandas"), "pyarrow imports it where it is installed"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_configured_tasks_train_on_the_same_rows_as_of_a_csv_file(tmp_path):
    columns = make_columns() | {"heat": pa.array(np.random.default_rng(3).normal(size=ROWS))}
    columns |= {"kind": pa.array([f"word {row % 5}" for row in range(ROWS)])}
    del columns["unused"]
    places = [write(tmp_path / "a.parquet", columns, row_group_size=300), write_csv(tmp_path / "a.csv", columns)]
    labels = ",".join(f"word {number}" for number in range(5))
    for name, options in {
        "table": {"columns": "heat", "target": "kind", "labels": labels, "group": "count"},
        "series": {"columns": "heat,count", "window": 10, "step": 1, "loss": "reconstruction"},
        "text": {"column": "count", "target": "kind", "labels": labels, "size": 64},
    }.items():
        task = make_task(name, options)
        ours, theirs = (load_task_data(task, place) for place in places)
        np.testing.assert_array_equal(ours.inputs, theirs.inputs)
        np.testing.assert_array_equal(ours.targets, theirs.targets)
        shards = [
            create_shards(name, "iid", 3, tmp_path / name / place.suffix, place, options=options) for place in places
        ]
        assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]
        assert inspect_shard(name, str(places[0])).num_examples == ROWS
