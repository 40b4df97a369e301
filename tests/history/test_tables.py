"""Rows as a table: in a notebook, pandas, polars, Arrow and Parquet, with one type a column."""

import pytest

from edgefl.core.errors import MissingPackageError
from edgefl.history import tables
from edgefl.history.tables import Table, write_parquet

COLUMNS = ("round", "loss", "source", "metrics")
ROWS = [
    {"round": 1, "loss": None, "source": None, "metrics": {"rmse": 2.5}, "other": 1},
    {"round": 2, "loss": 1, "source": "<b>", "metrics": None},
    {"round": 3, "loss": 0.25, "source": "device", "metrics": {"rmse": 1.5}},
]


@pytest.fixture
def table():
    return Table(ROWS, COLUMNS, "rounds")


def test_a_table_is_a_sequence_of_its_rows(table):
    assert (len(table), table[-1]["loss"], [row["round"] for row in table]) == (3, 0.25, [1, 2, 3])
    assert (table[1:].rows, table[1:].columns, table[1:].kind) == (ROWS[1:], COLUMNS, "rounds")
    assert repr(table) == "Table(3 rows: round, loss, source, metrics)"


def test_a_notebook_shows_the_newest_rows_and_takes_no_text_of_theirs_for_html(table, monkeypatch):
    shown = table._repr_html_()
    assert shown.count("<tr>") == 4
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    monkeypatch.setattr(tables, "MAX_DISPLAYED_ROWS", 2)
    assert "2.5" not in table._repr_html_()
    assert "the newest 2 of 3 rows" in table._repr_html_()


def test_pandas_has_the_columns_in_their_order_and_objects_as_they_are(table):
    pytest.importorskip("pandas", reason="needs pandas: pip install '.[tables]'")
    frame = table.to_pandas()
    assert tuple(frame.columns) == COLUMNS
    assert frame["loss"].tolist()[1:] == [1.0, 0.25]
    assert frame["metrics"][0] == {"rmse": 2.5}
    assert tuple(Table([], COLUMNS).to_pandas().columns) == COLUMNS


def test_arrow_and_polars_have_text_as_text_and_objects_as_json(table):
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install '.[tables]'")
    polars = pytest.importorskip("polars", reason="needs polars: pip install '.[tables]'")
    assert [str(field.type) for field in table.to_arrow().schema] == ["int64", "double", "string", "string"]
    frame = table.to_polars()
    assert frame.schema["source"] == polars.String
    assert frame["metrics"].to_list() == ['{"rmse": 2.5}', None, '{"rmse": 1.5}']
    assert [str(field.type) for field in Table([], ("source",), "rounds").to_arrow().schema] == ["string"]


def test_a_parquet_file_of_many_pages_has_one_type_a_column(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install '.[tables]'")
    path = tmp_path / "rounds.parquet"
    write_parquet(path, COLUMNS, "rounds", iter([[row] for row in ROWS]))
    assert parquet.read_table(path).to_pydict() == {
        "round": [1, 2, 3], "loss": [None, 1.0, 0.25], "source": [None, "<b>", "device"],
        "metrics": ['{"rmse": 2.5}', None, '{"rmse": 1.5}'],
    }  # fmt: skip
    write_parquet(path, COLUMNS, "rounds", iter([]))
    assert parquet.read_table(path).column_names == [*COLUMNS]


def test_a_package_that_is_not_there_is_named_with_its_extra(table, monkeypatch):
    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(tables, "import_module", refuse)
    for convert, extra in ((table.to_pandas, "tables"), (table.to_polars, "tables"), (table.to_arrow, "parquet")):
        with pytest.raises(MissingPackageError, match=rf"\[{extra}\]"):
            convert()
