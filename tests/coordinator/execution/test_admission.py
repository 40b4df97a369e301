"""The door of a run, over a real registry and a live fleet; Flower's books and the bell note what they are told."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

import numpy as np
import pytest
from small_fleet import SmallFleet, beat, status

from edgefl.compression.codec import decode_body, make_codec
from edgefl.coordinator.execution.admission import HEARTBEAT_REQUEST_AFTER_S, REJOIN_TIMEOUT_S, AdmissionRequirements
from edgefl.coordinator.execution.fleet_view import RunSpec
from edgefl.coordinator.execution.headers import RunIncarnations
from edgefl.coordinator.execution.live_fleet import InterruptedRunError, LiveFleet
from edgefl.coordinator.execution.messaging import RESEND_AFTER_S
from edgefl.coordinator.fleet.allotments import BoardClaim
from edgefl.coordinator.fleet.registry import ASK_AGAIN_S
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.errors import NetworkError, RunFailedError
from edgefl.core.protocol import Capabilities
from edgefl.core.types import DeviceAvailable, TensorSpec, TrainConfig, TrainInstruction, Update, derive_rng

SHAPES = (TensorSpec(name="w", shape=(3,)),)
RUN = "run-1"


class Mail:
    def __init__(self) -> None:
        self.sent: dict[str, tuple[int, Any, Any]] = {}
        self.cancelled: list[str] = []
        self.is_cut = False
        self._number = itertools.count(1)

    def send(self, node_id: int, *, kind: str, header: Any, body: Any) -> str:
        assert kind == "train"
        if self.is_cut:
            raise NetworkError("it is gone")
        name = f"i-{next(self._number)}"
        self.sent[name] = node_id, dict(header), body
        return name

    def is_known(self, name: str) -> bool:
        return name in self.sent and name not in self.cancelled

    def is_delivered(self, name: str) -> bool:
        return True

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def close(self) -> None: ...


class Bell:
    def __init__(self) -> None:
        self.commands: list[tuple[str, str, str | None]] = []

    def notify(self, device_id: str) -> None: ...

    def send_command(self, device_id: str, command: Any) -> None:
        self.commands.append((device_id, str(command.kind), command.argument))


class Source:
    version = 0

    def model(self) -> Any:
        return {"w": np.ones(3, np.float32)}

    def device_model(self, subject: str) -> Any:
        raise NotImplementedError

    def changed(self, since: int) -> Any:
        raise NotImplementedError


class Site:
    """Devices pi-1, pi-2, … with shards of digits, and a run that asks them by `terms`."""

    def __init__(
        self,
        number: int = 2,
        *,
        names: tuple[str, ...] = (),
        needs_torch: bool = False,
        wait_s: float | None = None,
        conditions: Any = None,
        **terms: Any,
    ) -> None:
        self.jumped_s, self.mail, self.bell, self.notes = 0.0, Mail(), Bell(), list[tuple[str, str, str]]()
        self.waits: list[str] = []
        self.registry = SmallFleet(clock=self.clock).registry
        self.codec = make_codec("dense", SHAPES)
        for n in range(1, number + 1):
            self.add(f"pi-{n}", 100 + n)
        run = RunSpec(
            run_id=RUN,
            task="digits",
            header={"v": 2, "run": RUN, "task": "digits", **({"conditions": conditions} if conditions else {})},
            groups=(),
            names=names,
            join_at_start=False,
            encode=lambda model, version: self.codec.encode(model, derive_rng(version)),
            decode=lambda body: decode_body(body, SHAPES),
            needs_torch=needs_torch,
            wait_s=wait_s,
            incarnations=RunIncarnations(RUN),
        )
        self.fleet = LiveFleet(
            run=run,
            transport=self.mail,
            registry=self.registry,
            notifier=self.bell,
            clock=self.clock,
            requirements=AdmissionRequirements(model_fingerprint="L", memory_bytes=48, disk_bytes=24, **terms),
            record_event=lambda *note: self.notes.append(note),
            on_waiting=self.waits.append,
        )
        self.fleet.dispatch((), Source())

    def clock(self) -> float:
        return time.monotonic() + self.jumped_s

    def add(self, name: str, node_id: int, tasks: tuple[str, ...] = ("digits",), *, online: bool = True) -> None:
        self.registry.add(name, node_id=node_id, role="trainer", groups=(), examples=dict.fromkeys(tasks, 10))
        if online:
            self.registry.record_status(name, status())

    def events(self) -> list[Any]:
        return list(self.fleet.wait(self.clock()))

    def joined(self) -> list[str]:
        return [event.device_id for event in self.events() if isinstance(event, DeviceAvailable)]

    def asked(self, phase: str) -> dict[str, str]:
        """Device -> instruction, of the questions of a phase that are out."""
        found = {}
        for name, (node_id, header, _) in self.mail.sent.items():
            if header.get("phase") == phase and name not in self.mail.cancelled:
                found[f"pi-{node_id - 100}"] = name
        return found

    def answer(self, device: str, phase: str, *, up: int = 0, down: int = 0, **header: Any) -> None:
        self.reply(device, self.asked(phase)[device], {"ready": True, **header}, up=up, down=down)

    def reply(self, device, instruction, header, *, body=b"", up=0, down=0):
        node_id = 100 + int(device.removeprefix("pi-"))
        self.fleet.post(
            Reply(node_id=node_id, instruction_id=instruction, header=header, body=body, bytes_up=up, bytes_down=down)
        )

    def pass_all(self, *devices: str) -> list[str]:
        self.events()
        for phase in ("can", "prepare"):
            for device in devices:
                self.answer(device, phase)
            joined = self.joined()
        return joined

    def refuse(self, device: str, reason: str) -> None:
        self.answer(device, "can", ready=False, reason=reason)

    def left_out(self) -> dict[str, str]:
        return {device: reason for kind, device, reason in self.notes if kind == "device-rejected"}

    def fails(self, told: str) -> None:
        with pytest.raises(RunFailedError, match=told):
            self.events()

    def beat(self, name: str, *, assignment: str | None = None, seq: int = 1) -> None:
        self.registry.record_heartbeat(name, beat(seq, assignment=assignment, run="other"))


ORDER = TrainInstruction(assignment_id="a", device_id="pi-1", base_version=0, plan=TrainConfig(iterations=1))


def test_nobody_is_idle_before_all_that_were_asked_are_ready() -> None:
    site = Site()
    assert site.joined() == []
    assert set(site.asked("can")) == {"pi-1", "pi-2"}
    assert (site.pass_all("pi-1"), list(site.fleet.view().idle)) == ([], [])
    assert site.pass_all("pi-2") == ["pi-1", "pi-2"] == list(site.fleet.view().idle)
    assert site.notes == []
    site.add("pi-3", 103)  # one that comes while the run goes passes the same door
    site.events()
    assert list(site.fleet.view().idle) == ["pi-1", "pi-2"]
    assert site.pass_all("pi-3") == ["pi-3"]


def test_the_question_says_what_the_run_needs_and_the_second_one_brings_the_model() -> None:
    site = Site(1)
    site.events()
    _, header, body = site.mail.sent[site.asked("can")["pi-1"]]
    assert (header["assignment"], header["layout"]) == ("run-1/can", "L")
    assert header["needs"] == {"memory_bytes": 48, "disk_bytes": 24}
    assert (header["edgefl"].count("."), body.inline) == (2, b"")
    site.answer("pi-1", "can")
    site.events()
    _, header, body = site.mail.sent[site.asked("prepare")["pi-1"]]
    assert (header["assignment"], header["version"]) == ("run-1/prepare", 0)
    assert decode_body(body.inline, SHAPES)["w"].tolist() == [1.0] * 3


def test_a_model_that_was_fetched_ahead_is_not_sent_again_and_its_bytes_are_counted() -> None:
    site = Site(1)
    site.events()
    site.answer("pi-1", "can", up=5, down=7)
    site.events()
    site.answer("pi-1", "prepare", up=11, down=1300)
    site.events()
    site.fleet.dispatch([ORDER], Source())
    name, (_, header, body) = next(reversed(site.mail.sent.items()))
    assert (header["prefetched_version"], body.inline) == (0, b"")
    metrics = {"iterations": 1, "num_examples": 1, "loss": 0.5, "compute_s": 0.1}
    encoded = site.codec.encode({"w": np.ones(3, np.float32)}, derive_rng(0))
    told = {"v": 2, "assignment": "run-1/a", "metrics": metrics}
    site.reply("pi-1", name, told, body=encoded, up=100, down=200)
    (update,) = [event for event in site.events() if isinstance(event, Update)]
    assert (update.metrics.bytes_up, update.metrics.bytes_down) == (116, 1507)
    assert dict(update.metrics.extra) == {"bytes_up_ahead": 16.0, "bytes_down_ahead": 1307.0}


def test_a_device_that_lost_what_it_had_fetched_is_sent_the_whole_model() -> None:
    site = Site(1)
    site.pass_all("pi-1")
    site.fleet.dispatch([ORDER], Source())
    name = next(reversed(site.mail.sent))
    site.reply("pi-1", name, {"assignment": "run-1/a", "error": "gone", "requires_full_model": True})
    assert site.events() == []
    _, header, body = site.mail.sent[next(reversed(site.mail.sent))]
    assert "prefetched_version" not in header
    assert decode_body(body.inline, SHAPES)["w"].tolist() == [1.0] * 3


def test_one_that_cannot_is_left_out_with_its_reason_until_it_has_changed_and_the_others_begin() -> None:
    site = Site()
    site.events()
    site.refuse("pi-1", "it has no  torch\n")
    assert site.pass_all("pi-2") == ["pi-2"] == list(site.fleet.view().idle)
    assert site.notes == [("device-rejected", "pi-1", "it has no torch")]
    site.registry.record_capabilities("pi-1", Capabilities(facts={}, shards={"digits": 10}))
    site.events()
    site.answer("pi-1", "can")
    site.events()
    _, header, body = site.mail.sent[site.asked("prepare")["pi-1"]]
    assert ("version" in header, body.inline) == (False, b""), "by then there is a newer one"
    site.answer("pi-1", "prepare")
    assert site.joined() == ["pi-1"]
    assert site.notes[-1] == ("device-admitted", "pi-1", "it is ready now")


@pytest.mark.parametrize(("how", "holder"), [("a failed send", RUN), ("refused", "other"), ("accepted", RUN)])
def test_a_board_that_cannot_goes_to_another_run_unless_only_one_send_failed(how: str, holder: str) -> None:
    site = Site(1)
    site.registry.open_run(BoardClaim(run_id=RUN, selects=lambda _: True, priority=1))
    site.registry.open_run(BoardClaim(run_id="other", selects=lambda _: True))
    site.mail.is_cut = how == "a failed send"
    with contextlib.suppress(RunFailedError):  # nobody else may come
        site.events()
    if how == "refused":
        site.refuse("pi-1", "no disk")
        with contextlib.suppress(RunFailedError):
            site.events()
    if how == "accepted":
        site.registry.decline_board("pi-1", "other")
        site.registry.decline_board("pi-1", RUN)
        site.answer("pi-1", "can")
        site.events()
        site.answer("pi-1", "prepare")
        site.events()
        site.registry.accept_board("pi-1", "other")
    assert site.registry.get_allotted_run("pi-1") == holder


def test_one_that_hands_its_question_back_is_asked_again_when_it_may_train() -> None:
    site = Site()
    site.events()
    site.answer(
        "pi-1", "can", ready=False, reason="x", handed_back={"kind": "pause", "reason": "paused on the board"}
    )
    assert site.pass_all("pi-2") == ["pi-2"]
    assert site.registry.get_blocker("pi-1") is not None
    site.beat("pi-1")
    assert site.pass_all("pi-1") == ["pi-1"]


def test_a_run_whose_conditions_hold_on_no_board_waits_until_one_is_free() -> None:
    site = Site(1)
    site.events()
    night = {"kind": "hours", "reason": "outside its hours", "run": RUN}
    site.answer("pi-1", "can", ready=False, reason="outside its hours", handed_back=night)
    for _ in range(3):
        site.events()
        site.jumped_s += 100.0
    site.registry.record_heartbeat("pi-1", beat(1, blocked=night))
    assert (site.events(), site.asked("can")) == ([], {"pi-1": "i-1"}), "it is not asked again"
    site.jumped_s += ASK_AGAIN_S
    site.registry.record_heartbeat("pi-1", beat(2, blocked={**night, "run": "another"}))
    site.registry.tick()
    assert site.pass_all("pi-1") == ["pi-1"]
    assert [kind for kind, *_ in site.notes] == ["run-waiting"]


def test_a_board_whose_agent_knows_no_conditions_of_a_run_takes_no_part_in_one_with_some() -> None:
    site = Site(2, conditions={"mains": True})
    site.registry.record_capabilities("pi-2", Capabilities(facts={"conditions": True}, shards={"digits": 10}))
    site.events()
    assert set(site.asked("can")) == {"pi-2"}
    assert site.pass_all("pi-2") == ["pi-2"]
    site.registry.record_capabilities("pi-1", Capabilities(facts={"conditions": True}, shards={"digits": 10}))
    assert site.pass_all("pi-1") == ["pi-1"], "once it is updated"


def test_a_run_that_nobody_can_do_fails_with_all_reasons_when_nobody_else_may_come() -> None:
    site = Site()
    site.events()
    site.refuse("pi-1", "no disk")
    assert site.events() == []
    site.refuse("pi-2", "no memory")
    site.fails("no device can take part: pi-1: no disk; pi-2: no memory")
    site = Site(1, ready_s=10.0)
    site.add("pi-2", 102, online=False)
    site.events()
    site.refuse("pi-1", "no disk")
    assert site.events() == []
    site.jumped_s += 10.5
    site.fails("pi-1: no disk")


def test_a_run_without_any_device_waits() -> None:
    site = Site(0, ready_s=5.0)
    site.events()
    site.jumped_s += 100.0
    assert site.events() == []
    site.add("pi-1", 101)
    assert site.pass_all("pi-1") == ["pi-1"]


def test_when_all_are_required_one_refusal_ends_the_run_at_once_and_the_others_forget() -> None:
    site = Site(3, require="all", ready_s=10.0)
    site.pass_all("pi-1")
    site.refuse("pi-2", "no shard")
    site.fails(r"all devices are required: pi-2: no shard; pi-3: it has not answered yet \(can\)")
    site.fleet.close()
    assert {device for device, kind, argument in site.bell.commands if (kind, argument) == ("end", RUN)} >= {"pi-1"}
    assert "pi-2" not in {device for device, kind, _ in site.bell.commands if kind == "end"}


@pytest.mark.parametrize(("what", "told"), [("away", "it was never seen"), ("drained", "it is draining")])
def test_a_required_device_that_takes_no_work_is_waited_for_and_then_named(what: str, told: str) -> None:
    site = Site(1, require="all", ready_s=10.0)
    site.add("pi-2", 102, online=what == "drained")
    assert site.pass_all("pi-1") == []
    site.registry.set_drained("pi-2", drained=what == "drained")
    site.events()
    site.jumped_s += 9.0
    assert site.events() == []
    site.jumped_s += 1.5
    site.fails(f"pi-2: {told}")


def test_a_run_without_a_device_says_whom_it_lacks_and_gives_up_at_its_limit() -> None:
    site = Site(1, names=("pi-1", "pi-2", "pi-9"), wait_s=20.0)
    site.add("pi-2", 102, online=False)
    site.registry.record_status("pi-1", status("offline"))
    site.add("other", 103)
    site.events()
    site.jumped_s += 3.0
    assert site.events() == []
    lacking = (
        "waiting for a board with a shard for digits: none is ready, pi-1 is offline, pi-2 was never seen, "
        "pi-9: there is no such device in the fleet"
    )
    assert site.waits == [lacking]
    site.jumped_s += 18.0
    site.fails(f"gave up after devices.wait_s = 20 s: {lacking}")


def test_a_run_that_has_started_is_interrupted_at_that_limit_so_that_it_can_go_on() -> None:
    site = Site(1, wait_s=20.0)
    assert site.pass_all("pi-1") == ["pi-1"]
    order = TrainInstruction(assignment_id="r1", device_id="pi-1", base_version=0, plan=TrainConfig(iterations=1))
    site.fleet.dispatch([order], Source())
    site.registry.remove("pi-1")
    site.events()
    site.events()
    site.jumped_s += 21.0
    with pytest.raises(InterruptedRunError, match=r"gave up after devices\.wait_s = 20 s: waiting for a board"):
        site.events()


def test_a_required_device_that_comes_in_time_lets_the_run_begin() -> None:
    site = Site(1, require="all", ready_s=10.0)
    site.add("pi-2", 102, online=False)
    assert site.pass_all("pi-1") == []
    site.registry.record_status("pi-2", status())
    assert site.pass_all("pi-2") == ["pi-1", "pi-2"]


def test_one_that_was_ready_and_is_drained_before_the_start_gets_no_work() -> None:
    site = Site(require=2, ready_s=10.0)
    site.pass_all("pi-1")
    site.registry.set_drained("pi-1", drained=True)
    assert site.pass_all("pi-2") == []
    assert list(site.fleet.view().idle) == [], "one of two is ready"


def test_boards_without_torch_are_not_waited_for_unless_they_are_named() -> None:
    without = Capabilities(facts={"backends": ["numpy"]}, shards={"digits": 10})
    site = Site(require="all", needs_torch=True, ready_s=10.0)
    site.registry.record_capabilities("pi-2", without)
    assert site.pass_all("pi-1") == ["pi-1"]
    named = Site(names=("pi-1", "pi-2"), require="all", needs_torch=True, ready_s=10.0)
    named.registry.record_capabilities("pi-2", without)
    named.fails("pi-2: it has no torch, and can only use finished models")


def test_a_run_that_is_taken_up_again_waits_a_moment_for_those_who_took_part() -> None:
    site = Site(1, previous_devices=("pi-1", "pi-2"))
    assert site.pass_all("pi-1") == []
    site.add("pi-2", 102)
    assert site.pass_all("pi-2") == ["pi-1", "pi-2"]
    lone = Site(1, previous_devices=("pi-1", "pi-2"))
    assert lone.pass_all("pi-1") == []
    lone.jumped_s += REJOIN_TIMEOUT_S
    assert lone.joined() == ["pi-1"]


def test_so_many_must_be_ready_and_too_few_within_the_time_are_told_by_name() -> None:
    site = Site(3, require=2, ready_s=10.0)
    site.events()
    site.refuse("pi-3", "no")
    assert site.pass_all("pi-1") == []
    assert site.pass_all("pi-2") == ["pi-1", "pi-2"]
    assert site.left_out() == {"pi-3": "no"}
    site = Site(2, require=2, ready_s=10.0)
    assert site.pass_all("pi-1") == []
    site.jumped_s += 11.0
    site.fails("2 devices are required and 1 are ready: pi-2: it has not answered")


def test_one_that_does_not_answer_in_time_is_left_out_and_let_in_when_it_does() -> None:
    site = Site(ready_s=10.0)
    assert site.pass_all("pi-1") == []
    site.jumped_s += 10.5
    assert site.joined() == ["pi-1"]
    assert site.left_out() == {"pi-2": "it has not answered within 10 s (can)"}
    assert site.pass_all("pi-2") == ["pi-2"]


def test_one_that_is_busy_with_something_older_is_recalled_and_not_waited_for() -> None:
    site = Site()
    site.pass_all("pi-1")
    site.jumped_s += HEARTBEAT_REQUEST_AFTER_S + 0.01
    assert site.events() == []
    assert [(device, kind) for device, kind, _ in site.bell.commands] == [("pi-2", "heartbeat")]
    site.beat("pi-2", assignment="other/v1-a1-pi-2")
    assert site.joined() == ["pi-1"]
    assert ("pi-2", "finish-early", "other/v1-a1-pi-2") in site.bell.commands
    assert site.left_out() == {"pi-2": "it is busy with other/v1-a1-pi-2"}


def test_one_that_takes_long_to_get_ready_is_waited_for_and_not_recalled() -> None:
    site = Site(ready_s=100.0)
    site.pass_all("pi-1")
    site.answer("pi-2", "can")
    site.events()
    query = site.asked("prepare")["pi-2"]
    for number in range(1, 4):
        site.jumped_s += RESEND_AFTER_S + 1.0
        site.beat("pi-2", assignment=f"{RUN}/prepare", seq=number)
        assert site.joined() == []
    assert "finish-early" not in {kind for _, kind, _ in site.bell.commands}
    assert site.asked("prepare")["pi-2"] == query
    site.answer("pi-2", "prepare")
    assert site.joined() == ["pi-1", "pi-2"]


def test_a_question_that_got_lost_or_whose_agent_restarts_is_asked_again() -> None:
    site = Site(1, ready_s=100.0)
    site.events()
    first = site.asked("can")["pi-1"]
    site.jumped_s += RESEND_AFTER_S + 1.0
    site.beat("pi-1")  # handed out, and not here: it may still be on its way
    site.events()
    assert site.asked("can")["pi-1"] == first
    site.jumped_s += RESEND_AFTER_S + 1.0
    site.beat("pi-1", seq=2)
    site.events()  # says that the run waits
    site.events()
    second = site.asked("can")["pi-1"]
    assert second != first
    site.registry.record_status("pi-1", status(boot="another", session=2))
    site.events()
    assert site.asked("can")["pi-1"] != second
    assert site.pass_all("pi-1") == ["pi-1"]


def test_an_older_agent_that_knows_no_questions_is_let_in() -> None:
    site = Site(1)
    site.events()
    site.reply("pi-1", site.asked("can")["pi-1"], {"error": "KeyError: 'version'"})
    assert site.joined() == ["pi-1"]


def test_one_that_is_named_and_has_no_shard_is_left_out_by_name() -> None:
    site = Site(1, names=("pi-1", "pi-2", "pi-3"))
    site.add("pi-2", 102, ())
    assert site.pass_all("pi-1") == ["pi-1"]
    assert {device: reason.partition(";")[0] for device, reason in site.left_out().items()} == {
        "pi-2": "it has no shard for task 'digits'",
        "pi-3": "there is no such device in the fleet",
    }
