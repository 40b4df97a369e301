"""A database connection: opening, upgrading, transactions, and driver errors as errors of edgefl.

Writes run one at a time. Those that no journal could rebuild (devices, tokens, runs) are durable when they
return; the others are so at the latest with the next durable one (SQLite's synchronous FULL and NORMAL), or when
`sync` returns.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

from sqlalchemy import Connection, Engine, Executable, create_engine, event, inspect, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError

from edgefl.core.errors import (
    MissingPackageError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreTooNewError,
    format_install_command,
)
from edgefl.system.atomic_files import DISK_FULL_ERRNOS, make_store_error

_MIN_FREE_BYTES = 64 * 1024
_POSTGRES_DISK_FULL = "53100"
_POSTGRES_LOCKED = ("55P03", "40P01")
_POSTGRES_IDLE_TIMEOUT = "25P03"
_SQLITE_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED")
_SQLITE_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_ADVICE = {
    "SQLITE_NOTADB": "is not a database; move the file away or name another place",
    "SQLITE_CORRUPT": "is damaged; restore a backup",
    "SQLITE_READONLY": "cannot be written; check the file's owner and mode",
    "SQLITE_CANTOPEN": "cannot be opened; check that the directory exists and is yours",
}

FIRST_REVISION, SCHEMA_REVISION = "0011", "0013"
"""The oldest and the newest revision in `migrations/`; a test compares them."""
BUSY_TIMEOUT_S = 10.0
POSTGRES_DRIVER = "postgresql+psycopg"
CONNECT_TIMEOUT_S = 10
"""Per address of a database server."""
WAL_RETRY_S = 0.02
CHECK_TIMEOUT_S = 1.5
_NO_OPTIONS: Mapping[str, int] = MappingProxyType({})
_VERSION_TABLE = "alembic_version"


@contextmanager
def translate_errors(location: str) -> Iterator[None]:
    """Raises the driver's errors about the database at `location` as `StoreError` or one of its kinds."""
    try:
        yield
    except DBAPIError as error:
        raise _translate_error(error, location) from error
    except SQLAlchemyError as error:
        raise StoreError(f"store {location}: {_first_line(error)}") from error


@contextmanager
def translate_disk_full(location: str) -> Iterator[None]:
    """Raises an `OSError` that means "no room" as `StoreFullError`; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise StoreFullError(
            f"no room to write {location} ({error.strerror}); free some space and try again"
        ) from error


def _is_damage(error: StoreError) -> bool:
    cause = getattr(error.__cause__, "orig", None)
    return getattr(cause, "sqlite_errorname", "").startswith(_SQLITE_DAMAGED)


def _translate_error(error: DBAPIError, location: str) -> StoreError:
    cause = error.orig
    name = getattr(cause, "sqlite_errorname", "")
    state = getattr(cause, "sqlstate", None)
    # SQLite says no more than "I/O error" when its -shm file finds no room.
    is_full = name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and not _has_free_space(location))
    if is_full or state == _POSTGRES_DISK_FULL:
        return StoreFullError(f"no room to write the store {location}: disk is full; free some space and try again")
    if name.startswith(_SQLITE_LOCKED) or state in _POSTGRES_LOCKED:
        return StoreBusyError(
            f"store {location} is in use by another program; stop that and try again ({_first_line(cause)})"
        )
    if state == _POSTGRES_IDLE_TIMEOUT:  # a host of several that still holds its lease may repeat it
        return StoreBusyError(
            f"store {location} ended a transaction in which this host was idle for too long; it is repeated "
            f"({_first_line(cause)})"
        )
    for prefix, advice in _ADVICE.items():
        if name.startswith(prefix):
            return StoreError(f"store {location} {advice} ({_first_line(cause)})")
    return StoreError(f"store {location}: {_first_line(cause)}")


def _has_free_space(path: str) -> bool:
    try:
        disk = os.statvfs(Path(path).parent)
    except OSError:
        return True
    return disk.f_bavail * disk.f_frsize >= _MIN_FREE_BYTES


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class CommitCounter(Protocol):
    """Counts durable transactions in two places; see `storage.lineage`."""

    def count(self, connection: Connection) -> int: ...
    def save(self, num_commits: int) -> None: ...


class WriteFence(Protocol):
    """Takes part in every transaction that writes; see `storage.mirror`.

    `prepare` is called before it starts, `check` as its first statement, and `finish` after its commit. What the
    first two raise prevents it.
    """

    def prepare(self) -> None: ...
    def check(self, connection: Connection) -> None: ...
    def finish(self) -> None: ...


class Database:
    """An open database. Thread-safe; `batch` makes one transaction of the calls inside it.

    `damage` is the first error that said that its file is damaged, whoever met it.
    """

    def __init__(self, engine: Engine, *, location: str, read_only: bool) -> None:
        self.engine = engine
        self.location = location
        self.read_only = read_only
        self._write_engines = {
            durable: engine.execution_options(edgefl_writes=True, edgefl_durable=durable) for durable in (False, True)
        }
        self._write_lock = threading.RLock()
        self._commit_counter: CommitCounter | None = None
        self._fence: WriteFence | None = None
        self.damage: StoreError | None = None
        self._thread_batch = threading.local()

    @classmethod
    def open(cls, url_or_path: str | Path, *, read_only: bool = False) -> Self:
        """Returns the database, created or upgraded when needed.

        Args:
            url_or_path: a file (SQLite), or an SQLAlchemy URL.
            read_only: reads an existing store, also during concurrent writes; never upgrades.

        Raises:
            StoreTooNewError: a newer edgefl wrote it.
            StoreError: it cannot be opened, or is not an edgefl store.
        """
        database = cls.connect(url_or_path, read_only=read_only)
        try:
            with translate_errors(database.location):
                database._upgrade_if_needed()  # noqa: SLF001 our own
        except BaseException:  # an interrupt too: its connections are closed
            database.close()
            raise
        return database

    @classmethod
    def connect(
        cls, url_or_path: str | Path, *, read_only: bool = False, connect_options: Mapping[str, int] = _NO_OPTIONS
    ) -> Self:
        """Returns the database as `open` does, with whatever schema it has.

        Of a database server, the connections have these options of libpq.
        """
        url = _parse_url(url_or_path)
        is_sqlite = url.get_backend_name() == "sqlite"
        location = str(url.database) if is_sqlite else url.render_as_string(hide_password=True)
        if is_sqlite:
            _prepare_file(Path(location), read_only=read_only)
        engine = _make_engine(url, read_only=read_only, connect_options=connect_options)
        return cls(engine, location=location, read_only=read_only)

    def close(self) -> None:
        self.engine.dispose()

    def set_commit_counter(self, counter: CommitCounter | None) -> None:
        """Sets the counter of durable transactions; on return none uses the former one."""
        with self._write_lock:
            self._commit_counter = counter

    def set_fence(self, fence: WriteFence | None) -> None:
        """Sets the fence of all transactions that write; on return none uses the former one."""
        with self._write_lock:
            self._fence = fence

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yields a connection with one snapshot of the database throughout."""
        current = self._current_connection
        if current is not None:
            yield current
            return
        with self._translate_errors(), self.engine.connect() as connection:
            yield connection

    def read_rows(self, query: Executable) -> Sequence[Any]:
        """Returns the rows of one query."""
        with self.read() as connection:
            return connection.execute(query).all()

    def read_dicts(self, query: Executable) -> list[dict[str, Any]]:
        """Returns the rows of one query by column."""
        return [dict(row._mapping) for row in self.read_rows(query)]  # noqa: SLF001 SQLAlchemy's public name

    def read_value(self, query: Executable) -> Any:
        """Returns the first column of the first row, None without rows."""
        with self.read() as connection:
            return connection.execute(query).scalar()

    @contextmanager
    def write(self, *, durable: bool = False) -> Iterator[Connection]:
        """Yields a connection whose changes are all committed or, after an exception, all rolled back.

        Inside a `batch` they are committed with the batch, and as durable as it.
        """
        if self.read_only:
            raise StoreError(f"store {self.location} is open for reading only")
        current = self._current_connection
        if current is not None:
            with self._translate_errors(), current.begin_nested():
                yield current
            return
        with self._write_lock, self._translate_errors():
            counter, fence = self._commit_counter if durable else None, self._fence
            if fence is not None:
                fence.prepare()
            with self._write_engines[durable].begin() as connection:
                if fence is not None:
                    fence.check(connection)
                num_commits = 0 if counter is None else counter.count(connection)
                yield connection
            if fence is not None:
                fence.finish()
            if counter is not None:
                counter.save(num_commits)

    @contextmanager
    def batch(self, *, durable: bool = False) -> Iterator[None]:
        """Groups this thread's calls in one transaction; other writers wait."""
        with self.write(durable=durable) as connection:
            outer_connection, self._thread_batch.connection = self._current_connection, connection
            try:
                yield
            finally:
                self._thread_batch.connection = outer_connection

    def check(self, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        """Checks the pages of a SQLite file; of a large one those that can be read in this time.

        Raises:
            StoreError: it is damaged.
        """
        if self.engine.dialect.name != "sqlite":
            return
        with self.read() as connection:
            driver: Any = connection.connection.driver_connection
            timer = threading.Timer(timeout_s, driver.interrupt)
            timer.start()
            try:
                findings = list(connection.exec_driver_sql("PRAGMA quick_check(1)").scalars())
            except OperationalError as error:
                if getattr(error.orig, "sqlite_errorname", "") != "SQLITE_INTERRUPT":
                    raise
                return
            finally:
                timer.cancel()
                timer.join()  # a late interrupt would hit the next statement
        if findings != ["ok"]:
            self.damage = StoreError(f"store {self.location} {_ADVICE['SQLITE_CORRUPT']} ({findings[0]})")
            raise self.damage

    def sync(self) -> None:
        """Returns when every committed transaction is durable: one fsync, and no lock.

        A database server makes each commit durable itself.

        Raises:
            StoreFullError: no room.
            StoreError: the disk cannot take it.
        """
        if self.engine.dialect.name != "sqlite":
            return
        # What the WAL no longer holds is durable in the database: SQLite ensures that before it reuses the WAL.
        # SQLite's locks are on the other two files, so closing this one releases none.
        wal = Path(f"{Path(self.location).resolve()}-wal")
        try:
            handle = os.open(wal, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fdatasync(handle)
            finally:
                os.close(handle)
        except FileNotFoundError:  # no connection is open any more, and the database has all
            return
        except OSError as error:
            raise make_store_error(wal, error) from error

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            with translate_errors(self.location):
                yield
        except StoreError as error:
            if self.damage is None and _is_damage(error):
                self.damage = error
            raise

    @property
    def _current_connection(self) -> Connection | None:
        return getattr(self._thread_batch, "connection", None)

    def _upgrade_if_needed(self) -> None:
        with self.engine.connect() as connection:
            revision = _read_revision(connection, self.location)
        if revision == SCHEMA_REVISION:
            return
        if self.read_only:
            raise StoreError(
                f"store {self.location} is of revision {revision}, this program reads {SCHEMA_REVISION}; "
                "start its coordinator once to upgrade it"
            )
        with self._write_engines[True].begin() as connection:
            # Another process may have upgraded it during the wait for the lock; Alembic then finds nothing to do.
            _upgrade(connection)


class Repository:
    """Methods of the store on a group of tables."""

    def __init__(self, database: Database) -> None:
        self.database = database


def get_sqlite_path(url_or_path: str | Path) -> Path | None:
    """Returns the file of a SQLite store, None for a store on a database server; raises as `Database.open`."""
    url = _parse_url(url_or_path)
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def has_password(url_or_path: str) -> bool:
    """Returns whether a store's address contains a password; raises as `Database.open`."""
    return _parse_url(url_or_path).password is not None


def _parse_url(url_or_path: str | Path) -> URL:
    if isinstance(url_or_path, Path) or "://" not in url_or_path:
        return URL.create("sqlite", database=str(url_or_path))
    try:
        url = make_url(url_or_path)
        backend = url.get_backend_name()
    except (ArgumentError, NoSuchModuleError):
        raise StoreError("store URL is malformed; expected a path or postgresql://user@host/database") from None
    if backend == "sqlite" and url.database in {None, "", ":memory:"}:
        raise StoreError("the store needs a file, an SQLite database in memory is not shared between threads")
    if backend != "sqlite" and url.drivername not in {"postgresql", POSTGRES_DRIVER}:
        raise StoreError(
            f"store URL begins with {url.drivername}; expected a path or postgresql://user@host/database"
        )
    return url if backend == "sqlite" else url.set(drivername=POSTGRES_DRIVER)


def _prepare_file(path: Path, *, read_only: bool) -> None:
    if not path.parent.is_dir():
        raise StoreError(f"store {path} cannot be opened: no directory {path.parent}")
    if read_only:
        if not path.is_file():
            raise StoreError(f"no store at {path}; start a coordinator there first, or name another --dir")
        return
    try:
        # Created before SQLite opens it: its -wal and -shm files inherit this mode. An existing file is not opened
        # here: closing any descriptor of it would drop the locks of this process's other connections.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise StoreError(f"store {path} cannot be opened: {error.strerror}") from error


def _make_engine(url: URL, *, read_only: bool, connect_options: Mapping[str, int]) -> Engine:
    if url.get_backend_name() != "sqlite":
        try:
            options = {"connect_timeout": CONNECT_TIMEOUT_S, **connect_options}
            engine = create_engine(url, pool_pre_ping=True, connect_args=options)
        except ImportError as error:
            raise MissingPackageError(
                f"a store in PostgreSQL needs psycopg, which cannot be imported ({error}); "
                f"install it with: {format_install_command('psycopg')}"
            ) from None
        return engine.execution_options(postgresql_readonly=True) if read_only else engine
    if read_only:
        uri = Path(str(url.database)).absolute().as_uri()
        url = URL.create("sqlite", database=uri, query={"mode": "ro", "uri": "true"})
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _on_connect_read_only if read_only else _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _record: object) -> None:
    # The driver's own BEGIN comes too late for DDL and reads; `_on_begin` sends it.
    connection.isolation_level = None
    _enable_wal(connection)
    connection.execute("PRAGMA foreign_keys = ON")


def _enable_wal(connection: Any) -> None:
    """Switches to WAL mode, with retries: SQLite itself does not wait when another program switches too."""
    pause = threading.Event()
    for _ in range(int(BUSY_TIMEOUT_S / WAL_RETRY_S)):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            pause.wait(WAL_RETRY_S)
        else:
            return
    connection.execute("PRAGMA journal_mode = WAL")


def _on_connect_read_only(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA query_only = ON")


def _on_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("edgefl_writes"):
        connection.exec_driver_sql("BEGIN")
        return
    # In WAL mode FULL costs one fsync a commit and NORMAL none; both survive a crash of the process.
    connection.exec_driver_sql(f"PRAGMA synchronous = {'FULL' if options.get('edgefl_durable') else 'NORMAL'}")
    # IMMEDIATE: two readers that both became writers would deadlock.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _read_revision(connection: Connection, location: str) -> str | None:
    """Returns the schema's revision, None for an empty database."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return None
    revision = None
    if _VERSION_TABLE in tables:
        revision = connection.execute(text(f"SELECT version_num FROM {_VERSION_TABLE}")).scalar()  # noqa: S608 a constant
    if revision is None or not str(revision).isdigit():
        raise StoreError(
            f"{location} is a database, but not of edgefl: its tables are {', '.join(sorted(tables)[:5])}"
        )
    return check_revision(str(revision), location)


def check_revision(revision: str, location: object) -> str:
    """Returns the revision of a store that this program can read, perhaps after an upgrade.

    Raises:
        StoreTooNewError: a newer edgefl wrote it.
        StoreError: an edgefl before 0.2 wrote it.
    """
    if int(revision) > int(SCHEMA_REVISION):
        raise StoreTooNewError(
            f"store {location} was written by a newer edgefl (revision {revision}, this program knows "
            f"{SCHEMA_REVISION}); update edgefl"
        )
    if int(revision) < int(FIRST_REVISION):
        raise StoreError(
            f"store {location} was written by an edgefl before 0.2 (revision {revision}, this program knows "
            f"{FIRST_REVISION} and later); start a new one"
        )
    return revision


def _upgrade(connection: Connection) -> None:
    # Imported here: only a new or old database needs Alembic, and it takes a while to load.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    directory = str(Path(__file__).parent / "migrations")
    config.set_main_option("script_location", directory.replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
