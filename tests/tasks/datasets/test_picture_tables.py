"""Pictures in columns of Parquet and Arrow files, as folders of Hugging Face's datasets have them."""

import io
import json
import struct
import zlib

import numpy as np
import pytest

from edgefl.core.errors import DataError
from edgefl.core.types import Dataset
from edgefl.tasks.datasets import arrow_files, class_folders, parquet_files
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.datasets.shards import inspect_shard, load_task_data
from edgefl.tasks.registry import make_task

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install '.[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install '.[parquet]'")
Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install '.[pictures]'")

NAMES = ("cat", "dog")
FEATURES = {"image": {"_type": "Image"}, "label": {"names": list(NAMES), "_type": "ClassLabel"}}
KINDS = ("arrow", "parquet")


def encode(pixels, kind="PNG"):
    content = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(content, kind)
    return content.getvalue()


def make_pixels(num):
    return np.random.default_rng(3).integers(0, 256, (num, 9, 9, 3), np.uint8)


def make_rows(contents, labels, **columns):
    pictures = [None if content is None else {"bytes": content, "path": "a/b.png"} for content in contents]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    before = {"extra": pa.array([{"a": [1] * (row % 3), "b": str(row)} for row in range(len(labels))])}
    return pa.table({**before, **columns, "image": pa.array(pictures, kind), "label": pa.array(labels, pa.int64())})


def save(folder, table, kind, *, batch_rows=7, features=FEATURES, **options):
    """Writes a folder as `save_to_disk` (Arrow), or as the files of the Hub are (Parquet)."""
    folder.mkdir(exist_ok=True)
    if kind == "parquet":
        known = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
        path = folder / "train-00000-of-00001.parquet"
        parquet.write_table(table.replace_schema_metadata(known), path, row_group_size=batch_rows, **options)
        return folder
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch_rows)
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    return folder


def read(folder, **options) -> Dataset:
    return load_task_data(make_task("pictures", {"labels": "cat,dog", "size": 9, **options}), folder)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_those_that_were_saved_and_classes_go_by_name(tmp_path, kind):
    pixels, labels = make_pixels(80), (np.arange(80) % 3 == 0).astype(int)
    folder = save(tmp_path / "saved", make_rows(list(map(encode, pixels)), labels.tolist()), kind, batch_rows=37)
    data = read(folder)
    assert (data.inputs == pixels.transpose(0, 3, 1, 2)).all()
    assert (data.targets == labels).all()
    swapped = read(folder, labels="dog,cat")
    assert (swapped.targets == 1 - labels).all()
    assert (read(next(folder.glob(f"*.{kind}"))).inputs == data.inputs).all(), (
        "one file of it, names beside or within"
    )
    assert inspect_shard("pictures", str(folder), is_detailed=True).num_examples == 80
    cut = load_central_data("pictures", folder, options={"labels": "cat,dog", "size": 9})
    assert len(cut.train) + len(cut.test) == 80


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_other_names_and_pictures_without_a_struct_are_read(tmp_path, kind):
    pixels = make_pixels(5)
    columns = {"img": pa.array(list(map(encode, pixels)), pa.binary()), "kind": ["dog", "cat", "dog", "cat", "cat"]}
    folder = save(tmp_path / "saved", pa.table(columns), kind)
    data = read(folder, column="img", target="kind", channels=1)
    assert (data.inputs.shape, data.targets.tolist()) == ((5, 1, 9, 9), [1, 0, 1, 0, 0])
    with pytest.raises(DataError, match="has no column 'image'; its columns are img, kind"):
        read(folder)
    counted = save(tmp_path / "counted", pa.table({"image": [1, 2], "label": [0, 1]}), kind)
    with pytest.raises(DataError, match="column 'image' must hold pictures, and holds int"):
        read(counted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("contents", "labels", "error"),
    [
        ([b"GIF89a"], [0], "row 1 cannot be read: it is no PNG or JPEG file"),
        ([None], [0], "row 1: image is missing"),
        ([b""], [0], "row 1: image is missing"),
        ([encode(make_pixels(1)[0])] * 2, [0, -1], "row 2: label is none of the labels cat, dog"),
        ([encode(make_pixels(1)[0])], [7], "column 'label' has a class of more than 2"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_example_is_one_line(tmp_path, kind, contents, labels, error):
    folder = save(tmp_path / "saved", make_rows(contents, labels), kind)
    with pytest.raises(DataError, match=error):
        read(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_under_a_missing_picture_are_none(tmp_path, kind):
    parts = [pa.array([encode(make_pixels(1)[0])] * 2), pa.array(["a.png", "b.png"])]
    pictures = pa.StructArray.from_arrays(parts, ["bytes", "path"], mask=pa.array([False, True]))
    folder = save(tmp_path / "saved", pa.table({"image": pictures, "label": [0, 1]}), kind)
    with pytest.raises(DataError, match="row 2: image is missing"):
        read(folder)


def test_rows_without_a_class_of_the_task_are_of_the_others(tmp_path):
    contents = list(map(encode, make_pixels(3)))
    folder = save(tmp_path / "saved", make_rows(contents, [0, 1, 0]), "arrow")
    assert read(folder, labels="dog,none", others="none").targets.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match="group_before is for files by name"):
        read(folder, group_before="_")
    with pytest.raises(DataError, match="unlabelled is for files by name"):
        read(folder, unlabelled=True)
    (folder / NAMES[1]).mkdir()
    with pytest.raises(DataError, match=r"has the class folder 'dog' and data-00000-of-00001\.arrow; keep one"):
        read(folder)


def make_bomb():
    """A PNG file of a few bytes that says 60,000 x 60,000 pixels."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_that_would_not_fit_in_memory_are_refused_before_they_are_decoded(tmp_path, monkeypatch, kind):
    folder = save(tmp_path / "saved", make_rows([make_bomb()], [0]), kind)
    with pytest.raises(DataError, match="row 1"):
        read(folder)
    large = save(tmp_path / "large", make_rows([encode(make_pixels(1)[0])] * 9, [0] * 9), kind)
    monkeypatch.setattr(class_folders, "MAX_VALUES", 8 * 3 * 9 * 9)
    with pytest.raises(DataError, match="9 examples of 243 values each, at most 1,944 are held"):
        read(large)
    monkeypatch.setattr({"arrow": arrow_files, "parquet": parquet_files}[kind], "MAX_PICTURE_BYTES", 100)
    with pytest.raises(DataError, match=r"a picture of \d+ bytes, at most 100 are read"):
        read(large)


def test_many_pictures_stay_in_a_file(tmp_path, monkeypatch):
    pixels = make_pixels(60)
    folder = save(tmp_path / "saved", make_rows(list(map(encode, pixels)), [0, 1] * 30), "parquet")
    monkeypatch.setattr(class_folders, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(class_folders.RowBuffer.__init__, "__defaults__", (2000,))
    data = read(folder)
    assert not isinstance(data.inputs, np.ndarray)
    assert (np.asarray(data.inputs[:]) == pixels.transpose(0, 3, 1, 2)).all()
