"""`edgefl codecs`: the list is the registry's, and the bench measures what it is given."""

import csv

import numpy as np
import pytest

from edgefl.compression.registry import STAGES

PACKAGE = '''"""A codec of somebody else's."""
from edgefl.compression.quantisation.floats import Float16


class Half(Float16):
    """Rounds to half precision, as ours does.

    More of it.
    """
'''


@pytest.fixture
def gradient(tmp_path):
    rng = np.random.default_rng(3)
    path = tmp_path / "mine.npz"
    np.savez(path, w=rng.standard_normal((50, 40)).astype(np.float32), b=np.zeros(50, np.float32))
    return path


@pytest.fixture
def bench(run, gradient):
    def call(*words, fmt="json"):
        return run("codecs", "bench", "--gradient", gradient, "--repeats", 1, *words, "--format", fmt)

    return call


def listed(run):
    return {row["name"]: row for row in run("codecs", "list", "--format", "json").rows}


def test_lists_every_stage_with_what_it_is(run):
    found = listed(run)
    assert {*STAGES, "ef", "rice"} <= set(found)
    assert (found["topk"]["kind"], found["topk"]["biased"], found["topk"]["contraction"]) == ("tensors", True, True)
    assert (found["qsgd"]["kind"], found["qsgd"]["biased"]) == ("values", False)
    assert (found["zstd"]["kind"], found["zstd"]["biased"]) == ("lossless", None)
    assert "ATOMO, Wang et al. 2018" in run("codecs", "list").out


def test_the_stage_of_an_installed_package_is_listed_and_measured_as_every_other(run, bench, installed):
    installed({"half_codec": PACKAGE}, {"edgefl.codecs": {"half": "half_codec:Half"}})
    assert listed(run)["half"]["summary"] == "Rounds to half precision, as ours does."
    shown = {part.partition(":")[0] for row in bench().rows for part in row["codec"].split("|")}
    assert shown >= {*STAGES, "half"} - {"delta", "layers", "shuffle"}


def test_measures_the_codecs_that_are_named_in_their_order(bench):
    asked = ["topk:0.01|int8", "dense", "ef|topk:0.1"]
    found = bench(*(word for spec in asked for word in ("--codec", spec))).rows
    assert [(row["codec"], row["gradient"]) for row in found] == [(codec, "mine.npz") for codec in asked]
    sparse, whole, _ = found
    assert sparse["ratio"] > 50
    assert (whole["relative_error"], whole["index_bits"]) == (0.0, None)
    assert sparse["index_bits"] >= 0.9 * sparse["entropy_bits"] > 0
    assert all(row["encode_mb_per_s"] > 0 and row["decode_mb_per_s"] > 0 for row in found)
    (row,) = csv.DictReader(bench("--codec", "sign", fmt="csv").out.splitlines())
    assert set(row) == set(sparse)


def test_draws_a_gradient_where_there_is_no_real_one_and_says_so(run, monkeypatch):
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    ran = run("codecs", "bench", "--codec", "topk:0.01", "--repeats", 1)
    assert ran.out.startswith("gradient: drawn from Student's t")
    assert "no real gradient" in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--codec", "topk:2"], 7, "needs a fraction"),
        (["--codec", "delta|fp16"], 7, "delta is for [compression] down"),
        (["--gradient", "vgg"], 2, "mnist-cnn, resnet-18, or a file"),
        (["--gradient", "no/such.npz"], 4, "no/such.npz"),
        (["--gradient", "mnist-cnn", "--data", "no-such-folder"], 4, "no-such-folder"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(refused, gradient, arguments, code, text):
    refused(["codecs", "bench", "--gradient", gradient, *arguments], code, text)
