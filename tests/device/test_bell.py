import time

from edgefl.device.bell import Bell


def test_each_ring_is_heard_once():
    bell = Bell()
    bell.ring()
    bell.ring()
    began_s = time.monotonic()
    bell.wait(30.0)
    bell.wait(30.0)
    assert time.monotonic() - began_s < 10.0
    bell.wait(0.01)


def test_a_doubt_is_taken_once_and_rings_nothing_by_itself():
    bell = Bell()
    assert not bell.take_doubt()
    bell.doubt()
    bell.wait(0.01)
    assert (bell.take_doubt(), bell.take_doubt()) == (True, False)
