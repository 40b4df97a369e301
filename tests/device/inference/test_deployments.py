"""Deployments on the board: fetched, judged, switched to or not, and taken up again after a power cut."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_source import ModelSource
from onnx_graphs import constant_model
from peer_boards import eventually
from wheel_files import Signer, read_signed, replace_signer

from edgefl.core.errors import BundleError, DataError, NetworkError
from edgefl.core.types import derive_rng
from edgefl.device.inference.deployments import (
    DeployedModel,
    DeployedModels,
    DeploymentState,
    ModelOffer,
    ModelStore,
    rejection_reason,
    report_to_json,
)
from edgefl.device.inference.onnx_model import ModelCheckResult
from edgefl.device.rollouts.client import RolloutClient, RolloutReport
from edgefl.device.state_dir import DeviceSettings, save_enrolment
from edgefl.device.updates.slots import SoftwareUpdateConfig


class Board:
    """A board with a state directory, a coordinator to fetch from, and a judge who says what he is told to say."""

    def __init__(self, root):
        self.model = root / "model.onnx"
        self.coordinator = ModelSource(root / "coordinator", b"", constant_model(self.model, 0))
        self.offers(0)
        device = DeviceSettings(
            device_id="pi", fleet="lab", role="trainer", ca_fingerprint="00", addresses=("127.0.0.1:1",),
            broker_port=1, shards={"digits": "shard.npz"},
        )  # fmt: skip
        self.root = root / "pi"
        self.root.mkdir()
        self.state = save_enrolment(self.root, device, key_pem=b"", cert_pem=b"", ca_pem=b"")
        self.scores = {}
        self.questions = []
        self.waits: Callable[[], None] = lambda: None
        self.is_away = False
        self.signer = Signer(root)
        self.config = SoftwareUpdateConfig(slots=None, signers=root / "none")
        self.store = ModelStore(self.root, self.config)
        self.updates = []

    def offers(self, winner):
        """Makes the coordinator offer another model from now on."""
        sha256 = constant_model(self.model, winner)
        self.coordinator.body = self.model.read_bytes()
        told = {"sha256": sha256, "bytes": len(self.coordinator.body), "model": f"{winner}" * 64}
        self.coordinator.offer |= told

    def trusts(self):
        """Makes the board trust its signer from now on."""
        self.config = SoftwareUpdateConfig(slots=None, signers=self.signer.trusted)
        self.store = ModelStore(self.root, self.config)

    def sign(self, winner, *, signer=None, **more):
        """Makes the coordinator offer a signed model from now on."""
        self.offers(winner)
        bundle = (signer or self.signer).model_bundle(
            self.root / "m.bundle", self.model, **{"model": f"{winner}" * 64, **more}
        )
        self.coordinator.offer["signed"] = read_signed(bundle)
        return bundle

    def start(self):
        updates = RolloutClient(
            DeployedModels(self.state, self.config, check_model=self._check),
            get_source=self._source,
            on_change=lambda: None,
            rng=derive_rng("t"),
        )
        self.updates.append(updates)
        updates.start()
        return updates

    def close(self):
        for updates in self.updates:
            updates.stop()
        self.coordinator.close()

    def _source(self):
        if self.is_away:
            raise NetworkError("the coordinator is away")
        return self.coordinator.source()

    def _check(self, question):
        self.questions.append(question)
        self.waits()
        if not Path(question.path).is_file():
            raise DataError("no file")
        former = self.scores.get(Path(question.former_path).stem) if question.former_path else None
        return ModelCheckResult(
            accuracy=self.scores.get(Path(question.path).stem, 0.9), former_accuracy=former, num_examples=50
        )


@pytest.fixture
def board(tmp_path):
    made = Board(tmp_path)
    yield made
    made.close()


def until(updates, state, deployment):
    def told():
        report = updates.report or {}
        return report.get("state"), report.get("id")

    eventually(lambda: told() == (state, deployment), f"{state} of {deployment}")
    assert updates.report
    return updates.report


def deploy(board, updates, winner, state="running"):
    board.offers(winner)
    updates.apply(f"d{winner}")
    return until(updates, state, f"d{winner}")


def test_the_first_model_is_taken_and_asked_for_on_the_boards_own_data(board):
    updates = board.start()
    report = deploy(board, updates, 3)
    assert report == {"id": "d3", "state": "running", "accuracy": 0.9, "num_examples": 50, "runs": "d3"}
    assert updates.handler.model == "3" * 64
    (question,) = board.questions
    assert (question.shard, question.task, question.former_path, question.role) == (
        "shard.npz", "digits", None, "trainer",
    )  # fmt: skip
    current = board.store.load().current
    assert current is not None
    assert board.store.path(current).read_bytes() == board.coordinator.body


def test_a_worse_model_is_refused_and_the_one_before_stays(board):
    updates = board.start()
    deploy(board, updates, 1)
    first = board.store.load().current
    assert first is not None
    board.scores[first.sha256] = 0.95
    board.offers(2)
    board.scores[board.coordinator.offer["sha256"]] = 0.4
    updates.apply("d2")
    report = until(updates, "rejected", "d2")
    assert "accuracy 0.4000 on 50 examples of its own, the model before has 0.9500 there" in report["reason"]
    assert (report["accuracy"], report["former_accuracy"], report["runs"]) == (0.4, 0.95, "d1")
    assert board.store.load().current == first
    assert updates.handler.model == "1" * 64
    eventually(lambda: [path.stem for path in board.store.folder.glob("*.onnx")] == [first.sha256])


def test_a_deployment_that_is_done_is_not_done_again(board):
    updates = board.start()
    deploy(board, updates, 1)
    updates.apply("d1")
    deploy(board, updates, 2)
    updates.apply("d2")
    deploy(board, updates, 3)
    assert len(board.questions) == 3


def test_it_goes_back_to_the_model_before_and_without_one_to_none(board):
    updates = board.start()
    deploy(board, updates, 1)
    deploy(board, updates, 2)
    updates.roll_back("d2")
    assert until(updates, "reverted", "d2")["runs"] == "d1"
    assert updates.handler.model == "1" * 64
    updates.roll_back("d1")
    assert until(updates, "reverted", "d1")["runs"] is None
    assert updates.handler.model is None


def test_the_files_of_the_model_and_of_the_one_before_stay_and_older_ones_go(board):
    updates = board.start()

    def winners():
        return {path.stem for path in board.store.folder.glob("*.onnx")}

    made = []
    for winner in (1, 2, 3):
        deploy(board, updates, winner)
        made.append(board.coordinator.offer["sha256"])
        eventually(lambda: winners() == set(made[-2:]))
    (board.store.folder / f"{'0' * 64}.part").write_bytes(b"half of what nobody fetches any more")
    updates.roll_back("d3")
    until(updates, "reverted", "d3")
    eventually(lambda: [path.stem for path in board.store.folder.iterdir() if path.suffix != ".json"] == [made[1]])


def test_going_back_from_what_it_does_not_run_changes_nothing_and_is_reported(board):
    updates = board.start()
    deploy(board, updates, 1)
    updates.roll_back("other")
    assert until(updates, "reverted", "other")["runs"] == "d1"
    updates.apply("d1")
    assert until(updates, "running", "d1")["accuracy"] == 0.9
    assert len(board.questions) == 1


def test_what_was_begun_before_a_power_cut_is_finished_after_it(board):
    board.is_away = True
    updates = board.start()
    board.offers(5)
    updates.apply("d5")
    until(updates, "fetching", "d5")
    eventually(lambda: board.store.load().report == RolloutReport(id="d5", state="fetching"))
    updates.stop()
    board.is_away = False
    again = board.start()
    assert until(again, "running", "d5")["runs"] == "d5"
    assert board.store.load().report.is_final


def test_an_order_to_go_back_ends_what_is_under_way(board):
    board.is_away = True
    updates = board.start()
    updates.apply("d5")
    until(updates, "fetching", "d5")
    updates.roll_back("d5")
    assert until(updates, "reverted", "d5")["runs"] is None
    eventually(lambda: board.store.load().report.is_final)
    updates.apply("d6")
    until(updates, "fetching", "d6")
    board.offers(7)
    updates.apply("d7")  # a newer deployment takes the place of the one under way
    board.is_away = False
    until(updates, "running", "d7")
    assert len(board.questions) == 1


def test_a_file_that_arrives_damaged_twice_has_failed_and_nothing_of_it_stays(board):
    updates = board.start()
    board.offers(4)
    board.coordinator.body = board.coordinator.body[:-1] + b"x"
    updates.apply("d4")
    assert "was offered" in until(updates, "failed", "d4")["reason"]
    assert len(board.coordinator.ranges) == 2
    eventually(lambda: [path.name for path in board.store.folder.iterdir()] == ["current.json"])


def test_a_deployment_that_was_taken_back_has_no_shard_or_finds_no_judge_has_failed_with_a_reason(board):
    updates = board.start()
    board.coordinator.status = 404
    updates.apply("d1")
    until(updates, "failed", "d1")
    board.coordinator.status = 200
    board.coordinator.offer["task"] = "mnist"
    assert "no shard for task 'mnist'" in deploy(board, updates, 2, "failed")["reason"]
    board.coordinator.offer["task"] = "digits"

    def fails():
        raise ZeroDivisionError("odd")

    board.waits = fails  # the judge
    assert deploy(board, updates, 3, "failed")["reason"] == "ZeroDivisionError: odd"
    board.waits = lambda: None
    deploy(board, updates, 4)


def refuse(board, updates, name, line):
    """A deployment that is rejected before anything of its file is fetched or judged."""
    fetched, judged = len(board.coordinator.ranges), len(board.questions)
    updates.apply(name)
    assert line in until(updates, "rejected", name)["reason"]
    assert (len(board.coordinator.ranges), len(board.questions)) == (fetched, judged)


def test_a_board_with_signers_takes_no_model_that_none_of_them_has_signed_as_it_is(board):
    board.trusts()
    updates = board.start()
    board.offers(1)
    refuse(board, updates, "d1", "it is unsigned, and this board runs only models that its signers have signed")
    board.sign(2, signer=Signer(board.root / "stranger"))
    refuse(board, updates, "d2", "which this board does not trust")
    board.sign(3, expires=1000)
    refuse(board, updates, "d3", "could be installed until 1970-01-01")
    board.sign(4)
    board.offers(5)  # with the signature of another
    refuse(board, updates, "d5", "was signed, and not this file")
    for number, (key, value) in enumerate((("options", {"model": "cnn"}), ("model", "9" * 64), ("task", "mnist"))):
        board.sign(6)
        before = board.coordinator.offer[key]
        board.coordinator.offer[key] = value
        refuse(
            board, updates, f"mixed-{number}", "was signed for another task, with other options or of another model"
        )
        board.coordinator.offer[key] = before
    board.coordinator.offer["signed"] = "{"
    refuse(board, updates, "odd", "its signature makes no sense")
    board.sign(7)
    updates.apply("d7")
    until(updates, "running", "d7")
    current = board.store.load().current
    assert board.store.get_permitted_path(current).read_bytes() == board.coordinator.body


def test_a_model_that_was_signed_before_is_not_taken_again_unless_it_is_signed_anew(board):
    board.trusts()
    updates = board.start()
    board.sign(1)
    first = dict(board.coordinator.offer), board.coordinator.body
    updates.apply("d1")
    until(updates, "running", "d1")
    board.sign(2)
    updates.apply("d2")
    until(updates, "running", "d2")
    board.coordinator.offer, board.coordinator.body = first
    refuse(board, updates, "again", "model-digits was signed before what this board has (serial 101, it has 102)")
    updates.roll_back("d2")
    until(updates, "reverted", "d2")
    assert board.store.load().serials == {"model-digits": 102}, "a way back is not forgotten"
    board.sign(1)
    updates.apply("anew")
    until(updates, "running", "anew")


def test_a_model_whose_key_counts_no_more_or_whose_file_was_changed_is_not_run(board):
    board.trusts()
    updates = board.start()
    board.sign(1)
    updates.apply("d1")
    until(updates, "running", "d1")
    current = board.store.load().current
    path = board.store.get_permitted_path(current)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(BundleError, match="was signed, and not this file"):
        board.store.get_permitted_path(current)
    path.write_bytes(content)
    assert board.store.get_permitted_path(current) == path
    second = Signer(board.root / "second")
    board.sign(2, lists=replace_signer(board.signer, second), signer=second)
    updates.apply("d2")
    until(updates, "running", "d2")
    with pytest.raises(BundleError, match="which this board does not trust"):
        board.store.get_permitted_path(current)
    assert board.questions[-1].former_path is None, "not even to compare"
    board.sign(3)
    refuse(board, updates, "d3", "which this board does not trust")


def test_a_model_from_before_the_board_had_signers_is_not_run_after_that(board):
    updates = board.start()
    deploy(board, updates, 1)
    assert board.store.get_permitted_path(board.store.load().current)
    board.trusts()
    with pytest.raises(BundleError, match="it is unsigned"):
        board.store.get_permitted_path(board.store.load().current)


def offer(**changes):
    values: dict[str, Any] = {"tolerance": 0.02, "min_accuracy": 0.0, **changes}
    return ModelOffer(sha256="", num_bytes=1, model="m", task="digits", options={}, test_fraction=0.1, **values)


@pytest.mark.parametrize(
    ("accuracy", "former", "limits", "is_refused"),
    [
        (0.1, None, {}, False),
        (0.1, None, {"min_accuracy": 0.2}, True),
        (0.881, 0.9, {}, False),
        (0.879, 0.9, {}, True),
        (0.879, 0.9, {"tolerance": 0.05}, False),
        (0.9, 0.9, {"tolerance": 0.0}, False),
    ],
)
def test_a_model_may_be_a_little_worse_than_the_one_before_and_no_more(accuracy, former, limits, is_refused):
    scores = ModelCheckResult(accuracy=accuracy, former_accuracy=former, num_examples=9)
    assert (rejection_reason(scores, offer(**limits)) is not None) == is_refused


@pytest.mark.parametrize(
    ("loss", "former", "limits", "is_refused"),
    [
        (1.019, 1.0, {}, False),
        (1.021, 1.0, {}, True),
        (1.021, None, {}, False),
        (None, None, {}, False),
        (0.1, 1.0, {"min_accuracy": 0.5}, True),
    ],
)
def test_a_model_without_classes_may_have_a_little_more_loss_than_the_one_before(loss, former, limits, is_refused):
    scores = ModelCheckResult(loss=loss, former_loss=former, num_examples=9)
    assert (rejection_reason(scores, offer(**limits)) is not None) == is_refused


def deployed(name):
    return DeployedModel(deployment=f"d-{name}", sha256=name * 64, model=name * 8, task="digits", accuracy=0.5)


def report(name, state="running"):
    return RolloutReport(id=f"d-{name}", state=state, accuracy=0.5)


@pytest.fixture
def store(tmp_path):
    store = ModelStore(tmp_path)
    store.save(DeploymentState())
    return store


def test_a_board_without_a_note_has_no_model(tmp_path):
    assert ModelStore(tmp_path).load() == DeploymentState()
    assert report_to_json(DeploymentState()) is None


def test_the_model_before_is_kept_for_the_way_back(store):
    note = DeploymentState()
    for name in "abc":
        note = store.activate(note, deployed(name), report(name))
    assert store.load() == note
    assert (note.current, note.former) == (deployed("c"), deployed("b"))
    back = store.roll_back(note, report("c", "reverted"))
    assert (store.load(), back.current, back.former) == (back, deployed("b"), None)
    assert store.roll_back(back, report("b", "reverted")).current is None


def test_a_model_that_is_deployed_twice_does_not_push_out_the_one_before(store):
    note = store.activate(DeploymentState(), deployed("a"), report("a"))
    note = store.activate(note, deployed("b"), report("b"))
    again = store.activate(note, deployed("b"), report("b"))
    assert (again.current, again.former) == (deployed("b"), deployed("a"))


def test_a_damaged_note_counts_as_none_and_is_told(store, caplog):
    for content in (b"{", b"[]", b'{"v": 2}', b'{"v": 1, "current": {"model": "x"}}', b"\xff"):
        store.state_path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert store.load() == DeploymentState()
        assert "damaged" in caplog.text, content
        caplog.clear()


def test_a_heartbeat_says_what_became_of_the_last_deployment_and_what_runs():
    told = report_to_json(
        DeploymentState(current=deployed("a"), report=RolloutReport(id="d-b", state="rejected", reason="worse"))
    )
    assert told == {"id": "d-b", "state": "rejected", "reason": "worse", "runs": "d-a"}
    assert report_to_json(DeploymentState(report=RolloutReport(id="d", state="fetching"))) == {
        "id": "d",
        "state": "fetching",
        "runs": None,
    }
