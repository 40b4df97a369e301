"""Codec of peer messages: whole models, or their difference to a reference model of both ends.

A lossy codec encodes the difference to the newest model of this edge that the receiver has acknowledged. As the nodes
agree, differences vanish, and with them the codec's error: even two bits a number lead to the exact result. A message
that is lost, late or repeated does no harm: every body names its reference, and a node without it (new or restarted)
drops the body and reports this in its own next one, after which it gets a whole model.

Source: Tang et al., Communication Compression for Decentralized Training, NeurIPS 2018 (difference compression); here
with acknowledgements, for lossy links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec, decode_body, list_layer_codecs, make_codec
from edgefl.compression.quantisation.rounding import Float32
from edgefl.compression.registry import parse_spec
from edgefl.compression.sparsification.sparsifiers import Dense
from edgefl.compression.stages import select_shared_tensors
from edgefl.compression.wire import PeerModelFrame, read_peer_frame, write_peer_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensor

MessageParts = Mapping[str, Mapping[str, Array]]
"""Part of a message (`y`, `w`) -> tensor by name."""

MAX_REFERENCE_MODELS = 4
"""Maximum number of models per edge kept until they are acknowledged."""


class StaleReferenceError(CodecError):
    """The body is the difference to a model that this node does not hold."""


@dataclass(slots=True)
class _LinkDirection:
    """One direction of one edge: models by number, and the newest number held by both ends."""

    epoch: int = 0
    newest_number: int = 0
    base_number: int = 0
    models: dict[int, MessageParts] = field(default_factory=dict)

    def add(self, number: int, parts: MessageParts) -> None:
        self.models[number] = parts
        self.newest_number = max(self.newest_number, number)
        for old in sorted(self.models):
            if old < self.base_number or (len(self.models) > MAX_REFERENCE_MODELS and old != self.base_number):
                del self.models[old]


class PeerCodec:
    """Encodes and decodes for all edges of one node.

    Args:
        spec: a codec's line, without `ef`: the error stays in the next difference. Empty is `dense`.
        shapes: of the tensors that travel; all of them in every part of a message.
        epoch: incarnation of the node, larger than earlier ones, 1 to 2³² - 1.

    Raises:
        CodecError: the line is invalid, or needs state on the node.
    """

    def __init__(self, spec: str, shapes: ModelSpec, *, epoch: int) -> None:
        if parse_spec(spec or "dense").prefix:
            raise CodecError(
                f"codec {spec!r}: along edges differences travel, leave out what stands before the stages"
            )
        self._codec = make_codec(spec or "dense", shapes)
        for part in list_layer_codecs(self._codec):
            if not part.is_contraction:
                raise CodecError(
                    f"codec {part.spec!r}: the error of a draw can be larger than the difference that travels, and"
                    " nodes would never agree: use qsgd:2:8, or qsgd with more bits, lss, onebit, int8"
                    " or topk"
                )
        self._dense_codec = make_codec("dense", shapes)
        self._shapes, self._epoch = shapes, epoch
        self._is_exact = _is_exact(self._codec)
        self._last_number = 0
        self._outgoing: dict[str, _LinkDirection] = {}
        self._incoming: dict[str, _LinkDirection] = {}

    def encode(self, receiver: str, parts: MessageParts, rng: Generator) -> bytes:
        """Returns the body of a message to a peer.

        Raises:
            CodecError: a tensor is missing, or is not finite.
        """
        outgoing = self._outgoing.setdefault(receiver, _LinkDirection(epoch=self._epoch))
        incoming = self._incoming.get(receiver, _LinkDirection())
        # One counter for all edges, over their removal and creation: a number is never reused.
        self._last_number += 1
        number, reference = self._last_number, outgoing.models.get(outgoing.base_number)
        outgoing.newest_number = number
        bodies = {}
        if self._is_exact or reference is None:
            codec = self._codec if self._is_exact else self._dense_codec
            bodies = {name: codec.encode(arrays, rng) for name, arrays in parts.items()}
            base, sent_models = 0, parts
        else:
            base, sent_models = outgoing.base_number, {}
            for name, arrays in parts.items():
                difference = {tensor: array - reference[name][tensor] for tensor, array in arrays.items()}
                bodies[name] = self._codec.encode(difference, rng)
                sent_models[name] = _add_difference(reference[name], decode_body(bodies[name], self._shapes))
        if not self._is_exact:
            outgoing.add(number, {name: dict(arrays) for name, arrays in sent_models.items()})
        frame = PeerModelFrame(
            epoch=self._epoch,
            number=number,
            base_number=base,
            ack_epoch=incoming.epoch,
            ack_number=incoming.newest_number,
            parts={name: memoryview(body) for name, body in bodies.items()},
        )
        return write_peer_frame(frame)

    def decode(self, sender: str, body: bytes | memoryview) -> dict[str, dict[str, Array]]:
        """Returns the parts of a peer's message, as new arrays.

        Raises:
            StaleReferenceError: its reference model is not held.
            CodecError: it is damaged.
        """
        frame = read_peer_frame(body)
        base, number = frame.base_number, frame.number
        incoming = self._incoming.setdefault(sender, _LinkDirection())
        if frame.epoch < incoming.epoch:
            raise StaleReferenceError(f"{sender} sent this in an earlier incarnation")
        if frame.epoch != incoming.epoch:
            if base:
                raise StaleReferenceError(f"{sender} sends differences to a model that is not held here")
            incoming = self._incoming[sender] = _LinkDirection(epoch=frame.epoch)
        if base and base not in incoming.models:
            if number > incoming.newest_number:  # reported as not held; a merely late message changes nothing
                self._incoming[sender] = _LinkDirection(epoch=frame.epoch)
            raise StaleReferenceError(f"{sender} sends differences to its message {base}, which is not held here")
        decoded = {
            name: {tensor: _to_dense(value) for tensor, value in decode_body(part, self._shapes).items()}
            for name, part in frame.parts.items()
        }
        if base:
            missing = sorted(set(decoded) - set(incoming.models[base]))
            if missing:
                raise CodecError(f"body of an edge holds part {missing[0]!r}, which its reference lacks")
            decoded = {name: _add_difference(incoming.models[base][name], arrays) for name, arrays in decoded.items()}
        if number >= incoming.newest_number:
            incoming.base_number = base
            if not self._is_exact:
                incoming.add(
                    number, {name: {t: a.copy() for t, a in arrays.items()} for name, arrays in decoded.items()}
                )
            incoming.newest_number = number
            self._record_acknowledgement(sender, frame.ack_epoch, frame.ack_number)
        return decoded

    def remove_peer(self, peer: str) -> None:
        """Drops the state of an edge."""
        self._outgoing.pop(peer, None)
        self._incoming.pop(peer, None)

    def _record_acknowledgement(self, peer: str, epoch: int, number: int) -> None:
        """Records a peer's acknowledged message: later ones are differences to it."""
        outgoing = self._outgoing.get(peer)
        if outgoing is None:
            return
        if epoch == self._epoch and number in outgoing.models:
            outgoing.base_number = number
        elif number == 0 or epoch != self._epoch:
            outgoing.base_number = 0


def _is_exact(codec: Codec) -> bool:
    return isinstance(codec.tensor_stage, Dense) and isinstance(codec.value_stage, Float32)


def _add_difference(reference: Mapping[str, Array], difference: Mapping[str, Tensor]) -> dict[str, Array]:
    """Returns reference plus difference in new arrays, the same bits at both ends.

    A peer may send infinities, whose sum may be NaN: the receiver of the parts checks for that.
    """
    with np.errstate(all="ignore"):
        return {name: reference[name] + _to_dense(tensor) for name, tensor in difference.items()}


def _to_dense(tensor: Tensor) -> Array:
    return np.array(tensor) if isinstance(tensor, np.ndarray) else tensor.dense()


def select_peer_tensors(shapes: ModelSpec) -> ModelSpec:
    """Returns the shapes of tensors sent along edges: trained and shared; buffers stay with their node."""
    return tuple(spec for spec in select_shared_tensors(shapes) if spec.kind == "parameter")
