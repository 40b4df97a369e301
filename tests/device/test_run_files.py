import os

import numpy as np
import pytest

from edgefl.device.run_files import KEPT_RUNS, load_arrays, save_arrays


def test_what_was_saved_comes_back_under_any_name(tmp_path):
    arrays = {"velocity/fc1.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "pending/0/r/a-1": np.arange(0)}
    save_arrays(tmp_path / "steps", "r/../1", {**arrays, "algorithm": np.array("adam")})
    found = load_arrays(tmp_path / "steps", "r/../1")
    assert set(found) == {*arrays, "algorithm"}
    assert all(np.array_equal(found[name], value) for name, value in arrays.items())
    assert str(found["algorithm"]) == "adam"
    assert {path.parent for path in tmp_path.rglob("*.npz")} == {tmp_path / "steps"}


def test_a_run_without_a_file_has_nothing(tmp_path):
    assert load_arrays(tmp_path / "steps", "r") is None


def test_the_oldest_runs_go(tmp_path):
    for number in range(KEPT_RUNS + 2):
        save_arrays(tmp_path, f"r{number}", {"x": np.zeros(1)})
        os.utime(tmp_path / f"r{number}.npz", (1000 + number, 1000 + number))
    assert [load_arrays(tmp_path, f"r{number}") is None for number in range(KEPT_RUNS + 2)] == [True, True] + 4 * [
        False
    ]


@pytest.mark.parametrize("cut", [0, 1, 10, 100, -1, -10, -100])
def test_a_torn_file_counts_as_none(tmp_path, cut):
    save_arrays(tmp_path, "r", {"x": np.zeros(100)})
    (path,) = tmp_path.rglob("*.npz")
    path.write_bytes(path.read_bytes()[:cut])
    assert load_arrays(tmp_path, "r") is None
