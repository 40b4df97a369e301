"""The strategy of a run, with what its task recommends."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import CodecError, ConfigError
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.strategy import get_inner_strategy, get_plan


@pytest.mark.parametrize(
    ("strategy", "rate"),
    [
        ({"name": "fedavg"}, 0.5),
        ({"name": "scaffold"}, 0.25),
        ({"name": "scaffold", "learning_rate": 0.5}, 0.5),
    ],
)
def test_a_strategy_takes_its_share_of_the_task_s_rate_unless_the_run_file_gives_one(
    strategy: dict[str, Any], rate: float
) -> None:
    run = build_run(parse_run({"run": {"task": "digits", "rounds": 1}, "strategy": strategy}), "r")
    assert get_plan(run.strategy).learning_rate == rate


@pytest.mark.parametrize(
    ("task", "options", "weight", "message"),
    [
        ("pictures", {"unlabelled": True}, None, "task.unlabelled reads examples .* set both or neither"),
        ("pictures", {}, 1.0, "consistency_weight is for examples .* set both or neither"),
        ("digits", {}, 1.0, "task digits reads none here"),
        ("pictures", {"unlabelled": True}, 1.0, None),
    ],
)
def test_examples_without_a_label_are_read_where_they_are_trained_on_and_else_not(
    task: str, options: dict[str, Any], weight: float | None, message: str | None
) -> None:
    tables: dict[str, Any] = {"run": {"task": task, "rounds": 1}, "task": dict(options), "strategy": {}}
    if task == "pictures":
        tables["task"] |= {"labels": ["dark", "bright"], "size": 8}
    if weight is not None:
        tables["strategy"]["consistency_weight"] = weight
    if message is None:
        assert get_plan(build_run(parse_run(tables), "r").strategy).consistency_weight == weight
        return
    with pytest.raises(ConfigError, match=message):
        build_run(parse_run(tables), "r")


def test_redundant_scales_the_task_s_rate_and_never_one_that_the_run_file_gives() -> None:
    def scales(**options: Any) -> bool:
        tables = {"run": {"task": "digits", "rounds": 1}, "strategy": {"name": "redundant", **options}}
        return get_inner_strategy(build_run(parse_run(tables), "r").strategy).scales_rate  # type: ignore[attr-defined, no-any-return]

    assert scales()
    assert not scales(learning_rate=0.5)
    assert scales(learning_rate=0.5, scale_rate=True)
    assert not scales(scale_rate=False)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"guard": {}}, r"guard\.enabled must be false with strategy\.copies = 'slices'"),
        (
            {"guard": {"enabled": False, "max_norm": 9.0}},
            r"guard\.max_norm left out: parts of updates are no measure",
        ),
        ({"compression": {"up": "topk:0.1"}}, r"compression\.up: codec 'slice:1:2\|topk:0\.1'"),
        ({"compression": {"up": "ef|fp16"}}, "error feedback makes the copies of a block differ"),
    ],
)
def test_what_needs_whole_updates_is_refused_where_devices_send_slices(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    run = {"run": {"task": "digits", "rounds": 1}, "strategy": {"name": "redundant", "copies": "slices"}}
    with pytest.raises((ConfigError, CodecError), match=message):
        build_run(parse_run({**run, "guard": {"enabled": False}, **sections}), "r")


@pytest.mark.parametrize(
    ("tables", "is_permitted"),
    [
        ({"strategy": {"name": "fedavg"}}, True),
        ({"strategy": {"name": "fedprox"}, "server": {"optimizer": "adam"}}, True),
        ({"strategy": {"name": "fedavg", "seconds": 1.0}}, False),
        ({"strategy": {"name": "fedavg"}, "selection": {"rule": "utility"}, "devices": {"count": 2}}, False),
        ({"strategy": {"name": "fedavg"}, "guard": {"max_norm": 1.0}}, False),
        (
            {
                "strategy": {"name": "fedavg"},
                "secure_aggregation": {"enabled": True},
                "guard": {"enabled": False, "max_weight_ratio": 0.0},
                "devices": {"min": 3},
            },
            False,
        ),
        ({"strategy": {"name": "fednova"}}, False),
        ({"strategy": {"name": "ssgd"}}, False),
        ({"strategy": {"name": "scaffold"}}, False),
        ({"strategy": {"name": "coordinate-median"}}, False),
        ({"strategy": {"name": "fedasync"}}, False),
    ],
)
def test_only_a_mean_weighted_by_examples_may_be_taken_at_a_site(tables: dict[str, Any], is_permitted: bool) -> None:
    run = build_run(parse_run({"run": {"task": "digits", "rounds": 1}, **tables}), "r")
    assert run.header.get("partial_sums", False) is is_permitted


def test_a_site_is_told_the_limits_of_the_run() -> None:
    tables = {"guard": {"max_weight_ratio": 3.0}, "strategy": {"name": "fedavg"}}
    run = {"task": "digits", "rounds": 1, "deadline_s": 90.0}
    header = build_run(parse_run({"run": run, **tables}), "r").header
    assert header["site_limits"] == {"max_weight_ratio": 3.0, "deadline_s": 90.0, "has_plain_step": True}
    for server in ({"optimizer": "momentum"}, {"learning_rate": 0.5}):
        header = build_run(parse_run({"run": run, **tables, "server": server}), "r").header
        assert header["site_limits"]["has_plain_step"] is False
