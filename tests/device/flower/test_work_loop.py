"""Work that comes once, twice, or too late, with something in Flower's place that says what it was given."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from peer_boards import eventually

from edgefl.device.flower.supernode import ReplyRejectedError
from edgefl.device.flower.work_loop import MAX_CACHED_REPLIES, WorkLoop
from edgefl.system.https_client import create_pinned_context


class Trainer:
    """Trains whatever it is given, unless its name is `bad`."""

    def __init__(self):
        self.trained = []
        self.current: tuple[str, str, int] | None = None

    def train(self, header, body):
        self.trained.append(header["assignment"])
        told = {"error": "it is bad"} if header["assignment"].startswith("bad") else {"metrics": {}}
        return {"assignment": header["assignment"], **told}, body + b" trained"

    def evaluate(self, _header, body):
        raise NotImplementedError


class Network:
    """Gives out work; an answer is what the bench has made of it."""

    def __init__(self, bench):
        self._bench = bench
        self.work = []
        self.sent = []
        self.incoming_assignment: str | None = None
        self.refuses = False

    def pull(self):
        return SimpleNamespace(header=self.work.pop(0)) if self.work else None

    def run_app(self, instruction):
        return self._bench._train(instruction.header, b"model")

    def create_reply(self, _instruction, answer):
        return ("again", *answer)

    def push(self, reply):
        if self.refuses:
            raise ReplyRejectedError("settled")
        self.sent.append(reply)


class Site:
    def __init__(self, state):
        self.trainer, self.num_works, self.failures = Trainer(), 0, []
        trainer: Any = self.trainer
        self.bench = WorkLoop(
            state,
            tls_context=create_pinned_context(state.ca.read_bytes()),
            trainer=trainer,
            clock=time.time,
            instance="boot-a",
            on_work=self._work,
            on_failure=lambda: self.failures.append(1),
        )
        self.network = Network(self.bench)
        self.bench.supernode = self.network
        self.bench.uploader.resume()

    def _work(self):
        self.num_works += 1

    def do(self, *names, **header):
        self.network.work = [{"run": "r", "assignment": name, **header} for name in names]
        for _ in names:
            assert self.bench.run_once()
        self.bench.uploader.pause()
        self.bench.uploader.resume()


@pytest.fixture
def site(state):
    made = Site(state)
    yield made
    made.bench.uploader.close(10)


def wait_for_sent(site, number):
    eventually(lambda: len(site.network.sent) >= number, f"sending {number} answers")
    return site.network.sent


def test_an_assignment_that_comes_again_is_answered_from_memory_unless_it_is_of_another_version(site):
    assert not site.bench.run_once()
    assert site.num_works == 0
    site.do("a", "a", version=41)
    first, second = wait_for_sent(site, 2)
    assert second == ("again", *first)
    assert (site.trainer.trained, site.num_works) == (["a"], 2)
    site.do("a", version=17)
    site.do("a", version=17)
    assert site.trainer.trained == ["a", "a"]
    assert [sent[0] == "again" for sent in wait_for_sent(site, 4)] == [False, True, False, True]


def test_only_the_newest_finished_updates_are_kept(site):
    names = [f"a-{number}" for number in range(MAX_CACHED_REPLIES + 1)]
    site.do(*names)
    assert site.bench.list_held_assignments() == tuple(names[1:])
    site.do(names[0])
    assert site.trainer.trained == [*names, names[0]]
    site.do("b", settled=[names[0], names[-1], "never-heard-of"])
    assert site.bench.list_held_assignments() == ("b",), "what was used is forgotten"
    site.do("bad", settled=["b"])
    site.do("ready", phase="prepare")
    assert site.bench.list_held_assignments() == (), "neither failures nor preparations are kept"


def test_it_holds_what_is_finished_under_way_and_arriving_each_once(site):
    site.do("done")
    site.trainer.current = ("r", "now", 3)
    site.network.incoming_assignment = "next"
    assert site.bench.list_held_assignments() == ("done", "now", "next")
    site.network.incoming_assignment = "now"
    assert site.bench.list_held_assignments() == ("done", "now")


def test_an_answer_that_nobody_wants_is_let_go_and_the_next_one_leaves(site):
    site.network.refuses = True
    site.do("a")
    eventually(lambda: not site.bench.uploader._replies)
    site.network.refuses = False
    site.do("b")
    assert [answer[0]["assignment"] for answer in wait_for_sent(site, 1)] == ["b"]
    assert site.failures == []


def test_the_log_names_what_is_worked_on_and_nothing_at_leisure(site):
    seen = []
    train = site.trainer.train

    def looking(header, body):
        seen.append(site.bench.get_log_context())
        return train(header, body)

    site.trainer.train = looking
    site.do("a")
    assert seen == [("r", "a")]
    assert site.bench.get_log_context() is None
