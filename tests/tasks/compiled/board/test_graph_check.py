"""A compiled task from elsewhere: what it may not ask for is refused before a runtime sees it, in one clear line."""

from dataclasses import replace

import numpy as np
import pytest
from tasks.compiled.board.dense_graphs import (
    MODEL,
    TensorProto,
    change_graph,
    helper,
    make_compiled,
    numpy_helper,
    onnx,
)

from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import TensorSpec
from edgefl.tasks.compiled.artefact import EVALUATE, PERMITTED_OPERATORS, TRAIN, encode_artefact
from edgefl.tasks.compiled.board.graph_check import check_compiled_task, check_model, load_compiled_task
from edgefl.tasks.compiled.board.graph_reader import MAX_VALUES, read_graph


def test_a_valid_task_is_read_from_its_file(tmp_path):
    path, compiled = tmp_path / "a.compiled", make_compiled(has_noise=True)
    path.write_bytes(encode_artefact(compiled))
    assert load_compiled_task(path) == compiled
    facts = read_graph(compiled.train, frozenset(PERMITTED_OPERATORS), 18)
    model = onnx.load_from_string(compiled.train)
    assert facts.num_nodes == len(model.graph.node)
    assert facts.operators == {node.op_type for node in model.graph.node}
    assert [value.name for value in facts.inputs] == [value.name for value in model.graph.input]
    assert facts.inputs[-1].dtype == "int64"
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        load_compiled_task(path)


def add_node(operator, **attributes):
    return lambda model: model.graph.node.append(helper.make_node(operator, ["loss"], ["x"], **attributes))


def set_domain(model):
    model.graph.node[0].domain = "com.microsoft"


def import_domain(model):
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def set_opset(model):
    model.opset_import[0].version = 99


def use_external(model):
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def claim_huge(model):
    model.graph.initializer[0].dims[:] = [50_000, 50_000]


def overflow(model):
    model.graph.initializer[0].dims[:] = [2**33, 2**33]


def fill_huge(model):
    model.graph.initializer.append(numpy_helper.from_array(np.array([100_000, 100_000]), "huge"))
    model.graph.node.append(helper.make_node("ConstantOfShape", ["huge"], ["filled"]))


def count_far(model):
    for name, value in (("from", 0.0), ("to", 1e12), ("by", 1.0)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    model.graph.node.append(helper.make_node("Range", ["from", "to", "by"], ["counted"]))


def repeat_far(model):
    value = numpy_helper.from_array(np.array([2**31]))
    model.graph.node.append(helper.make_node("Constant", [], ["times"], value=value))
    model.graph.node.append(helper.make_node("Tile", ["loss", "times"], ["tiled"]))


def make_steps(*, inner=()):
    one = helper.make_tensor_value_info("a", TensorProto.FLOAT, [])
    two = helper.make_tensor_value_info("b", TensorProto.FLOAT, [])
    return helper.make_graph([*inner, helper.make_node("Relu", ["a"], ["b"])], "steps", [one], [two])


def loop(model):
    model.graph.node.append(helper.make_node("Loop", ["", "", "loss"], ["x"], body=make_steps()))


def nest_scans(model):
    inner = helper.make_node("Scan", ["a"], ["c"], num_scan_inputs=1, body=make_steps())
    outer = make_steps(inner=[inner])
    model.graph.node.append(helper.make_node("Scan", ["loss"], ["x"], num_scan_inputs=1, body=outer))


def hide_in_steps(model):
    outer = make_steps(inner=[helper.make_node("Loop", ["a"], ["c"])])
    model.graph.node.append(helper.make_node("Scan", ["loss"], ["x"], num_scan_inputs=1, body=outer))


def branch(model):
    model.graph.node.append(helper.make_node("Relu", ["loss"], ["x"], then_branch=make_steps()))


def add_function(model):
    model.functions.add(name="f", domain="")


def add_sparse(model):
    model.graph.sparse_initializer.add()


def add_text_tensor(model):
    model.graph.initializer.append(helper.make_tensor("t", TensorProto.STRING, [1], [b"x"]))


def lengthen(model):
    model.graph.node.extend(helper.make_node("Neg", [f"n{index}"], [f"n{index + 1}"]) for index in range(50_001))


def rename(side, name, new):
    def change(model):
        next(value for value in getattr(model.graph, side) if value.name == name).name = new

    return change


def reshape_input(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 7


def retype_input(model):
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64


def free_axis(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"


HOSTILE = [
    (add_node("Loop"), "operator 'Loop' is not permitted"),
    (add_node("If"), "operator 'If' is not permitted"),
    (add_node("SequenceInsert"), "operator 'SequenceInsert' is not permitted"),
    (set_domain, "operator 'Gemm' is of domain 'com.microsoft', only those of ONNX itself are run"),
    (import_domain, "needs domain 'com.microsoft' in version 1, only ONNX 18 is run"),
    (set_opset, "needs domain '' in version 99, only ONNX 18 is run"),
    (use_external, "tensor 'one' lies in another file; external data is not read"),
    (claim_huge, rf"tensor 'one' has shape \[50000, 50000\], at most {MAX_VALUES} values"),
    (overflow, r"tensor 'one' has shape \[8589934592, 8589934592\]"),
    (fill_huge, r"ConstantOfShape makes 1e\+10 values"),
    (count_far, r"Range makes 1e\+12 values"),
    (repeat_far, r"Tile makes 2.15e\+09 values"),
    (loop, "operator 'Loop' is not permitted"),
    (nest_scans, "Scans must not lie in each other"),
    (hide_in_steps, "operator 'Loop' is not permitted"),
    (branch, "a node Relu has a graph in it, only a Scan may"),
    (add_function, "it has functions, which is not read"),
    (add_sparse, "it has sparse tensors, which is not read"),
    (add_text_tensor, "tensor 't' is of type 8"),
    (lengthen, "more than 50000 nodes"),
    (rename("input", "param:fc1.bias", "param:other"), "its manifest knows no input 'param:other'"),
    (rename("output", "grad:fc1.bias", "grad:other"), "its manifest knows no output 'grad:other'"),
    (rename("output", "new:seen", "loss"), "its outputs have a name twice"),
    (reshape_input, r"input 'param:fc1.weight' is float32 \[7, 4\], by its manifest float32 \[5, 4\]"),
    (retype_input, "input 'param:fc1.weight' is int64"),
    (free_axis, "'param:fc1.weight' must have a fixed shape"),
    (lambda model: model.graph.output.pop(1), "has no output 'grad:fc1.weight'"),
]


@pytest.mark.parametrize(("change", "complaint"), HOSTILE, ids=[complaint[:40] for _, complaint in HOSTILE])
def test_a_hostile_graph_is_refused(change, complaint):
    with pytest.raises(DataError, match=f"{TRAIN} of the compiled task is refused: .*{complaint}") as caught:
        check_compiled_task(change_graph(make_compiled(), change))
    assert "\n" not in str(caught.value)


def test_the_graph_of_evaluations_is_checked_as_well():
    with pytest.raises(DataError, match=f"{EVALUATE} of the compiled task is refused: operator 'Loop'"):
        check_compiled_task(change_graph(make_compiled(), add_node("Loop"), EVALUATE))


def test_a_part_that_is_there_twice_is_refused_since_parsers_join_them():
    compiled = make_compiled()
    hidden = onnx.ModelProto(graph=helper.make_graph([helper.make_node("Loop", [], ["x"])], "g", [], []))
    with pytest.raises(DataError, match="has its graph twice"):
        check_compiled_task(replace(compiled, train=compiled.train + hidden.SerializeToString()))


def test_steps_of_a_scan_are_read_with_their_constants():
    def scan(model):
        model.graph.initializer.append(numpy_helper.from_array(np.array([100_000, 100_000]), "huge"))
        body = make_steps(inner=[helper.make_node("ConstantOfShape", ["huge"], ["filled"])])
        model.graph.node.append(helper.make_node("Scan", ["loss"], ["x"], num_scan_inputs=1, body=body))

    with pytest.raises(DataError, match="ConstantOfShape makes"):
        check_compiled_task(change_graph(make_compiled(), scan))
    fine = helper.make_node("Scan", ["loss"], ["x"], num_scan_inputs=1, body=make_steps())
    check_compiled_task(change_graph(make_compiled(), lambda model: model.graph.node.append(fine)))


def test_a_file_of_another_model_than_the_tasks_is_refused():
    manifest = make_compiled().manifest
    check_model(manifest, manifest.model, "dense")
    with pytest.raises(TaskError, match=r"tensor 'seen' is int64 \[\] there and absent here; compile it again"):
        check_model(manifest, MODEL.shapes(), "dense")
    others = (*manifest.model[:-1], TensorSpec(name="seen", shape=(2,)))
    with pytest.raises(TaskError, match=r"int64 \[\] there and float32 \[2\] here"):
        check_model(manifest, others, "dense")
