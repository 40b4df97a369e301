"""Simulated network in virtual time: the event queue, the links, and the size of each download.

The coordinator's link is shared fairly: each active transfer gets an equal part (processor sharing), and a device
receives no faster than its own link allows. The unused part of a slow device is not given to the others: the network
holds it for the device meanwhile. Starting and ending a transfer cost O(log n), since one running total serves all of
them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from edgefl.core.types import Indices, ModelProvider, Tensors, TrainInstruction
from edgefl.simulation.backends.trainer import EncodedModel
from edgefl.simulation.device import SimulatedDevice

TransferT = TypeVar("TransferT")

Transfer = tuple[Callable[[Any], None], Any, float, float]
"""Callback, its subject, earliest end in seconds, and the latency after the last byte."""

EncodeModel = Callable[[Tensors, int], bytes]
EncodeChanges = Callable[[Tensors, Indices, int], bytes | None]


class SimulationEventQueue:
    """A heap of callbacks; those of the same instant run in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_scheduled = 0

    def schedule(self, at_s: float, callback: Callable[[Any], None], argument: Any) -> None:
        """Calls `callback` with the subject at `at_s`, which is not before now."""
        self._num_scheduled += 1
        heapq.heappush(self._heap, (at_s, self._num_scheduled, callback, argument))

    @property
    def is_empty(self) -> bool:
        return not self._heap

    def advance(self, until_s: float) -> bool:
        """Advances to the next instant and runs its events; False if that is after `until_s`."""
        heap = self._heap
        if not heap or heap[0][0] > until_s:
            return False
        self.now_s = at_s = heap[0][0]
        while heap and heap[0][0] == at_s:
            _, _, callback, subject = heapq.heappop(heap)
            callback(subject)
        return True


class SharedLink(Generic[TransferT]):
    """Transfers over one link of `bytes_per_s`, keyed by their subject.

    `served` counts the bytes that a transfer which never paused would have got; one that began at `served` = v and
    has n bytes ends when `served` = v + n.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._served_bytes, self._updated_s, self._sequence = 0.0, 0.0, 0
        self._heap: list[tuple[float, int, TransferT]] = []

    def start(self, now_s: float, num_bytes: int, transfer: TransferT) -> None:
        """Starts a transfer."""
        self._update(now_s)
        self._sequence += 1
        heapq.heappush(self._heap, (self._served_bytes + num_bytes, self._sequence, transfer))

    def compute_next_end_s(self) -> float | None:
        """Returns when the next transfer ends if none begins before; None when there is none."""
        if not self._heap:
            return None
        return self._updated_s + (self._heap[0][0] - self._served_bytes) * len(self._heap) / self._bytes_per_s

    def complete_next(self, now_s: float) -> list[TransferT]:
        """Ends the transfer of `compute_next_end_s`, and all others of the same instant."""
        self._served_bytes, self._updated_s = self._heap[0][0], now_s
        transfers = []
        while self._heap and self._heap[0][0] <= self._served_bytes:
            transfers.append(heapq.heappop(self._heap)[2])
        return transfers

    def _update(self, now_s: float) -> None:
        if self._heap:
            self._served_bytes += (now_s - self._updated_s) * self._bytes_per_s / len(self._heap)
            # Rounding must not carry the total past the transfer that ends next.
            self._served_bytes = min(self._served_bytes, self._heap[0][0])
        else:
            self._served_bytes = 0.0
        self._updated_s = now_s


class SimulatedNetwork:
    """Carries models down and updates up; a device's transfers in one direction are sequential.

    Args:
        event_queue: virtual time.
        up_bytes_per_s: inbound rate of the coordinator's link, shared by all devices; None for no limit.
        down_bytes_per_s: its outbound rate.
    """

    def __init__(
        self, event_queue: SimulationEventQueue, *, up_bytes_per_s: float | None, down_bytes_per_s: float | None
    ) -> None:
        self._event_queue = event_queue
        self._uplink = None if up_bytes_per_s is None else SharedLink[Transfer](up_bytes_per_s)
        self._downlink = None if down_bytes_per_s is None else SharedLink[Transfer](down_bytes_per_s)

    def send_down(
        self, device: SimulatedDevice, num_bytes: int, callback: Callable[[Any], None], argument: Any
    ) -> None:
        """Calls `callback` with the subject when the device has received all bytes."""
        device.downlink_free_s = self._send(
            self._downlink,
            device,
            device.downlink_free_s,
            device.profile.down_bytes_per_s,
            num_bytes,
            callback,
            argument,
        )

    def send_up(
        self, device: SimulatedDevice, num_bytes: int, callback: Callable[[Any], None], argument: Any
    ) -> None:
        """Calls `callback` with the subject when the coordinator has received all bytes."""
        device.uplink_free_s = self._send(
            self._uplink, device, device.uplink_free_s, device.profile.up_bytes_per_s, num_bytes, callback, argument
        )

    def _send(  # noqa: PLR0913, PLR0917 both directions of one device
        self,
        link: SharedLink[Transfer] | None,
        device: SimulatedDevice,
        free_s: float,
        bytes_per_s: float,
        num_bytes: int,
        callback: Callable[[Any], None],
        argument: Any,
    ) -> float:
        """Starts a transfer and returns when the device's own link is free again."""
        now_s = self._event_queue.now_s
        end_s = device.compute_transfer_end_s(max(now_s, free_s), num_bytes / bytes_per_s)
        self._start_transfer(link, num_bytes, (callback, argument, end_s, device.compute_latency_s(now_s)))
        return end_s

    def _start_transfer(self, link: SharedLink[Transfer] | None, num_bytes: int, transfer: Transfer) -> None:
        if link is None:
            callback, subject, end_s, latency_s = transfer
            self._event_queue.schedule(end_s + latency_s, callback, subject)
            return
        link.start(self._event_queue.now_s, num_bytes, transfer)
        self._schedule_next_end(link)

    def _schedule_next_end(self, link: SharedLink[Transfer]) -> None:
        end_s = link.compute_next_end_s()
        if end_s is not None:
            self._event_queue.schedule(max(end_s, self._event_queue.now_s), self._on_transfer_end, (link, end_s))

    def _on_transfer_end(self, argument: tuple[SharedLink[Transfer], float]) -> None:
        link, expected_s = argument
        if link.compute_next_end_s() != expected_s:
            return  # stale event: a transfer began or ended meanwhile
        now_s = self._event_queue.now_s
        for callback, subject, own_end_s, latency_s in link.complete_next(now_s):
            self._event_queue.schedule(max(now_s, own_end_s) + latency_s, callback, subject)
        self._schedule_next_end(link)


class SimulatedDownlink:
    """Encodes models.

    Args:
        encode: (model, version) -> the whole model as a body.
        encode_changes: (model, changed entries, version) -> a body for devices with an older model, None where
            the whole one is hardly larger; None where whole models are always sent.
        decode: body of a whole model -> model; None where nothing is trained.
        front_bytes: size of the first layers, which are all that a device gets of a network that is cut; else None.
        base_bytes: of what a device gets once in the run.
    """

    def __init__(
        self,
        encode: EncodeModel,
        encode_changes: EncodeChanges | None = None,
        decode: Callable[[bytes], Tensors] | None = None,
        *,
        front_bytes: int | None = None,
        base_bytes: int = 0,
    ) -> None:
        self.encode, self._encode_changes, self.decode = encode, encode_changes, decode
        self._front_bytes, self._base_bytes = front_bytes, base_bytes
        self._with_base: set[str] = set()
        self._global_model: EncodedModel | None = None
        self._device_model: EncodedModel | None = None
        self._delta_bytes: dict[int, int | None] = {}

    def get_model(self, owner: str, provider: ModelProvider) -> EncodedModel:
        """Returns one device's current full model; the global one for an empty subject."""
        if not owner:
            return self.get_global_model(provider)
        # Only the last one is cached, since all evaluators of it are asked at once.
        if self._device_model is None or self._device_model.key != (provider.version, owner):
            body = self.encode(provider.device_model(owner), provider.version)
            self._device_model = EncodedModel(version=provider.version, body=body, owner=owner)
        return self._device_model

    def get_global_model(self, provider: ModelProvider) -> EncodedModel:
        """Returns the current full global model."""
        if self._global_model is None or self._global_model.version != provider.version:
            self._global_model = EncodedModel(
                version=provider.version, body=self.encode(provider.model(), provider.version)
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
        whole = len(encoded.body) if self._front_bytes is None else self._front_bytes
        base = self._start_base_download(device.device_id) if self._base_bytes else 0
        return (whole if delta is None else delta) + base

    def count_base_bytes(self, device_id: str) -> int:
        """Returns the bytes of the base that a device gets with its next model; 0 where it has it."""
        return 0 if device_id in self._with_base else self._base_bytes

    def cancel_base_download(self, device_id: str) -> None:
        """Notes that a device got no base, as its conditions did not allow the download."""
        self._with_base.discard(device_id)

    def _start_base_download(self, device_id: str) -> int:
        """Returns the bytes of the base, once for each device: its card keeps it, whatever happens to the device."""
        is_there = device_id in self._with_base
        self._with_base.add(device_id)
        return 0 if is_there else self._base_bytes

    def count_peer_download_bytes(self, instruction: TrainInstruction, provider: ModelProvider) -> int:
        """Returns the bytes of a node's peer messages, and of model and base where needed."""
        messages = sum(len(message.body) for message in instruction.plan.messages)
        messages += self._start_base_download(instruction.device_id) if self._base_bytes else 0
        return messages + (len(self.get_global_model(provider).body) if instruction.sends_model else 0)

    def _compute_delta_bytes(self, base_version: int, provider: ModelProvider) -> int | None:
        if base_version not in self._delta_bytes:
            changes = {} if base_version == provider.version else provider.changed(base_version)
            encode = self._encode_changes
            body = None if changes is None or encode is None else encode(provider.model(), changes, provider.version)
            self._delta_bytes[base_version] = None if body is None else len(body)
        return self._delta_bytes[base_version]
