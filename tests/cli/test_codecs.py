"""`edgefl codecs`: the list is the registry's, and the bench measures what it is given."""

import csv
import json
import sys

import numpy as np
import pytest

from edgefl.cli.main import main
from edgefl.compression.registry import STAGES

PACKAGE = '''"""A codec of somebody else's."""
from edgefl.compression.values.floats import Float16


class Half(Float16):
    """Rounds to half precision, as ours does.

    More of it.
    """
'''


@pytest.fixture
def edgefl(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def gradient(tmp_path):
    rng = np.random.default_rng(3)
    path = tmp_path / "mine.npz"
    np.savez(path, w=rng.standard_normal((50, 40)).astype(np.float32), b=np.zeros(50, np.float32))
    return path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Another package's codec, installed with its entry point."""
    (tmp_path / "half_codec.py").write_text(PACKAGE)
    info = tmp_path / "half_codec-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half-codec\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[edgefl.codecs]\nhalf = half_codec:Half\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("half_codec", None)


def rows(edgefl, *arguments):
    code, out, _ = edgefl("codecs", *arguments, "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert found["v"] == 1
    return found["rows"]


def test_lists_every_stage_with_what_it_is(edgefl):
    found = {row["name"]: row for row in rows(edgefl, "list")}
    assert {*STAGES, "ef", "rice"} <= set(found)
    assert (found["topk"]["kind"], found["topk"]["biased"], found["topk"]["contraction"]) == ("tensors", True, True)
    assert (found["qsgd"]["kind"], found["qsgd"]["biased"]) == ("values", False)
    assert (found["zstd"]["kind"], found["zstd"]["biased"]) == ("lossless", None)


def test_lists_and_measures_the_stage_of_another_package(edgefl, gradient, package):
    found = {row["name"]: row for row in rows(edgefl, "list")}
    assert found["half"]["summary"] == "Rounds to half precision, as ours does."
    assert "half" in {row["codec"] for row in rows(edgefl, "bench", "--gradient", gradient, "--repeats", 1)}


def test_the_table_of_the_list_is_for_people(edgefl):
    code, out, _ = edgefl("codecs", "list")
    assert code == 0
    assert "ATOMO, Wang et al. 2018" in out


def test_measures_the_codecs_that_are_named_in_their_order(edgefl, gradient):
    asked = ["topk:0.01|int8", "dense", "ef|topk:0.1"]
    options = [word for spec in asked for word in ("--codec", spec)]
    found = rows(edgefl, "bench", "--gradient", gradient, "--repeats", 2, *options)
    assert [row["codec"] for row in found] == asked
    sparse, whole, _ = found
    assert sparse["ratio"] > 50
    assert (whole["relative_error"], whole["index_bits"]) == (0.0, None)
    assert sparse["index_bits"] >= 0.9 * sparse["entropy_bits"] > 0
    assert all(row["encode_mb_per_s"] > 0 and row["decode_mb_per_s"] > 0 for row in found)
    assert {row["gradient"] for row in found} == {"mine.npz"}


def test_measures_every_stage_when_none_is_named(edgefl, gradient):
    code, out, _ = edgefl("codecs", "bench", "--gradient", gradient, "--repeats", 1)
    assert code == 0
    assert out.startswith("gradient: mine.npz\n")
    shown = {part.partition(":")[0] for line in out.splitlines()[2:] for part in line.split()[0].split("|")}
    assert shown >= set(STAGES) - {"delta", "layers", "shuffle"}


def test_csv_has_the_same_columns(edgefl, gradient):
    _, out, _ = edgefl(
        "codecs", "bench", "--gradient", gradient, "--codec", "sign", "--repeats", 1, "--format", "csv"
    )
    (row,) = csv.DictReader(out.splitlines())
    assert (row["codec"], row["gradient"]) == ("sign", "mine.npz")


def test_draws_a_gradient_where_there_is_no_real_one_and_says_so(edgefl, monkeypatch):
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    code, out, err = edgefl("codecs", "bench", "--codec", "topk:0.01", "--repeats", 1)
    assert code == 0
    assert out.startswith("gradient: drawn from Student's t")
    assert "no real gradient, one is drawn" in err


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
def test_bad_input_is_one_line_and_an_exit_code(edgefl, gradient, arguments, code, text):
    named = [] if "--gradient" in arguments else ["--gradient", gradient]
    found, out, err = edgefl("codecs", "bench", *arguments, *named)
    assert (found, out) == (code, "")
    assert text in err
    assert len(err.strip().splitlines()) == 1
