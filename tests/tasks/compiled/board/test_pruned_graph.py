"""A graph without the outputs that nobody needs: what is left computes the same, and nothing else is computed."""

import numpy as np
import pytest
from tasks.compiled.board.dense_graphs import BATCH_SIZE, MODEL, PARAMETERS, helper, make_compiled, make_model, onnx

from edgefl.core.errors import DataError
from edgefl.tasks.compiled.artefact import OPSET, PERMITTED_OPERATORS
from edgefl.tasks.compiled.board.bound_graph import Arena, make_session
from edgefl.tasks.compiled.board.graph_reader import read_graph
from edgefl.tasks.compiled.board.pruned_graph import remove_outputs

FLOAT = onnx.TensorProto.FLOAT


def run(content, feeds):
    session = make_session(content, 1, Arena(2**28))
    names = [output.name for output in session.get_outputs()]
    taken = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
    return dict(zip(names, session.run(None, taken), strict=True))


def list_written(content):
    return {name for node in onnx.load_from_string(content).graph.node for name in node.output}


def test_the_nodes_of_other_outputs_stay_and_compute_the_same():
    rng, content = np.random.default_rng(2), make_compiled().train
    feeds = {f"param:{name}": value for name, value in MODEL.init(3).items()} | {
        "batch:inputs": rng.standard_normal((BATCH_SIZE, 4)).astype(np.float32),
        "batch:targets": rng.integers(0, 3, BATCH_SIZE),
        "batch:weights": np.ones(BATCH_SIZE, np.float32),
        "buffer:seen": np.array(4),
    }
    smaller = remove_outputs(content, {"grad:fc1.weight", "grad:fc1.bias"})
    gone = {"back", "is_on", "on", "inner", "grad:fc1.weight", "grad:fc1.bias"}
    assert list_written(content) - list_written(smaller) == gone
    assert {tensor.name for tensor in onnx.load_from_string(smaller).graph.initializer} == {
        "one", "zero", "classes", "one_more"
    }  # fmt: skip
    onnx.checker.check_model(smaller)
    read_graph(smaller, PERMITTED_OPERATORS, OPSET)
    left = run(smaller, feeds)
    assert left.keys() == {"loss", "new:seen", *(f"grad:{name}" for name in PARAMETERS)} - gone
    for name, value in run(content, feeds).items():
        if name in left:
            np.testing.assert_array_equal(left[name], value)


def test_what_the_steps_of_a_scan_read_around_them_stays():
    one = lambda name, shape: helper.make_tensor_value_info(name, FLOAT, shape)  # noqa: E731
    body = helper.make_graph(
        [helper.make_node("Mul", ["step", "factor"], ["scaled"])], "steps", [one("step", [])], [one("scaled", [])]
    )
    nodes = [
        helper.make_node("Neg", ["x"], ["unread"]),
        helper.make_node("ReduceSum", ["x"], ["factor"], keepdims=0),
        helper.make_node("Scan", ["x"], ["y"], num_scan_inputs=1, body=body),
    ]
    content = make_model(nodes, {"x": (FLOAT, [3])}, {"y": (FLOAT, [3]), "unread": (FLOAT, [3])}, constants={})
    smaller = remove_outputs(content, {"unread"})
    assert list_written(smaller) == {"factor", "y"}
    x = np.array([1, 2, 3], np.float32)
    np.testing.assert_array_equal(run(smaller, {"x": x})["y"], 6 * x)


def test_an_input_that_is_left_out_keeps_no_node_whose_output_is_left_out():
    nodes = [
        helper.make_node("Dropout", ["x"], ["unread", ""]),
        helper.make_node("Clip", ["x", "", "most"], ["y"]),
    ]
    constants = {"most": np.array(2, np.float32)}
    content = make_model(nodes, {"x": (FLOAT, [3])}, {"y": (FLOAT, [3]), "unread": (FLOAT, [3])}, constants=constants)
    assert list_written(remove_outputs(content, {"unread"})) == {"y"}


def test_what_is_no_graph_is_refused():
    with pytest.raises(DataError, match="no ONNX file"):
        remove_outputs(b"\x0a\xff", {"y"})
