"""Class folders: one folder for each label, with the examples of that class as files; and the readers of such files.

Pictures are PNG and JPEG files, sounds WAV files of whole numbers (PCM). Pictures may also be a column of Parquet or
Arrow files, as in folders of Hugging Face's `datasets`.
"""

from __future__ import annotations

import contextlib
import io
import warnings
import wave
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError, DataError, EdgeflError, format_install_command
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Array, Dataset
from edgefl.system.row_labels import UNLABELLED_FOLDER, has_labels, parse_example_time, read_row_labels
from edgefl.tasks.datasets.arrow_files import ArrowTable, list_arrow_files
from edgefl.tasks.datasets.parquet_files import ParquetTable
from edgefl.tasks.datasets.table_files import (
    ARROW,
    MAX_CELLS,
    MAX_FILES,
    PARQUET,
    Survey,
    check_columns,
    is_gone,
    survey_table,
    weigh_weak,
)
from edgefl.tasks.registry import import_extra
from edgefl.tasks.stored_arrays import BLOCK_BYTES, RowBuffer

PICTURE_SUFFIXES, SOUND_SUFFIXES = (".png", ".jpg", ".jpeg"), (".wav",)
MAX_EXAMPLES = 1_000_000
MAX_FOLDERS = 1000
MAX_VALUES = 1_000_000_000
"""Pixels or samples of a shard."""
MAX_FILE_BYTES = 256 * 1024**2
MAX_PIXELS = 50_000_000
MAX_SOUND_CHANNELS = 16
MAX_REASON_CHARS = 200
_PICTURE_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
"""Pillow's names of formats with at most 8 bits a channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRules:
    """What names of folders and files say.

    Attributes:
        labels: names of the classes, which are those of folders.
        others: label of files in folders of any other name; empty where there must be none.
        group_before: text in the names of files before which stands whom they are from; empty where none says it.
    """

    labels: tuple[str, ...]
    others: str = ""
    group_before: str = ""

    def __post_init__(self) -> None:
        """Checks `others`; raises a `ConfigError` where it is no label."""
        if self.others and self.others not in self.labels:
            raise ConfigError(
                f"task.others must be one of the labels {self.format_labels()}, got {self.others!r:.80}"
            )

    def format_labels(self) -> str:
        return ", ".join(self.labels[:12])

    def find_label(self, folder: str) -> str:
        """Returns the label of files in a folder; empty where it is of no class."""
        return folder if folder in self.labels else self.others

    def read_groups(self, names: Collection[str]) -> Array | None:
        """Returns [n] groups of files, None where there is no rule; a name without the text counts whole.

        Raises:
            DataError: no name has the text.
        """
        if not self.group_before:
            return None
        if not any(self.group_before in name for name in names):
            raise DataError(
                f"task.group_before = {self.group_before!r:.80} is in the name of none of {len(names)} files"
            )
        return np.array([name.partition(self.group_before)[0] for name in names], dtype=str)


def read_class_folders(
    path: Path,
    task: str,
    rules: FolderRules,
    suffixes: Collection[str],
    read: Callable[[Path], Array],
    *,
    has_unlabelled: bool = False,
) -> Dataset:
    """Returns the examples of all class folders; `read` returns that of one file, of the same shape for all.

    Files without a class that have a weak label are examples, too, and with `has_unlabelled` the others: weak ones
    that weigh nothing.

    Files that go while others are read, as a collector removes its oldest, are left out.

    Raises:
        DataError: there are none, a folder is of no class, a file is damaged, or they are too many for memory.
    """
    files = list(_iterate_files(path, task, suffixes, rules))
    num_strong = len(files)
    files += _list_weak(path, suffixes, rules.labels)
    weak_files = frozenset(file for file, _ in files[num_strong:])
    unlabelled = frozenset[Path]()
    if has_unlabelled:
        unlabelled = frozenset(_list_examples(path / UNLABELLED_FOLDER, suffixes)) - weak_files
        files += [(file, rules.labels[0]) for file in sorted(unlabelled)[: MAX_EXAMPLES - len(files)]]
    kept = list[tuple[Path, str]]()

    def iterate() -> Iterator[Array]:
        for file, label in files:
            example = _read_present(file, read)
            if example is None:
                continue
            if not kept:
                _check_values(path, task, len(files), example)
            kept.append((file, label))
            yield example

    inputs = _stack(iterate())
    if inputs is None:
        raise DataError(
            f"shard {path} of task {task} must be a folder with a folder for each class ({rules.format_labels()}), "
            f"with {' or '.join(suffixes)} files in it; there are none"
        )
    return Dataset(
        inputs=inputs,
        targets=np.array([rules.labels.index(label) for _, label in kept], np.int64),
        groups=rules.read_groups([file.stem for file, _ in kept]),
        **_weigh_files([file for file, _ in kept], weak_files, unlabelled),
    )


def list_picture_tables(path: Path) -> list[Path]:
    """Returns the Parquet or Arrow files that a shard of pictures consists of; none where it has class folders.

    Raises:
        DataError: it cannot be read, or holds several data sets.
    """
    if not path.is_dir():
        return [path] if path.suffix in {PARQUET, ARROW} else []
    files = sorted(path.glob(f"[!.]*{PARQUET}")) or list_arrow_files(path)
    if len(files) > MAX_FILES:
        raise DataError(f"{path} has {len(files)} files, at most are {MAX_FILES}")
    return files


def read_picture_tables(
    path: Path,
    task: str,
    rules: FolderRules,
    decode: Callable[[bytes, str], Array],
    columns: tuple[str, str],
    *,
    has_unlabelled: bool = False,
) -> Dataset:
    """Returns the rows of all files of `list_picture_tables`.

    Args:
        path: of the shard.
        task: its name, for messages.
        rules: what the names of classes say; there are no names of files.
        decode: returns the example in a picture's bytes, of that name for messages.
        columns: names of the pictures' and the classes'.
        has_unlabelled: whether the task takes files without a class, which rows cannot be.

    Raises:
        DataError: there is no row, one has no picture or is of no class, a file is damaged, or the folder has class
            folders too.
    """
    for option, is_used in {"group_before": rules.group_before, "unlabelled": has_unlabelled}.items():
        if is_used:
            raise DataError(
                f"task.{option} is for files by name, and shard {path} of task {task} has rows; leave it out"
            )
    if folders := [name for name in rules.labels if (path / name).is_dir()]:
        table = list_picture_tables(path)[0].name
        raise DataError(f"shard {path} of task {task} has the class folder {folders[0]!r} and {table}; keep one")
    targets = list[int]()

    def iterate() -> Iterator[Array]:
        for file in list_picture_tables(path):
            with _open_pictures(file) as table:
                check_columns(file, table, columns)
                for number, (content, word) in enumerate(table.read_pictures(*columns), 1):
                    name = f"{file}, row {number}"
                    label = rules.find_label(word) if word else ""
                    if not (content and label):
                        what = f"is none of the labels {rules.format_labels()}" if content else "is missing"
                        raise DataError(f"{name}: {columns[1] if content else columns[0]} {what}")
                    example = decode(content, name)
                    targets.append(rules.labels.index(label))
                    _check_values(path, task, len(targets), example)
                    yield example

    inputs = _stack(iterate())
    if inputs is None:
        raise DataError(f"shard {path} of task {task} holds no rows")
    return Dataset(inputs=inputs, targets=np.array(targets, np.int64))


def _open_pictures(file: Path) -> ArrowTable | ParquetTable:
    try:
        return (ArrowTable if file.suffix == ARROW else ParquetTable)(file, max_cells=MAX_CELLS)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None


def _stack(examples: Iterable[Array]) -> Array | None:
    """Returns the examples as one array, in a file where they are many; None where there is none."""
    rows, block = RowBuffer(), list[Array]()
    has_any = False
    for example in examples:
        has_any = True
        block.append(example)
        if len(block) * example.nbytes >= BLOCK_BYTES:
            rows.add(np.stack(block))
            block = []
    if block:
        rows.add(np.stack(block))
    return rows.finish() if has_any else None


def _check_values(path: Path, task: str, num_examples: int, example: Array) -> None:
    if num_examples * example.size > MAX_VALUES:
        raise DataError(
            f"shard {path} of task {task} has {num_examples} examples of {example.size} values each, at most "
            f"{MAX_VALUES:,} are held; take fewer, or smaller examples"
        )


def _weigh_files(files: list[Path], weak: Collection[Path], unlabelled: Collection[Path]) -> dict[str, Array]:
    """Returns the fields of a `Dataset` by which weak labels count less, and files without any nothing."""
    has_none = np.array([file in unlabelled for file in files], bool)
    fields = weigh_weak(has_none | np.array([file in weak for file in files], bool))
    return {**fields, "weights": np.where(has_none, np.float32(0), fields["weights"])} if fields else {}


def survey_class_folders(
    path: Path, task: str, *, is_detailed: bool = False, suffixes: Collection[str] = PICTURE_SUFFIXES
) -> Survey:
    """Returns the number of files, in detail by folder, or of rows; raises `DataError` where there are none."""
    if suffixes == PICTURE_SUFFIXES and list_picture_tables(path):
        return survey_table(path, task, is_detailed=is_detailed)
    counts: dict[str, int] = {}
    for _, label in _iterate_files(path, task, suffixes, None):
        counts[label] = counts.get(label, 0) + 1
    if not counts:
        raise DataError(
            f"shard {path} of task {task} must be a folder with a folder for each class, with "
            f"{' or '.join(suffixes)} files in it; there are none"
        )
    details = tuple(f"{escape_text(label)}: {count}" for label, count in counts.items()) if is_detailed else ()
    return Survey(num_examples=sum(counts.values()), details=details)


survey_sounds = partial(survey_class_folders, suffixes=SOUND_SUFFIXES)


def read_picture(path: Path, *, size: int, channels: int) -> Array:
    """Returns [channels, size, size] uint8: a PNG or JPEG file, grey or in colour, stretched to a square.

    Raises:
        DataError: it is no such picture, too large, damaged, or has more than 8 bits a channel.
        TaskError: Pillow is not installed.
    """
    import_pillow()
    _check_bytes(path)
    return _fit_picture(path, str(path), size=size, channels=channels)


def decode_picture(content: bytes, name: str, *, size: int, channels: int) -> Array:
    """Returns what `read_picture` does, of a file's bytes; they have that name in messages."""
    return _fit_picture(io.BytesIO(content), name, size=size, channels=channels)


def _fit_picture(source: Path | io.BytesIO, name: str, *, size: int, channels: int) -> Array:
    mode, resampling = "L" if channels == 1 else "RGB", import_pillow().Resampling.BILINEAR
    pixels = _decode_picture(source, name, mode=mode, size=size, resampling=resampling, max_pixels=MAX_PIXELS)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def read_grey_picture(content: bytes, name: str, *, size: int, max_pixels: int) -> Array:
    """Returns [size, size] uint8: mean grey values in a PNG or JPEG picture of a name; raises as `read_picture`."""
    resampling, source = import_pillow().Resampling.BOX, io.BytesIO(content)
    _check_size(len(content), name)
    return _decode_picture(source, name, mode="L", size=size, resampling=resampling, max_pixels=max_pixels)


def import_pillow() -> Any:
    """Returns `PIL.Image`; raises a `TaskError` where Pillow is not installed."""
    return import_extra("PIL.Image", "pictures are read with Pillow", format_install_command("PIL"))


def _decode_picture(
    source: Path | io.BytesIO, name: str, *, mode: str, size: int, resampling: Any, max_pixels: int
) -> Array:
    pillow = import_pillow()
    try:
        with _forbid_bombs(pillow), pillow.open(source, formats=("PNG", "JPEG")) as picture:
            _check_picture(picture, name, max_pixels)
            picture.draft(mode, (size, size))  # a JPEG is decoded at an eighth of its size where that is enough
            resized = picture.convert(mode).resize((size, size), resampling)
    except (EdgeflError, MemoryError):
        raise
    except pillow.UnidentifiedImageError:  # whose message has the address of bytes in memory
        raise DataError(f"picture {name} cannot be read: it is no PNG or JPEG file") from None
    except Exception as error:  # noqa: BLE001 decoders of damaged files raise what they like
        reason = escape_text(f"{type(error).__name__}: {error}")[:MAX_REASON_CHARS]
        raise DataError(f"picture {name} cannot be read: {reason}") from None
    return np.asarray(resized, np.uint8)


def read_sound(path: Path, *, sample_rate: int, num_samples: int) -> Array:
    """Returns [num_samples] int16: the beginning of a WAV file, the mean of its channels; zeros follow a short one.

    Raises:
        DataError: it is no WAV file of whole numbers, has another sample rate, or is damaged.
    """
    _check_bytes(path)
    try:
        with path.open("rb") as file, wave.open(file) as sound:
            rate, channels, width = sound.getframerate(), sound.getnchannels(), sound.getsampwidth()
            if rate != sample_rate:
                raise DataError(
                    f"sound {path} has {rate} samples a second, the run file says sample_rate = {sample_rate}; "
                    "convert one of them"
                )
            if not 1 <= channels <= MAX_SOUND_CHANNELS:
                raise DataError(f"sound {path} has {channels} channels, at most {MAX_SOUND_CHANNELS} are read")
            content = sound.readframes(num_samples)
    except (OSError, EOFError, wave.Error, ValueError, RuntimeError) as error:
        raise DataError(f"sound {path} cannot be read as WAV: {type(error).__name__}: {error}") from None
    samples = _decode_samples(content[: len(content) // (channels * width) * channels * width], width, path)
    mono = np.zeros(num_samples, np.int16)
    found = samples.reshape(-1, channels).mean(axis=1)
    mono[: len(found)] = np.clip(np.rint(found), -(2**15), 2**15 - 1)
    return mono


def _decode_samples(content: bytes, width: int, path: Path) -> Array:
    """Returns samples as float64 in the range of int16, from 8, 16, 24 or 32 bits each."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float64) - 128.0) * 256.0
    if width == 3:
        parts = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return np.ascontiguousarray(parts[:, 1:]).view("<i2")[:, 0] + parts[:, 0] / 256.0
    if width in {2, 4}:
        samples: Array = np.frombuffer(content, f"<i{width}").astype(np.float64)
        return samples if width == 2 else samples / 65536.0
    raise DataError(f"sound {path} has {8 * width} bits a sample, it must be 8, 16, 24 or 32")


def _iterate_files(
    path: Path, task: str, suffixes: Collection[str], rules: FolderRules | None
) -> Iterator[tuple[Path, str]]:
    """Yields the files of all class folders and their labels, by name."""
    try:
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    except OSError as error:
        raise DataError(f"shard {path} of task {task} must be a folder of class folders: {error.strerror}") from None
    if len(folders) > MAX_FOLDERS:
        raise DataError(f"shard {path} of task {task} has {len(folders)} folders, at most are {MAX_FOLDERS}")
    count = 0
    for folder in folders:
        label = folder.name if rules is None else rules.find_label(folder.name)
        # One without files may be left of a label that was taken back.
        if rules is not None and not label and next(_list_examples(folder, suffixes), None) is not None:
            raise DataError(
                f"shard {path} of task {task} has a folder {folder.name[:80]!a}, which is none of the labels "
                f"{rules.format_labels()}"
            )
        for file in sorted(_list_examples(folder, suffixes)):
            count += 1
            if count > MAX_EXAMPLES:
                raise DataError(f"shard {path} of task {task} has more than {MAX_EXAMPLES:,} files")
            yield file, label


def _list_weak(path: Path, suffixes: Collection[str], labels: Collection[str]) -> list[tuple[Path, str]]:
    """Returns the files without a class that a weak label gives one, by name."""
    if not has_labels(path):
        return []
    files, times = list[Path](), list[float]()
    for file in sorted(_list_examples(path / UNLABELLED_FOLDER, suffixes)):
        with contextlib.suppress(ValueError):  # no collector has named it
            times.append(parse_example_time(file.name))
            files.append(file)
    try:
        found = read_row_labels(path).find_weak(times)
    except OSError as error:
        raise DataError(f"the labels of {path} cannot be read: {error.strerror}") from None
    return [(file, label) for file, label in zip(files, found, strict=True) if label in labels]


def _list_examples(folder: Path, suffixes: Collection[str]) -> Iterator[Path]:
    """Yields the examples in a class folder; none where it went meanwhile, as a collector removes empty ones."""
    with contextlib.suppress(FileNotFoundError):
        for file in folder.iterdir():
            if file.suffix.lower() in suffixes and not file.name.startswith(".") and file.is_file():
                yield file


def _read_present(file: Path, read: Callable[[Path], Array]) -> Array | None:
    """Returns the example of a file; None where the file is gone since it was listed."""
    try:
        return read(file)
    except (DataError, FileNotFoundError):
        if is_gone(file):
            return None
        raise


def _check_bytes(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    _check_size(size, str(path))


def _check_size(size: int, name: str) -> None:
    if size > MAX_FILE_BYTES:
        raise DataError(f"{name} has {size} bytes, at most {MAX_FILE_BYTES} are read")


def _check_picture(picture: Any, name: str, max_pixels: int) -> None:
    width, height = picture.size
    if width * height > max_pixels:
        raise DataError(f"picture {name} has {width} x {height} pixels, at most {max_pixels:,} are read")
    if picture.mode not in _PICTURE_MODES:
        raise DataError(f"picture {name} has more than 8 bits a channel ({picture.mode}); save it with 8")


@contextlib.contextmanager
def _forbid_bombs(pillow: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        yield
