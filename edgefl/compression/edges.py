"""What travels along the edges of a graph: whole models in a codec, or their difference to one that both ends have.

A lossy codec takes the difference to the newest model of this edge that the receiver has said it holds. As the nodes
agree, differences vanish, and with them what the codec loses: even two bits a number lead to the exact result. A
message that is lost, late or repeated does no harm: every body says what it is the difference to, and a node that
holds nothing of the kind (it is new, or was started anew) drops it and says so with its own next body, after which it
gets a whole model. Source: Tang et al., Communication Compression for Decentralized Training, NeurIPS 2018
(difference compression); here with what the receiver confirms, for links that lose messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec, make_codec, parts_of
from edgefl.compression.decoding import decode_body
from edgefl.compression.specs import split_spec
from edgefl.compression.stages import shared_shapes
from edgefl.compression.tensors.dense import Dense
from edgefl.compression.values.floats import Float32
from edgefl.compression.wire import EdgeFrame, read_edge_frame, write_edge_frame
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, Tensor

Parts = Mapping[str, Mapping[str, Array]]
"""Part of a message (`y`, `w`) -> tensor by name."""

KEPT = 4
"""So many models of an edge are kept for the answer that says which of them arrived."""


class StaleReferenceError(CodecError):
    """The body is the difference to a model that this node does not hold."""


@dataclass(slots=True)
class _Half:
    """One direction of one edge: models by number, and the newest number that both ends hold."""

    epoch: int = 0
    newest: int = 0
    base: int = 0
    models: dict[int, Parts] = field(default_factory=dict)

    def keep(self, number: int, parts: Parts) -> None:
        self.models[number] = parts
        self.newest = max(self.newest, number)
        for old in sorted(self.models):
            if old < self.base or (len(self.models) > KEPT and old != self.base):
                del self.models[old]


class EdgeCodec:
    """Encodes and decodes for all edges of one node.

    Args:
        spec: a codec's line, without `ef`: what is left out stays in the next difference. Empty is `dense`.
        shapes: of the tensors that travel; all of them in every part of a message.
        epoch: of this life of the node, larger than those of earlier ones, 1 to 2³² - 1.

    Raises:
        CodecError: the line makes no sense, or asks the node to keep something.
    """

    def __init__(self, spec: str, shapes: Shapes, *, epoch: int) -> None:
        if split_spec(spec or "dense").prefix:
            raise CodecError(
                f"codec {spec!r}: along edges differences travel, leave out what stands before the stages"
            )
        self._codec = make_codec(spec or "dense", shapes)
        for part in parts_of(self._codec):
            if not (part.tensors.is_contraction and part.values.is_contraction):
                raise CodecError(
                    f"codec {part.spec!r}: the error of a draw can be larger than the difference that travels, and"
                    " nodes would never agree: use qsgd:2:8, or qsgd with more bits, lss, onebit, int8"
                    " or topk"
                )
        self._whole = make_codec("dense", shapes)
        self._shapes, self._epoch = shapes, epoch
        self._is_exact = _is_exact(self._codec)
        self._number = 0
        self._sent: dict[str, _Half] = {}
        self._received: dict[str, _Half] = {}

    def encode(self, receiver: str, parts: Parts, rng: Generator) -> bytes:
        """Returns the body of a message to a neighbour.

        Raises:
            CodecError: a tensor is missing, or is not finite.
        """
        half = self._sent.setdefault(receiver, _Half(epoch=self._epoch))
        heard = self._received.get(receiver, _Half())
        # One count for all edges, over their ends and beginnings: a number never means two messages.
        self._number += 1
        number, reference = self._number, half.models.get(half.base)
        half.newest = number
        bodies = {}
        if self._is_exact or reference is None:
            codec = self._codec if self._is_exact else self._whole
            bodies = {name: codec.encode(arrays, rng) for name, arrays in parts.items()}
            base, kept = 0, parts
        else:
            base, kept = half.base, {}
            for name, arrays in parts.items():
                difference = {tensor: array - reference[name][tensor] for tensor, array in arrays.items()}
                bodies[name] = self._codec.encode(difference, rng)
                kept[name] = _added(reference[name], decode_body(bodies[name], self._shapes))
        if not self._is_exact:
            half.keep(number, {name: dict(arrays) for name, arrays in kept.items()})
        frame = EdgeFrame(
            epoch=self._epoch,
            number=number,
            base=base,
            heard_epoch=heard.epoch,
            heard_number=heard.newest,
            parts={name: memoryview(body) for name, body in bodies.items()},
        )
        return write_edge_frame(frame)

    def decode(self, sender: str, body: bytes | memoryview) -> dict[str, dict[str, Array]]:
        """Returns the parts of a neighbour's message, as arrays of their own.

        Raises:
            StaleReferenceError: it is the difference to something that is not held.
            CodecError: it is damaged.
        """
        frame = read_edge_frame(body)
        base, number = frame.base, frame.number
        half = self._received.setdefault(sender, _Half())
        if frame.epoch < half.epoch:
            raise StaleReferenceError(f"{sender} sent this in an earlier life")
        if frame.epoch != half.epoch:
            if base:
                raise StaleReferenceError(f"{sender} sends differences to a model that is not held here")
            half = self._received[sender] = _Half(epoch=frame.epoch)
        if base and base not in half.models:
            if number > half.newest:  # it is told that nothing is held; what is merely late changes nothing
                self._received[sender] = _Half(epoch=frame.epoch)
            raise StaleReferenceError(f"{sender} sends differences to its message {base}, which is not held here")
        decoded = {
            name: {tensor: _dense(value) for tensor, value in decode_body(part, self._shapes).items()}
            for name, part in frame.parts.items()
        }
        if base:
            missing = sorted(set(decoded) - set(half.models[base]))
            if missing:
                raise CodecError(f"body of an edge holds part {missing[0]!r}, which its reference lacks")
            decoded = {name: _added(half.models[base][name], arrays) for name, arrays in decoded.items()}
        if number >= half.newest:
            half.base = base
            if not self._is_exact:
                half.keep(
                    number, {name: {t: a.copy() for t, a in arrays.items()} for name, arrays in decoded.items()}
                )
            half.newest = number
            self._confirmed(sender, frame.heard_epoch, frame.heard_number)
        return decoded

    def forget(self, neighbour: str) -> None:
        """Drops all that is kept for an edge."""
        self._sent.pop(neighbour, None)
        self._received.pop(neighbour, None)

    def _confirmed(self, neighbour: str, epoch: int, number: int) -> None:
        """Takes note of which message a neighbour holds: later ones are differences to it."""
        half = self._sent.get(neighbour)
        if half is None:
            return
        if epoch == self._epoch and number in half.models:
            half.base = number
        elif number == 0 or epoch != self._epoch:
            half.base = 0


def _is_exact(codec: Codec) -> bool:
    return isinstance(codec.tensors, Dense) and isinstance(codec.values, Float32)


def _added(reference: Mapping[str, Array], difference: Mapping[str, Tensor]) -> dict[str, Array]:
    """Returns reference plus difference in arrays of their own, the same bits at both ends.

    A neighbour may send infinities, and their sum is no number: whoever takes the parts looks for that.
    """
    with np.errstate(all="ignore"):
        return {name: reference[name] + _dense(tensor) for name, tensor in difference.items()}


def _dense(tensor: Tensor) -> Array:
    return np.array(tensor) if isinstance(tensor, np.ndarray) else tensor.dense()


def edge_shapes(shapes: Shapes) -> Shapes:
    """Returns the shapes of what travels along edges: what is trained and shared; buffers stay with their node."""
    return tuple(spec for spec in shared_shapes(shapes) if spec.kind == "parameter")
