"""Frames of a camera, whose place a video file takes here: at a rate, where something moves, as the file asks."""

import io
import threading
import time
from collections import Counter

import pytest
from collector_process import run_collector_process
from peer_boards import eventually

from edgefl.core.errors import ConfigError
from edgefl.device.collect import recorder
from edgefl.device.collect.file_store import UNLABELLED, check_example, open_file_store
from edgefl.device.collect.folder_collector import FolderCollector
from edgefl.device.collect.recorder import Recorder
from edgefl.device.collect.row_store import StoreLimits
from edgefl.device.collect.settings import CameraSection

np = pytest.importorskip("numpy", reason="needs NumPy: pip install -c constraints.txt '.'")
cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed: pip install -e '.[camera]' -c constraints.txt")
image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install -e '.[pictures]'")
from edgefl.device.collect.camera import Camera  # noqa: E402 only where there is NumPy

pytestmark = pytest.mark.timeout(60)
WIDTH, HEIGHT = 64, 48
STILL, BIRD = 90, 250
"""Grey levels of a bird; one of the first is not to be seen."""


def _video(path, frames):
    """Writes a video of the same scene without loss; each frame is the grey level of a bird in its left half."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"FFV1"), 10, (WIDTH, HEIGHT))
    assert writer.isOpened()
    for frame in frames:
        picture = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
        picture[:, WIDTH // 2 :] = (30, 60, 200)  # red, as OpenCV has blue first
        picture[10:20, 10:20] = frame
        writer.write(picture)
    writer.release()
    return str(path)


def _read(path, count, **settings):
    """Returns what `count` frames of a camera are as files."""
    camera = Camera(CameraSection(path=path, **{"every_s": 0.03} | settings), cv2)
    try:
        return [_keep(camera) for _ in range(count)]
    finally:
        camera.close()


def _keep(camera):
    content = camera.read(threading.Event())
    if content:
        camera.accept()
    return content


def _decode(content):
    return np.asarray(image.open(io.BytesIO(content)))


def test_a_frame_becomes_a_picture_cropped_scaled_and_grey_as_the_file_asks(tmp_path):
    path = _video(tmp_path / "a.avi", [STILL])
    (whole,) = _read(path, 1, format="png")
    check_example(whole, ".png")
    assert _decode(whole).shape == (HEIGHT, WIDTH, 3)
    assert abs(_decode(whole)[0, -1].astype(int) - (200, 60, 30)).max() <= 8
    (part,) = _read(path, 1, crop=[0.5, 0.25, 0.5, 0.5], size=[8, 4], colour=False)
    check_example(part, ".jpg")
    assert _decode(part).shape == (4, 8)
    assert abs(_decode(part).astype(int) - 98).max() <= 4


def test_frames_come_at_the_rate_of_the_file(tmp_path):
    path = _video(tmp_path / "a.avi", [STILL] * 4)
    start_s = time.monotonic()
    _read(path, 4, every_s=0.2)
    assert time.monotonic() - start_s >= 0.6


def test_on_motion_a_frame_is_kept_where_it_differs_from_the_last_that_was(tmp_path):
    path = _video(tmp_path / "a.avi", [STILL, STILL, BIRD, BIRD, STILL])
    assert [bool(file) for file in _read(path, 5, motion_levels=8)] == [True, False, True, False, True]
    assert all(_read(path, 5))
    slow = _video(tmp_path / "slow.avi", range(STILL, BIRD, 20))
    assert 1 < sum(map(bool, _read(slow, 8, motion_levels=64))) < 8
    right = _read(path, 5, motion_levels=8, crop=[0.5, 0, 0.5, 1])
    assert [bool(file) for file in right] == [True, False, False, False, False]


def test_a_camera_that_vanishes_is_opened_again_and_that_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "RETRY_S", 0.05)
    caplog.set_level("INFO")
    path, counts = tmp_path / "camera.avi", Counter()
    section = CameraSection(path=str(path), every_s=0.03)
    source = Recorder("porch", ".jpg", lambda: Camera(section, cv2), counts)
    source.start()
    try:
        eventually(lambda: counts["porch.errors"] >= 3)
        _video(tmp_path / "new.avi", [STILL, BIRD])
        (tmp_path / "new.avi").rename(path)
        with open_file_store(tmp_path / "shard", StoreLimits(max_bytes=10**6, max_age_s=0), "oldest") as store:
            collector = FolderCollector({}, store, counts, flush_s=0, recorders={"porch": source})
            eventually(lambda: collector.step() and store.num_files == 2)
            assert store.count_classes() == {UNLABELLED: 2}
            eventually(lambda: collector.step() and counts["porch.duplicates"] >= 2)  # the video began anew
            assert store.num_files == 2
    finally:
        source.close()
    texts = [record.getMessage() for record in caplog.records if "porch" in record.getMessage()]
    first = f"source porch is opened again until it records: {path} cannot be opened as a camera or a video"
    assert texts[:2] == [first, "source porch records again"]


def test_what_is_not_read_is_bounded_and_counted(tmp_path, monkeypatch):
    path, counts = _video(tmp_path / "a.avi", [STILL, BIRD] * 20), Counter()
    monkeypatch.setattr(recorder, "MAX_UNREAD_BYTES", 3000)
    source = Recorder(
        "porch", ".png", lambda: Camera(CameraSection(path=path, every_s=0.03, format="png"), cv2), counts
    )
    source.start()
    eventually(lambda: counts["porch.unread"] >= 2)
    source.close()
    sizes = []
    while (recording := source.read()) is not None:
        sizes.append(len(recording.content))
        source.advance()
    assert sizes
    assert sum(sizes) <= 3000


def test_a_frame_that_was_dropped_is_not_what_the_next_ones_are_compared_with(tmp_path, monkeypatch):
    path, counts = _video(tmp_path / "a.avi", [STILL] * 30 + [BIRD] * 400), Counter()
    num_bytes = len(_read(path, 1, format="png")[0])
    monkeypatch.setattr(recorder, "MAX_UNREAD_BYTES", num_bytes * 3 // 2)
    section = CameraSection(path=path, every_s=0.03, format="png", motion_levels=8)
    source = Recorder("porch", ".png", lambda: Camera(section, cv2), counts)
    source.start()
    try:
        eventually(lambda: counts["porch.unread"])
        assert _decode(source.read().content)[15, 15].tolist() == [STILL] * 3
        source.advance()
        eventually(source.read)
        assert _decode(source.read().content)[15, 15].tolist() == [BIRD] * 3
        assert not counts["porch.errors"], "the video has ended, and its first frame is always kept"
    finally:
        source.close()


def test_a_collect_file_with_a_camera_fills_its_shard(tmp_path):
    path = _video(tmp_path / "a.avi", [STILL, BIRD] * 40)
    source = f'[sources.porch]\nkind = "camera"\npath = "{path}"\nevery_s = 0.05\n'
    (tmp_path / "c.toml").write_text(f'[collect]\nfolder = "{tmp_path / "shard"}"\n{source}')
    with run_collector_process(tmp_path / "c.toml"):
        eventually(lambda: len([*tmp_path.glob("shard/.unlabelled/*.jpg")]) == 2, timeout_s=40)


def test_settings_that_no_camera_has_are_refused():
    for settings, message in [
        ({"path": "video0"}, "must be absolute"),
        ({"size": [320]}, "size must be width and height of 1 to 8192"),
        ({"capture_size": [0, 10]}, "capture_size must be"),
        ({"crop": [0.5, 0, 0.6, 1]}, "crop must be left, top"),
    ]:
        with pytest.raises(ConfigError, match=message):
            CameraSection(**{"path": "/dev/video0"} | settings)
