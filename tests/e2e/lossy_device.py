"""A device that loses three in ten of its messages to neighbours on the way out; else it is `edgefl`."""

import random
import sys

from edgefl.cli.main import main
from edgefl.device.peers.transports import MqttPeerTransport

LOSS = 0.3
_draw = random.Random(5).random
_send = MqttPeerTransport.send


def _lossy(self: MqttPeerTransport, receiver: str, payload: bytes, *, is_reply: bool = False) -> bool:
    return True if _draw() < LOSS else _send(self, receiver, payload, is_reply=is_reply)


MqttPeerTransport.send = _lossy  # type: ignore[method-assign]
sys.exit(main())
