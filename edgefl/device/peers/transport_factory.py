"""Factory of the peer transport that a plan requests."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.core.errors import NetworkError
from edgefl.core.protocol import host_and_port
from edgefl.core.types import GossipConfig
from edgefl.device.mqtt.connection import MqttConnection
from edgefl.device.peers.gossip_runner import get_peer_addresses
from edgefl.device.peers.mqtt_transport import MqttPeerTransport
from edgefl.device.peers.tls_transport import TlsPeerTransport
from edgefl.device.peers.transport import OnPeerMessage, PeerTransport
from edgefl.device.state_dir import DeviceStateDir


class PeerTransportFactory:
    """Factory of peer transports; passes MQTT messages to the newest one.

    Args:
        state: has the device id.
        link: returns the present connection, which changes when the broker moves.
    """

    def __init__(self, state: DeviceStateDir, link: Callable[[], MqttConnection]) -> None:
        self._state, self._link = state, link
        self._mqtt_transport: MqttPeerTransport | None = None

    def make(self, plan: GossipConfig, on_message: OnPeerMessage) -> PeerTransport:
        """Returns the transport for a plan.

        Raises:
            NetworkError: the plan's transport is unknown here, or it lacks an address.
        """
        if plan.carrier == "peer":
            self._mqtt_transport = MqttPeerTransport(self._link, on_message)
            return self._mqtt_transport
        if plan.carrier != "direct":
            raise NetworkError(
                f"this device cannot carry messages by {plan.carrier!r}, only by relay, peer or direct"
            )
        return TlsPeerTransport(
            device_id=self._state.device_id,
            tls=self._state,
            listen=_make_listen_address(plan.listen),
            addresses=get_peer_addresses(plan),
            peers=[edge.neighbour for edge in plan.edges],
            on_message=on_message,
        )

    def receive(self, sender: str, payload: bytes) -> None:
        """Passes a message to the MQTT transport."""
        transport = self._mqtt_transport
        if transport is not None:
            transport.receive(sender, payload)

    def on_link_changed(self) -> None:
        """Notifies the MQTT transport of a replaced connection."""
        if self._mqtt_transport is not None:
            self._mqtt_transport.on_link_changed()


def _make_listen_address(address: str) -> tuple[str, int]:
    """Returns the listening address: the announced port, on all of this board's addresses."""
    return "::", host_and_port(address)[1]
