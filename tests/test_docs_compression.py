"""The pages about compression: their stage is run as it stands, their tables are the registry's."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from markdown_pages import code, part, rows

import edgefl
from edgefl.assembly import assemble
from edgefl.cli.codecs import command
from edgefl.compression import auto
from edgefl.compression.catalogue import listed
from edgefl.compression.codec import make_codec
from edgefl.compression.decoding import decode_body
from edgefl.compression.feedback import ErrorFeedback
from edgefl.compression.measuring import drawn_update
from edgefl.compression.registry import ENTRY_POINTS, STAGES
from edgefl.compression.specs import split_spec
from edgefl.config import parse_run
from edgefl.errors import CodecError
from edgefl.types import TensorSpec

ROOT = Path(__file__).parents[1]
PAGES = ("reference/compression.md", "how-to/write-a-codec.md")
PAGE = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
SHAPES = (TensorSpec(name="fc.weight", shape=(60, 50)), TensorSpec(name="fc.bias", shape=(60,)))
KINDS = {"Tensor stages": "tensors", "Value stages": "values", "Lossless stages": "lossless"}


def fences(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run_files():
    return [tomllib.loads(body) for body in fences("toml") if "entry-points" not in body]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The page's stage, installed with its entry point."""
    (module,) = fences("python")
    name = re.match(r"# (\w+)\.py\n", module)[1]
    (tmp_path / f"{name}.py").write_text(module)
    (typed,) = [tomllib.loads(body) for body in fences("toml") if "entry-points" in body]
    points = typed["project"]["entry-points"][ENTRY_POINTS]
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    monkeypatch.syspath_prepend(tmp_path)
    yield points
    sys.modules.pop(name, None)


def test_the_stage_of_the_page_keeps_its_promises(package):
    update = drawn_update(SHAPES, np.random.default_rng(3))
    codec = make_codec("fixed:1e-4", SHAPES)
    body = codec.encode(update, np.random.default_rng(1))
    assert len(body) < 2 * (3060 + 60)
    for name, tensor in decode_body(body, SHAPES).items():
        assert np.all(np.abs(tensor - update[name]) <= codec.values.error_bound(update[name]) + 1e-9)
    large = {name: np.full_like(array, 1e3) for name, array in update.items()}
    decoded = decode_body(codec.encode(large, np.random.default_rng(1)), SHAPES)
    assert decoded["fc.bias"] == pytest.approx(3.2767)


def test_the_stage_of_the_page_refuses_what_it_cannot_carry(package):
    broken = {spec.name: np.full(spec.shape, np.nan, np.float32) for spec in SHAPES}
    with pytest.raises(CodecError, match=r"fc\.weight.*finite"):
        make_codec("fixed:1e-4", SHAPES).encode(broken, np.random.default_rng(1))
    for argument in ("", "0", "-1", "nan", "inf", "much"):
        with pytest.raises(CodecError, match="needs a step above 0"):
            make_codec(f"fixed:{argument}", SHAPES)


def test_the_stage_of_the_page_loses_nothing_behind_error_feedback(package):
    (typed,) = re.findall(r"`up = \"(ef\|.*fixed.*)\"`", PAGE)
    feedback, rng = ErrorFeedback(make_codec(typed, SHAPES)), np.random.default_rng(1)
    given, sent = np.zeros((60, 50)), np.zeros((60, 50))
    for number in range(60):
        update = drawn_update(SHAPES, np.random.default_rng(number))
        decoded = decode_body(feedback.encode(str(number), update, rng), SHAPES)["fc.weight"]
        feedback.settle([str(number)])
        given += update["fc.weight"]
        sent += decoded.dense()
    left = feedback.state()["residual/fc.weight"]
    assert np.abs(given - sent - left).max() < 1e-5


def test_the_stage_of_the_page_trains_a_simulated_fleet(package, tmp_path):
    config = {
        "run": {"task": "digits", "rounds": 6},
        "strategy": {"name": "fedavg", "learning_rate": 0.3},
        "compression": {"up": "ef|topk:0.05|fixed:1e-4"},
        "simulation": {"workers": 0},
    }
    result = edgefl.simulate(config, devices=3, scheme="iid", root=tmp_path / "simulated")
    assert result.metrics["accuracy"] > 0.7


def test_every_run_file_of_the_page_makes_sense():
    for config in run_files():
        config["run"] = {"task": "fashion-mnist"}  # whose tensors the patterns are of
        assert assemble(parse_run(config), "check").strategy is not None
    assert len(run_files()) == 3


def test_the_layers_of_the_page_are_in_one_line_what_it_says():
    (config,) = [config for config in run_files() if "layers" in config["compression"]]
    (line,) = re.findall(r"same reads `(.+?)`", PAGE.replace("\n", " "))
    typed = split_spec(line)
    assert dict(typed.layers) == config["compression"]["layers"]
    assert f"ef|{typed.own}" == config["compression"]["up"]


@pytest.mark.parametrize("title", KINDS)
def test_the_tables_have_every_stage_of_their_kind_and_no_other(title):
    told = {text.partition(":")[0].partition("[")[0] for row in rows(part(PAGE, title)) for text in code(row[0])}
    assert told == {row.name for row in listed() if row.kind == KINDS[title] and row.name != "delta"}


@pytest.mark.parametrize("title", ["Tensor stages", "Value stages"])
def test_the_tables_say_what_the_stages_say(title):
    listing = {row.name: row for row in listed()}
    for cells in rows(part(PAGE, title)):
        row = listing[re.split(r"[:\[]", code(cells[0])[0])[0]]
        if cells[2] in {"yes", "no"}:
            assert (cells[2] == "yes") is not row.is_biased, row.name
        if cells[3] in {"yes", "no"}:
            assert (cells[3] == "yes") is row.is_contraction, row.name


def test_qsgd_works_behind_error_feedback_from_the_bits_that_the_page_says():
    (bits,) = map(int, re.findall(r"BITS from (\d) on", PAGE))
    assert make_codec(f"ef|qsgd:{bits}", SHAPES)
    with pytest.raises(CodecError, match="ef would pile it up"):
        make_codec(f"ef|qsgd:{bits - 1}", SHAPES)


def test_the_codecs_that_it_recommends_are_codecs():
    for row in rows(part(PAGE, "Which one")):
        for text in code(row[1]):
            line = text.replace("\\|", "|").removeprefix("down = ").strip('"')
            if line.startswith("delta"):
                assert split_spec(line).prefix == "delta"
            elif line not in {auto.AUTO, "signsgd"}:
                assert make_codec(line, SHAPES), line


def test_what_it_says_of_auto_is_so():
    text = part(PAGE, "Auto").replace("\n  ", " ")
    (entry,) = re.findall(r"\*\*Candidates\*\* are (.+?)\. Yours", text)
    fractions = re.findall(r"0\.\d+", entry)
    assert ("ef|fp16", "ef|int8", *(f"ef|topk:{fraction}|int8" for fraction in fractions)) == auto.CANDIDATES
    assert (auto.FIRST_SHARE, auto.LEAST_SHARE, auto.MOST_SHARE) == (1 / 4, 1 / 8, 4)
    assert (auto.RISING, auto.STALLED, auto.HALF_WINDOW) == (1 - 1 / 10, 1 - 1 / 50, 3)
    (own,) = re.findall(r"`(auto:.+?)`", text)
    assert all(make_codec(spec, SHAPES) for spec in auto.parse_auto(own))


def test_its_commands_exist():
    for words in re.findall(r"^edgefl codecs (\w+)((?: --[a-z]+)*)", PAGE, re.MULTILINE):
        assert words[0] in command.commands
    options = {word for body in fences("sh") for word in re.findall(r"--[a-z]+", body)}
    known = {text for each in command.commands.values() for option in each.params for text in option.opts}
    assert options <= known


def test_every_stage_that_has_a_number_is_on_the_page():
    assert {name for name in STAGES if f"`{name}" not in PAGE} <= {"layers"}
