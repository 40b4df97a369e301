"""How fast a board is, measured by real processes, kept over restarts, and given up when there is work."""

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from board_trees import ZERO_2_W, plant
from tasks.compiled.board.dense_graphs import make_compiled

from edgefl.core.errors import TaskError
from edgefl.device.hardware.benchmark import measure_step_rate
from edgefl.device.hardware.board_reader import no_program
from edgefl.device.hardware.capabilities import probe
from edgefl.device.hardware.step_rate import FILE_NAME, StepRateCache
from edgefl.tasks.compiled.artefact import compute_sha256, encode_artefact

OWN = """
import os, signal, time
from edgefl import Job
from edgefl.tasks.noop import NoopTask

class Crashing(NoopTask):
    name = "crashing"
    def learner(self, **_):
        os.kill(os.getpid(), signal.SIGILL)

class Bare(NoopTask):
    name = "bare"
    input_shape = None

class Parts(Job):
    def learner(self, **_):
        os.kill(os.getpid(), signal.SIGILL)
    def work(self, context):
        return b""

class Slow(NoopTask):
    name = "slow"
    def learner(self, **_):
        open({mark!r}, "w").write(str(os.getpid()))
        time.sleep(60)
"""


class Bench:
    """A book whose measurements can be waited for."""

    def __init__(self, root, **settings):
        self.root, self.measured = root, threading.Event()
        self.book = StepRateCache(root, on_measured=self.measured.set, **{"min_idle_s": 0.0, **settings})

    def idle(self, shards, **changes):
        # The tasks of these tests lie, and write, where a confined process must not look.
        is_confined = not any("own_speed_task" in name for name in shards)
        settings: dict[str, Any] = {
            "facts": {}, "accelerator": "cpu", "threads": 1, "is_confined": is_confined, **changes,
        }  # fmt: skip
        self.book.on_idle(shards, **settings)

    def measure(self, shards, **changes):
        self.measured.clear()
        self.idle(shards, **changes)
        assert self.measured.wait(60), "nothing was measured"
        return self.book.get_facts()

    @property
    def is_measuring(self):
        return self.book._child is not None


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.book.close()


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_speed_task.py").write_text(OWN.format(mark=str(tmp_path / "begun")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "own_speed_task")
    return tmp_path / "begun"


def until(holds, within_s=30.0):
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_task_is_measured_by_itself_or_on_its_shard(own, tmp_path):
    told = measure_step_rate("digits", None)
    assert (told["batch_size"], told["backend"]) == (8, "numpy")
    assert 10 < told["steps_per_s"] < 10**7
    with pytest.raises(TaskError, match="does not say what its examples look like"):
        measure_step_rate("own_speed_task:Bare", None)
    assert measure_step_rate("own_speed_task:Bare", str(tmp_path))["steps_per_s"] > 0


def test_a_speed_is_kept_over_restarts_for_as_long_as_nothing_that_it_depends_on_has_changed(bench, tmp_path):
    facts = probe(plant(tmp_path / "zero", ZERO_2_W), run=no_program)
    shards = {"mnist": "/nowhere.npz"}
    told = bench.measure(shards, facts=facts)
    assert list(told["steps_per_s"]) == ["mnist/2nn"], "the model that fits so small a board"
    assert oct((tmp_path / FILE_NAME).stat().st_mode & 0o777) == "0o600"
    kept = (tmp_path / FILE_NAME).read_text()
    other_numpy = re.sub(r'"numpy": "[^"]*"', '"numpy": "1.0"', kept)
    assert other_numpy != kept
    for content, changes in ((kept, {}), (kept, {"threads": 2}), (kept, {"accelerator": "cuda"}), (other_numpy, {})):
        (tmp_path / FILE_NAME).write_text(content)
        again = Bench(tmp_path)
        assert again.book.get_facts() == told
        again.idle(shards, facts=facts, **changes)
        assert again.is_measuring is ((content, changes) != (kept, {}))
        again.book.close()
    version = bench.book.version
    bench.idle({})
    assert (bench.book.get_facts(), bench.book.version) == ({}, version + 1), "a task that is gone is forgotten"


def test_nothing_is_measured_soon_after_work(tmp_path):
    now_s = 0.0
    bench = Bench(tmp_path, min_idle_s=20.0, clock=lambda: now_s)
    bench.idle({"digits": "x"})
    assert not bench.is_measuring, "the agent has only just started"
    now_s = 19.0
    bench.book.on_work()
    now_s = 38.0
    bench.idle({"digits": "x"})
    assert not bench.is_measuring
    now_s = 39.0
    bench.idle({"digits": "x"})
    assert bench.is_measuring
    bench.book.close()


def test_work_ends_a_measurement_and_it_is_made_another_time(bench, own, tmp_path):
    bench.idle({"own_speed_task:Slow": str(tmp_path)})
    until(own.exists)
    until(lambda: own.read_text() != "")
    pid = int(own.read_text())
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    bench.book.on_work()
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert bench.book.get_facts() == {}
    bench.idle({"own_speed_task:Slow": str(tmp_path)})
    assert bench.is_measuring


def test_a_library_that_crashes_takes_nobody_along_and_is_told_and_not_tried_again(bench, own, tmp_path):
    shards = {"own_speed_task:Crashing": str(tmp_path)}
    told = bench.measure(shards)
    assert told == {"speed_errors": {"own_speed_task:Crashing": "training ended with code -4 on this board"}}
    bench.idle(shards)
    assert not bench.is_measuring


def test_a_job_is_not_measured_as_it_is_never_trained(bench, own, tmp_path):
    jobs = {"own_speed_task:Parts": str(tmp_path)}
    bench.idle(jobs)
    assert not bench.is_measuring
    assert set(bench.measure({**jobs, "noop": ""})["steps_per_s"]) == {"noop"}
    assert not bench.is_measuring


HUGE = '{"v": 1, "speeds": {"digits": {"steps_per_s": 1' + "0" * 400 + ', "stamp": []}}}'


@pytest.mark.parametrize(
    "kept", ["", "[]", '{"v": 2}', '{"v": 1, "speeds": {"digits": {}}}', '{"v":1,"speeds":[1]}', HUGE]
)
def test_a_damaged_book_is_begun_anew(tmp_path, kept):
    (tmp_path / FILE_NAME).write_text(kept)
    assert Bench(tmp_path).book.get_facts() == {}


def test_a_board_without_torch_measures_the_compiled_tasks_that_it_has(tmp_path):
    compiled = make_compiled()
    content = encode_artefact(replace(compiled, manifest=replace(compiled.manifest, task="mnist", options={})))
    folder = tmp_path / "bases"
    folder.mkdir()
    (folder / f"{compute_sha256(content)}.safetensors").write_bytes(content)
    (folder / "half-a-file").write_bytes(content[:100])
    bench = Bench(tmp_path, compiled_dir=folder)
    facts, shards = probe(plant(tmp_path / "zero", ZERO_2_W), run=no_program), {"mnist": "/nowhere.npz"}
    assert list(bench.measure(shards, facts=facts)["steps_per_s"]) == ["mnist/2nn"]
    told = bench.measure(shards, facts=facts)
    assert told.keys() == {"steps_per_s", "training_bytes"}
    assert told["steps_per_s"]["mnist"] > 10
    assert 20e6 < told["training_bytes"]["mnist"] < 200e6
    bench.idle(shards, facts=facts)
    assert not bench.is_measuring
    again = Bench(tmp_path, compiled_dir=folder)
    assert again.book.get_facts() == told
    (folder / f"{compute_sha256(content)}.safetensors").unlink()
    again.idle(shards, facts=facts)
    assert again.book.get_facts()["steps_per_s"].keys() == {"mnist/2nn"}
