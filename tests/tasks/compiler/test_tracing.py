"""The contract with the pinned torch: what `tracing.py` expects of interfaces that torch does not document."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
pytest.importorskip("onnxscript", reason="needs onnxscript: pip install '.[export]'")

from edgefl.core.errors import TaskError  # noqa: E402 after what it needs
from edgefl.tasks.compiler.substitutes import use_noise  # noqa: E402
from edgefl.tasks.compiler.tracing import TracedGraph, name_layers, trace  # noqa: E402

INPUTS = {"w": torch.tensor([[1.0, -2.0]]), "x": torch.tensor([[3.0], [0.5]]), "unused": torch.ones(2)}


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
