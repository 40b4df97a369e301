"""The model on its way to devices: encoded once for all of them, whole, or only what changed since the one they hold.

Models of single devices, sent for evaluation alone, are always whole.

A device that is sent a delta keeps its model. Which one that is follows from what it was sent last, since a device
takes its work in order. It may be wrong (its agent is new, an order got lost): then the device says so, and is sent
the whole model of the same version, which is kept here for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from edgefl.coordinator.dispatch.participants import FleetRun
from edgefl.coordinator.mail import PreparedBody
from edgefl.coordinator.superlink import prepare_body
from edgefl.decentralised.mailbag import pack_mail
from edgefl.types import Assignment, Evaluation, Json, ModelSource

KEPT_BYTES = 64 * 1024 * 1024
"""Whole models of versions that some device got as a delta are kept up to so many bytes, the newest in any case."""

KEEP: Json = {"keep": True}
NO_MODEL: Json = {"model": False}
HELD: Json = {"held": True, **NO_MODEL}
"""Only the answer is wanted, of a device that said that it holds the assignment; else it asks for the whole model."""
PREPARED = "prepared"
"""The model is not in the body: the device has fetched that of this version when it prepared for the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMail:
    """A body and what the order's header says of it: `keep` the model, the body is a delta to version `base`."""

    body: PreparedBody
    header: Json = field(default_factory=dict)


class Downlink:
    """Chooses what each order carries. Used by the thread of the run alone."""

    def __init__(self, run: FleetRun, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._run, self._kept_bytes = run, kept_bytes
        self._held: dict[str, int] = {}
        self._version = -1
        self._whole: PreparedBody | None = None
        self._of_device: tuple[str, PreparedBody] | None = None
        self._deltas: dict[int, PreparedBody | None] = {}
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._source: ModelSource | None = None
        self._newest_bytes: tuple[int, bytes] | None = None
        self._prepared: dict[str, int] = {}

    def look_at(self, source: ModelSource) -> None:
        """Says where the newest model is."""
        self._source = source
        if source.version != self._version:
            self._version, self._whole, self._of_device, self._deltas = source.version, None, None, {}

    def first(self) -> tuple[int, PreparedBody]:
        """Returns the newest version and its whole model, for devices that prepare for a run."""
        assert self._source is not None
        return self._source.version, self._newest(self._source)

    def note_prepared(self, device_id: str, version: int) -> None:
        """Says that a device has fetched the whole model of a version ahead of its first work."""
        self._prepared[device_id] = version

    def mail(self, order: Assignment | Evaluation, source: ModelSource) -> ModelMail:
        """Returns the newest model as this order's device needs it; nothing of it where it was fetched before."""
        self.look_at(source)
        prepared = self._prepared.pop(order.device_id, None) if isinstance(order, Assignment) else None
        if prepared != source.version or not isinstance(order, Assignment) or order.plan.node is not None:
            return self._mail(order, source)
        if self._run.encode_changes is not None:
            self._held[order.device_id] = source.version
            self._keep(source)
        told, body = pack_mail(order.plan.inbox, b"")
        header: Json = {"mail": told} if order.plan.inbox else (KEEP if self._run.encode_changes else {})
        return ModelMail(body=prepare_body(body), header={**header, PREPARED: prepared})

    def _mail(self, order: Assignment | Evaluation, source: ModelSource) -> ModelMail:
        if isinstance(order, Assignment) and order.plan.node is not None:
            return self._with_messages(order, with_model=order.sends_model)
        if isinstance(order, Evaluation) and order.subject:
            return ModelMail(body=self._subject(order.subject, source))
        if isinstance(order, Assignment) and order.plan.inbox:
            return self._with_messages(order, with_model=True)
        if self._run.encode_changes is None or isinstance(order, Evaluation):
            return ModelMail(body=self._newest(source))
        base = self._held.get(order.device_id)
        self._held[order.device_id] = source.version
        delta = None if base is None else self._delta(base, source)
        if delta is None:
            return ModelMail(body=self._newest(source), header=KEEP)
        return ModelMail(body=delta, header={**KEEP, "base": base})

    def whole(self, order: Assignment) -> ModelMail | None:
        """Returns the whole model that a device got as a delta; None when it is kept no longer.

        A node of a graph, which got none, gets the newest.
        """
        if order.plan.node is not None:
            return self._with_messages(order, with_model=True)
        source = self._source
        is_newest = source is not None and source.version == order.base_version
        if order.plan.inbox:
            return self._with_messages(order, with_model=True) if is_newest else None
        if self._run.encode_changes is None:
            return ModelMail(body=self._newest(source)) if source is not None and is_newest else None
        body = self._kept.get(order.base_version)
        if body is None:
            return None
        self._held[order.device_id] = order.base_version
        return ModelMail(body=prepare_body(body), header=KEEP)

    def _with_messages(self, order: Assignment, *, with_model: bool) -> ModelMail:
        """Returns messages, such as those of a node's neighbours, and behind them a model where one is needed."""
        assert self._source is not None
        model = self._encoded(self._source) if with_model else b""
        told, body = pack_mail(order.plan.inbox, model)
        return ModelMail(body=prepare_body(body), header={"mail": told, **({} if with_model else NO_MODEL)})

    def forget(self, device_id: str) -> None:
        """Says that nobody knows which model a device holds: it gets a whole one next."""
        self._held.pop(device_id, None)
        self._prepared.pop(device_id, None)

    def _subject(self, device_id: str, source: ModelSource) -> PreparedBody:
        """Returns a device's own model; only the last one is kept, since all who evaluate it are asked at once."""
        if self._of_device is None or self._of_device[0] != device_id:
            body = self._run.encode(source.model_of(device_id), source.version)
            self._of_device = device_id, prepare_body(body)
        return self._of_device[1]

    def _newest(self, source: ModelSource) -> PreparedBody:
        if self._whole is None:
            self._whole = prepare_body(self._encoded(source))
        return self._whole

    def _encoded(self, source: ModelSource) -> bytes:
        kept = self._kept.get(source.version)
        if kept is not None:
            return kept
        if self._newest_bytes is None or self._newest_bytes[0] != source.version:
            self._newest_bytes = source.version, self._run.encode(source.model(), source.version)
        return self._newest_bytes[1]

    def _delta(self, base: int, source: ModelSource) -> PreparedBody | None:
        """Returns what changed since `base`, encoded once for all who hold that; None where the whole is better."""
        if base not in self._deltas:
            changed = {} if base == source.version else source.changed(base)
            encode = self._run.encode_changes
            body = None if changed is None or encode is None else encode(source.model(), changed, source.version)
            self._deltas[base] = None if body is None else prepare_body(body)
            if body is not None:
                self._keep(source)
        return self._deltas[base]

    def _keep(self, source: ModelSource) -> None:
        # The model itself moves on in place, and a device may need this version long after.
        if source.version not in self._kept:
            self._kept[source.version] = self._encoded(source)
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self._kept_bytes:
            self._kept.popitem(last=False)
