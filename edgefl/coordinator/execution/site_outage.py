"""Rounds of a site while its uplink is away, and how what they make goes upstream later.

The boards go on from the site's own mean. When upstream is back, the next answer is the site's model against the one
that came: upstream averages the two by their examples, as local SGD does after a longer period (Stich, ICLR 2019).
A discount for what is late (Xie et al. 2019) was tried: over ten minutes it leaves nothing of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.error_feedback import is_stateful_training
from edgefl.compression.stages import to_dense
from edgefl.coordinator.execution.site_records import REPLY_FILE, RoundRecord, load_content, save_content
from edgefl.core.errors import CodecError
from edgefl.core.sites import SITE_LIMITS_KEY, SiteLimits, SiteTask
from edgefl.core.types import Array, Json, ModelSpec, TrainConfig, derive_rng
from edgefl.system.atomic_files import sync_directory

log = logging.getLogger(__name__)

FILE, MODEL_FILE = "outage", "outage-model"
"""In the site's folder its own model; in a round's, how far that is ahead, and that model until it is answered."""

MAX_COUNT = 2**53
"""Bound of versions and rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageLimits:
    """How far a site goes on without its coordinator.

    Attributes:
        max_rounds: of the site in one outage; 0 for none.
        max_staleness: versions of the model that upstream may have made meanwhile; later the work is dropped.
    """

    max_rounds: int = 0
    max_staleness: int = 50


@dataclass(slots=True, kw_only=True)
class SiteModel:
    """The model at which a site stands after its newest answer, and the rounds since.

    Attributes:
        header: of the instruction that was answered.
        task: that is trained.
        tensors: the model after the answer and these rounds.
        rounds: their number.
        tries: rounds that were tried, with those that failed.
    """

    header: Json
    task: SiteTask
    tensors: dict[str, Array]
    rounds: int = 0
    tries: int = 0

    @classmethod
    def create(cls, header: Json, body: bytes, task: SiteTask, update: bytes) -> SiteModel | None:
        """Returns the model after an answer; None where no round without upstream may follow.

        Boards that keep state from round to round must have each update used. A server's optimiser would take the
        answer of a whole outage for one gradient.

        Args:
            header: of the instruction.
            body: its model, encoded.
            task: that is trained.
            update: the answer, encoded.
        """
        plan = TrainConfig.from_json(header.get("plan", {}))
        has_state = task.has_local_tensors or is_stateful_training(plan, str(header.get("codec", "dense")), task.spec)
        if has_state or not SiteLimits.parse(header.get(SITE_LIMITS_KEY)).has_plain_step:
            return None
        tensors = _decode(body, task.spec)
        _add(tensors, _decode(update, task.spec))
        return cls(header=header, task=task, tensors=tensors)

    def make_instruction(self) -> tuple[Json, bytes]:
        """Returns header and model of the next round without upstream; its version gives the boards other seeds.

        Each try has a name of its own: boards answer one that they know from memory.
        """
        self.tries += 1
        body = make_codec("dense", self.task.spec).encode(self.tensors, derive_rng(0))
        return {
            **self.header,
            "assignment": f"{self.header['assignment']}+{self.tries}",
            "version": int(self.header["version"]) + self.rounds + 1,
            "model_sha256": hashlib.sha256(body).hexdigest(),
        }, body

    def add_round(self, update: bytes) -> None:
        """Counts the answer of such a round."""
        _add(self.tensors, _decode(update, self.task.spec))
        self.rounds += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageWork:
    """The model that a site has made without upstream, on disk until an answer takes it along.

    Attributes:
        folder: of the site's rounds.
    """

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def save(self, model: SiteModel) -> None:
        """Writes a site's model, durably, in place of the former.

        Raises:
            StoreError: the disk is full.
        """
        line = {name: model.header.get(name) for name in ("run", "lineage", "version")}
        body = make_codec("dense", model.task.spec).encode(model.tensors, derive_rng(0))
        save_content(self.path, {**line, "rounds": model.rounds}, body)

    def drop(self, run_id: str) -> None:
        """Removes the model of a run."""
        loaded = load_content(self.path)
        if loaded is not None and run_id == loaded[0].get("run"):
            self._remove(self.path)

    def drop_late(self, header: Json, max_staleness: int) -> str:
        """Removes the model where an instruction cannot take it along; returns why, empty where it can or is none.

        Args:
            header: of the instruction.
            max_staleness: versions that upstream may have made meanwhile.
        """
        loaded = self._load()
        if loaded is None:
            return ""
        line, staleness = loaded[0], _count_staleness(loaded[0], header)
        if (line.get("run"), line.get("lineage")) != (header.get("run"), header.get("lineage")):
            reason = "another run, or another state of the coordinator's store, came after it"
        elif not 0 <= staleness <= max_staleness:
            reason = f"upstream is {staleness} versions on, of which {max_staleness} are allowed"
        else:
            return ""
        self._remove(self.path)
        return f"{_describe(line)} is dropped: {reason}"

    def move_into(self, record: RoundRecord, header: Json, body: bytes, task: SiteTask) -> str:
        """Moves what the site has made into a round; returns what becomes of it, empty where there is nothing.

        It is in one place at any instant: `restore` moves it back where the round has no answer, `complete` removes
        it where it has one.

        Args:
            record: of the round that takes it along.
            header: of the round's instruction.
            body: its model, encoded.
            task: that is trained.
        """
        loaded = self._load()
        if loaded is None:
            return ""
        line, found = loaded
        present = _decode(body, task.spec)
        try:
            site = _decode(found, task.spec)
        except CodecError as error:
            log.warning("%s is dropped: %s", self.path, error)
            self._remove(self.path)
            return ""
        ahead = {name: (site[name] - tensor).astype(tensor.dtype) for name, tensor in present.items()}
        self.path.rename(record.path / MODEL_FILE)
        sync_directory(record.path)
        sync_directory(self.folder)
        content = make_codec("dense", task.spec).encode(ahead, derive_rng(0))
        save_content(record.path / FILE, {"rounds": line["rounds"]}, content)
        return f"{_describe(line)} goes upstream, {_count_staleness(line, header)} versions late"

    def complete(self, record: RoundRecord) -> None:
        """Removes the model that an answer has taken along; how far it was ahead stays beside the answer."""
        self._remove(record.path / MODEL_FILE)

    def restore(self, path: Path) -> None:
        """Moves the model back out of a round's folder, if it is there: the round has no answer."""
        if (path / MODEL_FILE).exists():
            self._remove(path / FILE)
            (path / MODEL_FILE).rename(self.path)
            sync_directory(self.folder)

    def recover(self) -> None:
        """Completes what a gateway that was killed had started."""
        for model in [*self.folder.glob(f"*/{MODEL_FILE}")]:
            if (model.parent / REPLY_FILE).exists():
                self._remove(model)
            else:
                self.restore(model.parent)

    def _load(self) -> tuple[Json, bytes] | None:
        """Returns line and model on disk; what makes no sense is removed."""
        loaded = load_content(self.path)
        if loaded is not None:
            counts = [loaded[0].get(name) for name in ("version", "rounds")]
            if all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts):
                return loaded
            log.warning("%s is dropped: it has no version and number of rounds", self.path)
        if self.path.exists():
            self._remove(self.path)
        return None

    @staticmethod
    def _remove(path: Path) -> None:
        """Removes a file for good: after a power cut it would go upstream again."""
        path.unlink(missing_ok=True)
        sync_directory(path.parent)


def _count_staleness(line: Json, header: Json) -> int:
    return int(header["version"]) - int(line["version"])


def _describe(line: Json) -> str:
    return f"what {line['rounds']} rounds of the site made while the uplink was away"


def load_taken_work(record: RoundRecord, spec: ModelSpec) -> Mapping[str, Array]:
    """Returns how far the site's own model is ahead of the round's; empty where it is not taken along."""
    loaded = load_content(record.path / FILE)
    try:
        return {} if loaded is None else _decode(loaded[1], spec)
    except CodecError as error:
        log.warning("%s is left out: %s", record.path / FILE, error)
        return {}


def _decode(body: bytes, spec: ModelSpec) -> dict[str, Array]:
    """Returns the tensors of a body, as arrays that may be changed."""
    decoded = decode_body(body, spec)
    return {each.name: np.array(to_dense(decoded[each.name])) for each in spec}


def _add(tensors: dict[str, Array], displacement: Mapping[str, Array]) -> None:
    for name, tensor in displacement.items():
        tensors[name] = (tensors[name] + tensor).astype(tensors[name].dtype)
