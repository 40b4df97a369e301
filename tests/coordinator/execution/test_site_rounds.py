"""Rounds of a site: the answer of a gateway is the mean over its boards, whatever happens to it or to them."""

import os
import threading
import time

import numpy as np
import pytest
from site_boards import EXAMPLES, MOVES, RUN, SPEC, TASK, SomeBoards, displacement, make_header, mean_of

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.error_feedback import ErrorFeedback
from edgefl.coordinator.execution.live_fleet import InterruptedRunError
from edgefl.coordinator.execution.site_records import INDEX_FILE, RoundIndex, RoundRecord
from edgefl.coordinator.execution.site_round import EARLY_S, PATIENCE_S, combine_evaluations
from edgefl.coordinator.execution.site_rounds import MAX_KEPT_ROUNDS
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.errors import DataError, StoreFullError
from edgefl.core.metrics import MAX_SUM, MetricSet
from edgefl.core.sites import SITE_KEY
from edgefl.core.types import (
    EvaluateResult,
    SparseTensor,
    Update,
    UpdateMetrics,
    derive_rng,
)
from edgefl.storage.store import REJECTED_EVENT_KIND
from edgefl.strategies.aggregation import StreamingMean


def mean_of_sites(replies):
    """What `fedavg` makes of the answers of gateways."""
    mean = StreamingMean(expected=[str(number) for number in range(len(replies))])
    like = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in SPEC}
    for number, (header, body) in enumerate(replies):
        metrics = UpdateMetrics(num_examples=header["metrics"]["num_examples"])
        tensors = decode_body(body, SPEC)
        update = Update(assignment_id="", device_id="", base_version=3, tensors=tensors, metrics=metrics)
        mean.add_update(str(number), update, weight=float(metrics.num_examples))
    return mean.compute_mean(like)


def assert_equal(found, expected):
    for name in ("w", "b"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-6)


def test_two_sites_give_what_all_their_boards_give_in_one_fleet(tmp_path):
    first = SomeBoards(tmp_path / "a", "pi-1", "pi-2", "pi-3").run()
    second = SomeBoards(tmp_path / "b", "pi-4", "pi-5").run()
    assert [reply[0]["metrics"]["num_examples"] for reply in (first, second)] == [108, 81]
    assert_equal(mean_of_sites([first, second]), mean_of(EXAMPLES))
    assert first[0]["metrics"]["loss"] == 0.5
    assert [share["board"] for share in first[0]["metrics"][SITE_KEY]] == ["pi-1", "pi-2", "pi-3"]


def test_a_board_that_goes_in_the_middle_is_left_out_as_in_one_fleet(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2", "pi-3")
    boards.silent.add("pi-2")
    boards.on_asked = lambda name: boards.say("pi-2", "offline") if name == "pi-3" else None
    header, body = boards.run()
    assert header["metrics"]["num_examples"] == 68
    assert_equal(decode_body(body, SPEC), mean_of(["pi-1", "pi-3"]))


def test_the_order_of_the_answers_changes_no_bit_of_the_sum(tmp_path):
    first = SomeBoards(tmp_path / "a", "pi-1", "pi-2", "pi-3").run()
    late = SomeBoards(tmp_path / "b", "pi-1", "pi-2", "pi-3")
    late.silent.add("pi-1")
    late.on_asked = lambda name: late.answer("pi-1", late.asked[0][2]) if name == "pi-3" else None
    assert late.run() == first


def test_a_board_is_asked_what_came_from_upstream_under_the_run_s_own_name(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1")
    boards.run(make_header(plan={"iterations": 9, "learning_rate": 0.25}, codec="topk:0.1|fp16"))
    ((_, kind, header, _),) = boards.asked
    assert (kind, header["run"], header["version"], header["seed"]) == ("train", RUN, 3, 1)
    assert (header["plan"]["iterations"], header["plan"]["learning_rate"]) == (9, 0.25)
    assert (header["codec"], header["partial_sums"]) == ("topk:0.1|fp16", True)
    assert header["assignment"].startswith(f"{RUN}/")
    assert not {"lineage", "model_sha256", "newest_record"} & header.keys()


def interrupt(boards):
    """Runs a round in which one board answers, and the gateway is stopped while another works."""
    boards.silent.add("pi-2")
    boards.on_asked = lambda name: threading.Timer(0.3, boards.rounds.stop).start() if name == "pi-3" else None
    with pytest.raises(InterruptedRunError):
        boards.run()
    boards.silent.clear()
    boards.on_asked = lambda _name: None


def test_a_gateway_that_ends_in_the_middle_asks_only_the_boards_whose_update_it_lacks(tmp_path):
    whole = SomeBoards(tmp_path / "a", "pi-1", "pi-2", "pi-3").run()
    boards = SomeBoards(tmp_path / "b", "pi-1", "pi-2", "pi-3")
    interrupt(boards)
    before = [header["assignment"] for name, _, header, _ in boards.asked if name == "pi-2"]
    boards.asked.clear()
    boards.restart()
    assert boards.run() == whole
    assert [(name, header["assignment"]) for name, _, header, _ in boards.asked] == [("pi-2", *before)]


def test_a_damaged_journal_begins_the_round_anew_and_nothing_counts_twice(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2", "pi-3")
    interrupt(boards)
    (journal,) = (tmp_path / "rounds").rglob("*.wal")
    content = bytearray(journal.read_bytes())
    content[200] ^= 255
    journal.write_bytes(bytes(content))
    boards.restart()
    header, body = boards.run()
    assert header["metrics"]["num_examples"] == 108
    assert_equal(decode_body(body, SPEC), mean_of(["pi-1", "pi-2", "pi-3"]))


def test_an_instruction_that_comes_again_is_answered_from_disk_byte_for_byte(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    first = boards.run()
    boards.restart()
    boards.asked.clear()
    assert boards.run() == first
    assert not boards.asked


@pytest.mark.parametrize("change", [{"lineage": "line-2"}, {"model_sha256": "cd"}, {"version": 4}])
def test_the_same_name_for_other_work_is_other_work(tmp_path, change):
    boards = SomeBoards(tmp_path, "pi-1")
    boards.run()
    before = boards.asked.pop()[2]["assignment"]
    boards.run(make_header(**change))
    assert boards.asked.pop()[2]["assignment"] != before


def test_a_damaged_answer_is_made_anew(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1")
    first = boards.run()
    (path,) = (tmp_path / "rounds").rglob("reply")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert boards.run() == first


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"rounds": 3, "runs": {}}', b'{"rounds": [], "runs": {"r": {"seen": []}}}']
)
def test_a_damaged_index_is_made_anew_and_the_round_goes_on(tmp_path, content):
    boards = SomeBoards(tmp_path, "pi-1")
    first = boards.run()
    (path,) = (tmp_path / "rounds").rglob(INDEX_FILE)
    path.write_bytes(content)
    index = RoundIndex.load(path.parent)
    assert (index.rounds, index.runs) == ([], {})
    assert boards.run() == first


def test_boards_hear_which_of_their_updates_were_used_upstream(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    boards.silent.add("pi-2")
    boards.on_asked = lambda name: boards.say("pi-2", "offline") if name == "pi-2" else None
    boards.run()
    own = {name: header["assignment"] for name, _, header, _ in boards.asked}
    boards.asked.clear()
    boards.silent.clear()
    boards.say("pi-2", "online")
    boards.on_asked = lambda _name: None
    boards.run(make_header(f"{RUN}/v4-a1-site", version=4, used_assignments=[f"{RUN}/v3-a1-site", "unknown"]))
    heard = {name: header["used_assignments"] for name, _, header, _ in boards.asked}
    assert heard == {"pi-1": [own["pi-1"]], "pi-2": []}


def test_sparse_updates_are_merged_and_stay_sparse_and_exact(tmp_path):
    moves = {name: displacement(number + 1, share=0.05) for number, name in enumerate(EXAMPLES)}
    for move in moves.values():
        move["b"][1:] = 0
    boards = SomeBoards(tmp_path, "pi-1", "pi-2", moves=moves)
    boards.codec = "topk:0.4"
    _, body = boards.run()
    found, expected = decode_body(body, SPEC), mean_of(["pi-1", "pi-2"], moves)
    assert isinstance(found["w"], SparseTensor)
    for name in ("w", "b"):
        dense = found[name].dense() if isinstance(found[name], SparseTensor) else found[name]
        np.testing.assert_allclose(dense, expected[name], rtol=0, atol=1e-6)


def test_an_update_that_is_not_finite_is_refused_at_the_gateway(tmp_path):
    moves = {**MOVES, "pi-2": {**MOVES["pi-2"], "b": np.array([1, np.inf, 0], np.float32)}}
    header, body = SomeBoards(tmp_path, "pi-1", "pi-2", "pi-3", moves=moves).run()
    assert header["metrics"]["num_examples"] == 68
    assert_equal(decode_body(body, SPEC), mean_of(["pi-1", "pi-3"]))


def test_a_request_to_finish_early_goes_to_the_boards_that_work(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    boards.silent.add("pi-2")

    def finish(name):
        if name == "pi-2":
            boards.rounds.finish_early("another")
            boards.rounds.finish_early(f"{RUN}/v3-a1-site")

    def on_command(device_id, command):
        boards.told.append((device_id, str(command.kind)))
        if str(command.kind) == "finish-early":
            boards.answer("pi-2", boards.asked[-1][2], iterations=1)

    boards.on_asked, boards.send_command = finish, on_command
    header, _ = boards.run()
    assert header["metrics"]["num_examples"] == 71
    assert boards.told == [("pi-2", "finish-early")]


def test_a_site_without_boards_says_so(tmp_path):
    with pytest.raises(DataError, match="no board with a shard for task 'digits', of 0 that have joined"):
        SomeBoards(tmp_path).run()
    boards = SomeBoards(tmp_path / "a", "pi-1")
    boards.rounds._started_s -= 100
    boards.say("pi-1", "offline")
    with pytest.raises(DataError, match="no board of this site is there: pi-1: it is offline"):
        boards.run()


def test_a_round_in_which_no_board_answers_fails_with_their_reasons(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1")
    boards.silent.add("pi-1")
    boards.on_asked = lambda name: boards.say(name, "offline")
    with pytest.raises(DataError, match="no board of this site has sent an update: pi-1: device offline"):
        boards.run()


def test_the_answers_of_old_rounds_are_not_kept(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1")
    for number in range(MAX_KEPT_ROUNDS + 3):
        boards.run(make_header(f"{RUN}/v{number}", version=number))
    assert len([path for path in (tmp_path / "rounds").iterdir() if path.is_dir()]) == MAX_KEPT_ROUNDS


def wait_for_rejoin(boards):
    """The gateway's start is long ago."""
    boards.jumped_s += 100


def test_a_board_that_was_away_for_long_hears_which_of_its_updates_was_used_last(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    wait_for_rejoin(boards)
    feedback, applied, asked = ErrorFeedback(make_codec("ef|topk:0.1", SPEC)), {}, np.zeros(SPEC[0].shape)

    def run(number, *used):
        boards.asked.clear()
        names = [f"{RUN}/v{each}" for each in used]
        boards.run(make_header(f"{RUN}/v{number}", version=number, used_assignments=names))
        own = {name: header for name, _, header, _ in boards.asked}.get("pi-2")
        if own is not None:
            feedback.record_used(own["used_assignments"])
            body = feedback.encode(own["assignment"], MOVES["pi-2"], derive_rng(0))
            applied[own["assignment"]] = make_codec("ef|topk:0.1", SPEC).decode(body)["w"].dense()
            asked[...] += MOVES["pi-2"]["w"]
        return own

    first = run(1)["assignment"]
    boards.say("pi-2", "offline")
    for number in (2, 3, 4):
        run(number, *range(max(1, number - 2), number))
    boards.say("pi-2", "online")
    boards.restart()
    wait_for_rejoin(boards)
    assert run(5, 3, 4)["used_assignments"] == [first]
    second = run(6, 4, 5)["used_assignments"]
    assert second[0] == first
    assert len(second) == 2
    residual = feedback.state()["residual/w"]
    np.testing.assert_allclose(sum(applied.values()) + residual, asked, atol=1e-5)


def test_a_board_that_never_answers_is_given_up_after_a_request_to_finish_early(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    boards.silent.add("pi-2")

    def finish(name):
        if name == "pi-2":
            boards.rounds.finish_early(f"{RUN}/v3-a1-site")
            threading.Timer(2.0, jump).start()

    def jump():
        boards.jumped_s += EARLY_S

    boards.on_asked = finish
    header, _ = boards.run()
    assert header["metrics"]["num_examples"] == 31
    assert ("pi-2", "finish-early") in [told[:2] for told in boards.told]


@pytest.mark.parametrize(("limits", "passed_s"), [({"deadline_s": 100.0}, 90.0), ({}, PATIENCE_S)])
def test_a_board_that_never_answers_is_given_up_in_time(tmp_path, limits, passed_s):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    boards.silent.add("pi-2")

    def jump():
        boards.jumped_s += passed_s

    boards.on_asked = lambda name: threading.Timer(1.0, jump).start() if name == "pi-2" else None
    header, _ = boards.run(make_header(site_limits=limits))
    assert header["metrics"]["num_examples"] == 31


def test_a_request_to_finish_early_counts_while_the_round_waits_for_boards(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    boards.say("pi-2", "offline")
    boards.silent.add("pi-1")
    threading.Timer(0.3, lambda: boards.rounds.finish_early(f"{RUN}/v3-a1-site")).start()

    def on_command(_device_id, command):
        if str(command.kind) == "finish-early":
            boards.answer("pi-1", boards.asked[-1][2], iterations=1)

    boards.send_command = on_command
    header, _ = boards.run()
    assert header["metrics"]["num_examples"] == 31


def test_one_board_of_very_many_examples_is_not_its_site(tmp_path, monkeypatch):
    monkeypatch.setitem(EXAMPLES, "pi-2", 2**40)
    boards = SomeBoards(tmp_path, "pi-1", "pi-2", "pi-3")
    header, _ = boards.run(make_header(site_limits={"max_weight_ratio": 2.0}))
    assert header["metrics"]["num_examples"] == 31 + 74 + 37
    assert header["metrics"][SITE_KEY][1]["num_examples"] == 74
    unbounded = make_header(f"{RUN}/v4", version=4, site_limits={"max_weight_ratio": 0.0})
    assert boards.run(unbounded)[0]["metrics"]["num_examples"] == 31 + 2**40 + 37


def test_a_round_does_not_wait_for_a_board_that_is_offline(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    boards.say("pi-2", "offline")
    wait_for_rejoin(boards)
    started_s = time.monotonic()
    boards.run()
    assert time.monotonic() - started_s < 0.9


def test_an_answer_that_cannot_be_written_is_sent_all_the_same(tmp_path, monkeypatch):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")

    def fail(*_):
        raise StoreFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(RoundRecord, "save_reply", fail)
        first = boards.run()
    own = boards.asked[0][2]["assignment"]
    boards.asked.clear()
    assert boards.run() == first
    assert not boards.asked
    boards.run(make_header(f"{RUN}/v4", version=4, used_assignments=[f"{RUN}/v3-a1-site"]))
    assert boards.asked[0][2]["used_assignments"] == [own]


def test_the_newest_answers_are_kept_whatever_the_clock_says(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1")
    wait_for_rejoin(boards)
    for number in range(MAX_KEPT_ROUNDS):
        boards.run(make_header(f"{RUN}/v{number}", version=number))
    for path in (tmp_path / "rounds").iterdir():
        os.utime(path, (time.time() + 1e6,) * 2)
    for number in (97, 98, 99):
        header = make_header(f"{RUN}/v{number}", version=number)
        boards.run(header)
        assert boards.rounds.load_reply(header) is not None
    boards.say("pi-1", "offline")
    for number in range(100, 120):
        with pytest.raises(DataError):
            boards.run(make_header(f"{RUN}/v{number}", version=number))
    assert len([path for path in (tmp_path / "rounds").iterdir() if path.is_dir()]) == MAX_KEPT_ROUNDS


def test_a_board_whose_updates_are_refused_again_and_again_is_asked_no_more(tmp_path):
    moves = {**MOVES, "pi-2": {**MOVES["pi-2"], "b": np.array([1, np.nan, 0], np.float32)}}
    boards = SomeBoards(tmp_path, "pi-1", "pi-2", moves=moves)
    wait_for_rejoin(boards)
    for number in range(4):
        boards.run(make_header(f"{RUN}/v{number}", version=number))
    assert [name for name, *_ in boards.asked].count("pi-2") == 3
    refusals = [event for event in boards.events if event[:2] == (REJECTED_EVENT_KIND, "pi-2")]
    assert len(refusals) == 3
    assert "quarantined" in refusals[-1][2]


def test_a_board_that_says_it_cannot_take_part_gets_no_work_of_the_run(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    wait_for_rejoin(boards)
    answer = boards.answer

    def say_ready(name, header, message):
        ready = {"ready": name == "pi-1", "reason": "too little memory"}
        boards.rounds.post(
            Reply(node_id=101 + boards.names.index(name), instruction_id=message,
                  header={"v": 2, "run": RUN, "assignment": header["assignment"], **ready},
                  body=b"", bytes_up=1, bytes_down=1)
        )  # fmt: skip

    boards.answer = say_ready
    boards.rounds.check_ready(make_header(layout="x"), TASK, lambda: None)
    boards.answer = answer
    boards.asked.clear()
    boards.run()
    assert [name for name, *_ in boards.asked] == ["pi-1"]


def test_boards_hear_of_the_end_of_a_run_upstream(tmp_path):
    boards = SomeBoards(tmp_path, "pi-1", "pi-2")
    boards.run()
    assert boards.rounds.is_current(RUN)
    boards.told.clear()
    boards.rounds.complete_run(RUN)
    assert not boards.rounds.is_current(RUN)
    assert boards.told == [("pi-1", "end", RUN), ("pi-2", "end", RUN)]


def test_sums_that_no_site_can_have_cost_one_board_its_evaluation():
    metrics = MetricSet({"m": None}, (("m", "total", "<f8", (1,)),))
    honest = [np.full(1, 3.0), np.full(1, 4.0)]
    bodies = [metrics.encode({"m": {"total": each}}) for each in (np.full(1, MAX_SUM), *honest)]
    results = [
        EvaluateResult(
            assignment_id=str(number), device_id=f"pi-{number}", version=1, round=1, num_examples=5, loss=1.0,
            accuracy=None, source="device", sums=body,
        )
        for number, body in enumerate(bodies, 1)
    ]  # fmt: skip
    events = []
    figures, body = combine_evaluations(results, metrics, lambda *event: events.append(event))
    assert figures["metrics"]["num_examples"] == 10
    assert metrics.decode(body)["m"]["total"].tolist() == [7.0]
    assert [event[1] for event in events] == ["pi-1"]
