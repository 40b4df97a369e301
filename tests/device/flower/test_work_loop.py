"""Work that comes once, twice, or too late, with something in Flower's place that says what it was given."""

import itertools
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from peer_boards import eventually

from edgefl.core.conditions import Blocker, ConditionsEndedError
from edgefl.core.errors import NetworkError
from edgefl.core.protocol import POLL_S
from edgefl.device.conditions.budgets import Clocks
from edgefl.device.conditions.gate import (
    CHECK_INTERVAL_S,
    ConditionGate,
    clear_pause,
    save_conditions,
    save_pause,
)
from edgefl.device.flower.supernode import ReplyRejectedError
from edgefl.device.flower.work_loop import (
    INITIAL_DISCONNECTED_S,
    MAX_CACHED_REPLIES,
    MAX_DISCONNECTED_S,
    PollBackoff,
    ReplyUploader,
    WorkLoop,
)
from edgefl.device.training.shard_uses import ShardUse, ShardUses, read_shard_uses
from edgefl.system.https_client import create_pinned_context


class Trainer:
    """Trains whatever it is given, unless its name is `bad`."""

    def __init__(self):
        self.trained = []
        self.during = lambda: None
        self.current: tuple[str, str, int] | None = None

    def train(self, header, body):
        self.trained.append(header["assignment"])
        self.during()
        told = {"error": "it is bad"} if header["assignment"].startswith("bad") else {"metrics": {}}
        return {"assignment": header["assignment"], **told}, body + b" trained"

    def evaluate(self, header, body):
        return {"assignment": header["assignment"], "metrics": {"accuracy": 1.0}}, body + b" evaluated"


class Network:
    """Gives out work; an answer is what the bench has made of it."""

    def __init__(self):
        self.work = []
        self.sent = []
        self.is_evaluation = False
        self.incoming_assignment: str | None = None
        self.refuses = False
        self.blocker = None
        self.admit = lambda _header: None

    def pull(self):
        if not self.work:
            return None
        header, blocker = self.work.pop(0), self.blocker
        try:
            self.admit(header)
        except ConditionsEndedError as error:
            blocker = error.blocker
        return SimpleNamespace(header=header, body=b"model", is_evaluation=self.is_evaluation, blocker=blocker)

    def create_reply(self, _instruction, answer):
        return answer

    def push(self, reply):
        if self.refuses:
            raise ReplyRejectedError("settled")
        self.sent.append(reply)


class Site:
    def __init__(self, state):
        self.trainer, self.num_works, self.failures = Trainer(), 0, []
        self.root, self.gate = state.root, ConditionGate(state.root)
        trainer: Any = self.trainer
        self.bench = WorkLoop(
            state,
            tls_context=create_pinned_context(state.ca.read_bytes()),
            trainer=trainer,
            clock=time.time,
            instance="boot-a",
            gate=self.gate,
            on_work=self._work,
            on_failure=lambda: self.failures.append(1),
        )
        self.network = Network()
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


HANDED_BACK = {"error": "paused on the board", "handed_back": {"kind": "pause", "reason": "paused on the board"}}


def pause_board(site):
    save_pause(site.root, None, Clocks(boot_id=""))


def test_work_stays_at_the_coordinator_while_the_board_may_not_train(site):
    pause_board(site)
    site.network.work = [{"run": "r", "assignment": "a"}]
    assert not site.bench.run_once()
    assert (len(site.network.work), site.trainer.trained) == (1, [])
    clear_pause(site.root)
    site.do("a")
    assert wait_for_sent(site, 1)[0][1] == b"model trained"


def test_work_under_way_is_handed_back_where_conditions_end_and_trained_anew_when_it_comes_again(site):
    def end():
        pause_board(site)
        time.sleep(CHECK_INTERVAL_S)
        site.gate.require()

    site.trainer.during = end
    site.do("a", version=1)
    header, body = wait_for_sent(site, 1)[0]
    assert body == b""
    assert {name: header[name] for name in HANDED_BACK} == HANDED_BACK
    clear_pause(site.root)
    site.trainer.during = lambda: None
    site.do("a", version=1)
    assert wait_for_sent(site, 2)[1][1] == b"model trained"


@pytest.mark.parametrize("phase", [{}, {"phase": "can"}])
def test_what_may_not_be_fetched_is_handed_back_untrained(site, phase):
    site.network.blocker = Blocker(kind="budget", reason="its 2 MB of this day are used up", free_at_s=1.0)
    site.do("a", **phase)
    header, _ = wait_for_sent(site, 1)[0]
    assert site.trainer.trained == []
    assert header["handed_back"] == {"kind": "budget", "reason": "its 2 MB of this day are used up", "free_at_s": 1.0}
    assert (header.get("ready"), "error" in header) == ((False, False) if phase else (None, True))


def test_work_whose_runs_conditions_end_is_handed_back_with_the_run_and_finished_work_is_sent(site):
    night = {"hours": ["00:00-00:01"], "zone": "UTC"}
    blocked = {"kind": "hours", "run": "r"}
    for is_finished in (False, True):
        site.network.admit = site.bench._admit
        site.do("a", version=1, conditions={} if is_finished else night)
        answer, body = wait_for_sent(site, 1 + is_finished)[-1]
        assert (body == b"model trained") is is_finished
        if not is_finished:
            told = answer["handed_back"]
            assert {name: told[name] for name in blocked} == blocked
    site.do("a", version=1, conditions=night)
    assert wait_for_sent(site, 3)[-1][1] == b"model trained", "it was finished before"
    site.do("a", version=1, conditions={"interfaces": ["none0"]})
    assert "handed_back" in wait_for_sent(site, 4)[-1][0]
    assert site.trainer.trained == ["a"]


def test_what_trains_yields_where_the_owner_says_so_and_the_loop_and_its_uploader_do_not(site, monkeypatch):
    refuse = os.setpriority

    def set_priority(which, who, priority):  # as for a unit without LimitNICE
        if priority < os.getpriority(which, who):
            raise PermissionError
        refuse(which, who, priority)

    monkeypatch.setattr(os, "setpriority", set_priority)
    before, seen, threads = os.nice(0), [], set()

    def look():
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        threads.add(threading.current_thread())

    site.trainer.during = look
    site.do("a")
    save_conditions(site.root, b"[conditions]\nyields = true\n")
    site.do("b")
    site.do("c", phase="can")
    site.do("d")
    save_conditions(site.root, None)
    site.do("e")
    assert seen == [before, 19, before, 19, before]
    assert len(threads) == 2, "a process that one starts is ended with it"
    uploaders = [thread for thread in threading.enumerate() if thread.name == "uploader"]
    for thread in (threading.current_thread(), *uploaders):
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == before


def test_an_evaluator_keeps_no_conditions_of_runs(site, state, monkeypatch):
    site.network.admit, site.network.is_evaluation = site.bench._admit, True
    night = {"hours": ["00:00-00:01"], "zone": "UTC"}
    site.do("a", conditions=night)
    assert "handed_back" in wait_for_sent(site, 1)[0][0]
    monkeypatch.setattr(site.bench, "_state", SimpleNamespace(settings=SimpleNamespace(role="evaluator"),
                                                              reload=lambda: None))  # fmt: skip
    site.do("a", conditions=night)
    assert wait_for_sent(site, 2)[1][1] == b"model evaluated"


def test_an_answer_is_not_sent_over_a_network_that_became_metered_or_beyond_the_budget(site):
    def forbid():
        save_conditions(site.root, b'[conditions]\ninterfaces = ["none0"]\n')

    site.trainer.during = forbid
    site.do("a")
    assert "not by none0" in wait_for_sent(site, 1)[0][0]["error"]
    save_conditions(site.root, b"[conditions.day]\ntraffic_mb = 2\n")
    site.trainer.during = lambda: site.gate.charge_traffic(1_999_990)
    site.do("b")
    assert wait_for_sent(site, 2)[1][0]["error"] == "its 2 MB of this day are used up"
    assert wait_for_sent(site, 2)[1][1] == b""


def test_no_update_is_trained_that_the_budget_could_not_carry(site):
    save_conditions(site.root, b"[conditions.day]\ntraffic_mb = 1\n")
    assert site.gate.check() is None
    site.gate.charge_traffic(999_996)
    site.gate.check = lambda: None
    site.do("a", codec="dense")
    site.do("b", codec="sign")
    assert site.trainer.trained == ["b"]
    site.do("c", codec="sign")  # by now its size is known
    assert site.trainer.trained == ["b"]
    assert all("used up" in header["error"] for header, _ in wait_for_sent(site, 3))


def wait_for_sent(site, number):
    eventually(lambda: len(site.network.sent) >= number, f"sending {number} answers")
    return site.network.sent


def test_an_assignment_that_comes_again_is_answered_from_memory_unless_it_is_of_another_version(site):
    assert not site.bench.run_once()
    assert site.num_works == 0
    site.do("a", "a", version=41)
    first, second = wait_for_sent(site, 2)
    assert second is first
    assert (site.trainer.trained, site.num_works) == (["a"], 2)
    site.do("a", version=17)
    site.do("a", version=17)
    assert site.trainer.trained == ["a", "a"]
    _, _, third, fourth = wait_for_sent(site, 4)
    assert third is fourth
    assert third is not first


@pytest.mark.parametrize(
    ("change", "is_from_memory"),
    [
        ({}, True),
        ({"newest_record": 12}, True),
        ({"model_sha256": None}, True),
        ({"lineage": "l2"}, False),
        ({"model_sha256": "m2"}, False),
        ({"ignores_reply": True}, False),
    ],
)
def test_an_answer_from_memory_is_for_one_lineage_and_one_model(site, change, is_from_memory):
    sent = {"version": 4, "lineage": "l1", "model_sha256": "m1", "newest_record": 10}
    site.do("a", **sent)
    site.do("a", **sent | change)
    assert len(site.trainer.trained) == (1 if is_from_memory else 2)
    (_, _), (header, _) = wait_for_sent(site, 2)
    assert {name: header[name] for name in ("lineage", "model_sha256")} == {
        name: (sent | change)[name] for name in ("lineage", "model_sha256")
    }


def test_a_reply_names_the_highest_record_that_was_heard_of_in_its_lineage_and_run(site):
    for lineage, run, record in (("l1", "r", 10), ("l1", "r", 7), ("l1", "r", 11), ("l2", "r", 3), ("l2", "q", 2)):
        site.do("a", lineage=lineage, run=run, newest_record=record, version=record)
    sent = wait_for_sent(site, 5)
    assert [header["newest_record"] for header, _ in sent] == [10, 10, 11, 3, 2]


def test_an_evaluation_is_answered_and_not_kept(site):
    site.network.is_evaluation = True
    site.do("a", "a")
    assert wait_for_sent(site, 2) == [({"assignment": "a", "metrics": {"accuracy": 1.0}}, b"model evaluated")] * 2
    assert site.trainer.trained == []
    assert site.bench.list_held_assignments() == ()


def test_only_the_newest_finished_updates_are_kept(site):
    names = [f"a-{number}" for number in range(MAX_CACHED_REPLIES + 1)]
    site.do(*names)
    assert site.bench.list_held_assignments() == tuple(names[1:])
    site.do(names[0])
    assert site.trainer.trained == [*names, names[0]]
    site.do("b", used_assignments=[names[0], names[-1], "never-heard-of"])
    assert site.bench.list_held_assignments() == ("b",), "what was used is forgotten"
    site.do("bad", used_assignments=["b"])
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

    site.bench._secure_worker._train = looking
    site.do("a")
    assert seen == [("r", "a")]
    assert site.bench.get_log_context() is None


def test_a_device_asks_seldom_while_it_hears_bells_and_else_soon_after_work_and_then_ever_more_seldom():
    pace = PollBackoff()
    for _ in range(2):
        waits = [pace.compute_interval_s(is_connected=False) for _ in range(8)]
        assert waits == [INITIAL_DISCONNECTED_S, 1, 2, 4, 8, MAX_DISCONNECTED_S, 15, 15]
        assert pace.compute_interval_s(is_connected=True) == POLL_S
    pace.compute_interval_s(is_connected=False)
    pace.on_work()
    assert pace.compute_interval_s(is_connected=False) == INITIAL_DISCONNECTED_S
    own = PollBackoff(0.2)
    assert [own.compute_interval_s(is_connected=False) for _ in range(3)] == [0.2, 0.2, 0.2], (
        "a shorter one of its own holds"
    )


def test_next_work_is_found_after_at_most_as_long_again_and_with_few_questions():
    for lasts_s in (0.3, 1.0, 7.0, 20.0):
        pace = PollBackoff()
        pace.on_work()
        asked_s = itertools.accumulate(pace.compute_interval_s(is_connected=False) for _ in range(20))
        count, found_s = next((count, at_s) for count, at_s in enumerate(asked_s, 1) if at_s >= lasts_s)
        assert found_s <= 2 * lasts_s + INITIAL_DISCONNECTED_S
        assert count <= 6


class HeldNetwork:
    """Takes one answer at a time, when it is let; fails as often as it is told to."""

    def __init__(self):
        self.sent, self.under_way, self.failures, self.num_failed = [], [], [], 0
        self.lets = threading.Semaphore(0)
        self.began = threading.Semaphore(0)

    def push(self, answer):
        self.under_way.append(answer)
        self.began.release()
        assert self.lets.acquire(timeout=60)
        self.under_way.remove(answer)
        if self.failures:
            raise self.failures.pop(0)
        self.sent.append(answer)

    def fail(self):
        self.num_failed += 1

    def let(self, count=1):
        for _ in range(count):
            self.lets.release()

    def wait_begun(self):
        assert self.began.acquire(timeout=60)


@pytest.fixture
def network():
    return HeldNetwork()


@pytest.fixture
def outbox(network):
    made = ReplyUploader(network.push, network.fail)
    made.resume()
    yield made
    network.let(9)
    made.close(10)
    assert not made._thread.is_alive()


def test_answers_leave_in_order_and_a_third_waits_for_the_first(network, outbox):
    outbox.add("one")
    network.wait_begun()
    assert network.under_way == ["one"]  # and this thread is free
    waiting = threading.Thread(target=outbox.add, args=("two",))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    network.let(2)
    waiting.join(60)
    assert not waiting.is_alive()
    eventually(lambda: network.sent == ["one", "two"])


@pytest.mark.parametrize("error", [NetworkError("no answer"), RuntimeError("no answer: a bug")])
def test_what_could_not_be_sent_is_told_once_kept_and_sent_when_there_is_a_connection_again(network, outbox, error):
    network.failures = [error]
    outbox.add("one")
    network.let()
    eventually(lambda: network.num_failed)
    outbox.add("two")  # the training that went on meanwhile
    with pytest.raises(NetworkError, match="no answer"):
        outbox.check()
    outbox.check()
    assert network.sent == []
    network.let(2)
    outbox.resume()
    eventually(lambda: network.sent == ["one", "two"])


def test_a_pause_waits_for_what_is_under_way_and_nothing_leaves_until_it_is_over(network, outbox):
    outbox.add("one")
    network.wait_begun()
    pausing = threading.Thread(target=outbox.pause)
    pausing.start()
    pausing.join(0.1)
    assert pausing.is_alive()
    network.let()
    pausing.join(60)
    assert (pausing.is_alive(), network.sent) == (False, ["one"])
    network.let()
    outbox.add("two")
    time.sleep(0.05)
    assert network.under_way == []
    outbox.resume()
    eventually(lambda: network.sent == ["one", "two"])


def test_closing_sends_what_is_left_but_waits_no_longer_than_it_may(network):
    outbox = ReplyUploader(network.push, network.fail)
    outbox.resume()
    outbox.add("one")
    network.let()
    outbox.close(10)
    assert network.sent == ["one"]
    stuck = ReplyUploader(network.push, network.fail)
    stuck.resume()
    stuck.add("two")
    started_s = time.monotonic()
    stuck.close(0.1)
    unconnected = ReplyUploader(network.push, network.fail)
    unconnected.add("three")
    unconnected.close(10)
    assert time.monotonic() - started_s < 5
    assert network.sent == ["one"]
    network.let()


def test_the_runs_that_used_a_shard_are_noted_once_an_hour(site, state):
    clock = [1000.0]
    path = state.root / "shard_uses.json"
    site.bench._uses = ShardUses(path, lambda: clock[0])
    for now_s, name in ((1000.0, "a"), (2000.0, "b"), (5000.0, "c")):
        clock[0] = now_s
        site.do(name, task="series")
    (use,) = read_shard_uses(path)
    assert use == ShardUse(task="series", run="r", first_s=1000.0, last_s=5000.0)
    site.do("c", task="digits")  # answered from memory
    assert len(read_shard_uses(path)) == 1
    path.write_bytes(b'{"uses":[["a"]]}')
    assert read_shard_uses(path) == []


def test_work_that_is_handed_back_has_used_a_shard_and_a_readiness_phase_has_not(site, state):
    def end():
        raise ConditionsEndedError("too hot", Blocker(kind="heat", reason="too hot"))

    path = state.root / "shard_uses.json"
    site.do("a", task="series", phase="prefetch")
    site.do("bad", task="series")
    assert read_shard_uses(path) == []
    site.trainer.during = end
    site.do("b", task="series")
    assert [use.task for use in read_shard_uses(path)] == ["series"]
