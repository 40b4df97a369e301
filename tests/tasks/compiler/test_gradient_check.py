"""The comparison of two trainings by themselves, graph and torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
pytest.importorskip("onnx", reason="needs onnx: pip install '.[export]'")

from edgefl.core.errors import TaskError
from edgefl.tasks.compiler import gradient_check
from edgefl.tasks.compiler.gradient_check import _list_near, _train_both

STATE = {"param:w": np.array([1.0, -2.0, 0.5], np.float32), "buffer:n": np.array([3.0], np.float32)}


def compare(monkeypatch: pytest.MonkeyPatch, *ends: float) -> Any:
    """Compares trainings that end so: the graph's, torch's, and torch's from near states."""
    left = iter(ends)
    monkeypatch.setattr(gradient_check, "_train", lambda *_: (1.0, next(left)))
    runner: Any = SimpleNamespace(run=None)
    step: Any = None
    return _train_both(step, runner, STATE, [{}])


def test_a_curve_may_be_as_far_from_torchs_as_torchs_own_are_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch, 1.04, 1.0) == (1.04, 1.0)
    assert compare(monkeypatch, 1.3, 1.0, 1.1, 0.95, 1.0) == (1.3, 1.0)
    with pytest.raises(TaskError, match=r"to a loss of 1\.31, torch to 1 after 20 steps; 0\.3 would be allowed"):
        compare(monkeypatch, 1.31, 1.0, 1.1, 0.95, 1.0)
    with pytest.raises(TaskError, match=r"0\.053 would be allowed"):
        compare(monkeypatch, 1.11, 1.05, 1.05, 1.05, 1.05)
    with pytest.raises(TaskError, match="to a loss of nan"):
        compare(monkeypatch, float("nan"), 1.0, 1.1, 0.95, 1.0)


def test_near_states_differ_in_the_last_digit_of_parameters_alone() -> None:
    near = list(_list_near(STATE))
    assert len({state["param:w"].tobytes() for state in near} | {STATE["param:w"].tobytes()}) > 1
    for state in near:
        assert state["param:w"].dtype == np.float32
        np.testing.assert_allclose(state["param:w"], STATE["param:w"], rtol=2.5e-7)
        assert not np.array_equal(state["param:w"], STATE["param:w"])
        np.testing.assert_array_equal(state["buffer:n"], STATE["buffer:n"])
