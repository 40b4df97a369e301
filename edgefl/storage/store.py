"""The store of a coordinator: devices, runs and their history in one database."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from edgefl.storage.database import Database
from edgefl.storage.deployment_rows import DeploymentRows
from edgefl.storage.fleet_rows import FleetRows
from edgefl.storage.heartbeat_rows import HeartbeatRows
from edgefl.storage.installation_rows import InstallationRows
from edgefl.storage.retention import Retention
from edgefl.storage.run_rows import RunRows


class Store(FleetRows, RunRows, HeartbeatRows, DeploymentRows, InstallationRows, Retention):
    """Everything that is remembered; safe to use from several threads and next to other processes."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.database = database

    @classmethod
    def open(cls, url_or_path: str | Path, *, read_only: bool = False) -> Self:
        """Returns the store in this file or at this SQLAlchemy URL; see `Database.open`."""
        return cls(Database.open(url_or_path, read_only=read_only))

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def batch(self, *, durable: bool = False) -> AbstractContextManager[None]:
        """Makes one transaction of the calls inside the `with` block: all are kept, or none."""
        return self.database.batch(durable=durable)

    def sync(self) -> None:
        """Returns when everything that was written is durable; see `Database.sync`."""
        self.database.sync()
