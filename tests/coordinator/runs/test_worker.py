"""The run worker, over a real store: what must not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.presence import Presence
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.runs.worker import RunSite, RunWorker
from edgefl.coordinator.superlink import SuperLink
from edgefl.storage.records import RunStatus
from edgefl.storage.store import Store
from edgefl.types import Progress


class Bell:
    def ring(self, device_id: str) -> None: ...

    def command(self, device_id: str, command: Any) -> None: ...


def never_assembled(_config: Any, _run_id: str) -> Any:
    raise NotImplementedError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


@pytest.fixture
def worker(store: Store, tmp_path: Path) -> RunWorker:
    site = RunSite(
        directory=CoordinatorDirectory(root=tmp_path, fleet="lab", hosts=()),
        store=store,
        roster=Roster(Presence(), time.monotonic),
        superlink=SuperLink(on_reply=lambda _: None, on_contact=lambda _: None),
        bell=Bell(),
        assemble=never_assembled,
    )
    return RunWorker(site, on_fatal=lambda _: None)


def test_what_devices_send_is_passed_on_while_a_stop_waits_for_the_store(store: Store, worker: RunWorker) -> None:
    store.add_run(run_id="r", name="n", task="digits", strategy="x", config={}, seed=7, submitted_at=1.0)
    passed = threading.Event()

    def pass_on() -> None:
        worker.post(Progress(device_id="a", assignment_id="x", iteration=1, seconds_per_iteration=1.0, age_s=0.0))
        assert not worker.is_active("r")
        assert not worker.bars("r", "a")
        worker.flush()
        passed.set()

    with store.batch():
        stopping = threading.Thread(target=worker.stop_run, args=("r", "because"))
        stopping.start()
        deadline_s = time.monotonic() + 60
        while not worker._lock.locked():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        threading.Thread(target=pass_on, daemon=True).start()
        assert passed.wait(60)
    stopping.join(60)
    assert store.run("r").status is RunStatus.STOPPED
