"""A device as a node of a graph: what it needs at first, what it keeps over a reboot, and nodes that go on alone."""

import itertools
import json
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest
from digit_shards import digit_shard
from peer_boards import eventually

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.peer_codec import PeerCodec, select_peer_tensors
from edgefl.core.errors import PortInUseError
from edgefl.core.types import GossipConfig, PeerMessage, TrainConfig, derive_rng
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.strategies.peer_algorithms.gossip_node import (
    decode_messages,
    decode_peer_message,
    encode_messages,
    encode_peer_message,
)
from edgefl.strategies.peer_algorithms.topology import make_topology
from edgefl.tasks.registry import make_task

GRAPH = make_topology("ring", ("a", "b", "c"))
TASK = make_task("digits", {"model": "logistic"})
SHAPES = TASK.shapes()
MODEL = make_codec("dense", SHAPES).encode(TASK.init(7), derive_rng(0))


class Wire:
    """A carrier that only notes what it is told."""

    def __init__(self, on_message):
        self.on_message, self.sent, self.neighbours = on_message, [], frozenset()
        self.is_running = False

    def start(self):
        self.is_running = True

    def stop(self):
        self.is_running = False

    def send(self, receiver, payload, *, is_reply=False):
        assert receiver in self.neighbours
        self.sent.append((receiver, payload))
        return True

    def is_drained(self):
        return True

    def set_peers(self, peers):
        self.neighbours = frozenset(peers)

    def set_addresses(self, addresses): ...


class Board:
    """A trainer that can be switched off and on."""

    def __init__(self, root):
        self.root, self.life, self.wires = root, 0, []
        digit_shard(root / "digits.npz", 64)
        self.trainer = self.switch_on()

    def switch_on(self):
        self.life += 1
        self.trainer = DeviceTrainer(
            device_id="b",
            role="trainer",
            shards=lambda: {"digits": str(self.root / "digits.npz")},
            accelerator="cpu",
            threads=1,
            state_dir=self.root,
            incarnation=self.life,
            on_progress=lambda *_: None,
            make_transport=self.make_carrier,
        )
        return self.trainer

    def make_carrier(self, plan, on_message):
        assert plan.carrier == "peer"
        self.wires.append(Wire(on_message))
        return self.wires[-1]

    def ask(self, *mail, model=b"", run="r", iterations=4, **node):
        edges = GRAPH.make_link_configs("b", 4)
        given = {"method": "admm-isvr", "edges": edges, "learning_rate": 0.1, "period": 4, "fires": ("a", "c")}
        plan = TrainConfig(
            iterations=iterations, batch_size=16, learning_rate=0.1, node=GossipConfig(**{**given, **node})
        )
        told, body = encode_messages(mail, model)
        header = {
            "v": 2, "run": run, "task": "digits", "options": {"model": "logistic"}, "seed": 7, "test_fraction": 0.25,
            "assignment": f"{run}/n1-b", "version": 0, "codec": "dense", "used_assignments": [], "messages": told,
            "residuals": "durable",
            "plan": {name: value for name, value in asdict(plan).items() if name != "messages" and value is not None},
        }  # fmt: skip
        return self.trainer.train(json.loads(json.dumps(header)), body)


@pytest.fixture
def board(tmp_path):
    made = Board(tmp_path)
    yield made
    made.trainer.close()


def messages(reply):
    return decode_messages(reply[0]["messages"], reply[1])[0]


def test_a_node_asks_for_a_model_once_and_then_sends_what_fires(board):
    assert board.ask()[0]["requires_full_model"] is True
    reply = board.ask(model=MODEL)
    assert reply[0]["metrics"]["iterations"] == 4
    assert [message.edge for message in messages(reply)] == [("b", "a"), ("b", "c")]
    assert decode_messages(reply[0]["messages"], reply[1])[1] == b""
    assert "error" not in board.ask(fires=("a",))[0]
    assert board.ask(run="other")[0]["requires_full_model"] is True, "a new run begins anew"


def test_a_report_holds_the_model_as_it_is_and_trains_nothing(board):
    board.ask(model=MODEL)
    header, body = board.ask(iterations=0, fires=(), reports=True)
    assert header["metrics"]["iterations"] == 0
    found = decode_body(decode_messages(header["messages"], body)[1], SHAPES)
    assert set(found) == {spec.name for spec in SHAPES}
    assert any(not np.array_equal(found[name], array) for name, array in TASK.init(7).items())


def from_a(step, value=3, part="y"):
    """What neighbour a sends."""
    state = {part: {spec.name: np.full(spec.shape, value, np.float32) for spec in select_peer_tensors(SHAPES)}}
    body = PeerCodec("", select_peer_tensors(SHAPES), epoch=1).encode("b", state, derive_rng(0))
    return PeerMessage(edge=("a", "b"), step=step, body=body)


def test_mail_of_a_neighbour_moves_the_node_and_what_cannot_be_read_is_counted(board):
    board.ask(model=MODEL)
    header, _ = board.ask(from_a(4), replace(from_a(4), body=b"nothing"), from_a(4, part="z"))
    assert header["metrics"]["extra"]["dropped_messages"] == 2
    before = decode_body(decode_messages([], board.ask(iterations=0, fires=(), reports=True)[1])[1], SHAPES)
    board.ask()
    after = decode_body(decode_messages([], board.ask(iterations=0, fires=(), reports=True)[1])[1], SHAPES)
    assert max(float(np.abs(after[name] - before[name]).max()) for name in after) > 0.01


def test_after_a_reboot_it_goes_on_from_disk_and_its_messages_are_newer_than_all_before(board):
    first = messages(board.ask(model=MODEL))
    board.ask()
    before = board.ask(iterations=0, fires=(), reports=True)[1]
    board.switch_on()  # without a goodbye to the one before: its power was cut
    assert board.ask(iterations=0, fires=(), reports=True)[1] == before
    again = messages(board.ask())
    assert min(message.step for message in again) > max(message.step for message in first)


def alone(board, until=40, **changes):
    return board.ask(carrier="peer", schedule="poisson", until=until, reports=True, fires=(), **changes)


def test_a_node_that_goes_on_alone_reports_and_trains_on_until_its_run_is_over(board):
    header, _ = alone(board, model=MODEL)
    assert header["metrics"]["extra"]["iterations_in_all"] >= 40
    now = board.trainer.current
    assert now is not None
    assert (now[0], now[1], now[2] >= 40) == ("r", "", True)
    (wire,) = board.wires
    assert wire.neighbours == {"a", "c"}
    sent = len(wire.sent)
    eventually(lambda: len(wire.sent) > sent + 20)
    run, message = decode_peer_message(wire.sent[-1][1])
    assert (run, message.edge[0]) == ("r", "b")
    board.trainer.complete_run("another")
    board.trainer.complete_run("r")
    eventually(lambda: not wire.is_running and wire.neighbours == frozenset())
    eventually(lambda: not (board.root / "node.json").exists())


def test_its_next_assignment_finds_it_further_and_a_device_switched_on_again_goes_on_unasked(board):
    alone(board, model=MODEL)
    header, _ = alone(board, until=100)
    assert header["metrics"]["extra"]["iterations_in_all"] >= 100
    assert len(board.wires) == 1
    board.trainer.close()
    assert not board.wires[0].is_running
    board.switch_on().resume()
    assert len(board.wires) == 2
    eventually(lambda: len(board.wires[1].sent) > 5)
    header, _ = alone(board, until=0)
    assert header["metrics"]["extra"]["iterations_in_all"] >= 100


def test_a_node_of_a_drained_board_rests_until_it_gets_work_again_or_is_needed_no_more(board):
    header, _ = alone(board, model=MODEL)
    board.trainer.pause()
    eventually(lambda: not board.wires[0].is_running and board.trainer.current is None)
    assert board.wires[0].neighbours == {"a", "c"}, "what it had for them stays"
    again, _ = alone(board, until=0)
    assert "error" not in again
    assert again["metrics"]["extra"]["iterations_in_all"] >= header["metrics"]["extra"]["iterations_in_all"]
    assert [wire.is_running for wire in board.wires] == [False, True]
    board.trainer.pause()
    eventually(lambda: board.trainer.current is None)
    alone(board, model=MODEL, run="s")
    eventually(lambda: board.wires[1].neighbours == frozenset())
    board.trainer.pause()
    eventually(lambda: board.trainer.current is None)
    board.trainer.complete_run("s")
    eventually(lambda: board.wires[2].neighbours == frozenset())


def test_a_board_that_is_drained_while_a_report_is_awaited_says_so_and_can_be_asked_again(board):
    alone(board, model=MODEL)
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(alone(board, until=10**9)[0]))
    waiting.start()
    eventually(
        lambda: (now := board.trainer.current) is not None and now[1] and now[2]
    )  # it looks how far its node is
    board.trainer.pause()
    waiting.join(60)
    assert "stopped" in replies[0]["error"]
    assert "error" not in alone(board, until=0)[0]


def test_messages_of_other_runs_and_of_others_names_and_garbage_are_dropped(board):
    alone(board, model=MODEL)
    (wire,) = board.wires
    message = PeerMessage(edge=("a", "b"), step=1, body=b"x")
    for sender, payload in [
        ("a", encode_peer_message("other", message)),
        ("c", encode_peer_message("r", message)),
        ("a", b"garbage"),
        ("a", b"{}\n"),
        ("a", encode_peer_message("r", message)),  # this one alone reaches the node, which cannot read it
    ]:
        wire.on_message(sender, payload)
    eventually(lambda: alone(board, until=0)[0]["metrics"]["extra"]["dropped_messages"] == 1)


def test_a_node_whose_carrier_cannot_start_says_so_each_time_and_begins_once_it_can(board):
    make, is_taken = board.make_carrier, True

    class Taken(Wire):
        def start(self):
            if is_taken:
                raise PortInUseError("the port is taken")
            super().start()

    def make_taken(plan, on_message):
        make(plan, on_message)
        board.wires[-1] = Taken(on_message)
        return board.wires[-1]

    for carrier, told in ((None, "only by relay"), (make_taken, "the port is taken")):
        board.make_carrier = carrier
        board.trainer.close()
        board.switch_on()
        assert told in alone(board, model=MODEL)[0]["error"]
    assert "the port is taken" in alone(board, model=MODEL)[0]["error"]
    assert board.trainer.current is None
    assert not (board.root / "node.json").exists()
    is_taken = False
    assert "error" not in alone(board, model=MODEL)[0]
    assert board.wires[-1].is_running


def test_a_node_that_had_to_give_up_takes_part_again_with_the_next_assignment(board):
    alone(board, model=MODEL)
    shard = board.root / "digits.npz"
    shard.rename(board.root / "away")
    assert "error" in alone(board, until=10**9)[0]
    assert board.trainer.current is None
    assert not (board.root / "node.json").exists()
    (board.root / "away").rename(shard)
    assert "error" not in alone(board, until=0)[0]
    board.trainer.complete_run("r")
    eventually(lambda: board.trainer.current is None)
    assert "is over" in alone(board, until=0)[0]["error"]


def is_sound(reply):
    model = decode_body(decode_messages(reply[0]["messages"], reply[1])[1], SHAPES)
    return all(np.isfinite(array).all() for array in model.values())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy: a board goes on after them
def test_a_node_that_diverged_while_it_went_on_alone_asks_for_a_model_and_begins_anew_from_it(board):
    alone(board, model=MODEL)
    steps = itertools.count(4)

    def asks_for_a_model():
        board.wires[0].on_message("a", encode_peer_message("r", from_a(next(steps), 3e38)))
        return alone(board, until=0)[0].get("requires_full_model") is True

    eventually(asks_for_a_model)
    assert not board.wires[0].is_running
    reply = alone(board, until=0, model=MODEL)
    assert "error" not in reply[0]
    assert board.wires[1].is_running
    assert is_sound(reply)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_node_that_diverges_of_the_model_that_it_began_with_tells_so_before_it_asks_for_another(board):
    huge = {spec.name: np.full(spec.shape, 3e38, np.float32) for spec in SHAPES}
    reply = alone(board, model=make_codec("dense", SHAPES).encode(huge, derive_rng(0)))
    assert "error" not in reply[0]
    assert not is_sound(reply)  # or it would be given one after the other for ever, and never be flagged
    assert alone(board, until=10**9)[0]["requires_full_model"] is True
    assert is_sound(alone(board, until=0, model=MODEL))


def test_another_run_takes_the_place_of_a_node_that_goes_on_alone(board):
    alone(board, model=MODEL)
    header, _ = alone(board, model=MODEL, run="s")
    assert "error" not in header
    assert [wire.is_running for wire in board.wires] == [False, True]
    assert board.ask(model=MODEL, run="t")[0]["metrics"]["iterations"] == 4  # relayed
    assert not board.wires[1].is_running


def test_the_word_that_a_run_is_over_counts_before_the_node_has_been_taken_up_again(board):
    alone(board, model=MODEL)
    board.trainer.close()
    trainer = board.switch_on()
    trainer.complete_run("r")
    eventually(lambda: not (board.root / "node.json").exists())
    trainer.resume()
    assert len(board.wires) == 1
    assert trainer.current is None


def test_a_node_that_has_diverged_asks_for_a_model_and_is_heard_by_neighbours_that_knew_it(board):
    first = messages(board.ask(model=MODEL))
    assert any(board.ask(from_a(step, 3e38))[0].get("requires_full_model") for step in range(4, 12))
    again = messages(board.ask(model=MODEL))
    assert min(message.step for message in again) > max(message.step for message in first)
    assert all(np.isfinite(np.frombuffer(message.body[-4:], "<f4")).all() for message in again)
