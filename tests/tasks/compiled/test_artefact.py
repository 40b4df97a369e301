from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fuzz.compiled_readers import make_example
from safetensors.numpy import save

from edgefl.core.errors import DataError
from edgefl.tasks.compiled.artefact import (
    PERMITTED_OPERATORS,
    CompiledManifest,
    compute_sha256,
    encode_artefact,
    parse_artefact,
)


def test_a_compiled_task_comes_back_as_it_was_and_equal_ones_have_one_name() -> None:
    task = make_example()
    content = encode_artefact(task)
    assert parse_artefact(content) == task
    assert encode_artefact(make_example()) == content
    assert compute_sha256(content) != compute_sha256(encode_artefact(replace(task, train=b"other")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": 2}, "it has format 2, this program reads 1"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1 to 65536, got 0"),
        ({"batch_size": True}, "got True"),
        ({"inputs": {"shape": [2], "dtype": "float64"}}, "inputs' dtype must be one of float32"),
        ({"outputs": [2**31, 2**31]}, "at most 2147483648 values are taken"),
        ({"noise": [[1] * 9]}, "shape of noise must be a list of at most 8"),
        ({"model": [{"name": "w", "shape": [1], "dtype": "float32", "kind": "weight"}]}, "kind of w must be one of"),
        ({"source": "ab"}, "source must be a SHA-256"),
        ({"options": {"model": None}}, "option 'model' must be a text"),
        ({"check": {"loss": "small"}}, "check of 'loss' must be a number"),
        ({"task": "a\nb"}, "task must be a text"),
        ({"constant": ["no such"]}, "constant names 'no such', which is no tensor of its model"),
        ({"constant": [3]}, "constant must be a text"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match="the compiled task cannot be read: ") as error:
        CompiledManifest.parse(make_example().manifest.to_json() | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tensor_named_twice_is_refused() -> None:
    value = make_example().manifest.to_json()
    with pytest.raises(DataError, match="names a tensor twice"):
        CompiledManifest.parse(value | {"model": value["model"] * 2})


def test_other_safetensors_files_are_refused() -> None:
    with pytest.raises(DataError, match="it has no manifest"):
        parse_artefact(save({}))
    manifest = json.dumps(make_example().manifest.to_json())
    with pytest.raises(DataError, match=r"must be evaluate.onnx and train.onnx, bytes; got ''"):
        parse_artefact(save({}, metadata={"manifest": manifest}))


def test_the_permitted_operators_are_sorted_and_end_after_as_many_steps_as_a_tensor_is_long() -> None:
    assert list(PERMITTED_OPERATORS) == sorted({*PERMITTED_OPERATORS})
    assert not {"Loop", "If", "RandomUniform", "RandomNormal", "NonZero"} & {*PERMITTED_OPERATORS}
