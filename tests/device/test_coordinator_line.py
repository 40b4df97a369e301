"""The line to a coordinator, over real TLS to one that does nothing but say hello."""

import time

import pytest

from edgefl.device.coordinator_line import CoordinatorLine
from edgefl.device.state import DeviceState
from edgefl.device.trust import Hello, pinned_context
from edgefl.errors import NetworkError, StoreFullError
from edgefl.local_fleet import free_port

HELLO = Hello(
    version="1", fleet="lab", addresses=("10.0.0.8:8000",), broker_port=1999, broker_host="10.0.0.9", skew_s=0.0
)


class Site:
    """A line and what it has told: hellos, addresses that were entered, and attempts."""

    def __init__(self, state):
        self.state = state
        self.hellos = []
        self.entered = []
        self.num_tries = 0
        self.closed = set()
        self.line = CoordinatorLine(
            state,
            pinned_context(state.ca.read_bytes()),
            on_hello=self.hellos.append,
            enter=self._enter,
            on_try=self._tried,
        )

    def _enter(self, address):
        self.entered.append(address)
        if address in self.closed:
            raise NetworkError("no place")

    def _tried(self):
        self.num_tries += 1


@pytest.fixture
def site(joined_state):
    return Site(joined_state)


def test_it_finds_the_coordinator_at_the_address_that_answers_and_puts_it_first(site, front_door):
    dead = f"127.0.0.1:{free_port()}"
    site.state.change(addresses=(dead, front_door.address))
    site.line.connect()
    assert site.line.address == front_door.address
    assert (site.entered, site.num_tries, len(site.hellos)) == ([front_door.address], 2, 1)
    assert site.state.device.addresses[0] == front_door.address
    assert DeviceState.load(site.state.root).device.addresses == site.state.device.addresses
    assert abs(site.line.skew_s) < 5
    site.line.skew_s = 1e6
    assert site.line.clock() == pytest.approx(time.time() + 1e6, abs=5)
    site.line.drop()
    assert site.line.address is None
    site.line.connect()
    assert site.line.address == front_door.address


def test_where_it_gets_no_place_there_is_no_line_and_every_address_is_named(site, front_door):
    dead = f"127.0.0.1:{free_port()}"
    site.state.change(addresses=(front_door.address, dead))
    site.closed.add(front_door.address)
    with pytest.raises(NetworkError) as refused:
        site.line.connect()
    assert f"{front_door.address}: no place" in str(refused.value)
    assert dead in str(refused.value)
    assert site.line.address is None


def test_what_has_moved_is_known_also_when_the_card_is_full(site, full_card):
    with full_card():
        with pytest.raises(StoreFullError):
            site.state.change(threads=9)
        site.line.remember("10.0.0.7:8000", HELLO)
    device = site.state.device
    assert (device.addresses, device.broker_host) == (("10.0.0.7:8000", "10.0.0.8:8000"), "10.0.0.9")
