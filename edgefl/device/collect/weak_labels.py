"""Weak labels: those that a model is sure of, or functions agree on, for examples that nobody has labelled.

A task trains on them with less weight, and never tests on them. Anybody else's label replaces one. Those of a model
are pseudo-labels (Lee 2013, "Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural
Networks"), those of functions the majority's vote (Ratner et al. 2017, "Snorkel", section 2.2). A share bounds them,
and the classes take turns, so that one that is easily told does not take all of it.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.extensions import ExtensionKind, find_extension, inherits_from
from edgefl.device.collect.file_store import UNLABELLED, list_files
from edgefl.device.collect.forgetting import iterate_rows
from edgefl.device.collect.label_guesses import Guesser, sample_places
from edgefl.device.collect.label_queue import Example, FileTarget, RowTarget
from edgefl.device.collect.settings import is_label
from edgefl.device.collect.shard_contents import require_state
from edgefl.system.row_labels import LABEL_COLUMN, LabelKind, LabelLine, has_labels, replace_weak_labels

KEEP_ALL = 1.0

Teacher = Callable[[FileTarget | RowTarget, Sequence[Example]], Mapping[str, tuple[str, float]]]
"""Function from a shard's target and examples of it to label and probability, by the examples' keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An example without a label: the `path` of a file, or a time's rows.

    Attributes:
        path: None for rows.
        columns: of all rows in the order of time, NaN where a cell is empty or no number; empty for a file.
        texts: likewise the cells of those columns of which some are no numbers; those before the first such one as
            the collector writes numbers.
        since_s: time of the first row, or of the file, in seconds since 1970.
        until_s: likewise of the last.
    """

    path: Path | None
    columns: Mapping[str, Sequence[float]]
    texts: Mapping[str, Sequence[str]]
    since_s: float
    until_s: float


class LabelFunction:
    """Function of another author that labels examples, or abstains; it is made without arguments."""

    def label(self, candidate: Candidate) -> str | None:
        """Returns the label, or None."""
        raise NotImplementedError


KIND = ExtensionKind(
    noun="label function",
    group="edgefl.label_functions",
    is_declared=inherits_from(LabelFunction),
    declaration="inherits from edgefl.device.collect.weak_labels.LabelFunction",
    error=ConfigError,
)


def make_model_teacher(guesser: Guesser, threshold: float) -> Teacher:
    """Returns a teacher that gives the guesses of at least this probability."""

    def guess(target: FileTarget | RowTarget, examples: Sequence[Example]) -> dict[str, tuple[str, float]]:
        guesses = guesser.guess(target.folder, {example.key: example.source for example in examples})
        return {key: (one.label, one.probability) for key, one in guesses.items() if one.probability >= threshold}

    return guess


def make_function_teacher(names: Sequence[str]) -> Teacher:
    """Returns a teacher that gives what most of these `module:Class` say; their share counts as the probability.

    Raises:
        ConfigError: one is not there, not allowed, no label function, or cannot be made.
    """
    functions = {name: _make_function(name) for name in names}

    def vote(target: FileTarget | RowTarget, examples: Sequence[Example]) -> dict[str, tuple[str, float]]:
        found = dict[str, tuple[str, float]]()
        for key, candidate in _iterate_candidates(target, examples):
            votes = Counter(_ask(name, function, candidate) for name, function in functions.items())
            del votes[None]
            best = votes.most_common(2)
            if best and (len(best) == 1 or best[0][1] > best[1][1]):
                found[key] = str(best[0][0]), best[0][1] / len(functions)
        return found

    return vote


def update_weak_labels(target: FileTarget | RowTarget, teacher: Teacher, share: float) -> tuple[dict[str, int], int]:
    """Replaces the weak labels of a shard; returns how many examples have which, and how many had none to begin with.

    Args:
        target: of the shard.
        teacher: says the labels.
        share: of examples with a label that may be weak ones, 0 to 1; all may with 1.

    Raises:
        EdgeflError: the shard, the model or the labels cannot be used, or a function fails.
    """
    examples = [example for example in target.list_examples(sample_places) if not example.label]
    guesses = {key: guess for key, guess in teacher(target, examples).items() if is_label(guess[0])}
    named = [example for example in examples if example.key in guesses]
    sizes, num_labelled = _count_rows(target.folder, named)
    most = sum(sizes) if share >= KEEP_ALL else int(share / (1 - share) * num_labelled)
    places = choose_guesses([guesses[example.key] for example in named], sizes, most)
    lines = [
        LabelLine(since_s=one.since_s, until_s=one.until_s, label=guesses[one.key][0], kind=LabelKind.WEAK)
        for one in (named[place] for place in sorted(places))
    ]
    if lines or has_labels(target.folder):
        replace_weak_labels(target.folder, lines)
    return dict(sorted(Counter(line.label for line in lines).items())), len(examples)


def choose_guesses(guesses: Sequence[tuple[str, float]], sizes: Sequence[int], most: int) -> list[int]:
    """Returns the places of the most probable guesses of each label in turn, of at most `most` in all by `sizes`."""
    by_label = dict[str, list[int]]()
    for place in sorted(range(len(guesses)), key=lambda place: -guesses[place][1]):
        by_label.setdefault(guesses[place][0], []).append(place)
    turns = sorted((turn, place) for places in by_label.values() for turn, place in enumerate(places))
    chosen, total = list[int](), 0
    for _, place in turns:
        total += sizes[place]
        if total > most:
            break
        chosen.append(place)
    return chosen


def _make_function(name: str) -> LabelFunction:
    kind = find_extension(KIND, name, ())
    try:
        function: LabelFunction = kind()
    except Exception as error:  # another author's constructor may raise anything
        raise ConfigError(f"label function {name} cannot be made: {type(error).__name__}: {error}") from error
    return function


def _ask(name: str, function: LabelFunction, candidate: Candidate) -> str | None:
    try:
        label = function.label(candidate)
    except Exception as error:  # another author's function may raise anything
        raise DataError(f"label function {name} failed: {type(error).__name__}: {error}") from error
    if label is not None and not (isinstance(label, str) and is_label(label)):
        raise DataError(f"label function {name} must return a label or None, got {label!r:.80}")
    return label


def _iterate_candidates(
    target: FileTarget | RowTarget, examples: Sequence[Example]
) -> Iterator[tuple[str, Candidate]]:
    """Yields key and candidate of the examples; rows are read again, a window at a time."""
    left = {example.key for example in examples}
    found = iter(examples) if isinstance(target, FileTarget) else target.iterate_whole()
    while left and (example := next(found, None)) is not None:
        if example.key not in left:
            continue
        left.remove(example.key)
        path = None if example.file is None else target.folder / example.file.label / example.file.name
        yield (
            example.key,
            Candidate(
                path=path, columns=dict(example.curves), texts=dict(example.texts), since_s=example.since_s,
                until_s=example.until_s,
            ),
        )  # fmt: skip


def _count_rows(folder: Path, examples: Sequence[Example]) -> tuple[list[int], int]:
    """Returns of how many rows each example is, and how many rows have a label that is not weak; files likewise."""
    state = require_state(folder)
    if not state.columns:
        return [1] * len(examples), sum(file.label != UNLABELLED for file in list_files(folder))
    times, num_labelled = list[float](), 0
    for time_s, row in iterate_rows(folder, state):
        times.append(time_s)
        num_labelled += bool(row.get(LABEL_COLUMN))
    times.sort()
    sizes = [bisect.bisect_right(times, one.until_s) - bisect.bisect_left(times, one.since_s) for one in examples]
    return sizes, num_labelled
