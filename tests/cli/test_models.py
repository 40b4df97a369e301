"""The file for boards is made in a child process, and what goes wrong there comes back as it is."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.cli.fleet.models import _evaluate_models, export_for_devices
from edgefl.cli.sources import load_model
from edgefl.core.errors import DataError, EdgeflError, NotFoundError, TaskError
from edgefl.core.types import Dataset
from edgefl.device.inference.onnx_model import OnnxModel
from edgefl.storage.checkpoints import save_model
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard
from edgefl.tasks.registry import make_task


def test_a_kept_model_becomes_a_file_that_says_what_it_is(tmp_path):
    task = make_task("digits", {"model": "logistic"})
    sha256, path = save_model(tmp_path / "models", task.init(7))
    out = tmp_path / "out.onnx"
    export_for_devices("digits", {"model": "logistic"}, path, out)
    model = OnnxModel(out)
    assert (model.model, model.task, model.options) == (sha256, "digits", {"model": "logistic"})
    rows = np.random.default_rng(7).integers(0, 17, (5, 8, 8))
    weights = task.init(7)
    expected = (rows.reshape(5, 64) / 16) @ weights["fc1.weight"].T + weights["fc1.bias"]
    assert np.abs(model.logits(rows) - expected).max() < 1e-4


def test_a_model_whose_layer_stayed_on_the_boards_is_not_evaluated_with_an_untrained_one(tmp_path):
    task = make_task("digits", {})
    shared = {name: tensor for name, tensor in task.init(7).items() if not name.startswith("fc2")}
    sha256, path = save_model(tmp_path / "models", shared)
    shard = tmp_path / "shard.npz"
    write_shard(
        shard,
        Dataset(inputs=np.zeros((20, 8, 8)), targets=np.arange(20) % 10),
        ShardMetadata(task="digits"),
    )
    row = {"task": "digits", "task_options": {}, "test_fraction": 0.1, "sha256": sha256, "accuracy": None}
    source = SimpleNamespace(open_model_file=lambda _sha256: nullcontext(path), directory=tmp_path)
    with pytest.raises(TaskError, match=r"lacks tensor 'fc2.weight' .* stayed on the devices \(adapt.local\)"):
        _evaluate_models(source, [row], shard, "all", ())
    local = tmp_path / "pi-07.npz"
    np.savez(local, **{name: tensor for name, tensor in task.init(7).items() if name.startswith("fc2")})
    (scored,) = _evaluate_models(source, [row], shard, "all", (), local=local)
    learner = task.learner()
    learner.load(task.init(7))
    assert scored["loss"] == learner.evaluate(task.read(str(shard)))[0]
    np.savez(local, **task.init(7))
    with pytest.raises(DataError, match=r"has tensor 'fc1.bias', which the model has too"):
        load_model(source, row, local)
    copy = {f"personal/{name}": tensor + 1 for name, tensor in shared.items()}
    np.savez(local, **copy)
    loaded = load_model(source, row, local)
    assert all(np.array_equal(loaded[name], shared[name] + 1) for name in shared), "a personal copy takes its place"
    np.savez(local, **copy, **{"personal/-mixture": np.full(len(shared), 0.5)})
    mixed = load_model(source, row, local)
    assert all(np.allclose(mixed[name], shared[name] + 0.5) for name in shared), "or is mixed with it"
    np.savez(local, **copy, **{"personal/fc9.weight": np.zeros(3)})
    with pytest.raises(DataError, match=r"personal copy of 'fc9.weight' \(3,\), which the model has not"):
        load_model(source, row, local)
    local.write_bytes(b"no")
    with pytest.raises(DataError, match=r"--local .*: cannot be read"):
        load_model(source, row, local)


def test_of_several_models_one_is_exported_and_evaluated_that_is_said(tmp_path):
    task = make_task("digits", {})
    models = [task.init(seed) for seed in (1, 2)]
    stack = {f"cluster-{place}/{name}": models[place][name] for place in range(2) for name in models[place]}
    sha256, path = save_model(tmp_path / "models", stack)
    row = {"task": "digits", "task_options": {}, "test_fraction": 0.1, "sha256": sha256, "accuracy": None}
    source = SimpleNamespace(open_model_file=lambda _sha256: nullcontext(path), directory=tmp_path)
    with pytest.raises(
        DataError, match=r"2 models, one for each cluster.*: say which by cluster \(--cluster\), 0 to 1"
    ):
        load_model(source, row)
    loaded = load_model(source, row, None, 1)
    assert all(np.array_equal(loaded[name], models[1][name]) for name in models[1])
    with pytest.raises(TaskError, match=r"2 models of task digits.*take one by --cluster NUMBER"):
        export_for_devices("digits", {}, path, tmp_path / "out.onnx")


@pytest.mark.parametrize(("task", "kind"), [("digits", NotFoundError), ("nothing", EdgeflError)])
def test_what_fails_in_the_child_is_raised_here(tmp_path, task, kind):
    with pytest.raises(kind):
        export_for_devices(task, {}, tmp_path / "none.safetensors", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
