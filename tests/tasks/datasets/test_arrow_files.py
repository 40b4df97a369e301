"""Folders of Hugging Face's datasets as shards: the same rows as of a CSV file, names of classes, within bounds."""

import base64
import itertools
import json
import zlib

import numpy as np
import pyarrow as pa
import pytest
from table_parts import read_table

from edgefl.core.errors import DataError
from edgefl.tasks.datasets import arrow_files, table_files
from edgefl.tasks.datasets.arrow_files import ArrowTable
from edgefl.tasks.datasets.shards import inspect_shard
from edgefl.tasks.datasets.table_files import survey_table
from edgefl.tasks.registry import make_task

ROWS = 300
SAVED = (
    "c-oy(y-ve05WciY2_-"
    "_6D2Ra}^3(wqs2EtN#L|J81tH{8r;SL{sBxthgv7{0@CXb{eE}8*MwnQ6k8u7;NiBXPPO|;occ1V4b6J*UehHuk!m6+e6>z{sgl5@u-"
    "ox3}e9aOV!#D)*;w)k=;tx=<Hyqa_jDsOL@UKb0C?AhlDjh24E}te05ecFp<$Jqi+b8EacS55vBR5EO7R6!A_nSXRFT=Pi)iE8&Qm14hq*HQM+"
    ";9}pG(Dyr7Rg<lP55Gsl#jx=_gxV*yw?hj{<zmeQ9v)4yzisna5VM(6MR>EAxFI5mgYdOqN2jK^zW6nB($4`R@_P8SE&K3h0{wxU(7B3qoe=Bg"
    "(dkP`JNio(XSxuNl*Q&RW@si929jzTbVNeSTbuMtZSVI8@f|GnGwpi%<~MnRnhn6J@Wvn#~k>w<pR#@>odz-"
    "!hBe?+;8Z$ZN%F~JTc;lk^fGwE#oZtIZJwVj68q&gZJ5vLbr#yLaT@^BY(N@{zV=P9)96n`Rb}a*Kn+ho(z57XCwAByZRT*RNuiTx?Yh|"
)
"""What `save_to_disk` of datasets 5.2.0, with pyarrow 26, wrote of five rows with the columns a (float32), b (int64),
kind (ClassLabel of x and y) and text: 1,064 bytes, without compression, and closed by an end of stream. Beside it lay
a dataset_info.json and a state.json with what `save` below writes."""


def make_table(num_rows=ROWS):
    rng = np.random.default_rng(2)
    rows = np.arange(num_rows)
    return pa.table(
        {
            "skipped": pa.array([{"bytes": b"x" * (row % 3), "path": None} for row in rows]),
            "heat": pa.array(rng.normal(size=num_rows).astype(np.float32), mask=rows % 9 == 4),
            "list": pa.array([[row] * (row % 3) for row in rows.tolist()]),
            "count": pa.array(rng.integers(-500, 500, num_rows), pa.int16()),
            "many": pa.array(rng.integers(0, 2**60, num_rows), pa.uint64()),
            "none": pa.nulls(num_rows),
            "is_open": pa.array(rows % 3 == 0, mask=rows % 7 == 2),
            "word": pa.array([f" wörd {row % 5}" if row % 11 else None for row in rows.tolist()]),
            "kind": pa.array(rows % 3 - 1),
        }
    )


def save(folder, table, num_shards=1, batch_rows=70, names=("x", "y"), **options):
    """Writes a table as `Dataset.save_to_disk` does."""
    folder.mkdir(exist_ok=True)
    files = [f"data-{number:05}-of-{num_shards:05}.arrow" for number in range(num_shards)]
    edges = np.linspace(0, len(table), num_shards + 1).astype(int)
    for name, start, stop in zip(files, edges[:-1], edges[1:], strict=True):
        with pa.OSFile(str(folder / name), "wb") as out, pa.ipc.new_stream(out, table.schema, **options) as stream:
            stream.write_table(table.slice(start, stop - start), max_chunksize=batch_rows)
    features = {"kind": {"names": list(names), "_type": "ClassLabel"}, "heat": {"dtype": "float32", "_type": "Value"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    return folder


def read(path, numbers, texts=(), **options):
    parts = read_table(path, "table", numbers, texts, **options)
    return [(part.numbers.tolist(), part.texts, part.first_row) for part in parts]


def write_csv(path, table):
    cells = zip(*(column.to_pylist() for column in table.columns), strict=True)
    lines = [",".join("" if cell is None else str(cell).lower() for cell in row) for row in cells]
    path.write_text("\n".join([",".join(table.column_names), *lines]) + "\n")
    return path


@pytest.mark.parametrize(("num_shards", "batch_rows"), [(1, 1000), (1, 7), (3, 33)])
def test_rows_are_those_of_a_csv_file_however_they_are_cut(tmp_path, monkeypatch, num_shards, batch_rows):
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 30)
    table = make_table()
    folder = save(tmp_path / "saved", table, num_shards, batch_rows)
    kept = table.select(["heat", "count", "many", "word", "is_open"])
    other = write_csv(tmp_path / "rows.csv", kept)
    options = {"numbers": ["many", "count", "heat"], "texts": ["word", "is_open"], "drops_missing": True}
    ours, theirs = read(folder, **options), read(other, **options)
    assert [*itertools.chain(*(part[0] for part in ours))] == theirs[0][0]
    for column in (0, 1):
        assert (*itertools.chain(*(part[1][column] for part in ours)),) == theirs[0][1][column]
    with pytest.raises(DataError, match="row 5: heat is missing or no finite number"):
        read(folder, ["heat"])
    found = survey_table(folder, "table", is_detailed=True)
    assert found.num_examples == inspect_shard("table", str(folder)).num_examples == ROWS
    described = dict(line.split(": ", 1) for line in found.details)
    expected = dict(line.split(": ", 1) for line in survey_table(other, "table", is_detailed=True).details)
    assert described["kind"] == described["skipped"] == described["none"] == "texts"
    assert {name: described[name] for name in ("heat", "count", "many")} == {
        name: expected[name] for name in ("heat", "count", "many")
    }


def test_a_file_that_datasets_wrote_is_read(tmp_path):
    folder = save(tmp_path / "saved", make_table(5))
    (folder / "data-00000-of-00001.arrow").write_bytes(zlib.decompress(base64.b85decode(SAVED)))
    ((numbers, _, _),) = read(folder, ["a", "b"], drops_missing=True)
    assert numbers == [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0]], "a of the second and fifth row is null"
    ((_, texts, _),) = read(folder, [], ["kind", "text"])
    assert texts == (("x", "y", "x", "x", "y"), ("hi there", "ö", "z", "hi there", "ö"))


def test_classes_are_named_as_the_data_set_names_them_whatever_the_order_of_a_task(tmp_path):
    folder = save(tmp_path / "saved", make_table())
    task = make_task("table", {"columns": "count", "target": "kind", "labels": "y,x", "missing": "drop"})
    numbers = np.array([kind for kind in (np.arange(ROWS) % 3 - 1) if kind >= 0])
    np.testing.assert_array_equal(task.read(str(folder)).targets, 1 - numbers)
    with pytest.raises(DataError, match=r"column 'kind' has a class of more than 1"):
        task.read(str(save(tmp_path / "saved", make_table(), names=["x"])))


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([[1.0]]), "list"),
        (pa.array([{"b": 1.0}]), "struct"),
        (pa.array(["warm"]), "text"),
        (pa.array(["warm"]).dictionary_encode(), "categories"),
        (pa.array([None]), "null"),
        (pa.array([1], pa.timestamp("s")), "timestamp"),
    ],
)
def test_a_column_of_another_type_is_one_clear_line_that_names_it(tmp_path, column, kind):
    folder = save(tmp_path / "saved", pa.table({"b": pa.array([2.5]), "a": column, "c": pa.array([3.5])}))
    with pytest.raises(DataError, match=f"column 'a' must hold numbers, and holds {kind}$"):
        read(folder, ["a"])
    assert read(folder, ["c", "b"])[0][0] == [[3.5, 2.5]], "its buffers are counted"


def test_a_folder_of_splits_or_with_files_that_are_gone_is_one_clear_line(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"holds several data sets \(train, test\); name the folder of one of them"):
        read(tmp_path, ["count"])
    folder = save(tmp_path / "train", make_table(), num_shards=2)
    save(folder, make_table(), num_shards=1)
    assert sum(part[2] == 1 for part in read(folder, ["count"])) == 1, "files that are left of a saving before"
    (folder / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"lists data-00000-of-00001.arrow, which is not there"):
        read(folder, ["count"])
    for content in ({}, {"_data_files": [{"filename": "../a.arrow"}]}, {"_data_files": [7]}):
        (folder / "state.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=r"must list \.arrow files beside it"):
            read(folder, ["count"])
    name = "data-00000-of-00002.arrow"
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}] * 2}))
    with pytest.raises(DataError, match=f"lists {name} 2 times; each file must be there once"):
        read(folder, ["count"])
    (folder / "state.json").unlink()
    assert sum(len(part[0]) for part in read(folder, ["count"])) == ROWS, "any folder of such files, by name"


def test_a_file_that_is_cut_compressed_or_none_is_one_clear_line(tmp_path):
    folder = save(tmp_path / "saved", make_table())
    path = folder / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], "is no whole stream of Arrow"),
        (whole[:-8], "is no whole stream of Arrow"),
        (whole[:-200], "is no whole stream of Arrow"),
        (b"", "is no whole stream of Arrow"),
        (b"ARROW1\0\0" + whole, "cannot be read as a stream of Arrow"),
        (whole[:4] + b"\xff\xff\xff\x7f" + whole[8:], "cannot be read as a stream of Arrow"),
        (whole[:8] + b"\xff" * 40 + whole[48:], "cannot be read as a stream of Arrow"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as error:
            read(path, ["count"], ["word"], drops_missing=True)
        assert "\n" not in str(error.value)
    for codec in ("lz4", "zstd"):
        save(folder, make_table(), options=pa.ipc.IpcWriteOptions(compression=codec))
        with pytest.raises(DataError, match="is compressed, which is not read"):
            read(path, ["count"])


def test_the_bounds_on_numbers_and_texts_hold(tmp_path, monkeypatch):
    path = save(tmp_path / "saved", make_table()) / "data-00000-of-00001.arrow"
    with ArrowTable(path, max_cells=ROWS) as table, pytest.raises(DataError, match=r"300 rows, .* at most 150 are"):
        list(table.read_chunks(["heat", "count"], [], 100))
    with pytest.raises(DataError, match="has 300 rows"), ArrowTable(path, max_cells=ROWS - 1):
        pass
    num_bytes = sum(len(word.encode()) for word in make_table()["word"].to_pylist() if word)
    monkeypatch.setattr(arrow_files, "MAX_FILE_TEXT_BYTES", num_bytes)
    read(path, [], ["word"], drops_missing=True)
    monkeypatch.setattr(arrow_files, "MAX_FILE_TEXT_BYTES", num_bytes - 1)
    with pytest.raises(DataError, match="bytes of text in these columns; save it in more shards"):
        read(path, [], ["word"], drops_missing=True)
    categories = pa.table({"a": pa.array([1.0]), "b": pa.array(["z"]).dictionary_encode()})
    monkeypatch.setattr(arrow_files, "MAX_MESSAGES", 3)  # a schema, categories, and rows
    read(save(tmp_path / "categories", categories), ["a"])
    monkeypatch.setattr(arrow_files, "MAX_MESSAGES", 2)
    with pytest.raises(DataError, match="cannot be read as a stream of Arrow"):
        read(tmp_path / "categories", ["a"])
    monkeypatch.undo()
    monkeypatch.setattr(arrow_files, "MAX_FIELDS", 12)
    read(path, ["count"])
    monkeypatch.setattr(arrow_files, "MAX_FIELDS", 11)
    with pytest.raises(DataError, match="cannot be read as a stream of Arrow"):
        read(path, ["count"])


def test_rows_that_a_batch_says_and_does_not_have_are_one_clear_line(tmp_path):
    folder = save(tmp_path / "saved", pa.table({"a": pa.array(np.arange(1000.0))}), batch_rows=1000)
    path = folder / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    rows = (1000).to_bytes(8, "little")
    assert whole.count(rows) == 2, "of the batch, and of its node"
    for num_rows, num_changed in ((1001, 2), (999, 1), (2**62, 2), (-1, 2)):
        path.write_bytes(whole.replace(rows, num_rows.to_bytes(8, "little", signed=True), num_changed))
        with pytest.raises(DataError, match=r"a stream of Arrow \(ValueError\)|with so many columns at most"):
            read(path, ["a"])


@pytest.mark.parametrize(
    "damage",
    [
        [2**62 + 1, -(2**62) - 1, 0] * 6 + [2**62 + 1, -(2**62) - 1, 21000],  # differences wrap to positive ones
        [1, 0] * 10 + [21000],
        [-1] * 20 + [21000],
        [*range(20), 2**62],
    ],
)
def test_places_of_texts_that_do_not_rise_within_their_content_are_one_clear_line(tmp_path, damage):
    words = pa.array([f"{row:>1000}" for row in range(21)], pa.large_string())
    folder = save(tmp_path / "saved", pa.table({"word": words}))
    path = folder / "data-00000-of-00001.arrow"
    offsets = np.arange(0, 21001, 1000).tobytes()
    whole = path.read_bytes()
    assert whole.count(offsets) == 1
    path.write_bytes(whole.replace(offsets, np.array([0, *damage]).tobytes()))
    with pytest.raises(DataError, match=r"a stream of Arrow \(ValueError\)|bytes of text in these columns"):
        read(folder, [], ["word"])


def test_what_lies_in_the_place_of_a_missing_value_is_not_read(tmp_path):
    is_there = pa.py_buffer(np.packbits([1, 0, 1], bitorder="little").tobytes())
    kinds = [
        pa.Array.from_buffers(kind, 3, [is_there, pa.py_buffer(np.array(values, form).tobytes())], 1)
        for kind, form, values in ((pa.int64(), "i8", [1, -99, 0]), (pa.uint8(), "u1", [1, 255, 0]))
    ]
    places = pa.py_buffer(np.array([0, 1, 3, 4], "i4").tobytes())
    words = pa.Array.from_buffers(pa.string(), 3, [is_there, places, pa.py_buffer(b"a\xff\xffb")], 1)
    for kind in kinds:
        folder = save(tmp_path / "saved", pa.table({"kind": kind, "word": words}))
        ((_, texts, _),) = read(folder, [], ["kind", "word"], drops_missing=True)
        assert texts == (("y", "x"), ("a", "b"))


def test_the_names_of_columns_are_counted_once_however_many_there_are(tmp_path):
    class Table(ArrowTable):
        num_listed = 0

        @property
        def header(self):
            self.num_listed += 1
            return super().header

    columns = [pa.array([1.0])] * 50
    table = pa.Table.from_arrays(columns, names=["same", *map(str, range(48)), "same"])
    path = save(tmp_path / "saved", table) / "data-00000-of-00001.arrow"
    with Table(path, max_cells=1000) as opened:
        ((_, found), _) = opened.survey(100, is_detailed=True)
        assert [name for name, _ in found] == [*map(str, range(48))]
        assert opened.num_listed == 1
