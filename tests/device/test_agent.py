"""What the agent does on a slow network; whole fleets are in tests/e2e."""

import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from peer_boards import eventually

from edgefl.core.conditions import DOWNLOAD, Blocker, ConditionsEndedError
from edgefl.core.errors import NetworkError
from edgefl.device.agent import INITIAL_BACKOFF_S, MAX_BACKOFF_S, Agent
from edgefl.device.commands import WakeUpSignal
from edgefl.device.conditions.budgets import Clocks
from edgefl.device.conditions.gate import clear_pause, save_conditions, save_pause


def make_instruction(assignment):
    return SimpleNamespace(header={"assignment": assignment}, body=b"", is_evaluation=False, blocker=None)


class SlowNetwork:
    """Stands for Flower: gives out two pieces of work; the first answer arrives only when the second is trained."""

    def __init__(self):
        self.work = ["a-1", "a-2"]
        self.trained = []
        self.sent = []
        self.second_began = threading.Event()

    def pull(self):
        return make_instruction(self.work.pop(0)) if self.work else None

    def train(self, header, _body):
        if header["assignment"] == "a-2":
            self.second_began.set()
        self.trained.append(header["assignment"])
        return {"assignment": header["assignment"]}, b"update"

    def create_reply(self, _instruction, answer):
        return f"answer to {answer[0]['assignment']}"

    def push(self, reply):
        assert self.second_began.wait(60), "the device waited for its answer to be sent"
        self.sent.append(reply)


def test_a_device_trains_on_while_its_last_answer_is_sent(state):
    agent, network = Agent(state), SlowNetwork()
    agent._work_loop.supernode = agent._work_loop._secure_worker = network
    serving = threading.Thread(target=agent._run_work_loop)
    serving.start()
    for _ in range(2):
        agent._wake_up.notify()
    eventually(lambda: len(network.sent) == 2)
    agent.stop()
    serving.join(60)
    agent._work_loop.uploader.close(20)
    assert network.trained == ["a-1", "a-2"]
    assert network.sent == ["answer to a-1", "answer to a-2"]


def test_a_board_that_may_not_train_resumes_no_node_measures_no_speed_and_is_stopped_at_every_check(state):
    save_pause(state.root, None, Clocks(boot_id=""))
    agent, calls = Agent(state), []
    for part, name in (
        (agent._trainer, "resume"),
        (agent._trainer, "pause"),
        (agent._step_rates, "on_idle"),
        (agent._step_rates, "on_work"),
    ):
        setattr(part, name, lambda *_, name=name, **__: calls.append(name))
    agent._capability_reporter._published = (None, {})
    agent._stopping.set()
    agent.run()
    assert "resume" not in calls
    calls.clear()
    for _ in range(2):
        agent._get_activity()
        agent._poll_work()
    assert calls == ["on_work", "pause"] * 2
    clear_pause(state.root)
    agent._get_activity()
    agent._work_loop.supernode = SimpleNamespace(pull=lambda: None, incoming_assignment=None)
    agent._poll_work()
    assert calls[4:] == ["on_idle"]


def test_a_node_that_yields_is_resumed_by_another_thread_than_the_main_loop(state):
    save_conditions(state.root, b"[conditions]\nyields = true\n")
    agent, seen, before = Agent(state), [], os.nice(0)
    agent._trainer.resume = lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    agent._stopping.set()
    agent.run()
    assert (seen, os.nice(0)) == ([19], before)


NEVER = {"interfaces": ["none0"]}


@pytest.mark.parametrize("folder", [".", "confined"])
@pytest.mark.parametrize(("conditions", "resumes"), [(NEVER, False), ({"mains": True}, True), (None, True)])
def test_a_node_is_resumed_only_where_the_conditions_of_its_run_hold(state, folder, conditions, resumes):
    path = state.root / folder / "node.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"run": "r-1", "conditions": conditions}))
    agent, calls = Agent(state), []
    agent._trainer.resume = lambda: calls.append(threading.current_thread())
    agent._stopping.set()
    agent.run()
    assert calls == [threading.current_thread()] * resumes
    blocker = agent._check_conditions()
    assert (blocker is None) is resumes
    assert blocker is None or blocker.run == "r-1"


def test_a_node_stops_by_the_conditions_of_its_own_run_and_by_no_others(state, monkeypatch):
    agent, calls = Agent(state), []
    monkeypatch.setattr(type(agent._trainer), "node_run", "r-1")
    agent._trainer.pause = lambda: calls.append("pause")
    agent._gate.admit("r-1", None)
    with pytest.raises(ConditionsEndedError):
        agent._gate.admit("r-2", NEVER)
    assert (agent._check_conditions().run, calls) == ("r-2", [])
    with pytest.raises(ConditionsEndedError):
        agent._gate.admit("r-1", NEVER)
    agent._gate.admit("r-2", None)
    assert (agent._check_conditions(), calls) == (None, ["pause"])
    save_pause(state.root, None, Clocks(boot_id=""))
    assert (agent._check_conditions().run, calls) == ("", ["pause"] * 2)


def test_a_node_goes_on_while_a_link_only_keeps_new_work_away(state, monkeypatch):
    agent, calls = Agent(state), []
    monkeypatch.setattr(type(agent._trainer), "node_run", "r-1")
    agent._trainer.pause = lambda: calls.append("pause")
    monkeypatch.setattr(
        agent._gate, "find_run_blocker", lambda run="r-1": Blocker(kind=DOWNLOAD, reason="metered", run=run)
    )
    assert (agent._check_conditions().kind, calls) == (DOWNLOAD, [])


class Bell(WakeUpSignal):
    """Notes for how long it was waited, and rings after a thousandth of that."""

    def __init__(self):
        super().__init__()
        self.waits_s = []

    def wait(self, timeout_s):
        self.waits_s.append(timeout_s)
        super().wait(timeout_s / 1000)


@pytest.mark.parametrize("fails", ["to greet", "to give work", "to take an answer"])
def test_a_coordinator_that_fails_is_asked_ever_more_seldom(state, monkeypatch, fails):
    monkeypatch.setattr("edgefl.device.agent.WakeUpSignal", Bell)
    agent, work, tries, enough = Agent(state, poll_s=0.001), ["a-1"], [], threading.Event()

    def attempt(what, answer=None):
        if what == fails:
            tries.append(what)
            if len(tries) == 9:
                enough.set()
            raise NetworkError("the coordinator answered 500")
        return answer

    def pull():
        return attempt("to give work", make_instruction(work.pop()) if work else None)

    def connect():
        attempt("to greet")
        agent._endpoint.address = "127.0.0.1:9"

    agent._endpoint.connect = connect
    agent._work_loop.supernode = SimpleNamespace(
        pull=pull, create_reply=lambda *_: "44 MB", push=lambda _reply: attempt("to take an answer"),
        close=lambda: None, incoming_assignment=None,
    )  # fmt: skip
    running = threading.Thread(target=agent.run)
    running.start()
    assert enough.wait(60)
    agent.stop()
    running.join(30)
    assert not running.is_alive()
    backoffs_s = [wait_s for wait_s in agent._wake_up.waits_s if wait_s > 0.01]
    assert len(backoffs_s) >= 8
    for number, backoff_s in enumerate(backoffs_s[:8]):
        longest_s = min(INITIAL_BACKOFF_S * 2**number, MAX_BACKOFF_S)
        assert longest_s / 2 <= backoff_s <= longest_s


def test_an_answer_that_takes_minutes_is_no_dead_loop_for_the_watchdog(state):
    agent, began, may_end = Agent(state), threading.Event(), threading.Event()

    def push(_reply):
        began.set()
        assert may_end.wait(60)

    agent._work_loop.supernode = SimpleNamespace(push=push)
    agent._endpoint.connect = lambda: None
    agent._work_loop.uploader.resume()
    agent._work_loop.uploader.add(("a-1", "44 MB"))
    assert began.wait(30)
    connecting = threading.Thread(target=agent._connect)
    connecting.start()
    eventually(lambda: agent.liveness._num_working)
    agent.liveness.clock = lambda: time.monotonic() + 300
    assert agent.liveness.is_alive(timeout_s=90)
    may_end.set()
    connecting.join(30)
    assert not agent.liveness._num_working
    agent._work_loop.uploader.close(20)


def test_a_board_without_work_of_its_own_checks_nothing_at_a_failed_connect():
    asked = []
    trainer = SimpleNamespace(can_work_offline=asked.append)
    agent = SimpleNamespace(_away_since_s=None, _trainer=trainer)  # neither gate nor liveness
    assert not Agent._work_offline(agent)
    assert len(asked) == 1


def test_an_agent_loads_neither_run_files_nor_readers_of_tables_until_a_run_needs_them():
    heavy = ["edgefl.core.config", "edgefl.tasks.datasets.table_files", "edgefl.tasks.datasets.class_folders"]
    program = f"import sys; import edgefl.device.agent; print(*set({heavy}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
