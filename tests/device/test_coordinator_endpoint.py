"""The line to a coordinator, over real TLS to one that does nothing but say hello."""

import time

import pytest

from edgefl.core.errors import NetworkError, StoreFullError
from edgefl.device.coordinator_endpoint import CoordinatorEndpoint
from edgefl.device.state_dir import DeviceStateDir
from edgefl.simulation.local_fleet import find_free_port
from edgefl.system.https_client import CoordinatorInfo, create_pinned_context

HELLO = CoordinatorInfo(
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
        self.line = CoordinatorEndpoint(
            state,
            create_pinned_context(state.ca.read_bytes()),
            on_info=self.hellos.append,
            activate=self._enter,
            on_attempt=self._tried,
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
    dead = f"127.0.0.1:{find_free_port()}"
    site.state.update(addresses=(dead, front_door.address))
    site.line.connect()
    assert site.line.address == front_door.address
    assert (site.entered, site.num_tries, len(site.hellos)) == ([front_door.address], 2, 1)
    assert site.state.settings.addresses[0] == front_door.address
    assert DeviceStateDir.load(site.state.root).settings.addresses == site.state.settings.addresses
    assert abs(site.line.skew_s) < 5
    site.line.skew_s = 1e6
    assert site.line.clock() == pytest.approx(time.time() + 1e6, abs=5)
    site.line.disconnect()
    assert site.line.address is None
    site.line.connect()
    assert site.line.address == front_door.address


def test_where_it_gets_no_place_there_is_no_line_and_every_address_is_named(site, front_door):
    dead = f"127.0.0.1:{find_free_port()}"
    site.state.update(addresses=(front_door.address, dead))
    site.closed.add(front_door.address)
    with pytest.raises(NetworkError) as refused:
        site.line.connect()
    assert f"{front_door.address}: no place" in str(refused.value)
    assert dead in str(refused.value)
    assert site.line.address is None


def test_what_has_moved_is_known_also_when_the_card_is_full(site, full_card):
    with full_card():
        with pytest.raises(StoreFullError):
            site.state.update(threads=9)
        site.line.save("10.0.0.7:8000", HELLO)
    device = site.state.settings
    assert (device.addresses, device.broker_host) == (("10.0.0.7:8000", "10.0.0.8:8000"), "10.0.0.9")
