import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.core.errors import ConfigError
from edgefl.core.types import Dataset
from edgefl.tasks.datasets.train_test_split import compute_sample_hashes, split_train_test


def some_data(n, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset(inputs=rng.integers(0, 256, (n, 4, 4)).astype(np.uint8), labels=np.arange(n))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 60), more=st.integers(0, 60), fraction=st.floats(0, 0.9), salt=st.text(max_size=80))
def test_data_that_grows_in_any_order_never_moves_a_sample(n, more, fraction, salt):
    everything = some_data(n + more)
    before = split_train_test(everything.take(np.random.default_rng(1).permutation(n)), fraction, salt)
    after = split_train_test(everything, fraction, salt)
    for small, large in zip(before, after, strict=True):
        assert set(small.labels) <= set(large.labels)
    assert sorted([*after[0].labels, *after[1].labels]) == list(range(n + more))


def test_about_the_asked_fraction_goes_into_the_test_part_and_none_of_zero():
    train, test = split_train_test(some_data(4000), 0.1)
    assert len(train) + len(test) == 4000
    assert 330 < len(test) < 470
    assert [len(part) for part in split_train_test(some_data(30), 0.0)] == [30, 0]


def test_copies_of_a_sample_stay_on_one_side():
    data = some_data(50)
    doubled = Dataset(inputs=np.concatenate([data.inputs] * 2), labels=np.concatenate([data.labels] * 2))
    train, test = split_train_test(doubled, 0.3)
    assert not set(train.labels) & set(test.labels)


def test_another_salt_gives_another_split():
    data = some_data(200)
    assert set(split_train_test(data, 0.3, "a")[1].labels) != set(split_train_test(data, 0.3, "b")[1].labels)


@pytest.mark.parametrize("order", "<>")
def test_hashes_are_the_same_on_every_machine(order):
    found = [hex(one) for one in compute_sample_hashes(np.array([[1, 2], [3, 4]], f"{order}i4"))]
    assert found == ["0xd402f6fe3b117d90", "0x317c94473381150"]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"test fraction must be in \[0, 1\)"):
        split_train_test(some_data(3), fraction)
