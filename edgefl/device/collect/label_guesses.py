"""Which examples a person is asked about first, by what a model says of them.

Labels are worth most where the model is least certain: margin sampling takes the smallest difference between its two
largest probabilities first (Scheffer, Decomain, Wrobel 2001, "Active Hidden Markov Models for Information
Extraction"; Settles 2009, "Active Learning Literature Survey", section 3.1). What is chosen so says nothing about the
model's quality, so some are sampled at random from all: of those the model's accuracy is an unbiased estimate.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.errors import DataError
from edgefl.core.types import Json
from edgefl.device.collect.uncertain_times import UncertainTime
from edgefl.device.hardware.requirements import make_confinement
from edgefl.system.processes import call_in_subprocess
from edgefl.system.row_labels import parse_example_time

log = logging.getLogger(__name__)

RANDOM_SHARE = 0.25
GUESS_S, START_TIMEOUT_S = 60.0, 300.0
"""For guesses, after which the rest have none, and for that and the start of the process."""
MODULE = "edgefl.device.collect.guess_process"

Source = Sequence[str | float]
"""An example of a shard: class folder and name of a file, or first and last time of rows in seconds."""

Draw = Callable[[int, int], Sequence[int]]
"""Function that returns so many different places of so many, as (places there are, places to draw)."""


def sample_places(num: int, num_sampled: int) -> list[int]:
    """Returns different places below `num` from the system's generator, in the order of the draw."""
    return secrets.SystemRandom().sample(range(num), num_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A model's word on an example: its class, the probability of it, and how far that of the next one is below."""

    label: str
    probability: float
    margin: float


class Guesser:
    """A model that guesses labels in a process of its own, without the network and the device's state.

    Args:
        find_model: returns the ONNX file to use, which may change.
        state_dir: of the device, which is kept from the process; one that this user cannot write is left alone.
        policy: `never` confines nothing; all others do.
        share: of examples that are sampled at random, 0 to 1.
        draw: draws them.
    """

    def __init__(
        self,
        find_model: Callable[[], Path],
        *,
        state_dir: Path,
        policy: str = "auto",
        share: float = RANDOM_SHARE,
        draw: Draw = sample_places,
    ) -> None:
        self._find_model, self._state_dir, self._policy = find_model, state_dir, policy
        self.share, self.draw = share, draw
        self.model: tuple[Path, int] | None = None
        self._has_asked = False
        self._guesses: dict[str, Guess | None] = {}

    def guess(self, folder: Path, sources: Mapping[str, Source]) -> dict[str, Guess]:
        """Returns guesses by name; none for what cannot be read as an example of the model's task.

        Args:
            folder: of the shard.
            sources: by name; what was asked about before is known until the model changes.

        Raises:
            EdgeflError: the model cannot be used, or reads none of the first sources.
        """
        path = self._find_model()
        model = (path, path.stat().st_mtime_ns if path.is_file() else 0)
        if model != self.model:
            self._guesses, self.model = {}, model
        new = {name: source for name, source in sources.items() if name not in self._guesses}
        if new:
            names = list(new)
            replies = self._ask(path, folder, list(new.values()))
            self._guesses |= {names[place]: guess for place, guess in replies.items()}
        self._guesses = {name: self._guesses[name] for name in sources if name in self._guesses}
        return {name: guess for name, guess in self._guesses.items() if guess is not None}

    def _ask(self, model: Path, folder: Path, sources: Sequence[Source]) -> dict[int, Guess | None]:
        question: Json = {
            "model": str(model.absolute()), "folder": str(folder.absolute()), "sources": sources, "seconds": GUESS_S,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            confinement = None
            if self._policy != "never":
                root = self._state_dir if os.access(self._state_dir, os.W_OK) else Path(place)
                name = f"label-{os.getpid()}"
                confinement = make_confinement(root, name, [question["model"], question["folder"]], "cpu")
            try:
                reply = call_in_subprocess(
                    MODULE,
                    question,
                    description="guessing labels",
                    timeout_s=START_TIMEOUT_S,
                    confinement=confinement,
                )
            finally:
                for folder_ in confinement.writable if confinement is not None else ():
                    shutil.rmtree(folder_, ignore_errors=True)
        if num_unread := reply["num_unread"]:
            if num_unread == len(reply["guesses"]) and not self._has_asked:
                raise DataError(f"{model} reads none of {num_unread} examples: {reply['reason']}")
            log.warning("%d of %d examples get no guess: %s", num_unread, len(sources), reply["reason"])
        self._has_asked = True
        return {int(place): None if guess is None else Guess(**guess) for place, guess in reply["guesses"].items()}


class NotedGuesser:
    """What a model said of rows or files when it answered, and nothing of others; none is drawn at random."""

    share, draw, model = 0.0, staticmethod(sample_places), None

    def __init__(self, times: Sequence[UncertainTime]) -> None:
        self._times = times

    def guess(self, _folder: Path, sources: Mapping[str, Source]) -> dict[str, Guess]:
        """Returns the least certain guess within the time of each source, by name."""
        found = dict[str, Guess]()
        for name, (first, second) in sources.items():
            if isinstance(first, str):
                since_s = until_s = parse_example_time(str(second))
            else:
                since_s, until_s = first, float(second)
            near = [time for time in self._times if time.until_s >= since_s and time.since_s <= until_s]
            if near:
                least = min(near, key=lambda time: time.margin)
                found[name] = Guess(label=least.label, probability=least.probability, margin=least.margin)
        return found


def order_examples(margins: Sequence[float | None], num_sampled: int, draw: Draw) -> tuple[list[int], frozenset[int]]:
    """Returns the places of examples in the order in which to ask about them, and which were sampled at random.

    Args:
        margins: 0 to 1, or None of an example without a guess, which comes last.
        num_sampled: examples that are sampled from all, and come evenly between the others.
        draw: draws them.
    """
    sampled = list(draw(len(margins), num_sampled))
    rest = sorted(set(range(len(margins))) - set(sampled), key=lambda place: _to_rank(margins[place]))
    order, waiting = list[int](), list(sampled)
    for position in range(len(margins)):
        is_due = len(sampled) - len(waiting) < num_sampled * (position + 1) // len(margins)
        order.append((waiting if waiting and (is_due or not rest) else rest).pop(0))
    return order, frozenset(sampled)


def _to_rank(margin: float | None) -> float:
    return 2.0 if margin is None else margin
