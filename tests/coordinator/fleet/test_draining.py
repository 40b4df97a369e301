from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_fleet import SmallFleet

from edgefl.coordinator.fleet.draining import DrainController
from edgefl.coordinator.fleet.presence import DevicePresence
from edgefl.core.errors import NotFoundError
from edgefl.core.protocol import Command, CommandKind
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store


class Site(SmallFleet):
    """A roster and a draining over one store; `sent` holds what devices were told."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.sent = list[tuple[str, str]]()
        self.draining = DrainController(store, self.roster, self._send, lambda: 9.0)
        for name in ("pi", "other"):
            self.add(name, state=None)
        self.draining.restore()
        self.draining.subscribe()

    def _send(self, device_id: str, command: Command) -> None:
        self.sent.append((device_id, command.kind))

    def workers(self) -> list[str]:
        return [info.device_id for info in self.roster.list_schedulable()]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


@pytest.fixture
def site(store: Store) -> Site:
    site = Site(store)
    site.say("pi", "online")
    return site


def test_a_drained_device_gets_no_work_from_that_moment_on(site: Site) -> None:
    assert site.workers() == ["pi"]
    site.draining.drain("pi")
    assert site.workers() == []
    assert site.sent == [("pi", CommandKind.DRAIN)]
    assert site.roster.get_state("pi") is DevicePresence.ONLINE, "it has not obeyed yet"


def test_resuming_waits_for_the_device_to_say_that_it_is_online(site: Site) -> None:
    site.draining.drain("pi")
    site.say("pi", "draining")
    site.draining.resume("pi")
    assert site.sent[-1] == ("pi", CommandKind.RESUME)
    assert site.workers() == []
    site.say("pi", "online")
    assert site.workers() == ["pi"]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_device_that_missed_what_it_was_told_is_told_when_it_comes_back(site: Site, resumes: bool) -> None:
    site.draining.drain("pi")
    site.say("pi", "draining")
    site.say("pi", "offline")
    if resumes:
        site.draining.resume("pi")
    site.sent.clear()
    site.say("pi", "draining" if resumes else "online", boot="boot-2", session=2)
    assert site.sent == [("pi", CommandKind.RESUME if resumes else CommandKind.DRAIN)]
    assert site.workers() == []


def test_a_coordinator_that_restarts_still_knows_who_is_drained(site: Site, store: Store) -> None:
    site.draining.drain("pi")
    site.draining.drain("other")
    site.draining.resume("other")
    again = Site(store)
    assert (again.roster.is_drained("pi"), again.roster.is_drained("other")) == (True, False)
    again.say("pi", "online", session=2)
    assert again.sent == [("pi", CommandKind.DRAIN)]
    store.record_event("device-joined", "as trainer", at=10.0, device_id="pi")
    assert not Site(store).roster.is_drained("pi"), "it has joined anew"


def test_asking_twice_is_written_down_once_and_told_twice(site: Site, store: Store) -> None:
    site.draining.drain("pi")
    site.draining.drain("pi")
    assert [row["kind"] for row in read_history(store, "events")] == ["drain-asked"]
    assert site.sent == [("pi", CommandKind.DRAIN)] * 2


@pytest.mark.parametrize("action", ["drain", "resume"])
def test_a_device_that_is_not_in_the_fleet_cannot_be_asked(site: Site, action: str) -> None:
    ask: Any = getattr(site.draining, action)
    with pytest.raises(NotFoundError, match="'nobody'"):
        ask("nobody")
