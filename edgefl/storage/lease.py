"""Lease of a store in PostgreSQL: of the coordinators of one fleet, on several hosts, one is active.

The lease is a row with an epoch, which grows at each take-over, and a time of expiry by the database's clock, so
that the hosts' clocks do not matter. Its holder renews it; another host takes it over once it has expired. The epoch
is the fencing token: each transaction of the holder locks the row of its epoch first, so that a holder that was
frozen and wakes after a take-over can commit nothing. That lock lets renewals pass, but not a take-over; a holder
that freezes in the middle of a transaction is cut off by the server.

Source: Gray and Cheriton, Leases, SOSP 1989; the fencing token as in Burrows, The Chubby lock service, OSDI 2006.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Integer,
    MetaData,
    Table,
    Text,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from edgefl.core.errors import LeaseLostError, StoreError, StoreTooNewError, UsageError
from edgefl.storage.database import Database

TTL_S = 4.0
RENEW_INTERVAL_S = 1.0
_CUT_OFF_MS = 3000
"""A transaction that is idle for so long is ended by the server; below `TTL_S`, so that it delays no take-over."""
_CONNECT_OPTIONS = {
    "connect_timeout": 2, "tcp_user_timeout": 3000,
    "keepalives": 1, "keepalives_idle": 1, "keepalives_interval": 1, "keepalives_count": 3,
}  # fmt: skip
"""A server whose packets are dropped is given up within about `TTL_S`, in seconds but for the milliseconds of the
second; 2 s is the least that the driver takes."""
_FORMAT, _ROW = 1, 1
_CREATE_LOCK = 0x65646765
"""Number of the advisory lock for creating the tables: "edge"."""

FAILOVER_TABLES = MetaData()
"""Tables that only a fleet with several hosts has; they are no part of the public schema."""
_LEASE = Table(
    "coordinator_lease",
    FAILOVER_TABLES,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("format", Integer, nullable=False),
    # Unique, so that a change of it takes the lock that conflicts with FOR KEY SHARE; a renewal takes a weaker one.
    Column("epoch", BigInteger, nullable=False, unique=True),
    Column("holder", Text, nullable=False),
    Column("host_id", Text, nullable=False),
    Column("ca_fingerprint", Text, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Column("is_mirrored", Boolean, nullable=False),
)


class Lease:
    """Lease of a store, not held at first. Thread-safe once it is held.

    Args:
        database: of the store, on a PostgreSQL server; used by the lease alone.
        holder: this host, for messages of the others.
        host_id: of this host's directory and no other.
        ca_fingerprint: of the fleet's CA, which all its hosts have.

    Attributes:
        epoch: of this holder, from 1; 0 while it is not held.
        active_holder: who held it at the last try; empty for nobody.
        is_mirrored: whether a first holder's directory is in the store in whole, by the last try.

    Raises:
        UsageError: the store is in SQLite.
        StoreTooNewError: a newer edgefl made the tables.
        StoreError: the database cannot be used.
    """

    def __init__(self, database: Database, holder: str, *, host_id: str, ca_fingerprint: str) -> None:
        self.database, self.holder = database, holder
        self._host_id, self._ca_fingerprint = host_id, ca_fingerprint
        self.epoch, self.active_holder, self.is_mirrored = 0, "", False
        if database.engine.dialect.name != "postgresql":
            raise UsageError("a second host needs a store on PostgreSQL: --store postgresql://USER@HOST/DATABASE")
        with database.write() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(_CREATE_LOCK)))
            FAILOVER_TABLES.create_all(connection)
            row: dict[str, object] = {"id": _ROW, "format": _FORMAT, "epoch": 0, "holder": "", "is_mirrored": False}
            row |= {"host_id": "", "ca_fingerprint": ""}
            row["expires_at"] = func.clock_timestamp()
            connection.execute(insert(_LEASE).values(row).on_conflict_do_nothing())
        found = database.read_value(select(_LEASE.c.format))
        if found != _FORMAT:
            raise StoreTooNewError(f"the lease in store {database.location} has format {found}, not {_FORMAT}")

    @classmethod
    def open(cls, url: str | Path, holder: str, *, host_id: str, ca_fingerprint: str) -> Lease:
        """Returns the lease of the store at this URL; raises as the class does."""
        database = Database.connect(url, connect_options=_CONNECT_OPTIONS)
        try:
            return cls(database, holder, host_id=host_id, ca_fingerprint=ca_fingerprint)
        except BaseException:  # an interrupt too: its connections are closed
            database.close()
            raise

    def close(self) -> None:
        """Closes the connections; the lease itself stays until it expires or is released."""
        self.database.close()

    def try_acquire(self, ttl_s: float = TTL_S) -> bool:
        """Takes the lease if it has expired; returns whether it is held now.

        Raises:
            UsageError: the store is that of another fleet.
            StoreError: the database cannot be used, or the first holder died before its directory was in the store.
        """
        # Read without a lock first: waiting hosts must not delay the holder.
        is_live = _LEASE.c.expires_at > func.clock_timestamp()
        row = self.database.read_rows(select(_LEASE, is_live.label("is_live")))[0]
        if row.ca_fingerprint not in {"", self._ca_fingerprint}:
            raise UsageError(
                f"store {self.database.location} belongs to a fleet whose CA has the fingerprint "
                f"{row.ca_fingerprint[:12]}…, this host's has {self._ca_fingerprint[:12]}…; name this fleet's "
                "--store, or restore a backup of that fleet here"
            )
        self.active_holder, self.is_mirrored = row.holder if row.is_live else "", row.is_mirrored
        if row.is_live:
            return False
        if row.epoch and not row.is_mirrored and row.host_id not in {"", self._host_id}:
            raise StoreError(
                f"{row.holder} ended before its directory was in the store; start its coordinator first, then this"
            )
        taking = (
            update(_LEASE)
            .where(_LEASE.c.epoch == row.epoch, _LEASE.c.expires_at <= func.clock_timestamp())
            .values(epoch=row.epoch + 1, holder=self.holder, expires_at=_compute_expiry(ttl_s))
            .values(host_id=self._host_id, ca_fingerprint=self._ca_fingerprint)
        )
        with self._write() as connection:
            if connection.execute(taking).rowcount != 1:  # another host was faster
                return False
        self.epoch, self.active_holder = row.epoch + 1, self.holder
        return True

    def renew(self, ttl_s: float = TTL_S) -> None:
        """Extends the lease.

        Raises:
            LeaseLostError: another host has taken it over.
            StoreError: the database cannot be used.
        """
        renewing = update(_LEASE).where(_LEASE.c.epoch == self.epoch).values(expires_at=_compute_expiry(ttl_s))
        with self._write() as connection:
            if connection.execute(renewing).rowcount != 1:
                raise self._create_error()

    def record_mirrored(self) -> None:
        """Records that the holder's directory is in the store."""
        with self._write() as connection:
            connection.execute(update(_LEASE).where(_LEASE.c.epoch == self.epoch).values(is_mirrored=True))
        self.is_mirrored = True

    def release(self) -> None:
        """Lets it expire at once, so that another host takes over without waiting."""
        with self._write() as connection:
            expiring = update(_LEASE).where(_LEASE.c.epoch == self.epoch).values(expires_at=func.clock_timestamp())
            connection.execute(expiring)

    def withdraw(self) -> None:
        """Gives back a lease whose holder's directory is not to be in the store; any host may then be the first."""
        with self._write() as connection:
            connection.execute(
                update(_LEASE)
                .where(_LEASE.c.epoch == self.epoch, ~_LEASE.c.is_mirrored)
                .values(host_id="", ca_fingerprint="", expires_at=func.clock_timestamp())
            )

    def check(self, connection: Connection) -> None:
        """Checks in a transaction that it is held, and prevents a take-over until that ends.

        Raises:
            LeaseLostError: another host has taken it over.
        """
        cut_off = func.set_config("idle_in_transaction_session_timeout", str(_CUT_OFF_MS), True)
        holding = select(_LEASE.c.epoch, cut_off).where(_LEASE.c.epoch == self.epoch)
        if connection.execute(holding.with_for_update(read=True, key_share=True)).first() is None:
            raise self._create_error()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """Yields a connection of a transaction that the server ends if this process freezes in it."""
        with self.database.write() as connection:
            connection.execute(select(_cut_off()))
            yield connection

    def _create_error(self) -> LeaseLostError:
        return LeaseLostError(
            f"another host has taken over the fleet: the lease of epoch {self.epoch} is over, and nothing more is "
            "written from here; start this coordinator again, and it stands by"
        )


def _cut_off() -> ColumnElement[str]:
    return func.set_config("idle_in_transaction_session_timeout", str(_CUT_OFF_MS), True)


def _compute_expiry(ttl_s: float) -> object:
    return func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, ttl_s)
