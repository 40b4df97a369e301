"""Who carries the messages of the node that this device is: the way that its plan asks for."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.device.link import Link
from edgefl.device.neighbours.broker_carrier import BrokerCarrier
from edgefl.device.neighbours.carrier import Carrier, OnPeerMessage
from edgefl.device.neighbours.direct import DirectCarrier
from edgefl.device.neighbours.node_runner import addresses_of
from edgefl.device.state import DeviceState
from edgefl.errors import NetworkError
from edgefl.protocol import host_and_port
from edgefl.types import NodePlan


class Carriers:
    """Makes carriers, and brings the newest one what comes over the link.

    Args:
        state: says who this device is.
        link: returns the link as it is now; it changes when the broker moves.
    """

    def __init__(self, state: DeviceState, link: Callable[[], Link]) -> None:
        self._state, self._link = state, link
        self._over_broker: BrokerCarrier | None = None

    def make(self, plan: NodePlan, on_message: OnPeerMessage) -> Carrier:
        """Returns who carries the messages of the node that this device is.

        Raises:
            NetworkError: the plan's carrier is unknown here, or it lacks an address.
        """
        if plan.carrier == "peer":
            self._over_broker = BrokerCarrier(self._link, on_message)
            return self._over_broker
        if plan.carrier != "direct":
            raise NetworkError(
                f"this device cannot carry messages by {plan.carrier!r}, only by relay, peer or direct"
            )
        return DirectCarrier(
            device_id=self._state.device_id,
            tls=self._state,
            listen=_listening(plan.listen),
            hosts=addresses_of(plan),
            neighbours=[side.neighbour for side in plan.edges],
            on_message=on_message,
        )

    def hear(self, sender: str, payload: bytes) -> None:
        """Hands on what came over the link."""
        carrier = self._over_broker
        if carrier is not None:
            carrier.deliver(sender, payload)

    def moved(self) -> None:
        """Says that the link is another one now."""
        if self._over_broker is not None:
            self._over_broker.moved()


def _listening(address: str) -> tuple[str, int]:
    """Returns where to listen for neighbours: at the port that they are told, on all of this board's addresses."""
    return "::", host_and_port(address)[1]
