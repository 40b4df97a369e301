"""Model distribution: encodes the model once for all devices, in full or as a delta to the one they hold.

Models of single devices, sent for evaluation alone, are always full.

A device that is sent a delta keeps its model. Its version follows from what it was sent last, since a device takes
its work in order. That may be wrong (a restarted agent, a lost instruction): then the device reports it, and is sent
the full model of the same version, which is cached here for a while.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from edgefl.coordinator.execution.fleet_view import RunSpec
from edgefl.coordinator.execution.headers import MODEL_HASH_KEY
from edgefl.coordinator.flower.messages import PreparedBody
from edgefl.coordinator.flower.superlink import prepare_body
from edgefl.core.types import EvaluateInstruction, Json, ModelProvider, Tensors, TrainInstruction
from edgefl.strategies.peer_algorithms.gossip_node import encode_messages

MAX_CACHE_BYTES = 64 * 1024 * 1024
"""Maximum bytes of cached full models of versions sent as a delta; the newest is always cached."""

KEEP_MODEL: Json = {"keeps_model": True}
NO_MODEL: Json = {"has_model": False}
REPLY_ONLY: Json = {"has_stored_reply": True, **NO_MODEL}
"""Requests only the answer of a device that holds the assignment; it asks for the full model if it does not."""
PREFETCHED_KEY = "prefetched_version"
"""The body has no model: the device prefetched this version during admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPayload:
    """A body and its header fields: `keeps_model`, the body is a delta to `base_version`."""

    body: PreparedBody
    header: Json = field(default_factory=dict)


class ModelDistributor:
    """Payloads of instructions. Not thread-safe: used by the run's thread alone."""

    def __init__(self, run: RunSpec, *, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        self._run, self._max_cache_bytes = run, max_cache_bytes
        self._held_versions: dict[str, int] = {}
        self._version = -1
        self._newest_body: PreparedBody | None = None
        self._device_model: tuple[str, PreparedBody] | None = None
        self._whole_body: tuple[int, PreparedBody] | None = None
        self._deltas: dict[int, PreparedBody | None] = {}
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._source: ModelProvider | None = None
        self._newest_encoded: tuple[int, bytes] | None = None
        self._prefetched_versions: dict[str, int] = {}
        self._newest_hash: tuple[int, str] | None = None
        self._next_models: dict[str, tuple[int, str]] = {}

    def update_source(self, source: ModelProvider) -> None:
        """Sets the source of the newest model."""
        self._source = source
        if source.version != self._version:
            self._version, self._newest_body, self._device_model, self._deltas = source.version, None, None, {}

    def get_newest_model(self) -> tuple[int, PreparedBody]:
        """Returns the newest version and its full model, for devices in the *prepare* phase."""
        assert self._source is not None
        return self._source.version, self._get_newest_body(self._source)

    def record_prefetch(self, device_id: str, version: int) -> None:
        """Records that a device has prefetched the full model of a version."""
        self._prefetched_versions[device_id] = version

    def record_next_model(self, device_id: str, version: int, sha256: str) -> None:
        """Records that a member of a collective holds a model, which will be this version if its hash is the same."""
        self._next_models[device_id] = version, sha256

    def create_payload(
        self, instruction: TrainInstruction | EvaluateInstruction, source: ModelProvider
    ) -> ModelPayload:
        """Returns the newest model as the device needs it; no model if it was prefetched."""
        payload = self._create_payload(instruction, source)
        return replace(payload, header=self.name_newest(instruction, payload.header))

    def name_newest(self, instruction: TrainInstruction | EvaluateInstruction, header: Json) -> Json:
        """Returns a header with the hash of the newest model, if the instruction is of its version."""
        source = self._source
        if isinstance(instruction, TrainInstruction):
            version, has_own_model = instruction.base_version, instruction.plan.node is not None
        else:
            version, has_own_model = instruction.version, bool(instruction.subject)
        if self._run.lineage is None or source is None or source.version != version or has_own_model:
            return header
        return {**header, MODEL_HASH_KEY: self._compute_newest_hash(source)}

    def _compute_newest_hash(self, source: ModelProvider) -> str:
        if self._newest_hash is None or self._newest_hash[0] != source.version:
            self._newest_hash = source.version, _compute_hash(self._encode_newest(source))
        return self._newest_hash[1]

    def _create_payload(
        self, instruction: TrainInstruction | EvaluateInstruction, source: ModelProvider
    ) -> ModelPayload:
        self.update_source(source)
        if self._run.encode_input is not None:
            return self._create_input_payload(instruction, self._run.encode_input)
        if isinstance(instruction, TrainInstruction) and not instruction.plan.has_training:
            return self._create_message_payload(instruction, has_model=False)
        if isinstance(instruction, EvaluateInstruction) and self._run.encode_whole is not None:
            return ModelPayload(body=self._get_whole_body(self._run.encode_whole, source))
        prefetched_version = (
            self._prefetched_versions.pop(instruction.device_id, None)
            if isinstance(instruction, TrainInstruction)
            else None
        )
        if (
            prefetched_version != source.version
            or not isinstance(instruction, TrainInstruction)
            or instruction.plan.node is not None
        ):
            return self._create_sent_payload(instruction, source)
        if self._run.encode_changes is not None:
            self._held_versions[instruction.device_id] = source.version
            self._add_to_cache(source)
        message_header, body = encode_messages(instruction.plan.messages, b"")
        header: Json = (
            {"messages": message_header}
            if instruction.plan.messages
            else (KEEP_MODEL if self._run.encode_changes else {})
        )
        return ModelPayload(body=prepare_body(body), header={**header, PREFETCHED_KEY: prefetched_version})

    def _create_sent_payload(
        self, instruction: TrainInstruction | EvaluateInstruction, source: ModelProvider
    ) -> ModelPayload:
        if isinstance(instruction, TrainInstruction) and instruction.plan.node is not None:
            return self._create_message_payload(instruction, has_model=instruction.sends_model)
        if isinstance(instruction, EvaluateInstruction) and instruction.subject:
            return ModelPayload(body=self._get_device_body(instruction.subject, source))
        if isinstance(instruction, TrainInstruction) and instruction.plan.messages:
            return self._create_message_payload(instruction, has_model=True)
        if self._run.encode_changes is None or isinstance(instruction, EvaluateInstruction):
            return ModelPayload(body=self._get_newest_body(source))
        if self._next_models.pop(instruction.device_id, None) == (source.version, self._compute_newest_hash(source)):
            self._held_versions[instruction.device_id] = source.version
        base = self._held_versions.get(instruction.device_id)
        self._held_versions[instruction.device_id] = source.version
        delta = None if base is None else self._get_delta_body(base, source)
        if delta is None:
            return ModelPayload(body=self._get_newest_body(source), header=KEEP_MODEL)
        return ModelPayload(body=delta, header={**KEEP_MODEL, "base_version": base})

    def create_full_payload(self, instruction: TrainInstruction) -> ModelPayload | None:
        """Returns the full model that a device got as a delta; None when it is no longer cached.

        A node of a graph, which got no delta, gets the newest.
        """
        payload = self._create_full_payload(instruction)
        return None if payload is None else replace(payload, header=self.name_newest(instruction, payload.header))

    def _create_full_payload(self, instruction: TrainInstruction) -> ModelPayload | None:
        if self._run.encode_input is not None:
            return self._create_input_payload(instruction, self._run.encode_input)
        if instruction.plan.node is not None or not instruction.plan.has_training:
            return self._create_message_payload(instruction, has_model=instruction.plan.has_training)
        source = self._source
        is_newest = source is not None and source.version == instruction.base_version
        if instruction.plan.messages:
            return self._create_message_payload(instruction, has_model=True) if is_newest else None
        if self._run.encode_changes is None:
            return ModelPayload(body=self._get_newest_body(source)) if source is not None and is_newest else None
        body = self._cache.get(instruction.base_version)
        if body is None:
            return None
        self._held_versions[instruction.device_id] = instruction.base_version
        header = KEEP_MODEL if self._run.lineage is None else {**KEEP_MODEL, MODEL_HASH_KEY: _compute_hash(body)}
        return ModelPayload(body=prepare_body(body), header=header)

    def _create_input_payload(
        self, instruction: TrainInstruction | EvaluateInstruction, encode_input: Callable[[int], bytes]
    ) -> ModelPayload:
        """Returns the input of a job's part, which is made anew each time."""
        assert isinstance(instruction, TrainInstruction)
        assert instruction.block is not None
        return ModelPayload(body=prepare_body(encode_input(instruction.block)))

    def _create_message_payload(self, instruction: TrainInstruction, *, has_model: bool) -> ModelPayload:
        """Returns messages, such as those of a node's neighbours, followed by the model if needed."""
        assert self._source is not None
        model = self._encode_newest(self._source) if has_model else b""
        message_header, body = encode_messages(instruction.plan.messages, model)
        return ModelPayload(
            body=prepare_body(body), header={"messages": message_header, **({} if has_model else NO_MODEL)}
        )

    def remove_device(self, device_id: str) -> None:
        """Marks the model of a device as unknown: it gets a full one next."""
        self._held_versions.pop(device_id, None)
        self._next_models.pop(device_id, None)
        self._prefetched_versions.pop(device_id, None)

    def _get_device_body(self, device_id: str, source: ModelProvider) -> PreparedBody:
        """Returns a device's own model; only the last is cached, since all its evaluators are asked at once."""
        if self._device_model is None or self._device_model[0] != device_id:
            body = self._run.encode(source.device_model(device_id), source.version)
            self._device_model = device_id, prepare_body(body)
        return self._device_model[1]

    def _get_whole_body(self, encode: Callable[[Tensors, int], bytes], source: ModelProvider) -> PreparedBody:
        if self._whole_body is None or self._whole_body[0] != source.version:
            self._whole_body = source.version, prepare_body(encode(source.model(), source.version))
        return self._whole_body[1]

    def _get_newest_body(self, source: ModelProvider) -> PreparedBody:
        if self._newest_body is None:
            self._newest_body = prepare_body(self._encode_newest(source))
        return self._newest_body

    def _encode_newest(self, source: ModelProvider) -> bytes:
        encoded = self._cache.get(source.version)
        if encoded is not None:
            return encoded
        if self._newest_encoded is None or self._newest_encoded[0] != source.version:
            self._newest_encoded = source.version, self._run.encode(source.model(), source.version)
        return self._newest_encoded[1]

    def _get_delta_body(self, base: int, source: ModelProvider) -> PreparedBody | None:
        """Returns the delta since `base`, encoded once for all its holders; None where the full model is smaller."""
        if base not in self._deltas:
            changes = {} if base == source.version else source.changed(base)
            encode = self._run.encode_changes
            body = None if changes is None or encode is None else encode(source.model(), changes, source.version)
            self._deltas[base] = None if body is None else prepare_body(body)
            if body is not None:
                self._add_to_cache(source)
        return self._deltas[base]

    def _add_to_cache(self, source: ModelProvider) -> None:
        # The model is updated in place, and a device may need this version long after.
        if source.version not in self._cache:
            self._cache[source.version] = self._encode_newest(source)
        while len(self._cache) > 1 and sum(map(len, self._cache.values())) > self._max_cache_bytes:
            self._cache.popitem(last=False)


def _compute_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
