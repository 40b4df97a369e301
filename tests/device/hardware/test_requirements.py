"""What small and 32-bit boards train with, and what they say about it, on trees of files as they have them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from board_trees import PI_3, ZERO_2_W, plant
from digit_shards import digit_shard

from edgefl import __version__
from edgefl.core.errors import TaskError
from edgefl.core.protocol import model_fingerprint
from edgefl.device.diagnostics import device_checks
from edgefl.device.hardware.board_reader import no_program
from edgefl.device.hardware.capabilities import probe
from edgefl.device.hardware.requirements import (
    TaskTraits,
    check_requirements,
    find_unsupported_backends,
    format_numpy_models,
    get_training_facts,
    read_task_traits,
    select_training_paths,
)
from edgefl.device.training.instruction import ReadinessHandler
from edgefl.device.training.task_cache import TaskCache
from edgefl.tasks.compiled.plan import CompiledPlan
from edgefl.tasks.registry import CONFIGURED, NUMPY_MODELS, is_torch_task, make_task

BLOCKED = Path(__file__).parents[2] / "e2e" / "without_torch"
OLD_PI = {"userland_bits": 32, "architecture": "armv7l", "memory_bytes": 900_000_000}


@pytest.fixture
def zero(tmp_path):
    return plant(tmp_path / "zero", ZERO_2_W)


def facts_of(root):
    return probe(root, run=no_program)


def test_a_small_board_trains_what_numpy_trains_takes_smaller_models_and_says_why_it_has_no_torch(zero):
    facts = facts_of(zero)
    assert select_training_paths(["digits", "mnist", "motionsense"], facts) == {
        "digits": "numpy", "mnist": "onnx, once compiled, or numpy, with model 2nn, mlp, mlp-tanh or logistic",
        "motionsense": "onnx, once compiled, or numpy, with model mlp or logistic",
    }  # fmt: skip
    told = get_training_facts("trainer", ["mnist"], facts)
    assert (told["backends"], told["trains"]) == (["numpy", "onnx"], True)
    assert told["backend_reasons"]["torch"].startswith("its 437 MB of memory are too few for torch")
    assert get_training_facts("trainer", ["mnist", "digits"], facts)["trains"] is True


def test_a_board_of_1_gb_or_one_that_does_not_say_is_not_held_back_and_an_evaluator_does_not_train(tmp_path):
    facts = facts_of(plant(tmp_path, PI_3))
    assert find_unsupported_backends(facts) == find_unsupported_backends({}) == {}
    assert get_training_facts("trainer", ["mnist", "digits"], facts) == {
        "backends": ["numpy", "onnx", "torch"], "trains": True, "paths": {"digits": "numpy", "mnist": "torch"},
    }  # fmt: skip
    told = get_training_facts("evaluator", ["digits"], facts)
    assert (told["trains"], told["trains_reason"]) == (False, "its role is evaluator")
    assert get_training_facts("trainer", ["nowhere:Nothing"])["trains"] is True, (
        "an unknown task makes no board useless"
    )


def test_without_torch_and_onnxruntime_a_board_trains_if_one_of_its_tasks_needs_none():
    program = """
import sys
sys.modules["onnxruntime"] = None
from edgefl.device.hardware.requirements import get_training_facts
for tasks in (["mnist"], ["mnist", "digits"], ["digits"], []):
    told = get_training_facts("trainer", tasks)
    print(told["backends"], told["trains"], "mnist needs it" in told.get("trains_reason", ""))
"""
    path = os.pathsep.join([str(BLOCKED), *sys.path[1:], str(Path(__file__).parents[3])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.splitlines() == ["['numpy'] False True", *["['numpy'] True False"] * 3]


CONFIGURED_BY = {
    "audio": {"labels": "a,b"},
    "pictures": {"labels": "a,b"},
    "series": {"columns": "a", "window": 8, "target": "t"},
}


@pytest.mark.parametrize("task", sorted(NUMPY_MODELS))
def test_the_models_that_are_offered_instead_of_torch_need_none(task):
    options = CONFIGURED_BY.get(task, {})
    assert is_torch_task(make_task(task, options | ({"model": "cnn"} if options else {})))
    assert not any(is_torch_task(make_task(task, options | {"model": model})) for model in NUMPY_MODELS[task])


@pytest.mark.parametrize("task", sorted(CONFIGURED))
def test_what_a_run_file_configures_needs_no_torch_before_one_says_so(task):
    assert read_task_traits(task) == TaskTraits(needs_torch=False, has_shape=False)


def test_a_board_without_room_for_torch_is_offered_the_other_models_of_a_configured_task(zero):
    with pytest.raises(
        TaskError, match=r"cannot train series with model gru: .*; with model mlp or linear it trains"
    ):
        check_requirements("series", CONFIGURED_BY["series"] | {"model": "gru"}, zero)


def test_a_task_that_fits_is_checked_without_a_word_and_one_that_does_not_names_what_would(zero):
    check_requirements("digits", {}, zero)
    check_requirements("mnist", {"model": "mlp"}, zero)
    with pytest.raises(
        TaskError, match=r"cannot train mnist with model cnn: its 437 MB .*; with model 2nn, mlp, mlp-tanh or log"
    ):
        check_requirements("mnist", {"model": "cnn"}, zero)
    check_requirements("mnist", {"model": "cnn"}, zero, compiled=CompiledPlan("ab" * 32, 1000))


def test_a_board_whose_memory_is_full_now_says_so_before_torch_is_loaded(tmp_path):
    root = plant(tmp_path, {**PI_3, "proc/meminfo": "MemTotal: 943952 kB\nMemAvailable: 200000 kB\n"})
    program = f"""
from pathlib import Path
from edgefl.device.hardware.requirements import check_requirements
from edgefl.core.errors import TaskError
import sys
try:
    check_requirements("mnist", {{}}, Path({str(root)!r}))
except TaskError as error:
    print(error)
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as if it were there: its room is taken
check_requirements("mnist", {{}}, Path({str(root)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "cannot train mnist: it has 205 MB of memory free, and torch takes 300 MB by itself" in done.stdout


def test_the_question_before_a_run_is_answered_with_what_would_fit(zero, tmp_path):
    shards = {"digits": str(digit_shard(tmp_path / "digits.npz", 64)), "mnist": "/nowhere.npz"}
    ready = ReadinessHandler(
        tmp_path, TaskCache(lambda: shards, accelerator="cpu", threads=1), training_lock=threading.Lock(),
        is_gossip_running=lambda _: False, root=zero,
    )  # fmt: skip
    asked = {"v": 2, "run": "r", "assignment": "r/can", "phase": "can", "edgefl": __version__, "test_fraction": 0.1}
    layout = model_fingerprint(make_task("digits").shapes())
    told, _ = ready.run_phase({**asked, "task": "digits", "layout": layout}, b"")
    assert told["ready"] is True
    told, _ = ready.run_phase({**asked, "task": "mnist", "layout": "x"}, b"")
    assert (told["ready"], told["reason"].count("its 437 MB of memory are too few for torch")) == (False, 1)


def test_a_32_bit_board_trains_nothing_and_says_why():
    told = get_training_facts("trainer", ["digits"], OLD_PI)
    assert (told["backends"], told["trains"], told["paths"]) == ([], False, {"digits": "none"})
    assert "its userland has 32 bits (armv7l)" in told["trains_reason"]
    assert get_training_facts("evaluator", ["digits"], OLD_PI)["trains"] is False
    assert get_training_facts("trainer", [], {"userland_bits": 64, "memory_bytes": 400_000_000})["trains"] is True


def test_the_doctor_says_how_a_small_board_trains_and_what_holds_it_back(zero, tmp_path):
    (training, board) = device_checks.check_board("trainer", ["digits", "mnist"], zero)
    assert (training.level, training.text) == (
        "ok",
        f"it trains digits with numpy, mnist with onnx, once compiled, or numpy, with {format_numpy_models('mnist')}",
    )
    assert (board.level, board.text) == ("ok", "nothing holds it back, now or since it was switched on")
    hot = plant(tmp_path / "hot", PI_3)
    (_, board) = device_checks.check_board("trainer", ["digits"], hot)
    assert (board.level, board.remedy) == ("warning", "a better power supply and cable")
    assert "under-voltage,throttled" in board.text
