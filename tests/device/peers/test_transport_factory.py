"""Which carrier a plan gets; the carriers themselves are in tests of their own."""

from typing import Any

import pytest

from edgefl.core.errors import NetworkError
from edgefl.core.types import GossipConfig, PeerLinkConfig
from edgefl.device.mqtt.peer_publisher import PeerPublisher
from edgefl.device.peers.mqtt_transport import MqttPeerTransport
from edgefl.device.peers.tls_transport import TlsPeerTransport
from edgefl.device.peers.transport_factory import PeerTransportFactory


class Link:
    def __init__(self):
        self.num_listens = 0
        self.peers = PeerPublisher()
        self.remove_peers = self.peers.remove

    def subscribe_to_peers(self):
        self.num_listens += 1
        self.peers.subscribe()


class Site:
    def __init__(self, state):
        self.links, self.heard = [Link()], []
        now: Any = lambda: self.links[-1]  # noqa: E731 typed as the real link
        self.carriers = PeerTransportFactory(state, now)

    def make(self, carrier, **plan):
        edges = plan.pop("edges", ())
        node = GossipConfig(method="ad-psgd", edges=edges, learning_rate=0.1, period=1, carrier=carrier, **plan)
        return self.carriers.make(node, lambda sender, payload: self.heard.append((sender, payload)))


@pytest.fixture
def site(state):
    return Site(state)


def test_what_comes_over_the_link_goes_to_the_newest_carrier_over_the_broker(site):
    site.carriers.receive("pi-2", b"nobody listens yet")
    carrier = site.make("peer")
    assert isinstance(carrier, MqttPeerTransport)
    carrier.start()
    carrier.set_peers(["pi-2"])
    site.carriers.receive("pi-2", b"x")
    site.carriers.receive("pi-3", b"no neighbour")
    assert site.heard == [("pi-2", b"x")]


def test_when_the_link_has_moved_the_carrier_listens_on_the_new_one(site):
    site.carriers.on_link_changed()
    assert site.links[0].num_listens == 0
    site.make("peer").start()
    site.links.append(Link())
    site.carriers.on_link_changed()
    assert [link.num_listens for link in site.links] == [1, 1]


def test_a_node_whose_neighbours_were_all_away_hears_them_again_when_they_are_back(site):
    carrier, peers = site.make("peer"), site.links[0].peers
    carrier.set_peers(["pi-2"])
    assert not peers.is_subscribed
    carrier.start()
    for neighbours in (["pi-3"], [], ["pi-2"]):
        carrier.set_peers(neighbours)
        assert peers.is_subscribed == bool(neighbours)


def test_a_direct_carrier_listens_on_all_addresses_at_the_port_that_neighbours_are_told(site):
    side = PeerLinkConfig(neighbour="pi-2", sign=1, degree=1, weight=0.5, period=1, address="10.0.0.2:7000")
    carrier = site.make("direct", listen="10.0.0.1:7001", edges=(side,))
    assert isinstance(carrier, TlsPeerTransport)


def test_a_carrier_that_is_unknown_is_refused_with_those_that_are_known(site):
    with pytest.raises(NetworkError, match="'pigeon', only by relay, peer or direct"):
        site.make("pigeon")
