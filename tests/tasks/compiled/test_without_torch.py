"""What boards without torch do with every built-in task and every example is what the docs say of it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from markdown_pages import code, page, part, rows

from edgefl.core.analyses import ANALYSES
from edgefl.core.config import load_run, parse_run
from edgefl.core.errors import TaskError
from edgefl.tasks.registry import BUILT_IN, is_torch_task, make_task

MISSING = [name for name in ("torch", "onnx", "onnxscript") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason="needs torch and onnx: pip install '.[train,export]'"),
]
TESTS = Path(__file__).parents[2]
EXAMPLES = TESTS.parent / "examples"
OWN_MODULES = {
    "boxes": "detector", "detector": "detector", "diabetes": "diabetes", "greenhouse": "csv_sensors",
    "shapes": "torch_images", "three_jobs": "jobs",
}  # fmt: skip
WINDOWS = {"columns": ["a", "b"], "window": 16, "target": "y", "labels": ["p", "q"]}
PICTURES = {"labels": ["sandal", "shirt", "sneaker", "bag", "ankle-boot"], "size": 28, "channels": 1}
"""Those of `transfer`, which is compiled but once so."""
SOUNDS = {"labels": ["a", "b"], "sample_rate": 4000, "mel_bands": 16}
NUMPY, COMPILED, NO_NETWORK, REFUSED = "train in NumPy", "train by a compiled task", "have no network", "are refused"
TASKS = {
    "digits": (NUMPY, {}),
    "noop": (NUMPY, {"size_bytes": 64}),
    "table": (NUMPY, {"columns": ["a", "b"], "target": "y", "labels": ["p", "q"]}),
    "text": (NUMPY, {"column": "a", "target": "y", "labels": ["p", "q"]}),
    "audio": (NUMPY, SOUNDS),
    "pictures": (NUMPY, PICTURES),
    "series": (NUMPY, WINDOWS),
    "mnist model=mlp": (NUMPY, {}),
    "motionsense model=mlp": (NUMPY, {}),
    "mnist": (COMPILED, {}),
    "fashion-mnist": (COMPILED, {}),
    "cifar-10": (COMPILED, {}),
    "motionsense": (COMPILED, {}),
    "audio model=cnn-small": (COMPILED, SOUNDS),
    "pictures model=cnn-small": (COMPILED, PICTURES),
    "series model=cnn": (COMPILED, WINDOWS),
    "series model=gru": (COMPILED, {**WINDOWS, "hidden": 8}),
    "series model=gru loss=y/mae,z/huber": (
        REFUSED, {"columns": ["a"], "window": 16, "target": ["y", "z"], "hidden": 8},
    ),
}  # fmt: skip
"""Tasks, with the options that matter to boards in the key, and others beside it."""
REASON = "has losses of y, z, and a compiled task has one"
RUN_FILES = {
    **dict.fromkeys((
        "anomaly", "asynchronous_fleet/buffered", "asynchronous_fleet/waiting", "csv_sensors", "diabetes",
        "forecasting", "keyword_spotting", "motion_time_series", "multi_label", "own_codec", "own_strategy", "people",
        "quantiles", "window_sensor", "without_coordinator",
    ), NUMPY),
    **dict.fromkeys((
        "detector", "torch_images", "transfer/all", "transfer/head", "transfer/lora", "transfer/pretrain"
    ), COMPILED),
    **dict.fromkeys((
        "diabetes/exact", "jobs/hello_world", "jobs/matrix_product", "jobs/word_count", "trees"
    ), NO_NETWORK),
}  # fmt: skip
"""Run files of the examples; a folder's name alone is its run.toml."""
NOT_RUN_FILES = {"own_codec/pyproject", "window_sensor/board"}


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch):
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", ",".join(OWN_MODULES))
    for folder in OWN_MODULES.values():
        monkeypatch.syspath_prepend(EXAMPLES / folder)


def make_requests(folder):
    """Returns what the boards are asked for by key, and the outcome of each that they are not."""
    requests, outcomes, compiled = [], {}, {}
    for key, config in list_configs():
        if config.job.name:
            requests.append({"key": key, "name": config.job.name, "options": dict(config.job.options)})
            continue
        name, options = config.run.task, dict(config.task)
        task, same = make_task(name, options), json.dumps([name, options], sort_keys=True)
        request = {"key": key, "name": name, "options": options}
        requests.append(request)
        if config.strategy.name in ANALYSES:
            continue
        if is_torch_task(task) and same not in compiled:
            try:
                compiled[same] = compile_into(task, name, options, folder / f"{len(compiled)}.compiled")
            except TaskError as error:
                outcomes[requests.pop()["key"]] = str(error)
                continue
        request["weights"] = str(folder / f"{len(requests)}.npz")
        np.savez(request["weights"], **task.init(3))
        request["compiled"] = compiled.get(same)
        if config.adapt.method or config.adapt.base:
            table = config.to_json()["adapt"]
            request["adapt"] = {name: table[name] for name in ("method", "rank", "shared") if table.get(name)}
    return requests, outcomes


def list_configs():
    for key, (_, others) in TASKS.items():
        name, *options = key.split()
        named = dict(option.split("=") for option in options)
        lists = {name: value.split(",") if "," in value else value for name, value in named.items()}
        yield key, parse_run({"run": {"task": name}, "task": {**others, **lists}})
    for key in RUN_FILES:
        yield key, load_run(EXAMPLES / (f"{key}.toml" if "/" in key else f"{key}/run.toml"))


def compile_into(task, name, options, path):
    from edgefl.tasks.compiled.artefact import encode_artefact  # noqa: PLC0415 beside the compiler
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 only where torch is

    path.write_bytes(encode_artefact(compile_task(task, name=name, options=options, batch_size=4)[0]))
    return str(path)


def test_boards_without_torch_train_each_of_them_as_the_docs_say(tmp_path):
    requests, outcomes = make_requests(tmp_path)
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    path = [TESTS / "e2e" / "without_torch", TESTS.parent, *(EXAMPLES / name for name in OWN_MODULES.values())]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("train_without_torch.py")), str(tmp_path / "requests.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    moved = {row["key"]: row["moved"] for row in map(json.loads, done.stdout.splitlines())}
    by_key = {request["key"]: request for request in requests}
    for key, change in moved.items():
        assert change is None or change > 0.0 or key == "noop", key
        outcomes[key] = NO_NETWORK if change is None else COMPILED if by_key[key]["compiled"] else NUMPY
    expected = {key: outcome for key, (outcome, _) in TASKS.items()} | RUN_FILES
    (refused,) = [key for key, outcome in expected.items() if outcome == REFUSED]
    assert REASON in outcomes.pop(refused)
    assert outcomes == {key: outcome for key, outcome in expected.items() if key != refused}


def test_the_docs_name_every_built_in_task_and_every_run_file_of_the_examples():
    assert {key.split()[0] for key in TASKS} == {*BUILT_IN}
    files = {str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.glob("*/*.toml")}
    assert {name.removesuffix("/run") for name in files} == {*RUN_FILES, *NOT_RUN_FILES}
    table = rows(part(page("compile-a-task"), "Which tasks"))
    found = {key: outcome for outcome, *cells in table for cell in cells for key in code(cell)}
    assert found == {key: outcome for key, (outcome, _) in TASKS.items()} | RUN_FILES
