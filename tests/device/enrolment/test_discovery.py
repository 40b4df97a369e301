import ssl
import threading

import pytest

from edgefl.core.errors import NetworkError, WrongCaError
from edgefl.device.enrolment.discovery import DiscoveredCoordinator, find_coordinator
from edgefl.system.https_client import CoordinatorInfo

HELLO = CoordinatorInfo(version="1", fleet="lab", addresses=(), broker_port=1, broker_host=None, skew_s=0.0)
NEVER_S = 60.0


def _site(address):
    return DiscoveredCoordinator(
        address=address, ca_pem=b"", tls_context=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), info=HELLO
    )


class Net:
    """Addresses of which each answers at once, later, with an error, or not before the test ends."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def ask(self, address, _fingerprint):
        self.asked.append(address)
        answer = self.answers[address]
        if isinstance(answer, threading.Event):
            answer.wait(NEVER_S)
        if isinstance(answer, Exception):
            raise answer
        return _site(address)

    def reach(self, **options):
        return find_coordinator(list(self.answers), "f" * 64, probe=self.ask, **options).address


def test_silent_addresses_before_the_right_one_cost_no_time_of_their_own():
    silent = threading.Event()
    net = Net(a=silent, b=silent, c=silent, d=None)
    try:
        assert net.reach(grace_s=0.1) == "d"
    finally:
        silent.set()


def test_a_better_address_that_is_a_little_slower_is_taken():
    late, last = threading.Event(), threading.Event()
    net = Net(a=late, b=None)

    def ask(address, fingerprint):
        if address == "b":
            threading.Timer(0.1, late.set).start()  # b has answered when a begins to
            last.set()
        return net.ask(address, fingerprint)

    assert find_coordinator(["a", "b"], "f" * 64, probe=ask, grace_s=NEVER_S).address == "a"
    assert last.is_set()


def test_the_order_counts_and_not_who_is_first_and_nobody_worse_is_waited_for():
    assert Net(a=None, b=None, c=None).reach() == "a"
    silent = threading.Event()
    try:
        assert Net(a=NetworkError("no"), b=None, c=silent).reach(grace_s=NEVER_S) == "b"
    finally:
        silent.set()
    net = Net(a=None)
    assert find_coordinator(["a"] * 3, "f" * 64, probe=net.ask).address == "a"
    assert net.asked == ["a"], "each address is asked once"


def test_another_ca_at_the_first_address_ends_the_search_though_a_later_one_is_right():
    with pytest.raises(WrongCaError, match="somebody"):
        Net(a=WrongCaError("somebody"), b=None).reach(grace_s=NEVER_S)
    assert Net(a=NetworkError("no"), b=WrongCaError("somebody"), c=None).reach() == "c"


@pytest.mark.parametrize(
    ("answers", "kind", "told"),
    [
        ({"a": NetworkError("a is away"), "b": NetworkError("b is away")}, NetworkError, "a is away .nor 1 other"),
        ({"a": NetworkError("a is away"), "b": WrongCaError("b is odd")}, WrongCaError, "b is odd .nor 1 other"),
        ({"a": NetworkError("a is away"), "b": ZeroDivisionError("ours")}, ZeroDivisionError, "ours"),
        ({}, NetworkError, "no address of the coordinator is known"),
    ],
)
def test_what_is_worst_is_said_when_none_is_right(answers, kind, told):
    with pytest.raises(kind, match=told):
        Net(**answers).reach()
