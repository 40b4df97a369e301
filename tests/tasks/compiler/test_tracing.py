"""The contract with the pinned torch: what `tracing.py` expects of interfaces that torch does not document."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
pytest.importorskip("onnxscript", reason="needs onnxscript: pip install '.[export]'")

from edgefl.core.errors import TaskError  # noqa: E402 after what it needs
from edgefl.tasks.compiler.substitutes import use_noise  # noqa: E402
from edgefl.tasks.compiler.tracing import TracedGraph, make_program, name_layers, trace  # noqa: E402
from edgefl.tasks.onnx_graph import suppress_export_logs  # noqa: E402

INPUTS = {"w": torch.tensor([[1.0, -2.0]]), "x": torch.tensor([[3.0], [0.5]]), "unused": torch.ones(2)}


def export(program):
    """Returns the program's ONNX graph as a function of arrays."""
    with suppress_export_logs():
        content = torch.onnx.export(program, (), dynamo=True, verbose=False).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return lambda feeds: session.run(None, dict(zip(names, (feed.numpy() for feed in feeds), strict=True)))


def traced(function) -> TracedGraph:
    return trace(function, INPUTS, kept=())


def test_a_gradient_and_a_change_in_place_become_a_pure_graph_of_the_inputs_that_count() -> None:
    def step(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        count = tensors["w"].clone()
        count.add_(1.0)
        gradient = torch.func.grad(lambda w: torch.relu(w @ tensors["x"]).square().sum())(tensors["w"])
        return {"grad": gradient, "count": count}

    graph = traced(step)
    assert [*graph.inputs] == ["w", "x"]
    assert graph.outputs == ["grad", "count"]
    names = [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"]
    assert all(name.startswith("aten.") for name in names)
    assert not [name for name in names if name.split(".")[1].endswith("_") or "clone" in name or "view" in name]
    gradient, count = graph.module(torch.tensor([[2.0, 1.0]]), INPUTS["x"])
    assert gradient.tolist() == [[39.0, 6.5]]  # 2 · 6.5 · x
    assert count.tolist() == [[3.0, 2.0]]


def test_a_program_of_a_graph_is_exported_as_it_stands_with_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        factor = torch.tensor([[2.0, 5.0]])
        return {
            "y": (tensors["w"] * factor).sum(1, keepdim=True) + factor,
            "z": tensors["x"].squeeze((1,))[:, None] * factor,
        }

    program = make_program(traced(step))
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)  # takes as long as all the rest
    feeds = (torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0], [0.5]]))
    for result in (program.module()(*feeds), export(program)(feeds)):
        y, z = (np.asarray(value).tolist() for value in result)
        assert y == [[19.0, 22.0]]
        assert z == [[2.0, 5.0], [1.0, 2.5]]


def test_a_tensor_that_a_network_holds_is_a_constant_of_the_program() -> None:
    factor = torch.tensor([[2.0, 5.0]])
    program = make_program(traced(lambda tensors: {"y": tensors["x"] * factor}))
    (y,) = export(program)([torch.tensor([[1.0], [0.5]])])
    assert y.tolist() == [[2.0, 5.0], [1.0, 2.5]]


def test_an_operator_that_an_export_must_decompose_is_so_when_it_asks() -> None:
    program = make_program(traced(lambda tensors: {"y": torch.relu(tensors["x"])}))
    table = {torch.ops.aten.relu.default: lambda x: x.clamp(min=0.0)}
    with suppress_export_logs():
        asked = program.run_decompositions(table)
    names = [str(node.target) for node in asked.graph.nodes if node.op == "call_function"]
    assert names
    assert not [name for name in names if "relu" in name]


def test_a_value_that_decides_what_is_computed_is_refused() -> None:
    with pytest.raises(TaskError, match=r"looks at the value of a tensor \(an if, a loop, .item\(\)\)"):
        traced(lambda tensors: {"y": tensors["x"] if tensors["w"].sum() > 0 else -tensors["x"]})


def test_random_numbers_that_are_no_inputs_are_refused_with_their_operator() -> None:
    with pytest.raises(TaskError, match=r"aten\.\w+\.\w+ draws random numbers; only dropout of torch.nn may"):
        traced(lambda tensors: {"y": torch.bernoulli(tensors["x"] * 0.1)})


def test_an_operator_is_found_in_the_layers_that_call_it() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Tanh(), torch.nn.ReLU())
    message = r"cannot be compiled: no aten.tanh_backward here \(in 1, a Tanh\)$"
    with pytest.raises(TaskError, match=message), name_layers(network, INPUTS["x"].numpy()):
        raise TaskError("no aten.tanh_backward here")


def test_what_is_kept_by_chance_is_so_with_the_probability_that_was_asked_for():
    with use_noise([torch.tensor([[0.1], [0.5]])]):
        kept = torch.empty((2, 1)).bernoulli_(0.3)
    assert kept.tolist() == [[1.0], [0.0]]
