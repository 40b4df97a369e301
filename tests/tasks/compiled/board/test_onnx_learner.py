"""Training from a compiled task: the same numbers as NumPy's learner of the same network, whatever the batch."""

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import psutil
import pytest
from tasks.compiled.board.dense_graphs import BATCH_SIZE, MODEL, change_graph, helper, make_compiled, numpy_helper

from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import Dataset
from edgefl.tasks.compiled.artefact import EVALUATE
from edgefl.tasks.compiled.board.graph_check import check_compiled_task
from edgefl.tasks.compiled.board.onnx_learner import OnnxLearner
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.preparation import to_features


def make_learner(compiled=None, **options):
    learner = OnnxLearner(compiled or make_compiled(), to_features, CrossEntropy(), threads=1, **options)
    learner.load(MODEL.init(3))
    return learner


def make_examples(count, *, seed=1, weights=None):
    rng = np.random.default_rng(seed)
    return Dataset(
        inputs=rng.standard_normal((count, 4)).astype(np.float32), targets=rng.integers(0, 3, count), weights=weights
    )


def make_reference():
    learner = MODEL.learner()
    learner.load(MODEL.init(3))
    return learner


@pytest.mark.parametrize("count", [1, 2, BATCH_SIZE - 1, BATCH_SIZE, BATCH_SIZE + 1, 3 * BATCH_SIZE + 2])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_batch_of_any_size_gives_the_gradient_of_all_its_examples(count, is_weighted):
    weights = np.linspace(0.0, 2.0, count) if is_weighted else None
    batch, ours, theirs = make_examples(count, weights=weights), make_learner(), make_reference()
    kept = dict(ours.gradients)
    assert ours.gradient(batch) == pytest.approx(theirs.gradient(batch), rel=1e-5, abs=1e-7)
    for name, gradient in theirs.gradients.items():
        np.testing.assert_allclose(ours.gradients[name], gradient, rtol=1e-4, atol=1e-6)
        assert ours.gradients[name] is kept[name]
    np.testing.assert_allclose(ours.evaluate(batch), theirs.evaluate(batch), rtol=1e-5)
    np.testing.assert_allclose(ours.logits(batch.inputs), theirs.logits(batch.inputs), rtol=1e-5, atol=1e-6)


def test_examples_of_weight_0_alone_move_nothing():
    learner = make_learner()
    assert learner.gradient(make_examples(3, weights=np.zeros(3))) == 0
    assert not any(gradient.any() for gradient in learner.gradients.values())


def test_what_is_changed_in_place_is_what_the_graph_gets():
    learner, batch = make_learner(), make_examples(5)
    before = learner.gradient(batch)
    for name, parameter in learner.parameters.items():
        np.subtract(parameter, 0.1 * learner.gradients[name], out=parameter)
    after = learner.gradient(batch)
    assert after < before
    reference = MODEL.learner()
    reference.load({name: value for name, value in learner.read().items() if name != "seen"})
    assert after == pytest.approx(reference.gradient(batch), rel=1e-5)


def test_a_buffer_moves_with_each_batch_of_several_examples_and_is_read():
    learner = make_learner()
    for count in (4, 1, 2):
        learner.gradient(make_examples(count))
    assert list(learner.read()) == [*MODEL.init(0), "seen"]
    assert learner.read()["seen"] == 2


def test_frozen_tensors_have_no_gradient_and_the_others_still_do():
    learner, reference, batch = make_learner(), make_reference(), make_examples(5)
    learner.freeze(["fc1.weight", "fc1.bias"], needed=["fc1.bias"])
    learner.gradient(batch)
    reference.gradient(batch)
    assert sorted(learner.gradients) == ["fc1.bias", "fc2.bias", "fc2.weight"]
    np.testing.assert_allclose(learner.gradients["fc2.weight"], reference.gradients["fc2.weight"], rtol=1e-4)
    with pytest.raises(TaskError, match="changes 'seen', a statistic of batches that the run freezes"):
        learner.freeze(["seen"])


def test_a_graph_that_changes_what_its_manifest_says_stays_is_refused():
    compiled = make_compiled()
    for name, output in (("seen", "new:seen"), ("fc1.bias", "grad:fc1.bias")):
        manifest = replace(compiled.manifest, constant=(name,))
        with pytest.raises(DataError, match=f"its manifest knows no output '{output}'"):
            check_compiled_task(replace(compiled, manifest=manifest))


def test_what_only_a_frozen_tensor_needs_is_not_computed():
    def spoil(model):
        """Makes the gradient of the first layer one that cannot be computed."""
        [node] = [node for node in model.graph.node if node.output == ["inner"]]
        node.op_type, node.input[:] = "Expand", ["back", "too_large"]
        model.graph.initializer.append(numpy_helper.from_array(np.array([7, 7, 7]), "too_large"))

    learner, batch = make_learner(change_graph(make_compiled(), spoil)), make_examples(5)
    with pytest.raises(DataError, match="cannot be"):
        learner.gradient(batch)
    learner.freeze(["fc1.weight", "fc1.bias"])
    assert learner.gradient(batch) == make_learner().gradient(batch)


def test_noise_is_drawn_from_the_seed():
    learner, batch = make_learner(make_compiled(has_noise=True)), make_examples(5)

    def draw(seed):
        learner.reseed(seed)
        return [learner.gradient(batch) for _ in range(3)]

    first = draw(5)
    assert (draw(5), len(set(first))) == (first, 3)
    assert draw(6) != first


def test_examples_and_targets_of_another_task_are_refused_in_a_line():
    learner, batch = make_learner(), make_examples(2)
    with pytest.raises(TaskError, match=r"takes examples of shape \[4\], got \[3\]"):
        learner.gradient(Dataset(inputs=batch.inputs[:, :3], targets=batch.targets))
    with pytest.raises(TaskError, match="a label is 3"):
        learner.gradient(Dataset(inputs=batch.inputs, targets=np.array([0, 3])))


@pytest.mark.parametrize("estimate_bytes", [1, 2**62])
def test_a_wrong_estimate_of_its_memory_changes_no_number(estimate_bytes):
    compiled, batch = make_compiled(), make_examples(5)
    other = replace(compiled, manifest=replace(compiled.manifest, peak_bytes=estimate_bytes))
    assert make_learner(other).gradient(batch) == make_learner(compiled).gradient(batch)


def test_tensors_of_a_graph_share_memory_as_they_come_and_go():
    """Each of 40 tensors is larger than the one before, so that none fits where one before was."""
    chain = """
import numpy, psutil
from onnx import TensorProto, helper
from edgefl.system.processes import reduce_memory
reduce_memory()
from edgefl.tasks.compiled.board.bound_graph import Arena, BoundGraph, make_session
sizes = [helper.make_tensor(f"size_{n}", TensorProto.INT64, [1], [250_000 + 12_500 * n]) for n in range(40)]
nodes = []
for n in range(40):
    nodes += [helper.make_node("Expand", [f"sum_{n}", f"size_{n}"], [f"large_{n}"])]
    nodes += [helper.make_node("ReduceMean", [f"large_{n}"], [f"sum_{n + 1}"], keepdims=1)]
one = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])
graph = helper.make_graph(nodes, "chain", [one("sum_0")], [one("sum_40")], sizes)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
session = make_session(model.SerializeToString(), 1, Arena(2**30, 3_000_000))
inputs, outputs = ({name: numpy.ones(1, numpy.float32)} for name in ("sum_0", "sum_40"))
before = psutil.Process().memory_info().rss
BoundGraph(session, inputs, outputs).run()
print(psutil.Process().memory_info().rss - before)
"""
    num_bytes = int(subprocess.run([sys.executable, "-c", chain], check=True, capture_output=True).stdout)
    assert num_bytes < 12_000_000  # one for each of them would be 80 MB


def test_arrays_of_later_steps_take_no_new_pages_of_the_kernel_once_a_graph_has_run():
    steps = """
import resource
import numpy
from onnx import TensorProto, helper
from edgefl.system.processes import reduce_memory
reduce_memory()
from edgefl.tasks.compiled.board.bound_graph import Arena, BoundGraph, make_session
one = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])
graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "one", [one("x")], [one("y")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
session = make_session(model.SerializeToString(), 1, Arena(2**30, 3_000_000))
inputs, outputs = ({name: numpy.ones(1, numpy.float32)} for name in ("x", "y"))
BoundGraph(session, inputs, outputs).run()
values = numpy.ones(500_000, numpy.float32)
values += 0.5 * values
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    values += 0.5 * values
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = int(subprocess.run([sys.executable, "-c", steps], check=True, capture_output=True).stdout)
    assert faults < 5_000  # a mapping for each step would be 24,400


def add_large_tensor(model):
    """Makes the loss the mean of 64 MB of itself."""
    for node in model.graph.node:
        node.output[:] = ["loss_0" if name == "loss" else name for name in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.array([16_000_000]), "size"))
    model.graph.node.append(helper.make_node("Expand", ["loss_0", "size"], ["large"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["large"], ["loss"], keepdims=0))


def test_evaluation_computes_in_the_memory_of_training():
    learner = make_learner(change_graph(change_graph(make_compiled(), add_large_tensor), add_large_tensor, EVALUATE))
    learner.gradient(make_examples(3))
    before = psutil.Process().memory_info().rss
    learner.evaluate(make_examples(3))
    assert psutil.Process().memory_info().rss - before < 32_000_000  # two such tensors would be 64 MB more


def test_a_learner_is_bound_by_its_own_memory_when_another_came_between():
    compiled, batch = change_graph(make_compiled(), add_large_tensor, EVALUATE), make_examples(3)
    small, large = (make_learner(compiled, max_arena_bytes=size) for size in (1024**2, 1024**3))
    for learner in (small, large, small):
        learner.gradient(batch)
    large.evaluate(batch)
    with pytest.raises(DataError, match="takes more memory than it may have"):
        small.evaluate(batch)


def test_a_tensor_of_a_computed_constant_shape_is_not_made_while_the_graph_is_loaded():
    def add_bomb(model):
        graph = model.graph
        graph.initializer.append(numpy_helper.from_array(np.array([2**7, 2**7]), "sides"))
        nodes = [("Mul", ["sides", "sides"], "shape"), ("ConstantOfShape", ["shape"], "bomb")]
        for node in graph.node:
            node.output[:] = ["loss_0" if name == "loss" else name for name in node.output]
        graph.node.extend(helper.make_node(operator, inputs, [output]) for operator, inputs, output in nodes)
        graph.node.append(helper.make_node("ReduceMax", ["bomb"], ["largest"], keepdims=0))
        graph.node.append(helper.make_node("Add", ["loss_0", "largest"], ["loss"]))

    learner = make_learner(change_graph(make_compiled(), add_bomb), max_arena_bytes=64 * 1024**2)
    with pytest.raises(DataError, match="takes more memory than it may have"):
        learner.gradient(make_examples(3))


def test_a_graph_that_computes_too_large_a_tensor_ends_with_its_batch_and_not_with_the_process():
    def add_bomb(model):
        names = ["loss_0", *(f"bomb_{step}" for step in range(30))]
        for node in model.graph.node:
            node.output[:] = ["loss_0" if name == "loss" else name for name in node.output]
        nodes = [helper.make_node("Unsqueeze", ["loss_0", "zero"], ["bomb_0"])]
        nodes += [
            helper.make_node("Concat", [before, before], [after], axis=0)
            for before, after in itertools.pairwise(names[1:])
        ]
        model.graph.node.extend([*nodes, helper.make_node("ReduceMax", [names[-1]], ["loss"], keepdims=0)])

    learner = make_learner(change_graph(make_compiled(), add_bomb), max_arena_bytes=64 * 1024**2)
    with pytest.raises(DataError, match="takes more memory than it may have"):
        learner.gradient(make_examples(3))
