"""Models for pictures and spectrograms, [channels, height, width], by name."""

from __future__ import annotations

from edgefl.core.errors import ConfigError
from edgefl.tasks.classification import TrainableModel, validate_choice
from edgefl.tasks.configured.options import Numbers, check_size
from edgefl.tasks.configured.table import DEFAULT_HIDDEN, MODELS, make_dense_model
from edgefl.tasks.learners.image_layers import ImageFormat
from edgefl.tasks.learners.image_networks import make_chain
from edgefl.tasks.learners.torch_learner import LIBRARIES, TorchFactoryModel, make_chain_model
from edgefl.tasks.preparation import Prepare

NETWORKS = ("cnn", "cnn-small", "cnn-large", "resnet18", "resnet32", "mobilenet-v1", "mobilenet-v2")
"""Networks of torch that take any number of pixels and of classes."""


def make_image_model(
    task: str, model: str, image: ImageFormat, prepare: Prepare, *, hidden: Numbers, activation: str
) -> TrainableModel:
    """Returns a model in NumPy (`table.MODELS`), in torch (`NETWORKS`), or of torchvision or timm.

    Raises:
        ConfigError: there is no such model, an option is for others, or it is too large.
    """
    if model.startswith(LIBRARIES):
        found = TorchFactoryModel(target=model, num_classes=image.classes, input_shape=image.shape, prepare=prepare)
        check_size(task, found)
        return found
    validate_choice(task, "model", model, (*MODELS, *NETWORKS), extra_choice="torchvision:NAME or timm:NAME")
    if model in MODELS:
        channels, height, width = image.shape
        sizes = (channels * height * width, image.classes)
        return make_dense_model(task, model, hidden, activation, sizes=sizes, prepare=prepare)
    if hidden != DEFAULT_HIDDEN:
        raise ConfigError(f"task.hidden is for the model mlp, got {model!r}")
    chain = make_chain(model, image)
    network = make_chain_model(chain, prepare)
    check_size(task, network)
    return network
