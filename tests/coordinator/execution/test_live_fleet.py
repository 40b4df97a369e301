"""The live fleet over a real registry; Flower's books and the bell are small fakes that note what they are told."""

import hashlib
import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_fleet import SmallFleet

from edgefl.compression.codec import decode_body, make_codec
from edgefl.coordinator.execution import messaging
from edgefl.coordinator.execution.admission import REJOIN_TIMEOUT_S
from edgefl.coordinator.execution.fleet_view import SHOW_AFTER_S, RunSpec
from edgefl.coordinator.execution.live_fleet import (
    EVALUATION_DEADLINE_S,
    HAND_BACK_PERIOD_S,
    LINEAGE_BEGAN,
    MAX_LOST_SESSIONS,
    SHORTAGE,
    InterruptedRunError,
    LiveFleet,
    add_base_traffic,
)
from edgefl.coordinator.execution.messaging import RESEND_AFTER_S
from edgefl.coordinator.fleet.allotments import BoardClaim
from edgefl.coordinator.fleet.registry import ASK_AGAIN_S
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.errors import NetworkError, SplitSessionError
from edgefl.core.protocol import EVALUATOR_NAME, Capabilities, Heartbeat, StatusMessage
from edgefl.core.types import (
    DeviceAvailable,
    EvaluateInstruction,
    EvaluateResult,
    FinishEarlyInstruction,
    InstructionFailed,
    Progress,
    StopRequested,
    TensorSpec,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
    derive_rng,
)
from edgefl.engine.fleet_state import DispatchedInstruction, FleetState
from edgefl.storage.store import REJECTED_EVENT_KIND
from edgefl.strategies.participation import WorkPlanner

SHAPES = (TensorSpec(name="w", shape=(3,)),)
RUN = "run-1"


class Clock:
    """Monotonic time that also jumps when told to."""

    def __init__(self):
        self.jumped_s = 0.0

    def __call__(self):
        return time.monotonic() + self.jumped_s


class Mail:
    """Flower's books: keeps what was sent until it is answered or cancelled."""

    def __init__(self):
        self.sent, self.open, self.delivered, self.refuses, self.is_closed = [], {}, set(), None, False
        self._number = itertools.count(1)

    def send(self, node_id, *, kind, header, body):
        if self.refuses:
            raise NetworkError(self.refuses)
        name = f"instruction-{next(self._number)}"
        self.sent.append((node_id, kind, header, body))
        self.open[name] = node_id, kind, header, body
        return name

    def is_known(self, name):
        return name in self.open

    def is_delivered(self, name):
        return name not in self.open or name in self.delivered

    def cancel(self, name):
        self.open.pop(name, None)

    def close(self):
        self.is_closed = True


class Bell:
    def __init__(self):
        self.rung, self.commands = [], []

    def notify(self, device_id):
        self.rung.append(device_id)

    def send_command(self, device_id, command):
        self.commands.append((device_id, str(command.kind), command.argument))


class Source:
    def __init__(self, version=0):
        self.version, self.num_encoded = version, 0

    def model(self):
        self.num_encoded += 1
        return {"w": np.full(3, float(self.version), np.float32)}

    def device_model(self, subject):
        return {"w": np.full(3, 7.0, np.float32)} if subject else self.model()

    def changed(self, since):
        return {"w": np.arange(since, self.version)}


class Site:
    def __init__(
        self, *, has_deltas=False, max_decoded_bytes=2**20, folder=None, record_event=lambda *_: None, **options
    ):
        self.clock, self.mail, self.bell, self.source = Clock(), Mail(), Bell(), Source()
        self.registry = SmallFleet(clock=self.clock).registry
        self.shown = list[str]()
        self.codec = make_codec("dense", SHAPES)
        settings = {"groups": (), "names": (), "join_at_start": False, **options}
        run = RunSpec(
            run_id=RUN,
            task="digits",
            header={"v": 2, "run": RUN, "task": "digits"},
            encode=lambda model, version: self.codec.encode(model, derive_rng(version)),
            decode=lambda body: decode_body(body, SHAPES),
            encode_changes=(lambda model, changed, version: b"delta") if has_deltas else None,
            **settings,
        )
        self.fleet = LiveFleet(
            run=run, transport=self.mail, registry=self.registry, notifier=self.bell, clock=self.clock,
            max_decoded_bytes=max_decoded_bytes, spool_folder=folder, on_waiting=self.shown.append,
            record_event=record_event,
        )  # fmt: skip
        self.nodes = itertools.count(101)

    def add(self, name, *, role="trainer", groups=(), tasks=("digits",), online=True):
        node_id = next(self.nodes)
        self.registry.add(name, node_id=node_id, role=role, groups=groups, examples=dict.fromkeys(tasks, 10))
        if online:
            self.say(name, "online")
        return node_id

    def say(self, name, state, *, boot="boot-1", session=1, will=False):
        self.registry.record_status(name, StatusMessage(state=state, boot_id=boot, session_no=session, will=will))

    def beat(self, name, holding=(), seq=1, **told):
        held = [f"{RUN}/{key}" for key in holding]
        self.registry.record_heartbeat(
            name, Heartbeat(seq=seq, session_no=1, uptime_s=float(seq), holding=held, **told)
        )

    def give(self, *orders):
        self.fleet.dispatch(orders, self.source)

    def events(self):
        return list(self.fleet.wait(self.clock()))

    def of(self, kind):
        return [event for event in self.events() if isinstance(event, kind)]

    def reply(self, node_id, key="a-1", *, body=None, instruction="", metrics=None, **header):
        if "all_metrics" in header:
            header["metrics"] = header.pop("all_metrics")
        whole = {"v": 2, "run": RUN, "assignment": f"{RUN}/{key}"}
        whole["metrics"] = {"iterations": 4, "num_examples": 10, "loss": 0.5, "compute_s": 2.0, **(metrics or {})}
        encoded = self.codec.encode({"w": np.ones(3, np.float32)}, derive_rng(0)) if body is None else body
        self.fleet.post(
            Reply(node_id=node_id, instruction_id=instruction, header={**whole, **header}, body=encoded,
                  bytes_up=len(encoded), bytes_down=99)
        )  # fmt: skip


def training(key="a-1", device="pi", base=0, **options):
    return TrainInstruction(
        assignment_id=key,
        device_id=device,
        base_version=base,
        plan=TrainConfig(iterations=4, momentum=0.5),
        **options,
    )


def evaluation(device="pi", key="e-1"):
    return EvaluateInstruction(assignment_id=key, device_id=device, version=3, round=3)


@pytest.fixture
def site():
    made = Site()
    made.add("pi")
    assert made.of(DeviceAvailable) == [DeviceAvailable(device_id="pi")]
    yield made
    made.fleet.close()
    assert made.mail.is_closed


def lost(site):
    return [(event.assignment_id, event.outcome, event.reason) for event in site.of(InstructionFailed)]


def restart(site, session=2):
    """The agent of pi is another process from now on."""
    site.say("pi", "online", boot=f"boot-{session}", session=session)


def test_an_order_is_sent_with_its_plan_under_the_run_s_name_and_the_bell_is_rung(site):
    site.give(training(codec="dense|fp16", used_assignments=("a-0",)), training("b", block=0))
    (node_id, kind, header, body), (_, _, second, _) = site.mail.sent
    assert (node_id, kind, site.bell.rung) == (101, "train", ["pi", "pi"])
    assert header["plan"] == {
        "algorithm": "sgd", "iterations": 4, "batch_size": 32, "learning_rate": 0.05, "momentum": 0.5,
        "weight_decay": 0.0, "options": {}, "keeps_state": False, "report_progress": False,
    }  # fmt: skip
    assert (header["run"], header["assignment"], header["used_assignments"]) == (RUN, "run-1/a-1", ["run-1/a-0"])
    assert (header["version"], header["codec"], "block" in header, second["block"]) == (0, "dense|fp16", False, 0)
    assert decode_body(body.inline, SHAPES)["w"].tolist() == [0.0] * 3


def test_an_update_comes_back_with_everything_that_was_measured(site):
    site.give(training())
    site.clock.jumped_s += 3.0
    site.reply(101, metrics={"extra": {"gap": 0.25, "bad": float("nan")}})
    (update,) = site.events()
    assert isinstance(update, Update)
    assert (update.assignment_id, update.device_id, update.base_version) == ("a-1", "pi", 0)
    assert update.tensors["w"].tolist() == [1.0] * 3
    metrics = update.metrics
    assert (metrics.iterations, metrics.num_examples, metrics.loss, metrics.compute_s) == (4, 10, 0.5, 2.0)
    assert metrics.send_s == pytest.approx(1.0, abs=0.5)
    assert (metrics.bytes_up, metrics.bytes_down, metrics.extra) == (len(update.body), 99, {"gap": 0.25})
    assert site.fleet.view().busy == {}
    assert site.fleet.view().speeds["pi"].seconds_per_iteration == 0.5
    assert site.registry.list_status_rows()[0]["seconds_per_iteration"] == 0.5


def test_an_update_for_which_there_was_no_room_comes_from_disk_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(messaging, "PUT_TIMEOUT_S", 0.05)
    site = Site(folder=tmp_path)
    node = site.add("pi")
    site.events()
    site.give(training())
    site.reply(
        node, "another", body=bytes(messaging.MAX_MEMORY_BYTES + 1)
    )  # nobody waits for it, and the run is busy
    site.reply(node)
    assert site.fleet._queue.num_memory_bytes == messaging.MAX_MEMORY_BYTES + 1
    assert list(tmp_path.iterdir()) == []
    assert site.events() == []
    (update,) = site.of(Update)
    assert update.tensors["w"].tolist() == [1.0] * 3
    assert update.metrics.bytes_up == len(update.body)
    site.fleet.close()


def test_the_model_is_encoded_once_per_version_and_busy_holds_training_alone(site):
    site.add("pi-2")
    site.give(training("a"), training("b"), evaluation("pi-2", "e"))
    assert site.source.num_encoded == 1
    assert (site.fleet.view().busy, site.fleet.view().idle) == ({"pi": ["a", "b"]}, ["pi-2"])
    site.source.version = 1
    site.give(training("c"))
    assert site.source.num_encoded == 2


def test_an_evaluation_comes_back_with_its_source(site):
    own, judge = site.add(EVALUATOR_NAME, role="evaluator"), site.add("judge", role="evaluator")
    metrics = {"num_examples": 20, "loss": -0.5, "accuracy": 0.75}
    for number, (node, name) in enumerate([(101, "pi"), (own, EVALUATOR_NAME), (judge, "judge")]):
        site.give(evaluation(name, f"e-{number}"))
        site.reply(node, f"e-{number}", metrics=metrics, body=b"")
    found = site.of(EvaluateResult)
    assert [event.source for event in found] == ["device", "coordinator", "evaluator"]
    assert {(e.version, e.round, e.num_examples, e.loss, e.accuracy) for e in found} == {(3, 3, 20, -0.5, 0.75)}
    assert site.mail.sent[0][1] == "evaluate"


def test_a_device_s_own_model_is_sent_for_its_evaluation_and_comes_back_under_its_name(site):
    node = site.add("judge", role="evaluator")
    orders = [
        EvaluateInstruction(assignment_id=f"e-{subject}", device_id="judge", version=3, round=3, subject=subject)
        for subject in ("", "pi")
    ]
    site.give(*orders)
    assert [decode_body(body.inline, SHAPES)["w"].tolist() for *_, body in site.mail.sent] == [[0.0] * 3, [7.0] * 3]
    for key in ("e-pi", "e-"):
        site.reply(node, key, metrics={"num_examples": 20, "loss": 0.5, "accuracy": 0.75}, body=b"")
    assert [(event.assignment_id, event.subject) for event in site.of(EvaluateResult)] == [("e-pi", "pi"), ("e-", "")]


@pytest.mark.parametrize("state", ["goodbye", "silence", "removal"])
def test_a_device_that_leaves_loses_all_its_work_and_is_announced_when_it_comes_back(site, state):
    site.give(training("a"), evaluation(key="e"))
    if state == "goodbye":
        site.say("pi", "offline")
    elif state == "removal":
        site.registry.remove("pi")
    else:
        site.clock.jumped_s += 100.0
        site.registry.tick()
    assert [(key, outcome) for key, outcome, _ in lost(site)] == [("a", UpdateStatus.LOST), ("e", UpdateStatus.LOST)]
    assert site.mail.open == {}
    view = site.fleet.view()
    assert (dict(view.devices), view.idle, view.busy) == ({}, [], {})
    if state != "removal":
        restart(site)
        assert site.of(DeviceAvailable) == [DeviceAvailable(device_id="pi")]


def test_a_device_that_is_only_late_keeps_its_work(site):
    site.give(training())
    site.say("pi", "offline", will=True)
    assert site.events() == []
    site.beat("pi")
    assert site.events() == []
    assert site.fleet.view().busy == {"pi": ["a-1"]}


def test_a_draining_device_finishes_and_gets_no_more(site):
    site.give(training())
    site.say("pi", "draining")
    assert (site.events(), site.fleet.view().idle) == ([], [])
    site.reply(101)
    assert (len(site.of(Update)), site.fleet.view().idle) == (1, [])
    site.say("pi", "online")
    assert site.of(DeviceAvailable) == [DeviceAvailable(device_id="pi")]
    assert site.fleet.view().idle == ["pi"]


PAUSED = {"kind": "pause", "reason": "paused on the board"}


def test_work_that_a_device_hands_back_is_lost_and_no_failure_of_its_own_and_it_gets_no_more(site):
    site.give(training())
    site.reply(101, body=b"", error="paused on the board", handed_back=PAUSED)
    assert lost(site) == [("a-1", UpdateStatus.LOST, "paused on the board")]
    site.events()
    assert site.fleet.view().idle == []
    site.beat("pi")
    assert site.of(DeviceAvailable) == [DeviceAvailable(device_id="pi")]
    assert site.fleet.view().idle == ["pi"]


def test_work_that_the_runs_conditions_end_is_lost_and_given_again_when_they_hold_or_are_another_runs(site):
    site.give(training())
    mine = {"kind": "hours", "reason": "its hours end", "run": RUN}
    site.reply(101, body=b"", error="its hours end", handed_back=mine)
    assert lost(site) == [("a-1", UpdateStatus.LOST, "its hours end")]
    site.events()
    assert site.fleet.view().idle == []
    site.beat("pi", run=RUN)
    site.events()
    assert site.fleet.view().idle == ["pi"]
    site.give(training())
    site.clock.jumped_s += 1.0
    site.beat("pi", blocked={**mine, "run": "another"}, seq=2)
    assert lost(site) == [], "another run's conditions keep it from nothing of this one"
    site.beat("pi", blocked=mine, seq=3)
    assert lost(site) == [("a-1", UpdateStatus.LOST, "by run run-1: its hours end")]


def test_the_runs_own_conditions_never_fail_it_while_its_board_works_for_another_run(site):
    mine = {"kind": "power", "reason": "not on external power", "run": RUN}
    for seq in range(1, 8):
        site.give(training())
        site.reply(101, body=b"", error="x", handed_back=mine)
        assert lost(site) == [("a-1", UpdateStatus.LOST, "x")]
        site.beat("pi", run="another", seq=2 * seq)
        site.events()
        assert site.fleet.view().idle == []
        site.clock.jumped_s += ASK_AGAIN_S
        site.beat("pi", run="another", seq=2 * seq + 1)
        assert site.events() == []
        site.registry.tick()
        assert site.of(DeviceAvailable) == [DeviceAvailable(device_id="pi")]
        assert site.fleet.view().idle == ["pi"]


def test_a_board_that_no_work_fits_into_is_said_to_be_short_and_its_run_waits_for_it_by_name():
    planner = WorkPlanner(plan=TrainConfig(iterations=4), task="digits")
    events = []
    site = Site(find_shortage=planner.find_shortage, record_event=lambda *told: events.append(told))
    site.add("pi")
    site.events()
    site.fleet.view()
    site.give(training())
    left = {"window": [9, 7200]}
    site.reply(101, allowance=left, metrics={"compute_s": 8.0})  # 2 s an iteration
    site.clock.jumped_s += 8.0
    (update,) = site.of(Update)
    assert update.metrics.compute_s == 8.0
    view = site.fleet.view()
    assert view.devices["pi"].allowance.window.ends_s == pytest.approx(view.now_s + 9, abs=1)
    for _ in range(2):
        site.give()
        site.clock.jumped_s += SHOW_AFTER_S
        site.events()
    (told,) = [told for told in events if told[0] == SHORTAGE]
    assert told[1] == "pi"
    assert told[2].startswith("its hours end in ")
    assert "and one work may take 10 s, free at 20" in told[2]
    assert site.shown[-1].startswith("waiting for a board with a shard for digits: none is ready, pi: its hours end")
    assert site.registry.list_status_rows()[0]["blocked"].startswith(f"run {RUN}: its hours end")
    site.beat("pi", allowance={"window": [3600, 7200]})
    assert site.of(DeviceAvailable) == [DeviceAvailable(device_id="pi")]
    site.clock.jumped_s += SHOW_AFTER_S
    site.fleet.view()
    site.give()
    assert site.registry.list_status_rows()[0]["blocked"] is None
    assert len([told for told in events if told[0] == SHORTAGE]) == 1
    site.fleet.close()


def make_planned_site(*run_ids, allowance):
    """Returns a site with board pi, whose next work takes 10 s, and which allows that."""
    planner = WorkPlanner(plan=TrainConfig(iterations=4), task="digits")
    site = Site(find_shortage=planner.find_shortage)
    for run_id in run_ids:
        site.registry.open_run(BoardClaim(run_id=run_id, selects=lambda _info: True))
    site.add("pi")
    site.beat("pi", allowance={"window": [3600, 7200]})
    site.events()
    site.fleet.view()
    site.give(training())
    site.clock.jumped_s += 8.0
    site.reply(101, allowance=allowance, metrics={"compute_s": 8.0})
    assert len(site.of(Update)) == 1
    site.fleet.view()
    return site


def test_work_that_fits_again_is_not_recalled_for_what_its_board_was_short_of_before():
    site = make_planned_site(RUN, allowance={"window": [9, 7200]})
    site.give()
    assert "its hours end in" in site.registry.list_status_rows()[0]["blocked"]
    site.beat("pi", allowance={"window": [3600, 7200]}, seq=2)
    site.events()
    site.fleet.view()
    site.give(training("a-2"))
    assert site.registry.list_status_rows()[0]["blocked"] is None
    site.registry.open_run(BoardClaim(run_id="other", selects=lambda _info: True))
    assert lost(site) == []
    assert site.registry.get_allotted_run("pi") == RUN
    site.fleet.close()


def test_a_board_that_is_short_just_after_the_last_look_goes_to_another_run_within_seconds():
    site = make_planned_site(RUN, "other", allowance={"window": [3600, 7200]})
    site.give()
    site.beat("pi", allowance={"window": [9, 7200]}, seq=2)
    site.events()
    site.fleet.view()
    site.give()
    assert site.registry.get_allotted_run("pi") == RUN, "it has looked a moment ago"
    started_s = time.monotonic()
    site.fleet.wait(site.clock() + 20.0)
    assert site.registry.get_allotted_run("pi") == "other"
    assert time.monotonic() - started_s < 10.0
    site.fleet.close()


@pytest.mark.parametrize("allowance", [None, "night", {"window": [-1, 0]}, {"day": {"renews_s": 1, "traffic": "x"}}])
def test_an_allowance_that_makes_no_sense_is_none_and_its_update_counts(site, allowance):
    site.give(training())
    site.reply(101, allowance=allowance)
    assert len(site.of(Update)) == 1
    assert site.fleet.view().devices["pi"].allowance is None


@pytest.mark.parametrize("blocker", [{}, None, "night", {"reason": 3}])
def test_work_handed_back_without_a_reason_that_makes_sense_has_failed(site, blocker):
    site.give(training())
    site.reply(101, body=b"", error="x", handed_back=blocker)
    assert lost(site) == [("a-1", UpdateStatus.FAILED, "x")]


def test_a_device_that_hands_back_again_and_again_has_failed_until_it_answers_or_an_hour_is_over(site):
    def hand_back():
        site.give(training())
        site.reply(101, body=b"", error="x", handed_back=PAUSED)
        site.beat("pi")
        return lost(site)[0][1]

    assert [hand_back() for _ in range(5)] == ["lost"] * 3 + ["failed"] * 2
    site.clock.jumped_s += HAND_BACK_PERIOD_S + 1
    assert [hand_back() for _ in range(4)] == ["lost"] * 3 + ["failed"]
    site.give(training())
    site.reply(101)
    assert len(site.of(Update)) == 1
    assert hand_back() == "lost"


def test_what_a_device_that_may_not_train_does_not_hold_is_lost_and_what_it_has_is_not(site):
    site.give(training("a-1"), training("a-2"))
    site.clock.jumped_s += 1.0
    site.beat("pi", holding=["a-1"], blocked=PAUSED)
    assert lost(site) == [("a-2", UpdateStatus.LOST, "paused on the board")]
    site.reply(101)
    assert len(site.of(Update)) == 1


def test_new_shards_are_announced_and_make_a_device_eligible(site):
    site.add("empty", tasks=())
    site.events()
    assert site.fleet.view().idle == ["pi"]
    site.registry.record_capabilities("empty", Capabilities(facts={}, shards={"digits": 7}))
    assert site.of(DeviceAvailable) == [DeviceAvailable(device_id="empty")]
    assert site.fleet.view().idle == ["empty", "pi"]


def test_past_its_deadline_an_order_is_recalled_and_given_up_and_the_wait_ends_there(site):
    site.give(training(deadline_s=30.0), evaluation())
    assert site.events() == []
    site.clock.jumped_s += 31.0
    assert lost(site) == [("a-1", UpdateStatus.LOST, "not back within 30 s")]
    assert site.bell.commands == [("pi", "finish-early", "run-1/a-1")]
    site.reply(101)
    assert site.events() == []
    site.clock.jumped_s += EVALUATION_DEADLINE_S
    assert [key for key, _, _ in lost(site)] == ["e-1"]
    site.give(training("a-2", deadline_s=0.05))
    started = time.monotonic()
    assert [type(event) for event in site.fleet.wait(site.clock() + 30.0)] == [InstructionFailed]
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *(({"body": body}, "unusable reply") for body in (b"", b"not a codec body")),
        ({"metrics": {"iterations": -1}}, "at least 0"),
        ({"metrics": {"num_examples": 2.5}}, "whole number"),
        *(({"metrics": {"num_examples": value}}, "not a number") for value in (1e300, 10**400, True)),
        *(({"metrics": {"compute_s": value}}, "not a number") for value in ("fast", float("inf"), None)),
        ({"metrics": {"compute_s": float("nan")}}, "finite"),
        *(({"all_metrics": value}, "") for value in (None, [], "text", {})),
        *(({"metrics": {"accuracy": value, "loss": 0.0}}, "") for value in (1.5, float("nan"))),
        ({"metrics": {"accuracy": 0.5, "loss": None}}, ""),
        ({"assignment": f"{RUN}/other", "instruction": "instruction-1"}, "run-1/other"),
    ],
    ids=str,
)
def test_a_reply_that_makes_no_sense_is_refused_and_ends_nothing_else(site, options, reason):
    is_evaluation = "accuracy" in options.get("metrics", {})
    site.give(evaluation(key="a-1") if is_evaluation else training())
    site.reply(101, **({"body": b""} if is_evaluation else {}), **options)
    ((key, outcome, text),) = lost(site)
    assert (key, outcome) == ("a-1", UpdateStatus.REJECTED)
    assert reason in text


def test_an_error_reply_is_a_failure_of_what_it_replies_to_with_its_reason(site):
    site.give(training("a"), training("b"))
    site.reply(101, "a", error="TaskError: no shard" + "x" * 9000, body=b"")
    site.fleet.post(
        Reply(node_id=101, instruction_id="instruction-2", header={"error": "malformed reply"}, body=b"", bytes_up=1,
              bytes_down=1)
    )  # fmt: skip
    (key, outcome, reason), second = lost(site)
    assert (key, outcome, reason[:19], len(reason)) == ("a", UpdateStatus.FAILED, "TaskError: no shard", 500)
    assert second == ("b", UpdateStatus.FAILED, "malformed reply")


def test_a_reply_that_nobody_waits_for_is_dropped_and_one_that_comes_twice_counts_once(site):
    site.add("pi-2")
    site.events()
    site.give(training())
    site.reply(101, "a-99")
    site.reply(102)  # another device's node
    site.reply(999)  # a node that nobody knows
    for assignment in ("run-0/a-1", None, [1]):
        site.reply(101, assignment=assignment)
    assert (site.events(), site.fleet.view().busy) == ([], {"pi": ["a-1"]})
    site.reply(101)
    site.reply(101)
    assert len(site.events()) == 1
    site.reply(101)
    assert site.events() == []


def test_replies_that_come_together_are_decoded_no_further_than_memory_allows():
    site = Site(max_decoded_bytes=13)
    for number, name in enumerate("abc"):
        site.add(name)
        site.give(training(key=f"a-{number}", device=name))
    site.events()
    site.beat("c")  # came before the replies and is looked at after them
    for number in range(3):
        site.reply(101 + number, key=f"a-{number}")
    assert [event.assignment_id for event in site.of(Update)] == ["a-0", "a-1"]
    assert [event.assignment_id for event in site.of(Update)] == ["a-2"]
    assert site.fleet.view().busy == {}


def test_after_a_restart_of_its_agent_a_device_gets_its_work_again(site):
    site.give(training("a"), evaluation(key="e"))
    restart(site)
    assert site.of(InstructionFailed) == []
    assert [header["assignment"] for _, _, header, _ in site.mail.sent] == [f"{RUN}/{key}" for key in "aeae"]
    assert set(site.mail.open) == {"instruction-3", "instruction-4"}
    site.reply(101, "a", instruction="instruction-1")
    assert len(site.of(Update)) == 1
    assert set(site.mail.open) == {"instruction-4"}, "the answer to the first message makes the second one void"


def test_what_was_handed_out_and_is_not_held_is_sent_again_when_it_had_time_to_arrive(site):
    def sent(after_s, seq, **held):
        site.clock.jumped_s += after_s
        site.beat("pi", seq=seq, **held)
        assert site.events() == []
        return set(site.mail.open)

    site.give(training())
    assert sent(10 * RESEND_AFTER_S, 1) == {"instruction-1"}, "it still waits to be pulled"
    site.mail.delivered.add("instruction-1")
    assert sent(0, 2) == sent(RESEND_AFTER_S - 1, 3) == {"instruction-1"}, "it may still be on its way"
    assert sent(1, 4) == {"instruction-2"}
    site.mail.delivered.add("instruction-2")
    assert sent(0, 5) == sent(10 * RESEND_AFTER_S, 6, holding=["a-1"]) == {"instruction-2"}
    site.mail.cancel("instruction-2")  # Flower has dropped the place of the answer
    assert sent(RESEND_AFTER_S, 7, holding=["a-1"]) == {"instruction-3"}


def test_a_reply_in_the_same_breath_as_a_heartbeat_without_it_is_taken(site):
    site.give(training())
    site.mail.delivered.add("instruction-1")
    site.beat("pi")
    site.events()
    site.clock.jumped_s += RESEND_AFTER_S
    site.beat("pi", seq=2)
    site.reply(101)
    assert (len(site.of(Update)), len(site.mail.sent)) == (1, 1)


def test_what_flower_refuses_and_what_is_for_a_stranger_is_a_failure_and_no_exception(site):
    site.give(training("a", "stranger"), evaluation("stranger"))
    assert [(key, outcome) for key, outcome, _ in lost(site)] == [
        ("a", UpdateStatus.FAILED),
        ("e-1", UpdateStatus.FAILED),
    ]
    site.mail.refuses = "finished run"
    site.give(training())
    assert lost(site) == [("a-1", UpdateStatus.FAILED, "finished run")]
    assert (site.mail.sent, site.bell.rung, site.fleet.view().idle) == ([], [], ["pi"])


def test_a_recall_is_sent_once_to_each_agent_that_has_the_work(site):
    site.give(FinishEarlyInstruction(assignment_id="a-9", device_id="pi"), training())
    for _ in range(3):
        site.give(FinishEarlyInstruction(assignment_id="a-1", device_id="pi"))
    assert site.bell.commands == [("pi", "finish-early", "run-1/a-1")]
    restart(site)
    site.events()
    assert site.bell.commands == [("pi", "finish-early", "run-1/a-1")] * 2


def test_progress_is_passed_on_under_the_assignments_own_id(site):
    site.give(training())
    report = {"iteration": 3, "seconds_per_iteration": 0.1, "age_s": 0.0}
    for device, key in (("pi", "run-1/a-1"), ("pi", "run-0/a-1"), ("other", "run-1/a-1"), ("pi", "a-1")):
        site.fleet.post(Progress(device_id=device, assignment_id=key, **report))
    (progress,) = site.events()
    assert (progress.device_id, progress.assignment_id, progress.iteration) == ("pi", "a-1", 3)
    assert site.fleet.view().progress == {"pi": progress}


def test_a_device_that_asks_goes_on_once_the_strategy_has_seen_it_and_has_not_recalled_it(site):
    for name in ("other", "older"):
        site.add(name)
    for name in ("pi", "other"):
        site.registry.record_capabilities(name, Capabilities(facts={"queries": True}, shards={"digits": 10}))
    query, asking = TrainConfig(iterations=100, report_progress=True, fallback_iterations=4), ("pi", "other", "older")
    site.give(*(replace(training(f"a-{n}", name), plan=query) for n, name in enumerate(asking, 1)))
    site.give(training("a-4"))
    for device, key in (("pi", "a-1"), ("other", "a-2"), ("older", "a-3"), ("other", "a-1"), ("pi", "a-4")):
        site.fleet.post(
            Progress(
                device_id=device, assignment_id=f"run-1/{key}", iteration=2, seconds_per_iteration=0.1, age_s=0.0
            )
        )
    site.events()
    assert site.bell.commands == [], "nothing is decided yet"
    site.give(FinishEarlyInstruction(assignment_id="a-2", device_id="other"))
    site.events()
    assert site.bell.commands == [("other", "finish-early", "run-1/a-2"), ("pi", "continue", "run-1/a-1 2")]
    site.events()
    assert len(site.bell.commands) == 2, "each query has one answer"


def test_a_wait_ends_at_its_time_a_stop_is_passed_on_and_an_interruption_ends_it_at_once(site):
    started = site.clock()
    assert site.fleet.wait(started + 0.05) == []
    assert site.clock() >= started + 0.05
    site.fleet.post(StopRequested(reason="enough"))
    assert site.events() == [StopRequested(reason="enough")]
    timer = threading.Timer(0.05, site.fleet.post, [InterruptedRunError("the coordinator stops")])
    timer.start()
    with pytest.raises(InterruptedRunError):
        site.fleet.wait(site.clock() + 60.0)
    assert site.clock() < started + 30.0
    timer.join()


def test_what_came_before_an_interruption_is_returned_before_it_is_raised(site):
    site.give(training())
    site.fleet.post(InterruptedRunError("the coordinator stops"))
    site.reply(101)
    (update,) = site.fleet.wait(site.clock() + 60.0)
    assert (update.assignment_id, dict(site.fleet.view().in_flight)) == ("a-1", {})
    with pytest.raises(InterruptedRunError):
        site.fleet.wait(site.clock() + 60.0)


def test_groups_names_and_tasks_choose_the_trainers_and_evaluators_always_take_part():
    site = Site(groups=("field", "lab"), names=("a", "b", "d"))
    for name, groups, tasks in (
        ("a", ("field",), ("digits",)), ("b", ("home",), ("digits",)), ("c", ("lab",), ("digits",)),
        ("d", ("lab", "home"), ("mnist",)),
    ):  # fmt: skip
        site.add(name, groups=groups, tasks=tasks)
    site.add("judge", role="evaluator")
    site.add("other-judge", role="evaluator", tasks=("mnist",))
    assert (sorted(site.fleet.view().devices), site.fleet.view().idle) == (["a", "judge"], ["a"])
    site.fleet.close()


def test_with_join_at_start_only_those_of_the_first_training_take_part():
    site = Site(join_at_start=True)
    site.add("judge", role="evaluator")
    site.give(evaluation("judge"))
    for name in "ab":
        site.add(name)
    assert site.fleet.view().idle == ["a", "b"], "an evaluation is no start"
    site.give(training("t", "a"))
    site.add("c")
    site.add("later-judge", role="evaluator")
    site.say("b", "offline")
    assert sorted(site.fleet.view().devices) == ["a", "judge", "later-judge"]
    site.say("b", "online", boot="boot-2", session=2)
    assert sorted(site.fleet.view().devices) == ["a", "b", "judge", "later-judge"]
    site.fleet.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_closing_recalls_what_is_out_unless_it_will_be_asked_for_again_and_stops_listening(goes_on):
    site = Site()
    site.add("pi")
    site.give(training("a"), training("b"))
    site.fleet.close(will_resume=goes_on)
    assert [argument for _, _, argument in site.bell.commands] == ([] if goes_on else ["run-1/a", "run-1/b"])
    assert site.mail.is_closed
    site.events()
    site.say("pi", "offline")
    assert site.events() == []


def test_news_from_many_threads_is_all_heard(site):
    keys = [f"a-{number}" for number in range(40)]
    site.give(*(training(key) for key in keys))
    threads = [threading.Thread(target=site.reply, args=(101, key)) for key in keys]
    threads += [threading.Thread(target=site.beat, args=("pi",), kwargs={"seq": n}) for n in range(10)]
    for thread in threads:
        thread.start()
    heard, deadline = [], time.monotonic() + 60
    while len(heard) < len(keys):
        assert time.monotonic() < deadline
        heard += [event.assignment_id for event in site.fleet.wait(site.clock() + 0.1)]
    for thread in threads:
        thread.join()
    assert sorted(heard) == sorted(keys)


class Deltas:
    """A site with a device that holds version 0 and has been sent what changed until version 1."""

    def __init__(self):
        self.site = Site(has_deltas=True)
        self.site.add("pi")
        self.site.give(training("a-0"))
        self.site.source.version = 1
        self.site.reply(101, "a-0")
        self.site.events()
        self.site.give(training("a-1", base=1))

    def needs_dense(self, instruction=None):
        """The device answers the last message, or an earlier one, that it has no model to change."""
        newest = self.site.fleet._in_flight.get(f"{RUN}/a-1").message_id
        error = "needs dense: holds nothing"
        self.site.reply(101, error=error, requires_full_model=True, body=b"", instruction=instruction or newest)
        return newest

    def sent(self):
        """Whether the last message is about a delta, and what its header says of that."""
        _, _, header, body = self.site.mail.sent[-1]
        return body.inline == b"delta", {
            name: header[name] for name in ("keeps_model", "base_version") if name in header
        }


@pytest.fixture
def deltas():
    made = Deltas()
    yield made
    made.site.fleet.close()


def test_a_device_that_needs_the_whole_model_gets_it_once_and_nothing_is_lost(deltas):
    site = deltas.site
    assert deltas.sent() == (True, {"keeps_model": True, "base_version": 0})
    site.source.version = 2
    deltas.needs_dense()
    assert site.events() == []
    assert deltas.sent() == (False, {"keeps_model": True})
    assert (site.mail.sent[-1][2]["assignment"], site.fleet.view().busy) == ("run-1/a-1", {"pi": ["a-1"]})
    deltas.needs_dense()
    assert lost(site) == [("a-1", UpdateStatus.FAILED, "needs dense: holds nothing")], "it had it"
    site.give(training("a-2", base=site.source.version))
    assert deltas.sent() == (False, {"keeps_model": True}), "after a loss nobody knows what the device holds"


def test_a_new_agent_is_sent_the_whole_model_and_the_next_time_a_delta(deltas):
    site = deltas.site
    about_the_delta = site.fleet._in_flight.get(f"{RUN}/a-1").message_id
    restart(site)
    assert site.of(InstructionFailed) == []
    assert deltas.sent() == (False, {"keeps_model": True})
    deltas.needs_dense(about_the_delta)  # it still got the delta: what it says of that costs nothing
    assert (site.events(), site.fleet.view().busy) == ([], {"pi": ["a-1"]})
    site.reply(101)
    site.source.version = 2
    assert len(site.of(Update)) == 1
    site.give(training("a-2", base=site.source.version))
    assert deltas.sent() == (True, {"keeps_model": True, "base_version": 1})


def test_what_needs_a_whole_model_that_is_gone_is_lost_and_not_failed(deltas):
    deltas.site.fleet._distributor._cache.clear()
    deltas.needs_dense()
    ((key, outcome, reason),) = lost(deltas.site)
    assert (key, outcome) == ("a-1", UpdateStatus.LOST)
    assert "kept no longer" in reason


def adopt(site, *orders):
    """Takes up orders of an earlier coordinator."""
    book = FleetState()
    for order in orders:
        book.assign(order)
    site.fleet.view().restore_from(book)
    site.fleet.resume_in_flight(
        [DispatchedInstruction(instruction=order, dispatched_s=site.clock()) for order in orders], site.source
    )
    site.give()


@pytest.mark.parametrize(
    ("had_updates", "said"), [(False, "waiting for 3 more boards"), (True, "waiting for a board")]
)
def test_a_run_that_goes_on_says_that_it_waits_for_its_minimum_unless_it_had_updates(had_updates, said):
    site, before = Site(min_devices=3), FleetState()
    if had_updates:
        before.record_speed("pi", UpdateMetrics(num_examples=10, iterations=4, loss=0.5, compute_s=2.0))
    site.fleet.view().restore_from(before)
    site.events()
    site.clock.jumped_s += SHOW_AFTER_S
    site.events()
    assert site.shown[0].startswith(said)


def test_only_the_answer_is_wanted_of_a_device_that_holds_an_earlier_coordinators_order(site):
    adopt(site, training())
    assert site.mail.sent == []
    site.beat("pi", holding=["a-1"])
    assert site.events() == []
    ((node_id, kind, header, body),) = site.mail.sent
    assert (node_id, kind, header["assignment"], body.inline) == (101, "train", "run-1/a-1", b"")
    assert (header["has_stored_reply"], header["has_model"]) == (True, False)
    restart(site)
    site.events()
    assert [header.get("has_stored_reply") for _, _, header, _ in site.mail.sent] == [True, None], (
        "it is given the work again"
    )
    assert len(site.mail.open) == 1
    site.reply(101)
    (update,) = site.of(Update)
    assert (update.assignment_id, update.device_id) == ("a-1", "pi")


def test_a_device_is_asked_what_it_holds_for_an_earlier_coordinator_at_once_and_when_it_is_there():
    site = Site()
    site.add("pi", online=False)
    adopt(site, training())
    assert site.bell.commands == [("pi", "heartbeat", None)]
    site.say("pi", "online")
    site.events()
    assert site.bell.commands == [("pi", "heartbeat", None)] * 2
    site.beat("pi", holding=["a-1"])
    site.events()
    restart(site)
    site.events()
    assert len(site.mail.sent) == 2
    assert len(site.bell.commands) == 2, "its order is one of this coordinator now"


@pytest.mark.parametrize("version", [0, 4])
def test_an_earlier_coordinators_order_that_its_device_lost_is_given_again_while_its_model_is_there(site, version):
    site.source.version = version
    adopt(site, training())
    site.beat("pi")
    if version:
        ((name, outcome, reason),) = lost(site)
        assert (name, outcome) == ("a-1", UpdateStatus.LOST)
        assert "needs a whole model that is kept no longer" in reason
        return
    assert site.events() == []
    ((_, _, header, body),) = site.mail.sent
    assert "has_stored_reply" not in header
    assert decode_body(body.inline, SHAPES)["w"].tolist() == [0.0] * 3


def test_a_device_that_is_not_heard_of_after_a_restart_is_waited_for_so_long_and_no_longer(site):
    adopt(site, training(), evaluation())
    assert [(name, outcome) for name, outcome, _ in lost(site)] == [("e-1", UpdateStatus.FAILED)]
    site.clock.jumped_s += REJOIN_TIMEOUT_S
    ((name, _, reason),) = lost(site)
    assert (name, reason) == ("a-1", "not heard of within 15 s of the coordinator's restart")


def test_an_evaluation_of_the_newest_model_is_asked_for_anew(site):
    site.source.version = 3
    adopt(site, evaluation())
    ((_, kind, header, body),) = site.mail.sent
    assert (kind, header["assignment"]) == ("evaluate", "run-1/e-1")
    assert decode_body(body.inline, SHAPES)["w"].tolist() == [3.0] * 3


class StoreLineage:
    """A lineage without a store."""

    def __init__(self):
        self.lineage_id, self.newest_record = "l1", 10

    def renew(self):
        self.lineage_id += "'"


@pytest.fixture
def traced():
    """A fleet whose instructions name lineage, model and record; `pi` has work of it."""
    lineage: Any = StoreLineage()
    made = Site(lineage=lineage, get_newest_record=lambda: lineage.newest_record)
    made.lineage, made.kinds = lineage, []
    made.fleet._record_event = lambda kind, device, message: made.kinds.append(kind)
    made.node = made.add("pi")
    made.events()
    made.give(training())
    yield made
    made.fleet.close()


def test_an_instruction_names_lineage_model_and_record_and_their_answer_is_taken(traced):
    ((_, _, header, body),) = traced.mail.sent
    named = {name: header[name] for name in ("lineage", "model_sha256", "newest_record")}
    assert named == {
        "lineage": "l1",
        "model_sha256": hashlib.sha256(body.inline).hexdigest(),
        "newest_record": 10,
    }
    traced.reply(traced.node, instruction="instruction-1", **named)
    assert [event.assignment_id for event in traced.of(Update)] == ["a-1"]
    assert traced.kinds == []


@pytest.mark.parametrize("change", [{"lineage": "l0"}, {"lineage": None}, {"model_sha256": "other"}])
def test_an_answer_of_another_lineage_or_model_is_rejected_and_trained_anew(traced, change):
    ((_, _, header, _),) = traced.mail.sent
    named = {name: header[name] for name in ("lineage", "model_sha256", "newest_record")}
    traced.reply(traced.node, instruction="instruction-1", **named | change)
    assert traced.events() == []
    assert traced.kinds == [REJECTED_EVENT_KIND]
    assert [sent[2]["assignment"] for sent in traced.mail.sent] == ["run-1/a-1"] * 2
    traced.reply(traced.node, instruction="instruction-2", **named)
    assert [event.assignment_id for event in traced.of(Update)] == ["a-1"]


def test_a_device_that_answers_again_for_another_model_loses_the_assignment(traced):
    for number in (1, 2):
        traced.reply(traced.node, instruction=f"instruction-{number}", lineage="l1", model_sha256="other")
        failed = lost(traced)
    ((name, outcome, reason),) = failed
    assert (name, outcome) == ("a-1", UpdateStatus.REJECTED)
    assert "it is of model 'other'" in reason


def test_a_device_that_heard_of_a_later_state_begins_a_new_lineage_once_and_its_answer_is_not_counted(traced):
    ((_, _, header, _),) = traced.mail.sent
    named = {name: header[name] for name in ("lineage", "model_sha256")}
    traced.reply(traced.node, instruction="instruction-1", **named, newest_record=11)
    assert traced.events() == []
    assert traced.kinds == [REJECTED_EVENT_KIND, LINEAGE_BEGAN]
    assert traced.mail.sent[-1][2]["lineage"] == "l1'"
    traced.reply(traced.node, instruction="instruction-2", **{**named, "lineage": "l1'"}, newest_record=2**53)
    assert traced.events() == []
    assert traced.lineage.lineage_id == "l1'", "a board that lies begins no second one"
    traced.reply(traced.node, instruction="instruction-3", **{**named, "lineage": "l1'"}, newest_record=10)
    assert [event.assignment_id for event in traced.of(Update)] == ["a-1"]


def test_after_a_restart_an_answer_is_asked_for_under_lineage_and_model(traced):
    adopt(traced, training("a-2"))
    traced.beat("pi", ["a-2"])
    traced.events()
    header = traced.mail.sent[-1][2]
    assert header["has_stored_reply"]
    assert (header["lineage"], header["model_sha256"]) == ("l1", traced.mail.sent[0][2]["model_sha256"])


class Rest:
    """Stands for the coordinator's side of a split run; it has lost the sessions in `lost`."""

    def __init__(self, codec):
        self.codec, self.lost, self.added, self.removed = codec, set(), [], []

    def add(self, wire_id, instruction, source, *, num_examples):
        assert num_examples in {10, None}, "an earlier coordinator counted it"
        self.added.append((wire_id, instruction.device_id, source.version))

    def remove(self, wire_id):
        self.removed.append(wire_id)

    def join(self, wire_id, header, iterations, body):
        assert wire_id == f"{RUN}/a-1"
        if header["split_session"] in self.lost:
            raise SplitSessionError("gone")
        if iterations != 4:
            raise ValueError("other iterations")
        return self.codec.encode({"w": np.full(3, 9.0, np.float32)}, derive_rng(0)), 1000, 2000


@pytest.fixture
def split_site():
    rest = Rest(make_codec("dense", SHAPES))
    made = Site(split=rest, encode_whole=lambda _model, _version: b"whole")
    made.rest, made.node = rest, made.add("pi")
    made.events()
    made.give(training())
    yield made
    made.fleet.close()


def newest_message(site):
    (name,) = site.mail.open
    return name


def test_an_update_of_a_split_network_is_that_of_both_sides_with_the_bytes_of_its_batches(split_site):
    assert split_site.rest.added == [(f"{RUN}/a-1", "pi", 0)]
    split_site.reply(split_site.node, split_session="s1")
    (update,) = split_site.of(Update)
    assert (update.tensors["w"] == 9).all()
    assert update.body == split_site.rest.join(f"{RUN}/a-1", {"split_session": ""}, 4, b"")[0]
    assert update.metrics.bytes_down == 2099
    assert split_site.rest.removed == [f"{RUN}/a-1"]


def test_an_update_whose_rest_is_lost_is_trained_anew_and_no_answer_from_memory_counts(split_site):
    split_site.rest.lost = {"s1"}
    newest = split_site.mail.sent[-1]
    split_site.reply(split_site.node, split_session="s1", instruction="an older message")
    assert split_site.events() == []
    assert split_site.mail.sent[-1] is newest
    for _ in range(MAX_LOST_SESSIONS):
        split_site.reply(split_site.node, split_session="s1", instruction=newest_message(split_site))
        assert split_site.events() == []
    assert split_site.mail.sent[-1][2]["ignores_reply"] is True
    assert split_site.rest.removed == []
    split_site.reply(split_site.node, split_session="s2", instruction=newest_message(split_site))
    assert [event.assignment_id for event in split_site.of(Update)] == ["a-1"]


def test_an_update_whose_rest_is_always_lost_is_lost_in_the_end(split_site):
    split_site.rest.lost = {"s1"}
    for _ in range(MAX_LOST_SESSIONS + 1):
        split_site.reply(split_site.node, split_session="s1", instruction=newest_message(split_site))
        failures = lost(split_site)
    assert failures == [("a-1", UpdateStatus.LOST, "gone")]


def test_an_update_of_other_iterations_than_the_batches_is_rejected(split_site):
    split_site.reply(split_site.node, split_session="s1", metrics={"iterations": 5})
    ((_, outcome, reason),) = lost(split_site)
    assert (outcome, reason) == (UpdateStatus.REJECTED, "unusable reply: other iterations")
    assert split_site.rest.removed == [f"{RUN}/a-1"]


def test_a_device_is_believed_two_downloads_of_the_base_in_all_of_a_run():
    run_header, claimed = {"adapt": {"base_bytes": 100}}, {}

    def count(fetched, device_id="pi-1", header=run_header):
        reply = Reply(
            node_id=1, instruction_id="i", header={"base_bytes": fetched}, body=b"", bytes_up=0, bytes_down=7
        )
        return add_base_traffic(reply, header, device_id, claimed).bytes_down - 7

    assert [count(30), count(1 << 60), count(100), count(100)] == [30, 100, 70, 0]
    assert count(100, "pi-2") == 100
    for refused in (True, -1, 0, "5", None, 1.5):
        assert count(refused, "pi-3") == 0
    assert count(100, None) == count(100, "pi-3", {}) == 0


def test_a_board_that_is_given_to_another_run_is_recalled_and_comes_back_when_that_is_over(site):
    site.registry.open_run(BoardClaim(run_id=RUN, selects=lambda _info: True))
    site.give(training())
    site.registry.open_run(BoardClaim(run_id="other", selects=lambda _info: True, priority=1))
    assert lost(site) == [("a-1", UpdateStatus.LOST, "its board works for run other now")]
    assert ("pi", "finish-early", f"{RUN}/a-1") in site.bell.commands
    assert not site.mail.open, "it is not fetched any more"
    site.reply(101)
    assert site.of(Update) == [], "what it finished all the same counts for nothing"
    assert not site.fleet.view().idle
    site.registry.close_run("other")
    assert site.of(DeviceAvailable) == [DeviceAvailable(device_id="pi")]
    assert list(site.fleet.view().idle) == ["pi"]


def test_a_board_whose_network_keeps_new_work_from_it_finishes_and_only_then_goes_to_another_run(site):
    for run_id in (RUN, "r-other"):
        site.registry.open_run(BoardClaim(run_id=run_id, selects=lambda _info: True))
    site.give(training())
    blocked = {"kind": "download", "reason": "x", "free_at_s": None, "run": RUN}
    site.beat("pi", holding=["a-1"], run=RUN, blocked=blocked)
    site.registry.open_run(BoardClaim(run_id="r-third", selects=lambda _info: True))
    assert lost(site) == []
    assert site.registry.get_allotted_run("pi") == RUN
    site.reply(101)
    assert len(site.of(Update)) == 1
    site.beat("pi", blocked=blocked, seq=2)
    assert site.registry.get_allotted_run("pi") == "r-other"


def test_a_run_that_admits_nobody_after_its_start_leaves_later_boards_to_others():
    site = Site(join_at_start=True)
    site.add("pi")
    site.registry.open_run(BoardClaim(run_id=RUN, selects=lambda _info: True))
    site.registry.open_run(BoardClaim(run_id="other", selects=lambda _info: True))
    site.events()
    site.fleet.view()
    site.give(training())
    site.add("late")
    assert site.registry.get_allotted_run("late") == RUN
    site.events()
    site.fleet.view()
    assert site.registry.get_allotted_run("late") == "other"
    assert site.registry.get_allotted_run("pi") == RUN
    site.fleet.close()
