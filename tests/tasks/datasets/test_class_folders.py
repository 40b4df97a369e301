"""Class folders: labels are names of folders, pictures and sounds are read within bounds."""

import wave

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.tasks.datasets import class_folders
from edgefl.tasks.datasets.class_folders import (
    PICTURE_SUFFIXES,
    FolderRules,
    read_class_folders,
    read_grey_picture,
    read_picture,
    read_sound,
    survey_class_folders,
)

Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install '.[pictures]'")


def save_picture(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **options)
    return path


def save_sound(path, samples, *, rate=8000, width=2, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as sound:
        sound.setparams((channels, width, rate, 0, "NONE", ""))
        sound.writeframes(samples)
    return path


def read(path, labels, **rules):
    rules = FolderRules(labels=labels, **rules)
    return read_class_folders(path, "pictures", rules, PICTURE_SUFFIXES, lambda file: np.array([len(file.stem)]))


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def test_a_class_is_the_place_of_its_folder_in_the_labels_and_other_files_are_left_alone(tmp_path):
    touch(tmp_path, "dog/aa.png", "cat/a.jpg", "cat/b.JPEG", "cat/notes.txt", "cat/.c.png", ".tmp/x.png")
    data = read(tmp_path, ("dog", "cat", "owl"))
    assert (data.inputs[:, 0].tolist(), data.targets.tolist()) == ([1, 1, 2], [1, 1, 0])
    survey = survey_class_folders(tmp_path, "pictures", is_detailed=True)
    assert (survey.num_examples, survey.details) == (3, ("cat: 2", "dog: 1"))
    with pytest.raises(DataError, match="has a folder 'dog', which is none of the labels cat, owl"):
        read(tmp_path, ("cat", "owl"))


def test_folders_of_other_names_are_of_the_class_of_the_others_where_there_is_one(tmp_path):
    touch(tmp_path, "cat/aa.png", "emu/aaa.png", "dog/aaaa.png", "other/a.png")
    data = read(tmp_path, ("cat", "other"), others="other")
    assert (data.inputs[:, 0].tolist(), data.targets.tolist()) == ([2, 4, 3, 1], [0, 1, 1, 1])
    with pytest.raises(ConfigError, match=r"task.others must be one of the labels cat, other, got 'emu'"):
        read(tmp_path, ("cat", "other"), others="emu")


def test_whom_a_file_is_from_stands_before_a_text_in_its_name(tmp_path):
    touch(tmp_path, "cat/ann_x_1.png", "cat/bo_x_1_x_2.png", "dog/ann_x_7.png", "dog/rain.png")
    assert read(tmp_path, ("cat", "dog")).groups is None
    assert read(tmp_path, ("cat", "dog"), group_before="_x_").groups.tolist() == ["ann", "bo", "ann", "rain"]
    with pytest.raises(DataError, match=r"task.group_before = '-' is in the name of none of 4 files"):
        read(tmp_path, ("cat", "dog"), group_before="-")


def test_a_folder_without_class_folders_says_what_would_be_right(tmp_path):
    with pytest.raises(DataError, match=r"a folder for each class \(a, b\), with .png or .jpg or .jpeg files"):
        read(tmp_path, ("a", "b"))
    with pytest.raises(DataError, match="must be a folder of class folders"):
        read(tmp_path / "absent", ("a", "b"))


def test_files_that_go_while_others_are_read_are_left_out_and_damaged_ones_are_not(tmp_path):
    rules = FolderRules(labels=("cat", "dog"), group_before="_")
    paths = [tmp_path / name for name in ("cat/ann_1.png", "cat/bo_2.png", "cat/cy_3.png", "dog/di_4.png")]

    def read_all(gone):
        for path in paths:
            save_picture(path, np.full((2, 2), 9))

        def read_one(file):
            for path in gone:
                path.unlink(missing_ok=True)
            return read_picture(file, size=2, channels=1)

        return read_class_folders(tmp_path, "pictures", rules, PICTURE_SUFFIXES, read_one)

    for gone in (paths[1:3], paths[:2]):
        data = read_all(gone)
        assert (len(data.inputs), data.targets.tolist()) == (2, [0, 1])
        assert data.groups.tolist() == [path.stem[:-2] for path in paths if path not in gone]
    with pytest.raises(DataError, match="there are none"):
        read_all(paths)
    with pytest.raises(DataError, match="cannot be read"):
        read_class_folders(touch(tmp_path, "cat/zoe_5.png"), "pictures", rules, PICTURE_SUFFIXES, _read_tiny)


def _read_tiny(file):
    return read_picture(file, size=2, channels=1)


def test_more_than_fits_into_memory_is_refused_after_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(class_folders, "MAX_VALUES", 1)
    for name in ("a.png", "b.png"):
        save_picture(tmp_path / "a" / name, np.zeros((2, 2)))
    with pytest.raises(DataError, match="has 2 examples of 1 values each, at most 1 are held"):
        read(tmp_path, ("a", "b"))


def test_a_picture_is_stretched_to_a_square_in_grey_or_in_colours(tmp_path):
    pixels = np.zeros((4, 8, 3))
    pixels[:, :4, 0], pixels[:, 4:, 2] = 200, 100
    found = read_picture(save_picture(tmp_path / "a.png", pixels), size=8, channels=3)
    assert (found.shape, found.dtype) == ((3, 8, 8), np.uint8)
    assert (found[0, :, 0].tolist(), found[2, :, -1].tolist(), found[1].max()) == ([200] * 8, [100] * 8, 0)
    grey = read_picture(save_picture(tmp_path / "b.png", np.full((4, 4), 7)), size=8, channels=1)
    np.testing.assert_array_equal(grey, np.full((1, 8, 8), 7))
    jpeg = read_picture(save_picture(tmp_path / "a.jpg", np.full((640, 480, 3), 90)), size=16, channels=1)
    assert abs(jpeg.astype(int) - 90).max() <= 2


def test_a_picture_with_alpha_or_a_palette_is_one_too(tmp_path):
    for mode in ("RGBA", "P", "LA", "1"):
        path = tmp_path / f"{mode}.png"
        Image.new(mode, (4, 4)).save(path)
        assert read_picture(path, size=8, channels=3).shape == (3, 8, 8)


def test_a_picture_that_cannot_be_read_is_one_clear_line(tmp_path, monkeypatch):
    whole = save_picture(tmp_path / "a.png", np.random.default_rng(1).integers(0, 255, (32, 32, 3)))
    for content in (b"", b"GIF89a", whole.read_bytes()[:200]):
        (tmp_path / "b.png").write_bytes(content)
        with pytest.raises(DataError, match=r"picture .*b\.png cannot be read: ") as error:
            read_picture(tmp_path / "b.png", size=8, channels=3)
        assert "\n" not in str(error.value)
    deep = tmp_path / "deep.png"
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(deep)
    with pytest.raises(DataError, match="has more than 8 bits a channel"):
        read_picture(deep, size=8, channels=1)
    monkeypatch.setattr(class_folders, "MAX_PIXELS", 1000)
    with pytest.raises(DataError, match="has 32 x 32 pixels, at most 1,000 are read"):
        read_picture(whole, size=8, channels=3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    with pytest.raises(DataError, match="DecompressionBomb"):
        read_picture(whole, size=8, channels=3)


def test_bytes_that_are_no_picture_or_too_many_are_named_without_an_address_of_memory(monkeypatch):
    with pytest.raises(DataError) as error:
        read_grey_picture(b"GIF89a", "cam/a.png", size=8, max_pixels=64)
    assert str(error.value) == "picture cam/a.png cannot be read: it is no PNG or JPEG file"
    monkeypatch.setattr(class_folders, "MAX_FILE_BYTES", 5)
    with pytest.raises(DataError, match=r"cam/a\.png has 6 bytes, at most 5 are read"):
        read_grey_picture(b"GIF89a", "cam/a.png", size=8, max_pixels=64)


def test_without_pillow_the_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(TaskError, match=r"pictures are read with Pillow, .*\[pictures\]' -c constraints.txt"):
        read_picture(tmp_path / "a.png", size=8, channels=3)


@pytest.mark.parametrize(
    ("width", "content", "samples"),
    [
        (1, bytes([128, 0, 255]), [0, -32768, 32512]),
        (2, np.array([5, -6, 32767], "<i2").tobytes(), [5, -6, 32767]),
        (3, bytes([255, 1, 0, 0, 0, 128]), [2, -32768]),
        (4, np.array([65536, -131072], "<i4").tobytes(), [1, -2]),
    ],
)
def test_samples_of_every_width_are_in_the_range_of_16_bits(tmp_path, width, content, samples):
    found = read_sound(save_sound(tmp_path / "a.wav", content, width=width), sample_rate=8000, num_samples=4)
    assert found.tolist() == [*samples, *[0] * (4 - len(samples))]


def test_a_sound_is_the_mean_of_its_channels_and_as_long_as_asked(tmp_path):
    stereo = save_sound(tmp_path / "a.wav", np.array([2, 4, 6, 8, 10, 12], "<i2").tobytes(), channels=2)
    assert read_sound(stereo, sample_rate=8000, num_samples=2).tolist() == [3, 7]
    assert read_sound(stereo, sample_rate=8000, num_samples=5).tolist() == [3, 7, 11, 0, 0]


def test_a_sound_that_is_none_or_has_another_rate_is_one_clear_line(tmp_path):
    path = save_sound(tmp_path / "a.wav", bytes(8), rate=44_100)
    with pytest.raises(DataError, match="has 44100 samples a second, the run file says sample_rate = 8000"):
        read_sound(path, sample_rate=8000, num_samples=2)
    for content in (b"", b"RIFF", path.read_bytes()[:30], path.read_bytes().replace(b"data", b"dota")):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as WAV"):
            read_sound(path, sample_rate=8000, num_samples=2)


def test_an_empty_folder_that_is_none_of_the_labels_is_left_alone(tmp_path):
    touch(tmp_path, "cat/a.png", "robbin/.b.png")
    assert len(read(tmp_path, ("cat", "owl"))) == 1
