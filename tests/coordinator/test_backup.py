from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import stat
import tarfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edgefl.coordinator import backup as backups
from edgefl.coordinator.backup import MANIFEST, create_backup, restore_backup
from edgefl.coordinator.directory import CoordinatorDirectory, init_directory
from edgefl.core.errors import NotFoundError, StoreError, StoreTooNewError, UsageError
from edgefl.storage.checkpoints import list_checkpoints, load_state, prune_checkpoints, save_state
from edgefl.storage.journal.file_format import read_records
from edgefl.storage.journal.record_encoding import CheckpointMark
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.store import Store


@pytest.fixture
def directory(tmp_path: Path) -> CoordinatorDirectory:
    """One that is set up, with a store, a model, a run's journal and what does not belong into a backup."""
    made = init_directory(tmp_path / "c", hosts=["pi.lan"], fleet="lab", port=8123)
    with Store.open(made.database) as store:
        store.record_event("hello", "kept", at=1.0)
    (made.models / "a.safetensors").write_bytes(b"model")
    folder = made.runs / "r1" / "journal"
    folder.parent.mkdir(mode=0o700)
    with WalJournal(folder, lambda body: {}) as wal:
        for version in range(1, 4):
            wal.record_aggregation(version, [f"a{version}"])
    (made.broker / "mosquitto.conf").write_text("made anew")
    (made.root / "evaluator").mkdir()
    (made.root / "evaluator" / "device.json").write_text("{}")
    (made.root / "evaluator.log").write_text("not kept")
    return made


def content(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as members:
        return {m.name: members.extractfile(m).read() for m in members}  # type: ignore[union-attr]  # all are files


def repack(archive: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(archive, "w:gz") as members:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            members.addfile(member, io.BytesIO(body))


def test_what_was_backed_up_comes_back_and_nothing_else(directory: CoordinatorDirectory, tmp_path: Path) -> None:
    archive = tmp_path / "b.tar.gz"
    create_backup(directory, archive, store=directory.database)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    restored, manifest = restore_backup(archive, tmp_path / "new")
    assert (restored.fleet, restored.hosts, restored.port) == ("lab", ("pi.lan",), 8123)
    for name in ("ca.pem", "ca.key", "server.key", "coordinator.key", "settings.toml", "models/a.safetensors"):
        assert (restored.root / name).read_bytes() == (directory.root / name).read_bytes(), name
    assert [r.number for r in read_records(restored.runs / "r1" / "journal")] == [1, 2, 3]
    with closing(sqlite3.connect(restored.database)) as connection:
        assert connection.execute("SELECT message FROM events").fetchall() == [("kept",)]
    names = {path.relative_to(restored.root).as_posix() for path in restored.root.rglob("*") if path.is_file()}
    assert not names & {"lock", "backup.lock", "evaluator.log", "broker/mosquitto.conf", MANIFEST}
    assert "evaluator/device.json" in names
    assert "runs/r1/new-incarnation" in names, "it does not go on as if nothing had happened since"
    assert set(manifest.files) <= names
    for path in [restored.root, *restored.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert not list(directory.root.glob(".backup-*"))
    assert not list(tmp_path.glob(".new*"))


def test_the_archive_says_what_it_holds_and_that_keys_are_in_it(
    directory: CoordinatorDirectory, tmp_path: Path
) -> None:
    create_backup(directory, tmp_path / "b.tar.gz", store=directory.database)
    files = content(tmp_path / "b.tar.gz")
    manifest = json.loads(files[MANIFEST])
    assert list(files)[-1] == MANIFEST
    assert (manifest["v"], manifest["fleet"], manifest["holds_keys"]) == (1, "lab", True)
    assert "key" in manifest["notice"]
    for name, entry in manifest["files"].items():
        assert entry == {"sha256": hashlib.sha256(files[name]).hexdigest(), "num_bytes": len(files[name])}


def test_models_can_be_left_out_and_checkpoints_cannot(directory: CoordinatorDirectory, tmp_path: Path) -> None:
    save_state(directory.runs / "r1" / "checkpoints", backups.BackupManifest(
        fleet="f", version="1", created_at=1.0, revision="1", has_models=True), 2)  # fmt: skip
    create_backup(directory, tmp_path / "b.tar.gz", store=directory.database, with_models=False)
    restored, manifest = restore_backup(tmp_path / "b.tar.gz", tmp_path / "new")
    assert not manifest.has_models
    assert list(restored.models.iterdir()) == []
    assert load_state(restored.runs / "r1" / "checkpoints", backups.BackupManifest).fleet == "f"


def test_a_store_on_a_server_is_left_out_and_restored_without(
    directory: CoordinatorDirectory, tmp_path: Path
) -> None:
    assert create_backup(directory, tmp_path / "b.tar.gz", store=None).revision is None
    restored, manifest = restore_backup(tmp_path / "b.tar.gz", tmp_path / "new")
    assert manifest.revision is None
    assert not restored.database.exists()


def test_a_backup_overwrites_nothing_and_does_not_lie_in_the_directory(
    directory: CoordinatorDirectory, tmp_path: Path
) -> None:
    (tmp_path / "b.tar.gz").write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        create_backup(directory, tmp_path / "b.tar.gz", store=directory.database)
    with pytest.raises(UsageError, match="elsewhere"):
        create_backup(directory, directory.root / "models" / "b.tar.gz", store=directory.database)
    assert (tmp_path / "b.tar.gz").read_text() == "precious"


def test_a_restore_wants_an_empty_place(directory: CoordinatorDirectory, tmp_path: Path) -> None:
    create_backup(directory, tmp_path / "b.tar.gz", store=directory.database)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        restore_backup(tmp_path / "b.tar.gz", tmp_path / "used")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir(mode=0o755)
    restore_backup(tmp_path / "b.tar.gz", tmp_path / "empty")
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    with pytest.raises(NotFoundError):
        restore_backup(tmp_path / "none.tar.gz", tmp_path / "other")


def _drop(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.pop(name) and None


def _change(name: str) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        body = bytearray(files[name])
        body[len(body) // 2] ^= 1
        files[name] = bytes(body)

    return change


def _add(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.update({name: b"x"})


def _manifest(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        files[MANIFEST] = json.dumps({**json.loads(files[MANIFEST]), **changes}).encode()

    return change


@pytest.mark.parametrize(
    ("damage", "kind", "told"),
    [
        (_change("edgefl.db"), StoreError, "edgefl.db is damaged"),
        (_change("ca.key"), StoreError, "ca.key is damaged"),
        (_drop("server.key"), StoreError, "server.key is missing"),
        (_drop(MANIFEST), StoreError, "no whole backup"),
        (_add("more"), StoreError, "not in its manifest"),
        (_add("../outside"), StoreError, "no backup of edgefl"),
        (_add("/tmp/outside-edgefl"), StoreError, "no backup of edgefl"),
        (_manifest(v=2), StoreTooNewError, "newer edgefl"),
        (_manifest(revision="9999"), StoreTooNewError, "revision 9999"),
        (_manifest(files=3), StoreError, "manifest cannot be read"),
    ],
)
def test_a_backup_that_is_not_right_is_refused_and_leaves_nothing(
    directory: CoordinatorDirectory, tmp_path: Path, damage: Any, kind: type[Exception], told: str
) -> None:
    archive = tmp_path / "b.tar.gz"
    create_backup(directory, archive, store=directory.database)
    files = content(archive)
    damage(files)
    if MANIFEST in files:
        files[MANIFEST] = files.pop(MANIFEST)
    repack(archive, files)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind, match=told):
        restore_backup(archive, tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == before


def test_a_backup_that_was_cut_off_anywhere_is_refused(directory: CoordinatorDirectory, tmp_path: Path) -> None:
    archive = tmp_path / "b.tar.gz"
    create_backup(directory, archive, store=directory.database)
    whole = archive.read_bytes()
    # The archive's own end is 10 kB of zeros, 60 bytes when they are packed: nothing is lost with them.
    for length in [0, 1, 20, *range(200, len(whole) - 100, len(whole) // 15), len(whole) - 100]:
        archive.write_bytes(whole[:length])
        with pytest.raises(StoreError):
            restore_backup(archive, tmp_path / "new")
        assert not (tmp_path / "new").exists(), length


def test_a_store_whose_pages_are_damaged_is_not_backed_up(directory: CoordinatorDirectory, tmp_path: Path) -> None:
    body = bytearray(directory.database.read_bytes())
    body[4096 * 3 : 4096 * 3 + 2000] = os.urandom(2000)
    directory.database.write_bytes(body)
    with pytest.raises(StoreError, match=r"damaged|malformed"):
        create_backup(directory, tmp_path / "b.tar.gz", store=directory.database)
    assert not (tmp_path / "b.tar.gz").exists()


def test_what_a_killed_backup_left_goes_with_the_next(directory: CoordinatorDirectory, tmp_path: Path) -> None:
    left = directory.root / ".backup-old"
    left.mkdir()
    (left / "ca.key").write_bytes(b"k")
    manifest = create_backup(directory, tmp_path / "b.tar.gz", store=directory.database)
    assert not left.exists()
    assert not any("backup-old" in name for name in manifest.files)


def test_two_backups_at_a_time_are_one_too_many(directory: CoordinatorDirectory, tmp_path: Path) -> None:
    with (
        backups._stage(directory),
        pytest.raises(StoreError, match="another backup"),
    ):
        create_backup(directory, tmp_path / "b.tar.gz", store=directory.database)


def test_a_run_that_changes_while_it_is_linked_is_linked_again(
    directory: CoordinatorDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, link_tree = directory.runs / "busy" / "journal", backups._link_tree
    journal.mkdir(mode=0o700, parents=True)
    (journal / "1").write_text("x")

    def link_and_write(source: Path, destination: Path) -> None:
        link_tree(source, destination)
        if source == journal.parent:
            (journal / "2").write_text("x")

    monkeypatch.setattr(backups, "_link_tree", link_and_write)
    backups._link_runs(directory.runs, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy" / "busy" / "journal").iterdir()) == ["1", "2"]


def test_store_journal_and_checkpoints_fit_each_other_while_a_run_writes_and_prunes_all(
    directory: CoordinatorDirectory, tmp_path: Path
) -> None:
    stop, errors, folder = threading.Event(), list[Exception](), directory.runs / "busy"
    folder.mkdir(mode=0o700)
    (folder / "journal").mkdir(mode=0o700)

    def run() -> None:
        version = 0
        try:
            with (
                WalJournal(folder / "journal", lambda body: {}, max_file_bytes=2000) as wal,
                Store.open(directory.database) as store,
            ):
                while not stop.is_set():
                    for _ in range(20):
                        version += 1
                        wal.record_aggregation(version, [f"a{version}"])
                    wal.commit()
                    store.record_event("version", str(version), at=float(version))
                    state = backups.BackupManifest(
                        fleet="f", version=str(version), created_at=1.0, revision="1", has_models=True
                    )
                    saved = save_state(folder / "checkpoints", state, wal.last_record)
                    wal.record_checkpoint(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))
                    wal.prune(prune_checkpoints(folder / "checkpoints")[-1].last_record)
                    stop.wait(0.003)  # no run writes without a pause, and a backup needs one in fifty tries
        except Exception as error:  # noqa: BLE001 the test's thread has to hear of it
            errors.append(error)

    writer = threading.Thread(target=run)
    writer.start()
    try:
        for number in range(16):
            archive = tmp_path / f"{number}.tar.gz"
            create_backup(directory, archive, store=directory.database)
            restored, _ = restore_backup(archive, tmp_path / f"new-{number}")
            kept = restored.runs / "busy"
            with closing(sqlite3.connect(restored.database)) as connection:
                versions = "SELECT coalesce(max(CAST(message AS INTEGER)), 0) FROM events WHERE kind = 'version'"
                (known,) = connection.execute(versions).fetchone()
            for checkpoint in list_checkpoints(kept / "checkpoints"):
                state = load_state(kept / "checkpoints", backups.BackupManifest, checkpoint)
                assert int(state.version) <= known, "the store knows of what the run goes on from"
                behind = [record.number for record in read_records(kept / "journal", after=checkpoint.last_record)]
                first = checkpoint.last_record + 1
                assert behind == list(range(first, first + len(behind)))
    finally:
        stop.set()
        writer.join()
    assert errors == []
