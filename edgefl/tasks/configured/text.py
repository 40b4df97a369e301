"""`text`: a column of texts in CSV, Parquet or Arrow files, as hashed n-grams; a run file has the rest."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Array, Dataset, Scalar, concatenate_masks
from edgefl.tasks.configured.options import (
    ConfiguredTask,
    Names,
    Numbers,
    check_range,
    format_options,
    make_goal,
    split_names,
)
from edgefl.tasks.configured.table import DEFAULT_HIDDEN, TargetColumns, make_dense_model, make_target_columns
from edgefl.tasks.datasets.table_files import MAX_CELLS, iterate_shard, weigh_weak
from edgefl.tasks.onnx_graph import OnnxGraph, add_reduction, register_node_builder
from edgefl.tasks.stored_arrays import RowBuffer

NAME = "text"
MIN_SIZE, MAX_SIZE = 64, 16_384
DEFAULT_SIZE, DEFAULT_NGRAMS = 4096, "word-1..2"
MAX_TEXT_CHARS = 20_000
"""Of a text; what follows does not count."""
MAX_COUNT = 127
HASH_BYTES = 8
MAX_CACHED_HASHES = 65_536
"""Of frequent n-grams, about 10 MB, while texts are read."""
BLOCK_TEXTS = 1024
"""Texts whose features are in memory together before they may go to a file."""
DEFAULTS: Mapping[str, Scalar] = {"learning_rate": 1.0, "batch_size": 16, "epochs": 1.0}

_NGRAMS = re.compile(r"word-[1-5]|char-[1-8]")
_MAX_NGRAMS = 13
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedNgrams:
    """Features of a text: its n-grams, each counted with a sign of its own in one of `size` buckets.

    The sign makes the inner product of two texts' features that of their n-grams in expectation, although different
    n-grams share buckets. Bucket and sign are parts of a BLAKE2b hash, so they are the same on every machine.

    Letters are lower case and in NFKC. A word is a run of letters, digits and _; characters are all there are, a
    blank for each run of blanks, and one before and after the text.

    Source: Weinberger et al., Feature Hashing for Large Scale Multitask Learning, ICML 2009, equation 2
    (arXiv:0902.2206).

    Attributes:
        ngrams: such as word-1, word-2, char-3: what is counted, and how many of them in a row.
        size: number of buckets.
    """

    ngrams: tuple[str, ...]
    size: int

    def __post_init__(self) -> None:
        """Checks both.

        Raises:
            ConfigError: there are no such n-grams, or the size is out of range.
        """
        check_range("size", self.size, MIN_SIZE, MAX_SIZE)
        if wrong := [name for name in self.ngrams if not _NGRAMS.fullmatch(name)]:
            raise ConfigError(f"task.ngrams must be of word-1 to word-5 and char-1 to char-8, got {wrong[0]!r}")

    def compute(self, texts: Iterable[str]) -> Array:
        """Returns [n, size] int8 signed counts, those over 127 as 127."""
        find_hash = lru_cache(MAX_CACHED_HASHES)(_compute_hash)
        texts = list(texts)
        counts = {text: self._count(text, find_hash) for text in dict.fromkeys(texts)}
        return np.array([counts[text] for text in texts], np.int8).reshape(len(texts), self.size)

    def _count(self, text: str, find_hash: Callable[[str], int]) -> Array:
        hashes = np.array([find_hash(ngram) for ngram in self._list_ngrams(text)], np.uint64)
        signs = np.where(hashes & np.uint64(1), 1.0, -1.0)
        buckets = ((hashes >> np.uint64(1)) % np.uint64(self.size)).astype(np.intp)
        sums = np.bincount(buckets, signs, minlength=self.size)
        return np.clip(sums, -MAX_COUNT, MAX_COUNT).astype(np.int8)

    def _list_ngrams(self, text: str) -> Iterator[str]:
        # Cut again, since one character may become eighteen.
        clean = unicodedata.normalize("NFKC", text[:MAX_TEXT_CHARS]).casefold()[:MAX_TEXT_CHARS]
        words, line = _WORD.findall(clean), f" {' '.join(clean.split())} "
        for name in self.ngrams:
            parts, joint = (words, " ") if name.startswith("word") else (line, "")
            length = int(name[-1])
            for start in range(len(parts) - length + 1):
                yield name[0] + joint.join(parts[start : start + length])


def text(  # noqa: PLR0913 one keyword for each option of a run file
    *,
    column: str,
    target: str,
    labels: Names,
    ngrams: Names = DEFAULT_NGRAMS,
    size: int = DEFAULT_SIZE,
    model: str = "linear",
    hidden: Numbers = DEFAULT_HIDDEN,
    activation: str = "relu",
    loss: str = "",
    metrics: Names = "",
    group: str = "",
    missing: Literal["refuse", "drop"] = "refuse",
) -> ConfiguredTask:
    """Returns the task.

    Args:
        column: of the text.
        target: column of the class.
        labels: names of the classes.
        ngrams: what is counted, such as word-1..2 for words and pairs of them, or char-3..5.
        size: number of buckets that counts are kept in.
        model: linear, which is called logistic as well, or mlp.
        hidden: sizes of the hidden layers of mlp.
        activation: between layers of mlp: relu, tanh, sigmoid or gelu.
        loss: cross-entropy or mse.
        metrics: by name.
        group: column of whom a text comes from, for natural shards.
        missing: whether a row with an empty cell is an error or left out.
    """
    split_names(NAME, "column", (column,), at_most=1)
    if column in {target, group}:
        raise ConfigError(f"task.column must not be {column!r}, which is the target or the group")
    features = HashedNgrams(ngrams=split_names(NAME, "ngrams", ngrams, at_most=_MAX_NGRAMS), size=size)
    targets = make_target_columns(NAME, target, labels, group, 0.0, 1.0, inputs=(column,))
    goal = make_goal(NAME, labels=labels, loss=loss, metrics=metrics)
    drops_missing = missing == "drop"
    sizes = (size, goal.total_outputs)
    return ConfiguredTask(
        name=NAME,
        model=make_dense_model(NAME, model, hidden, activation, sizes=sizes, prepare=_scale_to_unit_length),
        input_shape=(size,),
        goal=goal,
        reader=lambda path: _read_texts(path, features, column, targets, drops_missing=drops_missing),
        input_reader=lambda path: np.asarray(
            _read_texts(path, features, column, None, drops_missing=drops_missing).inputs
        ),
        input_suffixes=(".csv", ".parquet", ".txt"),
        text_converter=features.compute,
        defaults=DEFAULTS,
        shard_options=format_options(
            column=column, target=target, labels=goal.labels, ngrams=features.ngrams, size=size
        ),
    )


def _draw_scaling(graph: OnnxGraph, counts: str) -> str:
    length = add_reduction(graph, "ReduceL2", counts, 1)
    return graph.add("Div", counts, graph.add("Max", length, graph.add_constant(np.float32(1.0))))


@register_node_builder(_draw_scaling)
def _scale_to_unit_length(counts: Array) -> Array:
    """Returns counts divided by their Euclidean length, so that a long text weighs as much as a short one."""
    values: Array = counts.astype(np.float32)
    values /= np.maximum(np.sqrt(np.square(values).sum(axis=1, keepdims=True)), np.float32(1.0))
    return values


def _compute_hash(ngram: str) -> int:
    digest = hashlib.blake2b(ngram.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")


def _read_texts(
    path: Path, features: HashedNgrams, column: str, targets: TargetColumns | None, *, drops_missing: bool
) -> Dataset:
    """Returns the features of a shard's texts, with targets of 0 where no column says them."""
    inputs, found, groups, weak = RowBuffer(), list[Array](), list[Array](), list[Array | None]()
    num_texts, columns = 0, (column, *(targets.texts if targets else ()))
    is_known = targets.is_known if targets else bool
    options: dict[str, Any] = {"drops_missing": drops_missing, "has_weak": True, "is_known": is_known}
    for part in iterate_shard(path, NAME, (), columns, **options):
        texts, others = part.texts[0], replace(part, texts=part.texts[1:])
        num_texts += len(texts)
        if num_texts * features.size > MAX_CELLS:
            raise DataError(
                f"shard {path} of task {NAME} has more than the {MAX_CELLS // features.size:,} texts that are "
                f"held with size = {features.size}; take fewer files, or a smaller size"
            )
        for start in range(0, len(texts), BLOCK_TEXTS):
            inputs.add(features.compute(texts[start : start + BLOCK_TEXTS]))
        found.append(targets.read_targets(others, others.numbers) if targets else np.zeros(len(texts), np.int64))
        weak.append(part.weak)
        if targets and (group := targets.read_groups(others)) is not None:
            groups.append(group)
    return Dataset(
        inputs=inputs.finish(),
        targets=np.concatenate(found),
        groups=np.concatenate(groups) if groups else None,
        **weigh_weak(concatenate_masks(weak, list(map(len, found)))),
    )
