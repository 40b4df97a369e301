"""Every example does what its README says: the commands there are run, in a copy of its folder."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from requirements import real_data_at, require
from sklearn.datasets import load_digits

from edgefl.tasks.images import FASHION_LABELS

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS_DATA = {
    **dict.fromkeys(("forecasting", "motion_time_series"), "motionsense/motionsense.npz"),
    "people": "motionsense/data_subjects_info.csv",
    "transfer": "fashion-mnist/train-images-idx3-ubyte.gz",
}
NEEDS_PROGRAM = {"window_sensor": "mosquitto"}
LONG = {"detector", "transfer"}
"""Examples whose commands take minutes; a small form of each is run with the others."""
REACHED = {
    "detector": r"boxes:MeanAveragePrecision=0\.9[5-9]\d*(?s:.*)boxes:MeanAveragePrecision=0\.9[5-9]",
    "multi_label": r"the fleet: accuracy 0\.9\d+, f1-macro 0\.9[5-9]",
    "transfer": r"lora: accuracy 0\.9[3-9]\d, .*\nhead: accuracy 0\.8[6-9]\d, first round \d\d?,\d+ bytes down",
    "people": r"three devices, later .* (?:1\.0|0\.9[89])\d+, age to [01]\.\d+ years, height to [12]\.\d+ cm",
    "trees": r"one device: 0\.9\d+, the fleet's (?:\+|-0\.0[01]).*\n.*learn: 0\.9\d+, the fleet's (?:\+|-0\.0[01])",
    "anomaly": r"(?s:threshold of \d\.\d+: 0\.[01]\d+ of new .*found: 0\.8\d+, )(?:\+|-0\.0[01]\d|-0\.020)",
    "forecasting": r"is 0\.[45]\d of that of the last value",
    "keyword_spotting": r"(?s:0 +lumi +1 +0\.\d+\n.*)accuracy (?:1\.0|0\.9[5-9])\d+ on 180 labelled rows",
    "quantiles": r"the fleet: .*coverage 0\.[78]",
    "csv_sensors": r"accuracy (0\.9\d+) in a greenhouse",
    "torch_images": r"accuracy (0\.9\d+) on pictures",
    "diabetes": r"with all data on one machine, (?:0\.[89]\d+|1\.0[01]\d) of it(?s:.*)  -  ",
    "jobs": r"in one piece: (?:0\.0e\+00|\d\.\de-1\d)\nrain 3 times, garden 2 times, on 4 boards",
    "asynchronous_fleet": r"buffered .* (0\.9\d+)\n",
}
BARS = {"motion_time_series": 0.85, "own_strategy": 0.9, "without_coordinator": 0.85, "own_codec": 0.9}
"""What the last round of a simulated history has to reach."""
NEAR_REFERENCE = {
    "detector": "boxes:MeanAveragePrecision",
    "forecasting": "r2",
    "keyword_spotting": "accuracy",
    "multi_label": "f1-macro",
    "people": "loss",
    "quantiles": "loss",
    "transfer": "accuracy",
}
"""Examples whose fleets come to within 2 % of the loss, or 2 points of the metric, of one device with all data."""


def commands(readme: str) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))


def run_script(script: str, here: Path) -> subprocess.CompletedProcess[str]:
    """Runs commands of a shell in a folder, whose parent is their home; fails the test where one of them fails."""
    own = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "OMP_NUM_THREADS": "1"}
    own |= {name: str(here.parent / name) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    done = subprocess.run(
        ["sh", "-c", f"set -eu\n{script}"],
        cwd=here,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(path.parent, id=path.parent.name, marks=[pytest.mark.slow] if path.parent.name in LONG else [])
        for path in sorted(EXAMPLES.glob("*/README.md"))
    ],
)
def test_the_commands_of_an_example_run(folder: Path, tmp_path: Path) -> None:
    if needed := NEEDS_DATA.get(folder.name):
        real_data_at(needed)
    if program := NEEDS_PROGRAM.get(folder.name):
        require(program)
    here = shutil.copytree(folder, tmp_path / folder.name)
    done = run_script(commands((folder / "README.md").read_text()), here)
    if folder.name in REACHED:
        assert re.search(REACHED[folder.name], done.stdout + done.stderr), done.stdout + done.stderr
    if folder.name == "window_sensor":
        *_, (is_open, right) = re.findall(r"^ +\d +\d+ +(\d\.\d+) +\d+ +(\d\.\d+)$", done.stdout, re.MULTILINE)
        assert float(right) > max(float(is_open), 1 - float(is_open)) + 0.1, done.stdout  # "shut" always, or "open"
    if metric := NEAR_REFERENCE.get(folder.name):
        lines = re.findall(
            r"^(?:the fleet|reference, one device with all of the data): (.*)$", done.stdout, re.MULTILINE
        )
        values = [float(re.search(rf"(?:^|, ){metric} (\S+?)(?:,|$)", line)[1]) for line in lines]
        for fleet, alone in zip(values[::2], values[1::2], strict=True):
            assert fleet <= 1.02 * alone if metric == "loss" else fleet >= alone - 0.02, lines
    if folder.name in BARS:
        words = ["history", "rounds", "--dir", str(here / "history"), "--run", "latest", "--format", "json"]
        shown = subprocess.run([sys.executable, "-m", "edgefl", *words], capture_output=True, text=True, check=True)
        last = json.loads(shown.stdout)["rows"][-1]
        assert max(last.get("node_accuracy") or 0.0, last["accuracy"] or 0.0) >= BARS[folder.name]


def test_a_base_of_transfer_serves_other_classes_where_the_real_data_is_absent(tmp_path: Path) -> None:
    here = shutil.copytree(EXAMPLES / "transfer", tmp_path / "transfer")
    pixels, digits = load_digits(return_X_y=True)  # in place of clothes: 0 to 4 are the old classes, 5 to 9 the new
    for number, label in enumerate(FASHION_LABELS):
        folder = here / "data" / ("old" if number < 5 else "new") / label
        folder.mkdir(parents=True)
        for row in np.flatnonzero(digits == number)[:100]:
            Image.fromarray((15.9 * pixels[row].reshape(8, 8)).astype(np.uint8)).save(folder / f"{row}.png")
    run_script("python pretrain.py", here)
    rows = {
        name: json.loads(run_script(f"edgefl simulate {name}.toml --dir history --format json", here).stdout)["rows"]
        for name in ("lora", "all")
    }
    assert rows["lora"][-1]["accuracy"] > 0.9
    base = (here / "base.safetensors").stat().st_size
    assert rows["lora"][0]["bytes_down"] > 3 * base > rows["lora"][1]["bytes_down"]
    assert 10 * rows["lora"][-1]["bytes_up"] < rows["all"][-1]["bytes_up"]


def test_a_small_detector_learns_and_its_metric_is_that_of_all_boxes_of_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shutil.copytree(EXAMPLES / "detector", tmp_path / "detector")
    run_file = here / "run.toml"
    run_file.write_text(run_file.read_text().replace("rounds = 14", "rounds = 2"))
    run = "edgefl simulate run.toml --dir history --format json"
    done = run_script(
        f"export PYTHONPATH=.:${{PYTHONPATH:-}} EDGEFL_ALLOW_MODULES=detector,boxes; python make_data.py; {run}", here
    )
    assert json.loads(done.stdout)["rows"][-1]["metrics"]["boxes:MeanAveragePrecision"] > 0.35
    monkeypatch.syspath_prepend(str(here))
    metric = importlib.import_module("boxes").MeanAveragePrecision()
    outputs, targets = np.full((3, 6, 8, 8), -9.0), np.zeros((3, 6, 8, 8))
    outputs[:, 2:] = 0.0
    for row, column in ((1, 1), (5, 5)):  # two ellipses of 8x8 pixels in each picture
        targets[:, [0, 2, 3], row, column] = 1.0, 2.0, 2.0
        outputs[:, [0, 2, 3], row, column] = 3.0, 2.0, 2.0
    outputs[0, 2, 1, 1] = 0.9  # too narrow: less than half of it is covered
    outputs[1, [0, 2, 3], 5, 5] = -9.0, 0.0, 0.0  # never found
    outputs[2, [0, 2, 3], 1, 5] = 4.0, 2.0, 2.0  # there is nothing, and it is the surest of all
    whole = metric.partial(outputs, targets)
    parts = [metric.partial(outputs[rows], targets[rows]) for rows in (slice(0, 1), slice(1, 3), slice(0, 0))]
    assert {name: sum(part[name] for part in parts).tolist() for name in whole} == {
        name: array.tolist() for name, array in whole.items()
    }
    assert (whole["true"].tolist(), whole["found"][1].sum()) == ([6.0, 0.0], 4.0)
    assert metric.combine(whole) == pytest.approx(4 / 6 * 4 / 6)  # 4 of 6 found, and of 6 that were as sure


def test_people_are_told_apart_by_their_steps_where_the_real_data_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shutil.copytree(EXAMPLES / "people", tmp_path / "people")
    folder = tmp_path / "data" / "motionsense"
    folder.mkdir(parents=True)
    monkeypatch.setenv("EDGEFL_DATA", str(folder.parent))
    trials, length, rng = (7, 8, 15), 2000, np.random.default_rng(7)
    steps, lines = [], ["code,weight,height,age,gender"]
    for person in range(1, 10):
        is_male, is_old, is_tall = person & 1, person >> 1 & 1, person >> 2 & 1
        lines.append(f"{person},70,{170 + 10 * is_tall},{25 + 5 * is_old},{is_male}")
        for _ in trials:  # a channel for each of the three, whose frequency says it
            phase = 2.0 * np.pi * (1.5 + np.array([[is_male], [is_old], [is_tall]])) * np.arange(length) / 50.0
            steps.append(np.tile(np.sin(phase + rng.uniform(0.0, 6.0)), (3, 1)) + rng.normal(0.0, 0.2, (9, length)))
    count = len(steps)
    np.savez(
        folder / "motionsense.npz",
        q=(1000.0 * np.concatenate(steps, axis=1)).astype(np.int16), scale=np.float32(0.001),
        length=np.full(count, length), subject=np.repeat(np.arange(1, 10), 3), activity=np.full(count, 2),
        trial=np.tile(trials, 9),
    )  # fmt: skip
    (folder / "data_subjects_info.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    done = run_script("python make_data.py; edgefl simulate run.toml --dir history --format json", here)
    assert len((here / "data" / "later.csv").read_text().splitlines()) == 1 + 9 * 15
    assert json.loads(done.stdout)["rows"][-1]["metrics"]["sex/accuracy"] > 0.95
    assert json.loads(done.stdout)["rows"][-1]["metrics"]["age/r2"] > 0.9
    assert len((here / "data" / "strangers.csv").read_text().splitlines()) == 1 + 2 * 3 * 15


def test_an_example_is_short_and_listed() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for readme in EXAMPLES.glob("*/README.md"):
        code = [path.read_text() for path in readme.parent.rglob("*.py")]
        assert sum(text.count("\n") for text in code) < 200, readme.parent.name
        assert f"[{readme.parent.name}]({readme.parent.name})" in table
