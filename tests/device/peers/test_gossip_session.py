"""A node that goes on by itself: its pace, its reports, its limit, and what happens when it cannot go on."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from peer_boards import eventually

from edgefl.compression.peer_codec import PeerCodec
from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import GossipConfig, TensorSpec, TrainConfig
from edgefl.device.peers import gossip_session as module
from edgefl.device.peers.gossip_session import GossipSession
from edgefl.strategies.peer_algorithms.gossip_node import GossipNode, make_algorithm
from edgefl.strategies.peer_algorithms.topology import make_topology

NAMES = ("a", "b")
GRAPH = make_topology("ring", NAMES)
SHAPES = (TensorSpec(name="w", shape=(3,)),)


def never():
    return False


class Pair:
    """Two nodes in one process that hand each other their messages.

    `cut` says who is not heard. With `is_level` no node is more than a burst ahead of the other, whoever gets the
    CPU: where DSGD comes to depends on how often each of its nodes has trained.
    """

    def __init__(self, method="pdmm-isvr", *, schedule="poisson", limit=0, is_level=False):
        self.cut, self.is_level = set(), is_level
        self.replies = dict.fromkeys(NAMES, 0)
        self.is_clear, self.trained = True, dict.fromkeys(NAMES, 0)
        self.failure: Exception | None = None
        self.sessions = {}
        for place, name in enumerate(NAMES):
            edges = GRAPH.make_link_configs(name, 4)
            node = make_algorithm(method, name, edges, learning_rate=0.1, period=4)
            node.is_pairwise = schedule == "pair"
            node.start({"w": np.zeros(3, np.float32)})
            plan = TrainConfig(
                iterations=4,
                learning_rate=0.1,
                node=GossipConfig(
                    method=method, edges=edges, learning_rate=0.1, period=4, schedule=schedule, limit=limit
                ),
            )
            self.sessions[name] = GossipSession(
                GossipNode(node, PeerCodec("", SHAPES, epoch=1), np.random.default_rng(place)),
                plan,
                rng=np.random.default_rng(place),
                train=lambda engine, burst, is_leaving, target=float(place): self.train(
                    engine, burst, target, is_leaving
                ),
                send=self.send,
                is_drained=lambda: self.is_clear,
                save=lambda _: None,
            )

    def train(self, engine, plan, target, is_leaving):
        if self.failure is not None:
            raise self.failure
        correction, weights = engine.algorithm.correction(), engine.algorithm.weights["w"].copy()
        name, done = engine.algorithm.name, 0
        while self.is_level and self.trained[name] > min(self.trained.values()) + 4 and not is_leaving():
            time.sleep(0.0002)
        while done < plan.iterations:
            gradient = weights - np.float32(target) - correction.correction.get("w", np.float32(0))
            weights = (weights - np.float32(0.1) * gradient) / np.float32(1 + 0.1 * correction.shrinkage)
            done += 1
            if is_leaving():
                break
        engine.algorithm.apply_local_steps({"w": weights}, done, 0.1)
        self.trained[name] += done
        return done, 0.5

    def send(self, message):
        self.replies[message.edge[0]] += message.is_reply
        if message.edge[0] not in self.cut:
            self.sessions[message.edge[1]].receive(message)

    def start(self):
        for session in self.sessions.values():
            session.start()
        return self.sessions


@pytest.fixture
def make_pair():
    pairs = []

    def make(*args, **options):
        pairs.append(Pair(*args, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        for session in pair.sessions.values():
            session.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "node"]


@pytest.mark.parametrize(
    ("method", "schedule"),
    [
        ("pdmm-isvr", "poisson"),
        ("admm-isvr", "sync"),
        ("dsgd", "sync"),
        ("k-gt", "sync"),
        ("pdmm-isvr", "pair"),
        ("dsgd", "pair"),
    ],
)
def test_nodes_come_to_the_mean_and_tell_what_they_did(make_pair, method, schedule):
    sessions = make_pair(method, schedule=schedule, is_level=True).start()
    reports = {name: session.wait_for_report(2000, never) for name, session in sessions.items()}
    for report in reports.values():
        assert report.total_iterations >= 2000
        assert report.iterations == report.total_iterations
        assert report.loss == 0.5
        assert report.num_messages > 100
        assert report.num_bytes > 100 * report.num_messages / 10
    mean = np.mean([report.model["w"][0] for report in reports.values()])
    assert mean == pytest.approx(0.5, abs=0.15)
    again = sessions["a"].wait_for_report(2100, never)
    assert again.iterations == again.total_iterations - reports["a"].total_iterations


def test_in_step_a_silent_neighbour_is_waited_for_and_then_left_aside(make_pair, monkeypatch):
    monkeypatch.setattr(module, "PEER_MESSAGE_TIMEOUT_S", 0.2)
    pair = make_pair("dsgd", schedule="sync")
    pair.cut.add("b")
    sessions = pair.start()
    began_s = time.monotonic()
    assert sessions["a"].wait_for_report(8, never).total_iterations == 8
    assert 0.2 < time.monotonic() - began_s < 30


def test_in_pairs_a_node_replies_between_its_iterations_however_long_they_go_on(make_pair):
    pair = make_pair("pdmm-isvr", schedule="pair")
    plan = pair.sessions["a"]._plan
    pair.sessions["a"].update_config(replace(plan, node=replace(plan.node, period=1000)))
    sessions = pair.start()
    report = sessions["b"].wait_for_report(80, never)
    assert pair.replies["a"] >= 3
    assert report.model["w"][0] < 0.9, "b has heard of a"


def test_in_pairs_a_silent_neighbour_is_waited_for_once(make_pair, monkeypatch):
    monkeypatch.setattr(module, "PEER_MESSAGE_TIMEOUT_S", 0.2)
    pair = make_pair("dsgd", schedule="pair")
    pair.cut.add("b")
    sessions = pair.start()
    began_s = time.monotonic()
    assert sessions["a"].wait_for_report(100, never).total_iterations >= 100
    assert 0.2 < time.monotonic() - began_s < 30


def test_a_node_at_its_limit_rests_and_still_answers(make_pair, monkeypatch):
    monkeypatch.setattr(module, "IDLE_POLL_S", 0.05)
    sessions = make_pair(limit=40).start()
    report = sessions["a"].wait_for_report(10_000, never)
    assert 40 <= report.total_iterations < 80
    trained = sessions["a"].iterations
    assert sessions["a"].wait_for_report(0, never).total_iterations == trained


def test_a_recall_brings_the_report_at_once_and_the_node_goes_on(make_pair):
    sessions = make_pair().start()
    report = sessions["a"].wait_for_report(10**9, lambda: True)
    assert report.total_iterations < 10**9
    eventually(lambda: sessions["a"].iterations > report.total_iterations)


def test_a_node_that_is_faster_than_its_link_waits_for_it(make_pair):
    pair = make_pair()
    pair.is_clear = False
    sessions = pair.start()
    eventually(lambda: sessions["a"].iterations > 0)
    done = sessions["a"].iterations
    time.sleep(0.2)  # a free link would have let it do thousands
    assert sessions["a"].iterations <= done + 64
    pair.is_clear = True
    eventually(lambda: sessions["a"].iterations > done + 400)


def test_new_neighbours_and_rates_count_from_the_next_exchange_on(make_pair):
    pair = make_pair()
    node = pair.sessions["a"]
    plan = node._plan
    assert plan.node is not None
    pair.start()
    node.wait_for_report(40, never)
    node.update_config(replace(plan, node=replace(plan.node, edges=())))
    eventually(lambda: node._node.algorithm.neighbours == ())
    assert node.wait_for_report(node.iterations + 40, never).total_iterations > 40


@pytest.mark.parametrize(
    ("failure", "kind"), [(DataError("the shard is gone"), DataError), (ZeroDivisionError("oops"), TaskError)]
)
def test_whoever_waits_learns_why_a_node_gave_up(make_pair, failure, kind):
    pair = make_pair()
    pair.failure = failure
    sessions = pair.start()
    with pytest.raises(kind, match=str(failure)):
        sessions["a"].wait_for_report(10, never)
