"""The model's downlink: encoded once for all devices, counted as each device's transfer."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.core.types import Indices, ModelProvider, Tensors, TrainInstruction
from edgefl.simulation.backends.backend import EncodedModel
from edgefl.simulation.device import SimulatedDevice

EncodeModel = Callable[[Tensors, int], bytes]
EncodeChanges = Callable[[Tensors, Indices, int], bytes | None]


class SimulatedDownlink:
    """Encodes models.

    Args:
        encode: (model, version) -> the whole model as a body.
        encode_changes: (model, changed entries, version) -> a body for devices with an older model, None where
            the whole one is hardly larger; None where whole models are always sent.
    """

    def __init__(self, encode: EncodeModel, encode_changes: EncodeChanges | None = None) -> None:
        self._encode, self._encode_changes = encode, encode_changes
        self._global_model: EncodedModel | None = None
        self._device_model: EncodedModel | None = None
        self._delta_bytes: dict[int, int | None] = {}

    def get_model(self, owner: str, provider: ModelProvider) -> EncodedModel:
        """Returns one device's current full model; the global one for an empty subject."""
        if not owner:
            return self.get_global_model(provider)
        # Only the last one is cached, since all evaluators of it are asked at once.
        if self._device_model is None or self._device_model.key != (provider.version, owner):
            body = self._encode(provider.device_model(owner), provider.version)
            self._device_model = EncodedModel(version=provider.version, body=body, owner=owner)
        return self._device_model

    def get_global_model(self, provider: ModelProvider) -> EncodedModel:
        """Returns the current full global model."""
        if self._global_model is None or self._global_model.version != provider.version:
            self._global_model = EncodedModel(
                version=provider.version, body=self._encode(provider.model(), provider.version)
            )
            self._delta_bytes = {}
        return self._global_model

    def start_download(self, device: SimulatedDevice, provider: ModelProvider) -> int:
        """Returns the download size of the newest model for a device, which holds it from then on.

        A device that is sent a delta ends up with the same model as the others, so only the bytes differ.
        """
        encoded = self.get_global_model(provider)
        base, device.model_version = device.model_version, encoded.version
        delta = None if base is None or self._encode_changes is None else self._compute_delta_bytes(base, provider)
        return len(encoded.body) if delta is None else delta

    def count_peer_download_bytes(self, instruction: TrainInstruction, provider: ModelProvider) -> int:
        """Returns the bytes of a node's peer messages, and of the model where needed."""
        messages = sum(len(message.body) for message in instruction.plan.inbox)
        return messages + (len(self.get_global_model(provider).body) if instruction.sends_model else 0)

    def _compute_delta_bytes(self, base_version: int, provider: ModelProvider) -> int | None:
        if base_version not in self._delta_bytes:
            changes = {} if base_version == provider.version else provider.changed(base_version)
            encode = self._encode_changes
            body = None if changes is None or encode is None else encode(provider.model(), changes, provider.version)
            self._delta_bytes[base_version] = None if body is None else len(body)
        return self._delta_bytes[base_version]
