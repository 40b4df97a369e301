"""Which run files may leave the sum of updates to the devices."""

import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError
from edgefl.engine.assembly.build import build_run

RING = {
    "run": {"task": "digits"},
    "aggregation": {"collective": "ring"},
    "guard": {"enabled": False, "max_weight_ratio": 0},
}


def build(**sections):
    return build_run(
        parse_run({name: {**RING.get(name, {}), **sections.get(name, {})} for name in {**RING, **sections}}), "r"
    )


@pytest.mark.parametrize("strategy", [{"name": "fedavg"}, {"name": "fedprox"}, {"name": "ssgd"}, {"name": "esync"}])
def test_weighted_means_may(strategy):
    assert build(strategy=strategy).strategy.rules.collective.collective == "ring"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"guard": {"enabled": True}}, "guard.enabled must be false"),
        ({"guard": {"max_weight_ratio": 2.0}}, "guard.max_weight_ratio must be 0"),
        ({"guard": {"max_norm": 1.0}}, "guard.max_norm must be left out"),
        ({"compression": {"up": "topk:0.1"}}, "compression.up must be 'dense'.*'topk:0.1': its bodies do not add up"),
        ({"compression": {"layers": {"*.bias": "dense"}}}, "compression.layers must be left out"),
        ({"compression": {"down": "dense|fp16"}}, "compression.down must be 'dense'"),
        ({"server": {"optimizer": "adam"}}, "server.optimizer must be 'none'"),
        ({"server": {"learning_rate": 0.5}}, "server.learning_rate must be 1"),
        ({"run": {"min_updates": 2}}, "run.min_updates must be left out"),
        ({"run": {"on_timeout": "reassign"}}, "run.on_timeout must be 'aggregate'"),
        (
            {"strategy": {"name": "krum"}},
            "strategy.name must be one of esync, fedavg, fedprox, ssgd.*needs each update",
        ),
        ({"strategy": {"name": "fednova"}}, "strategy.name"),
        ({"strategy": {"name": "asgd"}}, "strategy.name"),
        ({"strategy": {"name": "dsgd"}}, "strategy.name"),
        ({"strategy": {"double_buffering": True}}, "strategy.double_buffering must be false"),
        ({"strategy": {"name": "esync", "aggregation": "nova"}}, "strategy.aggregation must be"),
        ({"strategy": {"name": "esync", "global_learning_rate": 0.5}}, "strategy.global_learning_rate must be 1"),
        (
            {"strategy": {"name": "esync", "mode": "live"}, "aggregation": {"reductions": 2}},
            "strategy.mode must be 'budget'",
        ),
        (
            {"strategy": {"name": "esync", "mode": "query"}, "aggregation": {"reductions": 2}},
            "strategy.mode must be 'budget' with aggregation.reductions above 1, got 'query'",
        ),
        ({"aggregation": {"collective": "coordinator", "reductions": 2}}, "aggregation.reductions must be 1"),
        ({"aggregation": {"hosts": "/absent.json"}}, "absent.json"),
    ],
)
def test_what_needs_single_updates_is_refused_in_one_line(sections, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(**sections)
    assert "\n" not in str(caught.value)
