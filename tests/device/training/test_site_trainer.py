"""The trainer of a gateway passes on what its boards can do, and refuses the rest in one line."""

from dataclasses import replace

import numpy as np
import pytest

from edgefl import __version__
from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.delta import encode_delta
from edgefl.core.errors import DataError
from edgefl.core.protocol import model_fingerprint
from edgefl.core.types import derive_rng
from edgefl.device.training.site_trainer import SiteTrainer
from edgefl.device.training.trainer import TrainingAbortedError
from edgefl.tasks.registry import make_task

TASK = make_task("digits", {})
RNG = derive_rng(0)


class SomeSite:
    """Boards that note what they are asked."""

    def __init__(self):
        self.counts, self.asked, self.kept, self.error, self.ended = {"digits": 30}, [], None, None, []
        self.task = None

    def list_boards(self):
        return ["pi-1", "pi-2"]

    def count_online(self):
        return 1

    def count_examples(self):
        return self.counts

    def check_ready(self, header, task, on_alive):
        self.asked.append(("ready", task.spec))
        if self.error is not None:
            raise self.error

    def load_reply(self, header):
        return self.kept

    def run_round(self, header, body, task, on_alive):
        self.task = task
        self.asked.append((header["assignment"], body))
        if self.error is not None:
            raise self.error
        return {"metrics": {"num_examples": 30}}, b"the mean"

    def evaluate(self, header, body, task, on_alive):
        return {"metrics": {"num_examples": 6}}, b"the sums"

    def run_offline_round(self, on_alive):
        self.asked.append("offline round")
        if self.error is not None:
            raise self.error
        return True

    def finish_early(self, assignment):
        self.ended.append(assignment)

    def complete_run(self, run_id):
        self.ended.append(run_id)

    def stop(self):
        self.ended.append("stop")


@pytest.fixture
def site():
    return SomeSite()


@pytest.fixture
def trainer(site, tmp_path):
    return SiteTrainer(
        site, device_id="site-1", role="trainer", accelerator="cpu", threads=1, state_dir=tmp_path,
        on_progress=lambda *_: True, get_policy=lambda: "auto", next_incarnation=lambda: 1,
    )  # fmt: skip


def make_header(version=0, **more):
    return {
        "v": 2, "run": "run-1", "assignment": f"run-1/v{version}", "task": "digits", "options": {}, "seed": 1,
        "version": version, "test_fraction": 0.0, "plan": {"iterations": 1}, "partial_sums": True, **more,
    }  # fmt: skip


def make_can(**more):
    layout = model_fingerprint(TASK.shapes())
    return make_header(phase="can", edgefl=__version__, layout=layout, needs={}, **more)


def test_a_run_that_needs_each_board_s_update_is_refused_in_one_line(site, trainer):
    for header in (make_can(partial_sums=False), make_can(partial_sums=None)):
        reply, _ = trainer.train(header, b"")
        assert reply["ready"] is False
        assert reply["reason"].startswith("it is a site gateway, which answers with the mean")
    assert "it is a site gateway" in trainer.train(make_header(partial_sums=1), b"x")[0]["error"]
    assert "it is a site gateway" in trainer.evaluate(make_header(partial_sums=False), b"x")[0]["error"]
    assert not site.asked


def test_it_is_ready_when_a_board_is_and_says_why_none_is(site, trainer):
    assert trainer.train(make_can(), b"")[0]["ready"] is True
    assert site.asked == [("ready", TASK.shapes())]
    site.error = DataError("no board of this site is there")
    assert trainer.train(make_can(), b"")[0]["reason"] == "no board of this site is there"
    site.error, site.counts = DataError("this site has no board with a shard"), {}
    assert trainer.train(make_can(), b"")[0]["reason"] == "this site has no board with a shard"


def test_a_task_with_another_model_is_refused_before_the_boards_are_asked(site, trainer):
    reply, _ = trainer.train({**make_can(), "layout": "another"}, b"")
    assert "has another model" in reply["reason"]
    assert not site.asked


def test_the_model_goes_to_the_boards_as_it_came_also_when_it_came_before_the_run(site, trainer):
    model = make_codec("fp16", TASK.shapes()).encode(TASK.init(0), RNG)
    reply, body = trainer.train(make_header(), model)
    assert (reply["assignment"], reply["metrics"], body) == ("run-1/v0", {"num_examples": 30}, b"the mean")
    assert trainer.train(make_header(phase="prepare"), model)[0]["ready"] is True
    trainer.train(make_header(prefetched_version=0), b"")
    assert site.asked == [("run-1/v0", model)] * 2


def test_changes_of_a_model_are_made_whole_for_the_boards(site, trainer):
    first = TASK.init(0)
    second = {name: tensor.copy() for name, tensor in first.items()}
    name = next(iter(second))
    second[name].reshape(-1)[:2] += 1
    whole = make_codec("dense", TASK.shapes()).encode(first, RNG)
    delta = encode_delta(second, {name: np.arange(2)}, TASK.shapes(), "dense", RNG)
    trainer.train(make_header(keeps_model=True), whole)
    trainer.train(make_header(1, keeps_model=True, base_version=0), delta)
    found = decode_body(site.asked[-1][1], TASK.shapes())
    for each, tensor in second.items():
        np.testing.assert_array_equal(found[each], tensor)
    reply, _ = trainer.train(make_header(3, keeps_model=True, base_version=2), delta)
    assert reply["requires_full_model"] is True


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_site_hears_whether_boards_keep_tensors_of_their_own(site, trainer, monkeypatch, is_shared):
    own, *others = TASK.shapes()
    monkeypatch.setattr(type(TASK), "shapes", lambda _self: (replace(own, shared=is_shared), *others))
    trainer.train(make_header(), b"x")
    assert site.task.has_local_tensors is not is_shared
    assert list(site.task.spec) == [*([own] if is_shared else []), *others]


def test_an_answer_on_disk_needs_neither_model_nor_boards(site, trainer):
    header = make_header(has_stored_reply=True)
    assert trainer.train(header, b"")[0]["requires_full_model"] is True
    site.kept = {"metrics": {"num_examples": 9}}, b"kept"
    reply, body = trainer.train(header, b"")
    assert (reply["metrics"], body) == ({"num_examples": 9}, b"kept")
    assert not site.asked


def test_a_gateway_that_stops_sends_no_answer(site, trainer):
    site.error = DataError("the gateway stops")
    assert trainer.train(make_header(), b"x")[0]["error"] == "DataError: the gateway stops"
    trainer.abort()
    with pytest.raises(TrainingAbortedError):
        trainer.train(make_header(), b"x")
    assert site.ended == ["stop"]


def test_a_site_goes_on_without_its_coordinator_once_that_is_away_for_long(site, trainer):
    assert not trainer.can_work_offline(29.0)
    assert trainer.can_work_offline(30.0)
    assert not site.asked
    assert trainer.work_offline()
    assert site.asked == ["offline round"]
    site.error = DataError("no board of this site is there")
    assert not trainer.work_offline()
    trainer.abort()
    with pytest.raises(TrainingAbortedError):
        trainer.work_offline()


def test_upstream_hears_of_the_boards_together(site, trainer):
    assert trainer.count_examples() == {"digits": 30}
    assert trainer.site_facts == {"site": {"boards": 2, "online": 1}}
    before = trainer.compute_shard_fingerprint()
    site.counts = {"digits": 40}
    assert trainer.compute_shard_fingerprint() != before
    trainer.finish_early("run-1/v0")
    assert site.ended == ["run-1/v0"]
    assert trainer.evaluate(make_header(), b"x")[0]["metrics"] == {"num_examples": 6}


def test_the_end_of_a_run_goes_to_the_boards(site, trainer):
    trainer.complete_run("run-1")
    assert site.ended == ["run-1"]
