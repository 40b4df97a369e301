"""Which carrier a plan gets; the carriers themselves are in tests of their own."""

from typing import Any

import pytest

from edgefl.device.neighbours.broker_carrier import BrokerCarrier
from edgefl.device.neighbours.carriers import Carriers
from edgefl.device.neighbours.direct import DirectCarrier
from edgefl.device.peers import Peers
from edgefl.errors import NetworkError
from edgefl.types import EdgeSide, NodePlan


class Link:
    def __init__(self):
        self.num_listens = 0
        self.peers = Peers()
        self.forget_peers = self.peers.forget

    def listen_to_peers(self):
        self.num_listens += 1
        self.peers.listen()


class Site:
    def __init__(self, state):
        self.links, self.heard = [Link()], []
        now: Any = lambda: self.links[-1]  # noqa: E731 typed as the real link
        self.carriers = Carriers(state, now)

    def make(self, carrier, **plan):
        edges = plan.pop("edges", ())
        node = NodePlan(method="ad-psgd", edges=edges, learning_rate=0.1, period=1, carrier=carrier, **plan)
        return self.carriers.make(node, lambda sender, payload: self.heard.append((sender, payload)))


@pytest.fixture
def site(state):
    return Site(state)


def test_what_comes_over_the_link_goes_to_the_newest_carrier_over_the_broker(site):
    site.carriers.hear("pi-2", b"nobody listens yet")
    carrier = site.make("peer")
    assert isinstance(carrier, BrokerCarrier)
    carrier.start()
    carrier.set_neighbours(["pi-2"])
    site.carriers.hear("pi-2", b"x")
    site.carriers.hear("pi-3", b"no neighbour")
    assert site.heard == [("pi-2", b"x")]


def test_when_the_link_has_moved_the_carrier_listens_on_the_new_one(site):
    site.carriers.moved()
    assert site.links[0].num_listens == 0
    site.make("peer").start()
    site.links.append(Link())
    site.carriers.moved()
    assert [link.num_listens for link in site.links] == [1, 1]


def test_a_node_whose_neighbours_were_all_away_hears_them_again_when_they_are_back(site):
    carrier, peers = site.make("peer"), site.links[0].peers
    carrier.set_neighbours(["pi-2"])
    assert not peers.is_listening
    carrier.start()
    for neighbours in (["pi-3"], [], ["pi-2"]):
        carrier.set_neighbours(neighbours)
        assert peers.is_listening == bool(neighbours)


def test_a_direct_carrier_listens_on_all_addresses_at_the_port_that_neighbours_are_told(site):
    side = EdgeSide(neighbour="pi-2", sign=1, degree=1, weight=0.5, period=1, address="10.0.0.2:7000")
    carrier = site.make("direct", listen="10.0.0.1:7001", edges=(side,))
    assert isinstance(carrier, DirectCarrier)


def test_a_carrier_that_is_unknown_is_refused_with_those_that_are_known(site):
    with pytest.raises(NetworkError, match="'pigeon', only by relay, peer or direct"):
        site.make("pigeon")
