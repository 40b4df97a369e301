"""What an assignment leaves on its device."""

import pytest

from edgefl.compression.leftovers import check_leaves_nothing, leaves_something
from edgefl.errors import ConfigError
from edgefl.types import LocalPlan, NodePlan, TensorSpec

OF_ALL = (TensorSpec(name="weight", shape=(4, 3)), TensorSpec(name="count", shape=(), dtype="int64"))
WITH_ONE_OF_ITS_OWN = (*OF_ALL, TensorSpec(name="mean", shape=(3,), shared=False))
PLAIN = LocalPlan(iterations=3)
NODE = NodePlan(method="dsgd", edges=(), learning_rate=0.1, period=1)


@pytest.mark.parametrize(
    ("plan", "codec", "shapes", "leaves"),
    [
        (PLAIN, "dense", OF_ALL, False),
        (PLAIN, "topk:0.1|int8", OF_ALL, False),
        (PLAIN, "ef|topk:0.1|int8", OF_ALL, True),
        (LocalPlan(iterations=3, keeps_state=True), "dense", OF_ALL, True),
        (LocalPlan(iterations=3, node=NODE), "dense", OF_ALL, True),
        (PLAIN, "dense", WITH_ONE_OF_ITS_OWN, True),
    ],
)
def test_what_stays_is_state_residuals_and_tensors_of_its_own(plan, codec, shapes, leaves):
    assert leaves_something(plan, codec, shapes) is leaves
    if leaves:
        with pytest.raises(ConfigError, match="redundant shard must give the same result on all"):
            check_leaves_nothing(plan, codec, shapes)
    else:
        check_leaves_nothing(plan, codec, shapes)
