"""The compiled task of a run file: in the header of instructions by its SHA-256, or refused in one line."""

import hashlib

import pytest
from tasks.compiled.board.dense_graphs import MODEL, SEEN, change_graph, helper, make_compiled

from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, DataError, NotFoundError, TaskError
from edgefl.core.types import Task
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.compiled import choose_batch_size, make_compiled_header
from edgefl.tasks.adaptation.base_catalogue import BaseCatalogue
from edgefl.tasks.compiled.artefact import encode_artefact
from edgefl.tasks.learners.torch_learner import TorchModel
from edgefl.tasks.registry import make_task


class Dense(Task):
    """The network of the hand-drawn graphs, said to be of torch."""

    name = "dense"

    def __init__(self, *more):
        tensors = (*MODEL.shapes(), *more)
        self.model = TorchModel(build=lambda: None, tensors=tensors)

    def read(self, path):
        raise AssertionError(path)


def make_config(task="dense", options=None, strategy=None, **run):
    return parse_run({"run": {"task": task, **run}, "task": options or {}, "strategy": strategy or {}})


@pytest.fixture
def bases(tmp_path):
    source = tmp_path / "dense.compiled"
    source.write_bytes(encode_artefact(make_compiled()))
    BaseCatalogue(tmp_path / "bases").add(source, "dense")
    return tmp_path / "bases"


@pytest.mark.parametrize(("backend", "is_for_all"), [("auto", False), ("onnx", True)])
def test_a_compiled_task_that_is_named_is_offered_by_its_hash(bases, backend, is_for_all):
    content = encode_artefact(make_compiled())
    header = make_compiled_header(Dense(SEEN), make_config(backend=backend, compiled="dense"), bases)
    expected = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "is_for_all": is_for_all}
    assert header == {"compiled": expected}
    assert make_compiled_header(Dense(SEEN), make_config(backend=backend), bases) == {}


@pytest.mark.parametrize(
    ("batch", "micro_batch", "compiled"),
    [(32, None, 32), (32, 8, 8), (32, 12, 11), (10, 8, 5), (10, 64, 10), (1000, None, 500), (1000, 900, 500)],
)
def test_a_batch_is_compiled_in_equal_parts_that_fit_into_a_micro_batch(batch, micro_batch, compiled):
    parts = {} if micro_batch is None else {"micro_batch_size": micro_batch}
    run = build_run(parse_run({"run": {"task": "mnist"}, "strategy": {"batch_size": batch, **parts}}), "r")
    assert choose_batch_size(run.strategy, run.config) == compiled


def test_what_does_not_go_together_is_refused(bases, tmp_path):
    def make_header(size):
        strategy = {"micro_batch_size": size}
        return make_compiled_header(Dense(SEEN), make_config(strategy=strategy, compiled="dense"), bases)

    with pytest.raises(ConfigError, match=r"micro_batch_size is 5, and the compiled task computes 6 examples at"):
        make_header(5)
    assert make_header(6) == make_header(700)
    with pytest.raises(ConfigError, match=r"run.compiled = 'dense' means nothing with backend = 'torch'"):
        make_compiled_header(Dense(SEEN), make_config(backend="torch", compiled="dense"), bases)
    with pytest.raises(ConfigError, match=r"run.backend = 'numpy', and the model of task dense needs torch"):
        make_compiled_header(Dense(SEEN), make_config(backend="numpy"), bases)
    for config in (
        make_config(backend="onnx", strategy={"precision": "float16"}),
        make_config("digits", strategy={"precision": "bfloat16"}),
    ):
        task = Dense(SEEN) if config.run.task == "dense" else make_task("digits")
        with pytest.raises(
            ConfigError, match=r"strategy.precision = 'b?float16' is of networks that train with torch"
        ):
            make_compiled_header(task, config, bases)
    assert make_compiled_header(Dense(SEEN), make_config(strategy={"precision": "float16"}), bases) == {}
    contrastive = Dense(SEEN)
    contrastive.model = TorchModel(build=lambda: None, tensors=MODEL.shapes(), loss="contrastive")
    with pytest.raises(ConfigError, match=r"strategy.micro_batch_size = 4 does not go with the loss contrastive"):
        make_compiled_header(contrastive, make_config(strategy={"micro_batch_size": 4}), bases)
    with pytest.raises(NotFoundError, match=r"no base 'other'"):
        make_compiled_header(Dense(SEEN), make_config(compiled="other"), bases)
    with pytest.raises(ConfigError, match=r"run.compiled = 'dense': only a coordinator has"):
        make_compiled_header(Dense(SEEN), make_config(compiled="dense"), None)
    with pytest.raises(TaskError, match=r"tensor 'seen' is int64 .* there and absent here"):
        make_compiled_header(Dense(), make_config(compiled="dense"), bases)

    with pytest.raises(
        TaskError, match=r"made of task dense with no options, the run is of task dense with loss = 'mse'"
    ):
        make_compiled_header(Dense(SEEN), make_config(compiled="dense", options={"loss": "mse"}), bases)

    def loop(model):
        model.graph.node.append(helper.make_node("Loop", ["loss"], ["x"]))

    hostile = tmp_path / "hostile.compiled"
    hostile.write_bytes(encode_artefact(change_graph(make_compiled(), loop)))
    BaseCatalogue(bases).add(hostile, "hostile")
    with pytest.raises(DataError, match="operator 'Loop' is not permitted"):
        make_compiled_header(Dense(SEEN), make_config(compiled="hostile"), bases)
