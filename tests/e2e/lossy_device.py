"""A device that loses three in ten of its messages to neighbours on the way out; else it is `edgefl`."""

import random
import sys

from edgefl.cli.main import main
from edgefl.device.neighbours.broker_carrier import BrokerCarrier

LOSS = 0.3
_draw = random.Random(5).random
_send = BrokerCarrier.send


def _lossy(self: BrokerCarrier, receiver: str, payload: bytes, *, keep_all: bool = False) -> bool:
    return True if _draw() < LOSS else _send(self, receiver, payload, keep_all=keep_all)


BrokerCarrier.send = _lossy  # type: ignore[method-assign]
sys.exit(main())
