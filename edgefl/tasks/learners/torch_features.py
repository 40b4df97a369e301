"""Features of a frozen start: a network of torch cut before its first trained layer, if it can be cut there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Inputs
from edgefl.tasks.learners.torch_learner import TorchLearner
from edgefl.tasks.learners.torch_split import cut_module, list_tensor_names
from edgefl.tasks.losses.value_losses import Reconstruction
from edgefl.tasks.preparation import prepare_inputs
from edgefl.tasks.registry import import_torch

if TYPE_CHECKING:
    import torch

NUM_PROBED = 3
"""Examples with which a cut is checked against the whole network."""
RELATIVE_TOLERANCE, TOLERANCE = 1e-3, 1e-4


class TorchFeatures:
    """A network in two parts: the front has nothing that is trained, the rest is trained on what it gives.

    Args:
        learner: of the whole network.
        front, rest: modules that share its tensors.
    """

    def __init__(self, learner: TorchLearner, front: torch.nn.Module, rest: torch.nn.Module) -> None:
        self._learner, self._front, self._rest = learner, front, rest

    def compute_features(self, inputs: Array) -> Array:
        """Returns what the front makes of raw inputs, [n, ...] float32."""
        features = prepare_inputs(self._learner.prepare, inputs)
        self._learner.module.eval()
        with import_torch().no_grad():
            return np.array(self._learner.apply(self._front, features).cpu().numpy())

    def compute_feature_gradient(self, batch: Dataset) -> float:
        """Does what `gradient` of the whole does, for a batch whose inputs are features."""
        return self._learner.compute_gradient(batch, self._rest, batch.inputs)


def make_features(learner: TorchLearner, trained: Collection[str], inputs: Inputs) -> TorchFeatures | None:
    """Returns the network cut before the first of its modules with a trained tensor; None where that cannot be.

    The cut is tried on a few raw inputs: while the network trains, the front is neither random nor does it depend on
    the other examples of a batch, and the rest makes of its features what the network makes of the inputs. No
    front uses a trained tensor: one of the network itself, or of a later module that is called early.

    Args:
        learner: of the network, which has been told what is frozen.
        trained: names of the tensors that are trained.
        inputs: [n, ...] raw, n at least 1.
    """
    if isinstance(learner.loss, Reconstruction):  # its targets are the inputs
        return None
    children = [name for name, _ in learner.module.named_children()]
    has_trained = [any(tensor.startswith(f"{name}.") for tensor in trained) for name in children]
    first = has_trained.index(True) if True in has_trained else 0
    probe = prepare_inputs(learner.prepare, inputs[:NUM_PROBED])
    if isinstance(probe, Mapping):  # a front has one input
        return None
    for name in reversed(children[:first]):
        try:
            front, rest = cut_module(learner.module, name)
            if list_tensor_names(front).isdisjoint(trained) and _is_faithful(learner, front, rest, probe):
                return TorchFeatures(learner, front, rest)
        except (ConfigError, RuntimeError):  # it cannot be cut there, perhaps before
            continue
    return None


def _is_faithful(learner: TorchLearner, front: torch.nn.Module, rest: torch.nn.Module, probe: Array) -> bool:
    with import_torch().no_grad():
        learner.start_training(len(probe))
        features = learner.apply(front, probe)
        if not isinstance(features, import_torch().Tensor):
            return False
        again, alone = learner.apply(front, probe), learner.apply(front, probe[:1])
        learner.module.eval()
        made, whole = learner.join_outputs(rest(features)), learner.apply(learner.module, probe)
    return bool((features == again).all()) and all(
        np.allclose(one.cpu().numpy(), other.cpu().numpy(), rtol=RELATIVE_TOLERANCE, atol=TOLERANCE)
        for one, other in ((features[:1], alone), (made, whole))
    )
