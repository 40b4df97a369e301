import numpy as np
import pytest

from edgefl.core.errors import DataError
from edgefl.tasks.motionsense import (
    NUM_FEATURES,
    compute_window_features,
    read_motion_windows,
    split_windows,
    standardise_windows,
)


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "motionsense.npz"

    def recordings(lengths, trials, lacking=0):
        n = len(lengths)
        # Every sample holds its recording's number, so a window across two recordings would show both.
        q = np.tile(np.repeat(np.arange(n), lengths), (9, 1)).astype(np.int16)
        np.savez(
            path, q=q[:, : q.shape[1] - lacking], scale=np.float32(0.5), length=np.array(lengths),
            subject=np.arange(n, dtype=np.uint8) + 1, activity=np.arange(n, dtype=np.uint8) % 6,
            trial=np.array(trials, np.uint8),
        )  # fmt: skip
        return path

    return recordings


def test_windows_start_every_64_samples_and_drop_the_rest():
    windows = split_windows(np.arange(9 * 300).reshape(9, 300))
    assert windows.shape == (3, 9, 128)
    assert windows[:, 0, 0].tolist() == [0, 64, 128]
    assert windows[2, 0, -1] == 255
    assert len(split_windows(np.zeros((9, 127)))) == 0


def test_no_window_spans_two_recordings_and_late_trials_are_the_test_part(write):
    train, test, subjects = read_motion_windows(write([200, 127, 300, 128], [1, 2, 10, 11]))
    assert subjects.tolist() == [1, 1, 3, 3, 3]
    assert train.targets.tolist() == [0, 0, 2, 2, 2]
    assert np.all(train.inputs == train.inputs[:, :1, :1])
    assert train.inputs[:, 0, 0].tolist() == [0, 0, 1, 1, 1]
    assert (test.targets.tolist(), train.inputs.dtype) == ([3], np.float32)


def test_recordings_that_do_not_add_up_and_a_truncated_file_are_one_clear_line(write):
    with pytest.raises(DataError, match=r"holds samples \[9, 499\], its recordings add up to \[9, 500\]"):
        read_motion_windows(write([200, 300], [1, 11], lacking=1))
    path = write([200, 300], [1, 11])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"motionsense.npz cannot be read"):
        read_motion_windows(path)


def test_a_phone_at_rest_gives_finite_features_and_its_window_is_left_alone():
    windows = np.zeros((2, 9, 128), np.float32)
    windows[1, :, ::2] = 1.0
    features = compute_window_features(windows)
    assert features.shape == (2, NUM_FEATURES)
    assert np.isfinite(features).all()
    assert not np.allclose(features[0], features[1])
    assert not windows[0].any()
    assert standardise_windows(windows).shape == windows.shape
