"""A fleet whose boards talk to each other directly, and the check that nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from peer_boards import PeerFleet, direct_threads, eventually


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[PeerFleet]:
    fleet = PeerFleet(tmp_path)
    yield fleet
    fleet.close()
    eventually(lambda: not direct_threads(), f"the end of {direct_threads()}")
