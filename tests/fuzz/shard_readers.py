"""Data: shards and their cards, the files that shards are cut from, and rows that a model is run on."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.codec_readers import npz_seeds
from fuzz.reader import MIB, Form, Reader, Seed

from edgefl.core.errors import DataError
from edgefl.device.inference.onnx_model import read_inputs
from edgefl.tasks.datasets.array_files import MAX_BYTES, read_idx, read_npz
from edgefl.tasks.datasets.arrow_files import list_arrow_files
from edgefl.tasks.datasets.cifar import read_test_batch
from edgefl.tasks.datasets.class_folders import read_picture, read_sound
from edgefl.tasks.datasets.sample_updates import read_sample_update
from edgefl.tasks.datasets.shards import check_shard, inspect_shard
from edgefl.tasks.motionsense import read_motion_windows
from edgefl.tasks.registry import make_task

PIXELS = {"inputs": np.arange(192, dtype=np.uint8).reshape(3, 8, 8) % 17, "labels": np.array([0, 9, 3])}


def npz(arrays: dict[str, np.ndarray], *, packed: bool = False) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(out, **arrays)
    return out.getvalue()


def bomb(name: str, num_bytes: int) -> bytes:
    """An archive of a few kilobytes with a member of zeros that says it is an array of so many bytes."""
    out, head = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (num_bytes,)})
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", head.getvalue() + bytes(num_bytes))
    return out.getvalue()


def pickled() -> bytes:
    out = io.BytesIO()
    np.savez(out, inputs=np.array([{"a": 1}], dtype=object), labels=np.array([0]))
    return out.getvalue()


def shards(folder: Path) -> Reader:
    """A shard folder into which a board collects: files without cards."""
    place = folder / "shard"
    place.mkdir()
    task = make_task("digits")

    def feed(data: bytes) -> None:
        (place / "part.npz").write_bytes(data)
        check_shard(task, str(place))

    seeds = (Seed(content=npz(PIXELS)), Seed(content=npz(PIXELS, packed=True)), *npz_seeds(PIXELS))
    return Reader(feed=feed, seeds=seeds, words=NPY_WORDS)


def shards_in_place(folder: Path) -> Reader:
    """An array that stays in its file, as those of large shards do."""
    path = folder / "in-place.npz"

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        try:
            with path.open("rb") as file:
                np.asarray(read_npz(file, tuple(PIXELS), in_place="inputs".__eq__)["inputs"])
        except (OSError, ValueError) as error:  # as a shard's reader
            raise DataError(str(error)) from None

    return Reader(feed=feed, seeds=(Seed(content=npz(PIXELS)), *npz_seeds(PIXELS)), words=NPY_WORDS)


def cards(folder: Path) -> Reader:
    """A shard's card beside a shard that is right."""
    path = folder / "pi.npz"
    path.write_bytes(npz(PIXELS))
    task = make_task("digits")
    card = {
        "v": 1, "task": "digits", "scheme": "iid", "source": "here", "num_examples": 3, "counts": {"0": 1, "9": 1,
        "3": 1},
        "labels": ["0", "1"], "groups": ["a"], "blocks": {"0": [0, 2], "1": [2, 3]},
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }  # fmt: skip

    def feed(data: bytes) -> None:
        path.with_suffix(".json").write_bytes(data)
        check_shard(task, str(path))

    cards = (card, {**card, "is_dataset": True})
    return Reader(feed=feed, seeds=tuple(Seed(content=json.dumps(each).encode(), form=Form.JSON) for each in cards))


def idx_files(folder: Path) -> Reader:
    """IDX files, plain and packed; what one unpacks to may be large, but no larger than a data set's."""
    images = struct.pack(">BBBBIII", 0, 0, 8, 3, 3, 2, 2) + bytes(12)
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, 3) + bytes(3)
    seeds = (Seed(content=images), Seed(content=labels), Seed(content=gzip.compress(images)))
    inner = Seed(content=images, close=lambda found: gzip.compress(found, 1))
    return Reader(feed=_of_file(folder, "x-idx3-ubyte", read_idx), seeds=(*seeds, inner), most_bytes=3 * MAX_BYTES)


def cifar_batches(folder: Path) -> Reader:
    """Records of CIFAR-10: a label and three colours of 32 by 32 pixels."""
    record = bytes([7]) + bytes(range(256)) * 12
    feed = _of_file(folder, "test_batch.bin", lambda path: read_test_batch(path.parent))
    return Reader(feed=feed, seeds=(Seed(content=record), Seed(content=2 * record)), most_bytes=64 * MIB)


def tables(folder: Path) -> Reader:
    """CSV files of a configured task."""
    task = make_task("table", {"columns": "a,b", "target": "c", "labels": "x,y", "missing": "drop"})

    def read(path: Path) -> None:
        inspect_shard("table", str(path), is_detailed=True)
        task.read(str(path))

    texts = (b"a,b,c\n1,2.5,x\n-3,4e5,y\n", b'"a";b;"c"\r\n1;2,5;1\r\n;3;0\r\n', b"c\ta\tb\nx\t1\t2\ny\t1")
    seeds = tuple(Seed(content=text, form=Form.TEXT) for text in texts)
    return Reader(feed=_of_file(folder, "a.csv", read), seeds=seeds, words=(b"nan", b"1_0", b"1e999", b'"', b"\0"))


def texts(folder: Path) -> Reader:
    """CSV files of texts, with their classes and without."""
    task: Any = make_task(
        "text",
        {"column": "a", "target": "b", "labels": "x,y", "ngrams": "word-1..2,char-3", "size": 64, "missing": "drop"},
    )

    def read(path: Path) -> None:
        task.input_reader(path)
        task.read(str(path))

    cells = ("Too hot again", '"a ""quoted""\nline"', "\u01c6\ufdfa\u0130\U0001f600", "")
    lines = ["b,a", *(f"{'xy'[row % 2]},{cell}" for row, cell in enumerate(cells)), ""]
    seeds = (Seed(content="\n".join(lines).encode(), form=Form.TEXT), Seed(content=b"a;b\nzz;x\n", form=Form.TEXT))
    words = (b'"', b"\0", b"\r", "\ufdfa".encode() * 9, b"\xed\xa0\x80", b"\xef\xbb\xbf")
    return Reader(feed=_of_file(folder, "a.csv", read), seeds=seeds, words=words, most_bytes=64 * MIB, most_s=10.0)


def parquet_files(folder: Path) -> Reader:
    """Parquet files of a configured task: pages, their headers, and the footer."""
    import pyarrow as pa  # noqa: PLC0415 beside its use
    from pyarrow import parquet  # noqa: PLC0415 likewise

    task = make_task("table", {"columns": "a,b", "target": "c", "labels": "x,y", "missing": "drop"})
    columns = {"a": [1.0, None, -3.0] * 9, "b": [2, 5, 2**40] * 9, "c": ["x", None, "y"] * 9, "d": [[1], [], [2]] * 9}

    def save(**options: Any) -> Seed:
        out = io.BytesIO()
        parquet.write_table(pa.table(columns), out, **options)
        return Seed(content=out.getvalue())

    def read(path: Path) -> None:
        inspect_shard("table", str(path), is_detailed=True)
        task.read(str(path))

    seeds = (
        save(),
        save(store_schema=False, row_group_size=10, compression="zstd"),
        save(
            use_dictionary=False, compression="none", data_page_version="2.0", data_page_size=32, write_batch_size=2
        ),
    )
    words = (b"PAR1", b"\xfe\xff\xff\xff\x0f", b"\x15\x00", b"\x80\x80\x80\x80\x08")
    return Reader(feed=_of_file(folder, "a.parquet", read), seeds=seeds, words=words)


def arrow_files(folder: Path) -> Reader:
    """Arrow files of a configured task: messages, their tables, and the rows."""
    import pyarrow as pa  # noqa: PLC0415 beside its use

    task = make_task("table", {"columns": "a,b", "target": "c", "labels": "x,y", "missing": "drop"})
    columns = {
        "d": [{"e": "z", "f": [row]} for row in range(27)],
        "a": [1.0, None, -3.0] * 9,
        "b": [2, 5, 2**40] * 9,
        "g": pa.array(["z", None, "w"] * 9).dictionary_encode(),
    }
    info = {"features": {"c": {"names": ["x", "y"], "_type": "ClassLabel"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))

    def save(classes: list[Any], num_rows: int, kind: Any = None) -> Seed:
        out, table = io.BytesIO(), pa.table(columns | {"c": pa.array(classes * 9, kind)})
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table, max_chunksize=num_rows)
        return Seed(content=out.getvalue())

    def read(path: Path) -> None:
        inspect_shard("table", str(path), is_detailed=True)
        task.read(str(path))

    words = (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\x1b\0\0\0\0\0\0\0")
    words += tuple(place.to_bytes(8, "little", signed=True) for place in (2**62 + 1, -(2**62) - 1))
    seeds = (save(["x", None, "y"], 10), save([0, 1, -1], 27), save(["x", None, "y"], 27, pa.large_string()))
    return Reader(feed=_of_file(folder, "a.arrow", read), seeds=seeds, words=words, most_bytes=64 * MIB)


def pictures_in_parquet(folder: Path) -> Reader:
    """Pictures and their classes in a Parquet file."""
    return _read_picture_tables(folder, ".parquet")


def pictures_in_arrow(folder: Path) -> Reader:
    """Likewise in an Arrow file."""
    return _read_picture_tables(folder, ".arrow")


def _read_picture_tables(folder: Path, suffix: str) -> Reader:
    import pyarrow as pa  # noqa: PLC0415 beside its use
    from PIL import Image  # noqa: PLC0415 likewise
    from pyarrow import parquet  # noqa: PLC0415 likewise

    task = make_task("pictures", {"labels": "x,y", "size": 8})
    info = {"features": {"label": {"names": ["x", "y"], "_type": "ClassLabel"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    picture = io.BytesIO()
    Image.new("RGB", (9, 9)).save(picture, "PNG")
    rows = [{"bytes": picture.getvalue(), "path": None}] * 5
    table = pa.table({"image": rows, "label": [0, 1, 0, 0, 1]}, metadata={"huggingface": json.dumps({"info": info})})

    def save(**options: Any) -> Seed:
        out = io.BytesIO()
        if suffix == ".parquet":
            parquet.write_table(table, out, **options)
        else:
            with pa.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table, max_chunksize=3)
        return Seed(content=out.getvalue())

    def read(path: Path) -> None:
        inspect_shard("pictures", str(path))
        task.read(str(path))

    seeds = (save(), save(use_dictionary=False, compression="none", row_group_size=2))
    words = (b"\xff\xff\xff\x7f", b"\xfe\xff\xff\xff\x0f", b'"names":["x"]', b"\x05\0\0\0\0\0\0\0")
    return Reader(feed=_of_file(folder, f"a{suffix}", read), seeds=seeds, words=words)


def arrow_folders(folder: Path) -> Reader:
    """`state.json` of a folder of Arrow files."""
    (folder / "a.arrow").touch()
    seed = Seed(content=json.dumps({"_data_files": [{"filename": "a.arrow"}]}).encode(), form=Form.JSON)
    feed = _of_file(folder, "state.json", lambda path: list_arrow_files(path.parent))
    return Reader(feed=feed, seeds=(seed,))


def pictures(folder: Path) -> Reader:
    """PNG and JPEG files, as a folder of pictures has them."""
    from PIL import Image  # noqa: PLC0415 beside its use

    def save(mode: str, form: str) -> Seed:
        out = io.BytesIO()
        Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).convert(mode).save(out, form)
        return Seed(content=out.getvalue())

    seeds = tuple(
        save(*each) for each in (("RGB", "PNG"), ("P", "PNG"), ("LA", "PNG"), ("L", "JPEG"), ("RGB", "JPEG"))
    )
    feed = _of_file(folder, "a.png", lambda path: read_picture(path, size=8, channels=3))
    return Reader(feed=feed, seeds=seeds, most_bytes=64 * MIB)


def sounds(folder: Path) -> Reader:
    """WAV files of 8, 16, 24 and 32 bits."""

    def save(width: int, channels: int) -> Seed:
        out = io.BytesIO()
        with wave.open(out, "wb") as sound:
            sound.setparams((channels, width, 8000, 0, "NONE", ""))
            sound.writeframes(bytes(range(8 * width * channels)))
        return Seed(content=out.getvalue())

    seeds = tuple(save(width, channels) for width, channels in ((1, 1), (2, 2), (3, 1), (4, 1)))
    feed = _of_file(folder, "a.wav", lambda path: read_sound(path, sample_rate=8000, num_samples=6))
    return Reader(feed=feed, seeds=seeds, words=(b"fmt ", b"data", b"LIST", b"\xfe\xff"))


def motion_sets(folder: Path) -> Reader:
    """The file of MotionSense."""
    arrays = {
        "q": np.zeros((9, 300), np.int16), "scale": np.array(0.01), "length": np.array([150, 150]),
        "subject": np.array([1, 2]), "activity": np.array([0, 3]), "trial": np.array([1, 11]),
    }  # fmt: skip
    seeds = (Seed(content=npz(arrays)), *npz_seeds(arrays))
    return Reader(
        feed=_of_file(folder, "motionsense.npz", read_motion_windows),
        seeds=seeds,
        words=NPY_WORDS,
        most_bytes=64 * MIB,
    )


def gradients(folder: Path) -> Reader:
    """A gradient's file for `edgefl codecs bench`; the first byte says of which kind."""
    arrays = {"w": np.ones((3, 4), np.float32), "n": np.array([1, 2])}
    from safetensors.numpy import save  # noqa: PLC0415 beside its use

    def feed(data: bytes) -> None:
        path = folder / ("g.npz" if data[:1] == b"n" else "g.safetensors")
        path.write_bytes(data[1:])
        read_sample_update(path)

    tensors = save(arrays)
    size = int.from_bytes(tensors[:8], "little")
    seeds = [
        Seed(content=npz(arrays), close=lambda found: b"n" + found),
        Seed(content=tensors, close=lambda found: b"s" + found),
    ]
    seeds += [
        Seed(content=seed.content, close=lambda found, close=seed.close: b"n" + close(found))
        for seed in npz_seeds(arrays)
    ]
    seeds.append(
        Seed(
            content=tensors[8 : 8 + size], form=Form.JSON,
            close=lambda found: b"s" + len(found).to_bytes(8, "little") + found + tensors[8 + size :],
        )
    )  # fmt: skip
    return Reader(feed=feed, seeds=tuple(seeds), words=NPY_WORDS)


def rows(folder: Path) -> Reader:
    """Rows for `edgefl device infer`: .npy, .npz, .csv and IDX; the first byte says which."""

    class Model:
        task, options, preprocess, configured_task, path = "digits", {}, "", None, folder / "m.onnx"

        def to_batch(self, rows: Any) -> Any:
            return rows

    model: Any = Model()
    names = {b"y": "r.npy", b"z": "r.npz", b"c": "r.csv", b"i": "r-idx"}

    def feed(data: bytes) -> None:
        path = folder / names.get(data[:1], "r.csv")
        path.write_bytes(data[1:])
        read_inputs(path, model)

    def closed(mark: bytes, close: Callable[[bytes], bytes] = lambda found: found) -> Callable[[bytes], bytes]:
        return lambda found: mark + close(found)

    array = io.BytesIO()
    np.save(array, PIXELS["inputs"])
    images = struct.pack(">BBBBIII", 0, 0, 8, 3, 3, 2, 2) + bytes(12)
    seeds = (
        Seed(content=array.getvalue(), close=closed(b"y")),
        Seed(content=npz(PIXELS), close=closed(b"z")),
        *(Seed(content=seed.content, close=closed(b"z", seed.close)) for seed in npz_seeds(PIXELS)),
        Seed(content=b"a,b\n1,2.5\n-3,4e5\n", form=Form.TEXT, close=closed(b"c")),
        Seed(content=images, close=closed(b"i")),
    )
    return Reader(feed=feed, seeds=seeds, words=NPY_WORDS, most_bytes=3 * MAX_BYTES)


NPY_WORDS = (
    b"|O", b"<U9", b"<m8", b"<M8[s]", b"|V8", b"<c16", b"<f2", b">i8", b"|b1", b"(3,)", b"(99999999999,)", b"(-1,)",
    b"(1000000, 1000000)", b"()", b"True", b"'descr'", b"None", b"[('a', '<i4')]", b"(0,)", b"(3, 8, 8)", b"1_0",
    b"L",
)  # fmt: skip


def _of_file(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    path = folder / name

    def feed(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return feed
