"""`edgefl task compile`: the file, the report, and what it refuses in one line."""

import json
from pathlib import Path

import pytest

from edgefl.tasks.compiled.artefact import parse_artefact


@pytest.mark.extended
def test_the_command_writes_a_file_named_by_its_hash_and_reports_as_json(run, tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install '.[export]'")
    rows = "\n".join(f"{i % 7},{i % 3}" for i in range(60))
    (tmp_path / "shard.csv").write_text(f"value,kind\n{rows}\n")
    options = ["columns=value", "target=kind", "labels=a,b,c", "window=8", "model=cnn"]
    arguments = [word for option in options for word in ("-o", option)]
    done = run(
        "task", "compile", "series", *arguments, "--batch-size", "4", "--data", str(tmp_path / "shard.csv"),
        "--out", str(tmp_path / "out"), "--format", "json",
    )  # fmt: skip
    report = json.loads(done.out)
    (path,) = (tmp_path / "out").iterdir()
    assert report["path"] == str(path)
    assert report["check"]["real_steps"] == 10
    compiled = parse_artefact(path.read_bytes())
    assert compiled.manifest.to_json() == report["manifest"]
    assert compiled.manifest.options["window"] == 8
    assert compiled.manifest.input_shape == (1, 8)


@pytest.mark.extended
def test_what_was_compiled_before_is_taken_from_the_cache(run, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install '.[export]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = [
        "task",
        "compile",
        "mnist",
        "-o",
        "model=cnn-small",
        "--batch-size",
        "2",
        "--format",
        "json",
        "--out",
    ]
    reports = [json.loads(run(*arguments, str(tmp_path / name)).out) for name in ("first", "second")]
    assert [report.pop("cached") for report in reports] == [False, True]
    paths = [Path(report.pop("path")) for report in reports]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert reports[0] == reports[1]
    assert (
        run(*arguments[:-3], "--out", str(tmp_path / "third"))
        .out.splitlines()[-2]
        .startswith("It was compiled before")
    )


def test_an_option_without_a_value_is_refused(refused, tmp_path):
    refused(["task", "compile", "series", "-o", "window", "--out", str(tmp_path)], 2, "--option must be KEY=VALUE")
