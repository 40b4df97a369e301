"""The store of a coordinator: devices, runs and their history in one database."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from edgefl.storage.database import Database
from edgefl.storage.repositories.deployments import DeploymentRepository
from edgefl.storage.repositories.fleet import FleetRepository
from edgefl.storage.repositories.heartbeats import HeartbeatRepository
from edgefl.storage.repositories.installations import InstallationRepository
from edgefl.storage.repositories.runs import RunRepository
from edgefl.storage.retention import Retention


class Store(
    FleetRepository, RunRepository, HeartbeatRepository, DeploymentRepository, InstallationRepository, Retention
):
    """Store of a coordinator; safe to use from several threads and next to other processes."""

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
        """Groups the calls inside the `with` block in one transaction: all are committed, or none."""
        return self.database.batch(durable=durable)

    def sync(self) -> None:
        """Returns when every write is durable; see `Database.sync`."""
        self.database.sync()
