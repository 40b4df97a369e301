from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from edgefl.coordinator.refusals import Refusals
from edgefl.errors import StoreFullError
from edgefl.storage.store import Store


class FakeBroker:
    """Keeps whom it was told to refuse."""

    def __init__(self) -> None:
        self.told: list[set[str]] = []
        self.is_full = False

    def refuse(self, names: Collection[str]) -> None:
        if self.is_full:
            raise StoreFullError("no room for the rules")
        self.told.append(set(names))


def join(store: Store, *names: str) -> None:
    token = store.tokens()[0].token_id
    for name in names:
        store.enroll_device(
            token_id=token, secret_sha256="0" * 64, now=2.0, device_id=name, public_key=name.encode(), role="trainer"
        )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "edgefl.db") as store:
        store.add_token(
            token_id="t", secret_sha256="0" * 64, expires_at=9e9, uses=9, groups=(), role=None, created_at=1.0
        )
        join(store, "pi-1", "pi-2", "pi-3")
        yield store


def test_a_broker_is_told_of_changes_and_only_of_them(store: Store) -> None:
    broker: Any = FakeBroker()
    refusals = Refusals(broker, store)
    refusals.update()
    assert broker.told == []
    store.remove_device("pi-1", at=3.0)
    store.remove_device("pi-2", at=3.0)
    refusals.update()
    refusals.update()
    assert broker.told == [{"pi-1", "pi-2"}]
    join(store, "pi-1")
    refusals.update()
    assert broker.told[1:] == [{"pi-2"}]


def test_a_broker_that_could_not_be_told_is_told_again(store: Store) -> None:
    broker: Any = FakeBroker()
    refusals = Refusals(broker, store)
    store.remove_device("pi-1", at=3.0)
    broker.is_full = True
    with pytest.raises(StoreFullError):
        refusals.update()
    broker.is_full = False
    refusals.update()
    assert broker.told == [{"pi-1"}]
