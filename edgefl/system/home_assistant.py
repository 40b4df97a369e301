"""Home Assistant's MQTT discovery: what all that edgefl announces there has in common."""

from __future__ import annotations

import hashlib
from typing import Any

from edgefl import __version__
from edgefl.core.types import Json

ONLINE, OFFLINE = "online", "offline"
"""Payloads of availability."""


def make_discovery_id(topic: str) -> str:
    """Returns a name of letters, digits and `_` that another topic does not have."""
    return f"edgefl_{hashlib.sha256(topic.encode()).hexdigest()[:12]}"


def describe_device(identifier: str, name: str, **more: Any) -> Json:
    """Returns the keys `device` and `origin` of a message of discovery.

    Args:
        identifier: of the device, for ever.
        name: for people.
        more: keys of `device`.
    """
    return {
        "device": {"identifiers": [identifier], "name": name, "manufacturer": "edgefl", **more},
        "origin": {"name": "edgefl", "sw_version": __version__},
    }
