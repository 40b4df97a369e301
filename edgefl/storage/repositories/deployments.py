"""Repository of deployments; every write is durable, since no journal could rebuild it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, func, insert, or_, select, update

from edgefl.core.errors import NotFoundError
from edgefl.storage.database import Database
from edgefl.storage.repositories.deployment_records import (
    DeploymentDeviceRecord,
    DeploymentRecord,
    RolloutStage,
    RolloutStatus,
)
from edgefl.storage.repositories.sanitise import to_columns, to_storable
from edgefl.storage.repositories.upsert import insert_new
from edgefl.storage.tables import DeploymentDeviceTable, DeploymentTable

_OPEN_STATUSES = (RolloutStatus.PREPARING, RolloutStatus.CANARY, RolloutStatus.ROLLING)
_UNANSWERED_STAGES = (RolloutStage.NOTIFIED, RolloutStage.REVERTING)


class DeploymentRepository:
    """The store's methods on deployments."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_deployment(self, record: DeploymentRecord, device_ids: Sequence[str]) -> None:
        """Adds a deployment with all devices pending; pending devices of older ones are superseded."""
        with self._database.batch(durable=True), self._database.write() as connection:
            older = (
                update(DeploymentDeviceTable)
                .where(
                    DeploymentDeviceTable.device_id.in_(device_ids),
                    DeploymentDeviceTable.state.in_([RolloutStage.PENDING, RolloutStage.NOTIFIED]),
                )
                .values(state=str(RolloutStage.SUPERSEDED))
            )
            connection.execute(older)
            connection.execute(insert(DeploymentTable), to_columns(record))
            self.add_deployment_devices(record.deployment_id, device_ids, RolloutStage.PENDING)

    def add_deployment_devices(self, deployment_id: str, device_ids: Sequence[str], state: RolloutStage) -> None:
        """Adds devices to a deployment; those that it has already stay unchanged."""
        rows = [
            to_columns(DeploymentDeviceRecord(deployment_id=deployment_id, device_id=device_id, state=state))
            for device_id in device_ids
        ]
        with self._database.write(durable=True) as connection:
            insert_new(connection, DeploymentDeviceTable, rows, ("deployment_id", "device_id"))

    def get_deployment(self, deployment_id: str) -> DeploymentRecord:
        """Returns one deployment by its id or a prefix of it.

        Raises:
            NotFoundError: none or several match.
        """
        exact = select(DeploymentTable.__table__).where(DeploymentTable.deployment_id == deployment_id)
        by_prefix = select(DeploymentTable.__table__).where(
            DeploymentTable.deployment_id.startswith(deployment_id, autoescape=True)
        )
        with self._database.read() as connection:
            rows = connection.execute(exact).all() or connection.execute(by_prefix.limit(2)).all()
        if len(rows) != 1:
            ambiguity = f"several deployments begin with {deployment_id!r}; say more of it"
            raise NotFoundError(ambiguity if rows else f"no deployment {deployment_id!r}; `edgefl model deployments`")
        return _to_record(rows[0])

    def list_deployments(self, *, limit: int | None = None) -> list[DeploymentRecord]:
        """Returns the deployments, newest first."""
        query = select(DeploymentTable.__table__).order_by(
            DeploymentTable.created_at.desc(), DeploymentTable.deployment_id.desc()
        )
        with self._database.read() as connection:
            return [_to_record(row) for row in connection.execute(query.limit(limit))]

    def list_open_deployments(self) -> list[DeploymentRecord]:
        """Returns those that are not final, or with a device that has work left; oldest first."""
        waiting = select(DeploymentDeviceTable.deployment_id).where(
            DeploymentDeviceTable.state.in_(map(str, _UNANSWERED_STAGES))
        )
        query = (
            select(DeploymentTable.__table__)
            .where(
                or_(DeploymentTable.status.in_(map(str, _OPEN_STATUSES)), DeploymentTable.deployment_id.in_(waiting))
            )
            .order_by(DeploymentTable.created_at)
        )
        with self._database.read() as connection:
            return [_to_record(row) for row in connection.execute(query)]

    def update_deployment(self, deployment_id: str, **values: Any) -> None:
        """Updates columns of a deployment."""
        statement = (
            update(DeploymentTable)
            .where(DeploymentTable.deployment_id == deployment_id)
            .values(**to_storable(values))
        )
        with self._database.write(durable=True) as connection:
            connection.execute(statement)

    def list_deployment_devices(self, deployment_id: str) -> list[DeploymentDeviceRecord]:
        """Returns the devices of a deployment by name."""
        table = DeploymentDeviceTable.__table__
        query = select(table).where(DeploymentDeviceTable.deployment_id == deployment_id)
        with self._database.read() as connection:
            return [
                _to_device_record(row) for row in connection.execute(query.order_by(DeploymentDeviceTable.device_id))
            ]

    def list_device_deployments(self, device_id: str) -> list[DeploymentDeviceRecord]:
        """Returns one device's rows of every deployment, newest first."""
        query = (
            select(DeploymentDeviceTable.__table__)
            .join(DeploymentTable, DeploymentTable.deployment_id == DeploymentDeviceTable.deployment_id)
            .where(DeploymentDeviceTable.device_id == device_id)
            .order_by(DeploymentTable.created_at.desc(), DeploymentTable.deployment_id.desc())
        )
        with self._database.read() as connection:
            return [_to_device_record(row) for row in connection.execute(query)]

    def count_deployment_devices(self) -> dict[str, dict[str, int]]:
        """Returns the number of devices by deployment and state."""
        query = select(DeploymentDeviceTable.deployment_id, DeploymentDeviceTable.state, func.count()).group_by(
            DeploymentDeviceTable.deployment_id, DeploymentDeviceTable.state
        )
        counts: dict[str, dict[str, int]] = {}
        with self._database.read() as connection:
            for deployment_id, state, number in connection.execute(query):
                counts.setdefault(deployment_id, {})[state] = number
        return counts

    def update_deployment_devices(self, deployment_id: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Updates columns of a deployment's devices, by device, in one transaction."""
        with self._database.write(durable=True) as connection:
            for device_id, values in changes.items():
                statement = update(DeploymentDeviceTable).where(
                    DeploymentDeviceTable.deployment_id == deployment_id, DeploymentDeviceTable.device_id == device_id
                )
                connection.execute(statement.values(**to_storable(values)))

    def get_running_models(self) -> dict[str, str]:
        """Returns each device's last known model, of the newest deployment that it has switched to."""
        query = (
            select(DeploymentDeviceTable.device_id, DeploymentTable.model)
            .join(DeploymentTable, DeploymentTable.deployment_id == DeploymentDeviceTable.deployment_id)
            .where(DeploymentDeviceTable.state == str(RolloutStage.RUNNING))
            .order_by(DeploymentTable.created_at)
        )
        with self._database.read() as connection:
            return {str(row.device_id): str(row.model) for row in connection.execute(query)}


def _to_record(row: Row[Any]) -> DeploymentRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    devices = values["devices"]
    return DeploymentRecord(
        **{
            **values,
            "status": RolloutStatus(values["status"]),
            "devices": None if devices is None else tuple(devices),
        }
    )


def _to_device_record(row: Row[Any]) -> DeploymentDeviceRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 as above
    values.pop("id")
    return DeploymentDeviceRecord(**{**values, "state": RolloutStage(values["state"])})
