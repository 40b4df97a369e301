from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from edgefl.core.types import Dataset, LazyTensors, SparseTensor, TensorSpec, TrainConfig, derive_rng, derive_seed


def test_a_sparse_tensor_is_zero_where_it_has_no_entry():
    sparse = SparseTensor(indices=np.array([1, 3]), values=np.array([5.0, 7.0], np.float32), shape=(2, 2))
    dense = sparse.dense()
    assert dense.tolist() == [[0.0, 5.0], [0.0, 7.0]]
    assert dense.dtype == np.float32


def test_a_sparse_tensor_may_have_no_axes_or_no_entries():
    assert SparseTensor(indices=np.array([0]), values=np.array([3.0]), shape=()).dense() == 3.0
    empty = SparseTensor(indices=np.array([], np.int64), values=np.array([], np.float16), shape=(2, 0))
    assert empty.dense().shape == (2, 0)


def test_sizes_are_counted_from_shape_and_type():
    spec = TensorSpec(name="w", shape=(3, 4), dtype="float16")
    assert (spec.size, spec.nbytes) == (12, 24)
    assert TensorSpec(name="s", shape=()).size == 1


def test_lazy_tensors_are_loaded_once_when_first_asked_and_again_after_release():
    loads = []

    def load():
        loads.append(1)
        return {"a": np.ones(1), "b": np.zeros(2)}

    tensors = LazyTensors(load)
    assert loads == []
    assert (list(tensors), len(tensors), "a" in tensors, "c" in tensors) == (["a", "b"], 2, True, False)
    assert tensors["b"].tolist() == [0.0, 0.0]
    assert len(loads) == 1
    tensors.unload()
    assert tensors["a"].tolist() == [1.0]
    assert len(loads) == 2


def test_a_failure_to_load_is_told_each_time():
    def load():
        raise OSError("the card was pulled out")

    tensors = LazyTensors(load)
    for _ in range(2):
        with pytest.raises(OSError, match="pulled out"):
            list(tensors)


def test_values_cannot_be_reassigned_and_are_named_when_made():
    plan = TrainConfig(epochs=1.0)
    with pytest.raises(FrozenInstanceError):
        plan.epochs = 2.0
    with pytest.raises(TypeError):
        TrainConfig("sgd")


def test_rows_of_a_data_set_stay_together():
    data = Dataset(inputs=np.arange(10).reshape(5, 2), targets=np.arange(5))
    taken = data.take(np.array([4, 0]))
    assert (taken.inputs.tolist(), taken.targets.tolist(), len(taken)) == ([[8, 9], [0, 1]], [4, 0], 2)


def test_data_sets_put_together_have_weights_and_weak_examples_where_any_part_has_them():
    plain = Dataset(inputs=np.zeros(2), targets=np.zeros(2))
    halved = Dataset(
        inputs=np.ones(1), targets=np.ones(1), weights=np.array([0.5], np.float32), weak=np.ones(1, bool)
    )
    whole = Dataset.concatenate([plain, halved, plain])
    assert whole.weights.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert whole.weights.dtype == np.float32
    assert whole.weak.tolist() == [False, False, True, False, False]
    nothing = Dataset.concatenate([plain, plain])
    assert (nothing.weights, nothing.weak) == (None, None)


def test_derived_seeds_are_the_same_on_every_machine_and_for_ever():
    assert derive_seed(7, "run", 3, "pi-1") == 111645027541301428068791443949206639582
    assert derive_rng(7, "run", 3, "pi-1").integers(0, 1000, 3).tolist() == [563, 536, 550]


def test_every_part_of_a_seed_matters_its_type_and_its_borders_too():
    parts = [(1, "a"), ("1", "a"), (1, "b"), (2, "a"), (1,), (1, "a", ""), ("1a",), ("a", 1)]
    assert len({derive_seed(*one) for one in parts}) == len(parts)
