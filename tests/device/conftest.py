"""A device that has joined, one on a full card, and a fleet whose boards talk to each other directly."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peer_boards import PeerFleet, direct_threads, eventually

from edgefl.device.joining.enrolment import JoinWishes, join
from edgefl.device.state import DeviceState


@pytest.fixture
def state(front_door: Any, tmp_path: Path) -> DeviceState:
    wishes = JoinWishes(name="pi-1", role="trainer", shards={}, examples={}, accelerator="cpu", threads=1, facts={})
    return join(front_door.token(), wishes, root=tmp_path / "device", addresses=[front_door.address])


@pytest.fixture
def full_card() -> Iterator[None]:
    """A limit on file sizes is the nearest thing to a full card that needs no mount."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[PeerFleet]:
    fleet = PeerFleet(tmp_path)
    yield fleet
    fleet.close()
    eventually(lambda: not direct_threads(), f"the end of {direct_threads()}")
