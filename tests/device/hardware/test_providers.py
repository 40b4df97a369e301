"""The provider that a board trains by: measured in its own process, right, faster, given up where it fails."""

import logging

import numpy as np
import pytest
from tasks.compiled.board.dense_graphs import MODEL, make_compiled

from edgefl.core.errors import DataError, EdgeflError
from edgefl.core.types import Dataset
from edgefl.device.hardware import providers
from edgefl.device.hardware.providers import MAX_DEVIATION, choose_provider, measure_provider
from edgefl.system.processes import call_in_subprocess
from edgefl.tasks.compiled.artefact import encode_artefact
from edgefl.tasks.compiled.board import onnx_learner
from edgefl.tasks.compiled.board.bound_graph import CPU, Arena, list_providers, make_session
from edgefl.tasks.compiled.board.onnx_learner import OnnxLearner
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.preparation import to_features

XNNPACK, ACL, CUDA, TENSORRT = (f"{name}ExecutionProvider" for name in ("Xnnpack", "ACL", "CUDA", "Tensorrt"))
AZURE = "AzureExecutionProvider"
RIGHT = {"cpu_s": 2.0, "deviation": 1e-6}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "dense.compiled"
    path.write_bytes(encode_artefact(make_compiled()))
    return path


def choose(path, replies, *, accelerator="cpu", more=()):
    asked = []

    def call(_module, request, **_options):
        asked.append(request["provider"])
        reply = replies[request["provider"]]
        if isinstance(reply, Exception):
            raise reply
        return reply

    available = lambda: [*more, *replies, CPU]  # noqa: E731 as short as what it says
    return choose_provider(path, accelerator=accelerator, threads=1, available=available, call=call), asked


def test_nothing_is_tried_where_only_the_cpu_is_there(path):
    assert choose(path, {}, more=(AZURE, "CoreMLExecutionProvider"), accelerator="cuda") == (CPU, [])


def test_the_fastest_one_that_is_right_is_taken(path):
    replies = {
        XNNPACK: {**RIGHT, "provider_s": 1.5},
        ACL: {**RIGHT, "provider_s": 1.0},
        CUDA: {**RIGHT, "provider_s": 0.1, "deviation": 2 * MAX_DEVIATION},
        TENSORRT: EdgeflError("TensorrtExecutionProvider took longer than 90 s"),
    }
    assert choose(path, replies, accelerator="cuda") == (ACL, [TENSORRT, CUDA, XNNPACK, ACL])


@pytest.mark.parametrize("change", [{"provider_s": 1.95}, {"deviation": float("nan")}, {"deviation": 1.0}])
def test_one_that_is_hardly_faster_or_not_right_is_left(path, change):
    assert choose(path, {XNNPACK: {**RIGHT, "provider_s": 0.5, **change}})[0] == CPU


def test_a_gpu_that_the_board_does_not_train_on_is_not_tried(path):
    replies = {name: {**RIGHT, "provider_s": 0.1} for name in (CUDA, TENSORRT)}
    assert choose(path, replies, accelerator="cpu") == (CPU, [])


@pytest.mark.extended
def test_a_process_of_its_own_measures_what_is_there_and_says_what_is_not(path, caplog):
    request = {"path": str(path), "provider": CPU, "threads": 1}
    found = call_in_subprocess(providers.__name__, request, description="the CPU", timeout_s=60)
    assert found["deviation"] == 0
    assert 0 < found["provider_s"] < 1
    assert 0 < found["cpu_s"] < 1
    assert XNNPACK not in list_providers()
    with caplog.at_level(logging.WARNING):
        assert choose_provider(path, accelerator="cpu", threads=1, available=lambda: [XNNPACK]) == CPU
    assert "provider XnnpackExecutionProvider is not used for dense.compiled" in caplog.text


def test_another_gradient_is_measured_as_an_error(monkeypatch):
    """A provider that is the CPU's, and by whose runs a gradient is a thousandth too large."""

    class Wrong(onnx_learner.BoundGraph):
        def run(self):
            outputs = super().run()
            outputs["grad:fc2.weight"][...] *= 1.001
            return outputs

    sides, right = [], onnx_learner.BoundGraph

    def make(graph, threads, arena, provider=CPU):
        sides.append(provider)
        return make_session(graph, threads, arena)

    def bind(*ends):
        return (Wrong if sides[-1] == ACL else right)(*ends)

    monkeypatch.setattr(providers, "MEASURE_S", 0.0)
    monkeypatch.setattr(onnx_learner, "make_session", make)
    monkeypatch.setattr(onnx_learner, "BoundGraph", bind)
    assert measure_provider(make_compiled(), ACL, 1)["deviation"] == pytest.approx(1e-3, rel=0.01)
    assert sides == [ACL, CPU]
    assert measure_provider(make_compiled(), XNNPACK, 1)["deviation"] == 0


def test_training_goes_on_by_the_cpu_where_a_provider_fails(caplog):
    rng = np.random.default_rng(1)
    batch = Dataset(inputs=rng.standard_normal((5, 4)).astype(np.float32), targets=rng.integers(0, 3, 5))
    losses = []
    for provider in (CPU, XNNPACK):
        learner = OnnxLearner(make_compiled(), to_features, CrossEntropy(), threads=1, provider=provider)
        learner.load(MODEL.init(3))
        losses.append([learner.gradient(batch) for _ in range(2)])
    assert losses[0] == losses[1]
    assert caplog.text.count("XnnpackExecutionProvider failed, the CPU goes on") == 1
    strict = OnnxLearner(make_compiled(), to_features, CrossEntropy(), provider=XNNPACK, falls_back=False)
    with pytest.raises(DataError, match="Specified provider 'XnnpackExecutionProvider' is not in"):
        strict.gradient(batch)


def test_a_provider_that_a_session_leaves_out_in_silence_is_missed(monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")
    make = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *args, **more: make(*args, **{**more, "providers": [CPU]})
    )
    with pytest.raises(DataError, match=f"onnxruntime has no {ACL} here"):
        make_session(make_compiled().train, 1, Arena(2**28), ACL)
