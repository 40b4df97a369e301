"""`pictures` and `audio`: class folders and a run file become a model."""

import wave

import numpy as np
import pytest

import edgefl
from edgefl.core.errors import ConfigError, DataError
from edgefl.tasks.configured.audio import LogMel
from edgefl.tasks.configured.image_models import NETWORKS
from edgefl.tasks.datasets.shards import inspect_shard
from edgefl.tasks.registry import make_task

Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install '.[pictures]'")

PICTURES = """
[run]
task = "pictures"
rounds = 10
[task]
labels = ["above", "below"]
size = 16
channels = 1
"""
SOUNDS = """
[run]
task = "audio"
rounds = 8
[task]
labels = ["low", "high"]
sample_rate = 8000
seconds = 0.25
mel_bands = 20
"""


def draw_discs(folder, count, seed=1):
    """Bright discs on a dark ground, in the upper or the lower half."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:32, :32]
    for number in range(count):
        for label, y in (("above", rng.uniform(6, 14)), ("below", rng.uniform(18, 26))):
            inside = np.hypot(rows - y, columns - rng.uniform(6, 26)) < rng.uniform(3, 6)
            pixels = np.clip(np.where(inside, 200, 40) + rng.normal(0, 10, inside.shape), 0, 255).astype(np.uint8)
            path = folder / label / f"{seed}-{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


def record_tones(folder, count, seed=1):
    """Tones of 300 to 500 and of 1500 to 2500 Hz in noise."""
    rng, time_s = np.random.default_rng(seed), np.arange(2000) / 8000
    for number in range(count):
        for label, hertz in (("low", rng.uniform(300, 500)), ("high", rng.uniform(1500, 2500))):
            samples = 0.3 * np.sin(2 * np.pi * hertz * time_s + rng.uniform(0, 6)) + rng.normal(0, 0.1, 2000)
            path = folder / label / f"{seed}-{number}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            with wave.open(str(path), "wb") as sound:
                sound.setparams((1, 2, 8000, 0, "NONE", ""))
                sound.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return folder


@pytest.mark.parametrize(
    ("run_file", "make_data", "count", "least"), [(PICTURES, draw_discs, 60, 0.9), (SOUNDS, record_tones, 60, 0.95)]
)
def test_class_folders_and_a_run_file_of_ten_lines_train_a_model(tmp_path, run_file, make_data, count, least):
    assert len(run_file.split("\n")) <= 15
    (tmp_path / "run.toml").write_text(run_file)
    data = make_data(tmp_path / "data", count)
    result = edgefl.simulate(tmp_path / "run.toml", devices=3, data=data, root=tmp_path / "history")
    assert (result.status, result.metrics["accuracy"] >= least) == ("finished", True), result.metrics


@pytest.mark.extended
@pytest.mark.parametrize(("run_file", "make_data"), [(PICTURES, draw_discs), (SOUNDS, record_tones)])
def test_three_devices_train_live_each_on_class_folders_of_its_own(tmp_path, run_file, make_data):
    (tmp_path / "run.toml").write_text(run_file + "[devices]\nmin = 3\n")
    shards = [make_data(tmp_path / f"board-{seed}", 40, seed) for seed in range(3)]
    result = edgefl.run(tmp_path / "run.toml", devices=shards, root=tmp_path / "fleet")
    assert (result.status, len({row["device_id"] for row in result.updates})) == ("finished", 3)
    assert result.metrics["accuracy"] > 0.7


@pytest.mark.parametrize(
    ("task", "options", "shape", "outputs"),
    [
        ("pictures", {"labels": "a,b,c"}, (3, 32, 32), 3),
        ("pictures", {"labels": "a,b", "size": 20, "channels": 1}, (1, 20, 20), 2),
        ("audio", {"labels": "a,b,c", "seconds": 0.5}, (1, 40, 48), 3),
    ],
)
@pytest.mark.parametrize("model", ["mlp", "linear", *NETWORKS])
def test_shapes_are_known_without_data_and_every_network_takes_them(task, options, shape, outputs, model):
    made = make_task(task, options | {"model": model})
    specs = made.shapes()
    assert (specs[-1].shape, made.model.prepare(np.zeros((1, *made.input_shape), np.uint8)).shape[1:]) == (
        (outputs,),
        shape,
    )
    if model in {"mlp", "linear"}:
        return
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    module = made.model.build()
    assert [tuple(value.shape) for value in module.state_dict().values()] == [spec.shape for spec in specs]
    with torch.no_grad():
        assert module(torch.zeros(2, *shape)).shape == (2, outputs)


def test_pixels_are_shifted_and_scaled_by_channel():
    task = make_task("pictures", {"labels": "a,b", "size": 8, "means": "0,0.2,1", "scales": 0.5})
    found = task.model.prepare(np.full((1, 3, 8, 8), 51, np.uint8))
    np.testing.assert_allclose(found[0, :, 0, 0], [0.4, 0.0, -1.6], atol=1e-6)


def test_a_tone_is_bright_in_the_band_whose_triangle_holds_it_and_nowhere_else():
    mel = LogMel(sample_rate=16_000, num_samples=16_000, bands=40)
    corners = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), 42) / 2595) - 1)
    for band in (5, 20, 35):
        tone = 10_000 * np.sin(2 * np.pi * corners[band + 1] * np.arange(16_000) / 16_000)
        found = mel.make_prepare()(tone.astype(np.int16)[None])[0, 0]
        assert (found.shape, set(found.argmax(axis=0))) == ((40, 98), {band})
        assert abs(found.mean()) < 1e-5
        assert abs(found.std() - 1) < 1e-5


def test_a_spectrogram_does_not_depend_on_how_loud_a_sound_is_or_on_its_neighbours():
    prepare = LogMel(sample_rate=8000, num_samples=60_000, bands=20).make_prepare()
    samples = np.random.default_rng(1).normal(0, 2000, (9, 60_000)).astype(np.int16)
    together = prepare(samples)
    np.testing.assert_array_equal(together[7:8], prepare(samples[7:8]))
    np.testing.assert_allclose(prepare(samples[:1] * 2), together[:1], atol=0.02)
    assert not prepare(np.zeros((1, 60_000), np.int16)).any(), "silence"


def test_the_triangles_of_the_bands_meet_at_their_corners():
    filters = LogMel(sample_rate=16_000, num_samples=16_000, bands=20).make_filters()
    inner = filters[filters[:, 0].argmax() : filters[:, -1].argmax()]
    np.testing.assert_allclose(inner.sum(axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("pictures", {}, "task.labels is missing: pictures cannot do without"),
        ("pictures", {"labels": ""}, "task.labels must name at least 2, got none"),
        ("pictures", {"labels": "a,b", "size": 7}, "task.size must be from 8 to 512, got 7"),
        ("pictures", {"labels": "a,b", "channels": 4}, "task.channels must be 1 for grey or 3 for colours, got 4"),
        ("pictures", {"labels": "a,b", "model": "vgg11"}, "model of task pictures must be mlp .* got 'vgg11'"),
        ("pictures", {"labels": "a,b", "model": "cnn", "hidden": 3}, "task.hidden is for the model mlp, got 'cnn'"),
        ("pictures", {"labels": "a,b", "size": 512, "model": "cnn-large"}, "parameters, at most are 20,000,000"),
        ("pictures", {"labels": "a,b", "loss": "mae"}, "must be cross-entropy or mse where there are labels"),
        ("audio", {"labels": "a,b", "sample_rate": 0}, "task.sample_rate must be from 4000 to 48000, got 0"),
        ("audio", {"labels": "a,b", "seconds": 31}, "task.seconds must be from 0.1 to 30, got 31"),
        ("audio", {"labels": "a,b", "mel_bands": 129}, "task.mel_bands must be from 8 to 128, got 129"),
        ("audio", {"labels": "a,b", "mel_bands": 128, "sample_rate": 4000}, "mel_bands = 128 are too many"),
        ("audio", {"labels": "a,b", "model": "torchvision:resnet18"}, "model of task audio must be one for spectro"),
    ],
)
def test_options_that_make_no_sense_are_one_clear_line(task, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_task(task, options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("task", "make_data", "options"),
    [("audio", record_tones, {"sample_rate": 8000}), ("pictures", draw_discs, {"size": 8})],
)
def test_a_class_takes_all_other_folders_and_names_say_whom_a_file_is_from(tmp_path, task, make_data, options):
    known = {"audio": "high", "pictures": "above"}[task]  # the other folder, low or below, has no label
    for seed in (1, 2):
        make_data(tmp_path, 2, seed)
    rules = {"labels": f"unknown,{known}", "others": "unknown", "group_before": "-"}
    data = make_task(task, options | rules).read(str(tmp_path))
    assert data.targets.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert data.groups.tolist() == ["1", "1", "2", "2"] * 2


def test_a_board_counts_files_without_a_run_file_and_refuses_folders_of_other_classes(tmp_path):
    folder = record_tones(tmp_path, 3)
    report = inspect_shard("audio", str(folder), is_detailed=True)
    assert (report.num_examples, report.details) == (6, ("high: 3", "low: 3"))
    with pytest.raises(DataError, match="has a folder 'high', which is none of the labels low, middle"):
        make_task("audio", {"labels": "low,middle", "sample_rate": 8000}).read(str(folder))
