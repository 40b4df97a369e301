"""A device that has joined, a card that fills up, and a fleet whose boards talk to each other directly."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from peer_boards import PeerFleet, direct_threads, eventually

from edgefl.coordinator import pki
from edgefl.device.joining.enrolment import JoinWishes, join
from edgefl.device.state import DeviceState, JoinedDevice, save_joined


@pytest.fixture(scope="session")
def joined(tmp_path_factory: pytest.TempPathFactory) -> tuple[pki.KeyPair, pki.KeyPair]:
    """A fleet's authority and the certificate of a device."""
    authority = pki.create_authority("lab")
    return authority, pki.issue_client(authority, "pi-1")


@pytest.fixture
def state(joined: tuple[pki.KeyPair, pki.KeyPair], tmp_path: Path) -> DeviceState:
    """That of a device which has joined a fleet whose coordinator is away."""
    authority, pair = joined
    device = JoinedDevice(
        device_id="pi-1", fleet="lab", role="trainer", ca_fingerprint=pki.fingerprint(authority.cert_pem),
        addresses=("127.0.0.1:9",), broker_port=9, accelerator="cpu", threads=1,
    )  # fmt: skip
    (tmp_path / "device").mkdir(mode=0o700)
    return save_joined(
        tmp_path / "device", device, key_pem=pair.key_pem, cert_pem=pair.cert_pem, ca_pem=authority.cert_pem
    )


@pytest.fixture
def joined_state(front_door: Any, tmp_path: Path) -> DeviceState:
    """That of a device which has joined the coordinator of the front door."""
    wishes = JoinWishes(name="pi-1", role="trainer", shards={}, examples={}, accelerator="cpu", threads=1, facts={})
    return join(front_door.token(), wishes, root=tmp_path / "device", addresses=[front_door.address])


@pytest.fixture
def full_card() -> Callable[..., AbstractContextManager[None]]:
    """A limit on file sizes is the nearest thing to a full card that needs no mount.

    It holds for what pytest itself writes too, and so for no longer than a `with`.
    """

    @contextmanager
    def full(limit_bytes: int = 10) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[PeerFleet]:
    fleet = PeerFleet(tmp_path)
    yield fleet
    fleet.close()
    eventually(lambda: not direct_threads(), f"the end of {direct_threads()}")
