from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
onnx = pytest.importorskip("onnx", reason="needs onnx: pip install '.[export]'")
pytest.importorskip("onnxscript", reason="needs onnxscript: pip install '.[export]'")

from onnxscript import opset18  # noqa: E402 after what it needs
from tasks.compiler.networks import NETWORKS, Example  # noqa: E402

from edgefl.core.errors import TaskError  # noqa: E402
from edgefl.core.types import Dataset  # noqa: E402
from edgefl.tasks.compiled.artefact import PERMITTED_OPERATORS  # noqa: E402
from edgefl.tasks.compiler import onnx_files  # noqa: E402
from edgefl.tasks.compiler.compilation import compile_task, format_loss  # noqa: E402
from edgefl.tasks.compiler.gradient_check import MEDIAN_BOUND, GraphRunner  # noqa: E402
from edgefl.tasks.compiler.recurrent import run_layer  # noqa: E402
from edgefl.tasks.compiler.steps import make_step  # noqa: E402
from edgefl.tasks.compiler.translations import registry  # noqa: E402
from edgefl.tasks.learners.torch_learner import TorchLearner  # noqa: E402
from edgefl.tasks.losses.class_losses import CrossEntropy  # noqa: E402
from edgefl.tasks.losses.registry import make_loss  # noqa: E402
from edgefl.tasks.registry import make_task  # noqa: E402

LOSSES = ["binary-cross-entropy", "huber:0.5", "quantile:0.1,0.5,0.9", "poisson"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_dropout_of_a_layer_all_of_whose_tensors_stay_is_off_as_in_torch():
    network = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(4, 2, 8), torch.nn.Linear(4, 3))
    names = [name for name, _ in network.named_parameters() if name.startswith("0.")]
    draws = [make_step(network, CrossEntropy(), np.zeros((5, 4), np.float32), constant).noise for constant in
             ((), names[1:], names)]  # fmt: skip
    assert draws[0] == draws[1] != ()
    assert draws[2] == ()


@pytest.mark.extended
@pytest.mark.parametrize("name", NETWORKS)
def test_each_kind_of_layer_has_the_gradient_that_torch_has_in_double_precision(name):
    task = NETWORKS[name]()
    compiled, report = compile_task(task, name="example", batch_size=4, data=task.read(""))
    assert {spec.name for spec in compiled.manifest.model} == set(task.init(1))
    assert max(report.check.median.values()) < MEDIAN_BOUND / 2
    assert report.check.num_real == report.check.num_steps // 2
    assert set(compiled.manifest.operators) <= set(PERMITTED_OPERATORS)
    assert 0 < compiled.manifest.flops < 10**9
    assert 0 < compiled.manifest.peak_bytes < 10**7


@pytest.mark.parametrize(("name", "bounds"), [("threshold_backward", (0.0,)), ("hardtanh_backward", (0.0, 6.0))])
def test_gradients_pass_where_torch_lets_them_and_not_on_a_bound(name, bounds):
    x = np.array([-1.0, 0.0, 1e-9, 3.0, 6.0, 7.0, -1.0, np.nan], np.float32)
    grad = np.array([1.0, np.inf, 3.0, np.inf, 5.0, np.inf, np.nan, 8.0], np.float32)
    found = getattr(registry, name)(grad, x, *bounds)
    right = getattr(torch.ops.aten, name)(torch.from_numpy(grad), torch.from_numpy(x), *bounds)
    np.testing.assert_array_equal(found.value, right.numpy())


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_recurrent_layers_are_computed_as_torch_does_in_both_directions_with_first_states(kind):
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(3, 5, num_layers=2, bidirectional=True).double()
    x, first = torch.randn(4, 2, 3, dtype=torch.float64), torch.randn(4, 2, 5, dtype=torch.float64)
    state = first if kind == "GRU" else (first, first.flip(0))

    def compute(run):
        inputs = x.clone().requires_grad_()
        outputs, ended = run(layer, inputs, state)
        ends = [ended] if kind == "GRU" else [*ended]
        total = outputs.square().sum() + sum((end * end.cos()).sum() for end in ends)
        return [outputs, *ends, *torch.autograd.grad(total, [inputs, *layer.parameters()])]

    for found, right in zip(compute(run_layer), compute(getattr(torch.nn, kind).__call__), strict=True):
        assert torch.allclose(found, right, rtol=1e-9, atol=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_of_values_is_compiled_and_named_as_a_board_makes_it(loss):
    task = Example(lambda: torch.nn.Linear(4, 3), (4,), loss, ())
    compiled, report = compile_task(task, name="example", batch_size=5)
    assert max(report.check.worst.values()) < 1e-5
    assert make_loss(compiled.manifest.loss) == make_loss(loss)
    assert compiled.manifest.target_shape == (3,)


def test_a_loss_is_named_with_its_settings():
    for name in (*LOSSES, "reconstruction:huber:2", "cross-entropy"):
        assert make_loss(format_loss(make_loss(name))) == make_loss(name)


@pytest.mark.extended
def test_inputs_are_normalised_by_statistics_that_a_network_holds():
    class Normalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)
            self.register_buffer("mean", torch.arange(4.0))
            self.register_buffer("variance", torch.arange(1.0, 5.0), persistent=False)

        def forward(self, x):
            return self.linear(torch.batch_norm(x, None, None, self.mean, self.variance, False, 0.1, 1e-5, False))

    _, report = compile_task(Example(Normalised, (4,)), name="example", batch_size=5)
    assert max(report.check.worst.values()) < 1e-5


@pytest.fixture(scope="module")
def dropped():
    network = lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))  # noqa: E731
    return compile_task(Example(network, (4,)), name="example", batch_size=3)[0]


@pytest.mark.extended
def test_dropout_keeps_what_its_random_input_says_and_an_example_of_weight_0_counts_for_nothing(dropped):
    rng = np.random.default_rng(0)
    feeds = {
        "param:0.weight": rng.standard_normal((8, 4), np.float32), "param:0.bias": np.zeros(8, np.float32),
        "param:2.weight": rng.standard_normal((3, 8), np.float32), "param:2.bias": np.zeros(3, np.float32),
        "batch:inputs": rng.standard_normal((3, 4), np.float32), "batch:targets": np.array([0, 1, 2]),
        "batch:weights": np.array([1.0, 3.0, 0.0], np.float32),
    }  # fmt: skip
    assert dropped.manifest.noise == ((3, 8),)
    runner = GraphRunner(dropped.train)
    noise = np.full((3, 8), 0.9, np.float32)
    noise[:, :4] = 0.1
    found = runner.run({**feeds, "noise:0": noise})
    assert not found["grad:0.weight"][:4].any()
    assert found["grad:0.weight"][4:].all()

    other = {**feeds, "batch:inputs": feeds["batch:inputs"].copy()}
    other["batch:inputs"][2] = 7.0
    assert np.array_equal(runner.run({**other, "noise:0": noise})["grad:0.weight"], found["grad:0.weight"])

    hidden = feeds["batch:inputs"] @ feeds["param:0.weight"].T * np.where(noise >= 0.5, 2.0, 0.0)
    logits = hidden @ feeds["param:2.weight"].T
    each = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(3), feeds["batch:targets"]]
    assert found["loss"] == pytest.approx((each[0] + 3.0 * each[1]) / 4.0, rel=1e-5)


@pytest.mark.extended
def test_a_batch_without_weight_has_a_gradient_of_0(dropped):
    feeds = {name: np.ones(shape, np.float32) for name, shape in (
        ("param:0.weight", (8, 4)), ("param:0.bias", 8), ("param:2.weight", (3, 8)), ("param:2.bias", 3),
        ("batch:inputs", (3, 4)), ("noise:0", (3, 8)))}  # fmt: skip
    feeds |= {"batch:targets": np.zeros(3, np.int64), "batch:weights": np.zeros(3, np.float32)}
    found = GraphRunner(dropped.train).run(feeds)
    assert all(np.isfinite(value).all() and not value.any() for value in found.values())


@pytest.mark.extended
def test_an_evaluation_returns_outputs_and_the_weighted_sum_of_losses(dropped):
    feeds = {"param:0.weight": np.eye(8, 4, dtype=np.float32), "param:0.bias": np.zeros(8, np.float32),
             "param:2.weight": np.eye(3, 8, dtype=np.float32), "param:2.bias": np.zeros(3, np.float32),
             "batch:inputs": np.eye(3, 4, dtype=np.float32), "batch:targets": np.zeros(3, np.int64),
             "batch:weights": np.array([2.0, 0.0, 1.0], np.float32)}  # fmt: skip
    found = GraphRunner(dropped.evaluate).run(feeds)
    assert np.array_equal(found["outputs"], np.eye(3))
    right, wrong = np.log(2 + np.e) - 1.0, np.log(2 + np.e)
    assert found["loss"] == pytest.approx(2.0 * right + wrong, rel=1e-6)


@pytest.mark.extended
def test_a_wrong_gradient_is_refused_with_the_name_of_its_tensor(monkeypatch):
    def wrong(grad, x, minimum, maximum):
        return opset18.Mul(grad, opset18.Constant(value_float=0.999))

    table = MappingProxyType({**registry.TRANSLATIONS, torch.ops.aten.hardtanh_backward.default: wrong})
    monkeypatch.setattr(onnx_files, "TRANSLATIONS", table)
    network = lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Hardtanh(), torch.nn.Linear(8, 3))  # noqa: E731
    with pytest.raises(TaskError, match=r"the median relative error of grad:0.\w+ is .*nothing was written"):
        compile_task(Example(network, (4,)), name="example", batch_size=3)


@pytest.mark.extended
def test_an_operator_without_a_form_in_onnx_is_refused_with_the_layer_that_has_it():
    class Sorted(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.eigvalsh(x[:, :, None] * x[:, None])

    network = lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), Sorted())  # noqa: E731
    with pytest.raises(TaskError, match=r"cannot be compiled: operator aten.*_linalg_eigh.*\(in 1, a Sorted\)$"):
        compile_task(Example(network, (4,)), name="example", batch_size=3)


def test_a_task_in_numpy_needs_no_compiling_and_one_without_a_shape_needs_data():
    with pytest.raises(TaskError, match="one in NumPy needs no torch as it is"):
        compile_task(make_task("mnist", {"model": "logistic"}), name="mnist")
    task = Example(lambda: torch.nn.Linear(4, 3), None)
    with pytest.raises(TaskError, match=r"does not say the shape of its inputs \(input_shape\)"):
        compile_task(task, name="example")


def test_what_a_learner_does_that_boards_do_not_see_is_refused():
    @dataclass(frozen=True)
    class Hidden(Example):
        trained: Any = "cross-entropy"

        def learner(self, *, accelerator="cpu", threads=None):
            return TorchLearner(self.build(), prepare=lambda inputs: inputs / np.float32(2.0), loss=self.trained)

    network = lambda: torch.nn.Linear(4, 3)  # noqa: E731
    with pytest.raises(TaskError, match="prepares its inputs in its learner alone"):
        compile_task(Hidden(network, (4,)), name="example", batch_size=3)
    smooth = CrossEntropy(label_smoothing=0.1)
    with pytest.raises(TaskError, match=r"smoothing=0.0\), its learner trains with .*smoothing=0.1\); boards count"):
        compile_task(Hidden(network, (4,), trained=smooth), name="example", batch_size=3)


def test_inputs_by_name_are_refused_in_one_line():
    class Joined(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 3)

        def forward(self, left, right):
            return self.fc(left + right)

    data = Dataset(inputs={"left": np.zeros((4, 4)), "right": np.zeros((4, 4))}, targets=np.zeros(4, np.int64))
    for given, network in ((None, Joined), (data, Joined), (data, lambda: torch.nn.Linear(4, 3))):
        with pytest.raises(TaskError, match="inputs by name, and a compiled task takes one array"):
            compile_task(Example(network, (4,)), name="example", batch_size=3, data=given)


@pytest.mark.parametrize("loss", ["ctc", "contrastive"])
def test_a_loss_of_torch_alone_is_refused(loss):
    @dataclass(frozen=True)
    class Own(Example):
        def learner(self, *, accelerator="cpu", threads=None):
            return TorchLearner(self.build(), loss=loss)

    with pytest.raises(TaskError, match=f"loss {loss} of task .* has no form for boards without torch"):
        compile_task(Own(lambda: torch.nn.Linear(4, 3), (4,)), name="example", batch_size=3)
