"""Inputs by name: one data set of several arrays, whose rows stay together."""

import numpy as np
import pytest

from edgefl.core.errors import DataError, TaskError
from edgefl.core.named_arrays import NamedArrays, format_row_shape, format_rows
from edgefl.core.types import Dataset


def some_data(start=0, stop=6):
    rows = np.arange(start, stop)
    return Dataset(inputs={"image": rows[:, None, None] * np.ones((1, 2, 3)), "age": rows}, targets=rows)


@pytest.mark.parametrize("rows", [slice(2, 4), np.array([5, 0]), np.arange(6) > 3], ids=["range", "numbers", "mask"])
def test_rows_are_taken_of_all_arrays(rows):
    taken = some_data().take(rows)
    np.testing.assert_array_equal(taken.inputs["age"], taken.targets)
    np.testing.assert_array_equal(taken.inputs["image"][:, 1, 2], taken.targets)
    assert len(taken.inputs) == len(taken) == len(np.arange(6)[rows])


def test_data_sets_of_the_same_names_are_put_together_in_order():
    whole = Dataset.concatenate([some_data(0, 2), some_data(2, 6)])
    np.testing.assert_array_equal(whole.inputs["age"], whole.targets)
    assert whole.inputs.keys() == ["age", "image"]
    assert format_row_shape(whole.inputs) == "age [], image [2, 3]"
    other = Dataset(inputs={"age": np.zeros(1), "photo": np.zeros((1, 2, 3))}, targets=np.zeros(1))
    with pytest.raises(DataError, match=r"the same names and types, got age .*photo .* and age .*image"):
        Dataset.concatenate([some_data(), other])
    with pytest.raises(DataError, match="the same names and types"):
        Dataset.concatenate([Dataset(inputs=np.zeros(1), targets=np.zeros(1)), other])


def test_arrays_of_a_name_are_put_together_where_a_model_gets_them_as_one_type():
    small, large, float_ = (
        Dataset(inputs={"age": np.ones(2, kind)}, targets=np.zeros(2)) for kind in ("u1", "i8", "f4")
    )
    assert Dataset.concatenate([small, large]).inputs["age"].dtype.kind == "i"
    assert [format_rows(data.inputs) for data in (small, large, float_)] == [
        "age int []",
        "age int []",
        "age float []",
    ]
    with pytest.raises(DataError, match=r"got age float \[\] and age int \[\]"):
        Dataset.concatenate([small, float_])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "must be 1 to 64 arrays, got 0"),
        ({"age": np.zeros(3), "image": np.zeros((4, 2))}, "'image' have 4 rows and 'age' 3; there must be as many"),
        ({"my age": np.zeros(3)}, "one of a parameter of Python.* got 'my age'"),
        ({"class": np.zeros(3)}, "got 'class'"),
        ({"_age": np.zeros(3)}, "not with _ first, got '_age'"),
        ({1: np.zeros(3)}, "got '1'"),
        ({"a" * 65: np.zeros(3)}, "at most 64 letters"),
        ({"age": {"years": np.zeros(3)}}, "'age' are a dict themselves"),
        ({"age": [1, 2]}, "'age' must be an array .* got list"),
        ({"age": np.array(["x"])}, "'age' must be an array .* got <U1"),
        ({"age": np.array(1.0)}, r"got float64 \[\]"),
        ({f"a{number}": np.zeros(1) for number in range(65)}, "got 65"),
    ],
)
def test_what_are_no_arrays_by_name_is_refused(inputs, message):
    with pytest.raises(DataError, match=message):
        Dataset(inputs=inputs, targets=np.zeros(3))


@pytest.mark.parametrize("use", [np.asarray, lambda inputs: inputs.reshape(6, -1), lambda inputs: inputs.dtype])
def test_what_takes_one_array_says_so(use):
    with pytest.raises(TaskError, match=r"arrays by name \(age, image\)"):
        use(some_data().inputs)


def test_sizes_are_those_of_all_arrays():
    inputs = NamedArrays({"b": np.zeros((4, 3), np.float32), "a": np.zeros(4, np.uint8)})
    assert (inputs.size, inputs.nbytes, inputs.row_bytes) == (16, 52, 13)
