"""Run files with secure aggregation: what is refused."""

import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError
from edgefl.core.secure_aggregation.messages import check_config
from edgefl.core.types import SecureAggregationConfig
from edgefl.engine.assembly.build import build_run

BASE = {
    "run": {"task": "digits", "rounds": 2},
    "devices": {"min": 3},
    "guard": {"enabled": False, "max_weight_ratio": 0},
    "secure_aggregation": {"enabled": True},
}


def make_tables(changes):
    return {**BASE, **{name: {**BASE.get(name, {}), **table} for name, table in changes.items()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": {"name": "krum"}}, "strategy.name must be one of fedavg, fedprox, ssgd"),
        ({"strategy": {"name": "fedbuff"}}, "more than the weighted sum"),
        ({"strategy": {"double_buffering": True}}, "strategy.double_buffering must be false"),
        ({"compression": {"up": "fp16"}}, "compression.up must be 'dense'"),
        ({"guard": {"enabled": True}}, "guard.enabled must be false"),
        ({"guard": {"max_norm": 1.0}}, "guard.max_norm must be left out"),
        ({"guard": {"max_weight_ratio": 3}}, "guard.max_weight_ratio must be 0"),
        ({"run": {"min_updates": 2}}, "run.min_updates must be left out"),
        ({"run": {"on_timeout": "reassign"}}, "run.on_timeout must be 'aggregate'"),
        ({"aggregation": {"collective": "ring"}}, "aggregation.collective must be 'coordinator'"),
        ({"devices": {"min": 2}}, "devices.min must be at least 3"),
        ({"secure_aggregation": {"threshold": 0.4}}, "secure_aggregation.threshold"),
        ({"secure_aggregation": {"enabled": False, "clip": 2.0}}, "secure_aggregation.enabled must be true"),
        ({"secure_aggregation": {"graph": "ring"}}, "secure_aggregation.graph must be"),
        ({"secure_aggregation": {"corrupted": 0.2}}, 'corrupted is of graph = "sparse"'),
        ({"secure_aggregation": {"graph": "sparse", "corrupted": 0.04}}, "secure_aggregation.corrupted"),
        ({"secure_aggregation": {"graph": "sparse", "corrupted": 0.35}}, "corrupted must be at most 0.34"),
        ({"secure_aggregation": {"graph": "sparse", "dropped": 0.33}}, "dropped must be less than 0.33"),
        (
            {"secure_aggregation": {"graph": "sparse", "threshold": 0.5}},
            "needs a threshold of at least 0.525, got 0.5",
        ),
    ],
)
def test_what_needs_single_updates_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_run(parse_run(make_tables(changes)), "check")


@pytest.mark.parametrize("shares", [{"corrupted": 0.34, "dropped": 0.32}, {"dropped": 0}])
def test_boards_accept_what_a_run_file_may_ask_for(shares):
    section = parse_run(make_tables({"secure_aggregation": {"graph": "sparse", **shares}})).secure_aggregation
    check_config(
        SecureAggregationConfig(
            step="keys",
            group="g",
            version=0,
            threshold=section.threshold,
            clip=section.clip,
            max_examples=1,
            corrupted=section.corrupted,
            dropped=section.dropped,
        )
    )


def test_the_table_stands_in_what_is_kept_of_a_run_file_only_where_it_is_on():
    config = parse_run(BASE)
    assert parse_run(config.to_json()) == config
    assert "secure_aggregation" not in parse_run({"run": {"task": "digits"}}).to_json()
