"""The provider that a board trains by: measured in its own process, right, faster, given up where it fails."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tasks.compiled.board.dense_graphs import MODEL, make_compiled

from edgefl.core.errors import DataError, EdgeflError
from edgefl.core.types import Dataset
from edgefl.device.hardware import providers
from edgefl.device.hardware.providers import MAX_CHOICES, MAX_DEVIATION, ProviderChoice, measure_provider
from edgefl.system.processes import StoppedCallError, call_in_subprocess
from edgefl.tasks.compiled.artefact import encode_artefact
from edgefl.tasks.compiled.board import onnx_learner
from edgefl.tasks.compiled.board.bound_graph import CPU, Arena, list_providers, make_session
from edgefl.tasks.compiled.board.graph_check import check_compiled_task
from edgefl.tasks.compiled.board.onnx_learner import OnnxLearner
from edgefl.tasks.compiled.board.pruned_graph import remove_outputs
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


def make_choice(path, replies, *, accelerator="cpu", more=(), asked=None, **options):
    def call(_module, request, **_options):
        if asked is not None:
            asked.append(request["provider"])
        reply = replies[request["provider"]]
        if isinstance(reply, Exception):
            raise reply
        return reply

    return ProviderChoice(
        path,
        path.parent / "providers.json",
        accelerator=accelerator,
        threads=1,
        available=lambda: [*more, *replies, CPU],
        call=call,
        **options,
    )


def choose(path, replies, **options):
    asked = []
    with make_choice(path, replies, asked=asked, **options).open() as provider:
        pass
    return provider, asked


def test_nothing_is_tried_where_only_the_cpu_is_there(path):
    assert choose(path, {}, more=(AZURE, "CoreMLExecutionProvider"), accelerator="cuda") == (CPU, [])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


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


def test_a_choice_is_kept_for_a_file_a_runtime_and_its_providers(path, monkeypatch):
    replies = {XNNPACK: {**RIGHT, "provider_s": 0.5}}
    assert choose(path, replies) == (XNNPACK, [XNNPACK])
    assert choose(path, replies) == (XNNPACK, [])
    assert choose(path, {**replies, ACL: {**RIGHT, "provider_s": 1.0}}) == (XNNPACK, [XNNPACK, ACL])
    assert choose(path, {}) == (CPU, [])
    for index in range(MAX_CHOICES):
        other = path.with_name(f"{index}.compiled")
        assert choose(other, {XNNPACK: {**RIGHT, "provider_s": 1.9}}) == (CPU, [XNNPACK])
        assert choose(other, {XNNPACK: {**RIGHT, "provider_s": 1.9}}) == (CPU, [])
    assert choose(path, replies) == (XNNPACK, [XNNPACK])  # of the oldest nothing is left
    monkeypatch.setattr(providers, "get_runtime_version", lambda: "0")
    assert choose(path, replies) == (XNNPACK, [XNNPACK])
    for damage in (b"", b"[]", b'{"', bytes(range(256))):
        (path.parent / "providers.json").write_bytes(damage)
        assert choose(path, replies) == (XNNPACK, [XNNPACK])


@pytest.mark.parametrize("kept", [False, True])
def test_a_provider_that_ends_the_process_in_its_first_step_is_not_taken_again(path, kept):
    replies = {XNNPACK: {**RIGHT, "provider_s": 0.5}}
    if kept:
        choose(path, replies)
    opened = make_choice(path, replies).open()
    assert opened.__enter__() == XNNPACK
    assert choose(path, replies) == (CPU, [])  # by the next process: this one never came so far as to leave the block


def test_a_provider_that_fails_in_its_first_step_is_not_taken_again(path):
    replies = {XNNPACK: {**RIGHT, "provider_s": 0.5}}
    batch = Dataset(inputs=np.ones((5, 4), np.float32), targets=np.arange(5) % 3)
    opens = make_choice(path, replies).open  # XNNPACK is not in this machine's onnxruntime
    learner = OnnxLearner(make_compiled(), to_features, CrossEntropy(), threads=1, open_provider=opens)
    assert not (path.parent / "providers.json").exists()  # nothing is tried before the first step
    learner.load(MODEL.init(3))
    assert learner.gradient(batch) > 0
    assert choose(path, replies) == (CPU, [])


def test_a_stop_ends_a_trial_and_it_is_made_again(path):
    replies = {XNNPACK: StoppedCallError("stopped"), ACL: {**RIGHT, "provider_s": 0.5}}
    assert choose(path, replies) == (CPU, [XNNPACK])
    assert choose(path, replies) == (CPU, [XNNPACK])
    asked, stop = [], lambda: True

    def call(_module, _request, *, should_stop, **_options):
        asked.append(should_stop)
        raise StoppedCallError("stopped")

    choice = make_choice(path, replies, should_stop=stop)
    choice._call = call
    with choice.open() as provider:
        assert (provider, asked) == (CPU, [stop])


def test_nothing_is_tried_where_the_choice_cannot_be_kept(path):
    choice = make_choice(path, {XNNPACK: {**RIGHT, "provider_s": 0.5}}, asked=(asked := []))
    choice._choices_path = path.parent / "none" / "providers.json"
    with choice.open() as provider:
        assert (provider, asked) == (CPU, [])


@pytest.mark.extended
def test_a_process_of_its_own_measures_what_is_there_and_says_what_is_not(path, caplog):
    request = {"path": str(path), "provider": CPU, "threads": 1, "max_arena_bytes": 2**28}
    found = call_in_subprocess(providers.__name__, request, description="the CPU", timeout_s=60)
    assert found["deviation"] == 0
    assert 0 < found["provider_s"] < 1
    assert 0 < found["cpu_s"] < 1
    assert XNNPACK not in list_providers()
    with caplog.at_level(logging.WARNING):
        assert providers.choose_provider(path, [XNNPACK], threads=1) == CPU
    assert "provider XnnpackExecutionProvider is not used for dense.compiled" in caplog.text


@pytest.mark.parametrize(
    ("output", "factor", "deviation"),
    [("grad:fc2.weight", 1.001, 1e-3), ("loss", 7, 6.0), ("new:seen", 3, 2.0), ("loss", np.nan, np.nan)],
)
def test_another_output_is_measured_as_an_error(monkeypatch, output, factor, deviation):
    """A provider that is the CPU's, and by whose runs an output is too large by a factor."""

    class Wrong(onnx_learner.BoundGraph):
        def run(self):
            outputs = super().run()
            outputs[output][...] = outputs[output] * factor
            return outputs

    sides, right = [], onnx_learner.BoundGraph

    def make(graph, threads, arena, provider=CPU):
        sides.append((provider, arena.max_bytes))
        return make_session(graph, threads, arena)

    def bind(*ends):
        return (Wrong if sides[-1][0] == ACL else right)(*ends)

    monkeypatch.setattr(providers, "MEASURE_S", 0.0)
    monkeypatch.setattr(onnx_learner, "make_session", make)
    monkeypatch.setattr(onnx_learner, "BoundGraph", bind)
    found = measure_provider(make_compiled(), ACL, 1, max_arena_bytes=2**27)["deviation"]
    assert found == pytest.approx(deviation, rel=0.01, nan_ok=True)
    assert sides == [(ACL, 2**27), (CPU, 2**27)]
    assert measure_provider(make_compiled(), XNNPACK, 1)["deviation"] == 0


def test_a_file_of_which_a_part_stays_as_it_is_is_measured_without_that_part():
    compiled = make_compiled()
    train = remove_outputs(compiled.train, {"grad:fc1.bias", "new:seen"})
    frozen = replace(compiled, train=train, manifest=replace(compiled.manifest, constant=("fc1.bias", "seen")))
    check_compiled_task(frozen)
    assert measure_provider(frozen, CPU, 1)["deviation"] == 0


def test_training_goes_on_by_the_cpu_where_a_provider_fails(caplog):
    rng = np.random.default_rng(1)
    batch = Dataset(inputs=rng.standard_normal((5, 4)).astype(np.float32), targets=rng.integers(0, 3, 5))
    losses = []
    for provider in (CPU, XNNPACK):
        opens = partial(nullcontext, provider)
        learner = OnnxLearner(make_compiled(), to_features, CrossEntropy(), threads=1, open_provider=opens)
        learner.load(MODEL.init(3))
        losses.append([learner.gradient(batch) for _ in range(2)])
    assert losses[0] == losses[1]
    assert caplog.text.count("XnnpackExecutionProvider failed, the CPU goes on") == 1
    strict = OnnxLearner(make_compiled(), to_features, CrossEntropy(), open_provider=opens, falls_back=False)
    with pytest.raises(DataError, match="Specified provider 'XnnpackExecutionProvider' is not in"):
        strict.gradient(batch)


@pytest.mark.parametrize(
    ("provider", "asked"),
    [
        (ACL, [ACL, CPU]),
        (CUDA, [(CUDA, {"gpu_mem_limit": str(2**28)}), CPU]),
        (TENSORRT, [(TENSORRT, {"trt_max_workspace_size": str(2**28)}), CPU]),
    ],
)
def test_a_provider_gets_the_limit_and_is_missed_where_a_session_leaves_it_out(monkeypatch, provider, asked):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")
    make, found = onnxruntime.InferenceSession, []

    def leave_out(*args, **more):
        found.extend(more["providers"])
        return make(*args, **{**more, "providers": [CPU]})

    monkeypatch.setattr(onnxruntime, "InferenceSession", leave_out)
    with pytest.raises(DataError, match=f"onnxruntime has no {provider} here"):
        make_session(make_compiled().train, 1, Arena(2**28), provider)
    assert found == asked
