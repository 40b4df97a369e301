"""The list knows every stage, and what it says of them is so."""

import re

import numpy as np
import pytest

from edgefl.compression.catalogue import ENTRIES, listed, usual_lines
from edgefl.compression.codec import make_codec
from edgefl.compression.measuring import drawn_update, measure
from edgefl.compression.registry import STAGES, stage_names
from edgefl.compression.specs import split_spec
from edgefl.errors import CodecError
from edgefl.types import TensorSpec

SHAPES = (TensorSpec(name="w", shape=(60, 50)), TensorSpec(name="b", shape=(60,)))
UPDATE = drawn_update(SHAPES, np.random.default_rng(3))


def test_all_that_may_be_typed_is_listed_and_described():
    names = {row.name for row in listed()}
    assert {*STAGES, *stage_names()} <= names
    assert set(STAGES) <= set(ENTRIES), "describe the new stage in catalogue.py"
    assert all(row.summary for row in listed())


def test_kinds_come_in_the_order_of_a_line():
    kinds = list(dict.fromkeys(row.kind for row in listed() if row.kind in {"tensors", "values", "lossless"}))
    assert kinds == ["tensors", "values", "lossless"]


@pytest.mark.parametrize("row", [row for row in listed() if row.is_contraction is not None], ids=lambda row: row.name)
def test_what_is_listed_as_a_contraction_works_behind_error_feedback_and_nothing_else(row):
    argument = {"threshold": "1", "delta": ""}.get(row.name)
    lines = ENTRIES[row.name].lines
    line = f"{row.name}:{argument}" if argument else lines[0].removeprefix("ef|")
    if row.is_contraction:
        assert make_codec(f"ef|{line}", SHAPES)
    else:
        with pytest.raises(CodecError, match="ef would pile it up"):
            make_codec(f"ef|{line}", SHAPES)


def test_usual_lines_work_and_show_every_stage():
    lines = usual_lines(UPDATE)
    for line in lines:
        assert measure(line, UPDATE, SHAPES, clock=iter(range(100)).__next__, repeats=1).num_bytes
    shown = {name for line in lines for name, _ in split_spec(line).stages}
    assert shown >= set(STAGES) - {"delta", "layers"}


def test_the_usual_threshold_lets_one_entry_in_a_hundred_through():
    (line,) = [line for line in usual_lines(UPDATE) if line.startswith("threshold:")]
    smallest = float(re.match(r"threshold:(.+)", line)[1])
    values = np.concatenate([UPDATE[spec.name].reshape(-1) for spec in SHAPES])
    assert np.mean(np.abs(values) >= smallest) == pytest.approx(0.01, abs=0.002)
