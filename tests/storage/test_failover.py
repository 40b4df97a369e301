"""Lease and mirror on a PostgreSQL server: who may write, and what another host finds."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.coordinator.directory import init_directory, set_shared_models, set_store
from edgefl.coordinator.failover import Failover
from edgefl.core.errors import (
    RETRYABLE_STORE_ERRORS,
    DataError,
    EdgeflError,
    JournalError,
    LeaseLostError,
    NetworkError,
    NotAllowedError,
    StoreBusyError,
    StoreError,
    UsageError,
)
from edgefl.core.types import Decision, FinishEarlyInstruction
from edgefl.storage.database import Database
from edgefl.storage.journal.record_encoding import CheckpointMark
from edgefl.storage.journal.wal_journal import WalJournal, load_journal_entries
from edgefl.storage.lease import Lease
from edgefl.storage.mirror import COPY_MARK, MAX_INLINE_BYTES, REPLACED_FOLDER, DirectoryMirror
from edgefl.storage.repositories.records import SavedModelRow
from edgefl.storage.shared_objects import FolderObjects
from edgefl.storage.store import Store

pytestmark = pytest.mark.extended

RUN = "runs/one"


def _never(_: object) -> Any:
    raise AssertionError


class Host:
    """A host of the fleet: its directory, its lease and, once it is active, its store."""

    def __init__(self, url: str, root: Path, shared: Path, ca: str = "c" * 64) -> None:
        root.mkdir()
        self.root, self.url, self.now_ns = root, url, 10**19
        self.lease = Lease.open(url, root.name, host_id=root.name, ca_fingerprint=ca)
        self.mirror = DirectoryMirror(root, self.lease, FolderObjects(shared), clock_ns=lambda: self.now_ns)
        self.store: Store | None = None

    def take_over(self) -> Store:
        assert self.lease.try_acquire()
        self.mirror.load()
        self.store = Store.open(self.url)
        self.mirror.open(self.store.database)
        return self.store

    def write(self, path: str, content: bytes) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(".fresh")
        fresh.write_bytes(content)
        return fresh.replace(target)

    def open_journal(self) -> WalJournal:
        (self.root / RUN).mkdir(parents=True, exist_ok=True)
        return WalJournal(self.root / RUN / "journal", _never, mirror=self.mirror)

    def record(self, journal: WalJournal, number: int) -> None:
        instruction = FinishEarlyInstruction(device_id=f"device-{number}", assignment_id=f"a{number}")
        journal.record_decision(Decision(instructions=(instruction,)))
        journal.commit()

    def list_records(self) -> list[int]:
        return [number for number, _ in load_journal_entries(self.root / RUN / "journal")]

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        self.lease.close()


@pytest.fixture
def hosts(postgres: Any, tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    server, _ = postgres
    url = server.url(server.new_database())
    (tmp_path / "shared").mkdir()
    Store.open(url).close()
    made = Host(url, tmp_path / "first", tmp_path / "shared"), Host(url, tmp_path / "second", tmp_path / "shared")
    yield made
    for host in made:
        host.close()


def _name(content: bytes) -> str:
    return f"models/{hashlib.sha256(content).hexdigest()}.safetensors"


def test_one_host_holds_the_lease_until_it_is_released_or_expires(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert first.lease.try_acquire(ttl_s=60)
    first.lease.record_mirrored()
    assert not second.lease.try_acquire()
    assert second.lease.active_holder == "first"
    first.lease.renew(ttl_s=0.0)
    assert second.lease.try_acquire()
    assert (first.lease.epoch, second.lease.epoch) == (1, 2)
    with pytest.raises(LeaseLostError, match="epoch 1 is over"):
        first.lease.renew()
    second.lease.release()
    assert first.lease.try_acquire()
    assert first.lease.epoch == 3


def test_a_host_without_the_lease_writes_no_row_and_no_record(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    store, journal = first.take_over(), first.open_journal()
    first.record(journal, 1)
    store.record_event("kept", "", at=1.0)
    first.lease.renew(ttl_s=0.0)
    second.take_over()
    with pytest.raises(LeaseLostError):
        store.record_event("late", "", at=2.0)
    with pytest.raises(LeaseLostError):
        first.record(journal, 2)
    with pytest.raises(JournalError):
        first.record(journal, 3)
    assert second.list_records() == [1]
    events = Database.connect(second.url)
    with events.read() as connection:
        assert connection.exec_driver_sql("SELECT kind FROM events").scalars().all() == ["kept"]
    events.close()


def test_a_take_over_waits_for_the_transaction_under_way_and_for_no_frozen_one(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    store = first.take_over()
    first.lease.renew(ttl_s=0.0)
    taken = threading.Event()

    def take() -> None:
        second.take_over()
        taken.set()

    thread = threading.Thread(target=take)
    # Its end is what fails; it may be repeated, by a host that still holds the lease.
    with pytest.raises(StoreBusyError, match="idle"), store.database.write() as connection:  # noqa: PT012
        connection.exec_driver_sql("DELETE FROM events")
        thread.start()
        assert not taken.wait(1.0)
        assert taken.wait(10.0)  # this transaction does nothing, as one of a frozen process: the server ends it
    thread.join()
    assert second.lease.epoch == 2


def test_another_host_finds_the_directory_as_it_was_left(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    first, second = hosts
    model, later = b"model" * 100, b"later"
    first.write(_name(model), model)
    store, journal = first.take_over(), first.open_journal()
    first.write(f"{RUN}/guard.safetensors", b"old")
    first.record(journal, 1)
    first.write(f"{RUN}/guard.safetensors", b"new")
    first.write(f"{RUN}/gone", b"")
    first.record(journal, 2)
    (first.root / RUN / "gone").unlink()
    first.write(_name(later), later)
    store.record_event("named", "", at=1.0)  # a row may name the model
    first.write(f"{RUN}/unsynced", b"")
    second.write(f"{RUN}/stray", b"of an earlier time")
    second.write(f"{RUN}/journal/000009.wal", b"of an earlier time")
    first.lease.renew(ttl_s=0.0)
    second.take_over()
    found = {str(path.relative_to(second.root)) for path in second.root.rglob("*") if path.is_file()}
    kept = {f"{RUN}/stray", f"{RUN}/journal/000009.wal"}
    found -= {COPY_MARK, *(f"{REPLACED_FOLDER}/{path}" for path in kept)}
    assert (second.root / REPLACED_FOLDER / RUN / "stray").read_bytes() == b"of an earlier time"
    assert found == {_name(model), _name(later), f"{RUN}/guard.safetensors", f"{RUN}/journal/000001.wal"}
    assert (second.root / RUN / "guard.safetensors").read_bytes() == b"new"
    assert (second.root / _name(model)).read_bytes() == model
    assert second.list_records() == [1, 2]
    assert sorted(path.name for path in (tmp_path / "shared").glob("*/*")) == sorted(
        Path(_name(content)).stem for content in (model, later)
    )


def test_a_journal_cut_at_its_end_is_replaced(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    first.take_over()
    with first.open_journal() as journal:
        for number in (1, 2):
            first.record(journal, number)
    path = first.root / RUN / "journal" / "000001.wal"
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 1)
    with first.open_journal() as journal:
        first.record(journal, 3)
    first.lease.renew(ttl_s=0.0)
    second.take_over()
    assert second.list_records() == [1, 2]
    assert (second.root / RUN / "journal" / "000001.wal").read_bytes() == path.read_bytes()


def test_a_journal_whose_older_files_are_pruned_goes_on_with_its_numbers(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    first.take_over()
    with first.open_journal() as journal:
        for number in (1, 2, 3):
            first.record(journal, number)
        journal.record_checkpoint(CheckpointMark(sha256="0" * 64, last_record=3))
        journal.prune(journal.last_record)
    assert [path.name for path in (first.root / RUN / "journal").iterdir()] == ["000002.wal"]
    assert first.store is not None
    first.store.record_event("ended", "", at=1.0)
    first.lease.renew(ttl_s=0.0)
    second.take_over()
    with second.open_journal() as journal:
        assert journal.last_record == 4


def test_a_model_that_no_row_has_any_more_leaves_the_shared_folder(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    first, second = hosts
    store = first.take_over()
    kept, dropped = (first.write(_name(content), content) for content in (b"kept", b"dropped"))
    store.record_event("one", "", at=1.0)
    dropped.unlink()
    store.record_event("two", "", at=1.0)
    (tmp_path / "shared" / "1" / ("f" * 64)).write_bytes(b"of a host that died between file and row")
    first.lease.renew(ttl_s=0.0)
    second.take_over()
    assert [path.name for path in (tmp_path / "shared").glob("*/*")] == [kept.stem]


class FailingObjects(FolderObjects):
    """Shared objects of a storage that cannot be reached for a while, or replaces what it is to save."""

    fault: EdgeflError | None = None
    replacement: bytes | None = None

    def save(self, key: str, path: Path, sha256: str) -> None:
        if self.replacement is not None:
            fresh = path.with_name(".fresh")
            fresh.write_bytes(self.replacement)
            fresh.replace(path)
            self.replacement = None
        if self.fault is not None:
            raise self.fault
        super().save(key, path, sha256)


@pytest.mark.parametrize("fault", [NetworkError("unreachable"), NotAllowedError("no"), DataError("nonsense")])
def test_a_storage_that_fails_for_a_while_is_waited_for(
    hosts: tuple[Host, Host], tmp_path: Path, fault: EdgeflError
) -> None:
    first, second = hosts
    objects = FailingObjects(tmp_path / "shared")
    first.mirror = DirectoryMirror(first.root, first.lease, objects, clock_ns=lambda: first.now_ns)
    store, journal = first.take_over(), first.open_journal()
    model = first.write(_name(b"model"), b"model")
    objects.fault = fault
    for write in (lambda: store.record_event("named", "", at=1.0), lambda: first.record(journal, 1)):
        with pytest.raises(RETRYABLE_STORE_ERRORS, match=str(fault)):
            write()
    objects.fault = None
    with first.open_journal() as reopened:
        first.record(reopened, 2)
    first.lease.renew(ttl_s=0.0)
    second.take_over()
    assert (second.root / "models" / model.name).read_bytes() == b"model"
    assert len(second.list_records()) == 2


def test_a_file_that_is_replaced_while_it_is_sent_is_sent_as_it_is_then(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    first, second = hosts
    objects = FailingObjects(tmp_path / "shared")
    first.mirror = DirectoryMirror(first.root, first.lease, objects, clock_ns=lambda: first.now_ns)
    store = first.take_over()
    first.write(f"{RUN}/large", b"a" * (MAX_INLINE_BYTES + 1))
    objects.replacement = b"b" * (MAX_INLINE_BYTES + 1)
    for kind in ("one", "two"):
        store.record_event(kind, "", at=1.0)
    first.lease.renew(ttl_s=0.0)
    second.take_over()
    assert (second.root / RUN / "large").read_bytes()[:1] == b"b"


def test_a_host_never_takes_over_what_the_first_one_has_not_finished_saving(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert first.lease.try_acquire(ttl_s=0.0)
    with pytest.raises(StoreError, match="first ended before its directory"):
        second.lease.try_acquire()
    assert first.lease.try_acquire()


def test_a_directory_of_the_same_name_on_another_host_is_another_host(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    second.lease.holder = first.lease.holder
    assert first.lease.try_acquire(ttl_s=0.0)
    with pytest.raises(StoreError, match="first ended before its directory"):
        second.lease.try_acquire()


def test_a_host_of_another_fleet_changes_nothing(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    first, _ = hosts
    first.take_over()
    first.lease.renew(ttl_s=0.0)
    stranger = Host(first.url, tmp_path / "stranger", tmp_path / "shared", ca="d" * 64)
    with pytest.raises(UsageError, match="belongs to a fleet whose CA"):
        stranger.lease.try_acquire()
    stranger.close()


def test_a_lease_that_is_withdrawn_leaves_another_host_to_be_the_first(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert first.lease.try_acquire()
    first.lease.withdraw()
    assert second.lease.try_acquire()


def test_what_a_copy_of_the_mirror_has_too_much_is_removed_and_not_kept(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    first.take_over()
    second.mirror.load_files()
    second.write(f"{RUN}/stray", b"")
    second.mirror.load_files()
    assert not (second.root / RUN / "stray").exists()
    assert not (second.root / REPLACED_FOLDER).exists()


@pytest.mark.parametrize("has_model", [False, True])
def test_a_directory_without_the_models_of_the_store_is_not_the_first_mirror(
    hosts: tuple[Host, Host], tmp_path: Path, has_model: bool
) -> None:
    url = hosts[0].url
    init = init_directory(tmp_path / "state", hosts=["127.0.0.1"])
    directory = replace(init, store=url, shared_models=f"file://{tmp_path / 'shared'}")
    with Store.open(url) as store:
        store.add_run(run_id="r", name="n", task="t", strategy="s", config={}, seed=1, submitted_at=1.0)
        sha256 = hashlib.sha256(b"model").hexdigest()
        row = SavedModelRow(version=1, round=1, last_record=1, sha256=sha256, bytes_file=5, at=1.0)
        store.record_saved_model("r", row)
        if has_model:
            (directory.models / f"{sha256}.safetensors").write_bytes(b"model")
        with Failover(directory, on_lost=_never) as failover:
            assert failover.wait_for_lease(threading.Event())
            if has_model:
                failover.open(store)
            else:
                with pytest.raises(UsageError, match=r"names model .* of run r, which is not in"):
                    failover.open(store)
            store.database.set_fence(None)
    if has_model:
        with pytest.raises(UsageError, match="belongs to a fleet whose CA"):
            hosts[0].lease.try_acquire()
    else:
        assert hosts[0].lease.try_acquire()


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_host_that_stands_by_is_ready_to_the_service_manager(
    hosts: tuple[Host, Host], postgres: Any, tmp_path: Path, is_moved: bool
) -> None:
    former = postgres[0].url(postgres[0].new_database()) if is_moved else hosts[0].url
    directory = set_store(init_directory(tmp_path / "state", hosts=["127.0.0.1"]), former)
    set_shared_models(directory, f"file://{tmp_path / 'shared'}")
    other = Lease.open(hosts[0].url, "other", host_id="o", ca_fingerprint=directory.compute_ca_fingerprint())
    assert other.try_acquire(ttl_s=300)
    other.record_mirrored()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        command = [sys.executable, "-m", "edgefl", "coordinator", "start", "--dir", str(directory.root)]
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "EDGEFL_STORE": hosts[0].url}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            assert [manager.recv(100) for _ in range(2)] == [b"READY=1", b"STATUS=standing by"]
            assert any("standing by: other is active" in line for line in process.stderr)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
    other.close()


def test_a_renewal_that_hangs_ends_the_host_in_time(
    hosts: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = init_directory(tmp_path / "state", hosts=["127.0.0.1"])
    directory = replace(directory, store=hosts[0].url, shared_models=f"file://{tmp_path / 'shared'}")
    lost, hanging = threading.Event(), threading.Event()
    monkeypatch.setattr(Lease, "renew", lambda _: hanging.wait(60))
    with Failover(directory, on_lost=lambda _: lost.set()) as failover:
        assert failover.wait_for_lease(threading.Event())
        assert lost.wait(15)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 15
    hanging.set()


def test_a_path_outside_the_directory_is_refused(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    store = first.take_over()
    for path in ("../settings.toml", "settings.toml", "runs/../../x", "/etc/x"):
        with store.database.write() as connection:
            connection.exec_driver_sql("DELETE FROM mirrored_files")
            connection.exec_driver_sql(
                "INSERT INTO mirrored_files VALUES (%(path)s, %(sha)s, '', '')",
                {"path": path, "sha": hashlib.sha256(b"").hexdigest()},
            )
        with pytest.raises(StoreError, match="no file of a coordinator's directory"):
            second.mirror.load_files()


def test_a_store_in_a_file_has_no_lease(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--store postgresql://"):
        Lease.open(tmp_path / "edgefl.db", "host", host_id="1", ca_fingerprint="2")
