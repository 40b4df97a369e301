import numpy as np
import pytest

from edgefl.core.types import TensorSpec
from edgefl.tasks.learners import networks
from edgefl.tasks.registry import make_task


@pytest.mark.parametrize(
    ("task", "options", "expected"),
    [
        ("digits", {}, 64 * 64 + 64 + 64 * 10 + 10),
        ("digits", {"model": "logistic"}, 650),
        ("mnist", {}, 421_642),
        ("mnist", {"model": "logistic"}, 7_850),
        ("fashion-mnist", {}, 114_314),
        ("fashion-mnist", {"model": "cnn"}, 421_642),
        ("fashion-mnist", {"model": "cnn-large"}, 1_663_370),
        ("fashion-mnist", {"model": "lenet"}, 61_706),
        ("mnist", {"model": "2nn"}, 199_210),
        ("mnist", {"model": "mlp"}, 118_282),
        ("fashion-mnist", {"model": "resnet18-gn"}, 11_172_810),
        ("cifar-10", {}, 545_098),
        ("cifar-10", {"model": "logistic"}, 30_730),
        ("motionsense", {}, 21_334),
        ("noop", {"size_bytes": 1_000_000}, 250_000),
    ],
)
def test_a_model_has_exactly_the_parameters_it_should(task, options, expected):
    assert sum(spec.size for spec in make_task(task, options).shapes()) == expected


def test_the_cnn_has_the_tensors_of_the_paper():
    sizes = [spec.size for spec in make_task("mnist", {}).shapes()]
    assert sizes == [288, 32, 18_432, 64, 401_408, 128, 1_280, 10]


def test_first_weights_depend_on_the_seed_alone_and_are_the_same_on_every_machine():
    weights, other = (make_task("mnist", {}).init(seed) for seed in (7, 8))
    found = [*weights["conv1.weight"].ravel()[:3], weights["fc2.bias"][-1]]
    assert np.array(found, np.float32).tobytes().hex() == "212fc23c1b5d8c3ed6f9f03d16fdb1bd"
    assert not any(np.array_equal(weights[name], other[name]) for name in weights)


def test_torch_bounds_follow_the_fan_in_of_the_layer():
    weights = make_task("mnist", {}).init(7)
    assert 0.30 < np.abs(weights["conv1.weight"]).max() <= 1 / 3
    assert 0.0175 < np.abs(weights["fc1.weight"]).max() <= 1 / 56
    assert np.abs(weights["fc1.bias"]).max() <= 1 / 56


def test_adacomp_weights_are_cut_at_two_deviations_with_biases_of_a_tenth():
    weights = make_task("mnist", {"init": "adacomp"}).init(7)
    assert np.all(weights["conv2.bias"] == np.float32(0.1))
    assert 0.19 < np.abs(weights["fc1.weight"]).max() <= 0.2
    # A normal cut at 2 deviations keeps 0.88 of its deviation.
    assert weights["fc1.weight"].std() == pytest.approx(0.088, abs=0.001)


def test_a_normalisation_starts_as_the_identity_and_a_convolution_without_bias_has_one_tensor():
    weights = networks.make_uniform_weights(networks.norm("norm", 3), seed=1)
    assert (weights["norm.weight"].tolist(), weights["norm.bias"].tolist()) == ([1, 1, 1], [0, 0, 0])
    assert networks.conv_without_bias("c", 4, 3, 5, 5) == (TensorSpec(name="c.weight", shape=(4, 3, 5, 5)),)
