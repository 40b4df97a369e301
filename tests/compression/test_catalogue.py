"""The list knows every stage, and what it says of them is so."""

import re

import numpy as np
import pytest

from edgefl.compression.catalogue import STAGE_DESCRIPTIONS, list_stages, make_example_specs
from edgefl.compression.codec import make_codec
from edgefl.compression.codec_benchmark import make_random_update, measure_codec
from edgefl.compression.registry import STAGES, list_stage_names
from edgefl.compression.specs import parse_spec
from edgefl.core.errors import CodecError
from edgefl.core.types import TensorSpec

SHAPES = (TensorSpec(name="w", shape=(60, 50)), TensorSpec(name="b", shape=(60,)))
UPDATE = make_random_update(SHAPES, np.random.default_rng(3))


def test_all_that_may_be_typed_is_listed_and_described():
    names = {row.name for row in list_stages()}
    assert {*STAGES, *list_stage_names()} <= names
    assert set(STAGES) <= set(STAGE_DESCRIPTIONS), "describe the new stage in catalogue.py"
    assert all(row.summary for row in list_stages())


def test_kinds_come_in_the_order_of_a_line():
    kinds = list(dict.fromkeys(row.kind for row in list_stages() if row.kind in {"tensors", "values", "lossless"}))
    assert kinds == ["tensors", "values", "lossless"]


@pytest.mark.parametrize(
    "row", [row for row in list_stages() if row.is_contraction is not None], ids=lambda row: row.name
)
def test_what_is_listed_as_a_contraction_works_behind_error_feedback_and_nothing_else(row):
    argument = {"threshold": "1", "delta": ""}.get(row.name)
    lines = STAGE_DESCRIPTIONS[row.name].example_specs
    line = f"{row.name}:{argument}" if argument else lines[0].removeprefix("ef|")
    if row.is_contraction:
        assert make_codec(f"ef|{line}", SHAPES)
    else:
        with pytest.raises(CodecError, match="ef would pile it up"):
            make_codec(f"ef|{line}", SHAPES)


def test_usual_lines_work_and_show_every_stage():
    lines = make_example_specs(UPDATE)
    for line in lines:
        assert measure_codec(line, UPDATE, SHAPES, clock=iter(range(100)).__next__, repeats=1).num_bytes
    shown = {name for line in lines for name, _ in parse_spec(line).stages}
    assert shown >= set(STAGES) - {"delta", "layers"}


def test_the_usual_threshold_lets_one_entry_in_a_hundred_through():
    (line,) = [line for line in make_example_specs(UPDATE) if line.startswith("threshold:")]
    smallest = float(re.match(r"threshold:(.+)", line)[1])
    values = np.concatenate([UPDATE[spec.name].reshape(-1) for spec in SHAPES])
    assert np.mean(np.abs(values) >= smallest) == pytest.approx(0.01, abs=0.002)
