from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from small_fleet import enroll

from edgefl.coordinator.brokers.revocation import RENEWED_INTERVAL_S, RevocationSync
from edgefl.core.errors import StoreFullError
from edgefl.storage.repositories.certificates import record_issued_certificate, renew_certificate
from edgefl.storage.store import Store


class FakeBroker:
    """Keeps whom it was told to refuse."""

    def __init__(self) -> None:
        self.told: list[set[str]] = []
        self.revoked: set[str] = set()
        self.is_full = False

    def revoke(self, names: Collection[str], serials: Collection[str]) -> None:
        if self.is_full:
            raise StoreFullError("no room for the rules")
        self.told.append(set(names))
        self.revoked = set(serials)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "edgefl.db") as store:
        enroll(store, "pi-1", "pi-2", "pi-3")
        yield store


def test_a_broker_is_told_of_changes_until_it_took_them_and_only_of_them(store: Store) -> None:
    broker: Any = FakeBroker()
    refusals = RevocationSync(broker, store)
    refusals.update()
    assert broker.told == []
    store.remove_device("pi-1", at=3.0)
    store.remove_device("pi-2", at=3.0)
    broker.is_full = True
    with pytest.raises(StoreFullError):
        refusals.update()
    broker.is_full = False
    refusals.update()
    refusals.update()
    assert broker.told == [{"pi-1", "pi-2"}]
    enroll(store, "pi-1")
    refusals.update()
    assert broker.told[1:] == [{"pi-2"}]


def issue(store: Store, name: str, serial: str, *, ends_at: float = 9e9) -> None:
    renew_certificate(store, name, public_key=f"{name} {serial}".encode(), serial=serial, expires_at=ends_at, at=3.0)


def test_a_certificate_is_refused_when_there_is_a_newer_one_until_it_has_ended(store: Store) -> None:
    broker: Any = FakeBroker()
    now = [100.0]
    refusals = RevocationSync(broker, store, clock=lambda: now[0])
    issue(store, "pi-1", "a1", ends_at=5000.0)
    issue(store, "pi-1", "a2")
    issue(store, "pi-2", "b1")
    refusals.update()
    assert (broker.told, broker.revoked) == ([set()], {"a1"})
    issue(store, "pi-2", "b2")
    refusals.update()
    assert broker.revoked == {"a1"}, "renewals are told together"
    now[0] += RENEWED_INTERVAL_S
    refusals.update()
    assert broker.revoked == {"a1", "b1"}
    now[0] = 6000.0
    refusals.update()
    assert broker.revoked == {"b1"}, "what has ended by itself need not be told"


def test_every_certificate_of_a_removed_device_is_refused_at_once_also_when_its_name_is_taken_again(
    store: Store,
) -> None:
    broker: Any = FakeBroker()
    refusals = RevocationSync(broker, store, clock=lambda: 100.0)
    issue(store, "pi-1", "a1")
    refusals.update()
    store.remove_device("pi-1", at=4.0)
    refusals.update()
    assert (broker.told[-1], broker.revoked) == ({"pi-1"}, {"a1"})
    enroll(store, "pi-1")
    issue(store, "pi-1", "c1")
    refusals.update()
    assert (broker.told[-1], broker.revoked) == (set(), {"a1"})


def test_the_coordinator_s_own_certificate_is_never_refused(store: Store) -> None:
    broker: Any = FakeBroker()
    record_issued_certificate(store, serial="e1", expires_at=9e9, at=1.0)
    record_issued_certificate(store, serial="e2", expires_at=9e9, at=2.0, previous_serial="e0")
    RevocationSync(broker, store, get_own_serial=lambda: "e2", clock=lambda: 100.0).update()
    assert broker.revoked == {"e0", "e1"}
