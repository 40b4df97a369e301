"""What a codec costs, and the list of stages with examples."""

import math
import re
from itertools import count

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.codec_benchmark import (
    compute_expected_bytes,
    compute_index_cost,
    compute_relative_error,
    make_example_specs,
    make_random_update,
    measure_codec,
)
from edgefl.compression.registry import STAGE_DESCRIPTIONS, STAGES, list_stage_names, list_stages, parse_spec
from edgefl.core.errors import CodecError
from edgefl.core.types import SparseTensor, TensorSpec

SHAPES = (TensorSpec(name="w", shape=(40, 50)), TensorSpec(name="b", shape=(40,)))
MEGABYTES = 2040 * 4 / 1e6


def ticking(*seconds):
    """A clock that goes on by so many seconds between its first and its second reading, and so on."""
    times = iter([sum(seconds[:place]) for place in range(len(seconds) + 1)])
    return lambda: next(times)


def a_second_each():
    ticks = count()
    return lambda: float(next(ticks))


def update():
    return make_random_update(SHAPES, np.random.default_rng(3))


def test_bytes_and_ratio_are_those_of_the_body():
    body = make_codec("int8", SHAPES).encode(update(), np.random.default_rng(0))
    found = measure_codec("int8", update(), SHAPES, clock=a_second_each(), repeats=1)
    assert (found.num_bytes, found.ratio) == (len(body), 2040 * 4 / len(body))


def test_speed_is_that_of_the_fastest_time():
    # encode: 4 s, 2 s; decode: 1 s, 8 s
    found = measure_codec("fp16", update(), SHAPES, clock=ticking(4, 0, 2, 0, 1, 0, 8), repeats=2)
    assert found.encode_mb_per_s == pytest.approx(MEGABYTES / 2)
    assert found.decode_mb_per_s == pytest.approx(MEGABYTES)


def test_the_error_is_that_of_all_tensors_together():
    before = {"w": np.array([3.0, 0.0]), "b": np.array([4.0])}
    after = {
        "w": SparseTensor(indices=np.array([0]), values=np.array([3.0]), shape=(2,)),
        "b": np.array([1.0]),
    }
    assert compute_relative_error(before, after) == pytest.approx(3 / 5)


def test_an_exact_codec_has_no_error_and_no_places():
    found = measure_codec("dense", update(), SHAPES, clock=a_second_each(), repeats=1)
    assert (found.relative_error, found.index_bits, found.entropy_bits) == (0.0, None, None)


def test_error_feedback_is_measured_on_a_first_update():
    bare, kept = (
        measure_codec(spec, update(), SHAPES, clock=a_second_each(), repeats=3)
        for spec in ("topk:0.1", "ef|topk:0.1")
    )
    assert (bare.num_bytes, bare.relative_error) == (kept.num_bytes, kept.relative_error)


def test_places_at_their_entropy_are_the_logarithm_of_the_choices():
    tensor = SparseTensor(indices=np.array([1, 7]), values=np.ones(2), shape=(10,))
    written, entropy = compute_index_cost({"w": tensor, "b": np.ones(3)})
    assert entropy == pytest.approx(math.log2(45) / 2)
    assert written * 2 == 8 * round(written / 4)  # whole bytes
    assert written > entropy


def test_one_place_in_a_hundred_spread_evenly_costs_no_more_than_a_twentieth_over_the_entropy():
    chosen = np.sort(np.random.default_rng(5).choice(400_000, 4_000, replace=False))
    written, entropy = compute_index_cost(
        {"w": SparseTensor(indices=chosen, values=np.ones(4_000), shape=(400_000,))}
    )
    assert entropy == pytest.approx(8.08, abs=0.02)
    assert written <= 1.05 * entropy


def test_a_drawn_update_has_heavy_tails_and_is_the_same_every_time():
    shapes = (TensorSpec(name="large", shape=(300, 1000)), TensorSpec(name="n", shape=(), dtype="int64"))
    first, second = (make_random_update(shapes, np.random.default_rng(1)) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert [first[spec.name].dtype for spec in shapes] == ["float32", "int64"]
    values = first["large"]
    assert np.abs(values).max() > 10 * values.std()


def test_tensors_that_stay_on_the_board_are_not_measured():
    shapes = (*SHAPES, TensorSpec(name="own", shape=(1000,), shared=False))
    assert compute_expected_bytes("dense", shapes) == compute_expected_bytes("dense", SHAPES)


UPDATE_SHAPES = (TensorSpec(name="w", shape=(60, 50)), TensorSpec(name="b", shape=(60,)))
UPDATE = make_random_update(UPDATE_SHAPES, np.random.default_rng(3))


def test_all_that_may_be_typed_is_listed_and_described():
    names = {row.name for row in list_stages()}
    assert {*STAGES, *list_stage_names()} <= names
    assert set(STAGES) <= set(STAGE_DESCRIPTIONS), "describe the new stage in registry.py"
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
        assert make_codec(f"ef|{line}", UPDATE_SHAPES)
    else:
        with pytest.raises(CodecError, match="ef would pile it up"):
            make_codec(f"ef|{line}", UPDATE_SHAPES)


def test_usual_lines_work_and_show_every_stage():
    lines = make_example_specs(UPDATE)
    for line in lines:
        assert measure_codec(line, UPDATE, UPDATE_SHAPES, clock=iter(range(100)).__next__, repeats=1).num_bytes
    shown = {name for line in lines for name, _ in parse_spec(line).stages}
    assert shown >= set(STAGES) - {"delta"}


def test_the_usual_threshold_lets_one_entry_in_a_hundred_through():
    (line,) = [line for line in make_example_specs(UPDATE) if line.startswith("threshold:")]
    smallest = float(re.match(r"threshold:(.+)", line)[1])
    values = np.concatenate([UPDATE[spec.name].reshape(-1) for spec in UPDATE_SHAPES])
    assert np.mean(np.abs(values) >= smallest) == pytest.approx(0.01, abs=0.002)
