"""Answers on their way while the device trains on; the network is a function that a test holds back."""

import threading
import time

import pytest
from peer_boards import eventually

from edgefl.core.errors import NetworkError
from edgefl.device.flower.reply_uploader import ReplyUploader


class Network:
    """Takes one answer at a time, when it is let; fails as often as it is told to."""

    def __init__(self):
        self.sent, self.under_way, self.failures, self.num_failed = [], [], [], 0
        self.lets = threading.Semaphore(0)
        self.began = threading.Semaphore(0)

    def push(self, answer):
        self.under_way.append(answer)
        self.began.release()
        assert self.lets.acquire(timeout=60)
        self.under_way.remove(answer)
        if self.failures:
            raise self.failures.pop(0)
        self.sent.append(answer)

    def fail(self):
        self.num_failed += 1

    def let(self, count=1):
        for _ in range(count):
            self.lets.release()

    def wait_begun(self):
        assert self.began.acquire(timeout=60)


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def outbox(network):
    made = ReplyUploader(network.push, network.fail)
    made.resume()
    yield made
    network.let(9)
    made.close(10)
    assert not made._thread.is_alive()


def test_answers_leave_in_order_and_a_third_waits_for_the_first(network, outbox):
    outbox.add("one")
    network.wait_begun()
    assert network.under_way == ["one"]  # and this thread is free
    waiting = threading.Thread(target=outbox.add, args=("two",))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    network.let(2)
    waiting.join(60)
    assert not waiting.is_alive()
    eventually(lambda: network.sent == ["one", "two"])


@pytest.mark.parametrize("error", [NetworkError("no answer"), RuntimeError("no answer: a bug")])
def test_what_could_not_be_sent_is_told_once_kept_and_sent_when_there_is_a_connection_again(network, outbox, error):
    network.failures = [error]
    outbox.add("one")
    network.let()
    eventually(lambda: network.num_failed)
    outbox.add("two")  # the training that went on meanwhile
    with pytest.raises(NetworkError, match="no answer"):
        outbox.check()
    outbox.check()
    assert network.sent == []
    network.let(2)
    outbox.resume()
    eventually(lambda: network.sent == ["one", "two"])


def test_a_pause_waits_for_what_is_under_way_and_nothing_leaves_until_it_is_over(network, outbox):
    outbox.add("one")
    network.wait_begun()
    pausing = threading.Thread(target=outbox.pause)
    pausing.start()
    pausing.join(0.1)
    assert pausing.is_alive()
    network.let()
    pausing.join(60)
    assert (pausing.is_alive(), network.sent) == (False, ["one"])
    network.let()
    outbox.add("two")
    time.sleep(0.05)
    assert network.under_way == []
    outbox.resume()
    eventually(lambda: network.sent == ["one", "two"])


def test_closing_sends_what_is_left_but_waits_no_longer_than_it_may(network):
    outbox = ReplyUploader(network.push, network.fail)
    outbox.resume()
    outbox.add("one")
    network.let()
    outbox.close(10)
    assert network.sent == ["one"]
    stuck = ReplyUploader(network.push, network.fail)
    stuck.resume()
    stuck.add("two")
    started_s = time.monotonic()
    stuck.close(0.1)
    unconnected = ReplyUploader(network.push, network.fail)
    unconnected.add("three")
    unconnected.close(10)
    assert time.monotonic() - started_s < 5
    assert network.sent == ["one"]
    network.let()
