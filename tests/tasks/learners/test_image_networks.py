"""The built-in networks for images: their published sizes, their tensors, and that they learn."""

import numpy as np
import pytest

from edgefl.core.types import Dataset, TensorKind, TrainConfig
from edgefl.tasks.images import MODELS
from edgefl.tasks.learners.image_layers import NORMS, ImageFormat, make_group_norm
from edgefl.tasks.learners.image_networks import NORMALISED_NETWORKS, PLAIN_NETWORKS, make_chain
from edgefl.tasks.learners.networks import build_chain, list_chain_specs, make_uniform_weights
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

GREY, COLOUR, CROPPED = ImageFormat(1, 28), ImageFormat(3, 32), ImageFormat(3, 28)
IMAGENET_CLASSES = 1000
HEAVY = {
    "resnet152",
    "resnet110",
    "resnet50",
    "resnet18",
    "resnet50-v2",
    "resnet18-v2",
    "vgg11",
    "vgg16",
    "mobilenet-v1",
    "mobilenet-v2",
}
LAYOUTS = [
    pytest.param(name, norm, marks=pytest.mark.extended if name in HEAVY else (), id=f"{name}-{norm}")
    for name in (*PLAIN_NETWORKS, *NORMALISED_NETWORKS)
    for norm in (NORMS if name in NORMALISED_NETWORKS else ("group",))
]


def count_parameters(chain):
    return sum(spec.size for spec in list_chain_specs(chain) if spec.kind == TensorKind.PARAMETER)


def with_ten_classes(published, features):
    """The size of a network published with 1000 classes, when its last layer has ten."""
    return published - (IMAGENET_CLASSES - 10) * (features + 1)


@pytest.mark.parametrize(
    ("name", "image", "published"),
    [
        ("lenet", GREY, 61_706),
        ("lenet", COLOUR, 62_006),
        ("cnn", GREY, 421_642),
        ("cnn-large", GREY, 1_663_370),
        ("alexnet-small", CROPPED, 1_387_786),  # Zhang et al., 2017, table 1
        ("inception-small", CROPPED, 1_649_402 + 1_712),  # the same; its normalisations have shifts alone
        ("resnet32", COLOUR, 464_154),  # He et al., 2016, table 6: 0.46 M
        ("resnet110", COLOUR, 1_727_962),  # the same: 1.7 M
        # Of torchvision, whose stem of 7x7 has 49 weights where this one has 9, for each of 3 x 64 channels.
        ("resnet18", COLOUR, with_ten_classes(11_689_512, 512) - 40 * 3 * 64),
        ("resnet50", COLOUR, with_ten_classes(25_557_032, 2048) - 40 * 3 * 64),
        ("resnet152", COLOUR, with_ten_classes(60_192_808, 2048) - 40 * 3 * 64),
        # The same convolutions; a norm of the inputs of each block in place of one after it, of the stem and of
        # the projections, and one at the end: two numbers a channel.
        ("resnet18-v2", COLOUR, with_ten_classes(11_689_512, 512) - 40 * 3 * 64 - 2 * (4800 - 3904)),
        ("resnet50-v2", COLOUR, with_ten_classes(25_557_032, 2048) - 40 * 3 * 64 - 2 * (26_560 - 22_720)),
        ("mobilenet-v1", COLOUR, with_ten_classes(4_231_976, 1024)),  # Howard et al., 2017: 4.2 M
        ("mobilenet-v2", COLOUR, with_ten_classes(3_504_872, 1280)),  # Sandler et al., 2018: 3.4 M
        # Of torchvision with normalisation, less its three fully connected layers.
        ("vgg11", COLOUR, 132_868_840 - 123_642_856 + 512 * 10 + 10),
        ("vgg16", COLOUR, 138_365_992 - 123_642_856 + 512 * 10 + 10),
    ],
)
def test_a_network_has_as_many_parameters_as_the_published_one(name, image, published):
    assert {count_parameters(make_chain(name, image, norm)) for norm in NORMS} == {published}


@pytest.mark.parametrize(("channels", "groups"), [(16, 8), (24, 4), (48, 8), (64, 32), (160, 16), (512, 32)])
def test_groups_divide_the_channels_and_hold_two_or_more(channels, groups):
    assert make_group_norm(channels) == ("GroupNorm", groups, channels)


@pytest.mark.parametrize(("name", "norm"), LAYOUTS)
def test_a_network_has_the_tensors_of_its_layout_and_answers_images_of_both_formats(name, norm):
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    from edgefl.tasks.learners.torch_learner import module_shapes  # noqa: PLC0415 after the skip

    for image in (GREY, COLOUR):
        chain = make_chain(name, image, norm)
        module, tensors = build_chain(chain), list_chain_specs(chain)
        assert module_shapes(module) == tensors
        with torch.no_grad():
            assert module.eval()(torch.zeros(2, image.channels, image.side, image.side)).shape == (2, 10)


@pytest.mark.parametrize(("name", "norm"), LAYOUTS)
def test_one_step_on_a_batch_lowers_its_loss(name, norm):
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    options = {"model": name} | ({"norm": norm} if name in NORMALISED_NETWORKS else {})
    task = make_task("cifar-10", options)
    inputs = np.random.default_rng(0).integers(0, 256, (8, 3, 32, 32)).astype(np.uint8)
    learner, batch = task.learner(threads=1), Dataset(inputs=inputs, targets=np.arange(8))
    learner.load(task.init(7))
    first = learner.gradient(batch)
    plan = TrainConfig(iterations=1, batch_size=8, learning_rate=0.001)
    train(learner, batch, plan, np.random.default_rng(0), clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert learner.gradient(batch) < first


@pytest.mark.parametrize(("name", "num_convs"), [("resnet18-v2", 2), ("resnet50-v2", 3)])
def test_the_second_version_of_a_resnet_has_its_norms_and_relus_before_convolutions_alone(name, num_convs):
    chain = make_chain(name, COLOUR)
    blocks = [key for key, layer in chain.items() if layer[0] == "Residual"]
    for key in blocks:
        _, body, shortcut = chain[key]
        kinds = [layer[0] for layer in body.values()]
        if shortcut:  # both branches begin with the same normalised input
            assert [layer[0] for layer in shortcut.values()] == ["Conv2d"]
            kinds = [chain[f"{key}_norm"][0], chain[f"{key}_relu"][0], *kinds]
        assert kinds == ["GroupNorm", "ReLU", "Conv2d"] * num_convs
    others = {f"{key}_{part}" for key in blocks for part in ("norm", "relu") if chain[key][2]}
    assert [key for key in chain if key not in {*blocks, *others}] == [
        *("stem", "last_norm", "last_relu", "mean", "flat", "fc")
    ]


def test_running_statistics_start_as_torchs_and_are_buffers():
    specs = list_chain_specs({"norm": NORMS["batch"](3)})
    first = make_uniform_weights(specs, seed=1)
    assert [spec.kind for spec in specs] == [TensorKind.PARAMETER] * 2 + [TensorKind.BUFFER] * 3
    assert {name.removeprefix("norm."): value.tolist() for name, value in first.items()} == {
        "weight": [1, 1, 1],
        "bias": [0, 0, 0],
        "running_mean": [0, 0, 0],
        "running_var": [1, 1, 1],
        "num_batches_tracked": 0,
    }


def test_resnet18_with_groups_is_the_network_that_had_that_name_before():
    assert MODELS.count("resnet18-gn") == 1
    assert make_task("mnist", {"model": "resnet18-gn"}).shapes() == make_task("mnist", {"model": "resnet18"}).shapes()
