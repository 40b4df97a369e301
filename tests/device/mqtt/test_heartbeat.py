import contextlib
import itertools
import threading
import time

import pytest

from edgefl.device.hardware.health import HealthReading
from edgefl.device.mqtt.heartbeat import DeviceActivity, HeartbeatPublisher

pytestmark = pytest.mark.timeout(30)


class Ear:
    def __init__(self):
        self.beats, self.times_s, self._changed = [], [], threading.Condition()

    def __call__(self, heartbeat):
        with self._changed:
            self.beats.append(heartbeat)
            self.times_s.append(time.monotonic())
            self._changed.notify_all()
        return True

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.beats) >= count, 30)


@contextlib.contextmanager
def beating(heart):
    heart.start()
    yield heart
    heart.stop()


@pytest.fixture
def ear():
    return Ear()


def test_it_beats_at_once_counts_and_keeps_its_pace_within_the_jitter(ear):
    with beating(HeartbeatPublisher(ear, HealthReading, interval_s=0.1, seed="pi-1")):
        ear.wait_for(6)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(ear.times_s)]
    assert all(gap_s >= 0.09 for gap_s in gaps_s)
    assert len(set(gaps_s)) > 1
    assert [beat.seq for beat in ear.beats[:6]] == [1, 2, 3, 4, 5, 6]


def test_it_tells_the_board_and_what_the_device_is_at(ear):
    signs = HealthReading(uptime_s=9.0, temperature_c=51.5, throttled="ok", cpu_fraction=0.5, memory_bytes=7)
    activity = DeviceActivity(run="r", assignment="r-1", iteration=3, holding=["r-0"], clock_skew_s=-2.5)
    with beating(HeartbeatPublisher(ear, lambda: signs, lambda: activity)):
        ear.wait_for(1)
    beat = ear.beats[0]
    assert (beat.uptime_s, beat.temperature_c, beat.throttled, beat.cpu_fraction) == (9.0, 51.5, "ok", 0.5)
    assert (beat.run, beat.assignment, beat.iteration, beat.holding) == ("r", "r-1", 3, ["r-0"])
    assert beat.clock_skew_s == -2.5
    assert beat.battery_fraction is None


def test_a_reading_that_fails_costs_one_beat_and_not_the_heart(ear, caplog):
    readings = iter([RuntimeError("sensor"), HealthReading(), HealthReading()])

    def read():
        reading = next(readings, HealthReading())
        if isinstance(reading, Exception):
            raise reading
        return reading

    with beating(HeartbeatPublisher(ear, read, interval_s=0.02)):
        ear.wait_for(2)
    assert "a heartbeat was lost" in caplog.text


def test_beat_now_does_not_wait_for_the_interval_and_stopping_ends_the_thread(ear):
    with beating(HeartbeatPublisher(ear, HealthReading, interval_s=60.0)) as heart:
        ear.wait_for(1)
        heart.publish_now()
        ear.wait_for(2)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    assert len(ear.beats) == 2


def test_it_beats_while_the_main_thread_is_busy(ear):
    with beating(HeartbeatPublisher(ear, HealthReading, interval_s=0.02)):
        until_s = time.monotonic() + 10
        while len(ear.beats) < 4 and time.monotonic() < until_s:
            sum(range(1000))
        assert len(ear.beats) >= 4
