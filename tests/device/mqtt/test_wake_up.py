import time

from edgefl.device.mqtt.wake_up import WakeUpSignal


def test_each_ring_is_heard_once():
    bell = WakeUpSignal()
    bell.notify()
    bell.notify()
    began_s = time.monotonic()
    bell.wait(30.0)
    bell.wait(30.0)
    assert time.monotonic() - began_s < 10.0
    bell.wait(0.01)


def test_a_doubt_is_taken_once_and_rings_nothing_by_itself():
    bell = WakeUpSignal()
    assert not bell.pop_possible_loss()
    bell.record_possible_loss()
    bell.wait(0.01)
    assert (bell.pop_possible_loss(), bell.pop_possible_loss()) == (True, False)
