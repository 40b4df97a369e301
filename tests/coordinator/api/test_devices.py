from __future__ import annotations

from pathlib import Path

from edgefl.coordinator.api.devices import list_device_rows
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.protocol import StatusMessage
from edgefl.storage.store import Store


def test_a_device_that_joins_at_this_moment_has_all_columns_too(tmp_path: Path) -> None:
    registry = DeviceRegistry(PresenceTracker(), lambda: 0.0)
    with Store.open(tmp_path / "edgefl.db") as store:
        store.add_token(
            token_id="t", secret_sha256="0" * 64, created_at=1.0, expires_at=9.0, uses=2, role=None, groups=()
        )
        for name in ("joining", "joined"):
            store.enroll_device(
                token_id="t", secret_sha256="0" * 64, now=2.0, device_id=name, public_key=name.encode()
            )
        registry.add("joined", node_id=1, role="trainer", groups=(), examples={})
        registry.record_status("joined", StatusMessage(state="online", boot_id="b", session_no=1))
        joined, joining = list_device_rows(store, registry)
    assert (joined["device_id"], joined["presence"]) == ("joined", "online")
    assert (joining["device_id"], joining["presence"], joining["drained"]) == ("joining", "never seen", False)
    assert set(joining) == set(joined)
