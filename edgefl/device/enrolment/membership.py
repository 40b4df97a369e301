"""Membership check: an enrolled board verifies with its own key that it is registered, before it re-enrols."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from edgefl.core.errors import EdgeflError, NetworkError, NotAllowedError
from edgefl.device.enrolment.discovery import DiscoveredCoordinator, find_coordinator
from edgefl.device.enrolment.renewal import RENEW_ROUTE
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.https_client import post_json

log = logging.getLogger(__name__)


def find_removing_coordinator(state: DeviceStateDir, addresses: Sequence[str]) -> DiscoveredCoordinator | None:
    """Returns the coordinator that has removed this board; None while registered or unknown.

    Only the coordinator of the CA that the board joined counts, over a connection verified by this CA; after any
    other answer, or none, the board keeps its identity.

    Args:
        state: of the enrolment; both its key and that of a renewal under way must be unknown.
        addresses: HOST:PORT, tried before the board's own.
    """
    try:
        coordinator = find_coordinator([*addresses, *state.settings.addresses], state.settings.ca_fingerprint)
        keys = [path.read_bytes() for path in (state.key, state.pending_key) if path.exists()]
        return None if any(_is_key_registered(coordinator, key_pem) for key_pem in keys) else coordinator
    except (EdgeflError, OSError, ValueError) as error:
        log.info("cannot ask whether this board is still in the fleet: %s", error)
        return None


def _is_key_registered(coordinator: DiscoveredCoordinator, key_pem: bytes) -> bool:
    """Returns whether a key is registered: the coordinator authenticates before it parses a request."""
    from edgefl.device.flower.supernode import create_auth_headers  # noqa: PLC0415 a first enrolment needs no Flower

    headers = create_auth_headers(key_pem, lambda: time.time() + coordinator.info.skew_s)
    try:
        post_json(coordinator.address, coordinator.tls_context, RENEW_ROUTE, {}, headers=headers)
    except NotAllowedError:
        return False
    except NetworkError as error:
        log.debug("as is meant: %s", error)
    return True
