"""What the agent does on a card without room; whole fleets are in tests/e2e."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.device.agent import Agent
from edgefl.device.enrolment import JoinWishes, join
from edgefl.device.state import DeviceState
from edgefl.device.trust import Hello
from edgefl.errors import StoreFullError


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


def test_a_broker_that_moved_is_followed_also_when_the_card_is_full(
    state: DeviceState, request: pytest.FixtureRequest
) -> None:
    agent = Agent(state)
    hello = Hello(
        version="1", fleet="lab", addresses=("10.0.0.8:8000",), broker_port=1999, broker_host="10.0.0.9", skew_s=0.0
    )
    request.getfixturevalue("full_card")
    with pytest.raises(StoreFullError):
        state.change(threads=9)
    agent._remember_addresses("10.0.0.7:8000", hello)
    assert agent._brokers() == [("10.0.0.9", 1999)]
