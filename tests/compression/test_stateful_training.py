"""What an assignment leaves on its device."""

import pytest

from edgefl.compression.stateful_training import is_stateful_training, require_stateless_training
from edgefl.core.errors import ConfigError
from edgefl.core.types import GossipConfig, TensorSpec, TrainConfig

OF_ALL = (TensorSpec(name="weight", shape=(4, 3)), TensorSpec(name="count", shape=(), dtype="int64"))
WITH_ONE_OF_ITS_OWN = (*OF_ALL, TensorSpec(name="mean", shape=(3,), shared=False))
PLAIN = TrainConfig(iterations=3)
NODE = GossipConfig(method="dsgd", edges=(), learning_rate=0.1, period=1)


@pytest.mark.parametrize(
    ("plan", "codec", "shapes", "leaves"),
    [
        (PLAIN, "dense", OF_ALL, False),
        (PLAIN, "topk:0.1|int8", OF_ALL, False),
        (PLAIN, "ef|topk:0.1|int8", OF_ALL, True),
        (TrainConfig(iterations=3, keeps_state=True), "dense", OF_ALL, True),
        (TrainConfig(iterations=3, node=NODE), "dense", OF_ALL, True),
        (PLAIN, "dense", WITH_ONE_OF_ITS_OWN, True),
    ],
)
def test_what_stays_is_state_residuals_and_tensors_of_its_own(plan, codec, shapes, leaves):
    assert is_stateful_training(plan, codec, shapes) is leaves
    if leaves:
        with pytest.raises(ConfigError, match="redundant shard must give the same result on all"):
            require_stateless_training(plan, codec, shapes)
    else:
        require_stateless_training(plan, codec, shapes)
