"""Deployments in the store; all of it is durable, since no journal could rebuild it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, func, insert, or_, select, update

from edgefl.errors import NotFoundError
from edgefl.storage.database import Database
from edgefl.storage.deployment_records import (
    DeploymentDeviceRecord,
    DeploymentRecord,
    DeploymentStatus,
    DeviceStage,
)
from edgefl.storage.models import Deployment, DeploymentDevice
from edgefl.storage.plain import columns_of, storable
from edgefl.storage.upsert import insert_new

_OPEN = (DeploymentStatus.PREPARING, DeploymentStatus.CANARY, DeploymentStatus.ROLLING)
_WAITING = (DeviceStage.TOLD, DeviceStage.REVERTING)


class DeploymentRows:
    """The store's part about deployments."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_deployment(self, record: DeploymentRecord, device_ids: Sequence[str]) -> None:
        """Keeps a new deployment whose devices are all held; what older ones still had for them is superseded."""
        with self._database.batch(durable=True), self._database.write() as connection:
            older = (
                update(DeploymentDevice)
                .where(
                    DeploymentDevice.device_id.in_(device_ids),
                    DeploymentDevice.state.in_([DeviceStage.HELD, DeviceStage.TOLD]),
                )
                .values(state=str(DeviceStage.SUPERSEDED))
            )
            connection.execute(older)
            connection.execute(insert(Deployment), columns_of(record))
            self.add_deployment_devices(record.deployment_id, device_ids, DeviceStage.HELD)

    def add_deployment_devices(self, deployment_id: str, device_ids: Sequence[str], state: DeviceStage) -> None:
        """Adds devices to a deployment; those that it has already stay as they are."""
        rows = [
            columns_of(DeploymentDeviceRecord(deployment_id=deployment_id, device_id=device_id, state=state))
            for device_id in device_ids
        ]
        with self._database.write(durable=True) as connection:
            insert_new(connection, DeploymentDevice, rows, ("deployment_id", "device_id"))

    def deployment(self, deployment_id: str) -> DeploymentRecord:
        """Returns one deployment, by its id or the beginning of one.

        Raises:
            NotFoundError: there is none, or several begin so.
        """
        exact = select(Deployment.__table__).where(Deployment.deployment_id == deployment_id)
        begins = select(Deployment.__table__).where(
            Deployment.deployment_id.startswith(deployment_id, autoescape=True)
        )
        with self._database.read() as connection:
            rows = connection.execute(exact).all() or connection.execute(begins.limit(2)).all()
        if len(rows) != 1:
            several = f"several deployments begin with {deployment_id!r}; say more of it"
            raise NotFoundError(several if rows else f"no deployment {deployment_id!r}; `edgefl model deployments`")
        return _record(rows[0])

    def deployments(self, *, limit: int | None = None) -> list[DeploymentRecord]:
        """Returns the deployments, newest first."""
        query = select(Deployment.__table__).order_by(Deployment.created_at.desc(), Deployment.deployment_id.desc())
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query.limit(limit))]

    def open_deployments(self) -> list[DeploymentRecord]:
        """Returns those that are not final, or for which a device still has to do something; oldest first."""
        waiting = select(DeploymentDevice.deployment_id).where(DeploymentDevice.state.in_(map(str, _WAITING)))
        query = (
            select(Deployment.__table__)
            .where(or_(Deployment.status.in_(map(str, _OPEN)), Deployment.deployment_id.in_(waiting)))
            .order_by(Deployment.created_at)
        )
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query)]

    def set_deployment(self, deployment_id: str, **values: Any) -> None:
        """Changes columns of a deployment."""
        changed = update(Deployment).where(Deployment.deployment_id == deployment_id).values(**storable(values))
        with self._database.write(durable=True) as connection:
            connection.execute(changed)

    def deployment_devices(self, deployment_id: str) -> list[DeploymentDeviceRecord]:
        """Returns the devices of a deployment by name."""
        table = DeploymentDevice.__table__
        query = select(table).where(DeploymentDevice.deployment_id == deployment_id)
        with self._database.read() as connection:
            return [_device(row) for row in connection.execute(query.order_by(DeploymentDevice.device_id))]

    def device_deployments(self, device_id: str) -> list[DeploymentDeviceRecord]:
        """Returns what one device has of every deployment, newest first."""
        query = (
            select(DeploymentDevice.__table__)
            .join(Deployment, Deployment.deployment_id == DeploymentDevice.deployment_id)
            .where(DeploymentDevice.device_id == device_id)
            .order_by(Deployment.created_at.desc(), Deployment.deployment_id.desc())
        )
        with self._database.read() as connection:
            return [_device(row) for row in connection.execute(query)]

    def deployment_counts(self) -> dict[str, dict[str, int]]:
        """Returns how many devices are in which state, by deployment."""
        query = select(DeploymentDevice.deployment_id, DeploymentDevice.state, func.count()).group_by(
            DeploymentDevice.deployment_id, DeploymentDevice.state
        )
        counts: dict[str, dict[str, int]] = {}
        with self._database.read() as connection:
            for deployment_id, state, number in connection.execute(query):
                counts.setdefault(deployment_id, {})[state] = number
        return counts

    def set_deployment_devices(self, deployment_id: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Changes columns of a deployment's devices, by device, in one transaction."""
        with self._database.write(durable=True) as connection:
            for device_id, values in changes.items():
                changed = update(DeploymentDevice).where(
                    DeploymentDevice.deployment_id == deployment_id, DeploymentDevice.device_id == device_id
                )
                connection.execute(changed.values(**storable(values)))

    def running_models(self) -> dict[str, str]:
        """Returns the model that each device was last known to run: the newest deployment that it has switched to."""
        query = (
            select(DeploymentDevice.device_id, Deployment.model)
            .join(Deployment, Deployment.deployment_id == DeploymentDevice.deployment_id)
            .where(DeploymentDevice.state == str(DeviceStage.RUNNING))
            .order_by(Deployment.created_at)
        )
        with self._database.read() as connection:
            return {str(row.device_id): str(row.model) for row in connection.execute(query)}


def _record(row: Row[Any]) -> DeploymentRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    devices = values["devices"]
    return DeploymentRecord(
        **{
            **values,
            "status": DeploymentStatus(values["status"]),
            "devices": None if devices is None else tuple(devices),
        }
    )


def _device(row: Row[Any]) -> DeploymentDeviceRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 as above
    values.pop("id")
    return DeploymentDeviceRecord(**{**values, "state": DeviceStage(values["state"])})
