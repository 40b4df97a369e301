"""Which tensors are trained, travel, or stay: patterns and methods, on models small enough to list."""

import pytest

from edgefl.core.config import AdaptSection, RunConfig, parse_run
from edgefl.core.errors import ConfigError
from edgefl.core.types import TensorKind, TensorSpec
from edgefl.tasks.adaptation.parts import LowRankAdapter, select_parts

MODEL = (
    TensorSpec(name="backbone.conv.weight", shape=(16, 3, 3, 3)),
    TensorSpec(name="backbone.conv.bias", shape=(16,)),
    TensorSpec(name="head.weight", shape=(10, 16)),
    TensorSpec(name="head.bias", shape=(10,)),
    TensorSpec(name="backbone.norm.running_mean", shape=(16,), kind=TensorKind.BUFFER),
)


def names(parts, *, shared):
    return [spec.name for spec in parts.shapes if spec.shared is shared]


def test_patterns_say_what_is_frozen_what_stays_and_all_else_travels():
    parts = select_parts(AdaptSection(frozen=("backbone.*",), local=("*.bias",)), MODEL)
    assert [spec.name for spec in parts.frozen] == ["backbone.conv.weight", "backbone.norm.running_mean"]
    assert names(parts, shared=True) == ["head.weight"]
    assert names(parts, shared=False) == ["backbone.conv.bias", "head.bias"]
    assert set(parts.base_names) == {spec.name for spec in MODEL} - {"head.weight"}


def test_what_is_named_as_shared_is_not_frozen():
    parts = select_parts(AdaptSection(frozen=("*",), shared=("head.*",)), MODEL)
    assert names(parts, shared=True) == ["head.weight", "head.bias"]
    assert len(parts.frozen) == 3


@pytest.mark.parametrize(
    ("method", "trained"),
    [("head", ["head.weight", "head.bias"]), ("bitfit", ["backbone.conv.bias", "head.bias"])],
)
def test_a_method_freezes_all_else_running_statistics_too(method, trained):
    parts = select_parts(AdaptSection(method=method), MODEL)
    assert names(parts, shared=True) == trained
    assert MODEL[-1] in parts.frozen


def test_an_adapter_has_two_factors_for_a_matrix_and_for_a_convolution_and_none_where_it_would_be_larger():
    parts = select_parts(AdaptSection(method="lora", rank=4, alpha=8.0, shared=("head.bias",)), MODEL)
    assert [(spec.name, spec.shape) for spec in parts.shapes] == [
        ("head.bias", (10,)),
        ("backbone.conv.weight.lora_a", (4, 27)), ("backbone.conv.weight.lora_b", (16, 4)),
        ("head.weight.lora_a", (4, 16)), ("head.weight.lora_b", (10, 4)),
    ]  # fmt: skip
    assert {adapter.scale for adapter in parts.adapters} == {2.0}
    depthwise = TensorSpec(name="w", shape=(16, 1, 3, 3))
    assert not LowRankAdapter(target=depthwise, rank=8, scale=1.0).is_smaller


def test_only_targets_get_an_adapter():
    parts = select_parts(AdaptSection(method="lora", rank=2, targets=("head.*",)), MODEL)
    assert [adapter.target.name for adapter in parts.adapters] == ["head.weight"]


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (
            {"frozen": ("backbon.*",)},
            "adapt.frozen: no tensor of the model matches 'backbon.*'; it has backbone.conv",
        ),
        ({"frozen": ("*",)}, "leaves no tensor that is trained and sent; the model has backbone.conv.weight"),
        ({"frozen": ("backbone.*",), "local": ("head.*",)}, "leaves no tensor that is trained and sent"),
        ({"frozen": ("*.weight", "*.bias")}, "leaves only buffers"),
        ({"frozen": ("*",), "shared": ("head.*",), "local": ("head.bias",)}, "both name tensor 'head.bias'"),
        (
            {"method": "lora", "targets": ("*.bias",)},
            "adapt.targets: no tensor of the model matches '\\*.bias'; it has",
        ),
        ({"method": "lora", "rank": 64}, "adapt.rank = 64: an adapter would be as large as its tensor"),
        ({"method": "head", "shared": ("*",)}, "freezes nothing of this model"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_names_that_there_are(section, told):
    with pytest.raises(ConfigError, match=told):
        select_parts(AdaptSection(**section), MODEL)


def test_a_model_whose_names_have_no_layers_has_no_last_one():
    with pytest.raises(ConfigError, match="do not say which are the last layer"):
        select_parts(
            AdaptSection(method="head"), (TensorSpec(name="w", shape=(2, 2)), TensorSpec(name="b", shape=(2,)))
        )


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"method": "head", "frozen": ["a"]}, "adapt.frozen means nothing with adapt.method = 'head'"),
        ({"method": "bitfit", "rank": 4}, "adapt.rank, alpha and targets are of adapt.method = 'lora'"),
        ({"shared": ["a"]}, "adapt.shared means nothing where nothing is frozen"),
        ({"method": "lorra"}, "adapt.method must be"),
        ({"method": "lora", "rank": 0}, "adapt.rank must be a whole number at least 1 and at most 1024"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(table, told):
    with pytest.raises(ConfigError, match=told):
        parse_run({"run": {"task": "digits"}, "adapt": table})


def test_the_section_survives_the_store():
    config = parse_run({"run": {"task": "digits"}, "adapt": {"method": "lora", "rank": 2, "targets": ["fc1.*"]}})
    assert RunConfig.from_json(config.to_json()) == config
