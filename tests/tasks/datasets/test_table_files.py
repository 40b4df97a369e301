"""CSV files as shards: chosen columns, within bounds, also while they are being written."""

import numpy as np
import pytest
from table_parts import read_table

from edgefl.core.errors import DataError
from edgefl.tasks.datasets import table_files
from edgefl.tasks.datasets.table_files import iterate_shard, survey_table


def read(path, numbers, texts=(), **options):
    parts = read_table(path, "table", numbers, texts, **options)
    return np.concatenate([part.numbers for part in parts]).tolist(), [part.texts for part in parts]


@pytest.mark.parametrize(
    "text",
    [
        "a,b,c\n1,2.5,x\n3,-4e1,y\n",
        "a;b;c\n1;2,5;x\n3;-40;y\n",
        "a\tb\tc\n1\t2.5\tx\n3\t-40\ty\n",
        '\ufeff"a", b ,c\r\n"1", 2.5 ,x\r\n\r\n3,-40,y\r\n',
    ],
    ids=["commas", "semicolons", "tabs", "quotes"],
)
def test_numbers_and_texts_are_found_by_name_whatever_is_between_cells(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    assert read(path, ["b", "a"], ["c"]) == ([[2.5, 1.0], [-40.0, 3.0]], [(("x", "y"),)])


def test_a_folder_is_its_csv_files_by_name(tmp_path):
    for name, value in {"b.csv": 2, "a.csv": 1, ".c.csv": 3, "d.txt": 4}.items():
        (tmp_path / name).write_text(f"a\n{value}\n")
    assert read(tmp_path, ["a"])[0] == [[1.0], [2.0]]


def test_rows_beyond_one_chunk_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 3)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "".join(f"{row},t{row}\n" for row in range(8)))
    numbers, texts = read(path, ["a"], ["b"])
    assert numbers == [[float(row)] for row in range(8)]
    assert texts == [(tuple(f"t{row}" for row in range(8)),)]
    assert survey_table(path, "table").num_examples == 8


@pytest.mark.parametrize("cell", ["1", '"1"'])
def test_of_a_wide_table_fewer_rows_are_read_at_once(tmp_path, monkeypatch, cell):
    monkeypatch.setattr(table_files, "CHUNK_CELLS", 4)
    path = tmp_path / "a.csv"
    path.write_text("a,b,c\n" + f"{cell},2,3\n" * 7)
    assert [len(part.numbers) for part in iterate_shard(path, "table", ["a", "b"])] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "rows",
    [
        "3,4,u\n",
        " 3 ,4.5e1, u \n",
        "3,,u\n",
        '3,"4","u, v"\n',
        '3,4,"u\n5,6,v"\n7,8,w\n',
        "3,4\n",
        "3,4,u,v\n",
        "3,4,#u\n#,5,v\n",
        "3,x,u\n",
        "\n\n3,4,u\n",
        "1_0,inf,u\n",
        "3,4,u\r\n5,6,v\r\n",
        "3,4,u\n5,6",
        "3,4\n5,6,u\n7",
        "3,4,u\n5,6,v",
        "\u0663,4,u\n",
    ],
)
@pytest.mark.parametrize("ahead", [0, 3, 4])
def test_plain_numbers_are_read_as_any_other_cells(tmp_path, monkeypatch, rows, ahead):
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 2)
    path = tmp_path / "a.csv"
    path.write_text("a,b,c\n" + "1,2.5,t\n" * ahead + rows + "8,9,z\n" * (0 if rows[-1] != "\n" else 3), newline="")

    def attempt():
        found = []
        for texts in ([], ["c"]):
            try:
                parts = [*iterate_shard(path, "table", ["b", "a"], texts, drops_missing=True)]
                numbers = np.concatenate([part.numbers for part in parts]).tolist()
                found.append((numbers, [text for part in parts for column in part.texts for text in column]))
            except DataError as error:
                found.append(str(error))
        for is_detailed in (False, True):
            try:
                found.append(survey_table(path, "table", is_detailed=is_detailed))
            except DataError as error:
                found.append(str(error))
        return found

    quick = attempt()
    monkeypatch.setattr(table_files.CsvTable, "_read_plain", lambda *_: iter(()))
    assert quick == attempt()


def test_a_table_of_plain_numbers_needs_no_other_reader(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("a;b;c\n" + "1;2.5;t\n" * 5)
    monkeypatch.setattr(table_files.CsvTable, "_read_rows", lambda *_: iter(()))
    assert read(path, ["b", "a"], ["c"]) == ([[2.5, 1.0]] * 5, [(("t",) * 5,)])
    assert survey_table(path, "table").num_examples == 5


def test_hex_digits_that_look_like_huge_numbers_are_texts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,check\n1,12e200\n2,07e300\n3,1f\n")
    found = survey_table(path, "table", is_detailed=True)
    assert found.details == ("a: mean 2, deviation 0.816497", "check: texts")


def test_a_last_line_that_is_still_being_written_waits(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n3")
    assert read(path, ["a"])[0] == [[1.0]]
    path.write_text("a,b\n1,2\n3,4")
    assert read(path, ["a"])[0] == [[1.0], [3.0]]


@pytest.mark.parametrize("gap", ["", " ", "NaN", "NA", "null"])
def test_a_missing_number_is_refused_or_its_row_left_out(tmp_path, gap):
    path = tmp_path / "a.csv"
    path.write_text(f"a,b\n1,2\n3,{gap}\n5,6\n")
    with pytest.raises(DataError, match=r'row 2: b is missing or no finite number; missing = "drop"'):
        read(path, ["a", "b"])
    assert read(path, ["a", "b"], drops_missing=True)[0] == [[1.0, 2.0], [5.0, 6.0]]
    assert read(path, ["a"])[0] == [[1.0], [3.0], [5.0]], "a column that nobody asked for may have gaps"


def test_numbers_behind_a_gap_and_before_it_are_read_alike(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a;b\n1;2\n3;4\n5;NA\n7;8\n9;10\n11;0,5\n")
    with table_files.CsvTable(path) as table:
        found = np.concatenate([numbers for numbers, _ in table.read_chunks(["a", "b"], [], 2)])
    assert found[:, 0].tolist() == [1, 3, 5, 7, 9, 11]
    assert np.isnan(found[2, 1])
    assert np.delete(found[:, 1], 2).tolist() == [2, 4, 8, 10, 0.5]


def test_a_missing_text_is_one_too(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,x\n3,\n")
    with pytest.raises(DataError, match="row 2: b is missing"):
        read(path, ["a"], ["b"])
    assert read(path, ["a"], ["b"], drops_missing=True) == ([[1.0]], [(("x",),)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no column 'a'; its columns are none"),
        (b"b,c\n1,2\n", "no column 'a'; its columns are b, c"),
        (b"a,a\n1,2\n", "2 columns 'a'"),
        (b"a\n", "holds no rows"),
        (b"a,b\n1\n2,3\n", "row 1: 1 cells, the first line has 2"),
        (b"a,b\n1,2,3\n", "row 1: 3 cells, the first line has 2"),
        (b"17.5\n1\n", "has no line of column names: its first line holds numbers"),
        (b"a\nwarm\n", "row 1: column 'a' must hold numbers, and holds text"),
        (b"a\n1e99\n", "a number is missing or no finite number"),
        (b"a\ninf\n", "a number is missing or no finite number"),
        (b"a\n\xff\n", "cannot be read as CSV"),
        (b"a\n" + b"1" * 1_000_001, "a line of more than 1000000 characters"),
    ],
)
def test_what_is_no_table_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read(path, ["a"])
    assert "\n" not in str(error.value)
    assert "warm" not in str(error.value), "errors reach the coordinator, cells must not"


def test_bounds_hold_before_anything_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n2\n3\n")
    with pytest.raises(DataError, match=r"must be a CSV, Parquet or Arrow file, or a folder of .*; there is none"):
        read(tmp_path / "b.csv", ["a"])
    monkeypatch.setattr(table_files, "MAX_CELLS", 2)
    with pytest.raises(DataError, match="more than 2 numbers; take fewer files"):
        read(path, ["a"])
    monkeypatch.setattr(table_files, "MAX_FILE_BYTES", 5)
    with pytest.raises(DataError, match="has 8 bytes, at most 5 are read"):
        read(path, ["a"])


def test_a_file_of_a_folder_that_is_gone_when_it_is_to_be_opened_is_left_out(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n2\n")
    (tmp_path / "b.csv").symlink_to(tmp_path / "gone.csv")
    assert [len(part.numbers) for part in read_table(tmp_path, "table", ("x",))] == [2]
    assert survey_table(tmp_path, "table").num_examples == 2
    (tmp_path / "a.csv").unlink()
    with pytest.raises(DataError, match="holds no rows"):
        read_table(tmp_path, "table", ("x",))
