"""Opening, upgrading, refusing, and what happens when a disk is full or a database is locked."""

import errno
import os
import re
import sqlite3
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import quote

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, event, inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable
from synced_wal import SyncedWal

import edgefl.storage.database as database_module
from edgefl.core.errors import StoreBusyError, StoreError, StoreFullError, StoreTooNewError
from edgefl.storage.database import FIRST_REVISION, SCHEMA_REVISION, Database
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store
from edgefl.storage.tables import Base


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def make_alembic_config():
    config = Config()
    config.set_main_option("script_location", str(Path(database_module.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def test_migrations_make_exactly_the_tables_of_the_models(tmp_path):
    database = Database.open(tmp_path / "edgefl.db")
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    database.close()


def test_the_program_knows_its_newest_migration():
    scripts = ScriptDirectory.from_config(make_alembic_config())
    assert (scripts.get_bases(), scripts.get_current_head()) == ([FIRST_REVISION], SCHEMA_REVISION)


def insert(connection: Connection, table: str, **values: object) -> None:
    """Inserts a row, with 0 in columns that need a value and get none."""
    columns = inspect(connection).get_columns(table)
    row = {column["name"]: 0 for column in columns if not column["nullable"] and column["name"] != "id"} | values
    marks = ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})"), row)


def test_a_store_of_the_first_revision_is_upgraded_and_keeps_its_rows(tmp_path):
    path = tmp_path / "edgefl.db"
    config = make_alembic_config()
    with create_engine(f"sqlite:///{path}").begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, FIRST_REVISION)
        insert(connection, "runs", run_id="r", config="{}")
        insert(connection, "rounds", run_id="r", round=1, bytes_up=7, facts='{"disagreement": 0.5}')
        for last_record in (10, 20):  # a version saved twice
            insert(connection, "checkpoints", run_id="r", version=3, last_record=last_record)
    with pytest.raises(StoreError, match=f"is of revision {FIRST_REVISION}, this program reads {SCHEMA_REVISION}"):
        Store.open(path, read_only=True)
    with Store.open(path) as store:
        assert [(row["bytes_up"], row["facts"], row["metrics"]) for row in read_history(store, "rounds")] == [
            (7, {"disagreement": 0.5}, None)
        ]
        assert [(row.version, row.last_record) for row in store.list_saved_models("r")] == [(3, 20)]
        store.set_round_metrics("r", 1, {"metrics": {"rmse": 2.5}})
        assert store.get_newest_measured_round("r", "metrics")["metrics"] == {"rmse": 2.5}
        with store.database.read() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_tables_are_possible_in_postgresql():
    for table in Base.metadata.sorted_tables:
        assert str(CreateTable(table).compile(dialect=postgresql.dialect())).strip().startswith("CREATE TABLE")


def test_a_new_store_is_for_its_owner_alone(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as store:
        store.record_event("test", "something", at=1.0)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes) >= {"edgefl.db", "edgefl.db-wal"}
    assert set(modes.values()) == {0o600}


def test_a_reader_finds_what_was_made_by_path_or_url_and_neither_writes_nor_makes_a_store(tmp_path):
    path = tmp_path / "a b?c#%20.db"
    with pytest.raises(StoreError, match="no store at"):
        Store.open(path, read_only=True)
    assert list(tmp_path.iterdir()) == []
    with Store.open(path) as store, store.batch():
        store.add_run(run_id="r", name="n", task="t", strategy="s", config={}, seed=1, submitted_at=1.0)
        assert store.get_run("r").name == "n"
    with Store.open(f"sqlite:///{tmp_path}/{quote(path.name)}") as store:
        assert store.get_run("r").name == "n"
    with Store.open(path, read_only=True) as store:
        assert store.get_run("r").name == "n"
        with pytest.raises(StoreError, match="reading only"):
            store.record_event("test", "something", at=1.0)


def test_refuses_a_database_newer_than_the_program_and_leaves_it_alone(tmp_path):
    path = tmp_path / "edgefl.db"
    Store.open(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '0999'")
    raw.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreTooNewError) as error:
            Store.open(path, read_only=read_only)
        assert re.search(rf"0999.*{SCHEMA_REVISION}", one_line(error))
    assert path.read_bytes() == before


def test_refuses_a_file_that_is_no_database_and_one_of_another_program(tmp_path):
    letter, recipes = tmp_path / "letter.db", tmp_path / "recipes.db"
    letter.write_text("a letter to my aunt\n" * 500)
    with sqlite3.connect(recipes) as raw:
        raw.execute("CREATE TABLE recipes (name TEXT)")
    raw.close()
    for path, words in ((letter, "is not a database"), (recipes, "recipes")):
        with pytest.raises(StoreError) as error:
            Store.open(path)
        assert words in one_line(error)
    assert letter.read_text().startswith("a letter")


@pytest.mark.parametrize("read_only", [False, True])
def test_says_in_one_line_that_the_directory_is_missing(tmp_path, read_only):
    with pytest.raises(StoreError) as error:
        Store.open(tmp_path / "nowhere" / "edgefl.db", read_only=read_only)
    assert "nowhere" in one_line(error)


@pytest.mark.parametrize("url", ["sqlite://", "nonsense://x/y", "postgresql+nodriver://h/d", "://"])
def test_says_in_one_line_that_a_url_cannot_be_used(url):
    with pytest.raises(StoreError) as error:
        Store.open(url)
    one_line(error)


def test_a_full_database_says_so_loses_nothing_and_goes_on_when_there_is_room(store):
    limit = {"pages": 120}

    @event.listens_for(store.database.engine, "begin")
    def _limit(connection):
        connection.exec_driver_sql(f"PRAGMA max_page_count = {limit['pages']}")

    def write_until_full():
        while True:
            store.record_event("test", "x" * 5000, at=1.0)
            written.append(1)

    written = []
    with pytest.raises(StoreFullError) as error:
        write_until_full()
    assert "disk is full" in one_line(error)
    assert written
    limit["pages"] = 100_000
    store.record_event("test", "room again", at=1.0)
    with store.database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM events").scalar() == len(written) + 1


@pytest.mark.extended
def test_a_file_system_without_room_is_named_as_such(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from edgefl.core.errors import StoreFullError
        from edgefl.storage.store import Store
        with Store.open(sys.argv[1] + "/edgefl.db") as store:
            try:
                while True:
                    store.record_event("test", "x" * 100_000, at=1.0)
            except StoreFullError as error:
                print("FULL", error)
        """
    )
    mount = tmp_path / "small"
    mount.mkdir()
    command = f'mount -t tmpfs -o size=2m none "{mount}" && exec "{sys.executable}" -c "$0" "{mount}"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", command, script],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if "unshare" in done.stderr or "mount" in done.stderr.split("Traceback")[0]:
        pytest.skip(f"no small file system can be mounted, {done.stderr.strip()}: sudo make test-all")
    assert done.stdout.startswith("FULL no room"), done.stderr
    assert done.returncode == 0, done.stderr


def test_a_locked_store_is_named_as_such_after_a_while(tmp_path, store):
    @event.listens_for(store.database.engine, "connect")
    def _hurry(connection, _record):
        connection.execute("PRAGMA busy_timeout = 100")

    store.database.engine.dispose()
    other = sqlite3.connect(tmp_path / "edgefl.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusyError, match="in use by another program") as error:
        store.record_event("test", "something", at=1.0)
    one_line(error)
    other.execute("ROLLBACK")
    other.close()
    store.record_event("test", "something", at=1.0)


def test_a_batch_is_kept_whole_or_not_at_all(store):
    def fail_halfway():
        with store.batch():
            store.record_event("test", "first", at=1.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    with store.batch():
        store.record_event("test", "second", at=1.0)
        store.record_event("test", "third", at=1.0)
    with store.database.read() as connection:
        kept = connection.exec_driver_sql("SELECT message FROM events ORDER BY id").scalars().all()
    assert kept == ["second", "third"]


@pytest.mark.parametrize("is_linked", [False, True])
def test_what_was_written_survives_a_power_cut_after_a_sync(tmp_path, monkeypatch, is_linked):
    path = tmp_path / "edgefl.db"
    with Store.open(path) as store:
        synced = SyncedWal(store, monkeypatch)
        store.record_event("test", "before", at=1.0)
        (tmp_path / "link.db").symlink_to(path)
        if is_linked:
            with Store.open(tmp_path / "link.db") as linked:
                linked.sync()
        else:
            store.sync()
        store.record_event("test", "behind", at=2.0)
        with Store.open(synced.cut(tmp_path / "cut.db")) as cut, cut.database.read() as connection:
            assert connection.exec_driver_sql("SELECT message FROM events").scalars().all() == ["before"]


def test_a_store_whose_wal_is_gone_has_nothing_to_sync(tmp_path, store):
    store.close()
    assert not (tmp_path / "edgefl.db-wal").exists()
    store.sync()


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StoreFullError), (errno.EIO, StoreError)])
def test_a_disk_that_fails_a_sync_is_named_with_the_file(store, monkeypatch, number, kind):
    def fail(_handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", fail)
    store.record_event("test", "something", at=1.0)
    with pytest.raises(StoreError, match=r"edgefl\.db-wal cannot be written") as error:
        store.sync()
    assert type(error.value) is kind
    one_line(error)


def test_a_refused_call_inside_a_batch_leaves_the_rest_of_it(store):
    with store.batch():
        store.record_event("test", "kept", at=1.0)
        with pytest.raises(StoreError):
            store.add_run(run_id="r", name="n", task="t", strategy="s", config={}, seed=1, submitted_at=None)
    with store.database.read() as connection:
        assert connection.exec_driver_sql("SELECT message FROM events").scalars().all() == ["kept"]


@pytest.mark.extended
def test_two_programs_may_open_a_new_store_at_once(tmp_path):
    script = "import sys; from edgefl.storage.store import Store; Store.open(sys.argv[1]).close()"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "edgefl.db")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in started:
        assert process.communicate(timeout=60)[1] == b""
        assert process.returncode == 0


def test_refuses_a_store_older_than_the_first_revision_and_leaves_it_alone(tmp_path):
    path = tmp_path / "edgefl.db"
    Store.open(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '0010'")
    raw.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError) as error:
            Store.open(path, read_only=read_only)
        assert re.search(rf"before 0.2 .*0010.*{FIRST_REVISION}", one_line(error))
    assert path.read_bytes() == before


def test_a_second_opening_in_a_process_drops_no_lock_of_the_first(tmp_path):
    path = tmp_path / "edgefl.db"
    other = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM events'); c.close()"
    with Store.open(path) as store:
        store.record_event("test", "something", at=1.0)
        Store.open(path).close()
        subprocess.run([sys.executable, "-c", other, str(path)], check=True)
        # Without a lock the other program takes itself for the last one, and removes the log of those that go on.
        assert Path(f"{path}-wal").exists()


@pytest.fixture
def damaged_path(tmp_path):
    """A store whose events cannot be read: zeros in place of the middle of its file."""
    path = tmp_path / "edgefl.db"
    with Store.open(path) as store:
        for _ in range(2000):
            store.record_event("test", "x" * 200, at=1.0)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size // 4))
    return path


def test_damage_is_found_when_a_store_is_checked(damaged_path):
    with Store.open(damaged_path) as store:
        with pytest.raises(StoreError, match="is damaged; restore a backup") as error:
            store.database.check()
        assert store.database.damage is error.value


def test_damage_met_by_any_query_is_remembered(damaged_path):
    with Store.open(damaged_path) as store:
        with pytest.raises(StoreError, match="is damaged"):
            store.database.read_rows(text("SELECT sum(length(message)) FROM events"))
        assert store.database.damage is not None


def test_the_check_of_a_large_store_ends_in_time_and_finds_no_damage(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as store:
        for _ in range(300):
            store.record_event("test", "x", at=1.0)
        store.database.check(timeout_s=0.0)
        store.database.check()
        assert store.database.damage is None
