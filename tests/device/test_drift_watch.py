"""A board's newest data against that of its first work."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.core.claims import LARGE_DRIFT, parse_drift_claim
from edgefl.core.config import AdaptSection
from edgefl.core.types import Dataset
from edgefl.device.drift_watch import MAX_SAMPLES, MIN_EXAMPLES, DriftWatch, get_reference_path, read_reference
from edgefl.device.training.task_cache import TaskCache
from edgefl.system.row_labels import UNLABELLED_FOLDER
from edgefl.tasks.adaptation.adapted_task import AdaptedTask
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard
from edgefl.tasks.registry import make_task

RUNNING = {"columns": "speed,heat", "target": "wear"}


def make_rows(num_rows, *, heat=0.0, speed=5.0, seed=1):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((num_rows, 3)) + np.array([speed, heat, 0.0])
    return "\n".join(",".join(f"{number:.4f}" for number in row) for row in numbers) + "\n"


@pytest.fixture
def board(tmp_path):
    """A cache of tasks over one CSV file, whose drift is watched as `references` says."""
    shard, references = tmp_path / "log.csv", {"table": "first"}
    shard.write_text("speed,heat,wear\n" + make_rows(400))
    shards = {"table": str(shard)}
    watch = DriftWatch(tmp_path / "drift", lambda: references)
    cache = TaskCache(lambda: shards, accelerator="cpu", threads=1, drift=watch)

    def work():
        cache.load_data(cache.get("table", RUNNING))

    def append(text):
        with shard.open("a") as file:
            file.write(text)

    return SimpleNamespace(
        shard=shard, shards=shards, references=references, cache=cache, work=work, append=append,
        watch=watch, folder=tmp_path / "drift", kept=get_reference_path(tmp_path / "drift", "table"),
    )  # fmt: skip


def test_the_rows_that_are_new_are_compared_with_those_of_the_first_work(board):
    assert board.cache.measure_drift() == {}
    board.work()
    assert board.cache.measure_drift()["table"]["psi"] == 0.0
    board.append(make_rows(300, seed=2))
    board.work()
    still = board.cache.measure_drift()["table"]
    assert still["psi"] < 0.15
    assert (still["num_reference"], still["num_newer"]) == (400, 300)
    assert abs(still["mmd"]) < 0.01
    assert still["p_value"] > 0.01
    board.shard.write_text(board.shard.read_text().partition("\n")[0] + "\n" + make_rows(400))
    board.append(make_rows(200, heat=2.0, seed=3))
    moved = board.cache.measure_drift()["table"]
    assert (moved["column"], moved["num_newer"]) == ("heat", 200)
    assert moved["psi"] > 1.0
    assert moved["ks"] == pytest.approx(0.68, abs=0.1)  # 2 Φ(1) - 1
    assert moved["mmd"] > 0.05
    assert moved["p_value"] == 1 / 500


def make_seeing_model(task):
    """A model whose hidden layer looks at the speed alone."""
    model = {spec.name: np.zeros(spec.shape, np.float32) for spec in task.shapes()}
    hidden = next(name for name, tensor in model.items() if tensor.shape == (32, 2))
    model[hidden][:, 0] = np.linspace(-1, 1, 32)
    return model


def test_features_of_the_model_that_works_are_compared_and_none_before_its_work(board):
    board.work()
    cached_task = board.cache.get("table", RUNNING)
    cached_task.learner.load(make_seeing_model(cached_task.task))

    def compare(seed, **shift):
        first, *rows = board.shard.read_text().splitlines()[:401]
        board.shard.write_text("\n".join([first, *rows, ""]))
        board.append(make_rows(300, seed=seed, **shift))
        return board.cache.measure_drift()["table"]

    assert "feature_mmd" not in compare(2), "the learner holds no model of a run yet"
    cached_task.has_model = True
    still, unseen, seen = compare(2), compare(3, heat=3.0), compare(4, speed=8.0)
    assert still["feature_p_value"] > 0.01
    assert unseen["p_value"] == 1 / 500, "a column shows it"
    assert unseen["feature_p_value"] > 0.01, "which the model does not look at"
    assert seen["feature_p_value"] == 1 / 500
    assert seen["feature_mmd"] > 0.1
    options = {**RUNNING, "hidden": 16}
    of_others = board.cache.get("table", options)
    of_others.has_model = True
    assert compare(4, speed=8.0) == seen, "by the model of the reference's options"
    again = TaskCache(lambda: board.shards, accelerator="cpu", threads=1, drift=board.watch)
    assert again.measure_drift()["table"] == seen, "told again after a restart"
    assert "feature_mmd" not in again.measure_drift(has_features=False)["table"]
    board.append(make_rows(10, seed=9))
    assert "feature_mmd" not in again.measure_drift()["table"], "of other data nothing is known"
    lock = threading.Lock()
    with lock:
        assert "feature_mmd" not in board.cache.measure_drift(training_lock=lock)["table"], "its learner is at work"
    assert "feature_mmd" in board.cache.measure_drift(training_lock=lock)["table"]
    assert not lock.locked()


def test_features_of_a_run_of_adapters_are_those_of_the_base_with_them(board):
    section = AdaptSection(method="head")
    inner = make_task("table", RUNNING)
    task = AdaptedTask(inner, section, make_seeing_model(inner))
    board.work()
    cached_task = board.cache.get("table", RUNNING)
    cached_task.task, cached_task.learner, cached_task.has_model = task, task.learner(), True
    board.append(make_rows(300, seed=5, speed=8.0))
    assert board.cache.measure_drift()["table"]["feature_p_value"] == 1 / 500


def test_a_model_without_features_is_a_line_and_its_columns_are_compared(board, caplog):
    caplog.set_level("INFO")
    options = {**RUNNING, "model": "linear"}
    cached_task = board.cache.get("table", options)
    board.cache.load_data(cached_task)
    cached_task.has_model = True
    board.append(make_rows(300, seed=6, heat=3.0))
    found = board.cache.measure_drift()["table"]
    assert (found["column"], "feature_mmd" in found) == ("heat", False)
    assert "the features of task table are not compared" in caplog.text


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(20))
def test_over_seeds_columns_that_no_longer_go_together_are_large_and_the_same_data_is_not(seed, tmp_path):
    rng = np.random.default_rng(100 + seed)

    def make_line(sign):
        speed, noise = rng.standard_normal((2, 400))
        return "".join(f"{a:.4f},{sign * a + b:.4f},0\n" for a, b in zip(speed, noise, strict=True))

    found = []
    for sign in (1, -1):
        shard, folder = tmp_path / f"{sign}.csv", tmp_path / f"drift{sign}"
        shard.write_text("speed,heat,wear\n" + make_line(1))
        watch = DriftWatch(folder, lambda: {"table": "first"})
        cache = TaskCache(lambda: {"table": str(shard)}, accelerator="cpu", threads=1, drift=watch)  # noqa: B023
        cache.load_data(cache.get("table", RUNNING))
        shard.write_text(shard.read_text() + make_line(sign))
        found.append(parse_drift_claim(cache.measure_drift()["table"]))
    assert [claim.is_large for claim in found] == [False, True]
    assert max(claim.psi for claim in found) <= LARGE_DRIFT


def test_a_shard_that_has_no_more_rows_than_then_is_compared_as_a_whole(board):
    board.work()
    board.shard.write_text("speed,heat,wear\n" + make_rows(400, heat=-2.0, seed=4))
    found = board.cache.measure_drift()["table"]
    assert (found["column"], found["num_newer"]) == ("heat", 400)


def test_of_few_new_rows_nothing_is_said_nor_below_the_owner_s_least(board):
    board.work()
    board.append(make_rows(MIN_EXAMPLES - 1, heat=9.0))
    assert board.cache.measure_drift() == {}
    board.append(make_rows(1, heat=9.0))
    assert board.cache.measure_drift()["table"]["num_newer"] == MIN_EXAMPLES
    strict = DriftWatch(board.folder, lambda: board.references, lambda: MIN_EXAMPLES + 1)
    assert strict.measure(board.shards) == {}


def test_nothing_is_kept_nor_read_of_a_task_that_nobody_watches(board):
    board.references.clear()
    board.work()
    assert not board.folder.exists()
    board.references["table"] = "first"
    board.work()
    board.references.clear()
    board.shard.unlink()
    assert board.cache.measure_drift() == {}


def test_the_owner_may_name_the_reference_and_one_that_is_not_there_is_a_line(board, tmp_path, caplog):
    board.references["table"] = str(tmp_path / "june.csv")
    board.work()
    board.work()
    assert caplog.text.count("no reference for the drift of task table") == 1
    assert board.cache.measure_drift() == {}
    june = tmp_path / "june-at-last.csv"
    june.write_text("speed,heat,wear\n" + make_rows(500, heat=3.0))
    board.references["table"] = str(june)
    board.work()
    board.append(make_rows(100, seed=5))
    found = board.cache.measure_drift()["table"]
    assert (found["column"], found["num_reference"]) == ("heat", 400)
    assert found["psi"] > 1.0


def test_a_damaged_reference_is_left_out_and_made_anew_by_the_next_process(board, caplog):
    board.work()
    whole = board.kept.read_bytes()
    board.kept.write_bytes(whole[:-30])
    assert board.cache.measure_drift() == {}
    assert "is left out" in caplog.text
    watch = DriftWatch(board.folder, lambda: board.references)
    TaskCache(lambda: board.shards, accelerator="cpu", threads=1, drift=watch).load_data(
        board.cache.get("table", RUNNING)
    )
    assert len(read_reference(board.kept).sample) == 400


def test_a_reference_is_a_sample_however_large_the_shard_is(tmp_path):
    path, count = tmp_path / "pi.npz", 3 * MAX_SAMPLES
    labels = np.arange(count) % 10
    write_shard(path, Dataset(inputs=np.zeros((count, 8, 8), np.uint8), targets=labels), ShardMetadata(task="digits"))
    cache = TaskCache(
        lambda: {"digits": str(path)}, accelerator="cpu", threads=1,
        drift=DriftWatch(tmp_path / "drift", lambda: {"digits": "first"}),
    )  # fmt: skip
    cache.load_data(cache.get("digits", {}))
    kept = read_reference(get_reference_path(tmp_path / "drift", "digits"))
    assert (len(kept.sample), kept.num_examples) == (MAX_SAMPLES, count)
    assert cache.measure_drift()["digits"]["psi"] == 0.0


def test_pictures_without_a_class_are_no_drift_towards_the_first_class(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install '.[pictures]'")
    shard, rng = tmp_path / "pictures", np.random.default_rng(6)

    def add(folder, count, *, first=0, low=0):
        place = shard / folder
        place.mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            pixels = rng.integers(low, 256, (8, 8), np.uint8)
            image.fromarray(pixels).save(place / f"{number:05}.png")

    options = {"labels": "a,b", "size": 8, "channels": 1, "unlabelled": True}
    watch = DriftWatch(tmp_path / "drift", lambda: {"pictures": "first"})
    cache = TaskCache(lambda: {"pictures": str(shard)}, accelerator="cpu", threads=1, drift=watch)
    for label in ("a", "b"):
        add(label, 100)
    add(UNLABELLED_FOLDER, 400)
    cache.load_data(cache.get("pictures", options))
    kept = read_reference(get_reference_path(tmp_path / "drift", "pictures")).sample
    assert int(kept.find_unlabelled().sum()) == 400
    add(UNLABELLED_FOLDER, 300, first=400)  # behind those of then, all of them without a class
    assert cache.measure_drift()["pictures"]["psi"] < 0.2
    for label in ("a", "b"):
        add(label, 20, first=100)
    add(UNLABELLED_FOLDER, 300, first=700, low=200)
    assert cache.measure_drift()["pictures"]["column"] != "target"
