"""What travels along edges: whole, or as differences to what the other end says that it holds."""

from __future__ import annotations

import numpy as np
import pytest
from node_network import Network, Quadratics

from edgefl.compression.peer_codec import PeerCodec, StaleReferenceError, select_peer_tensors
from edgefl.compression.wire import read_peer_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, TensorKind, TensorSpec
from edgefl.strategies.peer_algorithms.algorithm import GossipMessage
from edgefl.strategies.peer_algorithms.gossip_node import GossipNode
from edgefl.strategies.peer_algorithms.topology import make_topology

SHAPES = (TensorSpec(name="w", shape=(40,)), TensorSpec(name="b", shape=(3,)))
TWO_BITS = "qsgd:2:8"
LOSSY = (TWO_BITS, "onebit", "int8", "lss:2", "topk:0.5", "dense|fp16|zstd")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def parts(seed: int, *names: str) -> dict[str, dict[str, Array]]:
    draw = rng(seed)
    return {
        name: {spec.name: draw.normal(size=spec.shape).astype(np.float32) for spec in SHAPES}
        for name in names or ("y",)
    }


def pair(spec: str, epochs: tuple[int, int] = (1, 1)) -> tuple[PeerCodec, PeerCodec]:
    one, other = (PeerCodec(spec, SHAPES, epoch=epoch) for epoch in epochs)
    return one, other


def distance(found: dict[str, dict[str, Array]], wanted: dict[str, dict[str, Array]]) -> float:
    return max(float(np.abs(found[p][t] - wanted[p][t]).max()) for p in wanted for t in wanted[p])


@pytest.mark.parametrize("spec", ["", "dense", "dense|zstd"])
def test_without_loss_every_body_is_whole_and_comes_out_to_the_bit(spec: str) -> None:
    one, other = pair(spec)
    for step in range(3):
        sent = parts(step, "w", "y")
        body = one.encode("b", sent, rng())
        assert read_peer_frame(body).base_number == 0
        assert distance(other.decode("a", body), sent) == 0
        one.decode("b", other.encode("a", sent, rng()))


@pytest.mark.parametrize("spec", LOSSY)
def test_a_model_that_stands_still_is_known_to_its_neighbour_better_and_better(spec: str) -> None:
    one, other = pair(spec)
    first, still = parts(1), parts(2)
    errors = []
    for step in range(100):
        body = one.encode("b", first if step < 3 else still, rng(step))
        errors.append(distance(other.decode("a", body), still))
        one.decode("b", other.encode("a", first, rng(step)))
    assert errors[-1] < 1e-3 * errors[3]
    assert read_peer_frame(body).base_number > 0


def test_the_first_message_is_whole_and_later_ones_are_differences_to_what_was_confirmed() -> None:
    one, other = pair(TWO_BITS)
    bodies = []
    for step in range(4):
        bodies.append(one.encode("b", parts(step), rng(step)))
        other.decode("a", bodies[-1])
        if step == 1:  # the neighbour's own message says what it has
            one.decode("b", other.encode("a", parts(9), rng()))
    assert [read_peer_frame(body).base_number for body in bodies] == [0, 0, 2, 2]
    assert len(bodies[2]) < len(bodies[0])


def test_both_ends_have_the_same_bits_however_much_is_lost_late_or_doubled() -> None:
    one, other = pair(TWO_BITS)
    draw, late = rng(5), None
    sent = parts(1)
    for step in range(150):
        body = one.encode("b", sent, rng(step))
        arrived = [body] * int(draw.integers(0, 3))
        if late is not None:
            arrived.append(late)
        late = body if draw.random() < 0.2 else None
        for each in arrived:
            try:
                found = other.decode("a", each)
            except StaleReferenceError:
                assert each is not body
        if draw.random() < 0.5:
            one.decode("b", other.encode("a", sent, rng(step)))
    assert distance(found, sent) < 1e-3


def test_a_neighbour_that_was_started_anew_drops_differences_and_then_gets_a_whole_model() -> None:
    one, other = pair(TWO_BITS)
    for step in range(4):
        other.decode("a", one.encode("b", parts(step), rng()))
        one.decode("b", other.encode("a", parts(step), rng()))
    anew = PeerCodec(TWO_BITS, SHAPES, epoch=2)
    with pytest.raises(StaleReferenceError, match="not held here"):
        anew.decode("a", one.encode("b", parts(7), rng()))
    one.decode("b", anew.encode("a", parts(8), rng()))
    sent = parts(9)
    assert distance(anew.decode("a", one.encode("b", sent, rng())), sent) == 0


def test_an_edge_that_ended_is_forgotten() -> None:
    one, other = pair(TWO_BITS)
    for step in range(3):
        other.decode("a", one.encode("b", parts(step), rng()))
        one.decode("b", other.encode("a", parts(step), rng()))
    one.remove_peer("b")
    frame = read_peer_frame(one.encode("b", parts(1), rng()))
    assert frame.base_number == 0
    assert frame.number == 4, "no number stands for two messages"


@pytest.mark.parametrize("spec", ["ef|topk:0.1", "randk:0.1", "qsgd:2", "terngrad"])
def test_a_codec_with_which_nodes_would_never_agree_is_refused(spec: str) -> None:
    with pytest.raises(CodecError, match=r"never agree|leave out what stands before"):
        PeerCodec(spec, SHAPES, epoch=1)


def test_every_cut_and_every_changed_byte_of_the_header_is_refused_or_harmless() -> None:
    one, other = pair(TWO_BITS)
    body = one.encode("b", parts(1, "w", "y"), rng())
    for length in range(len(body)):
        with pytest.raises(CodecError):
            PeerCodec(TWO_BITS, SHAPES, epoch=1).decode("a", body[:length])
    with pytest.raises(CodecError):
        other.decode("a", body + b"x")
    draw = rng(3)
    for _ in range(200):
        broken = bytearray(body)
        broken[int(draw.integers(0, len(body)))] ^= 1 << int(draw.integers(0, 8))
        try:
            PeerCodec(TWO_BITS, SHAPES, epoch=1).decode("a", bytes(broken))
        except CodecError:
            continue


def test_only_what_is_trained_and_shared_travels() -> None:
    shapes = (
        *SHAPES,
        TensorSpec(name="mean", shape=(3,), kind=TensorKind.BUFFER),
        TensorSpec(name="own", shape=(3,), shared=False),
    )
    assert select_peer_tensors(shapes) == SHAPES


QUADRATICS = Quadratics.drawn(8)


@pytest.mark.extended
def test_two_bits_a_number_lead_to_the_exact_optimum_though_mail_is_lost() -> None:
    graph = make_topology("ring", tuple(f"n{place}" for place in range(8)))
    rate = 0.2 / QUADRATICS.smoothness
    options = {"start": np.zeros(10), "rate": rate, "period": 8, "loss": 0.3, "schedule": "sync"}
    run = Network.of("pdmm-isvr", graph, QUADRATICS.gradients(), **options)
    shapes = (TensorSpec(name="w", shape=(10,)),)
    for node in run.nodes.values():
        Coded(GossipNode(node, PeerCodec(TWO_BITS, shapes, epoch=1), rng()))
    assert run.run(2400).error(QUADRATICS.optimum()) < 3e-7  # the codec's own precision is that of float32


class Coded:
    """Lets a node's mail travel as bodies."""

    def __init__(self, engine: GossipNode) -> None:
        node = engine.algorithm
        self.engine, self.post, self.take = engine, node.make_messages, node.receive
        node.make_messages, node.receive = self.posted, self.taken  # type: ignore[method-assign]

    def posted(self, neighbours: tuple[str, ...]) -> list[GossipMessage]:
        coder = self.engine._codec
        return [
            GossipMessage(
                sender=mail.sender,
                receiver=mail.receiver,
                step=mail.step,
                parts={"body": {"b": np.frombuffer(coder.encode(mail.receiver, _single(mail), rng()), np.uint8)}},
            )
            for mail in self.post(neighbours)
        ]

    def taken(self, mail: GossipMessage) -> list[GossipMessage]:
        try:
            found = self.engine._codec.decode(mail.sender, mail.parts["body"]["b"].tobytes())
        except StaleReferenceError:
            return []
        doubled = {
            part: {name: array.astype(float) for name, array in arrays.items()} for part, arrays in found.items()
        }
        return self.take(GossipMessage(sender=mail.sender, receiver=mail.receiver, step=mail.step, parts=doubled))


def _single(mail: GossipMessage) -> dict[str, dict[str, Array]]:
    return {
        part: {name: array.astype(np.float32) for name, array in arrays.items()}
        for part, arrays in mail.parts.items()
    }
