import numpy as np
import pytest

from edgefl.tasks.images import standardise_images


def test_each_image_gets_mean_zero_and_variance_one():
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28)).astype(np.uint8)
    pixels = standardise_images(images)
    assert (pixels.shape, pixels.dtype) == ((5, 1, 28, 28), np.float32)
    assert pixels.reshape(5, -1).mean(axis=1) == pytest.approx(np.zeros(5), abs=1e-5)
    assert pixels.reshape(5, -1).std(axis=1) == pytest.approx(np.ones(5), abs=1e-4)


def test_a_blank_image_stays_zero_and_one_with_a_single_faint_pixel_is_not_blown_up():
    image = np.full((1, 28, 28), 7, np.uint8)
    assert not standardise_images(image).any()
    image[0, 3, 3] = 8
    assert np.abs(standardise_images(image)).max() < 0.2
