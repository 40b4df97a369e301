"""Nonces of devices' requests: each counts once, in bounded memory, whatever is forgotten."""

import random

import pytest

from edgefl.coordinator.flower.signatures import MAX_AGE_S, MAX_REORDERED, MAX_SIGNERS, NonceMemory
from edgefl.core.errors import NotAllowedError

STARTED_S = 1_000_000.0


def nonce(signer, number):
    return f"{signer:016x}-{number}"


class Memory:
    def __init__(self):
        self.nonces, self.now_s = NonceMemory(STARTED_S), STARTED_S

    def takes(self, signer, number, *, device="pi", signed_s=None, after_s=0.01):
        self.now_s += after_s
        try:
            self.nonces.add(device, nonce(signer, number), signed_s=signed_s or self.now_s, now_s=self.now_s)
        except NotAllowedError:
            return False
        return True


@pytest.fixture
def memory():
    return Memory()


def test_requests_out_of_order_each_count_once(memory):
    numbers = list(range(MAX_REORDERED))
    random.Random(3).shuffle(numbers)
    assert all(memory.takes(1, number) for number in numbers)
    assert not any(memory.takes(1, number) for number in numbers)
    assert memory.takes(1, MAX_REORDERED), "the oldest falls out of the window"
    assert not memory.takes(1, 0)
    assert memory.takes(1, 10 * MAX_REORDERED)
    assert not memory.takes(1, 5 * MAX_REORDERED), "too late, be it new"
    assert memory.takes(1, 9 * MAX_REORDERED + 1)
    assert not memory.takes(1, 9 * MAX_REORDERED)
    assert memory.takes(2, 0), "another process of the device counts by itself"
    assert memory.takes(1, 0, device="other")


def test_what_a_forgotten_signer_sent_does_not_count_again(memory):
    assert memory.takes(0, 0)
    sent_s = memory.now_s
    assert all(memory.takes(signer, 0) for signer in range(1, MAX_SIGNERS + 1))
    assert not memory.takes(0, 0, signed_s=sent_s)
    assert not memory.takes(0, 7, signed_s=sent_s), "nor what it may have sent"
    assert memory.takes(0, 7), "what it signs now is new"
    (kept,) = memory.nonces._devices.values()
    assert len(kept.signers) == MAX_SIGNERS


def test_what_an_earlier_process_of_the_coordinator_took_does_not_count_again(memory):
    assert not memory.takes(0, 0, signed_s=STARTED_S)
    assert memory.takes(0, 0, signed_s=STARTED_S + 0.001)


def test_devices_that_are_silent_longer_than_a_signature_counts_are_forgotten(memory):
    for number in range(1000):
        assert memory.takes(0, 0, device=number, after_s=1.0)
    assert len(memory.nonces) <= MAX_AGE_S + 1
    assert not memory.takes(0, 0, device=999, after_s=1.0)


def test_a_clock_that_is_set_back_keeps_no_device_out(memory):
    memory.now_s -= 3600.0
    assert memory.takes(0, 0)
    assert not memory.takes(0, 0)
    assert all(memory.takes(signer, 0) for signer in range(1, 2 * MAX_SIGNERS))


@pytest.mark.parametrize(
    "text", ["", "-", "1-1", "0" * 16, "0" * 16 + "-", "G" * 16 + "-1", "0" * 16 + "-" + "9" * 16]
)
def test_what_is_no_nonce_is_refused(memory, text):
    with pytest.raises(ValueError, match="no nonce"):
        memory.nonces.add("pi", text, signed_s=STARTED_S + 1, now_s=STARTED_S + 1)
