"""Answers of the deployed model to the newest input, beside collecting.

The model runs in the process of `edgefl device serve`, which is confined, follows deployments and checks signatures:
the collector, which may not see the agent's state, asks it over loopback alone, so that data stay on the board. What
it sends is the text of rows or the file as they stand in the shard, and the model's task reads that as it reads
shards: windows and transform are those of training. A thread of its own asks. Whatever becomes of model, server and
broker, collecting goes on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol

from edgefl.core.errors import StoreError
from edgefl.core.safe_parsing import parse_message
from edgefl.core.safe_text import is_safe_text
from edgefl.core.types import Json
from edgefl.device.collect.newest_input import ModelFacts, NewestInput, NewItem_contra, Question
from edgefl.device.collect.polled_source import HttpRequest
from edgefl.device.collect.readings import Counts
from edgefl.device.collect.settings import AnswerSection, is_label
from edgefl.device.collect.uncertain_times import (
    UncertainTime,
    add_uncertain,
    read_uncertain_times,
    save_uncertain_times,
)
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

TIMEOUT_S, MAX_ANSWER_BYTES, MAX_CLASSES, MAX_TEXT_CHARS = 10.0, 262_144, 1000, 100
MAX_SUFFIXES = 20
POLL_S, JOIN_TIMEOUT_S = 5.0, 12.0
STALE_S, NUM_STALE = 60.0, 3
"""There are no answers any more after so long, or so many times without one if that is longer."""
SAVE_S = 600.0
_HEADERS = {"Connection": "close", "Accept-Encoding": "identity"}


class Publisher(Protocol):
    """What answers are given to."""

    def start(self) -> None: ...

    def publish(self, answer: Json, classes: Sequence[str]) -> bool: ...

    def set_available(self, *, is_available: bool) -> None: ...

    def close(self) -> None: ...


class InferenceClient:
    """Client of this board's inference server.

    Args:
        port: of the server, on loopback.
    """

    def __init__(self, port: int) -> None:
        self._request = HttpRequest(
            host="127.0.0.1", port=port, path="/model", headers=_HEADERS, tls=None, timeout_s=TIMEOUT_S,
            max_bytes=MAX_ANSWER_BYTES,
        )  # fmt: skip

    def fetch_model(self) -> ModelFacts:
        """Returns which model is served.

        Raises:
            OSError, HTTPException: there is no server, or no whole answer.
            ValueError: no model is served, or one that takes neither rows nor files.
        """
        return parse_model(self._request.send())

    def predict(self, question: Question) -> Json:
        """Returns the answer to a question, checked; raises as `fetch_model`."""
        headers = {**_HEADERS, "Content-Type": question.media_type}
        request = replace(self._request, path="/predict", headers=headers, body=question.content)
        return parse_prediction(request.send())


class Answerer(Generic[NewItem_contra]):
    """Thread that asks about the newest rows or file and publishes the answers.

    Args:
        section: of the collect file.
        folder: of the shard.
        newest: what is asked about.
        every_s: seconds from one row or file to the next; 0 where readings say when they come.
        client: of the inference server.
        publisher: of the answers.
        counts: `answer.errors` is added to it.
        clock: seconds since 1970.
    """

    def __init__(  # noqa: PLR0913 one keyword for each collaborator
        self,
        section: AnswerSection,
        folder: Path,
        newest: NewestInput[NewItem_contra],
        *,
        every_s: float,
        client: InferenceClient,
        publisher: Publisher,
        counts: Counts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._section, self._folder, self._newest = section, folder, newest
        self._client, self._publisher, self._counts, self._clock = client, publisher, counts, clock
        self._stale_s = max(STALE_S, NUM_STALE * max(every_s, section.every_s))
        self._lock, self._has_new, self._stopping = threading.Lock(), threading.Event(), threading.Event()
        self._model: ModelFacts | None = None
        self._last_number, self._answered_s = 0, -math.inf
        self._times, self._num_forgotten = _read_times(folder, section.max_uncertain), 0
        self._saved_times, self._saved_s = self._times, clock()
        self._log = RateLimitedLog(log)
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self) -> None:
        self._publisher.start()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and keeps what is noted."""
        self._stopping.set()
        self._has_new.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)
        self._publisher.close()
        self._save()

    def add(self, item: NewItem_contra) -> None:
        """Adds new rows, or a file; never waits for an answer."""
        self._newest.add(item)
        self._has_new.set()

    def forget(self) -> None:
        """Drops the newest input and all times, before some of them are removed from the shard."""
        self._newest.clear()
        with self._lock:
            self._times = self._saved_times = []
            self._num_forgotten += 1

    def trim(self, is_kept: Callable[[UncertainTime], bool]) -> None:
        """Drops times of what cannot be labelled any more."""
        with self._lock:
            self._times = [time for time in self._times if is_kept(time)]

    def step(self) -> None:
        """Asks about the newest row or file, once for each."""
        with self._lock:
            num_forgotten = self._num_forgotten
        now_s, (number, newest_s) = self._clock(), self._newest.newest
        if number != self._last_number and newest_s > -math.inf and now_s - newest_s <= self._stale_s:
            self._last_number = number
            try:
                self._answer(num_forgotten)
            except Exception as error:  # noqa: BLE001 the boundary of the thread: the next may have an answer
                self._model = None
                self._counts["answer.errors"] += 1
                self._log.warning("failed", "there is no answer to what came last: %s", error)
        if not -self._stale_s <= self._clock() - self._answered_s <= self._stale_s:
            self._publisher.set_available(is_available=False)
        if not 0 <= now_s - self._saved_s <= SAVE_S:
            self._save()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._has_new.wait(POLL_S)
            self._has_new.clear()
            self.step()
            self._stopping.wait(self._section.every_s)

    def _answer(self, num_forgotten: int) -> None:
        model = self._model or self._client.fetch_model()
        question = self._newest.make_question(model)
        self._model = model
        if question is None:
            return
        self._last_number = question.number  # more may have come meanwhile
        found = self._client.predict(question)
        if (found.pop("model"), found.pop("deployment")) != (model.model, model.deployment):
            self._model = None  # a new one, which may look at other rows: the next question is for it
            self._last_number = 0
            return
        answer = {
            "time": question.time_s,
            **found,
            "model": model.model and model.model[:12],
            "deployment": model.deployment,
        }
        self._publisher.publish(answer, model.classes)
        self._answered_s = self._clock()
        if found.get("margin", 1.0) < self._section.uncertain_below and is_label(found["class"]):
            self._note(question.noted, found, num_forgotten)

    def _note(self, times: tuple[float, float] | None, found: Json, num_forgotten: int) -> None:
        if times is None:
            return
        new = UncertainTime(
            since_s=times[0], until_s=times[1], label=found["class"], probability=found["probability"],
            margin=found["margin"],
        )  # fmt: skip
        with self._lock:
            if num_forgotten == self._num_forgotten:
                self._times = add_uncertain(self._times, new, self._section.max_uncertain)

    def _save(self) -> None:
        self._saved_s = self._clock()
        with self._lock:
            times = self._times
            if times is self._saved_times:
                return
            try:
                save_uncertain_times(self._folder, times)
            except StoreError as error:
                self._log.warning("store", "uncertain times wait: %s", error)
                return
            self._saved_times = times


def _read_times(folder: Path, max_count: int) -> list[UncertainTime]:
    try:
        return read_uncertain_times(folder, max_count)
    except StoreError as error:
        log.warning("uncertain times are noted anew: %s", error)
        return []


def parse_model(content: bytes) -> ModelFacts:
    """Returns what the server says of its model.

    Raises:
        ValueError: it makes no sense, or the model takes neither rows nor files.
    """
    value = _parse_object(content)
    classes, num_rows, suffixes = (value.get(name) for name in ("classes", "rows", "files"))
    if not isinstance(classes, list) or len(classes) > MAX_CLASSES or not all(map(_is_class, classes)):
        raise ValueError("the model's classes are none")
    if not isinstance(num_rows, int) or isinstance(num_rows, bool) or num_rows < 1:
        num_rows = 0
    if not isinstance(suffixes, list) or len(suffixes) > MAX_SUFFIXES or not all(map(_is_class, suffixes)):
        suffixes = []
    if not num_rows and not suffixes:
        raise ValueError(
            "the model makes examples of neither rows nor files: deploy one of the task series or table, pictures or "
            "audio"
        )
    return ModelFacts(
        model=_parse_identity(value, "model"), deployment=_parse_identity(value, "deployment"),
        classes=tuple(classes), num_rows=num_rows,
        suffixes=tuple(suffixes),
    )  # fmt: skip


def parse_prediction(content: bytes) -> Json:
    """Returns `class`, `probability` and `margin`, or `values`, of one example, with `model` and `deployment`.

    Raises:
        ValueError: it makes no sense, or is of no example or of several.
    """
    value = _parse_object(content)
    rows = value.get("rows")
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], dict):
        raise ValueError("the answer is not of one example")
    found: Json = {name: _parse_identity(value, name) for name in ("model", "deployment")}
    if isinstance(values := rows[0].get("values"), list) and 0 < len(values) <= MAX_CLASSES:
        return {**found, "values": [_to_number(number) for number in values]}
    if not _is_class(rows[0].get("class")):
        raise ValueError("the answer has no class")
    shares = {name: _to_number(rows[0].get(name)) for name in ("probability", "margin")}
    if not all(0 <= share <= 1 for share in shares.values()):
        raise ValueError("probability and margin of an answer are 0 to 1")
    return {**found, "class": rows[0]["class"], **shares}


def _parse_object(content: bytes) -> dict[str, Any]:
    value = parse_message(content)
    if not isinstance(value, dict):
        raise ValueError("the answer is no JSON object")  # noqa: TRY004 the content is wrong, not the caller
    return value


def _parse_identity(value: Mapping[str, object], name: str) -> str | None:
    text = value.get(name)
    if text is None or (isinstance(text, str) and len(text) <= MAX_TEXT_CHARS and is_safe_text(text)):
        return text
    raise ValueError(
        f"the answer's {name} must be null or up to {MAX_TEXT_CHARS} visible characters, got {text!r:.80}"
    )


def _is_class(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_TEXT_CHARS and is_safe_text(name)


def _to_number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("the answer has no number")  # noqa: TRY004 likewise
    return float(value)
