"""The model on its way down: encoded once for all boards, and counted as what each of them is sent."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.simulation.boards import Board
from edgefl.simulation.training import Sent
from edgefl.types import Assignment, Indices, ModelSource, Tensors

Encode = Callable[[Tensors, int], bytes]
EncodeChanges = Callable[[Tensors, Indices, int], bytes | None]


class Downlink:
    """Encodes models.

    Args:
        encode: (model, version) -> the whole model as a body.
        encode_changes: (model, what changed, version) -> a body for boards that hold an older model, None where the
            whole one is hardly larger; None where whole models are always sent.
    """

    def __init__(self, encode: Encode, encode_changes: EncodeChanges | None = None) -> None:
        self._encode, self._encode_changes = encode, encode_changes
        self._newest: Sent | None = None
        self._of_device: Sent | None = None
        self._delta_bytes: dict[int, int | None] = {}

    def of(self, subject: str, source: ModelSource) -> Sent:
        """Returns the whole model of one device as it is now; the global one for an empty subject."""
        if not subject:
            return self.newest(source)
        # Only the last one is kept, since all who evaluate it are asked at once.
        if self._of_device is None or self._of_device.key != (source.version, subject):
            body = self._encode(source.model_of(subject), source.version)
            self._of_device = Sent(version=source.version, body=body, subject=subject)
        return self._of_device

    def newest(self, source: ModelSource) -> Sent:
        """Returns the whole model as it is now."""
        if self._newest is None or self._newest.version != source.version:
            self._newest = Sent(version=source.version, body=self._encode(source.model(), source.version))
            self._delta_bytes = {}
        return self._newest

    def num_bytes(self, board: Board, source: ModelSource) -> int:
        """Returns how many bytes the newest model takes to a board, which holds it from then on.

        A board that is sent changes ends up with the very model that the others got, so only the bytes differ.
        """
        whole = self.newest(source)
        base, board.held_version = board.held_version, whole.version
        delta = None if base is None or self._encode_changes is None else self._delta(base, source)
        return len(whole.body) if delta is None else delta

    def num_bytes_for_node(self, order: Assignment, source: ModelSource) -> int:
        """Returns how many bytes the messages of a node's neighbours take, and the model where it needs one."""
        messages = sum(len(message.body) for message in order.plan.inbox)
        return messages + (len(self.newest(source).body) if order.sends_model else 0)

    def _delta(self, base: int, source: ModelSource) -> int | None:
        if base not in self._delta_bytes:
            changed = {} if base == source.version else source.changed(base)
            encode = self._encode_changes
            body = None if changed is None or encode is None else encode(source.model(), changed, source.version)
            self._delta_bytes[base] = None if body is None else len(body)
        return self._delta_bytes[base]
