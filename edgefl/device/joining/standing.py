"""Whether a board that has joined is still one of the fleet: it asks with its own key, before it joins once more."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from edgefl.device.joining.reaching import Site, reach
from edgefl.device.joining.renewal import ROUTE
from edgefl.device.state import DeviceState
from edgefl.device.trust import post_json
from edgefl.errors import EdgeflError, NetworkError, NotAllowedError

log = logging.getLogger(__name__)


def where_it_is_out(state: DeviceState, addresses: Sequence[str]) -> Site | None:
    """Returns the coordinator that knows this board no more; None while it does, or does not say so.

    Only the coordinator of the CA that the board joined can say it, over a connection that this CA's key has proven:
    whoever else answers, or nobody, the board stays what it is.

    Args:
        state: what the join left; neither its key nor that of a renewal under way may count for this.
        addresses: HOST:PORT, tried before the board's own.
    """
    try:
        site = reach([*addresses, *state.device.addresses], state.device.ca_fingerprint)
        keys = [path.read_bytes() for path in (state.key, state.pending_key) if path.exists()]
        return None if any(_counts(site, key_pem) for key_pem in keys) else site
    except (EdgeflError, OSError, ValueError) as error:
        log.info("cannot ask whether this board is still in the fleet: %s", error)
        return None


def _counts(site: Site, key_pem: bytes) -> bool:
    """Returns whether the coordinator knows a key: it looks at who signs before it looks at what is asked."""
    from edgefl.device.supernode import signed_headers  # noqa: PLC0415 a first join needs no Flower

    headers = signed_headers(key_pem, lambda: time.time() + site.hello.skew_s)
    try:
        post_json(site.address, site.context, ROUTE, {}, headers=headers)
    except NotAllowedError:
        return False
    except NetworkError as error:
        log.debug("as is meant: %s", error)
    return True
