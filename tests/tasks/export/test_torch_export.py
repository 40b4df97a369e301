import subprocess
import sys

import numpy as np
import pytest

from edgefl.core.errors import StoreError
from edgefl.core.types import SparseTensor
from edgefl.tasks.export.torch_export import export_torch
from edgefl.tasks.registry import make_task

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")


def test_the_file_is_a_state_dict_that_the_task_s_own_module_takes(tmp_path):
    task = make_task("mnist", {"model": "lenet"})
    model, path = task.init(7), tmp_path / "model.pt"
    assert export_torch(model, path) == path.stat().st_size
    state = torch.load(path, weights_only=True)
    assert list(state) == list(model)
    module = task.model.build()
    module.load_state_dict(state)
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), model[name])


def test_sparse_tensors_numbers_of_every_kind_and_scalars_come_back(tmp_path):
    sparse = SparseTensor(indices=np.array([1]), values=np.array([2.0], np.float32), shape=(3,))
    counter, read_only = np.array(5, np.int64), np.frombuffer(b"\0\0\x80?", np.float32)
    model = {"sparse": sparse, "counter": counter, "read_only": read_only, "odd": np.full(2, np.nan, np.float32)}
    export_torch(model, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["sparse"].tolist() == [0.0, 2.0, 0.0]
    assert (state["counter"].item(), state["counter"].shape, state["counter"].dtype) == (5, (), torch.int64)
    assert state["read_only"].tolist() == [1.0]


def test_a_place_that_cannot_be_written_is_one_error_and_without_torch_the_remedy_is_named(tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        export_torch({"w": np.zeros(2, np.float32)}, tmp_path / "none" / "model.pt")
    program = (
        "import sys; sys.modules['torch'] = None\nfrom pathlib import Path\n"
        "from edgefl.tasks.export.torch_export import export_torch\nexport_torch({}, Path('model.pt'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "[train]'" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
