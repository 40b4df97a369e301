"""Rounds of a site: the answer of a gateway is the mean over its boards, whatever happens to it or to them."""

import itertools
import threading
import time

import numpy as np
import pytest
from small_fleet import SmallFleet

from edgefl.compression.codec import decode_body, make_codec
from edgefl.coordinator.execution.live_fleet import InterruptedRunError
from edgefl.coordinator.execution.site_rounds import MAX_KEPT_ROUNDS, SiteRounds
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.errors import DataError
from edgefl.core.metrics import NO_METRICS
from edgefl.core.protocol import Heartbeat, StatusMessage
from edgefl.core.sites import SITE_KEY, SiteTask
from edgefl.core.types import SparseTensor, TensorSpec, TrainConfig, Update, UpdateMetrics, derive_rng
from edgefl.strategies.aggregation import StreamingMean

SPEC = (
    TensorSpec(name="w", shape=(40, 3)),
    TensorSpec(name="b", shape=(3,)),
    TensorSpec(name="n", shape=(), dtype="int64"),
)
TASK = SiteTask(spec=SPEC, metrics=NO_METRICS)
RUN = "run-7"
EXAMPLES = {"pi-1": 31, "pi-2": 40, "pi-3": 37, "pi-4": 52, "pi-5": 29}


def displacement(seed, *, share=1.0):
    rng = np.random.default_rng(seed)
    tensors = {"w": rng.normal(size=(40, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    tensors["n"] = np.array(seed, np.int64)
    if share < 1:
        tensors["w"] *= rng.random((40, 3)) < share
    return tensors


MOVES = {name: displacement(number + 1) for number, name in enumerate(EXAMPLES)}


def make_header(assignment=f"{RUN}/v3-a1-site", **more):
    plan = TrainConfig(iterations=4).to_json()
    return {
        "v": 2, "run": RUN, "task": "digits", "options": {}, "seed": 1, "test_fraction": 0.0, "version": 3,
        "assignment": assignment, "plan": plan, "codec": "dense", "used_assignments": [], "lineage": "line-1",
        "model_sha256": "ab", "newest_record": 9, "partial_sums": True, **more,
    }  # fmt: skip


class SomeBoards:
    """Boards that answer at once what they are asked, or not: mail, bell and registry of a gateway."""

    def __init__(self, folder, *names, moves=MOVES):
        self.folder, self.moves, self.names = folder, moves, names
        self.asked, self.silent, self.told = [], set(), []
        self.registry, self._number, self._beats = None, itertools.count(1), itertools.count(1)
        self.codec, self.on_asked = "dense", lambda _name: None
        self.restart()

    def restart(self):
        """A gateway that begins anew in the same folder, whose boards are there."""
        self.registry = SmallFleet(clock=time.monotonic).registry
        for number, name in enumerate(self.names):
            examples = {"digits": EXAMPLES[name]}
            self.registry.add(name, node_id=101 + number, role="trainer", groups=(), examples=examples)
            self.say(name, "online")
        self.rounds = SiteRounds(
            self.folder / "rounds",
            registry=self.registry,
            notifier=self,
            open_transport=lambda: self,
            clock=time.monotonic,
        )

    def say(self, name, state):
        self.registry.record_status(name, StatusMessage(state=state, boot_id="boot-1", session_no=1, will=False))

    def send(self, node_id, *, kind, header, body):
        name, message = self.names[node_id - 101], f"message-{next(self._number)}"
        self.asked.append((name, kind, header, b"".join(body.parts) if hasattr(body, "parts") else body))
        if name not in self.silent:
            self.answer(name, header, message)
        self.on_asked(name)
        return message

    def answer(self, name, header, message="", **metrics):
        figures = {"iterations": 4, "num_examples": EXAMPLES[name], "loss": 0.5, "compute_s": 0.0, **metrics}
        reply = {"v": 2, "run": RUN, "assignment": header["assignment"], "metrics": figures}
        body = make_codec(self.codec, SPEC).encode(self.moves[name], derive_rng(0))
        node_id = 101 + self.names.index(name)
        self.rounds.post(
            Reply(node_id=node_id, instruction_id=message, header=reply, body=body, bytes_up=1, bytes_down=1)
        )

    def notify(self, device_id):
        """A wake-up."""

    def send_command(self, device_id, command):
        self.told.append((device_id, str(command.kind), command.argument))
        if str(command.kind) == "heartbeat":
            beat = Heartbeat(seq=next(self._beats), session_no=1, uptime_s=1.0, holding=[])
            self.registry.record_heartbeat(device_id, beat)

    def is_known(self, _name):
        return True

    def is_delivered(self, _name):
        return False

    def cancel(self, name):
        """A message."""

    def close(self):
        """The end of a round."""

    def run(self, header=None):
        return self.rounds.run_round(header or make_header(), b"the model", TASK, lambda: None)


def mean_of(names, moves=MOVES):
    """What `fedavg` makes of these boards in one fleet."""
    mean = StreamingMean(expected=list(names))
    like = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in SPEC}
    for name in names:
        metrics = UpdateMetrics(num_examples=EXAMPLES[name])
        update = Update(assignment_id=name, device_id=name, base_version=3, tensors=moves[name], metrics=metrics)
        mean.add_update(name, update, weight=float(EXAMPLES[name]))
    return mean.compute_mean(like)


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
    assert len([*(tmp_path / "rounds").iterdir()]) == MAX_KEPT_ROUNDS
