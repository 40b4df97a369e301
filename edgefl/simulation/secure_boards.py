"""Simulated boards in secure aggregation: the protocol of real ones, with identities that cost no certificates.

Each masks what it has trained as a real board does, so that a simulation adds up the same vectors, and its drop-outs
are those of the fault profiles.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from edgefl.core.errors import SecureAggregationError
from edgefl.core.secure_aggregation.messages import CERTIFICATE_BYTES
from edgefl.core.types import Array, SecureStep, TrainInstruction
from edgefl.simulation.backends.trainer import TrainingResult
from edgefl.simulation.device import InFlightWork

if TYPE_CHECKING:
    from edgefl.core.secure_aggregation.participant import ConsentRecorder, Participant

SIGNATURE_BYTES = 64


class SimulatedIdentity:
    """Identity of a board by a key that all simulated boards have; as large as a certificate."""

    certificate = bytes(CERTIFICATE_BYTES - SIGNATURE_BYTES)

    def __init__(self, device_id: str) -> None:
        self.device_id = device_id

    def sign(self, data: bytes) -> bytes:
        return hmac.digest(self.device_id.encode(), data, hashlib.sha512)

    def verify(self, device_id: str, certificate: bytes, data: bytes, signature: bytes) -> None:
        expected = hmac.digest(device_id.encode(), data, hashlib.sha512)
        if certificate != self.certificate or not hmac.compare_digest(signature, expected):
            raise SecureAggregationError(f"what came as of {device_id} is not signed by it")


class SecureBoards:
    """The participants of a run's devices; a device that reboots loses the secrets of its attempt, no consent."""

    def __init__(self) -> None:
        self._participants: dict[str, tuple[int, Participant]] = {}
        self._recorders: dict[str, ConsentRecorder] = {}

    def answer(self, work: InFlightWork) -> TrainingResult:
        """Returns a device's answer to a step in which it does not train.

        Raises:
            SecureAggregationError: it cannot take part any more.
        """
        config, participant = work.instruction.plan.secure, self._get_participant(work)
        assert config is not None
        messages = participant.answer("", config, work.instruction.plan.messages)
        num_bytes = sum(len(message.body) for message in messages)
        return TrainingResult(tensors={}, num_bytes=num_bytes, num_examples=0, messages=messages)

    def mask(self, work: InFlightWork, result: TrainingResult) -> TrainingResult:
        """Returns the masked update of a device that has trained.

        Raises:
            SecureAggregationError: it cannot take part any more.
            DataError: the update holds a NaN or an infinity.
        """
        from edgefl.core.secure_aggregation.ring import encode_vector  # noqa: PLC0415 for secure runs alone

        config, participant = work.instruction.plan.secure, self._get_participant(work)
        assert config is not None
        participant.accept_shares("", config, work.instruction.plan.messages)
        update: Mapping[str, Array] = {name: np.asarray(tensor) for name, tensor in result.tensors.items()}
        words = encode_vector(
            update,
            weight=result.num_examples,
            max_weight=config.max_examples,
            clip=config.clip,
            num_members=config.num_members,
        )
        messages = participant.mask("", config, words)
        return replace(result, tensors={}, num_bytes=len(messages[0].body), messages=messages)

    def _get_participant(self, work: InFlightWork) -> Participant:
        # The cryptography takes longer to import than a short simulation.
        from edgefl.core.secure_aggregation.participant import ConsentRecorder, Participant  # noqa: PLC0415

        device = work.device
        boot_count, participant = self._participants.get(device.device_id, (-1, None))
        if participant is None or boot_count != device.boot_count:
            recorder = self._recorders.setdefault(device.device_id, ConsentRecorder())
            participant = Participant(SimulatedIdentity(device.device_id), recorder)
            self._participants[device.device_id] = device.boot_count, participant
        return participant


def make_training_instruction(instruction: TrainInstruction) -> TrainInstruction:
    """Returns what the training of an instruction sees: messages of secure aggregation are not for it."""
    if instruction.plan.secure is None:
        return instruction
    return replace(instruction, plan=replace(instruction.plan, messages=()))


def is_step_without_training(work: InFlightWork) -> bool:
    """Returns whether a work is a step of secure aggregation in which nobody trains."""
    config = work.instruction.plan.secure
    return config is not None and config.step != SecureStep.UPDATE
